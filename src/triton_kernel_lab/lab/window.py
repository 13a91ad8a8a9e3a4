"""Timed windows: what one sample is, in each of the five regimes.

cold_clean, cold_dirty and warm time one call between two CUDA events. graph
times the replay of a CUDA graph whose calls rotate over inputs that together
exceed twice the L2. call times the host, with the device kept busy.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from triton_kernel_lab.lab import nvml
from triton_kernel_lab.lab.sweep import Sweep

__all__ = ["EVENT_REGIMES", "Bench", "Subject", "Window"]

EVENT_REGIMES = ("cold_clean", "cold_dirty", "warm")
_CALLS = 50
_GRAPH_CALLS = 512
_LOW_CLOCK = 0.9
# A sixth of a millisecond: longer than the enqueueing of most calls.
_SHORTEST_SPIN = 300_000


@dataclass
class Subject:
    """Something to time: ``call`` takes the tensors of one input set."""

    name: str
    call: Callable[..., Any]
    sets: Sequence[Sequence[torch.Tensor]]


@dataclass
class Window:
    """The samples of one subject in one regime: whole-sample nanoseconds, and flagged positions."""

    calls_per_sample: int
    samples_ns: list[int] = field(default_factory=list)
    flags: dict[str, list[int]] = field(
        default_factory=lambda: {"launch_exposed": [], "clock_low": [], "power_cap": [], "thermal": []}
    )


def _poison(outputs: Any) -> None:
    for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


class Bench:
    """One process's measuring bench on the current device."""

    def __init__(self, sweep_bytes: int, warmup_ms: int, seed: int) -> None:
        self.device = torch.cuda.current_device()
        self.readings: list[nvml.Reading] = []
        self._sweep = Sweep(sweep_bytes, torch.device("cuda", self.device))
        self._warmup_ns = warmup_ms * 1_000_000
        self._order = random.Random(seed)
        self._spin_cycles = _SHORTEST_SPIN
        self._l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def warm_up(self, subjects: Sequence[Subject]) -> None:
        """Run the real loop until lazy work is done and the clock has settled."""
        end = time.perf_counter_ns() + self._warmup_ns
        rounds = 0
        while rounds < 3 or time.perf_counter_ns() < end:
            slowest = 0
            for subject in subjects:
                started = time.perf_counter_ns()
                self._sample(subject, "cold_clean", rounds, spin=False)
                slowest = max(slowest, time.perf_counter_ns() - started)
                torch.cuda.synchronize()
            # What enqueueing a sample costs the host is what the spin must cover.
            self._spin_cycles = max(_SHORTEST_SPIN, 4 * slowest)
            rounds += 1

    def time(self, subjects: Sequence[Subject], regime: str, samples: int) -> dict[str, Window]:
        """Samples of every subject, interleaved; the order reverses from block to block."""
        # Capturing a graph empties the allocator's cache: what a call needs is taken here, not in a window.
        for subject in subjects:
            for _ in range(3):
                subject.call(*subject.sets[0])
        torch.cuda.synchronize()
        if regime == "graph":
            return self._time_graphs(subjects, samples)
        if regime == "call":
            return self._time_calls(subjects, samples)
        windows = {subject.name: Window(1) for subject in subjects}
        order = list(subjects)
        self._order.shuffle(order)
        for block in range(samples):
            timed = {}
            for subject in order:
                start, end, exposed = self._sample(subject, regime, block, spin=True)
                # Before the next one is enqueued: behind a long queue the device waits, inside the window,
                # for commands that it has not fetched yet.
                torch.cuda.synchronize()
                timed[subject.name] = (_elapsed_ns(start, end), exposed)
            self._close(windows, timed)
            order.reverse()
        return windows

    def _sample(
        self, subject: Subject, regime: str, block: int, *, spin: bool
    ) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        """Enqueue one sample behind a spin, so that the host stays ahead; its events, and whether it did not."""
        if spin:
            torch.cuda._sleep(self._spin_cycles)
        inputs = subject.sets[block % len(subject.sets)]
        if regime == "warm":
            subject.call(*inputs)
        elif regime == "cold_clean":
            self._sweep.clean()
        else:
            self._sweep.dirty()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        outputs = subject.call(*inputs)
        end.record()
        # A start that the device has already passed means that it waited for the host.
        exposed = start.query()
        # Poisoned and freed here, the memory is what the next call is given.
        _poison(outputs)
        return start, end, exposed

    def _close(self, windows: dict[str, Window], timed: dict[str, tuple[int, bool]]) -> None:
        """Store one sample of each subject with the flags of its block."""
        reading = nvml.read(self.device)
        self.readings.append(reading)
        fastest = max((other.sm_clock_mhz or 0 for other in self.readings), default=0)
        raised = {
            "clock_low": (reading.sm_clock_mhz or fastest) < _LOW_CLOCK * fastest,
            "power_cap": "power_cap" in reading.reasons or "power_brake" in reading.reasons,
            "thermal": any("therm" in reason or "slowdown" in reason for reason in reading.reasons),
        }
        for name, (duration, exposed) in timed.items():
            window = windows[name]
            index = len(window.samples_ns)
            window.samples_ns.append(max(duration, 1))
            for flag, on in (*raised.items(), ("launch_exposed", exposed)):
                if on:
                    window.flags[flag].append(index)

    def _time_graphs(self, subjects: Sequence[Subject], samples: int) -> dict[str, Window]:
        graphs = {subject.name: self._capture(subject) for subject in subjects}
        windows = {name: Window(calls) for name, (_, calls, _) in graphs.items()}
        order = list(graphs)
        for _ in range(samples):
            timed = {}
            for name in order:
                graph, _, spin_cycles = graphs[name]
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(spin_cycles)
                start.record()
                graph.replay()
                end.record()
                timed[name] = (start, end, start.query())
            torch.cuda.synchronize()
            self._close(windows, {name: (_elapsed_ns(start, end), late) for name, (start, end, late) in timed.items()})
            order.reverse()
        return windows

    def _capture(self, subject: Subject) -> tuple[torch.cuda.CUDAGraph, int, int]:
        """A graph of calls whose inputs together are at least twice the L2, its calls, and the spin of a replay."""
        sets = subject.sets
        set_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sets[0])
        wanted = min(max(math.ceil(2 * self._l2_bytes / max(set_bytes, 1)), len(sets)), _GRAPH_CALLS)
        rotated = [*sets, *(tuple(tensor.clone() for tensor in sets[i % len(sets)]) for i in range(len(sets), wanted))]
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph):
            for inputs in rotated:
                # Kept until the capture ends, so that each call writes memory of its own.
                kept.append(subject.call(*inputs))
        graph.replay()
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        graph.replay()
        # The device must still spin when the host is done with the launch, which for many nodes takes long.
        spin_cycles = 200_000 + 4 * (time.perf_counter_ns() - started)
        torch.cuda.synchronize()
        # The clones must outlive the graph, which knows only their addresses.
        graph.inputs = rotated
        return graph, len(rotated), spin_cycles

    def _time_calls(self, subjects: Sequence[Subject], samples: int) -> dict[str, Window]:
        windows = {subject.name: Window(_CALLS) for subject in subjects}
        order = list(subjects)
        for _ in range(samples):
            timed = {}
            for subject in order:
                torch.cuda.synchronize()
                # Longer than the loop below: an idle device would start each kernel at once.
                torch.cuda._sleep(max(self._spin_cycles, 10_000_000))
                inputs = subject.sets[0]
                started = time.perf_counter_ns()
                for _ in range(_CALLS):
                    subject.call(*inputs)
                timed[subject.name] = (time.perf_counter_ns() - started, False)
            torch.cuda.synchronize()
            self._close(windows, timed)
            order.reverse()
        return windows


def _elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)
