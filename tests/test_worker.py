"""One measuring process: cheats that it must not time, disturbances that it must not keep, and what it times first."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_device
import pytest
import torch
from fake_device import Device
from operator_checks import DEVICE

from triton_kernel_lab import routing
from triton_kernel_lab.analysis import stats
from triton_kernel_lab.cases import KERNELS
from triton_kernel_lab.cases._base import Dims, Tensors, load
from triton_kernel_lab.lab import candidates, worker
from triton_kernel_lab.lab.candidates import Candidate
from triton_kernel_lab.lab.window import Bench, Subject
from triton_kernel_lab.ops import rms_norm as norm_op
from triton_kernel_lab.ops.rms_norm import rms_norm

ROOT = Path(__file__).parents[1]
CASE = load("rms_norm")
RIGHT: Callable[..., torch.Tensor] = CASE.variants[0].eager
SAMPLES = {"cold_clean": 12, "warm": 4}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A made-up device; inputs and calls are the CPU's."""

    def draw(case: Any, dims: Dims, dtype: torch.dtype, seed: int, where: torch.device) -> Tensors:
        return case.variants[0].inputs(dims, dtype, torch.Generator().manual_seed(seed))  # type: ignore[no-any-return]

    monkeypatch.setattr(worker, "draw", draw)
    monkeypatch.setattr(worker, "_disturbances", dict)
    return fake_device.install(monkeypatch)


def measured(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], samples: dict[str, int] | None = None
) -> dict[str, Any]:
    """The record of a candidate that runs ``call`` in the operator's place."""
    monkeypatch.setattr(candidates, "build", lambda *arguments: [Candidate("triton", "triton", "triton", call)])
    # A real device has an L2, which the sweep has to exceed.
    sweep_bytes = 256 << 20 if torch.cuda.is_available() else 1 << 20
    with routing.strict(), torch.no_grad():
        (record,) = worker.measure_cell(CASE, (8, 128), torch.float16, Bench(sweep_bytes, 1, 7), samples or SAMPLES, 7)
    return record


# Cheats.


def caching() -> Callable[..., torch.Tensor]:
    """Computes once, and hands the same output out for ever."""
    kept: list[torch.Tensor] = []

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(RIGHT(*inputs))
        return kept[0]

    return call


def right_for_ten_calls() -> Callable[..., torch.Tensor]:
    """Behaves while it is likely to be checked."""
    calls = 0

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = RIGHT(*inputs)
        return out if calls <= 10 else torch.zeros_like(out)

    return call


def idle_once_warm() -> Callable[..., torch.Tensor]:
    """Stops working when it is called often, and hands out uninitialised memory."""
    calls = 0

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return RIGHT(*inputs) if calls < 5 else torch.empty_like(inputs[0])

    return call


def spoiling() -> Callable[..., torch.Tensor]:
    """Writes its result over its input."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = RIGHT(x, weight)
        return x.copy_(out)

    return call


def by_address() -> Callable[..., torch.Tensor]:
    """Gives again what it made of whatever lay at the same address before."""
    kept: dict[int, torch.Tensor] = {}

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(inputs[0].data_ptr(), RIGHT(*inputs))

    return call


CHEATS = {
    "by_address": (by_address, "wrong after timing"),
    "caching": (caching, "wrong after timing"),
    "right_for_ten_calls": (right_for_ten_calls, "wrong after timing"),
    "idle_once_warm": (idle_once_warm, "wrong after timing"),
    "spoiling": (spoiling, "wrong before timing: input 0 was changed"),
}


def test_an_honest_candidate_is_timed_in_each_regime(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cheats are made of passes, so nothing else is what voids them."""
    record = measured(monkeypatch, RIGHT)
    assert (record["status"], record["reason"]) == ("ok", None)
    assert [(run["regime"], len(run["samples_ns"])) for run in record["runs"]] == list(SAMPLES.items())


@pytest.mark.parametrize("cheat", CHEATS)
def test_f86_a_planted_cheat_is_void(device: Device, monkeypatch: pytest.MonkeyPatch, cheat: str) -> None:
    """Each is found beside the timed windows, and its times count for nothing."""
    make, reason = CHEATS[cheat]
    record = measured(monkeypatch, make())
    assert record["status"] == "invalid"
    assert reason in record["reason"]


