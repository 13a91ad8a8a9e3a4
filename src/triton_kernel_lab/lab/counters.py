"""Stage ``counters``: what the hardware counted of one cold call of each timed cell.

Counts only, never a duration: a profiled launch is slower than a free one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.cases._base import Case, Dims, load, shape_name
from triton_kernel_lab.lab import ncu
from triton_kernel_lab.lab.profiled import MARKER
from triton_kernel_lab.project import MeasureParams, Project
from triton_kernel_lab.sources import stage_digest

__all__ = ["CounterError", "count", "grouped", "run", "watched"]

CANDIDATES = ("triton",)


class CounterError(RuntimeError):
    """The profiled process failed by itself, or its launches do not fit its cells; the old artifact stays."""


def watched(
    case: Case,
    cells: Iterable[tuple[Dims, str]],
    candidates: Sequence[str],
    params: MeasureParams,
    profile: Callable[[Sequence[str]], ncu.Outcome],
) -> ncu.Outcome:
    """Hand ``profile`` the command that calls these cells once each; CounterError if that process failed by itself."""
    plan = {
        "kernel": case.name,
        "seed": params.seed,
        "sweep_bytes": params.sweep_bytes,
        "candidates": list(candidates),
        "cells": [{"dims": list(dims), "dtype": dtype} for dims, dtype in cells],
    }
    with tempfile.TemporaryDirectory() as folder:
        plan_path, done = Path(folder, "plan.json"), Path(folder, "done")
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
        outcome = profile([sys.executable, "-m", "triton_kernel_lab.lab.profiled", str(plan_path), str(done)])
        if not done.is_file() and "Traceback (most recent call last)" in outcome.errors:
            last = outcome.errors.strip().splitlines()[-1]
            raise CounterError(f"counters of {case.name}: the profiled process failed: {last}")
    return outcome


def grouped(launches: Sequence[ncu.Launch]) -> list[list[ncu.Launch]]:
    """The launches between two marks: those of one candidate in one cell."""
    groups: list[list[ncu.Launch]] = []
    for launch in launches:
        if launch.kernel.partition("(")[0] == MARKER:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    return groups


def count(
    case: Case,
    cells: Sequence[tuple[Dims, str]],
    candidates: Sequence[str],
    params: MeasureParams,
) -> dict[str, Any]:
    """The body of a counters artifact for these cells.

    Raises:
        CounterError: the profiled process failed, or the profiler's rows are not those of the cells.
    """
    outcome = watched(case, cells, candidates, params, ncu.profile)
    if outcome.status != "ok":
        return _nothing(outcome.status, outcome.reason, outcome.version)
    groups = grouped(outcome.launches)
    wanted = len(cells) * len(candidates)
    if len(groups) != wanted or not all(groups):
        raise CounterError(
            f"counters of {case.name}: expected launches for {wanted} calls, found {sum(map(bool, groups))}."
        )
    remaining = iter(groups)
    return {
        "counter_status": "ok",
        "reason": None,
        "protocol": _protocol(params.sweep_bytes, outcome.version),
        "cells": [
            {
                "shape": shape_name(dims),
                "dtype": dtype,
                "candidates": [
                    {"name": name, "launches": [launch.record() for launch in next(remaining)]} for name in candidates
                ],
            }
            for dims, dtype in cells
        ],
    }


def _nothing(status: str, reason: str | None, version: str | None = None) -> dict[str, Any]:
    return {"counter_status": status, "reason": reason, "protocol": _protocol(0, version), "cells": []}


def _protocol(sweep_bytes: int, version: str | None) -> dict[str, Any]:
    return {"sweep_bytes": sweep_bytes, "profiler": "ncu", "profiler_version": version, "metrics": dict(ncu.METRICS)}


def run(project: Project, kernel: str, progress: Callable[[str], None] = lambda line: None) -> None:
    """Count the timed cells of a kernel that passed its correctness stage and write counters/<kernel>.json.

    Where nothing can be counted the artifact says why. On runner ``cpu`` nothing is asked for.

    Raises:
        CounterError: the kernel is wrong, or the profiled process failed.
    """
    correctness = project.artifacts / "correctness" / f"{kernel}.json"
    if not artifacts.read(correctness, "correctness", mend=f"dvc repro correctness@{kernel}")["passed"]:
        raise CounterError(
            f"counters of {kernel}: {correctness}: $.passed is false, and a wrong kernel is not profiled."
        )
    git = revisions.producer_git(project.root)
    body: Mapping[str, Any] = _nothing("not_requested", "runner cpu has no GPU")
    if project.runner != "cpu":
        case = load(kernel)
        progress(f"{kernel}: {len(case.cells)} cells")
        body = count(case, case.cells, CANDIDATES, project.measure)
    # Without git nobody can tell what was counted, and where nothing was there is nothing to believe.
    sound = git["git_tree_dirty"] is False and body["counter_status"] == "ok"
    artifacts.write(
        project.artifacts / "counters" / f"{kernel}.json",
        {
            "artifact_kind": "counters",
            "schema_version": 1,
            "claim_kind": "measured" if sound else "exploratory",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "counters", kernel),
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
