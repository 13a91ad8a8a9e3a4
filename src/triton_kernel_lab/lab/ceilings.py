"""Stage ``ceilings``: what this device can do in this session, measured as kernels are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.lab import nvml, sweep
from triton_kernel_lab.lab.window import Bench, Subject, Window
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import stage_digest

__all__ = ["run"]

# 0.25 MiB to 1 GiB of traffic.
LADDER_BYTES = tuple(1 << power for power in range(18, 31))
DIRTY_BYTES = (16 << 20, 512 << 20)
MATMUL = (("float32", 4096), ("tf32", 8192), ("float16", 8192), ("bfloat16", 8192))
_WARMUP_MS = 300
# Longer than 0.5 ms each on an H200, so that a part of them is taken: a sixth at 3 ms.
_MATMUL_SAMPLES = 120


def _device(bench: Bench) -> torch.device:
    return torch.device("cuda", bench.device)


def _subject(name: str, call: Callable[..., object], *tensors: torch.Tensor) -> Subject:
    """A subject whose result is dropped, so that no poison is written between samples."""

    def drop(*inputs: torch.Tensor) -> tuple[()]:
        call(*inputs)
        return ()

    return Subject(name, drop, [tensors])


def _times(bench: Bench, subjects: Sequence[Subject], regime: str, samples: int) -> dict[str, list[int]]:
    """Unflagged samples by subject, all of them if every one is flagged."""
    windows = bench.time(subjects, regime, samples)
    return {name: _unflagged(window) for name, window in windows.items()}


def _unflagged(window: Window) -> list[int]:
    flagged = {index for positions in window.flags.values() for index in positions}
    kept = [value for index, value in enumerate(window.samples_ns) if index not in flagged]
    return kept or window.samples_ns


def _ladder(bench: Bench, size: int, samples: int) -> list[dict[str, Any]]:
    """Copy, read and write of ``size`` bytes of traffic; of two copies the faster counts."""
    device = _device(bench)
    x = torch.ones(size // 4, dtype=torch.int32, device=device)
    half, target = x[: size // 8], torch.empty(size // 8, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    subjects = [
        _subject("copy/torch", lambda a, b: b.copy_(a), half, target),
        _subject("copy/triton", sweep.copy, half, target),
        _subject("read", sweep.read, x, out),
        _subject("write", sweep.write, x),
    ]
    bench.warm_up(subjects)
    times = _times(bench, subjects, "cold_clean", samples)
    copy = min(times["copy/torch"], times["copy/triton"], key=statistics.median_low)
    rows = (("copy", copy), ("read", times["read"]), ("write", times["write"]))
    return [{"kind": kind, "bytes": size, "samples_ns": values} for kind, values in rows]


def _matmul(bench: Bench, dtype: str, size: int) -> dict[str, Any]:
    device = _device(bench)
    torch_dtype = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(size)
    # Random, because zeros draw less power and run faster.
    a, b = (torch.randn(size, size, device=device, generator=generator).to(torch_dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        subject = _subject("matmul", torch.mm, a, b)
        bench.warm_up([subject])
        # With rests and without flagged samples, as cells are: a rested card passes what one at its power limit does.
        samples = _times(bench, [subject], "cold_clean", _MATMUL_SAMPLES)["matmul"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return {"dtype": dtype, "m": size, "n": size, "k": size, "flop": 2 * size**3, "samples_ns": samples}


def _floors(bench: Bench, samples: int) -> list[dict[str, Any]]:
    x = torch.zeros(1, dtype=torch.int32, device=_device(bench))
    null = [_subject("null", sweep.null, x)]
    empty = [_subject("empty", lambda a: (), x)]
    bench.warm_up(null)
    floors = [("empty_event", _times(bench, empty, "cold_clean", samples)["empty"])]
    for regime in ("cold_clean", "cold_dirty", "warm", "graph", "call"):
        window = bench.time(null, regime, samples if regime.startswith("cold") else max(samples // 5, 1))["null"]
        per_call = [max(round(value / window.calls_per_sample), 1) for value in window.samples_ns]
        floors.append((f"null_kernel_{regime.removeprefix('cold_')}", per_call))
    return [{"name": name, "samples_ns": values} for name, values in floors]


def _dirty_flush(bench: Bench, size: int, samples: int) -> dict[str, Any]:
    """What a copy of ``size`` bytes of traffic costs with clean, dirty and warm caches."""
    device = _device(bench)
    a, b = (torch.ones(size // 8, dtype=torch.int32, device=device) for _ in range(2))
    subjects = [_subject("copy", lambda a, b: b.copy_(a), a, b)]
    bench.warm_up(subjects)
    times = {
        regime: _times(bench, subjects, regime, samples)["copy"] for regime in ("cold_clean", "cold_dirty", "warm")
    }
    return {
        "bytes": size,
        "clean_samples_ns": times["cold_clean"],
        "dirty_samples_ns": times["cold_dirty"],
        "warm_samples_ns": times["warm"],
    }


def _measure(project: Project, progress: Callable[[str], None]) -> dict[str, Any]:
    params = project.measure
    samples = max(params.samples.get("cold_clean", 0) // 2, 20)
    bench = Bench(params.sweep_bytes, _WARMUP_MS, params.seed)
    progress("floors")
    floors = _floors(bench, samples)
    ladders = []
    for size in LADDER_BYTES:
        progress(f"ladder {size >> 10} KiB")
        ladders += _ladder(bench, size, samples)
    progress("dirty lines")
    dirty = [_dirty_flush(bench, size, samples) for size in DIRTY_BYTES]
    matmul = []
    for dtype, size in MATMUL:
        progress(f"matmul {dtype}")
        matmul.append(_matmul(bench, dtype, size))
    empty = floors[0]["samples_ns"]
    raw = [*empty, *(value for rung in ladders for value in rung["samples_ns"])]
    return {
        "status": "measured",
        "reason": None,
        "device": nvml.number(bench.device),
        "protocol": {"sweep_bytes": params.sweep_bytes, "samples": samples},
        # Event times are multiples of the timer's tick.
        "timer_quantum_ns": max(math.gcd(*raw), 1),
        "floors": floors,
        "ladders": ladders,
        "matmul": matmul,
        "dirty_flush": dirty,
    }


def run(project: Project, progress: Callable[[str], None] = lambda line: None) -> None:
    """Measure ladders, floors and matmul rates, and write ceilings.json."""
    git = revisions.producer_git(project.root)
    if project.runner == "cpu":
        body: dict[str, Any] = {
            "status": "not_measured",
            "reason": "no CUDA device",
            "device": None,
            "protocol": {"sweep_bytes": 0, "samples": 0},
            "timer_quantum_ns": None,
            "floors": [],
            "ladders": [],
            "matmul": [],
            "dirty_flush": [],
        }
    else:
        body = _measure(project, progress)
    # Without git nobody can tell what was measured.
    exploratory = git["git_tree_dirty"] is not False or body["status"] == "not_measured"
    artifacts.write(
        project.artifacts / "ceilings.json",
        {
            "artifact_kind": "ceilings",
            "schema_version": 1,
            "claim_kind": "exploratory" if exploratory else "measured",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "ceilings"),
                **git,
            },
            "inputs": [artifacts.input_record(project.root, project.artifacts / "environment.json")],
            "runner": project.runner,
            **body,
        },
    )
