"""A made-up CUDA device: it times nothing, and writes down what it is asked, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_kernel_lab.lab import nvml, window


class Device:
    """Plays CUDA's part in a timed window, on tensors of the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.exposed: Container[int] = set()
        self.clock_mhz = 1980
        self.reasons: tuple[str, ...] = ()
        self.windows = 0
        self.spins: list[int] = []
        self.peak_bytes = 4096
        self.l2_bytes = 1 << 19
        self.pauses: list[float] = []

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing

        def record() -> None:
            self.log.append("event")

        index = self.windows
        self.windows += 1
        return SimpleNamespace(
            record=record, query=lambda: index // 2 in self.exposed, elapsed_time=lambda end: 0.004544
        )

    @contextlib.contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        start = len(self.log)
        yield
        captured = self.log[start:]
        graph.replay = lambda: self.log.extend(captured)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def reading(self, device: int) -> nvml.Reading:
        return nvml.Reading(self.clock_mhz, 300_000, 40, self.reasons)


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Let the timed windows work on a made-up device, which is returned."""
    made = Device()

    class Sweep:
        def __init__(self, sweep_bytes: int, where: torch.device) -> None:
            self.clean = lambda: made.log.append("clean")
            self.dirty = lambda: made.log.append("dirty")

    monkeypatch.setattr(window, "Sweep", Sweep)
    monkeypatch.setattr(window, "sleep", lambda seconds: made.pause(seconds))
    monkeypatch.setattr(nvml, "read", made.reading)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=made.l2_bytes))
    monkeypatch.setattr(cuda, "synchronize", lambda: made.log.append("synchronize"))
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 1000 + made.peak_bytes)

    def sleep(cycles: int) -> None:
        made.log.append("spin")
        made.spins.append(cycles)

    monkeypatch.setattr(cuda, "_sleep", sleep)
    monkeypatch.setattr(cuda, "Event", made.event)
    monkeypatch.setattr(cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(cuda, "graph", made.capture)
    return made
