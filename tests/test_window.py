"""The timed windows on a device that is made up: order, flags, and what happens between samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_device
import pytest
import torch
from fake_device import Device
from torch._subclasses.fake_tensor import FakeTensorMode

from triton_kernel_lab.cases import KERNELS
from triton_kernel_lab.cases._base import DTYPES, load
from triton_kernel_lab.lab import nvml, window
from triton_kernel_lab.lab.window import Bench, Subject


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return fake_device.install(monkeypatch)


def subject(device: Device, name: str, sets: int = 2) -> Subject:
    def call(x: torch.Tensor) -> torch.Tensor:
        device.log.append(f"{name}{int(x[0])}")
        return x.float().clone()

    return Subject(name, call, [(torch.full((1,), index),) for index in range(sets)])


def timed(device: Device, regime: str, samples: int, *names: str, seed: int = 7) -> dict[str, window.Window]:
    bench = Bench(1 << 20, 1, seed)
    device.log.clear()
    return bench.time([subject(device, name) for name in names], regime, samples)


def calls(log: list[str], names: str) -> list[str]:
    """The timed calls: those between two events."""
    return [entry[0] for before, entry in itertools.pairwise(log) if before == "event" and entry[0] in names]


def test_candidates_alternate_and_the_order_reverses(device: Device) -> None:
    """Each block times every candidate once, and each block in the reverse order of the one before."""
    timed(device, "cold_clean", 4, "x", "y", "z")
    order = calls(device.log, "xyz")
    blocks = [order[start : start + 3] for start in range(0, 12, 3)]
    assert sorted(blocks[0]) == ["x", "y", "z"]
    assert blocks[1] == blocks[0][::-1]
    assert blocks[2:] == blocks[:2]


@pytest.mark.parametrize(("regime", "before"), [("graph", "event"), ("call", "spin")])
def test_no_regime_begins_in_the_order_of_the_tables(device: Device, regime: str, before: str) -> None:
    """A graph's replays and the host's loops begin in an order that the seed draws, and it reverses, too."""
    device.l2_bytes = 64
    first = set()
    for seed in range(8):
        timed(device, regime, 2, "x", "y", "z", seed=seed)
        order = [entry[0] for left, entry in itertools.pairwise(device.log) if left == before and entry[0] in "xyz"]
        # A graph is replayed on trial when it has been captured.
        order = order[-6:]
        assert order[3:] == order[2::-1]
        first.add("".join(order[:3]))
    assert len(first) > 2


@pytest.mark.parametrize(("regime", "before"), [("cold_clean", "clean"), ("cold_dirty", "dirty"), ("warm", "a0")])
def test_each_regime_leaves_its_own_caches_before_the_window(device: Device, regime: str, before: str) -> None:
    """A clean sweep, a dirty one, or the same call, always outside the two events."""
    timed(device, regime, 1, "a")
    start = device.log.index("event")
    assert device.log[start - 1] == before
    assert device.log[start : start + 3] == ["event", "a0", "event"]
    assert "spin" in device.log[:start]


def test_input_sets_rotate_from_block_to_block(device: Device) -> None:
    """No candidate is timed twice in a row on the same inputs."""
    timed(device, "cold_clean", 3, "a")
    inside = [after for before, after in zip(device.log, device.log[1:], strict=False) if before == "event"]
    assert [entry for entry in inside if entry.startswith("a")] == ["a0", "a1", "a0"]


def test_samples_are_whole_nanoseconds_of_the_event_pair(device: Device) -> None:
    """The float milliseconds of CUDA become the integer nanoseconds that they stand for."""
    assert timed(device, "cold_clean", 3, "a")["a"].samples_ns == [4544, 4544, 4544]


def test_f79_nothing_but_the_call_lies_between_the_events(device: Device) -> None:
    """Neither a sweep nor a poisoning nor a wait is in the window."""
    timed(device, "cold_clean", 5, "a", "b")
    starts = [index for index, entry in enumerate(device.log) if entry == "event"][::2]
    assert len(starts) == 10
    assert all(device.log[start + 2] == "event" for start in starts)


def test_a_window_that_waited_for_the_host_is_flagged(device: Device) -> None:
    """A start event that the device has passed when the host looks marks that sample alone."""
    device.exposed = {1}
    found = timed(device, "cold_clean", 4, "a")["a"]
    assert found.flags == {"launch_exposed": [1], "clock_low": [], "power_cap": [], "thermal": []}


def test_a_window_that_waited_for_the_host_spins_twice_as_long_next_time(device: Device) -> None:
    """The spin of a subject grows until the host stays ahead, and only that subject's."""
    device.exposed = {0, 1}
    timed(device, "cold_clean", 4, "a")
    first, *others = device.spins
    assert others == [2 * first, 4 * first, 4 * first]


