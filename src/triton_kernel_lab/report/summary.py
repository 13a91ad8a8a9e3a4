"""A runner's results in one row a kernel: how device, graph and call time compare, and where Triton is fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import of_regime, p50_ns

__all__ = ["MEDIAN_NOTE", "TIMES", "Row", "fastest", "metrics", "rows", "span"]

TIMES = {"device": "cold_clean", "graph": "graph", "call": "call"}
"""The three times of a call that are told apart, and the regime in which each is measured."""

# An observed value, as every p50 of the project is: no cell has the mean of two cells' speedups.
MEDIAN_NOTE = "of an even number the median is the lower of the two in the middle"
"""What a table of medians says below or above itself."""


class Row(NamedTuple):
    """One kernel.

    ``speedups`` holds, for each of ``TIMES``, the speedups over torch.compile
    ascending; ``fastest`` in how many of ``raced`` cells no baseline has a
    shorter p50, by the same.
    """

    kernel: str
    speedups: Mapping[str, Sequence[float]]
    fastest: Mapping[str, int]
    raced: Mapping[str, int]


def fastest(cell: Mapping[str, Any]) -> bool | None:
    """Whether no baseline has a shorter p50 than Triton; None where there is nothing to compare."""
    ours, best = p50_ns(cell, "triton"), p50_ns(cell, cell["best_baseline"])
    return None if ours is None or best is None else ours <= best


def rows(roofline: Artifact) -> list[Row]:
    """A row for each kernel with cells, in the registry's order."""
    return [_row(roofline, kernel) for kernel in dict.fromkeys(cell["kernel"] for cell in roofline["cells"])]


def _row(roofline: Artifact, kernel: str) -> Row:
    found = {time: of_regime(roofline, regime, kernel) for time, regime in TIMES.items()}
    judged = {time: [fastest(cell) for cell in cells] for time, cells in found.items()}
    return Row(
        kernel,
        {time: _speedups(cells) for time, cells in found.items()},
        {time: answers.count(True) for time, answers in judged.items()},
        {time: len(answers) - answers.count(None) for time, answers in judged.items()},
    )


def _speedups(cells: Iterable[Mapping[str, Any]]) -> list[float]:
    found = (cell["speedup_over_torch_compile"] for cell in cells)
    return sorted(speedup for speedup in found if speedup is not None)


def _median(ordered: Sequence[float]) -> float | None:
    """The nearest-rank median, of which ``MEDIAN_NOTE`` tells."""
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def span(ordered: Sequence[float]) -> str:
    """The median of ascending speedups and, in brackets, the least and the largest."""
    if len(ordered) < 2:
        return units.ratio(_median(ordered))
    return f"{units.ratio(_median(ordered))} ({units.ratio(ordered[0])} to {units.ratio(ordered[-1])})"


def metrics(roofline: Artifact) -> dict[str, Any]:
    """A handful of numbers for `dvc metrics show`; one that does not exist has no key."""
    found = rows(roofline)
    pooled = {time: sorted(value for row in found for value in row.speedups[time]) for time in TIMES}
    return {
        "cells": sum(row.raced["device"] for row in found),
        "fastest": {row.kernel: row.fastest["device"] for row in found},
        "median_speedup_over_torch_compile": {
            time: median for time, values in pooled.items() if (median := _median(values)) is not None
        },
    }
