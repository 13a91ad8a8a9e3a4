"""The least time that a cell can take, from ceilings measured in the same run.

    attainable = max(flop / F, t_mix(read, write))

``t_mix`` reads the measured ladders (write, copy, read) at the size and the
read share of the cell, so that a 5 us kernel is judged against what 5 us can
do. The arithmetic is rational: exact, and the same on every CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = ["Bound", "bound_class", "flop_rate", "ladder_ns", "measured_bound", "mix_ns", "vendor_bound"]

_MIX = ("write", "copy", "read")
_RIDGE = Fraction(9, 10)


class Bound(NamedTuple):
    """The two terms of the model, in ns; the larger one is attainable."""

    memory_ns: Fraction
    compute_ns: Fraction

    @property
    def attainable_ns(self) -> int:
        """The least time in whole ns, rounded half up and at least 1."""
        return max(1, math.floor(max(self) + Fraction(1, 2)))


def ladder_ns(points: Sequence[tuple[int, int | Fraction]], size: int) -> Fraction:
    """The time of ``size`` bytes on one ladder, in ns.

    Linear between two rungs, which is exact for a launch cost plus a constant
    rate; a line between logarithms would lie up to 1.5 % above such a device
    at rungs a factor of two apart, and call an honest kernel implausible.

    Args:
        points: ``(bytes, p50_ns)``, ascending in bytes.
        size: bytes read plus bytes written.

    Returns:
        Below the smallest rung its time; above the largest in proportion.
    """
    (first, first_ns), (last, last_ns) = points[0], points[-1]
    if size <= first:
        return Fraction(first_ns)
    if size >= last:
        return Fraction(last_ns * size, last)
    upper = next(i for i, (rung, _) in enumerate(points) if rung >= size)
    (low, low_ns), (high, high_ns) = points[upper - 1], points[upper]
    return low_ns + Fraction((high_ns - low_ns) * (size - low), high - low)


def mix_ns(ladders: Sequence[Mapping[str, Any]], read: int, write: int, copied_ns: int | None = None) -> Fraction:
    """The time of a read/write mix: linear in the read share between two ladders.

    The share is 0 on the write ladder, 1/2 on the copy and 1 on the read one.
    Traffic of one direction never has the bus turn round, so it is held to be no
    slower than a copy of as many bytes, whatever its ladder's kernel made of it.
    ``copied_ns`` is what a copy of just these bytes took: a rung at their own size.
    """
    total = read + write
    write_ns, copy_ns, read_ns = (ladder_ns(_rungs(ladders, kind), total) for kind in _MIX)
    copy_ns = copy_ns if copied_ns is None else min(copy_ns, Fraction(copied_ns))
    write_ns, read_ns = min(write_ns, copy_ns), min(read_ns, copy_ns)
    position = Fraction(2 * read, total) if total else Fraction(1)
    if position <= 1:
        return write_ns + (copy_ns - write_ns) * position
    return copy_ns + (read_ns - copy_ns) * (position - 1)


def _rungs(ladders: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[int, Fraction]]:
    """A ladder's rungs, none slower than the same bytes in several launches of a smaller one."""
    rungs: list[tuple[int, Fraction]] = []
    for size, ns in sorted((rung["bytes"], rung["p50_ns"]) for rung in ladders if rung["kind"] == kind):
        repeated = [math.ceil(Fraction(size, smaller)) * of_smaller for smaller, of_smaller in rungs]
        rungs.append((size, min([Fraction(ns), *repeated])))
    return rungs


def flop_rate(ceilings: Mapping[str, Any], unit: str) -> int | None:
    """FLOP/s of a unit: the best measured matmul, else the datasheet, else None."""
    measured: list[int] = [entry["flop_per_s"] for entry in ceilings["matmul"] if entry["dtype"] == unit]
    if measured:
        return max(measured)
    vendor: Mapping[str, int] = ceilings["vendor_spec"]["flop_per_s"] if ceilings["vendor_spec"] else {}
    return vendor.get(unit)


def measured_bound(
    ceilings: Mapping[str, Any], read: int, write: int, flop: int, unit: str, copied_ns: int | None = None
) -> Bound:
    """The model with the ceilings of the same run; ``copied_ns`` as in ``mix_ns``."""
    memory = mix_ns(ceilings["ladders"], read, write, copied_ns)
    return Bound(memory, _over_rate(flop, flop_rate(ceilings, unit)))


def vendor_bound(ceilings: Mapping[str, Any], read: int, write: int, flop: int, unit: str) -> Bound | None:
    """The model with the datasheet's ceilings; None for a GPU without one."""
    spec = ceilings["vendor_spec"]
    if spec is None:
        return None
    memory = _over_rate(read + write, spec["memory_bytes_per_s"])
    return Bound(memory, _over_rate(flop, spec["flop_per_s"].get(unit)))


def _over_rate(amount: int, per_s: int | None) -> Fraction:
    # An unknown rate leaves the other term alone: still a lower bound.
    return Fraction(amount * 1_000_000_000, per_s) if per_s else Fraction(0)


def bound_class(bound: Bound, p50_ns: int) -> str:
    """What limits a cell that is well above the launch floor."""
    if 2 * bound.attainable_ns < p50_ns:
        return "latency_limited"
    if min(bound) >= _RIDGE * max(bound):
        return "ridge"
    return "memory_bound" if bound.memory_ns > bound.compute_ns else "compute_bound"
