"""The section of results.md on the device memory that attention needs, beside its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, label, of_regime, p50_text
from triton_kernel_lab.report.markdown import table

__all__ = ["KERNEL", "by_length", "peak", "section"]

KERNEL = "flash_attention"

Sizes = tuple[str, str, str, str, str]

_TITLE = "## Peak memory of attention"
_HEADERS = ("B x N x N x Hq x Hkv x D", "Dtype", "Candidate", "p50 (us)", "Peak memory (MiB)", "Against eager")
_NOTE = (
    "Peak memory is the most that one call holds beyond what was allocated before it, its output included, by "
    "PyTorch's allocator, in a call that is not timed. Eager attention holds the scores of N queries and N keys and so "
    "needs memory by the square of N; beyond 2^31 scores it works on some of the heads at a time, which bounds it."
)


def by_length(roofline: Artifact) -> dict[Sizes, dict[int, Mapping[str, Any]]]:
    """Cells that tell their peak memory by batch, heads, width and dtype, then by N queries and as many keys."""
    found: dict[Sizes, dict[int, Mapping[str, Any]]] = {}
    for cell in of_regime(roofline, "cold_clean", KERNEL):
        sizes = cell["shape"].split("x")
        if len(sizes) == 6 and sizes[1] == sizes[2] and peak(cell, "triton") is not None:
            batch, length, _, *others = sizes
            found.setdefault((batch, *others, cell["dtype"]), {})[int(length)] = cell
    return {sizes: dict(sorted(cells.items())) for sizes, cells in found.items()}


def peak(cell: Mapping[str, Any], name: str | None) -> int | None:
    """The peak memory of a candidate's call in bytes; None where it was not measured."""
    found = (find(cell, name) or {}).get("peak_bytes")
    return None if found is None else int(found)


def section(roofline: Artifact) -> str:
    """A row for each candidate of each cell; empty where attention is not timed."""
    if not of_regime(roofline, "cold_clean", KERNEL):
        return ""
    rows = [row for cells in by_length(roofline).values() for cell in cells.values() for row in _rows(cell)]
    if not rows:
        return f"{_TITLE}\n\nNot measured: the timing of `{KERNEL}` says nothing of memory."
    return "\n\n".join([_TITLE, _NOTE, table(_HEADERS, rows)])


def _rows(cell: Mapping[str, Any]) -> Iterator[list[str]]:
    eager = peak(cell, "eager")
    for candidate in cell["candidates"]:
        if candidate["role"] != "anchor":
            name = candidate["name"]
            size = peak(cell, name)
            against = 100 * (size / eager - 1) if size is not None and eager and name != "eager" else None
            yield [
                *(cell["shape"], cell["dtype"], label(name), p50_text(cell, name)),
                *(units.traffic(size), units.signed_percent(against)),
            ]