class Launches:
    """Samples whose call takes the host so long to launch that no spin of fewer cycles covers it."""

    def __init__(self, device: Device, cycles: float) -> None:
        self._device, self._cycles = device, cycles

    def __contains__(self, sample: object) -> bool:
        return self._device.spins[-1] < self._cycles


def test_a_warm_up_without_a_late_launch_ends_with_its_time(device: Device) -> None:
    """Three rounds of a sample behind a sweep and one without, and no more, where the time is over before them."""
    Bench(1 << 20, 0, seed=7).warm_up([subject(device, "a")])
    assert len(device.spins) == 6


def test_a_warm_up_goes_on_until_every_spin_covers_its_launch(device: Device) -> None:
    """A call of many launches, for which three rounds double the spin too seldom, begins its windows unexposed."""
    bench, slow = Bench(1 << 20, 0, seed=7), subject(device, "a")
    device.exposed = Launches(device, 5_000_000)
    bench.warm_up([slow])
    for regime in window.EVENT_REGIMES:
        assert bench.time([slow], regime, 5)["a"].flags["launch_exposed"] == []


def test_a_warm_up_ends_where_no_spin_can_cover_the_launch(device: Device) -> None:
    """A call that waits for the device is always exposed; its spins end at their longest, and its rounds with them."""
    device.exposed = Launches(device, math.inf)
    Bench(1 << 20, 0, seed=7).warm_up([subject(device, "a")])
    assert max(device.spins) == window._LONGEST_SPIN
    assert len(device.spins) <= 2 * (3 + window._MORE_ROUNDS)


def test_a_replay_that_waited_for_the_host_spins_twice_as_long_next_time(device: Device) -> None:
    """Only the samples of a graph whose spin was too short are flagged, and only that graph's spin grows."""
    # Two replays on trial come before the samples.
    device.l2_bytes, device.exposed = 64, {2, 5}
    found = timed(device, "graph", 4, "a", "b")
    assert sorted(each.flags["launch_exposed"] for each in found.values()) == [[], [0, 1]]
    late, other = device.spins[2:4]
    assert device.spins[2:] == [late, other, other, 2 * late, 4 * late, other, other, 4 * late]


def test_a_spin_that_is_too_short_for_a_graph_grows_before_its_first_sample(device: Device) -> None:
    """The replay on trial is exposed, is no sample, and doubles the spin of those that are."""
    device.l2_bytes, device.exposed = 64, {0}
    found = timed(device, "graph", 2, "a")["a"]
    assert (len(found.samples_ns), found.flags["launch_exposed"]) == (2, [])
    assert device.spins[1:] == [2 * device.spins[0]] * 2


