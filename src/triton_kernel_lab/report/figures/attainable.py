"""attainable.svg: which share of the least possible time each kernel reaches, over the size of the work."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.grid import Spaces, grid_of, heading
from triton_kernel_lab.report.figures.svg import Drawing, Sources
from triton_kernel_lab.report.labels import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING"]

_NAMES = ("other", "torch_compile", "triton")
_MARKERS = {"triton": "o", "torch_compile": "s", "other": "^"}
_ASIDE = {"triton": -0.17, "torch_compile": 0.06, "other": 0.22}
_COLUMNS = 3
# In units of the share: how tall a word is, and how near to a mark it may come.
_WORD, _NEAR = 0.08, 0.06
_NOTE_WIDTH = 140


def data(sources: Sources) -> dict[str, Any]:
    """Attainable time in ns and the shares of it, by kernel and shape; no share near the launch floor. Pure."""
    roofline = sources.roofline
    panels = {kernel: _rows(cells.of_kernel(roofline, kernel)) for kernel in cells.kernels(roofline)}
    shown = {kernel: rows for kernel, rows in panels.items() if rows}
    dtypes = {kernel: cells.dtype_of(roofline, kernel) for kernel in shown}
    stale = [kernel for kernel in panels if kernel not in shown and f"timing@{kernel}" in roofline["stale"]]
    head = cells.head(sources, None if shown else "no cell has a ceiling")
    return {**head, "panels": shown, "dtypes": dtypes, "stale": stale}


def _rows(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted((cell for cell in found if cell["attainable_ns"]), key=lambda cell: int(cell["attainable_ns"]))
    shown = cells.few([cell["shape"] for cell in ordered])
    return [
        {
            "shape": cell["shape"],
            "attainable_ns": cell["attainable_ns"],
            "timed": cells.shown_p50(cell)["triton"] is not None,
            "ratio": {
                "triton": cells.ratio_of(cell, "triton"),
                "torch_compile": cells.ratio_of(cell, "torch_compile"),
                "other": cells.ratio_of(cell, cells.other(cell)),
            },
        }
        for cell in ordered
        if cell["shape"] in shown
    ]


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    panels = shown["panels"]
    columns = min(_COLUMNS, len(panels))
    note = _note(shown["stale"])
    grid = grid_of(figure, -(-len(panels) // columns), columns, _spaces(panels, note.count("\n")))
    axes = [axis for row in grid for axis in row]
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for index, (kernel, rows) in enumerate(panels.items()):
        _panel(axes[index], kernel, shown["dtypes"][kernel], rows)
        axes[index].tick_params(axis="y", labelleft=index % columns == 0)
    heading(figure, f"Share of attainable time, {shown['device']}", note, _handles())


def _note(stale: Sequence[str]) -> str:
    said = "below each shape its attainable time; floor: too near a launch to claim a share; none: no sound time"
    left_out = f"left out, because their sources have changed since they were timed: {', '.join(stale)}"
    return "\n".join([said, *textwrap.wrap(left_out, _NOTE_WIDTH)] if stale else [said])


def _spaces(panels: Mapping[str, Sequence[Mapping[str, Any]]], more_notes: int) -> Spaces:
    lines = max(text.count("\n") + 1 for rows in panels.values() for text in _ticks(rows))
    return Spaces(head=0.72 + 0.11 * more_notes, panel=1.05, below=0.32 + 0.11 * lines, left=0.46, between=0.14)


def _handles() -> list[Any]:
    from matplotlib.lines import Line2D

    names = {name: label(name) for name in reversed(_NAMES)} | {"other": "fastest other baseline"}
    return [
        Line2D([], [], color=palette.candidate(name), marker=_MARKERS[name], linestyle="none", label=text)
        for name, text in names.items()
    ]


def _panel(axis: Axes, kernel: str, dtype: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.set_title(kernel, loc="left", fontsize=8.5, fontweight="bold")
    axis.set_title(dtype, loc="right", fontsize=7.0)
    axis.set_ylim(0, 1.15)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlim(-0.6, len(rows) - 0.4)
    labels = _ticks(rows)
    axis.set_xticks(range(len(rows)), labels, fontsize=cells.tick_size(labels))
    axis.tick_params(axis="x", length=0.0, pad=2.0)
    axis.grid(axis="y")
    axis.axhline(1.0, color=palette.INK, linewidth=0.9)
    for name in _NAMES:
        _dots(axis, rows, name)
    for at, row in enumerate(rows):
        if row["ratio"]["triton"] is None:
            word = "floor" if row["timed"] else "none"
            axis.text(at, _free(row["ratio"]), word, ha="center", fontsize=6.0, color=palette.MUTED)


def _free(ratios: Mapping[str, float | None]) -> float:
    """The least height at which a word overprints none of these marks."""
    height = 0.04
    for ratio in sorted(ratio for ratio in ratios.values() if ratio is not None):
        if height - _NEAR < ratio < height + _WORD + _NEAR:
            height = ratio + _NEAR
    return height


def _ticks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    shapes = cells.tick_labels([row["shape"] for row in rows])
    times = [cells.short_us(row["attainable_ns"]) for row in rows]
    return [f"{shape}\n{time} us" for shape, time in zip(shapes, times, strict=True)]


def _dots(axis: Axes, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    shown = [(at, row["ratio"][name]) for at, row in enumerate(rows) if row["ratio"][name] is not None]
    size = 6.0 if name == "triton" else 4.0
    xs, ys = [at + _ASIDE[name] for at, _ in shown], [ratio for _, ratio in shown]
    axis.plot(xs, ys, color=palette.candidate(name), marker=_MARKERS[name], markersize=size, linestyle="none")


DRAWING = Drawing("attainable", "Share of attainable time by kernel over the size of the work", data, _draw)
