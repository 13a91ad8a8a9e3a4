"""bandwidth.svg: logical bandwidth of what memory bounds, over the ladders of the same run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.analysis.timemodel import mix_ns
from triton_kernel_lab.report import units
from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.svg import WIDTH, Drawing, Sources
from triton_kernel_lab.report.labels import find

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING"]

_LINES: dict[str, Any] = {"copy": "-", "read": (0, (4, 2)), "write": (0, (1, 1.5))}


def data(sources: Sources) -> dict[str, Any]:
    """Logical bytes and bytes a second of each cell that memory bounds, and the ladders. Pure."""
    roofline = sources.roofline
    summary = roofline["ceilings"] or {"ladders": [], "vendor_spec": None}
    found = {kernel: _points(roofline, kernel, summary["ladders"]) for kernel in cells.kernels(roofline)}
    points = {kernel: rows for kernel, rows in found.items() if rows}
    spec = summary["vendor_spec"]
    return {
        **cells.head(sources, None if points else "no timed cell is bound by memory"),
        "points": points,
        "ladders": {kind: _ladder(summary["ladders"], kind) for kind in _LINES},
        "datasheet_bytes_per_s": spec["memory_bytes_per_s"] if spec else None,
    }


def _points(roofline: Mapping[str, Any], kernel: str, ladders: Any) -> list[dict[str, Any]]:
    return [
        {"shape": cell["shape"], "logical_bytes": _size(cell), "bytes_per_s": rate, "class": cell["class"]}
        for cell in cells.of_kernel(dict(roofline), kernel)
        if (rate := (find(cell, "triton") or {}).get("logical_bytes_per_s")) and _of_memory(cell, ladders)
    ]


def _size(cell: Mapping[str, Any]) -> int:
    return int(cell["logical_read_bytes"] + cell["logical_write_bytes"])


def _of_memory(cell: Mapping[str, Any], ladders: Any) -> bool:
    """Whether moving the bytes takes longer than the arithmetic by the model."""
    moved = mix_ns(ladders, cell["logical_read_bytes"], cell["logical_write_bytes"])
    return bool(cell["attainable_ns"] == max(1, math.floor(moved + Fraction(1, 2))))


def _ladder(ladders: Iterable[Mapping[str, Any]], kind: str) -> list[list[int]]:
    return sorted([rung["bytes"], rung["bytes_per_s"]] for rung in ladders if rung["kind"] == kind)


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    figure.set_size_inches(WIDTH, 4.2)
    axis = figure.subplots()
    axis.set_xscale("log", base=2)
    for kind, rungs in shown["ladders"].items():
        line = ([size for size, _ in rungs], [rate / 1e9 for _, rate in rungs])
        axis.plot(*line, color=palette.INK, linewidth=1.0, linestyle=_LINES[kind], label=f"measured {kind}")
    if rate := shown["datasheet_bytes_per_s"]:
        text = f"datasheet {units.gigabytes_per_s(rate)} GB/s"
        axis.axhline(rate / 1e9, color=palette.MUTED, linewidth=0.9, linestyle=(0, (6, 3)), label=text)
    for kernel, (colour, marker) in palette.kernel_marks([*shown["points"]]).items():
        _kernel(axis, kernel, shown["points"][kernel], colour, marker)
    _frame(axis)
    title = f"Logical bandwidth on {shown['device']}, beside the same bytes merely moved"
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=5)


def _kernel(axis: Axes, kernel: str, points: Iterable[Mapping[str, Any]], colour: str, marker: str) -> None:
    for point in points:
        face = palette.GROUND if point["class"] == "floor_dominated" else colour
        where = ([point["logical_bytes"]], [point["bytes_per_s"] / 1e9])
        axis.plot(*where, marker=marker, color=colour, markerfacecolor=face, markersize=5.5, linestyle="none")
    axis.plot([], [], marker=marker, color=colour, linestyle="none", markersize=5.5, label=kernel)


def _frame(axis: Axes) -> None:
    low, high = axis.get_xlim()
    powers = [power for power in range(8, 40, 2) if low <= 2**power <= high]
    axis.set_xticks([2**power for power in powers], [_binary(2**power) for power in powers])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid()
    axis.set_xlabel("logical bytes: each input read once, each output written once (hollow: near the launch floor)")
    axis.set_ylabel("GB/s at p50, caches cold")


def _binary(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


DRAWING = Drawing("bandwidth", "Logical bandwidth of memory-bound cells over the measured ladders", data, _draw)
