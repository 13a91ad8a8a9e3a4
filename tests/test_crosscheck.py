"""The cross-check with NVBench: what is asked of it, what follows from the samples, how it is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate_data
import pytest
import synthetic
import torch
from operator_checks import DEVICE

from triton_kernel_lab import artifacts, crosscheck
from triton_kernel_lab.analysis import crosscheck as figures
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.crosscheck import CrosscheckError
from triton_kernel_lab.lab import nvbenched
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report import crosscheck as report


def cell(clean_ns: int = 5000, dirty_ns: int = 5200, nvbench: list[int] | None = None) -> dict[str, Any]:
    """A measured cell as the process hands it over."""
    runs = [*gate_data.runs([clean_ns]), *gate_data.runs([dirty_ns], "cold_dirty")]
    name = {"kernel": "rms_norm", "shape": "128x1024", "dtype": "float16"}
    return name | {"runs": runs, "nvbench_samples_ns": [4990, 5150, 5160] if nvbench is None else nvbench}


# What follows from the samples.


def test_the_figures_are_the_medians_and_their_ratios() -> None:
    """5150 ns against 5000 clean and 5200 dirty."""
    assert figures.derived(cell()) == {
        "cold_clean_p50_ns": 5000,
        "cold_dirty_p50_ns": 5200,
        "nvbench_p50_ns": 5150,
        "nvbench_over_cold_clean_ratio": 1.03,
        "nvbench_over_cold_dirty_ratio": 0.9904,
    }


def test_what_was_not_sampled_has_no_ratio() -> None:
    """Where NVBench gave up, or our windows are all flagged, a figure is null and never 0."""
    assert figures.derived(cell(nvbench=[]))["nvbench_over_cold_clean_ratio"] is None
    flagged = cell()
    flagged["runs"][0]["flags"]["launch_exposed"] = list(range(gate_data.SAMPLES))
    found = figures.derived(flagged)
    assert (found["cold_clean_p50_ns"], found["nvbench_over_cold_clean_ratio"]) == (None, None)
    assert found["nvbench_over_cold_dirty_ratio"] == 0.9904


# What is asked of NVBench.


class Nvbench(types.ModuleType):
    """Plays cuda.bench and its results: runs each registered benchmark, notes it, hands back made-up samples."""

    def __init__(self) -> None:
        super().__init__("cuda.bench")
        self.State = object
        self.registered: dict[str, Callable[[Any], None]] = {}
        self.argv: list[str] = []
        self.calls = 0

    def register(self, benchmark: Callable[[Any], None]) -> Any:
        def set_name(name: str) -> None:
            self.registered[name] = benchmark

        return types.SimpleNamespace(set_name=set_name)

    def run_all_benchmarks(self, argv: list[str]) -> None:
        self.argv = argv
        for benchmark in self.registered.values():
            benchmark(self._state())

    def _state(self) -> Any:
        def execute(launch: Callable[[Any], None], batched: bool) -> None:
            assert batched is False
            launch(None)
            self.calls += 1

        stream = types.SimpleNamespace(addressof=lambda: 4096)
        return types.SimpleNamespace(get_stream=lambda: stream, exec=execute)

    def from_json(self, path: Path) -> dict[str, Any]:
        assert self.argv[-1] == str(path)
        return {name: [types.SimpleNamespace(samples=[5.15e-6, 4.99e-6])] for name in self.registered}


@pytest.fixture
def nvbench(monkeypatch: pytest.MonkeyPatch) -> Nvbench:
    made = Nvbench()
    results = types.ModuleType("cuda.bench.results")
    results.BenchmarkResult = made  # type: ignore[attr-defined]  # Plays the class and what it makes.
    package = types.ModuleType("cuda")
    package.bench = made  # type: ignore[attr-defined]
    for name, module in {"cuda": package, "cuda.bench": made, "cuda.bench.results": results}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address: address)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvbenched, "_device", lambda: DEVICE)

    class On:
        def __init__(self, stream: int) -> None:
            assert stream == 4096

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "stream", On)
    return made


def test_nvbench_runs_every_cell_on_its_own_stream(nvbench: Nvbench) -> None:
    """Each cell is one benchmark of the operator itself; seconds come back as whole nanoseconds."""
    cells = [
        {"kernel": "rms_norm", "dims": [3, 63], "dtype": "float16"},
        {"kernel": "swiglu", "dims": [3, 63], "dtype": "float32"},
    ]
    assert nvbenched.theirs(cells, 60, seed=7) == [[5150, 4990], [5150, 4990]]
    assert nvbench.calls == 2
    assert nvbench.argv[1:5] == ["--stopping-criterion", "sample-count", "--target-samples", "60"]


def test_without_nvbench_the_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing or has no build for this CUDA is a reason, and nothing is timed."""
    monkeypatch.setitem(sys.modules, "cuda.bench", None)
    plan, output = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text("{}")
    assert nvbenched.main([str(plan), str(output)]) == 0
    made = json.loads(output.read_text())
    assert made["cells"] == []
    assert made["unavailable"].startswith(("ModuleNotFoundError: ", "ImportError: "))


