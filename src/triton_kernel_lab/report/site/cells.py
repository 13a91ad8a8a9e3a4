"""What the page's script shows of each cell: figures as text, samples as quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from triton_kernel_lab.analysis.stats import REGIMES, percentile, pool
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, label, p50_ns, p50_text, verdict
from triton_kernel_lab.report.summary import fastest

__all__ = ["QUANTILES", "cases"]

QUANTILES = {REGIMES[0]: 32}
"""Into how many equal shares the samples of a distribution are divided; in a regime that is not named, 8."""

_COARSE = 8

_STATS = ("min", "p10", "p50", "p90", "p95", "p99", "max", "tmean")
_CLASSES = {
    "floor_dominated": "floor",
    "memory_bound": "memory",
    "compute_bound": "compute",
    "ridge": "ridge",
    "latency_limited": "latency",
    "implausible": "implausible",
    "not_applicable": "-",
}
_OUTCOMES = {True: "fastest", False: "loses", None: "open"}

Case = tuple[str, str, str]


def cases(
    roofline: Artifact, timings: Mapping[str, Artifact], correctness: Mapping[str, Artifact]
) -> list[dict[str, Any]]:
    """One entry for each kernel, shape and dtype, with its cells by regime. Pure."""
    by_case: dict[Case, dict[str, Mapping[str, Any]]] = {}
    for cell in roofline["cells"]:
        by_case.setdefault((cell["kernel"], cell["shape"], cell["dtype"]), {})[cell["regime"]] = cell
    counted = _counted(roofline)
    return [_case(case, cells, timings, correctness, counted) for case, cells in by_case.items()]


def _case(
    case: Case,
    cells: Mapping[str, Mapping[str, Any]],
    timings: Mapping[str, Artifact],
    correctness: Mapping[str, Artifact],
    counted: Mapping[Case, list[str]],
) -> dict[str, Any]:
    kernel, shape, dtype = case
    raw = next(c for c in timings[kernel]["cells"] if (c["shape"], c["dtype"]) == (shape, dtype))
    by_regime = {regime: _regime(cells[regime], raw) for regime in REGIMES if regime in cells}
    who = [[c["name"], label(c["name"]), c["served_by"], c["role"]] for c in raw["candidates"]]
    return {
        "kernel": kernel,
        "shape": shape,
        "dtype": dtype,
        "candidates": who,
        "facts": [
            *_cost(raw["cost"]),
            *_launch(raw),
            *_correct(correctness[kernel], shape, dtype),
            *_counts(counted, case),
        ],
        "regimes": by_regime,
    }


def _regime(cell: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    shown = [_candidate(find(cell, c["name"]), c["runs"], cell["regime"]) for c in raw["candidates"]]
    return {
        "row": _row(cell),
        "outcome": _OUTCOMES[fastest(cell)],
        "facts": [["Verdict", verdict(cell)], *_bounds(cell)],
        "timed": shown,
    }


def _bounds(cell: Mapping[str, Any]) -> list[list[str]]:
    if cell["attainable_ns"] is None:
        return []
    found = [["Attainable, measured", f"{units.microseconds(cell['attainable_ns'])} us"]]
    if cell["vendor_ns"] is not None:
        found.append(["Least, by datasheet", f"{units.microseconds(cell['vendor_ns'])} us"])
    rate = (find(cell, "triton") or {}).get("logical_bytes_per_s")
    return [*found, ["Logical bandwidth", f"{units.gigabytes_per_s(rate)} GB/s"]]


def _row(cell: Mapping[str, Any]) -> list[str]:
    """The cells of the page's table, after kernel, shape and dtype."""
    ours: Mapping[str, Any] = find(cell, "triton") or {}
    best = cell["best_baseline"]
    return [
        *(p50_text(cell, name) for name in ("triton", "torch_compile", "eager")),
        label(best),
        p50_text(cell, best),
        units.ratio(cell["speedup_over_torch_compile"]),
        units.ratio(cell["speedup_over_best"]),
        units.percent(ours.get("attainable_ratio")),
        _CLASSES[cell["class"]],
        _outcome(cell),
    ]


def _outcome(cell: Mapping[str, Any]) -> str:
    """In a word; the whole verdict stands in the details."""
    ours, best = p50_ns(cell, "triton"), p50_ns(cell, cell["best_baseline"])
    return f"loses {units.excess_percent(ours, best)}" if ours and best and ours > best else verdict(cell)


