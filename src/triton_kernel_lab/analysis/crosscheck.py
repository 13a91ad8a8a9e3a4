"""Our windows beside NVBench's: what follows from the raw samples of a cross-check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_kernel_lab.analysis.stats import percentile, summarise
from triton_kernel_lab.artifacts import Artifact

__all__ = ["derived", "differing"]

_REGIMES = ("cold_clean", "cold_dirty")


def derived(cell: Mapping[str, Any]) -> dict[str, int | float | None]:
    """The p50s of a cell in ns and NVBench's over ours; None where there are no believable samples.

    Args:
        cell: holds ``runs`` as a candidate of a timing artifact does, and ``nvbench_samples_ns``.
    """
    p50s = {f"{regime}_p50_ns": _p50(cell, regime) for regime in _REGIMES}
    theirs = percentile(sorted(cell["nvbench_samples_ns"]), 50) if cell["nvbench_samples_ns"] else None
    ratios = {
        f"nvbench_over_{regime}_ratio": round(theirs / ours, 4)
        if theirs and (ours := p50s[f"{regime}_p50_ns"])
        else None
        for regime in _REGIMES
    }
    return {**p50s, "nvbench_p50_ns": theirs, **ratios}


def _p50(cell: Mapping[str, Any], regime: str) -> int | None:
    summary = summarise([run for run in cell["runs"] if run["regime"] == regime])
    return int(summary.stats["p50_ns"] or 0) if summary.stats else None


def differing(crosscheck: Artifact) -> list[str]:
    """``JSON path: expected ..., found ...`` for each figure that the samples do not give."""
    return [
        f"$.cells[{index}].{name}: expected {value}, found {cell[name]}"
        for index, cell in enumerate(crosscheck["cells"])
        for name, value in derived(cell).items()
        if cell[name] != value
    ]
