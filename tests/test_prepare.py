"""Processes that compile before anything is timed: who does what, and who waits for whom."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from triton_kernel_lab.cases._base import load
from triton_kernel_lab.lab import candidates, prepare, timing
from triton_kernel_lab.lab.candidates import Candidate

HERE = Path(__file__).parent
BENCHMARK = """
import json, sys, time
from pathlib import Path
from torch._inductor.runtime.benchmarking import benchmarker
from triton_kernel_lab.lab.prepare import one_at_a_time

def benchmark(*arguments, **options):
    begun = time.monotonic_ns()
    time.sleep(0.1)
    return begun, time.monotonic_ns()

type(benchmarker).benchmark_gpu = benchmark
with one_at_a_time(Path(sys.argv[1])):
    print(json.dumps([benchmarker.benchmark_gpu(None) for _ in range(4)]))
"""


def test_benchmarks_of_two_processes_never_overlap(tmp_path: Path) -> None:
    """While one process times a configuration the other waits, whatever else it does."""
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path / "lock")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in processes]
    spans = sorted(tuple(span) for text in said for span in json.loads(text))
    assert len(spans) == 8
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))


def test_the_benchmark_is_put_back(tmp_path: Path) -> None:
    """Outside the context Inductor times as it always does."""
    from torch._inductor.runtime.benchmarking import benchmarker

    before = benchmarker.benchmark_gpu
    with prepare.one_at_a_time(tmp_path / "lock"):
        assert benchmarker.benchmark_gpu != before
    assert benchmarker.benchmark_gpu == before


def test_each_candidate_but_the_copy_is_called_and_a_failure_stops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be compiled is left to the process that measures, which tells why."""
    called: list[str] = []

    def call(name: str) -> Candidate:
        def run(*inputs: torch.Tensor) -> None:
            called.append(name)
            if name == "broken":
                raise RuntimeError("no such instruction")

        return Candidate(name, "anchor" if name == "copy" else "baseline", "torch", run)

    monkeypatch.setattr(candidates, "build", lambda *arguments: [call(name) for name in ("a", "broken", "copy", "b")])
    prepare.prepare_cell(load("swiglu"), (8, 128), torch.float16, 7, torch.device("cpu"))
    assert called == ["a", "broken", "b"]


@pytest.mark.parametrize(("cores", "processes"), [(2, 0), (8, 2), (16, 4), (128, 4)])
def test_cells_are_shared_out_where_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    """Every share is prepared once; where compiling would only take turns, nothing is started."""
    (tmp_path / "fake_prepare.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "Path(__file__).with_name(f'share-{sys.argv[3]}-of-{sys.argv[4]}').write_text(Path(sys.argv[1]).read_text())\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(timing, "_PREPARE", "fake_prepare")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    timing._prepare({"kernel": "swiglu", "cells": list(range(9))})
    shares = sorted(path.name for path in tmp_path.glob("share-*"))
    assert shares == [f"share-{index}-of-{processes}" for index in range(processes)]