# The command.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "tree"
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20).root


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Project:
    """A copy of a sound synthetic project that a test may spoil."""
    return find_project(Path(shutil.copytree(original, tmp_path / "tree")))


def played(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Let the measuring process end with this result, or fail for None; returns the plans it is given."""
    plans: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "triton_kernel_lab.lab.nvbenched"]
        plans.append(json.loads(Path(command[3]).read_text()))
        if result is not None:
            Path(command[4]).write_text(json.dumps(result))
        return subprocess.CompletedProcess(
            command, 0 if result else 1, "", "" if result else "x\nRuntimeError: broken\n"
        )

    monkeypatch.setattr(crosscheck, "subprocess", types.SimpleNamespace(run=run))
    return plans


def test_the_artifact_holds_samples_and_figures(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed cell is asked for, and what comes back is written with its medians."""
    plans = played(monkeypatch, {"unavailable": None, "version": "0.3.0", "cells": [cell()]})
    made = artifacts.read(crosscheck.run(project, ["rms_norm"]), "crosscheck")
    assert made["status"] == "measured"
    assert made["protocol"]["nvbench_version"] == "0.3.0"
    assert made["cells"][0]["nvbench_over_cold_dirty_ratio"] == 0.9904
    assert {entry["kernel"] for entry in plans[0]["cells"]} == {"rms_norm"}
    # Outside git nobody can tell what was timed.
    assert made["claim_kind"] == "exploratory"


def test_an_unavailable_nvbench_is_a_status(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact says why there is nothing to compare with, and the report prints it."""
    played(monkeypatch, {"unavailable": "ImportError: no build", "version": None, "cells": []})
    made = artifacts.read(crosscheck.run(project))
    assert (made["status"], made["cells"]) == ("unavailable", [])
    assert report.section(made).endswith("Not measured (unavailable): NVBench does not import: ImportError: no build.")


def test_runner_cpu_is_not_asked(tmp_path: Path) -> None:
    """Without a GPU the artifact says not_requested."""
    found = synthetic.project(tmp_path, derive=False, measured=False, runner="cpu")
    assert artifacts.read(crosscheck.run(found))["status"] == "not_requested"


def test_a_failed_process_leaves_the_old_artifact(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash is one sentence with the process's last line, and nothing is overwritten."""
    played(monkeypatch, None)
    with pytest.raises(CrosscheckError, match="the measuring process failed: RuntimeError: broken"):
        crosscheck.run(project)
    assert not (project.artifacts / "crosscheck.json").exists()


# The report, and the chain behind it.


def edited(made: Artifact) -> None:
    made["cells"][0]["nvbench_p50_ns"] -= 1


def test_the_section_is_printed_and_verified(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table appears once the artifact is there; verify recomputes its figures and its cells."""
    played(monkeypatch, {"unavailable": None, "version": "0.3.0", "cells": [cell()]})
    path = crosscheck.run(project, ["rms_norm"])
    assert "results.md" in verify.run(project)[0]
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    text = (project.reports / "results.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| rms_norm |") and "5.150" in line]
    assert [part.strip() for part in row.strip("|").split("|")][3:] == ["5.000", "5.200", "5.150", "1.03", "0.99"]
    assert f"`artifacts/{project.runner}/crosscheck.json` sha256" in text
    synthetic.edit(path, edited)
    problem = verify.run(project)[0]
    assert problem.startswith(f"artifacts/{project.runner}/crosscheck.json: $.cells[0].nvbench_p50_ns: expected 5150")
