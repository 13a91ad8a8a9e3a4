"""The section of results.md on the cross-check with NVBench, and what METHODOLOGY says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.crosscheck import SMALL_NS, WITHIN_PERCENT, agreement
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table

__all__ = ["section", "sentence"]

_TITLE = "## Cross-check with NVBench"
_MAKE = "`triton-kernel-lab crosscheck`"
_HEADERS = (
    *("Kernel", "Shape", "Dtype", "cold_clean p50 (us)", "cold_dirty p50 (us)", "NVBench cold median (us)"),
    *("NVBench / clean", "NVBench / dirty"),
)


def section(crosscheck: Artifact | None, checked: Mapping[str, Artifact], stale: Collection[str] = ()) -> str:
    """Our p50s of Triton beside NVBench's median on the same callables; empty where none was made.

    Args:
        crosscheck: the artifact of the runner, if there is one.
        checked: the correctness artifact of each kernel of the registry.
        stale: the stages whose sources have changed since they ran, as DVC names them.
    """
    if crosscheck is None:
        return ""
    if crosscheck["status"] != "measured":
        return f"{_TITLE}\n\n{_unmeasured(crosscheck)}"
    protocol, commit = crosscheck["protocol"], crosscheck["producer"]["git_commit"]
    note = (
        f"The Triton candidate of each cell in one more session{f', at commit `{commit}`' if commit else ''}: "
        f"{protocol['samples']} samples by our windows and by NVBench {protocol['nvbench_version']} each. NVBench "
        f"flushes by a memset of one L2 and so leaves dirty lines.{_stale(crosscheck, checked, stale)}"
    )
    cells = _published(crosscheck, checked)
    parts = [_TITLE, note, _agreement(cells), _left_out(crosscheck, checked)]
    parts += [table(_HEADERS, [_row(cell) for cell in cells])] if cells else []
    return "\n\n".join(filter(None, parts))


def sentence(crosscheck: Artifact | None, kernels: Collection[str]) -> str:
    """How far NVBench and ``cold_dirty`` agree over the cells of some kernels, or why nobody knows."""
    if crosscheck is None:
        return f"Not measured yet: {_MAKE} measures it on this runner."
    if crosscheck["status"] != "measured":
        return _unmeasured(crosscheck)
    return " ".join(filter(None, [_agreement(_published(crosscheck, kernels)), _left_out(crosscheck, kernels)]))


def _unmeasured(crosscheck: Artifact) -> str:
    return f"Not measured ({crosscheck['status']}): {crosscheck['reason']}."


def _published(crosscheck: Artifact, kernels: Collection[str]) -> list[Mapping[str, Any]]:
    """The cells of kernels that a report has; what waits for a measurement was timed as it was then."""
    return [cell for cell in crosscheck["cells"] if cell["kernel"] in kernels]


def _left_out(crosscheck: Artifact, kernels: Collection[str]) -> str:
    found = Counter(cell["kernel"] for cell in crosscheck["cells"] if cell["kernel"] not in kernels)
    names = ", ".join(f"`{kernel}` ({_cells(count)})" for kernel, count in found.items())
    return f"Left out, because the registry does not publish them: {names}." if found else ""


def _stale(crosscheck: Artifact, checked: Mapping[str, Artifact], stale: Collection[str]) -> str:
    """Which kernels have other sources by now; nothing where the cross-check did not record them."""
    recorded = crosscheck.get("kernel_sources_sha256", {})
    changed = [
        kernel
        for kernel, artifact in checked.items()
        # A check that is stale itself no longer tells what the sources are, only that they have changed.
        if kernel in recorded
        and (recorded[kernel] != artifact["producer"]["source_sha256"] or f"correctness@{kernel}" in stale)
    ]
    if not changed:
        return ""
    names = ", ".join(f"`{kernel}`" for kernel in changed)
    return f" **Stale:** the sources of {names} have changed since; {_MAKE} on this GPU measures them again."


def _agreement(cells: Sequence[Mapping[str, Any]]) -> str:
    """Shares where a time is long enough to have one, and the difference itself where it is not."""
    found = agreement(cells)
    large, parts = len(found.close) + len(found.far), []
    size = f"{units.plain(SMALL_NS // 1000)} us"
    if large:
        parts.append(
            f"In {len(found.close)} of {_cells(large)} that take {size} or more in `cold_dirty`, NVBench's median "
            f"lies within {WITHIN_PERCENT} % of our p50 there{_far(found.far)}."
        )
    if found.offsets_ns:
        parts.append(f"Below {size}, in {_cells(len(found.offsets_ns))}, NVBench reads {_span(found.offsets_ns)}.")
    if found.untimed:
        parts.append(f"Not counted: {_cells(found.untimed)} without a sound time on one side or both.")
    return " ".join(parts) or "No cell of a published kernel was timed by both."


def _far(cells: Sequence[Mapping[str, Any]]) -> str:
    named = (
        f"`{cell['kernel']}` {cell['shape']} {cell['dtype']} ({units.factor(cell['nvbench_over_cold_dirty_ratio'])})"
        for cell in cells
    )
    return f"; not in {', '.join(named)}" if cells else ""


def _span(offsets_ns: Sequence[int]) -> str:
    least, most = min(offsets_ns), max(offsets_ns)
    return _offset(least) if least == most else f"from {_offset(least)} to {_offset(most)}"


def _offset(ns: int) -> str:
    return f"{abs(ns)} ns {'less' if ns < 0 else 'more'}"


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _row(cell: Mapping[str, Any]) -> list[str]:
    return [
        *(cell["kernel"], cell["shape"], cell["dtype"]),
        *(units.microseconds(cell[f"{name}_p50_ns"]) for name in ("cold_clean", "cold_dirty", "nvbench")),
        *(units.factor(cell[f"nvbench_over_{regime}_ratio"]) for regime in ("cold_clean", "cold_dirty")),
    ]
