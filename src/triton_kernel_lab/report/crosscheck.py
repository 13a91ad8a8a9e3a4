"""The section of results.md on the cross-check with NVBench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table

__all__ = ["section"]

_HEADERS = (
    *("Kernel", "Shape", "Dtype", "cold_clean p50 (us)", "cold_dirty p50 (us)", "NVBench cold median (us)"),
    *("NVBench / clean", "NVBench / dirty"),
)


def section(crosscheck: Artifact | None) -> str:
    """Our p50s of Triton beside NVBench's median on the same callables; empty where none was made."""
    if crosscheck is None:
        return ""
    if crosscheck["status"] != "measured":
        return f"## Cross-check with NVBench\n\nNot measured ({crosscheck['status']}): {crosscheck['reason']}."
    protocol = crosscheck["protocol"]
    note = (
        f"The Triton candidate of each cell in one more session, {protocol['samples']} samples by our windows and by "
        f"NVBench {protocol['nvbench_version']} each. NVBench flushes by a memset of one L2 and so leaves dirty lines."
    )
    rows = [_row(cell) for cell in crosscheck["cells"]]
    return "\n\n".join(["## Cross-check with NVBench", note, table(_HEADERS, rows)])


def _row(cell: Mapping[str, Any]) -> list[str]:
    return [
        *(cell["kernel"], cell["shape"], cell["dtype"]),
        *(units.microseconds(cell[f"{name}_p50_ns"]) for name in ("cold_clean", "cold_dirty", "nvbench")),
        *(units.factor(cell[f"nvbench_over_{regime}_ratio"]) for regime in ("cold_clean", "cold_dirty")),
    ]
