"""The rows of a gate's verdict: each pair of cells is settled without a test, or by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernel_lab.analysis import verdicts
from triton_kernel_lab.analysis.margins import Margin, Noise, margin
from triton_kernel_lab.analysis.pairing import Pair, Settled
from triton_kernel_lab.analysis.replicates import Replicates, geometric_mean, mean_and_sd
from triton_kernel_lab.analysis.sides import Key
from triton_kernel_lab.analysis.tests_of_means import ALPHA, Moments, Sides, decide

if TYPE_CHECKING:
    from triton_kernel_lab.analysis.tests_of_means import Array

__all__ = ["judge"]

# A process's mean is not known better than the timer's step. Without this floor, two or three processes
# that agree by chance would have hardly any spread, and a test of them no doubt.
_STEP_SD = 12**-0.5


class _Test(NamedTuple):
    """Two sides of a cell that can be compared, and the margin between them."""

    pair: Pair
    base: Replicates
    now: Replicates
    margin: Margin
    step_ns: float

    @property
    def anchored(self) -> bool:
        return bool(self.base.anchors_ns and self.now.anchors_ns)

    def logs(self, side: Replicates, anchored: bool) -> list[float]:
        return side.anchored_logs if anchored and self.anchored else side.logs

    def change(self, anchored: bool = False) -> float:
        """The difference of the means of log times."""
        base, now = (mean_and_sd(self.logs(side, anchored))[0] for side in (self.base, self.now))
        return now - base


def judge(
    pairs: Sequence[Pair],
    settle: Callable[[Pair], Settled | None],
    noise: Mapping[Key, Noise],
    quantum_ns: int,
    rebaselined: bool,
) -> list[dict[str, Any]]:
    """One row for each pair, and one for each old name of a renamed kernel; in order.

    Args:
        pairs: all cells of both sides.
        settle: the verdict on a pair that needs no test, or None.
        noise: the noise of each cell, as far as it was measured.
        quantum_ns: the timer's step.
        rebaselined: whether what may be accepted is accepted.
    """
    rows, tests = [], []
    for pair in pairs:
        settled = settle(pair)
        if settled:
            rows.append(_settled_row(pair, settled, rebaselined))
        elif pair.base and pair.now:
            tests.append(_test(pair, pair.base, pair.now, noise.get(pair.key), quantum_ns))
    rows += _tested_rows(tests)
    rows += [_renamed_row(pair) for pair in pairs if pair.base and pair.old != pair.key[0]]
    return sorted(rows, key=lambda row: verdicts.order((row["kernel"], row["shape"], row["dtype"], row["regime"])))


def _test(pair: Pair, base: Replicates, now: Replicates, noise: Noise | None, quantum_ns: int) -> _Test:
    calls = min(base.calls, now.calls)
    allowed = margin(geometric_mean(base.times_ns), calls, quantum_ns, noise)
    # 0.001 ns: what a process's mean is rounded to.
    return _Test(pair, base, now, allowed, max(quantum_ns / calls, 0.001))


def _settled_row(pair: Pair, settled: Settled, rebaselined: bool) -> dict[str, Any]:
    accepted = rebaselined and settled.acceptable
    return verdicts.row(pair.key, settled.verdict, settled.reason, accepted=accepted, **_times(pair))


def _renamed_row(pair: Pair) -> dict[str, Any]:
    old = (pair.old, *pair.key[1:])
    return verdicts.row(old, "RENAMED", f"now {pair.key[0]}")


def _times(pair: Pair) -> dict[str, Any]:
    """What a row says of both sides, whether they can be compared or not."""
    facts: dict[str, Any] = {"renamed_from": pair.old if pair.base and pair.old != pair.key[0] else None}
    for prefix, side in (("base_", pair.base), ("", pair.now)):
        if side and side.times_ns:
            facts[f"{prefix}tmean_ns"] = geometric_mean(side.times_ns)
            facts[f"{prefix}processes"] = len(side.times_ns)
    return facts


def _tested_rows(tests: Sequence[_Test]) -> list[dict[str, Any]]:
    if not tests:
        return []
    answers = decide(_sides(tests, anchored=False), _sides(tests, anchored=True), _array(t.margin.log for t in tests))
    columns = zip(*(column.tolist() for column in answers), strict=True)
    p_values = (dict(zip(answers._fields, values, strict=True)) for values in columns)
    return [_tested_row(test, found) for test, found in zip(tests, p_values, strict=True)]


def _array(values: Any) -> Array:
    import numpy as np

    return np.array(list(values), dtype=np.float64)


def _sides(tests: Sequence[_Test], anchored: bool) -> Sides:
    return Sides(*(_moments(tests, side, anchored) for side in ("base", "now")))


def _moments(tests: Sequence[_Test], name: str, anchored: bool) -> Moments:
    rows = []
    for test in tests:
        side: Replicates = getattr(test, name)
        mean, sd = mean_and_sd(test.logs(side, anchored))
        rows.append((mean, max(sd, _STEP_SD * test.step_ns / geometric_mean(side.times_ns)), len(side.times_ns)))
    return Moments(*(_array(column) for column in zip(*rows, strict=True)))


def _tested_row(test: _Test, p_values: Mapping[str, float]) -> dict[str, Any]:
    verdict, reason = _verdict(test, p_values)
    facts = {
        **_times(test.pair),
        "change_percent": _percent(test.change()),
        "anchored_change_percent": _percent(test.change(anchored=True)) if test.anchored else None,
        "margin_percent": round(100 * test.margin.ratio, 3),
        "margin_source": test.margin.source,
    }
    facts |= {f"p_{name}": float(f"{value:.4g}") for name, value in p_values.items()}
    return verdicts.row(test.pair.key, verdict, reason, **facts)


def _percent(log: float) -> float:
    return round(100 * math.expm1(log), 2) + 0.0  # + 0.0: no negative zero.


def _verdict(test: _Test, p_values: Mapping[str, float]) -> tuple[str, str | None]:
    for answer, p_value in p_values.items():
        if p_value <= ALPHA:
            return answer.upper(), None if test.anchored else "without a sound copy in the same processes"
    return "AMBIGUOUS", _doubt(test)


def _doubt(test: _Test) -> str:
    """Why neither a change nor its absence is shown."""
    beyond = [abs(change) > test.margin.log for change in (test.change(), test.change(anchored=True))]
    if beyond == [True, False]:
        return "the copy in the same processes changed with it"
    if beyond == [False, True]:
        return "only its ratio to the copy changed"
    counts = f"{len(test.base.times_ns)} and {len(test.now.times_ns)} processes"
    return f"{'beyond' if all(beyond) else 'within'} the margin, but not beyond doubt with {counts}"
