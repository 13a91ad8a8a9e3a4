"""A whole project with made-up numbers: raw artifacts, what is derived from them, a README.

Samples follow one model of a device, with seeded noise, on a 32 ns lattice.
Every artifact's claim says that it is synthetic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project, find_project, kernel_names
from triton_kernel_lab.report import readme, tables
from triton_kernel_lab.report.figures import stage as figures
from triton_kernel_lab.report.site import stage as site
from triton_kernel_lab.sources import stage_digest

QUANTUM_NS = 32
RUNNER = "synthetic-gpu"
SHAPES = ("128x1024", "2048x4096", "16384x8192")
DTYPES = ("float16", "bfloat16")

# Time over that of the same bytes on the ladder, by candidate.
FACTORS: Mapping[str, float] = {
    "triton": 1.03,
    "eager": 2.0,
    "torch_compile": 1.12,
    "library_op": 1.06,
    "copy": 1.02,
}
_ROLES = {"triton": "triton", "copy": "anchor"}
_SERVED = {"triton": "triton", "torch_compile": "inductor"}
# What a regime makes of a cold time; a graph and a busy stream hide the launch.
_REGIME_FACTORS = {"cold_clean": 1.0, "cold_dirty": 1.1, "warm": 0.8, "graph": 0.7, "call": 1.5}
_CALLS = {"graph": 16, "call": 50}
_RATES = {"copy": 4.2e12, "read": 4.4e12, "write": 4.6e12}
_FLOOR_NS = 3200.0
_RUNGS = tuple(1 << power for power in range(18, 31, 2))


def project(
    root: Path,
    *,
    derive: bool = True,
    measured: bool = True,
    runner: str = RUNNER,
    gpu: str = "Synthetic GPU",
    seed: int = 0,
    shapes: Sequence[str] = SHAPES,
    dtypes: Sequence[str] = DTYPES,
    regimes: Sequence[str] = ("cold_clean",),
    processes: int = 2,
    samples: int = 60,
    factors: Mapping[str, float] | None = None,
    claim_kind: str = "synthetic",
    git_commit: str | None = None,
    git_tree_dirty: bool | None = None,
) -> Project:
    """Write a project under ``root`` and return it.

    Args:
        root: an empty folder.
        derive: also write what the pure stages make: roofline, reports, README block.
        measured: False writes the artifacts of a host without a GPU.
        factors: time over that of the same bytes on the ladder, by candidate
            or by ``kernel/candidate``; what is not named keeps FACTORS.
        samples: of one candidate in one process and regime.

    The other keywords are facts of the run as the artifacts state them.
    """
    _write_frame(root, runner, processes, dict.fromkeys(regimes, samples), seed)
    found = find_project(root)
    make = _Maker(found, random.Random(seed), claim_kind, {"git_commit": git_commit, "git_tree_dirty": git_tree_dirty})
    make.write("environment", environment(gpu if measured else None), [])
    make.write("ceilings", make.ceilings() if measured else _NO_CEILINGS, ["environment"], git=True)
    for kernel in kernel_names():
        cases = [(shape, dtype) for shape in shapes for dtype in dtypes]
        make.write(f"correctness/{kernel}", correctness(cases), ["environment"], kernel=kernel)
        plan = _Plan(kernel, cases, regimes, processes, samples, {**FACTORS, **(factors or {})})
        body = make.timing(plan) if measured else _NO_TIMING
        make.write(f"timing/{kernel}", body, [f"correctness/{kernel}", "environment"], kernel=kernel, git=True)
        counts = counters(cases) if measured else _NO_COUNTERS
        make.write(f"counters/{kernel}", counts, [f"correctness/{kernel}", "environment"], kernel=kernel, git=True)
    if derive:
        run_pure_stages(found)
    return found


def run_pure_stages(found: Project, *, figure: bool = True) -> None:
    """Derive everything anew, as the stages after timing do; the figure takes longest and may be left out."""
    roofline.run(found)
    tables.run(found)
    readme.run(found)
    if figure:
        _draw(found)
        site.run(found)


_drawn: dict[str, dict[str, str]] = {}


def _draw(found: Project) -> None:
    """The figures, which take longest: drawn once in a process from the same artifacts, whichever project has them."""
    made_from = [found.artifacts / f"{name}.json" for name in ("environment", "roofline")]
    made_from += sorted((found.artifacts / "timing").glob("*.json"))
    key = "".join(artifacts.sha256_file(path) for path in made_from)
    if key not in _drawn:
        figures.run(found)
        paths = [*found.reports.glob("*.svg"), found.reports / "points.csv"]
        _drawn[key] = {path.name: path.read_text(encoding="utf-8") for path in paths}
    for name, text in _drawn[key].items():
        artifacts.write_text(found.reports / name, text)


def _write_frame(root: Path, runner: str, processes: int, samples: Mapping[str, int], seed: int) -> None:
    counts = "".join(f"    {regime}: {count}\n" for regime, count in samples.items())
    measure = f"  processes: {processes}\n  warmup_ms: 10\n  sweep_mib: 256\n  seed: {seed}\n  samples:\n{counts}"
    artifacts.write_text(root / "params.yaml", f"runner: {runner}\nmeasure:\n{measure}")
    artifacts.write_text(root / "dvc.yaml", "stages: {}\n")
    for page, names in readme.PAGES.items():
        blocks = "\n\n".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->" for name in names)
        artifacts.write_text(root / page, f"# Synthetic\n\n{blocks}\n\nThe end.\n")


class _Plan:
    """What is timed of one kernel, and how fast each candidate is to be."""

    def __init__(
        self,
        kernel: str,
        cases: Sequence[tuple[str, str]],
        regimes: Sequence[str],
        processes: int,
        samples: int,
        factors: Mapping[str, float],
    ) -> None:
        self.kernel, self.cases, self.regimes = kernel, cases, regimes
        self.processes, self.samples, self._factors = processes, samples, factors

    def candidates(self) -> list[str]:
        return [name for name in self._factors if "/" not in name]

    def factor(self, name: str) -> float:
        return self._factors.get(f"{self.kernel}/{name}", self._factors[name])


class _Maker:
    """Writes artifacts of one project, with its header fields and its noise."""

    def __init__(self, found: Project, noise: random.Random, claim_kind: str, git: Mapping[str, Any]) -> None:
        self._project, self._noise, self._claim, self._git = found, noise, claim_kind, dict(git)

    def write(
        self, stem: str, body: Mapping[str, Any], inputs: Sequence[str], *, kernel: str = "", git: bool = False
    ) -> None:
        """Write one artifact, with records of the artifacts that it was made from."""
        folder, producer = self._project.artifacts, {"package": "triton-kernel-lab", "version": "0.1.0"}
        records = [artifacts.input_record(self._project.root, folder / f"{name}.json") for name in inputs]
        kind = stem.partition("/")[0]
        digest = stage_digest(self._project.root, kind, kernel or None)
        head: Artifact = {
            "artifact_kind": kind,
            "schema_version": 1,
            "claim_kind": self._claim,
            "producer": {**producer, "source_sha256": digest, **(self._git if git else {})},
            "inputs": records,
            "runner": self._project.runner,
        }
        artifacts.write(folder / f"{stem}.json", {**head, **({"kernel": kernel} if kernel else {}), **body})

    def samples(self, typical_ns: float, count: int, *, event: bool = True) -> list[int]:
        """Noisy samples that are never much below ``typical_ns``, on the timer's lattice if events took them."""
        drawn = [typical_ns + (100 + 0.005 * typical_ns) * abs(self._noise.gauss(0, 1)) for _ in range(count)]
        step = QUANTUM_NS if event else 1
        return [step * max(1, round(value / step)) for value in drawn]

    def ceilings(self) -> dict[str, Any]:
        floors = {"empty_event": 1600.0, "null_kernel_clean": _FLOOR_NS, "null_kernel_dirty": 2900.0}
        ladders = [
            {"kind": kind, "bytes": size, "samples_ns": self.samples(_ladder_ns(kind, size), 20)}
            for kind in _RATES
            for size in _RUNGS
        ]
        size = 4096
        matmul = [
            {"dtype": dtype, "m": size, "n": size, "k": size, "flop": 2 * size**3, "samples_ns": self.samples(ns, 9)}
            for dtype, ns in (("float32", 2_700_000.0), ("float16", 180_000.0), ("bfloat16", 180_000.0))
        ]
        flush = {
            f"{state}_samples_ns": self.samples(ns, 9) for state, ns in (("clean", 7e3), ("dirty", 8e3), ("warm", 5e3))
        }
        return {
            "status": "measured",
            "reason": None,
            "device": 0,
            "protocol": {"sweep_bytes": 1 << 28, "samples": 20},
            "timer_quantum_ns": QUANTUM_NS,
            "floors": [{"name": name, "samples_ns": self.samples(ns, 20)} for name, ns in floors.items()],
            "ladders": ladders,
            "matmul": matmul,
            "dirty_flush": [{"bytes": 1 << 24, **flush}],
        }

    def timing(self, plan: _Plan) -> dict[str, Any]:
        return {
            "status": "measured",
            "reason": None,
            "protocol": {
                "sweep_bytes": 1 << 28,
                "input_sets": 3,
                "samples": dict.fromkeys(plan.regimes, plan.samples),
            },
            "processes": [_process(index) for index in range(plan.processes)],
            "cells": [self._cell(plan, shape, dtype) for shape, dtype in plan.cases],
        }

    def _cell(self, plan: _Plan, shape: str, dtype: str) -> dict[str, Any]:
        cost = cost_of(shape)
        read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
        cold_ns = _ladder_ns("copy", read + write)
        candidates = [self._candidate(plan, name, cold_ns * plan.factor(name)) for name in plan.candidates()]
        return {"shape": shape, "dtype": dtype, "cost": cost, "candidates": candidates}

    def _candidate(self, plan: _Plan, name: str, cold_ns: float) -> dict[str, Any]:
        return {
            "name": name,
            "role": _ROLES.get(name, "baseline"),
            "served_by": _SERVED.get(name, "torch"),
            "status": "ok",
            "reason": None,
            "launch": None,
            "runs": [
                self._run(plan, regime, process, cold_ns)
                for regime in plan.regimes
                for process in range(plan.processes)
            ],
        }

    def _run(self, plan: _Plan, regime: str, process: int, cold_ns: float) -> dict[str, Any]:
        calls = _CALLS.get(regime, 1)
        typical = cold_ns * _REGIME_FACTORS[regime] * calls
        return {
            "regime": regime,
            "process": process,
            "calls_per_sample": calls,
            "samples_ns": self.samples(typical, plan.samples, event=regime != "call"),
            "flags": {"launch_exposed": [], "clock_low": [], "power_cap": [], "thermal": []},
        }


