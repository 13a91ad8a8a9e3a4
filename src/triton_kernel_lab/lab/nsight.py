"""One cell under Nsight Compute in full: its report, its details as text, and its counts as JSON.

To understand a kernel, not to time it: sections need many replays of a launch,
each after a flush by the profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.cases._base import Case, Dims, shape_name
from triton_kernel_lab.lab import counters, ncu
from triton_kernel_lab.project import MeasureParams
from triton_kernel_lab.sources import stage_digest

__all__ = ["SECTIONS", "run"]

SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "InstructionStats",
)
_SWEEP_BYTES = 256 << 20
# Each replay starts as the first did, or all but the first would find the data in the cache.
_OPTIONS = ("--cache-control", "all", *(part for name in SECTIONS for part in ("--section", name)))


def run(
    case: Case, dims: Dims, dtype: str, output: Path, root: Path, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Profile one call and write ``output`` + .json, .ncu-rep and .txt; the last two only where there is a profile.

    Args:
        case, dims, dtype: the cell.
        output: path of the files without their suffix.
        root: a checkout, for what the record says of its sources.

    Returns:
        The record that was written as JSON.

    Raises:
        CounterError: the kernel itself failed.
    """
    git = revisions.producer_git(root)
    record, report, text = (output.with_name(output.name + suffix) for suffix in (".json", ".ncu-rep", ".txt"))
    for old in (report, text):
        # What an earlier run left must not stand beside this one's status.
        old.unlink(missing_ok=True)
    log(f"{case.name} {shape_name(dims)} {dtype}")
    outcome = _profile(case, dims, dtype, report, text)
    made = _body(case, dims, dtype, outcome) | {
        "files": [path.name for path in (record, report, text) if path == record or path.is_file()],
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": stage_digest(root, "counters", case.name),
            **git,
        },
    }
    artifacts.write(record, made)
    return made


def _profile(case: Case, dims: Dims, dtype: str, report: Path, text: Path) -> ncu.Outcome:
    params = MeasureParams(processes=1, samples={}, warmup_ms=0, sweep_bytes=_SWEEP_BYTES, seed=0)
    report.parent.mkdir(parents=True, exist_ok=True)
    outcome = counters.watched(
        case, [(dims, dtype)], ("triton",), params, lambda command: ncu.export(command, report, *_OPTIONS)
    )
    if outcome.status != "ok":
        return outcome
    outcome = ncu.load(report)
    if outcome.status == "ok":
        artifacts.write_text(text, outcome.text)
    return outcome


def _body(case: Case, dims: Dims, dtype: str, outcome: ncu.Outcome) -> dict[str, Any]:
    launches = [launch.record() for group in counters.grouped(outcome.launches) for launch in group]
    return {
        "artifact_kind": "nsight",
        "schema_version": 1,
        # A look into one kernel, and no claim of the report's.
        "claim_kind": "exploratory",
        "inputs": [],
        "kernel": case.name,
        "shape": shape_name(dims),
        "dtype": dtype,
        "counter_status": outcome.status,
        "reason": outcome.reason,
        "profiler_version": outcome.version,
        "sections": list(SECTIONS),
        "launches": launches,
    }
