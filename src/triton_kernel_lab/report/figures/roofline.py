"""roofline.svg: what each cell reached under the ceilings that were measured and those of the datasheet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_kernel_lab.report import units
from triton_kernel_lab.report.figures import cells, palette
from triton_kernel_lab.report.figures.svg import WIDTH, Drawing, Sources
from triton_kernel_lab.report.labels import p50_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DRAWING"]

# Rates this close are one line with both names.
_ALIKE = 0.06
# Lines nearer than this on the logarithmic axis leave no room for a label between them.
_APART = 0.7


def data(sources: Sources) -> dict[str, Any]:
    """Flop a logical byte and FLOP/s of each cell, and the ceilings. Pure."""
    roofline = sources.roofline
    names = cells.kernels(roofline)
    found = {kernel: _points(cells.of_kernel(roofline, kernel)) for kernel in names}
    points = {kernel: rows for kernel, rows in found.items() if rows}
    used = _units(sources, points)
    made = cells.head(sources, None if points else "no timed cell does arithmetic")
    return {
        **made,
        "points": points,
        "without_arithmetic": [kernel for kernel in names if kernel not in points],
        "ceilings": _ceilings(roofline["ceilings"], used),
    }


def _points(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "shape": cell["shape"],
            "flop": cell["flop"],
            "logical_bytes": cell["logical_read_bytes"] + cell["logical_write_bytes"],
            "p50_ns": p50,
            "attainable_ns": cell["attainable_ns"],
            "class": cell["class"],
        }
        for cell in found
        if cell["flop"] and (p50 := p50_ns(cell, "triton")) is not None
    ]


def _units(sources: Sources, kernels: Iterable[str]) -> set[str]:
    """The arithmetic units that the cases of these kernels name: no other ceiling is drawn."""
    return {cell["cost"]["unit"] for kernel in kernels for cell in sources.timings[kernel]["cells"]}


def _ceilings(summary: Mapping[str, Any] | None, used: Collection[str]) -> dict[str, Any]:
    if summary is None:
        return {"measured": None, "datasheet": None}
    copies = [rung["bytes_per_s"] for rung in summary["ladders"] if rung["kind"] == "copy"]
    measured = {
        "memory_bytes_per_s": max(copies),
        "flop_per_s": {e["dtype"]: e["flop_per_s"] for e in summary["matmul"] if e["dtype"] in used},
    }
    spec = summary["vendor_spec"]
    datasheet = spec and {
        "memory_bytes_per_s": spec["memory_bytes_per_s"],
        "flop_per_s": {unit: rate for unit, rate in spec["flop_per_s"].items() if unit in used},
    }
    return {"measured": measured, "datasheet": datasheet}


def _draw(figure: Figure, shown: Mapping[str, Any]) -> None:
    figure.set_size_inches(WIDTH, 5.0)
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.set_yscale("log")
    left, right, bottom = _window(shown)
    axis.set_xlim(left, right)
    rates = [_roof(axis, shown["ceilings"][name], name, left, right) for name in ("datasheet", "measured")]
    axis.set_ylim(bottom, max([*rates, bottom * 10]) * 2.5)
    for kernel, (colour, marker) in palette.kernel_marks([*shown["points"]]).items():
        _kernel(axis, kernel, shown["points"][kernel], colour, marker)
    axis.set_xlabel("arithmetic intensity (flop a logical byte)")
    axis.set_ylabel("TFLOP/s at p50, caches cold")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
    axis.grid()
    axis.set_title(_title(shown), loc="left", fontsize=10.5, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=5)
    if note := _note(shown):
        figure.text(0.995, 0.99, note, ha="right", va="top", fontsize=7.0, color=palette.MUTED)


def _title(shown: Mapping[str, Any]) -> str:
    return f"Roofline of {shown['device']}"


def _note(shown: Mapping[str, Any]) -> str:
    if not shown["without_arithmetic"]:
        return ""
    return f"without arithmetic, so not here: {', '.join(shown['without_arithmetic'])}"


def _intensity(point: Mapping[str, Any]) -> float:
    return float(point["flop"] / point["logical_bytes"])


def _window(shown: Mapping[str, Any]) -> tuple[float, float, float]:
    points = [point for rows in shown["points"].values() for point in rows]
    intensities = [_intensity(point) for point in points]
    right = max(intensities) * 4
    for ceiling in filter(None, shown["ceilings"].values()):
        right = max([right, *(4 * rate / ceiling["memory_bytes_per_s"] for rate in ceiling["flop_per_s"].values())])
    lowest = min(point["flop"] / point["p50_ns"] for point in points) / 1000
    return min(intensities) / 4, right, lowest / 2.5


def _roof(axis: Axes, ceiling: Mapping[str, Any] | None, name: str, left: float, right: float) -> float:
    """Draw one set of ceilings; returns the highest rate in TFLOP/s."""
    if ceiling is None:
        return 0.0
    slope = ceiling["memory_bytes_per_s"] / 1e12
    flats = _merged(ceiling["flop_per_s"])
    top = max([rate for rate, _ in flats], default=slope * right)
    style: dict[str, Any] = {"linewidth": 1.2, "color": palette.INK if name == "measured" else palette.MUTED}
    style["linestyle"] = "-" if name == "measured" else (0, (4, 2))
    kind = "measured copy" if name == "measured" else "datasheet memory"
    text = f"{kind} {units.gigabytes_per_s(ceiling['memory_bytes_per_s'])} GB/s"
    axis.plot([left, top / slope], [slope * left, top], label=text, **style)
    for rate, _ in flats:
        axis.plot([rate / slope, right], [rate, rate], **style)
    below = name == "measured"
    where: dict[str, Any] = {"xytext": (-2, -2.5 if below else 2.0), "textcoords": "offset points", "ha": "right"}
    for group in _near(flats):
        rates = ", ".join(f"{names} {units.teraflop_per_s(round(rate * 1e12))}" for rate, names in group)
        at = (right, group[-1 if below else 0][0])
        text = f"{name} {rates} TFLOP/s"
        axis.annotate(text, at, va="top" if below else "bottom", fontsize=6.5, color=style["color"], **where)
    return top


def _near(flats: Sequence[tuple[float, str]]) -> list[list[tuple[float, str]]]:
    """Descending rates in groups whose labels would overprint each other, so that each group has one."""
    groups: list[list[tuple[float, str]]] = []
    for rate, names in flats:
        if groups and rate > _APART * groups[-1][-1][0]:
            groups[-1].append((rate, names))
        else:
            groups.append([(rate, names)])
    return groups


def _merged(rates: Mapping[str, int]) -> list[tuple[float, str]]:
    """Rates in TFLOP/s with the names of the units that reach them."""
    found: list[tuple[float, list[str]]] = []
    for name, rate in sorted(rates.items(), key=lambda item: (-item[1], item[0])):
        if found and found[-1][0] * (1 - _ALIKE) <= rate / 1e12:
            found[-1][1].append(name)
        else:
            found.append((rate / 1e12, [name]))
    return [(rate, " / ".join(names)) for rate, names in found]


def _kernel(axis: Axes, kernel: str, points: Sequence[Mapping[str, Any]], colour: str, marker: str) -> None:
    """Filled where a share is claimed, hollow near the launch floor; a tick at what the size allows."""
    for point in points:
        x, y = _intensity(point), point["flop"] / point["p50_ns"] / 1000
        if point["attainable_ns"]:
            roof = point["flop"] / point["attainable_ns"] / 1000
            axis.plot([x, x], [y, roof], color=colour, linewidth=0.7)
            axis.plot([x], [roof], color=colour, marker="_", markersize=7.0)
        hollow = point["class"] == "floor_dominated"
        face = palette.GROUND if hollow else colour
        axis.plot([x], [y], marker=marker, color=colour, markerfacecolor=face, markersize=5.0, linestyle="none")
    axis.plot([], [], marker=marker, color=colour, linestyle="none", markersize=5.0, label=kernel)


DRAWING = Drawing("roofline", "Roofline: one point a cell under measured and datasheet ceilings", data, _draw)
