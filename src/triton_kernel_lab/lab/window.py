"""Timed windows: what one sample is, in each of the five regimes.

cold_clean, cold_dirty and warm time one call between two CUDA events. graph
times the replay of a CUDA graph whose calls rotate over inputs of which they
together read twice the L2. call times the host, with the device kept busy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns, sleep
from typing import Any

import torch

from triton_kernel_lab.lab import nvml
from triton_kernel_lab.lab.sweep import Sweep

__all__ = ["EVENT_REGIMES", "Bench", "Subject", "Window"]

EVENT_REGIMES = ("cold_clean", "cold_dirty", "warm")
_CALLS = 32
# Clock cycles, some 5 ms: longer than that many calls take most hosts, until the first sample tells.
_CALLS_SPIN = 10_000_000
# Capturing costs the host about what a call does: for an L2 of 60 MiB up to 0.9 s a subject of the timed cells, by
# their host times. The smallest of them needs 4552 calls; only what reads less than 15 KiB meets this limit.
_GRAPH_CALLS = 8192
# Of one subject. Up to ten are captured at once, and their clones should leave most of a large card to everything else.
_CLONE_BYTES = 2 << 30
# What the caching allocator rounds to: a copy starts no less aligned than a tensor of its own.
_ALIGNMENT = 512
# A sample that takes longer than this is taken less often: a slow baseline would set the pace, and a large product
# would take the card to its power limit.
_SLOW_NS = 500_000
# A graph of small calls is long whoever wrote them: ten such samples are a tenth of a second.
_SLOW_GRAPH_NS = 10_000_000
_FEWEST = 5
# What the calls of one sample of the host may keep the device busy with.
_CALLS_NS = 10_000_000
_LOW_CLOCK = 0.9
# Clock cycles, some 25 and 75 us: with a sweep behind it, and without one, longer than most calls take to enqueue.
_SWEPT_SPIN, _SHORTEST_SPIN = 50_000, 150_000
_LONGEST_SPIN = 1 << 26
# Eleven doublings take the shortest spin of an event regime to the longest, and a last round finds nothing exposed.
_MORE_ROUNDS = 12
# Seconds. The total bounds what a card that never gets below its power limit can cost a window.
_SHORTEST_PAUSE, _FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_TOTAL = 0.001, 0.02, 0.25, 3.0
# Pauses wear off over some fifteen blocks: a card that went on without any would soon be back at its limit.
_WEAR = 0.8


@dataclass
class Subject:
    """Something to time: ``call`` takes the tensors of one input set.

    ``read_bytes`` is what a call reads of them, where that is not all.
    """

    name: str
    call: Callable[..., Any]
    sets: Sequence[Sequence[torch.Tensor]]
    read_bytes: int | None = None


@dataclass
class Window:
    """The samples of one subject in one regime: whole-sample nanoseconds, and flagged positions."""

    calls_per_sample: int
    samples_ns: list[int] = field(default_factory=list)
    flags: dict[str, list[int]] = field(
        default_factory=lambda: {"launch_exposed": [], "clock_low": [], "power_cap": [], "thermal": []}
    )


@dataclass
class _Captured:
    """A graph of one call for each set of ``inputs``, which must outlive it: it knows only their addresses."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Sequence[torch.Tensor]]
    spin_cycles: int

    def replay(self) -> tuple[int, bool]:
        """Replay it behind its spin: nanoseconds, and whether the device waited for the host."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self.spin_cycles)
        start.record()
        self.graph.replay()
        end.record()
        exposed = start.query()
        if exposed:
            self.spin_cycles = _longer(self.spin_cycles)
        # The launch of a second graph of many nodes waits for the first one's end.
        torch.cuda.synchronize()
        return _elapsed_ns(start, end), exposed


def _longer(spin_cycles: int) -> int:
    """Twice the spin, within the limit; one that is beyond it already, as the launch of a large graph needs, stays."""
    return max(spin_cycles, min(2 * spin_cycles, _LONGEST_SPIN))


def _poison(outputs: Any) -> None:
    for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)


def _capped(reading: nvml.Reading) -> bool:
    return "power_cap" in reading.reasons or "power_brake" in reading.reasons


def _graph_calls(subject: Subject, l2_bytes: int) -> int:
    """How many calls read twice the L2, each from memory of its own, as far as the limits allow."""
    sets = subject.sets
    set_bytes: int = max(sum(tensor.nbytes for tensor in sets[0]), 1)
    read_bytes = set_bytes if subject.read_bytes is None else min(max(subject.read_bytes, 1), set_bytes)
    affordable = len(sets) + _CLONE_BYTES // set_bytes
    return max(min(math.ceil(2 * l2_bytes / read_bytes), affordable, _GRAPH_CALLS), len(sets))


def _copies(tensor: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Copies of a tensor, strided as its clones would be, in a single allocation: thousands cost the host too much."""
    like = torch.empty_like(tensor, device="meta")
    step = math.ceil(like.nbytes / _ALIGNMENT) * _ALIGNMENT // like.itemsize
    block = torch.empty(count * step, dtype=tensor.dtype, device=tensor.device)
    copies = block.as_strided((count, *tensor.shape), (step, *like.stride())).copy_(tensor.detach())
    return tuple(copies)


