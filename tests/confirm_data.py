"""A repository whose kernel takes the time that its source says, and a bench that reads it from a made-up clock."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from git_repo import Repo

from triton_kernel_lab.lab import confirm_worker
from triton_kernel_lab.lab.window import Subject, Window

PACKAGE = "src/triton_kernel_lab"
KERNEL = "swiglu"
CELL = ("8x64", "float16")
OPERATOR = """
import made_up_clock
import torch

from triton_kernel_lab.ops import _launch

TIME_NS = {ns}


def swiglu(gate, up):
    made_up_clock.ticked += TIME_NS
    return torch.nn.functional.silu(gate.float()).mul(up.float()).mul({scale}).to(gate.dtype)


def swiglu_packed(gate_up):
    return swiglu(*gate_up.chunk(2, -1))
"""
PARAMS = """runner: {runner}
measure:
  processes: 5
  samples:
    cold_clean: 40
  warmup_ms: 1
  sweep_mib: 1
  seed: 7
"""


def operator(ns: int, scale: float = 1.0) -> str:
    """The source of an operator that takes ``ns`` and is right where ``scale`` is 1."""
    return OPERATOR.format(ns=ns, scale=scale)


CASE = """
from types import SimpleNamespace

from triton_kernel_lab.ops.swiglu import swiglu

CASE = SimpleNamespace(variants=[SimpleNamespace(run=swiglu)])
"""
ROUTING = """
import contextlib


class FallbackError(RuntimeError):
    pass


def strict():
    return contextlib.nullcontext()
"""
LAUNCH = """
def forget_plans():
    pass


def launches():
    return []
"""


def files(source: str, runner: str = "synthetic-gpu") -> dict[str, str]:
    """A checkout with one kernel, and as much of the lab as loading it takes."""
    own = {
        "__init__.py": "",
        "routing.py": ROUTING,
        "cases/__init__.py": f'KERNELS: list[str] = ["{KERNEL}"]\n',
        f"cases/{KERNEL}.py": CASE,
        "ops/__init__.py": "",
        "ops/_launch.py": LAUNCH,
        f"ops/{KERNEL}.py": source,
        f"ops/launch/{KERNEL}.json": "{}\n",
        # Of these a verdict and a measurement state the digest.
        **{f"lab/{name}.py": "" for name in ("confirm", "confirm_worker", "prepare", "timing", "worker")},
    }
    whole = {f"{PACKAGE}/{name}": text for name, text in own.items()}
    return whole | {"params.yaml": PARAMS.format(runner=runner), "dvc.yaml": "stages: {}\n"}


OP = f"{PACKAGE}/ops/{KERNEL}.py"


@contextmanager
def clock() -> Iterator[Any]:
    """The module that the operators tick."""
    sys.modules["made_up_clock"] = SimpleNamespace(ticked=0)  # type: ignore[assignment]
    try:
        yield sys.modules["made_up_clock"]
    finally:
        del sys.modules["made_up_clock"]


class Bench:
    """Times a call by the made-up clock, with the spread of a device between processes and between samples."""

    def __init__(self, seed: int, noise: float = 0.02, apart: float = 0.0) -> None:
        self._draw, self._noise, self._apart = random.Random(seed), noise, apart
        self._process = self._draw.gauss(0.0, 0.02)

    def warm_up(self, subjects: Sequence[Subject]) -> None:
        """Nothing here has a clock speed."""

    def settle(self, subjects: Sequence[Subject]) -> None:
        """Nothing here allocates."""

    def time(self, subjects: Sequence[Subject], regime: str, samples: int) -> dict[str, Window]:
        """Samples of each subject on a lattice of 32 ns."""
        return {subject.name: self._window(subject, samples) for subject in subjects}

    def _window(self, subject: Subject, samples: int) -> Window:
        fake = sys.modules["made_up_clock"]
        before = fake.ticked
        subject.call(*subject.sets[0])
        # Within a process each version sits where it happens to be loaded.
        place = self._process + self._draw.gauss(0.0, self._apart)
        level = (fake.ticked - before) * (1.0 + place)
        drawn = (level * (1.0 + self._draw.gauss(0.0, self._noise)) for _ in range(samples))
        return Window(1, [32 * max(round(ns / 32), 1) for ns in drawn])


class Engine:
    """Measures a plan in this process; remembers which plans it was given."""

    def __init__(self, noise: float = 0.02, apart: float = 0.002) -> None:
        self.plans: list[Mapping[str, Any]] = []
        self._noise, self._apart = noise, apart

    def __call__(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        self.plans.append(plan)
        bench: Any = Bench(plan["seed"], self._noise, self._apart)
        with clock():
            cells = confirm_worker.measure(plan, bench, torch.device("cpu"))
        facts = {"index": plan["index"], "seed": plan["seed"], "other_processes": None, "sm_clock_mhz": None}
        facts |= {"temperature_c_max": None, "power_mw_max": None, "event_reasons": []}
        return {"process": facts, "cells": cells}


def repository(root: Path, *sources: str) -> Repo:
    """A repository with one commit a source."""
    repo = Repo(root)
    for index, source in enumerate(sources):
        repo.commit(files(source) if index == 0 else {OP: source}, f"source {index}")
    return repo
