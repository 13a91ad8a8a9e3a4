"""The measured ceilings of a run, reduced from raw samples to medians and rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.stats import percentile, rate_per_s
from triton_kernel_lab.analysis.vendor import vendor_spec
from triton_kernel_lab.artifacts import Artifact

__all__ = ["CeilingsError", "empty_window_ns", "null_kernel_ns", "summarise_ceilings"]

_MEND = "run `dvc repro ceilings`."


class CeilingsError(ValueError):
    """A ceiling that the time model needs was not measured; one sentence says which."""


def summarise_ceilings(environment: Artifact, ceilings: Artifact) -> dict[str, Any]:
    """The ``ceilings`` object of a roofline artifact: p50 in ns, rates a second.

    Raises:
        CeilingsError: when a ladder, the null kernel or the timer's quantum is missing.
    """
    device = environment["device"]
    summary = {
        "timer_quantum_ns": ceilings["timer_quantum_ns"],
        "floors": [{"name": floor["name"], "p50_ns": _p50(floor["samples_ns"])} for floor in ceilings["floors"]],
        "ladders": [_rung(rung) for rung in ceilings["ladders"]],
        "matmul": [_matmul(entry) for entry in ceilings["matmul"]],
        "dirty_flush": [_flush(entry) for entry in ceilings["dirty_flush"]],
        "vendor_spec": vendor_spec(device["name"]) if device else None,
    }
    _require_complete(summary)
    return summary


def null_kernel_ns(summary: Mapping[str, Any], regime: str) -> int:
    """The p50 of an empty kernel in a cold regime, the clean one where no other was measured."""
    floors = {floor["name"]: floor["p50_ns"] for floor in summary["floors"]}
    return int(floors.get(regime.replace("cold", "null_kernel"), floors["null_kernel_clean"]))


def empty_window_ns(ceilings: Artifact) -> int | None:
    """The p50 between two events with nothing between them, None where it was not measured: a host's own constant."""
    found = [floor for floor in ceilings["floors"] if floor["name"] == "empty_event"]
    return _p50(found[0]["samples_ns"]) if found else None


def _p50(samples: Sequence[int]) -> int:
    return percentile(sorted(samples), 50)


def _rung(rung: Mapping[str, Any]) -> dict[str, Any]:
    p50 = _p50(rung["samples_ns"])
    rate = rate_per_s(rung["bytes"], p50)
    return {"kind": rung["kind"], "bytes": rung["bytes"], "p50_ns": p50, "bytes_per_s": rate}


def _matmul(entry: Mapping[str, Any]) -> dict[str, Any]:
    p50 = _p50(entry["samples_ns"])
    return {"dtype": entry["dtype"], "p50_ns": p50, "flop_per_s": rate_per_s(entry["flop"], p50)}


def _flush(entry: Mapping[str, Any]) -> dict[str, Any]:
    states = {f"{state}_p50_ns": _p50(entry[f"{state}_samples_ns"]) for state in ("clean", "dirty", "warm")}
    return {"bytes": entry["bytes"], **states}


def _require_complete(summary: Mapping[str, Any]) -> None:
    if missing := {"copy", "read", "write"} - {rung["kind"] for rung in summary["ladders"]}:
        raise CeilingsError(f"ceilings: $.ladders: expected a {min(missing)} ladder, found none; {_MEND}")
    if all(floor["name"] != "null_kernel_clean" for floor in summary["floors"]):
        raise CeilingsError(f"ceilings: $.floors: expected null_kernel_clean, found none; {_MEND}")
    if summary["timer_quantum_ns"] is None:
        raise CeilingsError(f"ceilings: $.timer_quantum_ns: expected a measured quantum, found null; {_MEND}")
