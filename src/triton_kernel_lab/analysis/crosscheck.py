"""Our windows beside NVBench's: what follows from the raw samples of a cross-check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from triton_kernel_lab.analysis.stats import percentile, summarise
from triton_kernel_lab.artifacts import Artifact

__all__ = ["SMALL_NS", "WITHIN_PERCENT", "Agreement", "agreement", "derived", "differing"]

_REGIMES = ("cold_clean", "cold_dirty")

SMALL_NS = 10_000
"""Below it a constant of a few hundred ns is most of a difference, so that a share of the time tells little."""

WITHIN_PERCENT = 5
"""How far two clocks may lie apart that are said to agree."""


class Agreement(NamedTuple):
    """How NVBench's medians lie to our p50s of ``cold_dirty``.

    ``close`` and ``far`` hold the cells of ``SMALL_NS`` or more, ``offsets_ns`` NVBench's
    median minus our p50 in each smaller one; ``untimed`` counts those that lack either.
    """

    close: list[Mapping[str, Any]]
    far: list[Mapping[str, Any]]
    offsets_ns: list[int]
    untimed: int


def agreement(cells: Iterable[Mapping[str, Any]]) -> Agreement:
    """Sort the cells of a cross-check by size and by how far the two clocks lie apart."""
    found = Agreement([], [], [], 0)
    for cell in cells:
        ours, theirs = cell["cold_dirty_p50_ns"], cell["nvbench_p50_ns"]
        if ours is None or theirs is None:
            found = found._replace(untimed=found.untimed + 1)
        elif ours < SMALL_NS:
            found.offsets_ns.append(theirs - ours)
        else:
            near = 100 * abs(theirs - ours) <= WITHIN_PERCENT * ours
            (found.close if near else found.far).append(cell)
    return found


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
