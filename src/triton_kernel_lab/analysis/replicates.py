"""What each measuring process says of a cell: the unit of replication of the gate.

Samples inside a process share its clocks, memory placement and code layout, so
each process counts once, by the mean of the lower 95 % of its samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton_kernel_lab.analysis.sides import Key
from triton_kernel_lab.analysis.stats import REGIMES, pool, summarise, tmean
from triton_kernel_lab.artifacts import Artifact

__all__ = ["Replicates", "geometric_mean", "mean_and_sd", "process_times", "replicates"]

# What the timing stage says of a candidate whose output failed its oracle beside the timed window.
_WRONG = ("wrong before timing", "wrong after timing")


@dataclass(frozen=True)
class Replicates:
    """The `triton` candidate of one cell, process by process.

    Attributes:
        times_ns: tmean a call of each process; empty when there is no believable
            time, and then ``reason`` says why.
        anchors_ns: tmean of the copy of the same bytes, by the same processes as
            ``times_ns``; empty when any of them has no sound copy.
        wrong: whether its output failed the oracle beside the timed window.
        calls: the calls that one sample holds, the fewest of all processes.
        work: (bytes read, bytes written, flop), what the case asks for.
    """

    times_ns: tuple[float, ...]
    anchors_ns: tuple[float, ...]
    reason: str | None
    wrong: bool
    served_by: str | None
    calls: int
    work: tuple[int, int, int]

    @property
    def logs(self) -> list[float]:
        """The log of each process's time in ns."""
        return [math.log(time) for time in self.times_ns]

    @property
    def anchored_logs(self) -> list[float]:
        """The log of each process's time over that of its copy; empty without a copy."""
        pairs = zip(self.times_ns, self.anchors_ns, strict=True) if self.anchors_ns else ()
        return [math.log(time) - math.log(anchor) for time, anchor in pairs]


def replicates(timing: Artifact) -> dict[Key, Replicates]:
    """Each cell and regime of a timing artifact.

    Raises:
        StatsError: a flag points outside the samples of its run.
    """
    found: dict[Key, Replicates] = {}
    for cell in timing["cells"]:
        used = {run["regime"] for candidate in cell["candidates"] for run in candidate["runs"]}
        # A cell whose every candidate failed still shows up, in the primary regime.
        for regime in [name for name in REGIMES if name in used] or [REGIMES[0]]:
            found[timing["kernel"], cell["shape"], cell["dtype"], regime] = _replicates(cell, regime)
    return found


def _replicates(cell: Mapping[str, Any], regime: str) -> Replicates:
    cost = cell["cost"]
    read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
    work = (read, write, cost["flop"])
    ours = next((each for each in cell["candidates"] if each["role"] == "triton"), None)
    if ours is None:
        return Replicates((), (), "holds no triton candidate", False, None, 1, work)
    times, reason = process_times(ours, regime)
    if ours["served_by"] != "triton":
        times, reason = {}, f"is served by {ours['served_by']}, not by triton"
    copy = next((each for each in cell["candidates"] if each["role"] == "anchor"), None)
    anchors = process_times(copy, regime)[0] if copy else {}
    beside = tuple(anchors[process] for process in times) if times.keys() <= anchors.keys() else ()
    wrong = any(phrase in (ours["reason"] or "") for phrase in _WRONG)
    calls = min((run["calls_per_sample"] for run in _runs(ours, regime)), default=1)
    return Replicates(tuple(times.values()), beside, reason, wrong, ours["served_by"], calls, work)


def _runs(candidate: Mapping[str, Any], regime: str) -> list[Mapping[str, Any]]:
    return [run for run in candidate["runs"] if run["regime"] == regime]


def process_times(candidate: Mapping[str, Any], regime: str) -> tuple[dict[int, float], str | None]:
    """The tmean a call of each process in ns, or why there is none."""
    runs = _runs(candidate, regime)
    if candidate["status"] != "ok":
        return {}, f"has status {candidate['status']} ({candidate['reason'] or 'no reason is given'})"
    if not runs:
        return {}, f"was not timed in regime {regime}"
    status, reason, _ = summarise(runs)
    if status != "ok":
        return {}, f"has status {status} ({reason})"
    processes = sorted({run["process"] for run in runs})
    samples = {process: pool([run for run in runs if run["process"] == process])[0] for process in processes}
    return {process: tmean(kept) for process, kept in samples.items() if kept}, None


def geometric_mean(times_ns: Sequence[float]) -> float:
    """The time whose log is the mean of the logs, in ns to 3 decimals."""
    return round(math.exp(mean_and_sd([math.log(time) for time in times_ns])[0]), 3)


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is 0 for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
