"""Stage ``site``: the report as one page, and the few numbers that `dvc metrics show` prints."""

from __future__ import annotations

from pathlib import Path

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_each, read_extras, read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import summary
from triton_kernel_lab.report.figures.stage import DRAWINGS
from triton_kernel_lab.report.site import page
from triton_kernel_lab.sources import stale_tools

__all__ = ["SiteError", "pictures", "run", "verdict"]


class SiteError(ValueError):
    """A picture that the page shows is missing; one sentence says which."""


def run(project: Project) -> None:
    """Write ``reports/<runner>/index.html`` and ``summary.json`` from the artifacts and the pictures beside them."""
    sources = page.Sources(
        environment=read_one(project, "environment"),
        ceilings=read_one(project, "ceilings"),
        roofline=read_one(project, "roofline"),
        correctness=read_each(project, "correctness"),
        timings=read_each(project, "timing"),
        counters=read_each(project, "counters"),
        pictures=pictures(project),
        gate=verdict(project),
        decode=read_extras(project, ("decode_e2e",)).get("decode_e2e"),
        decode_is_stale="decode_e2e" in stale_tools(project),
    )
    artifacts.write_text(project.reports / "index.html", page.render(sources))
    artifacts.write_text(project.reports / "summary.json", artifacts.dumps(summary.metrics(sources.roofline)))


def pictures(project: Project) -> dict[str, str]:
    """The runner's pictures as they lie there, by name: their bytes are the figures stage's own affair.

    Raises:
        SiteError: one is missing.
    """
    return {drawing.name: _picture(project.reports / f"{drawing.name}.svg") for drawing in DRAWINGS}


def _picture(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(f"{path}: cannot be read: {error}; run `dvc repro figures`.") from error


def verdict(project: Project) -> Artifact | None:
    """The verdict that was kept as ``reports/<runner>/gate.json``; None without one."""
    path = project.reports / "gate.json"
    return artifacts.read(path, "gate") if path.is_file() else None
