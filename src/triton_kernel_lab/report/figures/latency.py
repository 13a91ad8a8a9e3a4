"""latency.svg and latency_more.svg: p50 bars, one row a kernel, one column for each of device, graph and call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.grid import Spaces, grid_of, heading
from triton_kernel_lab.report.figures.svg import Drawing, Sources
from triton_kernel_lab.report.labels import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CANDIDATES", "DRAWING", "FIRST", "MORE"]

FIRST = ("rms_norm", "swiglu", "qk_scores", "paged_kv_gather", "selected_attention")
"""The kernels of the first picture in its order: norm and activation, then decode. All others are in the second."""

CANDIDATES = ("triton", "torch_compile", "eager", "other")
COLUMNS = {
    "cold_clean": "device: the kernel, caches cold",
    "graph": "graph: one call of a CUDA graph",
    "call": "call: what the host pays",
}
_BAR = 0.2
# With more kernels than this the shapes are written once a row.
_FEW = 5


def _first(sources: Sources) -> dict[str, Any]:
    found = cells.kernels(sources.roofline)
    return _data(sources, [kernel for kernel in FIRST if kernel in found])


def _others(sources: Sources) -> dict[str, Any]:
    found = cells.kernels(sources.roofline)
    return _data(sources, [kernel for kernel in found if kernel not in FIRST])


def _data(sources: Sources, kernels: Sequence[str]) -> dict[str, Any]:
    """p50 in ns by kernel, shape, regime and candidate. Pure."""
    panels = [_panel_data(sources, kernel) for kernel in kernels]
    return {**cells.head(sources, None if panels else "no cell of these kernels was timed"), "panels": panels}


def _panel_data(sources: Sources, kernel: str) -> dict[str, Any]:
    roofline = sources.roofline
    found = {regime: cells.of_kernel(roofline, kernel, regime) for regime in COLUMNS}
    shapes = cells.few(list(dict.fromkeys(cell["shape"] for column in found.values() for cell in column)))
    p50 = {
        regime: {cell["shape"]: cells.shown_p50(cell) for cell in column if cell["shape"] in shapes}
        for regime, column in found.items()
        if column
    }
    return {"kernel": kernel, "dtype": cells.dtype_of(roofline, kernel), "shapes": shapes, "p50_ns": p50}


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    panels = shown["panels"]
    columns = [regime for regime in COLUMNS if any(regime in panel["p50_ns"] for panel in panels)]
    grid = grid_of(figure, len(panels), len(columns), _spaces(panels))
    for row, panel in zip(grid, panels, strict=True):
        _row(row, panel, columns, named=columns if len(panels) <= _FEW else columns[:1])
    for axis, regime in zip(grid[0], columns, strict=True):
        where: dict[str, Any] = {
            "xycoords": "axes fraction",
            "xytext": (0, 15),
            "textcoords": "offset points",
            "ha": "center",
        }
        axis.annotate(COLUMNS[regime], (0.5, 1.0), fontsize=8.5, color=palette.MUTED, **where)
    note = "lower is better; blue: Triton's p50; results.md has every shape"
    heading(figure, f"p50 latency in us on {shown['device']}", note, _handles())


def _spaces(panels: Sequence[Mapping[str, Any]]) -> Spaces:
    lines = max(text.count("\n") + 1 for panel in panels for text in cells.tick_labels(panel["shapes"]))
    return Spaces(head=0.92, panel=0.86, below=0.28 + 0.11 * lines, left=0.5, between=0.14)


def _handles() -> list[Any]:
    from matplotlib.patches import Patch

    names = {name: label(name) for name in CANDIDATES} | {"other": "fastest other baseline"}
    return [Patch(color=palette.candidate(name), label=text) for name, text in names.items()]


def _row(row: Sequence[Axes], panel: Mapping[str, Any], columns: Sequence[str], named: Sequence[str]) -> None:
    """One kernel; ``named`` are the columns that repeat its shapes."""
    lowest, highest = _extent(panel["p50_ns"])
    labels = cells.tick_labels(panel["shapes"])
    for axis, regime in zip(row, columns, strict=True):
        axis.set_yscale("log")
        # A row of figures stands above the highest bar.
        axis.set_ylim(lowest / 1.6, highest * (highest / lowest) ** 0.22 * 1.25)
        axis.set_xlim(-0.55, len(panel["shapes"]) - 0.45)
        axis.set_xticks(
            range(len(labels)), labels if regime in named else [""] * len(labels), fontsize=cells.tick_size(labels)
        )
        axis.tick_params(axis="x", length=0.0, pad=2.0)
        axis.yaxis.set_major_formatter(lambda us, _: f"{us:g}")
        axis.minorticks_off()
        axis.grid(axis="y")
        _bars(axis, panel, regime)
    for axis in row[1:]:
        axis.tick_params(axis="y", labelleft=False)
    row[0].annotate(panel["kernel"], (0.0, 1.06), xycoords="axes fraction", fontsize=8.5, fontweight="bold")
    row[-1].annotate(panel["dtype"], (1.0, 1.06), xycoords="axes fraction", fontsize=7.0, ha="right")


def _extent(p50: Mapping[str, Mapping[str, Mapping[str, int | None]]]) -> tuple[float, float]:
    times = [ns / 1000 for column in p50.values() for bars in column.values() for ns in bars.values() if ns]
    return (min(times), max(times)) if times else (1.0, 10.0)


def _bars(axis: Axes, panel: Mapping[str, Any], regime: str) -> None:
    column = panel["p50_ns"].get(regime)
    if column is None:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=palette.MUTED)
        return
    for index, name in enumerate(CANDIDATES):
        offset = _BAR * (index - (len(CANDIDATES) - 1) / 2)
        drawn = [(at + offset, column.get(shape, {}).get(name)) for at, shape in enumerate(panel["shapes"])]
        timed = [(at, ns) for at, ns in drawn if ns is not None]
        colour = palette.candidate(name)
        axis.bar([at for at, _ in timed], [ns / 1000 for _, ns in timed], width=_BAR * 0.92, color=colour)
        for at in (at for at, ns in drawn if ns is None):
            _word(axis, at)
    for at, shape in enumerate(panel["shapes"]):
        _figure(axis, at, column.get(shape, {}).get("triton"))


def _word(axis: Axes, at: float) -> None:
    """Where a bar is missing."""
    where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "rotation": 90, "ha": "center", "fontsize": 4.5}
    axis.annotate("none", (at, 0.03), color=palette.MUTED, **where)


def _figure(axis: Axes, at: int, ns: int | None) -> None:
    """Triton's time above a group."""
    if ns is not None:
        where: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "fontsize": 6.5}
        axis.annotate(cells.short_us(ns), (at, 0.97), color=palette.candidate("triton"), fontweight="bold", **where)


_TITLE = "p50 latency beside the baselines: device, graph and call"
DRAWING = Drawing("latency", f"{_TITLE}; norm, activation, decode", _first, _draw)
MORE = Drawing("latency_more", f"{_TITLE}; further kernels", _others, _draw)
