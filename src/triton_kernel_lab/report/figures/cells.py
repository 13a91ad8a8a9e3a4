"""Which figures of a cell a picture shows, and how it names shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.report import units
from triton_kernel_lab.report.figures.svg import Sources
from triton_kernel_lab.report.labels import find, p50_ns
from triton_kernel_lab.report.selection import dtype_of, kernels, of_kernel

__all__ = [
    "dtype_of",
    "few",
    "head",
    "kernels",
    "of_kernel",
    "other",
    "ratio_of",
    "shown_p50",
    "tick_labels",
    "tick_size",
]

_ROOM = 8


def head(sources: Sources, empty: str | None = None) -> dict[str, Any]:
    """``device`` and ``reason`` of a picture's data; ``empty`` says why a measured runner has nothing to show."""
    roofline = sources.roofline
    unmeasured = None if roofline["status"] == "measured" else roofline["reason"] or "no reason given"
    return {"device": sources.device, "reason": unmeasured or empty}


def other(cell: Mapping[str, Any]) -> str | None:
    """The fastest baseline that is neither torch.compile in its default mode nor eager; None without one."""
    timed = [c["name"] for c in cell["candidates"] if c["role"] == "baseline" and c["stats"]]
    rivals = [name for name in timed if name not in ("torch_compile", "eager")]
    return min(rivals, key=lambda name: p50_ns(cell, name) or 0, default=None)


def shown_p50(cell: Mapping[str, Any]) -> dict[str, int | None]:
    """The p50 in ns of what pictures compare."""
    return {
        **{name: p50_ns(cell, name) for name in ("triton", "torch_compile", "eager")},
        "other": p50_ns(cell, other(cell)),
    }


def ratio_of(cell: Mapping[str, Any], name: str | None) -> float | None:
    """A candidate's share of attainable; None where no share is claimed."""
    found = find(cell, name)
    return found["attainable_ratio"] if found else None


def few(shapes: Sequence[str]) -> list[str]:
    """At most as many shapes as a panel has room for, the first and the last among them, evenly spread."""
    last = len(shapes) - 1
    if last < _ROOM:
        return [*shapes]
    return [shapes[round(step * last / (_ROOM - 1))] for step in range(_ROOM)]


def short_us(ns: int) -> str:
    """A time in us in few digits: a tenth tells nothing of a hundred."""
    return units.microseconds(ns, 1 if ns < 100_000 else 0)


def tick_labels(shapes: Sequence[str]) -> list[str]:
    """Shapes on several lines where one would run into its neighbour."""
    width = 7 if len(shapes) <= 5 else 5
    return ["\n".join(_wrapped(shape, width)) for shape in shapes]


def tick_size(labels: Sequence[str]) -> float:
    """The size of their letters."""
    return 6.0 if len(labels) <= 6 else 5.2


def _wrapped(shape: str, width: int) -> list[str]:
    lines = [""]
    for number in shape.split("x"):
        joined = f"{lines[-1]}x{number}" if lines[-1] else number
        lines[-1:] = [joined] if len(joined) <= width or not lines[-1] else [f"{lines[-1]}x", number]
    return lines
