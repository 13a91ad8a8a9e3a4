"""The timed windows on a device that is made up: order, flags, and what happens between samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fake_device
import pytest
import torch
from fake_device import Device

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


def timed(device: Device, regime: str, samples: int, *names: str) -> dict[str, window.Window]:
    bench = Bench(1 << 20, 1, seed=7)
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


def test_a_call_through_autograd_is_in_no_graph(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass runs on the stream of its forward pass, so its subject is left out of the graph regime."""
    captured: list[str] = []

    def capture(bench: Bench, subject: window.Subject) -> Any:
        captured.append(subject.name)
        return SimpleNamespace(replay=lambda: None), 4, 1000

    monkeypatch.setattr(Bench, "_capture", capture)
    plain, through = subject(device, "a"), subject(device, "b")
    through.sets = [(torch.ones(2, requires_grad=True) * 2,)]
    found = Bench(1 << 20, 1, seed=7).time([plain, through], "graph", 3)
    assert captured == ["a"]
    assert list(found) == ["a"]


def test_a_slow_subject_is_sampled_less_often_and_a_fast_one_as_often_as_asked(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty milliseconds a sample get a quarter of the samples, interleaved with the first of the others."""
    bench = Bench(1 << 20, 0, seed=7)
    subjects = [subject(device, name) for name in "ab"]
    bench.warm_up(subjects)
    monkeypatch.setitem(bench._typical_ns, "a", 20_000_000)
    device.log.clear()
    found = bench.time(subjects, "cold_clean", 40)
    assert {name: len(window.samples_ns) for name, window in found.items()} == {"a": 10, "b": 40}
    assert calls(device.log, "ab")[20:] == ["b"] * 30
    called = bench.time(subjects, "call", 3)
    assert {name: window.calls_per_sample for name, window in called.items()} == {"a": 1, "b": 50}


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
        if next(blocks) == 2:
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
    assert found.calls_per_sample == 50
    assert len(found.samples_ns) == 2
    assert all(value > 0 for value in found.samples_ns)
    spin = device.log.index("spin")
    assert device.log[spin + 1 : spin + 51] == ["a0"] * 50
    assert "event" not in device.log