def test_no_spin_is_doubled_beyond_the_longest(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose launch asked for more than that from the start keeps what it has."""
    monkeypatch.setattr(window, "_LONGEST_SPIN", 150_000)
    device.l2_bytes, device.exposed = 64, range(8)
    timed(device, "cold_clean", 4, "a")
    assert device.spins == [50_000, 100_000, 150_000, 150_000]
    device.spins.clear()
    timed(device, "graph", 4, "a")
    assert min(device.spins) == max(device.spins) > 150_000


def test_a_call_through_autograd_is_in_no_graph(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass runs on the stream of its forward pass, so its subject is left out of the graph regime."""
    captured: list[str] = []

    def capture(bench: Bench, subject: window.Subject) -> Any:
        captured.append(subject.name)
        return window._Captured(SimpleNamespace(replay=lambda: None), [*subject.sets], 1000)

    monkeypatch.setattr(Bench, "_capture", capture)
    plain, through = subject(device, "a"), subject(device, "b")
    through.sets = [(torch.ones(2, requires_grad=True) * 2,)]
    found = Bench(1 << 20, 1, seed=7).time([plain, through], "graph", 3)
    assert captured == ["a"]
    assert list(found) == ["a"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_calls_of_a_graph_read_twice_the_l2(kernel: str) -> None:
    """So do those of every timed cell on an H200, as far as a graph holds as many."""
    l2_bytes, case = 52_428_800, load(kernel)
    for dims, dtype in case.cells:
        read_bytes = sum(case.cost(dims, DTYPES[dtype]).read.values())
        with FakeTensorMode():
            inputs = case.variants[0].inputs(dims, DTYPES[dtype], torch.Generator().manual_seed(7))
            count = window._graph_calls(Subject("a", lambda *_: (), [inputs] * 3, read_bytes), l2_bytes)
        assert count * read_bytes >= 2 * l2_bytes or count == window._GRAPH_CALLS, (dims, dtype)


def test_what_a_call_does_not_read_counts_for_nothing() -> None:
    """Of inputs that are read in part more are taken, and never fewer than if they were read in full."""
    inputs = [(torch.empty(1 << 20, dtype=torch.uint8, device="meta"),)]

    def taken(read_bytes: int | None) -> int:
        return window._graph_calls(Subject("a", lambda *_: (), inputs, read_bytes), 8 << 20)

    assert [taken(None), taken(1 << 20), taken(1 << 22), taken(1 << 18)] == [16, 16, 16, 64]
    assert taken(1) == 1 + window._CLONE_BYTES // (1 << 20)


def test_what_reads_next_to_nothing_gets_as_many_calls_as_a_graph_holds(device: Device) -> None:
    """Four bytes a call never make twice the L2; the number of calls ends at its limit."""
    assert timed(device, "graph", 1, "a")["a"].calls_per_sample == window._GRAPH_CALLS


def test_no_two_calls_of_a_graph_share_memory(device: Device) -> None:
    """Each has every tensor for itself, of the values, strides and alignment of its set, though it reads a part."""
    sets = [(torch.arange(6000).view(60, 100).t() + index, torch.tensor(index)) for index in range(3)]
    seen: list[tuple[torch.Tensor, ...]] = []

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return inputs[0] + 1

    bench = Bench(1 << 20, 1, seed=7)
    count = bench.time([Subject("a", call, sets, 10_000)], "graph", 1)["a"].calls_per_sample
    assert count == math.ceil((1 << 20) / 10_000)
    captured = seen[-count:]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for inputs in captured for x in inputs)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for index, inputs in enumerate(captured):
        for x, given in zip(inputs, sets[index % 3], strict=True):
            assert x.equal(given)
            assert x.stride() == given.stride()
    for earlier, later in zip(captured[3:], captured[6:], strict=False):
        assert all((y.data_ptr() - x.data_ptr()) % 512 == 0 for x, y in zip(earlier, later, strict=True))


def test_a_slow_subject_is_sampled_less_often_and_a_fast_one_as_often_as_asked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four milliseconds a sample get an eighth of the samples, interleaved with the first of the others."""
    bench = Bench(1 << 20, 0, seed=7)
    subjects = [subject(device, name) for name in "ab"]
    bench.warm_up(subjects)
    monkeypatch.setitem(bench._typical_ns, "a", 4_000_000)
    device.log.clear()
    found = bench.time(subjects, "cold_clean", 80)
    assert {name: len(window.samples_ns) for name, window in found.items()} == {"a": 10, "b": 80}
    assert calls(device.log, "ab")[20:] == ["b"] * 70
    called = bench.time(subjects, "call", 3)
    assert {name: window.calls_per_sample for name, window in called.items()} == {"a": 2, "b": 32}


Change = Callable[[Device], None]


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        (lambda device: setattr(device, "clock_mhz", 1170), "clock_low"),
        (lambda device: setattr(device, "reasons", ("power_cap",)), "power_cap"),
        (lambda device: setattr(device, "reasons", ("hardware_thermal",)), "thermal"),
    ],
    ids=["clock", "power", "heat"],
)
def test_f80_a_throttled_block_is_flagged(
    device: Device, monkeypatch: pytest.MonkeyPatch, change: Change, flag: str
) -> None:
    """Samples from the block on in which the driver reports a lower clock or a reason for one are marked."""
    reading = device.reading
    blocks = iter(range(100))

    def read(index: int) -> nvml.Reading:
        # The first reading is that before the first block.
        if next(blocks) == 3:
            change(device)
        return reading(index)

    monkeypatch.setattr(nvml, "read", read)
    found = timed(device, "cold_clean", 4, "a", "b")
    for each in found.values():
        assert each.flags[flag] == [2, 3]
        assert not any(positions for name, positions in each.flags.items() if name != flag)


def test_f80_a_steady_clock_flags_nothing_even_where_the_driver_does_not_tell_it(device: Device) -> None:
    """No reading is no reason to throw samples away."""
    device.clock_mhz = None  # type: ignore[assignment]  # As NVML answers on boards without the sensor.
    found = timed(device, "cold_clean", 4, "a")["a"]
    assert not any(found.flags.values())


class Card:
    """Reaches its power limit after some calls, and stays there until it has rested 2 ms for each of them."""

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch, endures: float) -> None:
        self._device, self._endures, self._heat = device, endures, 0.0
        monkeypatch.setattr(device, "pause", self._rest)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        self._heat += 1
        if self._heat > self._endures:
            self._device.reasons = ("power_cap",)
        return x + 1

    def _rest(self, seconds: float) -> None:
        self._device.pauses.append(seconds)
        self._heat = max(self._heat - seconds / 0.002, 0)
        if not self._heat:
            self._device.reasons = ()


@pytest.mark.parametrize("endures", [4, 15, 60])
def test_a_card_at_its_power_limit_rests_and_few_samples_are_flagged(
    device: Device, monkeypatch: pytest.MonkeyPatch, endures: int
) -> None:
    """The sample that met the limit stays flagged, and fewer than a tenth of the others do."""
    card = Card(device, monkeypatch, endures)
    found = Bench(1 << 20, 1, seed=7).time([Subject("a", card.call, [(torch.zeros(1),)])], "cold_clean", 200)["a"]
    assert len(found.samples_ns) == 200
    assert 0 < len(found.flags["power_cap"]) < 20
    assert sum(device.pauses) <= 3


def test_a_card_that_the_warm_up_brought_to_its_limit_rests_before_the_first_sample(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that was met before the window costs the window no sample."""
    card = Card(device, monkeypatch, 40)
    for _ in range(41):
        card.call(torch.zeros(1))
    found = Bench(1 << 20, 1, seed=7).time([Subject("a", card.call, [(torch.zeros(1),)])], "cold_clean", 10)["a"]
    assert device.pauses
    assert not found.flags["power_cap"]


@pytest.mark.parametrize("regime", ["cold_clean", "graph", "call"])
@pytest.mark.parametrize("reason", ["power_cap", "power_brake"])
def test_a_card_that_is_always_at_its_limit_stalls_no_cell(device: Device, regime: str, reason: str) -> None:
    """All pauses of a window together take three seconds at most, and no single one more than a quarter."""
    device.reasons = (reason,)
    assert timed(device, regime, 12, "a", "b")["a"].flags["power_cap"] == list(range(12))
    assert 2.9 < round(sum(device.pauses), 6) <= 3
    assert 0.02 == device.pauses[0] <= max(device.pauses) <= 0.25


def test_a_card_that_meets_its_limit_in_every_block_rests_longer_each_time(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses double from one such block to the next, up to a quarter of a second."""
    card = Card(device, monkeypatch, 0)
    Bench(1 << 20, 1, seed=7).time([Subject("a", card.call, [(torch.zeros(1),)])], "cold_clean", 8)
    assert device.pauses == pytest.approx([0.02, 0.04, 0.08, 0.16, *[0.25] * 4])


@pytest.mark.parametrize("reasons", [(), ("thermal",)])
def test_only_a_power_cap_is_rested_off(device: Device, reasons: tuple[str, ...]) -> None:
    """Heat takes longer to leave than a cell takes."""
    device.reasons = reasons
    timed(device, "cold_clean", 20, "a")
    assert device.pauses == []


def test_a_device_that_reports_no_l2_is_refused(device: Device) -> None:
    """Nothing could be sized by it: every sweep would do, and a graph would run from the cache."""
    device.l2_bytes = 0
    with pytest.raises(RuntimeError, match="device 0 reports an L2 cache of 0 bytes"):
        Bench(1 << 20, 1, seed=7)


def test_a_sweep_of_less_than_twice_the_l2_is_refused(device: Device) -> None:
    """The message names the parameter, in whole MiB as it is given, and what would do."""
    device.l2_bytes = (1 << 20) + 1
    with pytest.raises(ValueError, match=r"^params\.measure\.sweep_mib: expected 3 or more, .* found 2\.$"):
        Bench(2 << 20, 1, seed=7)
    Bench(3 << 20, 1, seed=7)


def test_outputs_are_poisoned_before_their_memory_is_used_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call returned is NaN once its window has closed."""
    kept: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.float() + 1)
        return kept[-1]

    Bench(1 << 20, 1, seed=7).time([Subject("a", call, [(torch.zeros(3),)])], "cold_clean", 2)
    assert all(bool(out.isnan().all()) for out in kept[-2:])


def test_a_call_is_timed_by_the_host_while_the_device_is_busy(device: Device) -> None:
    """The call regime times many calls behind a spin, and takes no events."""
    found = timed(device, "call", 2, "a")["a"]
    assert found.calls_per_sample == 32
    assert len(found.samples_ns) == 2
    assert all(value > 0 for value in found.samples_ns)
    spin = device.log.index("spin")
    assert device.log[spin + 1 : spin + 33] == ["a0"] * 32
    assert "event" not in device.log
