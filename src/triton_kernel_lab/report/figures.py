"""latency.svg: p50 bars of Triton, torch.compile and eager, one panel a kernel."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import label, of_regime, p50_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CANDIDATES", "data", "data_digest", "recorded_digests", "render", "run", "strip_digests"]

CANDIDATES = ("triton", "torch_compile", "eager")

# Apart in lightness too, for a print in grey and for the colour-blind.
_COLOURS = {"triton": "#0b3c8c", "torch_compile": "#e08a1e", "eager": "#a9b4c2"}

# White is opaque: a page in dark mode shows the same picture. Glyphs become paths, so that no
# font of the reader's is needed.
_STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "triton-kernel-lab",
    "axes.spines.top": False,
    "axes.spines.right": False,
}

_STAMP = re.compile(r"<!-- data-sha256: ([0-9a-f]{64}); body-sha256: ([0-9a-f]{64}) -->\n")


def run(project: Project) -> None:
    """Write ``reports/<runner>/latency.svg``."""
    environment, roofline = read_one(project, "environment"), read_one(project, "roofline")
    artifacts.write_text(project.reports / "latency.svg", render(data(environment, roofline)))


def data(environment: Artifact, roofline: Artifact) -> dict[str, Any]:
    """What the figure shows: ``cold_clean`` float16 p50 in ns by kernel and shape. Pure."""
    device = environment["device"]
    panels: dict[str, list[dict[str, Any]]] = {}
    for cell in of_regime(roofline, "cold_clean"):
        if cell["dtype"] == "float16":
            bars = {name: p50_ns(cell, name) for name in CANDIDATES}
            panels.setdefault(cell["kernel"], []).append({"shape": cell["shape"], "p50_ns": bars})
    return {"device": device["name"] if device else None, "reason": roofline["reason"], "panels": panels}


def data_digest(shown: Mapping[str, Any]) -> str:
    """The SHA-256 of the plotted data, which no version of matplotlib changes."""
    return hashlib.sha256(artifacts.dumps(shown).encode()).hexdigest()


def recorded_digests(svg: str) -> tuple[str, str] | None:
    """The digests of data and body that an SVG carries; None without them."""
    found = _STAMP.findall(svg)
    return found[0] if len(found) == 1 else None


def strip_digests(svg: str) -> str:
    """The body of an SVG, of which its second digest is made."""
    return _STAMP.sub("", svg)


def render(shown: Mapping[str, Any]) -> str:
    """The SVG of ``data``: the same bytes each time with one version of matplotlib."""
    body = _draw(shown)
    digest = hashlib.sha256(body.encode()).hexdigest()
    declaration, newline, rest = body.partition("\n")
    return f"{declaration}{newline}<!-- data-sha256: {data_digest(shown)}; body-sha256: {digest} -->\n{rest}"


def _draw(shown: Mapping[str, Any]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context():
        # The reader's own matplotlibrc must not change the picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        panels = shown["panels"]
        figure = Figure(figsize=(8.0, 1.0 + 2.6 * max(1, len(panels))), layout="constrained")
        if panels:
            _panels(figure, shown)
        else:
            figure.text(0.5, 0.5, f"Not measured: {shown['reason'] or 'no float16 cell'}", ha="center", va="center")
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": "triton-kernel-lab"})
    return stream.getvalue()


def _panels(figure: Figure, shown: Mapping[str, Any]) -> None:
    device = shown["device"] or "no device"
    figure.suptitle(f"p50 latency, float16, caches cold, {device} (lower is better)", fontsize=10.0)
    axes = figure.subplots(len(shown["panels"]), 1, squeeze=False, sharey=True)[:, 0]
    for axis, (kernel, rows) in zip(axes, shown["panels"].items(), strict=True):
        _panel(axis, kernel, rows)
    # From 1 us in every panel, so that heights compare; above, room for figures and legend.
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(min(1.0, low), high * 2.5)
    axes[0].legend(loc="upper left", frameon=False, ncols=len(CANDIDATES))


def _panel(axis: Axes, kernel: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.set_title(kernel, loc="left", fontsize=10.0, fontweight="bold")
    axis.set_ylabel("p50 (us, log scale)")
    axis.set_yscale("log")
    axis.set_xticks(range(len(rows)), [row["shape"] for row in rows])
    for index, name in enumerate(CANDIDATES):
        _bars(axis, rows, name, 0.27 * (index - 1))
    axis.set_xlim(-0.5, len(rows) - 0.5)


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]], name: str, offset: float) -> None:
    shown = [(at + offset, row["p50_ns"][name]) for at, row in enumerate(rows) if row["p50_ns"][name] is not None]
    heights = [ns / 1000 for _, ns in shown]
    bars = axis.bar([at for at, _ in shown], heights, width=0.25, color=_COLOURS[name], label=label(name))
    axis.bar_label(bars, [units.microseconds(ns, 1) for _, ns in shown], fontsize=7.0, padding=1.0)
    for at, row in enumerate(rows):
        if row["p50_ns"][name] is None:
            axis.annotate("none", (at + offset, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=7.0)