def _rotated(sets: Sequence[Sequence[torch.Tensor]], count: int) -> list[Sequence[torch.Tensor]]:
    """The sets and then copies of each in turn, ``count`` in all, no two in the same memory."""
    turn = len(sets)
    copies = [[_copies(x, len(range(turn + i, count, turn))) for x in each] for i, each in enumerate(sets)]
    return [*sets, *(tuple(each[i // turn - 1] for each in copies[i % turn]) for i in range(turn, count))]


class Bench:
    """One process's measuring bench on the current device.

    Raises:
        RuntimeError: the device reports no L2 cache.
        ValueError: a sweep of ``sweep_bytes`` is less than twice the L2.
    """

    def __init__(self, sweep_bytes: int, warmup_ms: int, seed: int) -> None:
        self.device = torch.cuda.current_device()
        self.readings: list[nvml.Reading] = []
        self._l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        if not self._l2_bytes:
            raise RuntimeError(
                f"device {self.device} reports an L2 cache of 0 bytes, and sweeps and graphs are sized by it."
            )
        if sweep_bytes < 2 * self._l2_bytes:
            least, found = math.ceil(2 * self._l2_bytes / (1 << 20)), sweep_bytes >> 20
            raise ValueError(f"params.measure.sweep_mib: expected {least} or more, twice the L2 cache, found {found}.")
        self._sweep = Sweep(sweep_bytes, torch.device("cuda", self.device))
        self._warmup_ns = warmup_ms * 1_000_000
        self._order = random.Random(seed)
        self._spins: dict[tuple[str, bool], int] = {}
        self._typical_ns: dict[str, int] = {}
        self._fastest_mhz = 0

    def warm_up(self, subjects: Sequence[Subject]) -> None:
        """Run the real loop until lazy work is done, the clock has settled and every spin is long enough."""
        self._spins = {}
        end = perf_counter_ns() + self._warmup_ns
        rounds, grew = 0, True
        while rounds < 3 or perf_counter_ns() < end:
            grew = self._warm_up_round(subjects, rounds)
            rounds += 1
        # The time may hold no more than three rounds of slow calls, and many launches need a spin doubled more often.
        for extra in range(_MORE_ROUNDS):
            if not grew:
                break
            grew = self._warm_up_round(subjects, rounds + extra)

    def _warm_up_round(self, subjects: Sequence[Subject], block: int) -> bool:
        """A sample of each subject; whether a spin had to grow, which the longest one cannot."""
        before = dict(self._spins)
        for subject in subjects:
            # Warm as well, whose spin has no sweep behind it.
            self._typical_ns[subject.name], _ = self._sample(subject, "cold_clean", block)
            self._sample(subject, "warm", block)
        return self._spins != before

    def settle(self, subjects: Sequence[Subject]) -> None:
        """Call every subject and wait: what a call takes from the allocator is taken here, not in a window.

        Capturing a graph empties the allocator's cache.
        """
        for subject in subjects:
            for _ in range(1 if self._typical_ns.get(subject.name, 0) > _SLOW_NS else 3):
                subject.call(*subject.sets[0])
        torch.cuda.synchronize()

    def time(self, subjects: Sequence[Subject], regime: str, samples: int) -> dict[str, Window]:
        """Samples of every subject, interleaved; the order is drawn, and reverses from block to block.

        A subject whose sample takes longer than 0.5 ms, or 10 ms of a graph, gets fewer of them, in the first blocks.
        A card at its power limit gets up to 3 s of rest between blocks.
        """
        self.settle(subjects)
        if regime == "graph":
            return self._time_graphs(subjects, samples)
        if regime == "call":
            return self._time_calls(subjects, samples)
        named = {subject.name: subject for subject in subjects}
        windows = {name: Window(1) for name in named}
        counts = {name: self._worth(name, samples) for name in named}
        for block, order in self._blocks(named, samples):
            timed = {}
            for name in (each for each in order if block < counts[each]):
                timed[name] = self._sample(named[name], regime, block)
            self._close(windows, timed)
        return windows

    def _blocks(self, names: Iterable[str], samples: int) -> Iterator[tuple[int, list[str]]]:
        """Each block and its order of subjects; whoever takes the next one has closed it."""
        order = list(names)
        self._order.shuffle(order)
        rest, busy, left = 0.0, 0.0, _PAUSE_TOTAL
        # The warm-up or the window before may have brought the card to its limit.
        capped = _capped(nvml.read(self.device))
        for block in range(samples):
            # At least as long as the block: a card that rests half of the time draws well below its limit.
            rest = min(max(2 * rest, _FIRST_PAUSE, busy), _LONGEST_PAUSE) if capped else _WEAR * rest
            left -= self._pause(min(rest, left), left, capped)
            began = perf_counter_ns()
            yield block, order
            busy = (perf_counter_ns() - began) / 1e9
            order.reverse()
            capped = _capped(self.readings[-1])

    def _pause(self, seconds: float, most: float, capped: bool) -> float:
        """Rest, and if the card was capped, until the driver no longer says so; returns the seconds taken."""
        taken = 0.0
        while seconds >= _SHORTEST_PAUSE:
            sleep(seconds)
            taken += seconds
            capped = capped and _capped(nvml.read(self.device))
            seconds = min(2 * seconds, _LONGEST_PAUSE, most - taken) if capped else 0.0
        return taken

    def _worth(self, name: str, samples: int, calls: int = 1, slow_ns: int = _SLOW_NS) -> int:
        """How many samples of so many calls a subject gets."""
        duration = self._typical_ns.get(name, 0) * calls
        return samples if duration <= slow_ns else max(samples * slow_ns // duration, min(samples, _FEWEST))

    def _sample(self, subject: Subject, regime: str, block: int) -> tuple[int, bool]:
        """One sample behind a spin, so that the host stays ahead: nanoseconds, and whether it did not."""
        inputs = subject.sets[block % len(subject.sets)]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        warm = regime == "warm"
        spin = self._spins.setdefault((subject.name, warm), _SHORTEST_SPIN if warm else _SWEPT_SPIN)
        torch.cuda._sleep(spin)
        if warm:
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
            self._spins[subject.name, warm] = _longer(spin)
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
            "power_cap": _capped(reading),
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
        calls = {name: len(each.inputs) for name, each in graphs.items()}
        windows = {name: Window(count) for name, count in calls.items()}
        counts = {name: self._worth(name, samples, count, _SLOW_GRAPH_NS) for name, count in calls.items()}
        for block, order in self._blocks(graphs, samples):
            self._close(windows, {name: graphs[name].replay() for name in order if block < counts[name]})
        return windows

    def _capture(self, subject: Subject) -> _Captured:
        """A graph of calls that together read twice the L2."""
        rotated = _rotated(subject.sets, _graph_calls(subject, self._l2_bytes))
        turn = len(subject.sets)
        for inputs in rotated[turn : 2 * turn]:
            # Copies may lie in another order than their originals, which is another signature to some.
            subject.call(*inputs)
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph):
            for inputs in rotated:
                # Kept until the capture ends, so that each call writes memory of its own.
                kept.append(subject.call(*inputs))
        graph.replay()
        torch.cuda.synchronize()
        started = perf_counter_ns()
        graph.replay()
        # The device must still spin when the host is done with the launch, which for many nodes takes long.
        spin_cycles = 200_000 + 4 * (perf_counter_ns() - started)
        torch.cuda.synchronize()
        captured = _Captured(graph, rotated, spin_cycles)
        # A spin that is too short grows here, and not in a window of ten samples.
        captured.replay()
        return captured

    def _time_calls(self, subjects: Sequence[Subject], samples: int) -> dict[str, Window]:
        named = {subject.name: subject for subject in subjects}
        calls = {name: max(min(_CALLS, _CALLS_NS // max(self._typical_ns.get(name, 0), 1)), 1) for name in named}
        windows = {name: Window(count) for name, count in calls.items()}
        counts = {name: self._worth(name, samples, count, _CALLS_NS) for name, count in calls.items()}
        spins = dict.fromkeys(calls, _CALLS_SPIN)
        for block, order in self._blocks(named, samples):
            timed = {}
            for name in (each for each in order if block < counts[each]):
                torch.cuda.synchronize()
                # Longer than the loop below: an idle device would start each kernel at once.
                torch.cuda._sleep(spins[name])
                subject, inputs = named[name], named[name].sets[0]
                started = perf_counter_ns()
                for _ in range(calls[name]):
                    subject.call(*inputs)
                duration = perf_counter_ns() - started
                timed[name] = (duration, False)
                # A device makes about two cycles a nanosecond: half as long again as this loop took.
                spins[name] = min(max(3 * duration, _SHORTEST_SPIN), _LONGEST_SPIN)
            torch.cuda.synchronize()
            self._close(windows, timed)
        return windows


def _elapsed_ns(start: torch.cuda.Event, end: torch.cuda.Event) -> int:
    milliseconds: float = start.elapsed_time(end)
    return round(milliseconds * 1e6)
