"""Results in the shape that Conbench takes, one a candidate and cell.

A measurement's repetitions are its processes: ``stats.data`` holds the mean of the
lower 95 % of each, in seconds. What Conbench wants of a machine and no
artifact records is left out, so that the runner goes by ``cluster_info``.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.stats import tmean
from triton_kernel_lab.export.source import Source, Timed, timed

__all__ = ["render"]


def render(source: Source) -> list[dict[str, Any]]:
    """A list of results, as its clients post them one by one."""
    run = hashlib.sha256(artifacts.dumps(source.roofline).encode()).hexdigest()[:32]
    return [_result(source, run, each) for each in timed(source)]


def _result(source: Source, run: str, each: Timed) -> dict[str, Any]:
    cell, kernel = each.cell, each.cell["kernel"]
    commit = source.commit(kernel)
    return {
        "run_id": run,
        "run_name": f"{source.roofline['runner']}: {commit or 'unknown commit'}",
        "run_reason": "commit",
        "batch_id": f"{run}-{kernel}",
        **_moment(source, kernel),
        "tags": {
            "name": kernel,
            **{name: cell[name] for name in ("shape", "dtype", "regime")},
            "candidate": each.candidate["name"],
        },
        "context": {"benchmark_language": "Python", "served_by": each.candidate["served_by"]},
        "info": {name: value for name, value in source.environment["software"].items() if value is not None},
        "optional_benchmark_info": {"class": cell["class"], "git_commit": commit},
        "cluster_info": _cluster(source),
        "stats": _stats(each),
    }


def _moment(source: Source, kernel: str) -> dict[str, str]:
    """When the samples were committed; artifacts themselves know no time."""
    at = source.committed.get(kernel)
    if at is None:
        return {}
    return {"timestamp": datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def _cluster(source: Source) -> dict[str, Any]:
    device: Mapping[str, Any] = source.environment["device"] or {}
    known = {name: str(value) for name, value in device.items() if value is not None}
    return {"name": source.roofline["runner"], "info": known, "optional_info": {}}


def _stats(each: Timed) -> dict[str, Any]:
    data = [round(tmean(ordered) / 1e9, 12) for ordered in each.processes]
    return {"data": data, "unit": "s", "times": [], "time_unit": "s", "iterations": len(data)}
