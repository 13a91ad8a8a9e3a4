"""points.csv: one row a cell with its three times, for `dvc plots` and any spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, p50_ns
from triton_kernel_lab.report.summary import TIMES

__all__ = ["COLUMNS", "render"]

COLUMNS = (
    *("cell", "kernel", "shape", "dtype", "device_us", "graph_us", "call_us"),
    *("device_speedup", "graph_speedup", "call_speedup", "logical_mib", "logical_gb_per_s", "attainable_percent"),
)


def render(roofline: Artifact) -> str:
    """The whole file: times and speedups over torch.compile of Triton; a figure that does not exist is empty. Pure."""
    by_case: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
    for cell in roofline["cells"]:
        by_case.setdefault((cell["kernel"], cell["shape"], cell["dtype"]), {})[cell["regime"]] = cell
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([" ".join(case), *case, *_figures(cells)] for case, cells in by_case.items())
    return stream.getvalue()


def _figures(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = [cells.get(regime) for regime in TIMES.values()]
    cold = found[0]
    ours: Mapping[str, Any] = (find(cold, "triton") or {}) if cold else {}
    size = cold["logical_read_bytes"] + cold["logical_write_bytes"] if cold else None
    shown = [
        *(units.microseconds(p50_ns(cell, "triton")) if cell else units.MISSING for cell in found),
        *(units.ratio(cell["speedup_over_torch_compile"]) if cell else units.MISSING for cell in found),
        units.mebibytes(size or None),
        units.gigabytes_per_s(ours.get("logical_bytes_per_s")),
        units.percent(ours.get("attainable_ratio")),
    ]
    # Numbers alone: a column of one unit each, named in its head.
    return ["" if text == units.MISSING else text.rstrip("x %") for text in shown]
