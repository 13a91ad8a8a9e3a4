"""The generated blocks of docs/METHODOLOGY.md: the lab's own figures for what the page tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import crosscheck, units
from triton_kernel_lab.report.labels import find, of_regime, p50_ns, p50_text
from triton_kernel_lab.report.markdown import table
from triton_kernel_lab.report.selection import extremes, kernels

__all__ = ["NAMES", "blocks"]

NAMES = ("floors", "dirty", "call", "blind", "crosscheck")
"""The blocks. The page holds each of them once."""

_FLOORS = {
    "empty_event": "an empty event pair",
    "null_kernel_clean": "an empty kernel, caches swept clean",
    "null_kernel_dirty": "an empty kernel, caches full of dirty lines",
    "null_kernel_warm": "an empty kernel, caches warm",
    "null_kernel_graph": "an empty kernel in a graph, its share",
    "null_kernel_call": "the host's time for the call of an empty kernel",
}
_TIMES = ("cold_clean", "graph", "call")
_RIVALS = ("triton", "torch_compile", "eager")


def blocks(environment: Artifact, roofline: Artifact, crosschecked: Artifact | None = None) -> dict[str, str]:
    """What belongs between the markers, by ``NAMES``. Pure.

    Args:
        environment, roofline: the runner's artifacts.
        crosschecked: the artifact ``crosscheck``, if there is one.
    """
    summary = roofline["ceilings"]
    if summary is None:
        return dict.fromkeys(NAMES, f"Not measured: {roofline['reason'] or 'no reason given'}.")
    device = environment["device"]
    where = f"Measured on {device['name'] if device else 'no device'}; p50."
    return {
        "floors": "\n\n".join([where, _floors(summary), f"![one call in each regime]({_picture(roofline)})"]),
        "dirty": "\n\n".join([where, _flush(summary), _dirty(roofline)]),
        "call": "\n\n".join([where, _call(roofline)]),
        "blind": "\n\n".join([_blind(roofline, summary["timer_quantum_ns"]), _ticks(roofline, summary)]),
        "crosscheck": crosscheck.sentence(crosschecked, kernels(roofline)),
    }


def _picture(roofline: Artifact) -> str:
    return f"../reports/{roofline['runner']}/regimes.svg"


def _floors(summary: Mapping[str, Any]) -> str:
    rows = [[_FLOORS.get(each["name"], each["name"]), units.microseconds(each["p50_ns"])] for each in summary["floors"]]
    rows.append(["one tick of the device's timer", units.microseconds(summary["timer_quantum_ns"])])
    return table(["What takes so long", "us"], rows)


def _flush(summary: Mapping[str, Any]) -> str:
    """The same copy in three states of the caches."""
    rows = [
        [
            units.mebibytes(each["bytes"]),
            *(units.microseconds(each[f"{state}_p50_ns"]) for state in ("clean", "dirty", "warm")),
            _change(each["clean_p50_ns"], each["dirty_p50_ns"]),
        ]
        for each in summary["dirty_flush"]
    ]
    headers = ["A copy, read + written (MiB)", "clean (us)", "dirty (us)", "warm (us)", "dirty over clean"]
    return table(headers, rows) if rows else "No copy was timed by cache state."


def _dirty(roofline: Artifact) -> str:
    """Triton in both cold regimes."""
    rows = []
    for case in extremes(roofline):
        found = [case.cells.get(regime) for regime in ("cold_clean", "cold_dirty")]
        clean, dirty = (p50_ns(cell, "triton") if cell else None for cell in found)
        if clean and dirty:
            rows.append([case.kernel, case.shape, case.dtype, *map(units.microseconds, (clean, dirty))])
            rows[-1].append(_change(clean, dirty))
    headers = ["Kernel", "Shape", "Dtype", "`cold_clean` (us)", "`cold_dirty` (us)", "dirty over clean"]
    return table(headers, rows) if rows else "No cell was timed in `cold_dirty`."


def _change(before: int, after: int) -> str:
    return units.signed_percent(100 * (after / before - 1))


def _call(roofline: Artifact) -> str:
    """Device, graph and call time of the smallest case of each kernel."""
    first = {case.kernel: case for case in reversed(extremes(roofline))}
    rows = []
    for case in reversed(first.values()):
        texts = [
            p50_text(case.cells[time], name) if time in case.cells else units.MISSING
            for name in _RIVALS
            for time in _TIMES
        ]
        rows.append([case.kernel, case.shape, case.dtype, *texts])
    names = ("Triton", "torch.compile", "eager")
    headers = [
        "Kernel",
        "Shape",
        "Dtype",
        *(f"{name}, {time}" for name in names for time in ("device", "graph", "call")),
    ]
    return table(headers, rows)


def _blind(roofline: Artifact, quantum: int) -> str:
    pairs = list(_pairs(roofline))
    close = [(ours, theirs) for ours, theirs in pairs if abs(ours["p50_ns"] - theirs["p50_ns"]) <= quantum]
    said = (
        f"The timer's tick is {units.plain(quantum)} ns. In {len(close)} of {len(pairs)} comparisons of Triton with a "
        "baseline the two p50 lie within one tick of each other"
    )
    if not close:
        return f"{said}."
    apart = max(abs(theirs["tmean_ns"] / ours["tmean_ns"] - 1) for ours, theirs in close)
    return f"{said}, and in these the two tmeans up to {units.fine_share(apart)} apart."


def _pairs(roofline: Artifact) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Statistics of Triton and of a baseline of the same cell."""
    for cell in of_regime(roofline, _TIMES[0]):
        ours = (find(cell, "triton") or {}).get("stats")
        for candidate in cell["candidates"]:
            if ours and candidate["role"] == "baseline" and candidate["stats"]:
                yield ours, candidate["stats"]


def _ticks(roofline: Artifact, summary: Mapping[str, Any]) -> str:
    """How coarse p50 is, and how much of it is launch, in the smallest and the largest case of each kernel."""
    quantum = summary["timer_quantum_ns"]
    floor = next(each["p50_ns"] for each in summary["floors"] if each["name"] == "null_kernel_clean")
    rows = []
    for case in extremes(roofline):
        if stats := (find(case.cells[_TIMES[0]], "triton") or {}).get("stats"):
            rows.append([case.kernel, case.shape, case.dtype, *_coarse(stats, quantum)])
            # A stale time is of an earlier run, whose empty kernel took another time than this one's.
            of_other_run = f"timing@{case.kernel}" in roofline["stale"]
            rows[-1].append(units.MISSING if of_other_run else units.percent(floor / stats["p50_ns"]))
    headers = ["Kernel", "Shape", "Dtype", "p50 (us)", "tmean (us)", "p10 to p90 (ticks)", "one tick of p50"]
    return table([*headers, "an empty kernel of p50"], rows)


def _coarse(stats: Mapping[str, Any], quantum: int) -> Sequence[str]:
    return [
        *(units.microseconds(stats[f"{name}_ns"]) for name in ("p50", "tmean")),
        units.plain(round((stats["p90_ns"] - stats["p10_ns"]) / quantum)),
        units.fine_share(quantum / stats["p50_ns"]),
    ]
