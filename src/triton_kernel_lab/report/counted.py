"""The section of results.md on counted bytes: DRAM traffic beside the logical bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import label
from triton_kernel_lab.report.markdown import table

__all__ = ["section"]

_HEADERS = (
    *("Kernel", "Shape", "Dtype", "Candidate", "Launches", "Logical read (MiB)", "DRAM read (MiB)", "Read ratio"),
    *("Logical written (MiB)", "DRAM written (MiB)", "Amplification", "L2 hit rate", "Occupancy", "Tensor pipe"),
)
_NOTE = (
    "Counted by Nsight Compute in a run of its own: one cold call of each cell, after the sweep of `cold_clean`. "
    "Amplification is counted over logical bytes. Written bytes that still lie in the L2 when the kernel ends are not "
    "counted, so a ratio below 1 is no error. L2 hit rates take several passes, and the profiler empties the caches "
    "ahead of each. Packed 16-bit arithmetic runs on the tensor pipe, too: a few per cent there need no matrix product."
)


def section(counters: Sequence[Mapping[str, Any]]) -> str:
    """The table of what was counted, and a sentence for what was not; empty where nothing is known of counters."""
    if not counters:
        return ""
    rows = [_row(kernel["kernel"], cell) for kernel in counters for cell in kernel["cells"]]
    parts = ["## Counted bytes"]
    if rows:
        parts += [_NOTE, table(_HEADERS, rows)]
    return "\n\n".join([*parts, *_uncounted(counters)])


def _row(kernel: str, cell: Mapping[str, Any]) -> list[str]:
    return [
        *(kernel, cell["shape"], cell["dtype"], label(cell["candidate"]), str(cell["launches"])),
        units.traffic(cell["logical_read_bytes"]),
        units.traffic(cell["dram_read_bytes"]),
        units.factor(cell["read_amplification_ratio"]),
        units.traffic(cell["logical_write_bytes"]),
        units.traffic(cell["dram_write_bytes"]),
        units.factor(cell["amplification_ratio"]),
        *(units.share(cell[f"{name}_ratio"]) for name in ("l2_hit", "occupancy", "tensor_pipe")),
    ]


def _uncounted(counters: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence for each status and reason, with the kernels that have it."""
    kernels: dict[tuple[str, str], list[str]] = {}
    for entry in counters:
        if entry["counter_status"] != "ok":
            why = (entry["counter_status"], entry["reason"] or "no reason given")
            kernels.setdefault(why, []).append(f"`{entry['kernel']}`")
    return [f"Not counted ({status}): {', '.join(names)}: {reason}." for (status, reason), names in kernels.items()]
