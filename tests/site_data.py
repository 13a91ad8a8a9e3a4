"""What a page is made from, out of a synthetic project; for tests that change it before it is rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import synthetic

from triton_kernel_lab.analysis.inputs import read_each, read_one
from triton_kernel_lab.project import Project
from triton_kernel_lab.report.site import page, stage

REGIMES = ("cold_clean", "cold_dirty", "warm", "graph", "call")
SHAPES = ("128x1024", "512x4096", "2048x4096")
# The second kernel loses everywhere, so that outcomes differ.
OPTIONS: dict[str, Any] = {"shapes": SHAPES, "samples": 12, "regimes": REGIMES, "factors": {"swiglu/triton": 1.25}}


def project(root: Path, **options: Any) -> Project:
    """A synthetic project with three shapes in all regimes, derived to the page."""
    return synthetic.project(root, **{**OPTIONS, **options})


def sources(found: Project) -> page.Sources:
    """What the stage reads."""
    return page.Sources(
        environment=read_one(found, "environment"),
        ceilings=read_one(found, "ceilings"),
        roofline=read_one(found, "roofline"),
        correctness=read_each(found, "correctness"),
        timings=read_each(found, "timing"),
        counters=read_each(found, "counters"),
        pictures=stage.pictures(found),
        gate=stage.verdict(found),
    )
