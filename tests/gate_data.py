"""Small sound artifacts: what the tests of the gate, the revisions and the reader compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.evidence import Present
from triton_kernel_lab.artifacts import Artifact

RUNNER = "nvidia-h200"
CASES = {
    ("rms_norm", "128x1024", "float16"): 5000,
    ("rms_norm", "2048x4096", "bfloat16"): 12000,
    ("swiglu", "128x1024", "float16"): 6000,
}

DEVICE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "sm_count": 132,
    "memory_bytes": 150_000_000_000,
    "l2_bytes": 62_914_560,
    "ecc_enabled": True,
    "mig_enabled": False,
    "power_limit_mw": 700_000,
    "max_sm_clock_mhz": 1980,
    "max_memory_clock_mhz": 3201,
    "clock_policy": "default",
}
SOFTWARE: dict[str, Any] = {
    "driver": "580.1",
    "cuda_runtime": "13.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "ptxas": "13.0",
    "python": "3.11",
}


def header(kind: str, claim: str, **producer: Any) -> Artifact:
    return {
        "artifact_kind": kind,
        "schema_version": 1,
        "claim_kind": claim,
        "producer": {"package": "triton-kernel-lab", "version": "0.1.0", "source_sha256": "a" * 64, **producer},
        "inputs": [],
        "runner": RUNNER,
    }


def environment(**changed: Any) -> Artifact:
    """An environment; a keyword replaces a fact of the device or of the software."""
    device, software = (
        {fact: changed.get(fact, value) for fact, value in section.items()} for section in (DEVICE, SOFTWARE)
    )
    return header("environment", "measured") | {"device": device, "software": software, "interpreter": False}


def stats(p50_ns: int) -> dict[str, Any]:
    fixed: dict[str, Any] = {"samples": 200, "flagged": 0, "processes": 1, "p99_ns": None, "tmean_ns": float(p50_ns)}
    return fixed | {f"{name}_ns": p50_ns for name in ("min", "p10", "p50", "p90", "p95", "max")}


def candidate(p50_ns: int | None, **changed: Any) -> dict[str, Any]:
    return {
        "name": "triton",
        "role": "triton",
        "served_by": "triton",
        "status": "ok" if p50_ns else "invalid",
        "reason": None if p50_ns else "12 % of the samples are flagged",
        "stats": stats(p50_ns) if p50_ns else None,
        "logical_bytes_per_s": None,
        **changed,
    }


def roofline(
    p50s: Mapping[tuple[str, str, str], int | None] = CASES, regime: str = "cold_clean", **changed: Any
) -> Artifact:
    """A roofline with one `triton` candidate a case; None makes it invalid."""
    return header("roofline", "derived") | {
        "status": "measured",
        "reason": None,
        "raw": [],
        "stale": [],
        "ceilings": None,
        "cells": [_cell(case, regime, p50_ns) for case, p50_ns in p50s.items()],
        **changed,
    }


def _cell(case: tuple[str, str, str], regime: str, p50_ns: int | None) -> dict[str, Any]:
    kernel, shape, dtype = case
    empty = ("attainable_ns", "vendor_ns", "speedup_over_torch_compile", "speedup_over_eager", "best_baseline")
    return {
        "kernel": kernel,
        "shape": shape,
        "dtype": dtype,
        "regime": regime,
        "logical_read_bytes": 1000,
        "logical_write_bytes": 900,
        "flop": 50,
        "class": "not_applicable",
        "candidates": [candidate(p50_ns, attainable_ratio=None)],
        **dict.fromkeys((*empty, "speedup_over_best")),
    }


def report(p50s: Mapping[tuple[str, str, str], int | None] = CASES, **changed: Any) -> Artifact:
    """A report with the same cases, in its own environment; a keyword replaces a part of it."""
    place = environment()
    return header("report", "measured", git_commit="b" * 40, git_tree_dirty=False) | {
        "environment": {"device": place["device"], "software": place["software"]},
        "created_at": "2026-01-02T03:04:05Z",
        "protocol": {
            "cache_mode": "cold",
            "regime": "cold_clean",
            "sweep_bytes": 1 << 28,
            "seed": 7,
            "warmup_ms": 100,
            "samples": 200,
            "timing_method": "cuda_event",
        },
        "cases": [_case(case, p50_ns) for case, p50_ns in p50s.items()],
        **changed,
    }


def _case(case: tuple[str, str, str], p50_ns: int | None) -> dict[str, Any]:
    kernel, shape, dtype = case
    error = {"max_error_ratio": 0.5, "rel_norm": 0.001, "max_abs": 0.01}
    limit = {"max_error_ratio": 1.0, "rel_norm": 0.01}
    return {
        "kernel": kernel,
        "shape": shape,
        "dtype": dtype,
        "correctness": {
            "passed": True,
            "failures": [],
            "limit": limit,
            "triton": error,
            "eager": error,
            "torch_compile": None,
        },
        "cost": {
            "read": [{"name": "x", "bytes": 900}, {"name": "weight", "bytes": 100}],
            "write": [{"name": "y", "bytes": 900}],
            "flop": 50,
            "unit": "float32",
        },
        "candidates": [candidate(p50_ns, samples_ns=[p50_ns] if p50_ns else [])],
        "speedup_over_torch_compile": None,
        "speedup_over_eager": None,
    }


COST: dict[str, Any] = {
    "read": [{"name": "x", "bytes": 900}, {"name": "weight", "bytes": 100}],
    "write": [{"name": "y", "bytes": 900}],
    "flop": 50,
    "unit": "float32",
}
SAMPLES = 20
COPY_NS = (10_000, 10_010, 9_990, 10_005, 9_995)


def runs(processes_ns: Sequence[int], regime: str = "cold_clean", calls: int = 1) -> list[dict[str, Any]]:
    """Runs in which every sample of a process takes the same time, in ns a call."""
    flags: dict[str, list[int]] = {"launch_exposed": [], "clock_low": [], "power_cap": [], "thermal": []}
    return [
        {
            "regime": regime,
            "process": index,
            "calls_per_sample": calls,
            "samples_ns": [ns * calls] * SAMPLES,
            "flags": {name: list(indices) for name, indices in flags.items()},
        }
        for index, ns in enumerate(processes_ns)
    ]


def timed(name: str, role: str, processes_ns: Sequence[int], regime: str, calls: int) -> dict[str, Any]:
    """A candidate of a timing artifact."""
    return {
        "name": name,
        "role": role,
        "served_by": "triton" if role == "triton" else "torch",
        "status": "ok",
        "reason": None,
        "launch": None,
        "runs": runs(processes_ns, regime, calls),
    }


def timing(
    kernel: str,
    cells: Mapping[tuple[str, str], Sequence[int]],
    copies: Sequence[int] | None = COPY_NS,
    regime: str = "cold_clean",
    calls: int = 1,
    **changed: Any,
) -> Artifact:
    """A timing artifact with each cell's times by process, and those of the copy beside them."""
    entries = []
    for (shape, dtype), times in cells.items():
        candidates = [timed("triton", "triton", times, regime, calls)]
        if copies is not None:
            candidates.append(timed("copy", "anchor", copies[: len(times)], regime, calls))
        entries.append({"shape": shape, "dtype": dtype, "cost": COST, "candidates": candidates})
    clean = {"git_commit": "b" * 40, "git_tree_dirty": False}
    return header("timing", "measured", **clean) | {
        "kernel": kernel,
        "status": "measured",
        "reason": None,
        "protocol": {"sweep_bytes": 1 << 28, "input_sets": 3, "samples": {regime: SAMPLES}},
        "processes": [],
        "cells": entries,
        **changed,
    }