def _ladder_ns(kind: str, size: int) -> float:
    return _FLOOR_NS + size / _RATES[kind] * 1e9


def cost_of(shape: str) -> dict[str, Any]:
    """The cost of a 16-bit elementwise kernel on ``MxN``: one input, one output of the same size."""
    rows, columns = map(int, shape.split("x"))
    size = 2 * rows * columns
    return {
        "read": [{"name": "x", "bytes": size}],
        "write": [{"name": "out", "bytes": size}],
        "flop": 4 * rows * columns,
        "unit": "float32",
    }


def environment(gpu: str | None) -> dict[str, Any]:
    """The body of an environment artifact; without a GPU for None."""
    device = {
        "name": gpu,
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
    of_device = {"driver": "580.159", "cuda_runtime": "13.0", "ptxas": "13.0.88"}
    software = {"torch": "2.13.0", "triton": "3.7.1", "python": "3.12"}
    return {
        "device": device if gpu else None,
        "software": {**software, **(of_device if gpu else dict.fromkeys(of_device))},
        "interpreter": gpu is None,
    }


def correctness(cases: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The body of a correctness artifact in which everything passes."""
    limit = {"max_error_ratio": 1e-3, "rel_norm": 5e-4}
    error = {"max_error_ratio": 4.2e-4, "rel_norm": 2.1e-4, "max_abs": 1.9e-3}
    cells = [
        {
            "shape": shape,
            "dtype": dtype,
            "variant": "default",
            "passed": True,
            "failures": [],
            "limit": limit,
            "triton": error,
            "eager": error,
            "torch_compile": error,
            "torch_compile_passed": True,
        }
        for shape, dtype in cases
    ]
    return {"passed": True, "served_by": "triton", "cells": cells}


def counters(cases: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The body of a counters artifact: all is read once, and half of what is written stays in the cache."""
    cells = []
    for shape, dtype in cases:
        cost = cost_of(shape)
        read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
        launch = {"kernel": "_kernel", "passes": 1, "dram_read_bytes": read + 4096, "dram_write_bytes": write // 2}
        launch |= {"l2_hit_ratio": 0.5, "occupancy_ratio": 0.75, "tensor_pipe_ratio": 0.0}
        cells.append({"shape": shape, "dtype": dtype, "candidates": [{"name": "triton", "launches": [launch]}]})
    return {"counter_status": "ok", "reason": None, "protocol": _profiler(1 << 28, "2025.3.1.0"), "cells": cells}


def _profiler(sweep_bytes: int, version: str | None) -> dict[str, Any]:
    metrics = {"dram_read_bytes": "dram__bytes_read.sum"}
    return {"sweep_bytes": sweep_bytes, "profiler": "ncu", "profiler_version": version, "metrics": metrics}


def _process(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "seed": 1000 * index,
        "other_processes": 0,
        "sm_clock_mhz": {"min": 1965, "median": 1980, "max": 1980},
        "temperature_c_max": 40,
        "power_mw_max": 350_000,
        "event_reasons": [],
    }


_NO_CEILINGS: dict[str, Any] = {
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
_NO_COUNTERS: dict[str, Any] = {
    "counter_status": "not_requested",
    "reason": "runner cpu has no GPU",
    "protocol": _profiler(0, None),
    "cells": [],
}
_NO_TIMING: dict[str, Any] = {
    "status": "not_measured",
    "reason": "no CUDA device",
    "protocol": {"sweep_bytes": 0, "input_sets": 0, "samples": {}},
    "processes": [],
    "cells": [],
}


def edit(path: Path, change: Callable[[Artifact], None]) -> None:
    """Change an artifact in place and write it soundly again, as a careful forger would."""
    artifact = artifacts.read(path)
    change(artifact)
    artifacts.write(path, artifact)


def edit_byte(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of ``old``, which must exist, by ``new``."""
    text = path.read_text(encoding="utf-8")
    if old not in text or len(old) != len(new):
        raise ValueError(f"{path}: expected {old!r}, and {new!r} of the same length.")
    path.write_bytes(text.replace(old, new, 1).encode())
