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
# Clock cycles, some 5 ms: longer than that many calls take most hosts, until the first sample tells.
_CALLS_SPIN = 10_000_000
_GRAPH_CALLS = 512
# A sample that takes longer than this is taken less often, so that a slow baseline does not set the pace.
_SLOW_NS = 5_000_000
_FEWEST = 5
# What the calls of one sample of the host may keep the device busy with.
_CALLS_NS = 10_000_000
_LOW_CLOCK = 0.9
# Clock cycles, some 75 us: with the sweep behind it longer than the enqueueing of most calls.
_SHORTEST_SPIN = 150_000
_LONGEST_SPIN = 1 << 26


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
        self._spins: dict[str, int] = {}
        self._typical_ns: dict[str, int] = {}
        self._fastest_mhz = 0
        self._l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size

    def warm_up(self, subjects: Sequence[Subject]) -> None:
        """Run the real loop until lazy work is done, the clock has settled and every spin is long enough."""
        self._spins = {}
        end = time.perf_counter_ns() + self._warmup_ns
        rounds = 0
        while rounds < 3 or time.perf_counter_ns() < end:
            for subject in subjects:
                # Warm: without a sweep to hide behind, enqueueing a call needs the longest spin.
                self._typical_ns[subject.name], _ = self._sample(subject, "cold_clean", rounds)
                self._sample(subject, "warm", rounds)
            rounds += 1

    def settle(self, subjects: Sequence[Subject]) -> None:
        """Call every subject and wait: what a call takes from the allocator is taken here, not in a window.

        Capturing a graph empties the allocator's cache.
        """
        for subject in subjects:
            for _ in range(3):
                subject.call(*subject.sets[0])
        torch.cuda.synchronize()

    def time(self, subjects: Sequence[Subject], regime: str, samples: int) -> dict[str, Window]:
        """Samples of every subject, interleaved; the order reverses from block to block.

        A subject whose sample takes longer than 5 ms gets fewer of them, in the first blocks.
        """
        self.settle(subjects)
        if regime == "graph":
            return self._time_graphs(subjects, samples)
        if regime == "call":
            return self._time_calls(subjects, samples)
        windows = {subject.name: Window(1) for subject in subjects}
        counts = {subject.name: self._worth(subject.name, samples) for subject in subjects}
        order = list(subjects)
        self._order.shuffle(order)
        for block in range(samples):
            timed = {}
            for subject in (each for each in order if block < counts[each.name]):
                timed[subject.name] = self._sample(subject, regime, block)
            self._close(windows, timed)
            order.reverse()
        return windows

    def _worth(self, name: str, samples: int, calls: int = 1) -> int:
        """How many samples of so many calls a subject gets."""
        duration = self._typical_ns.get(name, 0) * calls
        return samples if duration <= _SLOW_NS else max(samples * _SLOW_NS // duration, min(samples, _FEWEST))

    def _sample(self, subject: Subject, regime: str, block: int) -> tuple[int, bool]:
        """One sample behind a spin, so that the host stays ahead: nanoseconds, and whether it did not."""
        inputs = subject.sets[block % len(subject.sets)]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        spin = self._spins.setdefault(subject.name, _SHORTEST_SPIN)
        torch.cuda._sleep(spin)
        if regime == "warm":
            subject.call(*inputs)
        elif regime == "cold_clean":
            self._sweep.clean()
        else:
            self._sweep.dirty()
        start.record()
        outputs = subject.call(*inputs)
        end.record()
        # A start that the device has already passed means that it waited for the host.
        exposed = start.query()
        if exposed:
            self._spins[subject.name] = min(2 * spin, _LONGEST_SPIN)
        # Poisoned and freed here, the memory is what the next call is given.
        _poison(outputs)
        # Before the next one is enqueued: behind a long queue the device waits, inside the window,
        # for commands that it has not fetched yet.
        torch.cuda.synchronize()
        return _elapsed_ns(start, end), exposed

    def _close(self, windows: dict[str, Window], timed: dict[str, tuple[int, bool]]) -> None:
        """Store one sample of each subject with the flags of its block."""
        reading = nvml.read(self.device)
        self.readings.append(reading)
        self._fastest_mhz = max(self._fastest_mhz, reading.sm_clock_mhz or 0)
        raised = {
            "clock_low": (reading.sm_clock_mhz or self._fastest_mhz) < _LOW_CLOCK * self._fastest_mhz,
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
        # A backward pass runs on the stream of its forward pass, which a capture on another stream forbids.
        captured = [subject for subject in subjects if not any(x.grad_fn for each in subject.sets for x in each)]
        graphs = {subject.name: self._capture(subject) for subject in captured}
        windows = {name: Window(calls) for name, (_, calls, _) in graphs.items()}
        counts = {name: self._worth(name, samples, calls) for name, (_, calls, _) in graphs.items()}
        order = list(graphs)
        for block in range(samples):
            timed = {}
            for name in (each for each in order if block < counts[each]):
                graph, _, spin_cycles = graphs[name]
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(spin_cycles)
                start.record()
                graph.replay()
                end.record()
                late = start.query()
                # The launch of a second graph of many nodes waits for the first one's end.
                torch.cuda.synchronize()
                timed[name] = (_elapsed_ns(start, end), late)
            self._close(windows, timed)
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
        calls = {
            subject.name: max(min(_CALLS, _CALLS_NS // max(self._typical_ns.get(subject.name, 0), 1)), 1)
            for subject in subjects
        }
        windows = {name: Window(count) for name, count in calls.items()}
        spins = dict.fromkeys(calls, _CALLS_SPIN)
        order = list(subjects)
        for _ in range(samples):
            timed = {}
            for subject in order:
                torch.cuda.synchronize()
                # Longer than the loop below: an idle device would start each kernel at once.
                torch.cuda._sleep(spins[subject.name])
                inputs = subject.sets[0]
                started = time.perf_counter_ns()
                for _ in range(calls[subject.name]):
                    subject.call(*inputs)
                duration = time.perf_counter_ns() - started
                timed[subject.name] = (duration, False)
                # A device makes about two cycles a nanosecond: twice as long as this loop took.
                spins[subject.name] = min(max(4 * duration, _SHORTEST_SPIN), _LONGEST_SPIN)
            torch.cuda.synchronize()
            self._close(windows, timed)
            order.reverse()
        return windows


def _elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)
