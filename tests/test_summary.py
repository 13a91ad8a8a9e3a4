"""The rows that sum kernels up, and the cells that are lost: closed cases worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from triton_kernel_lab.report import summary
from triton_kernel_lab.report.losses import losses
from triton_kernel_lab.report.site import facts

QUANTUM_NS = 32


def cell(ours: int | None, theirs: int | None, regime: str = "cold_clean", **facts: Any) -> dict[str, Any]:
    """A cell of one kernel in which torch.compile is the only baseline."""
    candidates = [
        {"name": name, "stats": p50 and {"p50_ns": p50}, "attainable_ratio": facts.get(f"{name}_ratio")}
        for name, p50 in (("triton", ours), ("torch_compile", theirs))
    ]
    speedup = round(theirs / ours, 4) if ours and theirs else None
    return {
        "kernel": facts.get("kernel", "k"),
        "shape": "1x1",
        "dtype": "float16",
        "regime": regime,
        "class": facts.get("kind", "memory_bound"),
        "candidates": candidates,
        "best_baseline": "torch_compile" if theirs else None,
        "speedup_over_torch_compile": speedup,
    }


def roofline(*cells: dict[str, Any]) -> dict[str, Any]:
    return {"cells": [*cells], "ceilings": {"timer_quantum_ns": QUANTUM_NS}}


def test_a_row_has_the_median_and_the_extremes_of_each_time() -> None:
    """Of 0.5x, 1x and 2x the median is 1x; a time that nobody measured is a dash."""
    (row,) = summary.rows(roofline(cell(100, 50), cell(100, 100), cell(100, 200), cell(100, 300, "call")))
    assert summary.span(row.speedups["device"]) == "1.000x (0.500x to 2.000x)"
    assert (summary.span(row.speedups["call"]), summary.span(row.speedups["graph"])) == ("3.000x", "-")


def test_of_an_even_number_the_median_is_the_lower_and_the_tables_say_so() -> None:
    """Of 1x, 2x, 4x and 8x it is 2x, one that was observed; README and page say which of the two it is."""
    found = roofline(*(cell(100, 100 * ratio) for ratio in (1, 2, 4, 8)))
    (row,) = summary.rows(found)
    assert summary.span(row.speedups["device"]) == "2.000x (1.000x to 8.000x)"
    assert summary.metrics(found)["median_speedup_over_torch_compile"] == {"device": 2.0}
    assert "the lower of the two in the middle" in summary.MEDIAN_NOTE
    assert summary.MEDIAN_NOTE in facts.kernels(found)


def test_a_tie_is_not_lost_and_a_missing_time_is_no_race() -> None:
    """Fastest counts cells in which no baseline is faster; cells without one of the two times do not count at all."""
    found = roofline(cell(100, 100), cell(101, 100), cell(None, 100), cell(100, None))
    (row,) = summary.rows(found)
    assert (row.fastest["device"], row.raced["device"]) == (1, 2)
    assert summary.metrics(found)["cells"] == 2
    assert [loss.ours_ns for loss in losses(found, "device")] == [101]


def test_kernels_stay_apart_in_the_order_of_the_registry() -> None:
    """One row a kernel, in the order of the cells."""
    found = roofline(cell(1, 2, kernel="b"), cell(1, 4, kernel="a"), cell(1, 2, kernel="b"))
    assert [row.kernel for row in summary.rows(found)] == ["b", "a"]
    assert summary.metrics(found)["fastest"] == {"b": 2, "a": 1}
    assert summary.metrics(found)["median_speedup_over_torch_compile"] == {"device": 2.0}


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (cell(1064, 1000), "64 ns apart, within two ticks of the timer"),
        (cell(4000, 3500, kind="floor_dominated"), "near the launch floor, 500 ns apart"),
        (cell(2000, 1000, triton_ratio=0.97), "at the ceiling: 97.0 % of attainable"),
        (
            cell(2000, 1000, triton_ratio=0.4, torch_compile_ratio=0.8),
            "bound by memory: 40.0 % of attainable, theirs 80.0 %",
        ),
        (
            cell(2000, 1000, kind="latency_limited", triton_ratio=0.2, torch_compile_ratio=0.4),
            "bound by latency, not by bytes or arithmetic: 20.0 % of attainable, theirs 40.0 %",
        ),
    ],
)
def test_a_loss_says_what_the_artifacts_say(lost: dict[str, Any], why: str) -> None:
    """Ticks of the timer, the launch floor, the ceiling, else both shares of attainable: the first that applies."""
    (loss,) = losses(roofline(lost), "device")
    assert loss.why == why


def test_losses_come_with_the_dearest_first() -> None:
    """In per cent, not in ns; each time for itself."""
    found = roofline(cell(1100, 1000), cell(300, 200), cell(50_000, 49_000), cell(9, 8, "call"))
    assert [loss.excess for loss in losses(found, "device")] == ["50.00 %", "10.00 %", "2.04 %"]
    assert [loss.why for loss in losses(found, "call")] == ["host time of the call: nothing the device does"]
    assert losses(found, "graph") == []