@pytest.mark.gpu
def test_f86_work_on_another_stream_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that leaves its work to a stream nobody waits for has no time of its own."""
    side = torch.cuda.Stream()

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(inputs[0])
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            out.copy_(RIGHT(*inputs))
        return out

    record = measured(monkeypatch, call)
    torch.cuda.synchronize()
    assert record["status"] == "invalid"
    assert "wrong before timing" in record["reason"]


def test_f68_a_kernel_that_falls_back_is_not_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton does not serve the call the process ends, and no row holds PyTorch's time."""

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        routing.fallback("rms_norm", "launch", "made up")
        return RIGHT(*inputs)

    with pytest.raises(routing.FallbackError, match=r"rms_norm: not served by Triton \(launch: made up\)"):
        measured(monkeypatch, call)
    assert "event" not in device.log


def test_f68_falling_back_between_the_checks_ends_the_process(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback that begins once timing has begun is met all the same."""
    calls = 0

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 8:
            routing.fallback("rms_norm", "device", "made up")
        return RIGHT(*inputs)

    with pytest.raises(routing.FallbackError):
        measured(monkeypatch, call)


def noisy(*inputs: torch.Tensor) -> torch.Tensor:
    """One element is off by three times the limit of an element; the norm hardly notices."""
    out = RIGHT(*inputs)
    out.view(-1)[0] += 0.008
    return out


def test_the_eager_form_is_judged_by_its_norm_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets the limit of an element itself; zeros in its place are void all the same, and so is another's outlier."""
    found = {}
    for name, call in (("eager", noisy), ("other", noisy), ("zeros", lambda x, weight: torch.zeros_like(x))):
        candidate = Candidate("eager" if name == "zeros" else name, "baseline", "torch", call)
        monkeypatch.setattr(candidates, "build", lambda *arguments, made=candidate: [made])
        with torch.no_grad():
            (record,) = worker.measure_cell(CASE, (8, 128), torch.float16, Bench(1 << 20, 1, 7), {"warm": 2}, 7)
        found[name] = record["status"]
    assert found == {"eager": "ok", "other": "invalid", "zeros": "invalid"}


def test_what_a_call_needs_of_memory_is_on_record(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's peak during one call, without what was allocated before; none where nothing was timed."""
    device.peak_bytes = 12_288
    assert measured(monkeypatch, RIGHT)["peak_bytes"] == 12_288
    assert measured(monkeypatch, spoiling())["peak_bytes"] is None


@pytest.mark.gpu
def test_the_memory_of_a_call_is_its_output_and_what_it_builds_meanwhile() -> None:
    """A sum of 4 MiB through a product of 8 MiB needs 12 MiB at its peak, whatever was there before."""
    x = torch.ones(1 << 20, device="cuda")
    kept = torch.ones(1 << 24, device="cuda")

    def call(x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, x])
        return wide[: 1 << 20] + 1

    assert worker._peak_bytes(Subject("call", call, [(x,)])) == 12 << 20
    del kept


def test_a_subject_says_what_a_call_reads(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logical bytes of the case: graphs are sized by them and not by the inputs, of which some are read in part."""
    given: list[int | None] = []
    monkeypatch.setattr(Bench, "warm_up", lambda self, subjects: given.extend(each.read_bytes for each in subjects))
    measured(monkeypatch, RIGHT, {})
    assert given == [8 * 128 * 2 + 128 * 2]


def test_a_peer_whose_import_computes_on_the_device_is_loaded_in_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that waits has loaded the other peers, and is no company to those that measure."""
    loaded: list[str] = []
    (late,) = worker._LATE_PEERS
    peers = {name: lambda name=name: loaded.append(name) for name in ("early", late, "other")}
    monkeypatch.setattr(worker, "load", lambda kernel: SimpleNamespace(peers=peers))
    # Nobody gives it its turn.
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    plan = tmp_path / "plan.json"
    plan.write_text('{"kernel": "int4_linear"}', encoding="utf-8")
    assert worker.main([str(plan), str(tmp_path / "raw.json")]) == 1
    assert loaded == ["early", "other"]


def test_every_late_peer_is_a_peer_of_a_case() -> None:
    """A peer that is renamed in its case would be loaded early again."""
    assert {name for kernel in KERNELS for name in load(kernel).peers} >= worker._LATE_PEERS


# What is in a window, and what is not.


def test_f61_a_slow_first_call_is_in_no_sample(device: Device) -> None:
    """Tuning and compiling, here a second of sleep, end before the first timed call, whatever the regime."""
    calls = 0

    def tuned(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(1)
        return x + 1

    bench = Bench(1 << 20, 1, 7)
    subject = Subject("tuned", tuned, [(torch.zeros(3),)])
    window = bench.time([subject], "call", 2)["tuned"]
    assert max(window.samples_ns) < 500_000_000
    calls = 0
    device.log.clear()
    started = time.perf_counter()
    cold = bench.time([subject], "cold_clean", 1)["tuned"]
    assert time.perf_counter() - started >= 1
    assert len(cold.samples_ns) == 1
    # The slow call was made, and waited for, before there was any event.
    assert device.log.index("synchronize") < device.log.index("event")


def test_f61_a_signature_is_bound_for_itself() -> None:
    """Dtype, the weight's dtype, strides, alignment and device are part of a plan's key; a repeat is not."""

    def ones(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=DEVICE)

    x, weight = ones(4, 64), ones(64)
    calls: list[Tensors] = [
        (x, weight),
        (x.float(), weight.float()),
        (x.bfloat16(), weight.bfloat16()),
        (x, weight.float()),
        (ones(4, 128)[:, :64], weight),
        (ones(4 * 64 + 1)[1:].view(4, 64), weight),
        (x.to("meta"), weight.to("meta")),
    ]
    norm_op._plans.clear()
    for expected, inputs in enumerate(calls, start=1):
        for _ in range(2):
            rms_norm(*inputs)
        assert len(norm_op._plans) == expected


@pytest.mark.parametrize("path", sorted(ROOT.glob("artifacts/*/timing/*.json")), ids=lambda path: path.stem)
def test_f61_the_configuration_that_was_timed_is_on_record(path: Path) -> None:
    """Every published time of ours names the kernel, its configuration and its binary."""
    timing = json.loads(path.read_text(encoding="utf-8"))
    launches = [each["launch"] for cell in timing["cells"] for each in cell["candidates"] if each["role"] == "triton"]
    assert launches or timing["status"] == "not_measured"
    assert all(launch["config"] and launch["cubin_sha256"] for launch in launches)


def test_f80_retries_are_bounded_and_end_in_an_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that something is compiled in each time is taken three times, and then never believed."""
    compiled = iter(range(100))
    monkeypatch.setattr(worker, "_disturbances", lambda: {"kernels bound": next(compiled)})
    taken = 0
    ordinary = Bench.time

    def counted(self: Bench, *arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        return ordinary(self, *arguments)

    monkeypatch.setattr(Bench, "time", counted)
    with pytest.raises(RuntimeError, match="every one of 3 attempts at regime cold_clean was disturbed"):
        measured(monkeypatch, RIGHT, {"cold_clean": 2})
    assert taken == 3


def test_memory_taken_by_a_regimes_first_calls_throws_no_window_away(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that fill the allocator's cache again, which a graph has emptied, come before the first attempt."""
    done = {"settle": 0, "time": 0}

    def counting(name: str, ordinary: Any) -> Any:
        def counted(self: Bench, *arguments: Any) -> Any:
            done[name] += 1
            return ordinary(self, *arguments)

        return counted

    for name in done:
        monkeypatch.setattr(Bench, name, counting(name, getattr(Bench, name)))
    # The first calls take memory from the device, later ones find it in the cache.
    monkeypatch.setattr(worker, "_disturbances", lambda: {"device allocations": min(done["settle"], 1)})
    measured(monkeypatch, RIGHT, {"cold_clean": 2})
    assert done["time"] == 1


def test_f80_a_run_that_was_throttled_throughout_has_no_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an unflagged sample the cell is invalid and says so; it does not pass empty."""
    device.reasons = ("thermal",)
    record = measured(monkeypatch, RIGHT, {"cold_clean": 6})
    (run,) = record["runs"]
    assert run["flags"]["thermal"] == list(range(6))
    status, reason, figures = stats.summarise([{"process": 0, **run}])
    assert (status, reason, figures) == ("invalid", "no unflagged sample among 6", None)


@pytest.mark.gpu
def test_f79_the_flush_is_outside_the_window_and_does_flush() -> None:
    """An empty kernel stays under 10 us with the flush on, and a copy of 4 MiB is slower cold than warm."""
    from triton_kernel_lab.lab import sweep

    where = torch.device("cuda")
    x, y = (torch.ones(1 << 20, dtype=torch.int32, device=where) for _ in range(2))

    def nothing(a: torch.Tensor) -> tuple[()]:
        sweep.null(a)
        return ()

    def copied(a: torch.Tensor, b: torch.Tensor) -> tuple[()]:
        b.copy_(a)
        return ()

    empty, copy = Subject("empty", nothing, [(x,)]), Subject("copy", copied, [(x, y)])
    bench = Bench(256 << 20, 50, 7)
    bench.warm_up([empty, copy])
    p50 = {
        (name, regime): sorted(window.samples_ns)[len(window.samples_ns) // 2]
        for regime in ("cold_clean", "cold_dirty", "warm")
        for name, window in bench.time([empty, copy], regime, 40).items()
    }
    assert p50["empty", "cold_clean"] < 10_000
    assert p50["empty", "cold_dirty"] < 10_000
    assert p50["copy", "cold_clean"] > p50["copy", "warm"]