def side(*timings: Artifact, **changed: Any) -> Present:
    """A side of a comparison, correct and up to date unless told otherwise."""
    for artifact in timings:
        artifacts.validate(artifact, "timing", "timing")
    facts: dict[str, Any] = {
        "environment": environment(),
        "timings": {artifact["kernel"]: artifact for artifact in timings},
        "digests": {
            artifact["kernel"]: hashlib.sha256(artifacts.dumps(artifact).encode()).hexdigest() for artifact in timings
        },
        "correctness": {artifact["kernel"]: {"passed": True, "cells": []} for artifact in timings},
        "stale": frozenset(),
        "empty_window_ns": 1280,
        "quantum_ns": 32,
        "noise_floor": None,
    }
    return Present(**facts | changed)


def noise_floor(
    cells: Mapping[tuple[str, str, str, str], tuple[float, float]], claim: str = "measured", **changed: Any
) -> Artifact:
    """A noise floor: (sd between sessions, largest A/A difference) of log tmean by cell; keywords as of environment."""
    place = environment(**changed)
    clean = {"git_commit": "b" * 40, "git_tree_dirty": False}
    floor = header("noise_floor", claim, **clean) | {
        "environment": {"device": place["device"], "software": place["software"]},
        "cells": [
            {
                **dict(zip(("kernel", "shape", "dtype", "regime"), key, strict=True)),
                "sessions": 3,
                "session_sd_log": session_sd_log,
                "largest_aa_log": largest_aa_log,
            }
            for key, (session_sd_log, largest_aa_log) in cells.items()
        ],
    }
    artifacts.validate(floor, "noise_floor", "noise floor")
    return floor
