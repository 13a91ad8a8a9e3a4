"""One command's measurement: correctness, then time, of chosen cells into one report.

Where the pipeline keeps raw samples of many processes in many artifacts, this
writes a single self-contained JSON file from one process, and can judge it
against an earlier one.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.analysis import stats

__all__ = ["BenchError", "Request", "run"]

REGIMES = {"cold": "cold_clean", "hot": "warm"}
METHOD = "CUDA event pair around one call, candidates interleaved, host kept ahead by a spin"
Log = Callable[[str], None]


class BenchError(RuntimeError):
    """Nothing could be measured; one sentence says why. ``exit_code`` is the process's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Request:
    """What to measure: names as on the command line.

    No shape means each kernel's own; no kernel means each of the registry that has such shapes.
    """

    kernels: Sequence[str]
    shapes: Sequence[str]
    dtypes: Sequence[str]
    cache_mode: str
    samples: int
    warmup_ms: int
    sweep_bytes: int
    seed: int


def _statistics(record: Mapping[str, Any], total_bytes: int) -> dict[str, Any]:
    """A timed candidate as a report keeps it: statistics and raw samples."""
    runs = [{"process": 0, **run} for run in record["runs"]]
    summary = stats.summarise(runs) if runs else None
    ok = record["status"] == "ok" and summary is not None and summary.stats is not None
    values = summary.stats if ok and summary else None
    reason = record["reason"] or (None if ok or summary is None else summary.reason)
    return {
        "name": record["name"],
        "role": record["role"],
        "served_by": record["served_by"],
        "status": record["status"] if record["status"] != "ok" else "ok" if ok else "invalid",
        "reason": reason,
        "stats": values,
        "logical_bytes_per_s": stats.rate_per_s(total_bytes, int(values["p50_ns"] or 0)) if values else None,
        "samples_ns": [value for run in runs for value in run["samples_ns"]],
    }


def _case(kernel: str, cell: Mapping[str, Any], timed: Mapping[str, Any]) -> dict[str, Any]:
    cost = timed["cost"]
    total = sum(item["bytes"] for item in (*cost["read"], *cost["write"]))
    candidates = [_statistics(record, total) for record in timed["candidates"]]
    p50 = {record["name"]: record["stats"]["p50_ns"] for record in candidates if record["stats"]}
    correctness = {key: cell[key] for key in ("passed", "failures", "limit", "triton", "eager", "torch_compile")}
    return {
        "kernel": kernel,
        "shape": cell["shape"],
        "dtype": cell["dtype"],
        "correctness": correctness,
        "cost": cost,
        "candidates": candidates,
        "speedup_over_torch_compile": stats.speedup(p50.get("torch_compile"), p50.get("triton")),
        "speedup_over_eager": stats.speedup(p50.get("eager"), p50.get("triton")),
    }


def _fitting(shapes: Sequence[str]) -> list[Any]:
    """The cases of the registry that every one of some shapes is a shape of."""
    from triton_kernel_lab.cases._base import load, parse_shape
    from triton_kernel_lab.project import kernel_names

    found = []
    for shape in shapes:
        parse_shape(shape)
    for case in map(load, kernel_names()):
        with contextlib.suppress(ValueError):
            for shape in shapes:
                case.parse_dims(shape)
            found.append(case)
    if not found:
        raise ValueError(f"shape {', '.join(shapes)}: expected shapes of one kernel, found none that has all of them.")
    return found


def run(request: Request, root: Path, log: Log) -> dict[str, Any]:
    """Check every cell, then time every cell; returns a ``report`` artifact.

    Raises:
        BenchError: there is no CUDA device, or a cell is wrong (exit code 2): then nothing is timed.
        ValueError: a kernel, shape or dtype is not known.
    """
    import torch

    from triton_kernel_lab.cases._base import DTYPES, find, shape_name
    from triton_kernel_lab.lab import cells
    from triton_kernel_lab.lab.environment import probe, runner_name
    from triton_kernel_lab.lab.window import Bench

    cases = [find(name) for name in request.kernels] or _fitting(request.shapes)
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype}: expected one of {', '.join(DTYPES)}.")
    wanted = [
        (case, dims, dtype)
        for case in cases
        for dims in ([case.parse_dims(shape) for shape in request.shapes] or case.timed)
        for dtype in request.dtypes
    ]
    if torch.cuda.device_count() == 0:
        raise BenchError(
            "No CUDA device is present, and nothing is timed without one; `make repro` rehearses the pipeline on a CPU."
        )
    # Asked first: what git refuses to tell must not cost a finished run.
    git = revisions.producer_git(root)
    checked = []
    for case, dims, dtype in wanted:
        log(f"check {case.name} {shape_name(dims)} {dtype}")
        cell = cells.check(case, dims, dtype)
        if not cell["passed"]:
            where = f"{case.name} {shape_name(dims)} {dtype}"
            raise BenchError(f"correctness: {where}: {cell['failures'][0]}; nothing was timed.", exit_code=2)
        checked.append(cell)
    regime = REGIMES[request.cache_mode]
    bench = Bench(request.sweep_bytes, request.warmup_ms, request.seed)
    measured = []
    for (case, dims, dtype), cell in zip(wanted, checked, strict=True):
        log(f"time {case.name} {shape_name(dims)} {dtype}")
        timed = cells.time(case, dims, dtype, bench, regime, request.samples, request.seed)
        measured.append(_case(case.name, cell, timed))
    return {
        "artifact_kind": "report",
        "schema_version": 1,
        "claim_kind": "measured" if git["git_tree_dirty"] is False else "exploratory",
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": _source_digest(root, [case.name for case in cases]),
            **git,
        },
        "inputs": [],
        "runner": runner_name(torch.cuda.get_device_name()),
        "environment": probe(device=torch.cuda.current_device()),
        "created_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "protocol": {
            "cache_mode": request.cache_mode,
            "regime": regime,
            "sweep_bytes": request.sweep_bytes,
            "seed": request.seed,
            "warmup_ms": request.warmup_ms,
            "samples": request.samples,
            "timing_method": METHOD,
        },
        "cases": measured,
    }


def _source_digest(root: Path, kernels: Sequence[str]) -> str:
    import hashlib

    from triton_kernel_lab.sources import stage_digest

    parts = (stage_digest(root, "timing", kernel) for kernel in kernels)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def render(report: Mapping[str, Any]) -> str:
    """The report's cases as a text table, microseconds at p50."""
    from tabulate import tabulate

    from triton_kernel_lab.report import units

    rows = []
    for case in report["cases"]:
        p50 = {record["name"]: record["stats"]["p50_ns"] for record in case["candidates"] if record["stats"]}
        speedup = case["speedup_over_torch_compile"]
        rows.append(
            [
                case["kernel"],
                case["shape"],
                case["dtype"],
                *(
                    units.microseconds(p50[name]) if name in p50 else "-"
                    for name in ("triton", "torch_compile", "eager")
                ),
                "-" if speedup is None else f"{speedup:.2f}x",
            ]
        )
    headers = [
        "kernel",
        "shape",
        "dtype",
        "Triton p50 us",
        "torch.compile p50 us",
        "eager p50 us",
        "over torch.compile",
    ]
    return tabulate(rows, headers, disable_numparse=True)


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the report where the command line says."""
    artifacts.write(path, report)
