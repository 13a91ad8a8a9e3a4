"""The quick measurement: one report of checked and timed cells, and none where a cell is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gate_data
import pytest
import torch

from triton_kernel_lab import artifacts, bench
from triton_kernel_lab.bench import BenchError, Request
from triton_kernel_lab.cases._base import Case, load
from triton_kernel_lab.lab import cells, environment, window
from triton_kernel_lab.lab.timing import cost_record

ROOT = Path(__file__).parents[1]
ERROR = {"max_error_ratio": 0.0005, "rel_norm": 0.0002, "max_abs": 0.002}
P50 = {"triton": 2000, "eager": 8000, "torch_compile": 3000, "copy": 1900}


def request(**changed: Any) -> Request:
    given: dict[str, Any] = {
        "kernels": ["rmsnorm"],
        "shapes": ["128x1024"],
        "dtypes": ["float16"],
        "cache_mode": "cold",
        "samples": 20,
        "warmup_ms": 1,
        "sweep_bytes": 1 << 20,
        "seed": 7,
        **changed,
    }
    return Request(**given)


def checked(case: Case, dims: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {
        "shape": "x".join(map(str, dims)),
        "dtype": dtype,
        "variant": "default",
        "passed": True,
        "failures": [],
        "limit": {"max_error_ratio": 0.001, "rel_norm": 0.0005},
        **dict.fromkeys(("triton", "eager", "torch_compile"), ERROR),
        "torch_compile_passed": True,
    }


def timed(case: Case, dims: tuple[int, ...], dtype: str, bench: object, regime: str, samples: int, seed: int) -> Any:
    def candidate(name: str, value: int) -> dict[str, Any]:
        flags: dict[str, list[int]] = {"launch_exposed": [], "clock_low": [], "power_cap": [], "thermal": []}
        run = {"regime": regime, "calls_per_sample": 1, "samples_ns": [value] * samples, "flags": flags}
        role = {"triton": "triton", "copy": "anchor"}.get(name, "baseline")
        record = {"name": name, "role": role, "served_by": "torch", "status": "ok", "reason": None, "launch": None}
        return record | {"runs": [run]}

    wrong = {"name": "F.rms_norm", "role": "baseline", "served_by": "torch", "status": "invalid", "launch": None}
    candidates = [candidate(name, value) for name, value in P50.items()]
    candidates.append(wrong | {"reason": "wrong before timing: norm off by 1", "runs": []})
    return {"cost": cost_record(case.cost(dims, getattr(torch, dtype))), "candidates": candidates}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that answers at once; returns what was done on it, in order."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    place = gate_data.environment()
    monkeypatch.setattr(environment, "probe", lambda device: {key: place[key] for key in ("device", "software")})
    monkeypatch.setattr(window, "Bench", lambda *arguments: None)

    def check(*arguments: Any) -> dict[str, Any]:
        done.append("check")
        return checked(*arguments)

    def time(*arguments: Any) -> Any:
        done.append("time")
        return timed(*arguments)

    monkeypatch.setattr(cells, "check", check)
    monkeypatch.setattr(cells, "time", time)
    return done


def test_a_report_satisfies_its_schema(device: list[str], tmp_path: Path) -> None:
    """What is measured is written as a report, with statistics, speedups, bytes a second and every sample."""
    report = bench.run(request(), ROOT, lambda line: None)
    bench.write(tmp_path / "report.json", report)
    assert artifacts.read(tmp_path / "report.json", "report") == report
    (case,) = report["cases"]
    assert (case["kernel"], case["shape"], case["dtype"]) == ("rms_norm", "128x1024", "float16")
    assert (case["speedup_over_torch_compile"], case["speedup_over_eager"]) == (1.5, 4.0)
    first, *_, last = case["candidates"]
    assert first["stats"]["p50_ns"] == 2000
    assert first["samples_ns"] == [2000] * 20
    # 128 x 1024 halves in, as many out, and the weight: 526 336 bytes in 2 us.
    assert first["logical_bytes_per_s"] == 526_336 * 500_000
    assert (last["status"], last["stats"], last["samples_ns"]) == ("invalid", None, [])
    assert report["runner"] == "nvidia-h200"
    assert report["protocol"]["regime"] == "cold_clean"


def test_hot_is_warm_and_cold_is_clean(device: list[str]) -> None:
    """The two cache modes of the command line are two regimes of the pipeline."""
    hot = bench.run(request(cache_mode="hot"), ROOT, lambda line: None)
    assert (hot["protocol"]["cache_mode"], hot["protocol"]["regime"]) == ("hot", "warm")


def test_everything_is_checked_before_anything_is_timed(device: list[str]) -> None:
    """All cells of kernels, shapes and dtypes are checked first; no shape means each kernel's own."""
    bench.run(request(kernels=["rmsnorm", "swiglu"], dtypes=["float16", "bfloat16"]), ROOT, lambda line: None)
    assert device == ["check"] * 4 + ["time"] * 4
    device.clear()
    report = bench.run(request(shapes=[]), ROOT, lambda line: None)
    own = ["x".join(map(str, dims)) for dims in load("rms_norm").timed]
    assert [case["shape"] for case in report["cases"]] == own


def test_a_wrong_cell_stops_before_any_timing(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the cell and what is wrong, with exit code 2, and nothing was timed."""
    monkeypatch.setattr(cells, "check", lambda *a: checked(*a) | {"passed": False, "failures": ["norm off by 1"]})
    with pytest.raises(BenchError) as caught:
        bench.run(request(), ROOT, lambda line: None)
    assert str(caught.value) == "correctness: rms_norm 128x1024 float16: norm off by 1; nothing was timed."
    assert caught.value.exit_code == 2
    assert device == []


def test_without_a_kernel_those_that_have_the_shapes_are_measured(device: list[str]) -> None:
    """A shape of two numbers is one of every kernel that reads two, and of no other."""
    report = bench.run(request(kernels=[], shapes=["128x1024"]), ROOT, lambda line: None)
    found = {case["kernel"] for case in report["cases"]}
    assert {"rms_norm", "swiglu", "add_rms_norm"} <= found
    assert found.isdisjoint({"swiglu_linear", "flash_attention"})


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (["1x2x3x4x5x6x7"], "shape 1x2x3x4x5x6x7: expected shapes of one kernel, found none that has all of them."),
        (["128x"], "shape 128x: expected positive whole numbers joined by x"),
    ],
)
def test_shapes_of_no_kernel_are_refused(device: list[str], shapes: list[str], sentence: str) -> None:
    """Without a kernel, a shape that none has is one sentence, as is a text that is no shape."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        bench.run(request(kernels=[], shapes=shapes), ROOT, lambda line: None)


def test_the_table_names_what_each_column_is(device: list[str]) -> None:
    """Microseconds at p50 of three candidates, and the speedup with its sign."""
    said = bench.render(bench.run(request(), ROOT, lambda line: None))
    header, _, row = said.splitlines()
    assert header.split("  ")[0] == "kernel"
    assert row.split() == ["rms_norm", "128x1024", "float16", "2.000", "3.000", "8.000", "1.50x"]
