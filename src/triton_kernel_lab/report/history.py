"""A kernel's times by commit, as a table and as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.analysis.history import Point, Series
from triton_kernel_lab.report import units

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "render"]

# White is opaque, so that dark mode shows the same; glyphs become paths, so that no font is needed.
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "triton-kernel-lab",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LINES = {"p50_ns": ("p50", "#0b3c8c", "o"), "tmean_ns": ("tmean", "#e08a1e", "s")}
_LABELLED = 12


def render(series: Sequence[Series], problems: Sequence[str]) -> str:
    """One table a cell, the oldest commit first, with a line wherever machine or stack changed."""
    blocks = [f"{each.kernel} {' '.join(each.cell)}\n{_table(each.points)}" for each in series]
    return "\n\n".join([*blocks, *(["\n".join(f"- {line}" for line in problems)] if problems else [])])


def _table(points: Sequence[Point]) -> str:
    from tabulate import tabulate

    headers = ("date", "commit", "p50 (us)", "tmean (us)", "over torch.compile", "")
    body = [
        (
            point.date,
            point.commit[:12],
            units.microseconds(point.figures.p50_ns),
            units.microseconds(point.figures.tmean_ns),
            units.ratio(point.figures.speedup),
            "; ".join([*filter(None, [point.figures.reason]), *(f"changed: {fact}" for fact in point.changed)]),
        )
        for point in points
    ]
    align = ("left", "left", "right", "right", "right", "left")
    return tabulate(body, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def draw(series: Sequence[Series]) -> str:
    """An SVG with one panel a cell: the same bytes each time with one version of matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context():
        # The reader's own matplotlibrc must not change the picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(8.0, 2.8 * len(series)), layout="constrained")
        panels = figure.subplots(len(series), 1, squeeze=False)[:, 0]
        for axis, each in zip(panels, series, strict=True):
            _panel(axis, each)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": "triton-kernel-lab"})
    return stream.getvalue()


def _panel(axis: Axes, series: Series) -> None:
    axis.set_title(f"{series.kernel} {' '.join(series.cell)}", loc="left", fontsize=10.0, fontweight="bold")
    axis.set_ylabel("us (lower is better)")
    for field, (label, colour, marker) in _LINES.items():
        axis.plot(*_line(series.points, field), marker=marker, color=colour, label=label)
    for at, point in enumerate(series.points):
        if point.changed:
            _mark(axis, at, point)
    step = -(-len(series.points) // _LABELLED)
    ticks = list(enumerate(series.points))[::step]
    axis.set_xticks([at for at, _ in ticks], [f"{p.commit[:7]}\n{p.date}" for _, p in ticks], fontsize=7.0)
    axis.set_xlim(-0.5, len(series.points) - 0.5)
    axis.set_ylim(0.0, axis.get_ylim()[1] * 1.15)
    axis.legend(loc="lower right", frameon=False, ncols=len(_LINES))


def _line(points: Sequence[Point], field: str) -> tuple[list[float], list[float]]:
    """Places and times in us; broken where there is no time, and where machine or stack changed."""
    line: list[tuple[float, float]] = []
    for at, point in enumerate(points):
        if point.changed:
            line.append((at - 0.5, math.nan))
        time_ns = getattr(point.figures, field)
        line.append((at, math.nan if time_ns is None else time_ns / 1000))
    return [at for at, _ in line], [time for _, time in line]


def _mark(axis: Axes, at: int, point: Point) -> None:
    """A line where machine or stack changed: what stands left of it is not comparable with what stands right."""
    facts = ", ".join(fact.split(":")[0].split(".")[-1] for fact in point.changed)
    axis.axvline(at - 0.5, color="#777777", linestyle="--", linewidth=1.0)
    axis.annotate(f"other {facts}", (at - 0.48, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=7.0)
