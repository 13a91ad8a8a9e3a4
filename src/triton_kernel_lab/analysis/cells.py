"""One cell (shape, dtype, regime) of the roofline: statistics, bounds, class, speedups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from triton_kernel_lab.analysis.ceilings import null_kernel_ns
from triton_kernel_lab.analysis.stats import OURS, REGIMES, rate_per_s, speedup, summarise
from triton_kernel_lab.analysis.timemodel import Bound, bound_class, measured_bound, vendor_bound
from triton_kernel_lab.artifacts import Artifact

__all__ = ["FLOOR_FACTOR", "derive_cells"]

FLOOR_FACTOR = 3
"""Under three null kernels a p50 says more of launching than of the kernel."""

_COLD = ("cold_clean", "cold_dirty")


class _Limits(NamedTuple):
    """What a cold cell is judged against; all None in a regime without ceilings, the datasheet alone of another run."""

    null_ns: int | None
    measured: Bound | None
    vendor: Bound | None

    def floor_dominated(self, ns: int) -> bool:
        return self.null_ns is not None and ns < FLOOR_FACTOR * self.null_ns

    @property
    def least_ns(self) -> int:
        """The time that no candidate beats; 0 without ceilings."""
        floors = [self.null_ns or 0, self.vendor.attainable_ns if self.vendor else 0]
        # Near the launch floor a rung of the ladder is itself known to a few per cent only,
        # so there the null kernel and the datasheet bind, not the rung.
        if self.measured and not self.floor_dominated(self.measured.attainable_ns):
            floors.append(self.measured.attainable_ns)
        return max(floors)

    def implausible(self, p50_ns: int) -> bool:
        return 102 * p50_ns < 100 * self.least_ns

    def attainable_ratio(self, p50_ns: int) -> float | None:
        if self.measured is None or self.floor_dominated(p50_ns):
            return None
        return round(self.measured.attainable_ns / p50_ns, 4)

    def classify(self, p50_ns: int | None) -> str:
        if p50_ns is not None and self.implausible(p50_ns):
            return "implausible"
        if self.measured is None or p50_ns is None:
            return "not_applicable"
        return "floor_dominated" if self.floor_dominated(p50_ns) else bound_class(self.measured, p50_ns)


def derive_cells(timing: Artifact, ceilings: Mapping[str, Any], *, same_run: bool = True) -> Iterator[dict[str, Any]]:
    """The roofline cells of a timing artifact, one for each cell and regime in it.

    Args:
        timing: a measured timing artifact.
        ceilings: what ``summarise_ceilings`` returns.
        same_run: whether the timing is of the ceilings' run; if not, only the datasheet binds it.
    """
    for cell in timing["cells"]:
        used = {run["regime"] for candidate in cell["candidates"] for run in candidate["runs"]}
        # A cell whose every candidate failed still shows up, in the primary regime.
        for regime in [name for name in REGIMES if name in used] or [REGIMES[0]]:
            yield _cell(timing["kernel"], cell, regime, ceilings, same_run)


def _cell(
    kernel: str, cell: Mapping[str, Any], regime: str, ceilings: Mapping[str, Any], same_run: bool
) -> dict[str, Any]:
    cost = cell["cost"]
    read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
    # It moves the bytes of the cell and does none of its arithmetic.
    of_anchor = _limits((ceilings, read, write, 0, cost["unit"]), regime, same_run)
    taking_part = [candidate for candidate in cell["candidates"] if _takes_part(candidate, regime)]
    summaries = [_summary(candidate, regime) for candidate in taking_part]
    anchors = [each["stats"]["p50_ns"] for each in summaries if each["role"] == "anchor" and each["stats"]]
    copied_ns = next((ns for ns in anchors if not of_anchor.implausible(ns)), None)
    limits = _limits((ceilings, read, write, cost["flop"], cost["unit"]), regime, same_run, copied_ns)
    candidates = [
        _judge(summary, of_anchor if summary["role"] == "anchor" else limits, read + write) for summary in summaries
    ]
    return {
        "kernel": kernel,
        "shape": cell["shape"],
        "dtype": cell["dtype"],
        "regime": regime,
        "logical_read_bytes": read,
        "logical_write_bytes": write,
        "flop": cost["flop"],
        "attainable_ns": limits.measured.attainable_ns if limits.measured else None,
        "vendor_ns": limits.vendor.attainable_ns if limits.vendor else None,
        "class": limits.classify(_p50_of(summaries, "triton")),
        "candidates": candidates,
        **_speedups(candidates),
    }


def _limits(
    work: tuple[Mapping[str, Any], int, int, int, str], regime: str, same_run: bool, copied_ns: int | None = None
) -> _Limits:
    """The limits of ``work``: ceilings, bytes read, bytes written, FLOP and the unit that does them."""
    if regime not in _COLD:
        return _Limits(None, None, None)
    if not same_run:
        return _Limits(None, None, vendor_bound(*work))
    return _Limits(null_kernel_ns(work[0], regime), measured_bound(*work, copied_ns), vendor_bound(*work))


def _takes_part(candidate: Mapping[str, Any], regime: str) -> bool:
    return not candidate["runs"] or any(run["regime"] == regime for run in candidate["runs"])


def _summary(candidate: Mapping[str, Any], regime: str) -> dict[str, Any]:
    status, reason, stats = candidate["status"], candidate["reason"], None
    if status == "ok" and candidate["role"] in OURS and candidate["served_by"] != "triton":
        status, reason = "invalid", f"served by {candidate['served_by']}, not by triton"
    elif status == "ok":
        status, reason, stats = summarise([run for run in candidate["runs"] if run["regime"] == regime])
    return {
        "name": candidate["name"],
        "role": candidate["role"],
        "served_by": candidate["served_by"],
        "status": status,
        "reason": reason,
        "stats": stats,
        # Older measurements do not have it.
        **({"peak_bytes": candidate["peak_bytes"]} if "peak_bytes" in candidate else {}),
    }


def _judge(summary: Mapping[str, Any], limits: _Limits, logical_bytes: int) -> dict[str, Any]:
    nothing = {"stats": None, "logical_bytes_per_s": None, "attainable_ratio": None}
    if summary["stats"] is None:
        return {**summary, **nothing}
    p50 = summary["stats"]["p50_ns"]
    if limits.implausible(p50):
        reason = f"implausible: p50 {p50} ns is under the {limits.least_ns} ns that the ceilings allow"
        return {**summary, **nothing, "status": "invalid", "reason": reason}
    rate = rate_per_s(logical_bytes, p50) or None
    return {**summary, "logical_bytes_per_s": rate, "attainable_ratio": limits.attainable_ratio(p50)}


def _p50_of(candidates: Sequence[Mapping[str, Any]], name: str) -> int | None:
    found = next((candidate for candidate in candidates if candidate["name"] == name), None)
    return found["stats"]["p50_ns"] if found and found["stats"] else None


def _speedups(candidates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ours = _p50_of(candidates, "triton")
    rivals = [c["name"] for c in candidates if c["role"] == "baseline" and c["stats"]]
    best = min(rivals, key=lambda name: _p50_of(candidates, name) or 0, default=None)
    return {
        "speedup_over_torch_compile": speedup(_p50_of(candidates, "torch_compile"), ours),
        "speedup_over_eager": speedup(_p50_of(candidates, "eager"), ours),
        "best_baseline": best,
        "speedup_over_best": speedup(_p50_of(candidates, best), ours) if best else None,
    }
