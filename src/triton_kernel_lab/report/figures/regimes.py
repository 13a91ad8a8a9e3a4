"""regimes.svg: the same call in each regime, the smallest and the largest case of each kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.svg import WIDTH, Drawing, Sources
from triton_kernel_lab.report.labels import p50_ns
from triton_kernel_lab.report.selection import extremes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING"]

_FLOORS = {
    "cold_clean": "null_kernel_clean",
    "cold_dirty": "null_kernel_dirty",
    **{regime: f"null_kernel_{regime}" for regime in ("warm", "graph", "call")},
}
_NAMES = {
    "cold_clean": "caches swept clean",
    "cold_dirty": "caches full of dirty lines",
    "warm": "caches warm",
    "graph": "in a graph",
    "call": "the host's time for a call",
}


def data(sources: Sources) -> dict[str, Any]:
    """Triton's p50 in ns by regime: of an empty kernel, then of two cases a kernel. Pure."""
    roofline = sources.roofline
    floors = {floor["name"]: floor["p50_ns"] for floor in (roofline["ceilings"] or {"floors": ()})["floors"]}
    empty = {regime: floors[name] for regime, name in _FLOORS.items() if name in floors}
    cases = [
        {
            "name": case.kernel,
            "shape": case.shape,
            "dtype": case.dtype,
            "p50_ns": {
                regime: p50
                for regime in REGIMES
                if regime in case.cells and (p50 := p50_ns(case.cells[regime], "triton")) is not None
            },
        }
        for case in extremes(roofline)
    ]
    rows = [{"name": "an empty kernel", "shape": "", "dtype": "", "p50_ns": empty}, *cases]
    return {**cells.head(sources, None if cases else "no cell was timed"), "rows": rows}


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    rows = shown["rows"]
    figure.set_size_inches(WIDTH, 1.2 + 0.19 * len(rows))
    axis = figure.subplots()
    axis.set_xscale("log")
    for regime in REGIMES:
        _dots(axis, rows, regime)
    for at, row in enumerate(rows):
        if len(times := [ns / 1000 for ns in row["p50_ns"].values()]) > 1:
            axis.plot([min(times), max(times)], [at, at], color=palette.GRID, linewidth=2.5, zorder=1)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), [_tick(rows, at) for at in range(len(rows))])
    axis.tick_params(axis="y", length=0.0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(axis="x")
    axis.set_xlabel("p50 in us")
    title = f"One call in each regime on {shown['device']}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    figure.legend(loc="outside lower center", ncols=len(REGIMES))


def _tick(rows: list[Mapping[str, Any]], at: int) -> str:
    """The kernel's name stands at its first row only."""
    row = rows[at]
    name = "" if at and rows[at - 1]["name"] == row["name"] else row["name"]
    return f"{name}  {row['shape']} {row['dtype']}".strip()


def _dots(axis: Axes, rows: list[Mapping[str, Any]], regime: str) -> None:
    colour, marker = palette.regime(regime)
    found = [(row["p50_ns"][regime] / 1000, at) for at, row in enumerate(rows) if regime in row["p50_ns"]]
    if found:
        times, places = zip(*found, strict=True)
        style: dict[str, Any] = {"linestyle": "none", "markersize": 5.0, "zorder": 2, "label": _NAMES[regime]}
        axis.plot(times, places, color=colour, marker=marker, **style)


DRAWING = Drawing("regimes", "One call in each regime: the smallest and the largest case of each kernel", data, _draw)