def _candidate(candidate: Mapping[str, Any] | None, runs: Sequence[Mapping[str, Any]], regime: str) -> list[str] | None:
    """Statistics, counts, the p50 of each process and quantiles, words apart; or status and reason; or nothing."""
    if candidate is None:
        return None
    stats = candidate["stats"]
    if stats is None:
        return [candidate["status"], candidate["reason"] or "no reason given"]
    mine = sorted((run for run in runs if run["regime"] == regime), key=lambda run: run["process"])
    return [
        " ".join(units.microseconds(stats[f"{name}_ns"]) for name in _STATS),
        f"{stats['samples']} {stats['flagged']} {stats['processes']}",
        " ".join(units.microseconds(p50) for p50 in _by_process(mine)),
        _steps(pool(mine)[0], QUANTILES.get(regime, _COARSE)),
    ]


def _by_process(runs: Sequence[Mapping[str, Any]]) -> list[int]:
    pooled = (pool(list(of))[0] for _, of in groupby(runs, key=lambda run: run["process"]))
    return [percentile(ordered, 50) for ordered in pooled if ordered]


def _steps(ordered: Sequence[int], shares: int) -> str:
    """Quantiles in ns: the least sample, then by how much each next one exceeds the one before."""
    ranks = (max(1, -(-share * len(ordered) // shares)) for share in range(shares + 1))
    found = [ordered[rank - 1] for rank in ranks]
    return " ".join(map(str, [found[0], *(after - before for before, after in pairwise(found))]))


def _cost(cost: Mapping[str, Any]) -> list[list[str]]:
    ways = {"read": "Logical bytes read", "write": "Logical bytes written"}
    found = [[title, ", ".join(f"{item['name']} {item['bytes']}" for item in cost[way])] for way, title in ways.items()]
    return [*found, ["Arithmetic", f"{cost['flop']} flop, rate of {cost['unit']}"]]


def _launch(raw: Mapping[str, Any]) -> list[list[str]]:
    launch = next((c["launch"] for c in raw["candidates"] if c["role"] == "triton"), None)
    if launch is None:
        return [["Launch", "not recorded"]]
    config = ", ".join(f"{key} {value}" for key, value in launch["config"].items())
    return [
        ["Launch", f"{launch['kernel']}: {config}"],
        ["Registers a thread", units.plain(launch["registers"])],
        ["Spills", units.plain(launch["spills"])],
        ["Shared memory", f"{units.plain(launch['shared_bytes'])} bytes"],
        ["Binary (sha256)", launch["cubin_sha256"] or units.MISSING],
    ]


def _correct(checked: Artifact, shape: str, dtype: str) -> list[list[str]]:
    """Every check of the kernel counts; those of this shape and dtype give the largest error."""
    passed = sum(cell["passed"] for cell in checked["cells"])
    told = f"{passed} of {len(checked['cells'])} checks of this kernel passed"
    here = [cell for cell in checked["cells"] if (cell["shape"], cell["dtype"]) == (shape, dtype)]
    if not here:
        return [["Correctness", told]]
    worst = max(here, key=lambda cell: cell["triton"]["max_error_ratio"] or 0.0)
    error, limit = (units.error_size(worst[of]["max_error_ratio"]) for of in ("triton", "limit"))
    return [["Correctness", f"error ratio {error}, limit {limit}; {told}"]]


def _counted(roofline: Artifact) -> dict[Case, list[str]]:
    return {
        (entry["kernel"], cell["shape"], cell["dtype"]): _traffic(cell)
        for entry in roofline["counters"]
        for cell in entry["cells"]
        if cell["candidate"] == "triton"
    }


def _traffic(cell: Mapping[str, Any]) -> list[str]:
    read, write = (units.traffic(cell[f"dram_{way}_bytes"]) for way in ("read", "write"))
    shares = ", ".join(
        f"{name.replace('_', ' ')} {units.share(cell[f'{name}_ratio'])}"
        for name in ("l2_hit", "occupancy", "tensor_pipe")
    )
    factor = units.factor(cell["amplification_ratio"])
    return [f"DRAM read {read} MiB, written {write} MiB, {factor} of logical; {shares}"]


def _counts(counted: Mapping[Case, list[str]], case: Case) -> list[list[str]]:
    return [["Hardware counters", text] for text in counted.get(case, ())]
