"""Order statistics of raw samples, in integer nanoseconds.

A leaf: plain integers, ``math.fsum`` and fixed rounding, so that every Python
and every CPU derives the same bytes from the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "OURS",
    "REGIMES",
    "StatsError",
    "Summary",
    "per_call_ns",
    "percentile",
    "pool",
    "rate_per_s",
    "speedup",
    "summarise",
    "tmean",
]

REGIMES = ("cold_clean", "cold_dirty", "warm", "graph", "call")
"""Every state of caches and host in which a call is timed, the primary one first."""

OURS = ("triton", "companion")
"""The roles whose time is that of our own kernels, which nothing else may have served."""

P99_SAMPLES = 500
"""Below this count the 99th percentile rests on fewer than five samples and is not given."""

FLAGGED_LIMIT_PERCENT = 10
TRIM_PERCENT = 95


class StatsError(ValueError):
    """Samples of which no statistic can be made; one sentence says why."""


class Summary(NamedTuple):
    """What the samples of one candidate in one regime say, or why they say nothing."""

    status: str
    reason: str | None
    stats: dict[str, int | float | None] | None


def percentile(ordered: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile: an observed value, never an interpolated one.

    Args:
        ordered: samples in ascending order.
        percent: 1 to 100; an integer, because 0.07 * 100 is not 7 in binary.

    Returns:
        The sample at position ceil(percent * n / 100), counted from one.

    Raises:
        StatsError: without samples, or when ``percent`` is out of range.
    """
    if not ordered:
        raise StatsError("percentile: expected at least one sample, found none.")
    if not 1 <= percent <= 100:
        raise StatsError(f"percentile: expected a per cent from 1 to 100, found {percent}.")
    return ordered[_rank(percent, len(ordered)) - 1]


def tmean(ordered: Sequence[int]) -> float:
    """The mean of the lower 95 % of ascending samples, in ns to 3 decimals.

    Unlike the median it moves with a shift smaller than the timer's quantum.
    """
    if not ordered:
        raise StatsError("tmean: expected at least one sample, found none.")
    kept = ordered[: _rank(TRIM_PERCENT, len(ordered))]
    return round(math.fsum(kept) / len(kept), 3)


def _rank(percent: int, count: int) -> int:
    return -(-percent * count // 100)


def per_call_ns(sample_ns: int, calls: int) -> int:
    """The duration of one of the ``calls`` that a sample holds, rounded half up."""
    return (2 * sample_ns + calls) // (2 * calls)


def rate_per_s(amount: int, duration_ns: int) -> int:
    """Bytes or operations a second, rounded half up; ``duration_ns`` is above 0."""
    if duration_ns <= 0:
        raise StatsError(f"rate: expected a duration above 0 ns, found {duration_ns}.")
    return (2 * amount * 1_000_000_000 + duration_ns) // (2 * duration_ns)


def speedup(baseline_ns: int | None, ours_ns: int | None) -> float | None:
    """How many times faster we are, to 4 decimals; None when either is missing."""
    if baseline_ns is None or ours_ns is None:
        return None
    if baseline_ns <= 0 or ours_ns <= 0:
        raise StatsError(f"speedup: expected durations above 0 ns, found {baseline_ns} and {ours_ns}.")
    return round(baseline_ns / ours_ns, 4)


def pool(runs: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
    """The unflagged samples of ``runs`` a call, ascending, and how many were flagged.

    Raises:
        StatsError: when a flag points outside the samples of its run.
    """
    kept: list[int] = []
    flagged = 0
    for run in runs:
        samples = run["samples_ns"]
        marked = {index for indices in run["flags"].values() for index in indices}
        if marked and max(marked) >= len(samples):
            raise StatsError(f"flags: expected indices below {len(samples)}, found {max(marked)}.")
        kept.extend(per_call_ns(ns, run["calls_per_sample"]) for i, ns in enumerate(samples) if i not in marked)
        flagged += len(marked)
    return sorted(kept), flagged


def summarise(runs: Sequence[Mapping[str, Any]]) -> Summary:
    """Pool the runs of one candidate in one regime over its processes.

    Args:
        runs: objects ``{process, calls_per_sample, samples_ns, flags}`` as a
            timing artifact holds them, all of one regime.

    Returns:
        Statistics a call in ns, or status ``invalid`` with the reason: no
        sample left, more than 10 % flagged, or calls too short to divide.
    """
    ordered, flagged = pool(runs)
    total = len(ordered) + flagged
    if not ordered:
        return Summary("invalid", f"no unflagged sample among {total}", None)
    if 100 * flagged > FLAGGED_LIMIT_PERCENT * total:
        return Summary("invalid", f"{flagged} of {total} samples are flagged, above {FLAGGED_LIMIT_PERCENT} %", None)
    if ordered[0] < 1:
        return Summary("invalid", "a call takes less than half a nanosecond", None)
    return Summary("ok", None, _statistics(ordered, flagged, len({run["process"] for run in runs})))


def _statistics(ordered: list[int], flagged: int, processes: int) -> dict[str, int | float | None]:
    return {
        "samples": len(ordered),
        "flagged": flagged,
        "processes": processes,
        "min_ns": ordered[0],
        **{f"p{percent}_ns": percentile(ordered, percent) for percent in (10, 50, 90, 95)},
        "p99_ns": percentile(ordered, 99) if len(ordered) >= P99_SAMPLES else None,
        "max_ns": ordered[-1],
        "tmean_ns": tmean(ordered),
    }
