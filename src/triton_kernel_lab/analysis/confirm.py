"""Judging a confirmation: two versions of a kernel that were timed in turns, in the same processes.

Each process gives one difference of log times. What a process brings with it, its
clocks, its memory, the session it falls into, is in both times and cancels; what is
left is tested by its spread from process to process. The base is loaded a second
time as a control, and how far it seems to be from itself widens the margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernel_lab.analysis import verdicts
from triton_kernel_lab.analysis.margins import AA_FACTOR, MINIMUM, QUANTA, Margin
from triton_kernel_lab.analysis.replicates import geometric_mean, mean_and_sd, process_times
from triton_kernel_lab.analysis.tests_of_means import ALPHA, Moments, decide_paired

if TYPE_CHECKING:
    from triton_kernel_lab.analysis.tests_of_means import Array

__all__ = [
    "LEAST_PAIRS",
    "SAME_SOURCES",
    "VERSIONS",
    "Row",
    "compared",
    "judge",
    "ordered",
    "overall",
    "quantum_of",
    "reasons",
    "row",
    "unchanged",
]

VERSIONS = ("base", "now", "control")
"""What is timed in each process; the control is the base once more."""

LEAST_PAIRS = 3
"""Of two differences the spread is hardly known, and a test of them finds little or anything."""

SAME_SOURCES = "compiled from the same sources as the base's: not timed"

_STEP_SD = 12**-0.5
# A longer sample is reported as a float that is coarser than a nanosecond.
_EXACT_NS = 1 << 24

_FACTS = (
    *("base_tmean_ns", "tmean_ns", "pairs", "change_percent", "control_percent", "margin_percent", "margin_source"),
    *("p_regressed", "p_improved", "p_equivalent"),
)

Row = dict[str, Any]
Cell = Mapping[str, Any]


class _Test(NamedTuple):
    """The times of the processes in which all versions of a cell have a sound one."""

    cell: Cell
    regime: str
    base: list[float]
    now: list[float]
    control: list[float]
    margin: Margin
    step_ns: float

    def moments(self) -> tuple[float, float, int]:
        mean, sd = mean_and_sd(_differences(self.base, self.now))
        # Two means, neither of which is known better than the timer's step.
        return mean, max(sd, math.sqrt(2) * _STEP_SD * self.step_ns / geometric_mean(self.base)), len(self.base)


def row(cell: Cell, regime: str, verdict: str, reason: str | None, **facts: Any) -> Row:
    """One cell of the verdict in one regime; a fact that is not given is null."""
    renamed = cell["base_kernel"] if cell["base_kernel"] != cell["kernel"] else None
    where = {name: cell[name] for name in ("kernel", "shape", "dtype")}
    return {
        **where,
        "regime": regime,
        "renamed_from": renamed,
        "verdict": verdict,
        "reason": reason,
        **dict.fromkeys(_FACTS),
        **facts,
    }


def unchanged(cell: Cell, regime: str) -> Row:
    """The row of a cell whose kernel is compiled from the same sources on both sides."""
    return row(cell, regime, "EQUIVALENT", SAME_SOURCES)


def ordered(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order in which every verdict lists its cells."""
    return sorted(rows, key=lambda each: verdicts.order((each["kernel"], each["shape"], each["dtype"], each["regime"])))


def quantum_of(cells: Sequence[Cell]) -> int:
    """The timer's step in ns: what divides every sample between two events; 1 without samples."""
    found = 0
    for cell in cells:
        for version in cell["versions"].values():
            for run in version["runs"]:
                if run["regime"] != "call":
                    found = math.gcd(found, *(ns for ns in run["samples_ns"] if ns < _EXACT_NS))
    return max(found, 1)


def judge(cells: Sequence[Cell], regimes: Sequence[str]) -> list[Row]:
    """One row for each cell and regime, in order.

    Args:
        cells: ``{kernel, base_kernel, shape, dtype, versions}`` with a record
            ``{status, reason, launch, runs}`` for each of ``VERSIONS``.
        regimes: those that were timed.
    """
    quantum_ns = quantum_of(cells)
    rows: list[Row] = []
    tests: list[_Test] = []
    for cell in cells:
        for regime in regimes:
            found = _settle(cell, regime) or _test(cell, regime, quantum_ns)
            if isinstance(found, _Test):
                tests.append(found)
            else:
                rows.append(found)
    return ordered([*rows, *_tested(tests)])


def _settle(cell: Cell, regime: str) -> Row | None:
    """The row of a cell that was not timed because something is wrong with a version of it."""
    for name, verdict in (("now", "CORRECTNESS_FAIL"), ("base", "NOT_COMPARABLE"), ("control", "NOT_COMPARABLE")):
        version = cell["versions"][name]
        if version["status"] in ("wrong", "failed"):
            who = "" if name == "now" else "the base " if name == "base" else "the base, loaded again, "
            return row(cell, regime, verdict, f"{who}{version['reason']}")
        if version["status"] == "unavailable":
            side = "current side" if name == "now" else "base"
            return row(cell, regime, "NOT_COMPARABLE", f"the {side}: {version['reason']}")
    return None


