"""Which cells stand for a kernel: those of one dtype, and of these the smallest and the largest.

And what all cells of selected attention say of its pages, in a generated sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from triton_kernel_lab.analysis.stats import speedup
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import of_regime, p50_ns

__all__ = ["Extreme", "dtype_of", "extremes", "kernels", "of_kernel", "paged"]

PREFERRED = "float16"
_PAGED = "selected_attention"


class Extreme(NamedTuple):
    """The smallest or the largest case of a kernel by logical bytes, with its cell in each regime."""

    kernel: str
    shape: str
    dtype: str
    cells: Mapping[str, Mapping[str, Any]]


def kernels(roofline: Artifact) -> list[str]:
    """The kernels with cells, in the registry's order."""
    return list(dict.fromkeys(cell["kernel"] for cell in roofline["cells"]))


def dtype_of(roofline: Artifact, kernel: str) -> str:
    """float16 where a kernel has it, else its first dtype."""
    found = dict.fromkeys(cell["dtype"] for cell in roofline["cells"] if cell["kernel"] == kernel)
    return PREFERRED if PREFERRED in found else next(iter(found))


def of_kernel(roofline: Artifact, kernel: str, regime: str = "cold_clean") -> list[Mapping[str, Any]]:
    """A kernel's cells of a regime, in its one dtype."""
    dtype = dtype_of(roofline, kernel)
    return [cell for cell in of_regime(roofline, regime, kernel) if cell["dtype"] == dtype]


def extremes(roofline: Artifact) -> list[Extreme]:
    """The smallest and the largest case of each kernel, or its only one; kernels in the registry's order."""
    return [_extreme(roofline, cell) for kernel in kernels(roofline) for cell in _ends(of_kernel(roofline, kernel))]


def paged(roofline: Artifact) -> list[str]:
    """One sentence on the time that selected attention takes from pages; none where that was not timed."""
    cells = of_regime(roofline, "cold_clean", _PAGED)
    found = [speedup(p50_ns(cell, "paged"), p50_ns(cell, "triton")) for cell in cells]
    ratios = [ratio for ratio in found if ratio is not None]
    if not ratios:
        return []
    least, most = units.ratio(min(ratios)), units.ratio(max(ratios))
    return [f"`{_PAGED}`, straight from pages of 16: {least} to {most} the time from a contiguous cache."]


def _ends(found: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    ordered = sorted(found, key=lambda cell: int(cell["logical_read_bytes"] + cell["logical_write_bytes"]))
    return [*ordered[:1], *ordered[1:][-1:]]


def _extreme(roofline: Artifact, cell: Mapping[str, Any]) -> Extreme:
    name = (cell["kernel"], cell["shape"], cell["dtype"])
    same = [each for each in roofline["cells"] if (each["kernel"], each["shape"], each["dtype"]) == name]
    return Extreme(*name, {each["regime"]: each for each in same})
