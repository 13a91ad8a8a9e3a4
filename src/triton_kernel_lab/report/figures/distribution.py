"""distribution.svg: how the samples of two cells spread, the shortest one and the closest race."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.analysis.stats import pool
from triton_kernel_lab.report import units
from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.svg import WIDTH, Drawing, Sources
from triton_kernel_lab.report.labels import label, p50_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING", "choose"]

REGIME = "cold_clean"


def data(sources: Sources) -> dict[str, Any]:
    """Every unflagged sample of the chosen cells in ns, by candidate and process, as value and count. Pure."""
    panels = [_panel_data(sources, why, cell) for why, cell in choose(sources).items()]
    return {**cells.head(sources, None if panels else "no cell has a time of Triton"), "panels": panels}


def choose(sources: Sources) -> dict[str, Mapping[str, Any]]:
    """The cell of Triton's shortest p50, and of those above the launch floor the one with the closest rival."""
    roofline = sources.roofline
    found = [cell for kernel in cells.kernels(roofline) for cell in cells.of_kernel(roofline, kernel, REGIME)]
    timed = [cell for cell in found if p50_ns(cell, "triton") is not None]
    raced = [cell for cell in timed if cell["speedup_over_best"] and cell["class"] != "floor_dominated"]
    chosen: dict[str, Mapping[str, Any]] = {}
    if timed:
        chosen["the shortest cell"] = min(timed, key=lambda cell: p50_ns(cell, "triton") or 0)
    if raced:
        chosen["the closest race"] = min(raced, key=lambda cell: abs(cell["speedup_over_best"] - 1))
    return chosen


def _panel_data(sources: Sources, why: str, cell: Mapping[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(["triton", "torch_compile", "eager", cells.other(cell)])
    timing = sources.timings[cell["kernel"]]
    raw = next(c for c in timing["cells"] if (c["shape"], c["dtype"]) == (cell["shape"], cell["dtype"]))
    timed = {c["name"]: c["runs"] for c in raw["candidates"]}
    samples = {name: _by_process(timed[name]) for name in names if name and p50_ns(cell, name) is not None}
    facts = {key: cell[key] for key in ("kernel", "shape", "dtype")}
    return {"why": why, **facts, "other": cells.other(cell), "samples_ns": samples}


def _by_process(runs: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
    mine = sorted((run for run in runs if run["regime"] == REGIME), key=lambda run: run["process"])
    return [_counted(pool(list(of))[0]) for _, of in groupby(mine, key=lambda run: run["process"])]


def _counted(ordered: Sequence[int]) -> list[list[int]]:
    return [[value, len(list(same))] for value, same in groupby(ordered)]


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    figure.set_size_inches(WIDTH, 4.0)
    axes = figure.subplots(1, len(shown["panels"]), squeeze=False, sharey=True)[0]
    for axis, panel in zip(axes, shown["panels"], strict=True):
        _panel(axis, panel)
    axes[0].set_ylabel("share of samples at or below")
    figure.suptitle(
        f"How samples spread on {shown['device']}: all processes together, and thin each alone",
        fontsize=10.5,
        fontweight="bold",
        x=0.01,
        ha="left",
    )


def _panel(axis: Axes, panel: Mapping[str, Any]) -> None:
    name = f"{panel['kernel']} {panel['shape']} {panel['dtype']}"
    axis.set_title(f"{panel['why']}: {name}", loc="left", fontsize=8.5)
    axis.set_xlabel("us, caches cold")
    axis.grid()
    low, high = _window(panel)
    axis.set_xlim(low, high)
    axis.set_ylim(0, 1.0)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "p50", "75 %", "100 %"])
    for name in panel["samples_ns"]:
        _curves(axis, panel, name, high)
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.16), borderaxespad=0.0)


def _pooled(processes: Sequence[Sequence[Sequence[int]]]) -> list[tuple[int, int]]:
    counts: dict[int, int] = {}
    for value, count in (pair for process in processes for pair in process):
        counts[value] = counts.get(value, 0) + count
    return sorted(counts.items())


def _quantile(points: Sequence[tuple[int, int]], share: float) -> int:
    wanted = share * sum(count for _, count in points)
    passed = 0
    for value, count in points:
        passed += count
        if passed >= wanted:
            return value
    return points[-1][0]


def _window(panel: Mapping[str, Any]) -> tuple[float, float]:
    """In us: around Triton and whoever is within half as much again; a slower one is named, not drawn."""
    pooled = {name: _pooled(processes) for name, processes in panel["samples_ns"].items()}
    ours = _quantile(pooled["triton"], 0.5)
    near = [points for points in pooled.values() if _quantile(points, 0.5) <= 1.5 * ours]
    low, high = min(points[0][0] for points in near), max(_quantile(points, 0.985) for points in near)
    return (low - 0.05 * (high - low)) / 1000, (high + 0.05 * (high - low)) / 1000


def _curves(axis: Axes, panel: Mapping[str, Any], name: str, high: float) -> None:
    """Draw a candidate; one that lies beyond the right edge has its line in the legend only."""
    colour = palette.candidate("other" if name == panel["other"] else name)
    pooled = _pooled(panel["samples_ns"][name])
    p50 = _quantile(pooled, 0.5)
    text = f"{label(name)} {units.microseconds(p50, 2)} us"
    if p50 / 1000 > high:
        axis.plot([], [], color=colour, linewidth=1.8, label=f"{text} (beyond)")
        return
    if len(panel["samples_ns"][name]) > 1:
        for process in panel["samples_ns"][name]:
            axis.plot(*_steps(process, high), color=colour, linewidth=0.5, alpha=0.55)
    axis.plot(*_steps(pooled, high), color=colour, linewidth=1.8, label=text)


def _steps(points: Sequence[Sequence[int]], high: float) -> tuple[list[float], list[float]]:
    total = sum(count for _, count in points)
    xs, ys = zip(*_corners(points, total, high), strict=True)
    return list(xs), list(ys)


def _corners(points: Sequence[Sequence[int]], total: int, high: float) -> Iterator[tuple[float, float]]:
    passed = 0
    for value, count in points:
        yield value / 1000, passed / total
        if value / 1000 > high:
            return
        passed += count
        yield value / 1000, passed / total


DRAWING = Drawing("distribution", "Distributions of samples in the shortest cell and the closest race", data, _draw)
