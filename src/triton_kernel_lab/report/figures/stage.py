"""Stage ``figures``: every picture of a report as SVG, and what `dvc plots` draws from."""

from __future__ import annotations

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_each, read_one
from triton_kernel_lab.project import Project
from triton_kernel_lab.report.figures import (
    attainable,
    bandwidth,
    distribution,
    latency,
    memory,
    points,
    regimes,
    roofline,
)
from triton_kernel_lab.report.figures.svg import Drawing, Sources, render

__all__ = ["DRAWINGS", "run"]

DRAWINGS: tuple[Drawing, ...] = (
    latency.DRAWING,
    latency.MORE,
    roofline.DRAWING,
    attainable.DRAWING,
    bandwidth.DRAWING,
    distribution.DRAWING,
    memory.DRAWING,
    regimes.DRAWING,
)
"""In the order in which a report shows them."""


def run(project: Project) -> None:
    """Write ``reports/<runner>/<name>.svg`` for each drawing, and ``points.csv``."""
    timings = read_each(project, "timing")
    sources = Sources(read_one(project, "environment"), read_one(project, "roofline"), timings)
    for drawing in DRAWINGS:
        artifacts.write_text(project.reports / f"{drawing.name}.svg", render(drawing, drawing.data(sources)))
    artifacts.write_text(project.reports / "points.csv", points.render(sources.roofline))
