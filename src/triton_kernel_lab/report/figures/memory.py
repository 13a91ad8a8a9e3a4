"""memory.svg: the device memory that attention needs over the length of its sequence, beside its time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.svg import WIDTH, Drawing, Sources
from triton_kernel_lab.report.labels import label, p50_ns
from triton_kernel_lab.report.memory import KERNEL, by_length, peak

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING"]

_MARKERS = {"triton": "o", "torch_compile": "s", "eager": "D", "other": "^"}
_PANELS = {"peak_bytes": ("peak memory of a call (MiB)", 2**20), "p50_ns": ("p50, caches cold (us)", 1000)}


def data(sources: Sources) -> dict[str, Any]:
    """Peak bytes and p50 in ns by candidate and N, of the batch, heads and width with the most lengths. Pure."""
    found = by_length(sources.roofline)
    empty = None if found else f"no timing of {KERNEL} says how much memory it needs"
    sizes, lengths = max(found.items(), key=lambda item: len(item[1]), default=(None, {}))
    names = ["triton", "torch_compile", "eager"]
    other = _other(lengths)
    return {
        **cells.head(sources, empty),
        "sizes": dict(zip(("batch", "heads", "kv_heads", "width", "dtype"), sizes, strict=True)) if sizes else None,
        "other": other,
        "series": {name: _series(lengths, name) for name in [*names, *filter(None, [other])]},
    }


def _other(lengths: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The baseline beside torch.compile and eager that is the fastest at the greatest length."""
    return cells.other(lengths[max(lengths)]) if lengths else None


def _series(lengths: Mapping[int, Mapping[str, Any]], name: str) -> list[dict[str, int | None]]:
    return [
        {"length": length, "peak_bytes": peak(cell, name), "p50_ns": p50_ns(cell, name)}
        for length, cell in lengths.items()
    ]


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    figure.set_size_inches(WIDTH, 3.6)
    axes = figure.subplots(1, 2)
    for axis, (field, (text, unit)) in zip(axes, _PANELS.items(), strict=True):
        _panel(axis, shown, field, unit)
        axis.set_title(text, loc="left", fontsize=8.5)
    sizes = shown["sizes"]
    heads = f"{sizes['heads']} heads of {sizes['width']}, {sizes['kv_heads']} of keys, batch {sizes['batch']}"
    title = f"{KERNEL} over N on {shown['device']}: {heads}, {sizes['dtype']}"
    figure.suptitle(title, fontsize=10.5, fontweight="bold", x=0.01, ha="left")
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _panel(axis: Axes, shown: Mapping[str, Any], field: str, unit: int) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({point["length"] for points in shown["series"].values() for point in points})
    for name, points in shown["series"].items():
        kind = "other" if name == shown["other"] else name
        known = [(point["length"], point[field] / unit) for point in points if point[field]]
        style: dict[str, Any] = {"color": palette.candidate(kind), "marker": _MARKERS[kind], "label": label(name)}
        # Ours last, and small marks on large ones: lines of equal memory lie upon each other.
        size, order = (4.0, 3) if kind == "triton" else (6.5, 2)
        axis.plot(*zip(*known, strict=True), **style, markersize=size, linewidth=1.4, zorder=order) if known else None
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid()
    axis.set_xlabel("N: as many queries as keys")


DRAWING = Drawing("memory", "Device memory and time of attention over the length of its sequence", data, _draw)