def _test(cell: Cell, regime: str, quantum_ns: int) -> _Test | Row:
    times = {}
    for name in VERSIONS:
        found, reason = process_times(cell["versions"][name], regime)
        if reason:
            side = {"base": "base", "now": "current side", "control": "base, loaded again,"}[name]
            return row(cell, regime, "NOT_COMPARABLE", f"the {side} {reason}")
        times[name] = found
    processes = sorted(set.intersection(*(set(found) for found in times.values())))
    if len(processes) < LEAST_PAIRS:
        reason = f"expected at least {LEAST_PAIRS} processes with sound times, found {len(processes)}"
        return row(cell, regime, "NOT_COMPARABLE", reason)
    base, now, control = ([times[name][process] for process in processes] for name in VERSIONS)
    step_ns = max(quantum_ns / _calls(cell, regime), 0.001)
    return _Test(cell, regime, base, now, control, _margin(base, control, step_ns), step_ns)


def _calls(cell: Cell, regime: str) -> int:
    runs = (run for version in cell["versions"].values() for run in version["runs"])
    return min(int(run["calls_per_sample"]) for run in runs if run["regime"] == regime)


def _margin(base: Sequence[float], control: Sequence[float], step_ns: float) -> Margin:
    apart = abs(mean_and_sd(_differences(base, control))[0])
    rules = [
        Margin(MINIMUM, "minimum"),
        Margin(QUANTA * step_ns / geometric_mean(base), "quantum"),
        Margin(math.expm1(AA_FACTOR * apart), "control"),
    ]
    return max(rules, key=lambda rule: rule.ratio)


def _differences(base: Sequence[float], other: Sequence[float]) -> list[float]:
    return [math.log(theirs) - math.log(ours) for ours, theirs in zip(base, other, strict=True)]


def _tested(tests: Sequence[_Test]) -> Iterator[Row]:
    if not tests:
        return
    moments = Moments(*(_array(column) for column in zip(*(test.moments() for test in tests), strict=True)))
    answers = decide_paired(moments, _array([test.margin.log for test in tests]))
    columns = zip(*(column.tolist() for column in answers), strict=True)
    for test, values in zip(tests, columns, strict=True):
        yield _tested_row(test, dict(zip(answers._fields, values, strict=True)))


def _array(values: Sequence[float]) -> Array:
    import numpy as np

    return np.array(values, dtype=np.float64)


def _tested_row(test: _Test, p_values: Mapping[str, float]) -> Row:
    answers = [name.upper() for name, p_value in p_values.items() if p_value <= ALPHA]
    mean = test.moments()[0]
    where = "beyond" if abs(mean) > test.margin.log else "within"
    doubt = None if answers else f"{where} the margin, but not beyond doubt with {len(test.base)} pairs"
    facts: dict[str, Any] = {
        "base_tmean_ns": geometric_mean(test.base),
        "tmean_ns": geometric_mean(test.now),
        "pairs": len(test.base),
        "change_percent": _percent(mean),
        "control_percent": _percent(mean_and_sd(_differences(test.base, test.control))[0]),
        "margin_percent": round(100 * test.margin.ratio, 3),
        "margin_source": test.margin.source,
    }
    facts |= {f"p_{name}": float(f"{value:.4g}") for name, value in p_values.items()}
    return row(test.cell, test.regime, answers[0] if answers else "AMBIGUOUS", doubt, **facts)


def _percent(log: float) -> float:
    return round(100 * math.expm1(log), 2) + 0.0  # + 0.0: no negative zero.


def compared(rows: Sequence[Row]) -> int:
    """How many cells have two times that were compared."""
    return sum(each["p_regressed"] is not None for each in rows)


def overall(rows: Sequence[Row], missing: Sequence[str]) -> str:
    """The verdict on the whole: the worst of the cells; a kernel that only the base has blocks a pass.

    Cells of the same sources count as compared: that two equal texts compile to
    the same code needs no measurement.
    """
    settled = compared(rows) + sum(each["reason"] == SAME_SOURCES for each in rows)
    verdict = verdicts.overall([{**each, "accepted": False} for each in rows], settled)
    return "not_comparable" if missing and verdict in ("pass", "ambiguous") else verdict


def reasons(rows: Sequence[Row], missing: Sequence[str]) -> list[str]:
    """One line for each verdict that wants attention, and for the kernels that are not on both sides."""
    same = [each for each in rows if each["reason"] == SAME_SOURCES]
    found = verdicts.reasons(rows, compared(rows) + len(same))
    if missing:
        names = ", ".join(missing)
        found.append(f"only the base has {names}: name a kernel that has another name now with --rename old=new")
    if same:
        kernels = ", ".join(dict.fromkeys(each["kernel"] for each in same))
        found.append(f"{verdicts.count(len(same))} not timed, since nothing that {kernels} is compiled from changed")
    return found
