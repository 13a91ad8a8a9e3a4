"""The cells in which a baseline is faster than Triton, and what the artifacts say of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, of_regime, p50_ns
from triton_kernel_lab.report.summary import TIMES

__all__ = ["Loss", "losses"]

_TICKS = 2
# From here on what is left to gain is less than a measurement of the ceiling is good for.
_NEAR_CEILING = 0.97
_CLASSES = {
    "latency_limited": "bound by latency, not by bytes or arithmetic",
    "compute_bound": "bound by arithmetic",
    "memory_bound": "bound by memory",
    "ridge": "bound by memory and arithmetic alike",
}


class Loss(NamedTuple):
    """A cell that is lost: in which of ``TIMES``, to whom, the two p50 in ns, and why as far as is known."""

    time: str
    cell: Mapping[str, Any]
    rival: str
    ours_ns: int
    theirs_ns: int
    why: str

    @property
    def excess(self) -> str:
        """By how much our p50 exceeds theirs."""
        return units.excess_percent(self.ours_ns, self.theirs_ns)


def losses(roofline: Artifact, time: str) -> list[Loss]:
    """The lost cells of ``device``, ``graph`` or ``call``, the most costly in per cent first."""
    found = [loss for cell in of_regime(roofline, TIMES[time]) if (loss := _loss(roofline, time, cell))]
    return sorted(found, key=lambda loss: -loss.ours_ns / loss.theirs_ns)


def _loss(roofline: Artifact, time: str, cell: Mapping[str, Any]) -> Loss | None:
    rival = cell["best_baseline"]
    ours, theirs = p50_ns(cell, "triton"), p50_ns(cell, rival)
    if ours is None or theirs is None or ours <= theirs:
        return None
    return Loss(time, cell, rival, ours, theirs, _why(roofline, time, cell, ours - theirs))


def _why(roofline: Artifact, time: str, cell: Mapping[str, Any], gap_ns: int) -> str:
    if time == "call":
        return "host time of the call: nothing the device does"
    if time == "graph":
        return "no ceiling is measured inside a graph"
    quantum = roofline["ceilings"]["timer_quantum_ns"]
    if gap_ns <= _TICKS * quantum:
        return f"{gap_ns} ns apart, within two ticks of the timer"
    if cell["class"] == "floor_dominated":
        return f"near the launch floor, {gap_ns} ns apart"
    return _shares(cell)


def _shares(cell: Mapping[str, Any]) -> str:
    ours, theirs = ((find(cell, name) or {}).get("attainable_ratio") for name in ("triton", cell["best_baseline"]))
    if ours is not None and ours >= _NEAR_CEILING:
        return f"at the ceiling: {units.percent(ours)} of attainable"
    kind = _CLASSES.get(cell["class"], cell["class"])
    return f"{kind}: {units.percent(ours)} of attainable, theirs {units.percent(theirs)}"
