"""What the hardware counted beside what the case asks for: traffic, and how much of it was needless."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact

__all__ = ["CountedError", "counted"]

_RATIOS = ("l2_hit_ratio", "occupancy_ratio", "tensor_pipe_ratio")


class CountedError(ValueError):
    """Counters and timing are not of the same cells; one sentence says which."""


def counted(counters: Artifact, timing: Artifact) -> dict[str, Any]:
    """A kernel's entry under ``counters`` of a roofline artifact.

    Args:
        counters, timing: artifacts of one kernel; the timing has the logical bytes.

    Raises:
        CountedError: a cell was counted that is not timed.
    """
    costs = {(cell["shape"], cell["dtype"]): cell["cost"] for cell in timing["cells"]}
    return {
        "kernel": counters["kernel"],
        "counter_status": counters["counter_status"],
        "reason": counters["reason"],
        "cells": list(_cells(counters, costs)),
    }


def _cells(counters: Artifact, costs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for cell in counters["cells"]:
        cost = costs.get((cell["shape"], cell["dtype"]))
        if cost is None:
            kernel = counters["kernel"]
            raise CountedError(
                f"counters of {kernel}: expected cells that are timed, found {cell['shape']} {cell['dtype']}; "
                f"run `dvc repro counters@{kernel}`."
            )
        read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
        for candidate in cell["candidates"]:
            yield {
                "shape": cell["shape"],
                "dtype": cell["dtype"],
                "candidate": candidate["name"],
                **_of_launches(candidate["launches"], read, write),
            }


def _of_launches(launches: Sequence[Mapping[str, Any]], read: int, write: int) -> dict[str, Any]:
    counted_read, counted_write = (_total(launches, f"dram_{way}_bytes") for way in ("read", "write"))
    known = None not in (counted_read, counted_write)
    passes = [launch["passes"] for launch in launches]
    only = launches[0] if len(launches) == 1 else {}
    return {
        "launches": len(launches),
        "passes": None if None in passes else max(passes),
        "logical_read_bytes": read,
        "logical_write_bytes": write,
        "dram_read_bytes": counted_read,
        "dram_write_bytes": counted_write,
        "read_amplification_ratio": _ratio(counted_read, read),
        "amplification_ratio": _ratio((counted_read or 0) + (counted_write or 0) if known else None, read + write),
        # Shares of several launches do not add up to one of the call.
        **{name: only.get(name) for name in _RATIOS},
    }


def _total(launches: Sequence[Mapping[str, Any]], name: str) -> int | None:
    values = [launch[name] for launch in launches]
    return None if None in values else sum(values)


def _ratio(found: int | None, logical: int) -> float | None:
    return None if found is None or not logical else round(found / logical, 4)
