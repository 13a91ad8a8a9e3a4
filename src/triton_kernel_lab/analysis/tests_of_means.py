"""Is a mean over processes above a margin, below it, or within? Welch's and Student's tests, from SciPy.

Everything is an array whose last axis runs over the cells of one suite, so that
a simulation asks of a thousand suites at once what the gate asks of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float64]
else:
    Array = Any

__all__ = ["ALPHA", "Answers", "Moments", "Sides", "decide", "decide_paired"]

ALPHA = 0.05
"""The level of every test, and the false discovery rate over the cells of a suite."""


class Moments(NamedTuple):
    """Mean, standard deviation and number of the processes' log times, by cell."""

    mean: Array
    sd: Array
    processes: Array


class Sides(NamedTuple):
    """What is compared: the base and the current side."""

    base: Moments
    now: Moments


class Answers(NamedTuple):
    """For each cell the p value of: slower than the margin, faster than the margin, within it."""

    regressed: Array
    improved: Array
    equivalent: Array


def decide(absolute: Sides, anchored: Sides, margin: Array) -> Answers:
    """Ask the three questions of each cell, of its time and of its time over the copy's.

    A change is shown when both say so. The time itself is corrected for the number
    of cells (Benjamini and Hochberg, over the last axis). The ratio to the copy,
    which a shift of the whole machine leaves alone, is a second condition, never
    a second chance, so it needs no correction.

    Args:
        absolute: log times.
        anchored: log times minus those of the copy in the same processes; where
            there is no copy, the same as ``absolute``.
        margin: by how much a log time must change to count; above 0.

    Returns:
        The larger p value of the two; a question is answered by yes at ``ALPHA``
        or less, at most one of the three.
    """
    import numpy as np
    from scipy import stats

    corrected = stats.false_discovery_control(np.stack(_ask(absolute, margin)), axis=-1)
    return Answers(*np.maximum(corrected, np.stack(_ask(anchored, margin))))


def decide_paired(differences: Moments, margin: Array) -> Answers:
    """The same three questions of log times that were taken in pairs, two in each process.

    Args:
        differences: of the current side's log time and the base's in the same process; sd above 0.
        margin: as of ``decide``.

    Returns:
        The p value of each question, corrected for the number of cells.
    """
    import numpy as np
    from scipy import stats

    def above(shift: Array, sign: int) -> Array:
        """One-sided t: is ``sign`` times the change greater than ``sign`` times ``shift``?"""
        error = differences.sd / np.sqrt(differences.processes)
        found: Array = stats.t.sf(sign * (differences.mean - shift) / error, differences.processes - 1)
        return found

    within = np.maximum(above(margin, -1), above(-margin, 1))
    asked = np.stack([above(margin, 1), above(-margin, -1), within])
    return Answers(*stats.false_discovery_control(asked, axis=-1))


def _ask(sides: Sides, margin: Array) -> Answers:
    import numpy as np

    within = np.maximum(_welch(sides, margin, "less"), _welch(sides, -margin, "greater"))
    return Answers(_welch(sides, margin, "greater"), _welch(sides, -margin, "less"), within)


def _welch(sides: Sides, shift: Array, alternative: str) -> Array:
    """One-sided Welch on process means: is the change greater, or less, than ``shift``?"""
    from scipy import stats

    now, base = sides.now, sides.base
    found = stats.ttest_ind_from_stats(
        *now._replace(mean=now.mean - shift), *base, equal_var=False, alternative=alternative
    )
    p_value: Array = found.pvalue
    return p_value
