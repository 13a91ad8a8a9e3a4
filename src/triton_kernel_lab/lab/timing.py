"""Stage ``timing``: raw samples of one kernel from several fresh processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.cases._base import DTYPES, Case, Cost, Dims, load
from triton_kernel_lab.lab.worker import INPUT_SETS
from triton_kernel_lab.project import MeasureParams, Project
from triton_kernel_lab.sources import stage_digest

__all__ = ["MeasurementError", "cost_record", "measure", "run"]

Cells = Iterable[tuple[Dims, str]]
_WORKER = "triton_kernel_lab.lab.worker"
_PREPARE = "triton_kernel_lab.lab.prepare"
# One process that compiles keeps about four cores busy; more than four of them wait for the device.
_CORES_EACH, _MOST_PREPARING = 4, 4


class MeasurementError(RuntimeError):
    """A measuring process failed; the old artifact stays."""


def cost_record(cost: Cost) -> dict[str, Any]:
    """A cost as an artifact keeps it."""
    return {
        "read": [{"name": name, "bytes": size} for name, size in cost.read.items()],
        "write": [{"name": name, "bytes": size} for name, size in cost.write.items()],
        "flop": cost.flop,
        "unit": cost.unit,
    }


@contextlib.contextmanager
def _started(plan: Mapping[str, Any]) -> Iterator[Callable[[Callable[[str], None]], dict[str, Any]]]:
    """A measuring process that has been started and waits; yields what lets it measure and returns its result."""
    with tempfile.TemporaryDirectory() as folder:
        plan_path, output, errors = Path(folder, "plan.json"), Path(folder, "raw.json"), Path(folder, "errors.txt")
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", _WORKER, str(plan_path), str(output)]
        # Into a file: a pipe that nobody reads yet would stop a talkative process.
        with (
            open(errors, "w", encoding="utf-8") as stream,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True
            ) as process,
        ):

            def measured(progress: Callable[[str], None]) -> dict[str, Any]:
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write("measure\n")
                    process.stdin.flush()
                for line in process.stdout:
                    progress(line.strip())
                if process.wait():
                    said = errors.read_text(encoding="utf-8").strip()
                    last = said.splitlines()[-1] if said else f"exit code {process.returncode}"
                    raise MeasurementError(
                        f"timing of {plan['kernel']}: process {plan['index']} failed: {last}\n{said}"
                    )
                result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
                return result

            try:
                yield measured
            finally:
                process.kill()


def _prepare(plan: Mapping[str, Any]) -> None:
    """Fill the compilers' caches with several processes, where there are cores for them.

    What fails there fails again, and is told, in the process that measures.
    """
    count = min((os.cpu_count() or 1) // _CORES_EACH, _MOST_PREPARING, len(plan["cells"]))
    if count < 2:
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plan_path, lock = Path(folder, "plan.json"), Path(folder, "lock")
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", _PREPARE, str(plan_path), str(lock)]
        for share in range(count):
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(share), str(count)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )


def _merge(cells: list[dict[str, Any]], fresh: list[dict[str, Any]], index: int) -> None:
    """Add one process's runs to the cells; a candidate that failed in any process has failed."""
    for cell in fresh:
        for candidate in cell["candidates"]:
            candidate["runs"] = [{"process": index, **run} for run in candidate["runs"]]
    if not cells:
        cells.extend(fresh)
        return
    for cell, more in zip(cells, fresh, strict=True):
        for candidate, other in zip(cell["candidates"], more["candidates"], strict=True):
            candidate["runs"] += other["runs"]
            if candidate["status"] == "ok" != other["status"]:
                candidate |= {"status": other["status"], "reason": f"process {index}: {other['reason']}"}


def measure(
    case: Case, cells: Cells, params: MeasureParams, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Time cells in ``params.processes`` fresh processes, one after the other.

    Returns the ``protocol``, ``processes`` and ``cells`` of a timing artifact.

    Raises:
        MeasurementError: a process failed.
    """
    cells = list(cells)
    wanted = [{"dims": list(dims), "dtype": dtype} for dims, dtype in cells]
    plans = [
        {
            "kernel": case.name,
            "index": index,
            # Far apart: within a process the seed counts up over the input sets.
            "seed": params.seed + 1000 * index,
            "cells": wanted,
            "samples": dict(params.samples),
            "sweep_bytes": params.sweep_bytes,
            "warmup_ms": params.warmup_ms,
        }
        for index in range(params.processes)
    ]
    measured: list[dict[str, Any]] = []
    processes = []
    with contextlib.ExitStack() as stack:
        # All are started at once, for loading PyTorch takes longer than measuring a cell. One that waits has
        # not touched the device yet.
        waiting = [stack.enter_context(_started(plan)) for plan in plans]
        _prepare(plans[0])
        for index, measure_in in enumerate(waiting):
            result = measure_in(progress)
            processes.append(result["process"])
            _merge(measured, result["cells"], index)
    for cell, (dims, dtype) in zip(measured, cells, strict=True):
        cell["cost"] = cost_record(case.cost(dims, DTYPES[dtype]))
    protocol = {"sweep_bytes": params.sweep_bytes, "input_sets": INPUT_SETS, "samples": dict(params.samples)}
    return {"protocol": protocol, "processes": processes, "cells": measured}


def run(project: Project, kernel: str, progress: Callable[[str], None] = lambda line: None) -> None:
    """Time a kernel that passed its correctness stage and write timing/<kernel>.json.

    On runner ``cpu`` nothing is timed and the artifact says so.
    """
    correctness = project.artifacts / "correctness" / f"{kernel}.json"
    mend = f"dvc repro correctness@{kernel}"
    if not artifacts.read(correctness, "correctness", mend=mend)["passed"]:
        raise MeasurementError(
            f"timing of {kernel}: {correctness}: $.passed is false, and a wrong kernel is not timed."
        )
    case = load(kernel)
    git = revisions.producer_git(project.root)
    if project.runner == "cpu":
        nothing = {"sweep_bytes": 0, "input_sets": 0, "samples": {}}
        body: dict[str, Any] = {"protocol": nothing, "processes": [], "cells": []}
        body |= {"status": "not_measured", "reason": "no CUDA device", "claim_kind": "exploratory"}
    else:
        # Without git nobody can tell what was measured.
        claim = "measured" if git["git_tree_dirty"] is False else "exploratory"
        body = measure(case, case.cells, project.measure, progress)
        body |= {"status": "measured", "reason": None, "claim_kind": claim}
    artifacts.write(
        project.artifacts / "timing" / f"{kernel}.json",
        {
            "artifact_kind": "timing",
            "schema_version": 1,
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "timing", kernel),
                **git,
            },
            "inputs": [
                artifacts.input_record(project.root, correctness),
                artifacts.input_record(project.root, project.artifacts / "environment.json"),
            ],
            "runner": project.runner,
            "kernel": kernel,
            **body,
        },
    )
