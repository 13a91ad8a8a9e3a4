"""Time of a run of steps: the host's over all of them, and from step to step where the steps run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Laps", "Watch", "watch_for"]


@dataclass(frozen=True)
class Laps:
    """``wall_ns`` from before the first step until the device was done; ``step_ns`` from mark to mark."""

    wall_ns: int
    step_ns: list[int]


class Watch(Protocol):
    """Takes the time of one run of steps after another."""

    def start(self) -> None:
        """Wait for the device, and begin."""

    def mark(self) -> None:
        """A step has been asked for."""

    def stop(self) -> Laps:
        """Wait for the device, and tell."""


def watch_for(device: torch.device) -> Watch:
    """CUDA events on a GPU, else the host's clock."""
    return _DeviceWatch() if device.type == "cuda" else _HostWatch()


class _DeviceWatch:
    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self._started_ns = 0

    def start(self) -> None:
        self._marks = []
        torch.cuda.synchronize()
        self._started_ns = time.perf_counter_ns()
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def stop(self) -> Laps:
        torch.cuda.synchronize()
        wall_ns = time.perf_counter_ns() - self._started_ns
        pairs = zip(self._marks, self._marks[1:], strict=False)
        # Events count in milliseconds.
        return Laps(wall_ns, [max(round(before.elapsed_time(after) * 1e6), 1) for before, after in pairs])


class _HostWatch:
    def __init__(self) -> None:
        self._marks_ns: list[int] = []

    def start(self) -> None:
        self._marks_ns = [time.perf_counter_ns()]

    def mark(self) -> None:
        self._marks_ns.append(time.perf_counter_ns())

    def stop(self) -> Laps:
        wall_ns = max(time.perf_counter_ns() - self._marks_ns[0], 1)
        pairs = zip(self._marks_ns, self._marks_ns[1:], strict=False)
        return Laps(wall_ns, [max(after - before, 1) for before, after in pairs])
