"""One row a candidate of a cell, in integers and base units: what CSV and Parquet hold."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.export.source import Source

__all__ = ["COLUMNS", "as_csv", "rows", "write_parquet"]

_STATS = (
    *("samples", "flagged", "processes", "min_ns", "p10_ns", "p50_ns", "p90_ns", "p95_ns", "p99_ns", "max_ns"),
    "tmean_ns",
)
_CELL = ("kernel", "shape", "dtype", "regime")
_CANDIDATE = ("name", "role", "served_by", "status", "reason")
_WORK = ("logical_read_bytes", "logical_write_bytes", "flop", "attainable_ns", "vendor_ns", "class")
_DERIVED = ("logical_bytes_per_s", "attainable_ratio")

COLUMNS = ("runner", "device", *_CELL, *_CANDIDATE, *_STATS, *_WORK, *_DERIVED, "git_commit", "torch", "triton")
"""Units stand in the names; a figure that does not exist is empty, never 0."""


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Every candidate of every cell, those without a figure with their reason."""
    for cell in source.roofline["cells"]:
        for candidate in cell["candidates"]:
            stats = candidate["stats"] or {}
            yield {
                "runner": source.roofline["runner"],
                "device": source.device,
                **{name: cell[name] for name in (*_CELL, *_WORK)},
                **{name: candidate[name] for name in (*_CANDIDATE, *_DERIVED)},
                **{name: stats.get(name) for name in _STATS},
                "git_commit": source.commit(cell["kernel"]),
                **_stack(source.environment),
            }


def _stack(environment: Artifact) -> Mapping[str, Any]:
    return {name: environment["software"][name] for name in ("torch", "triton")}


def as_csv(source: Source) -> str:
    """RFC 4180 with LF, a header, and nothing for what is missing."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(source))
    return stream.getvalue()


def write_parquet(source: Source, path: str) -> None:
    """The same rows as columns of their own types.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    fractions = {"tmean_ns", "attainable_ratio"}
    whole = {*_STATS, *_WORK, *_DERIVED} - fractions - {"class"}
    kinds = {
        name: pa.int64() if name in whole else pa.float64() if name in fractions else pa.string() for name in COLUMNS
    }
    parquet.write_table(pa.Table.from_pylist(list(rows(source)), schema=pa.schema(list(kinds.items()))), path)
