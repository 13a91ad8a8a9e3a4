"""The table of results.md that holds fused kernels against eager PyTorch in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, of_regime, p50_text
from triton_kernel_lab.report.markdown import table

__all__ = ["DTYPE", "ROWS", "Op", "Row", "eager_ops", "section"]

DTYPE = "float32"
_SIZE = 4
_ABSENT = "not measured"


class Op(NamedTuple):
    """One operator of an eager form, and the least bytes that it reads and writes."""

    name: str
    read: int
    written: int


class Row(NamedTuple):
    """A kernel, its dimension in words, and the timed shape."""

    kernel: str
    dimension: str
    shape: str


ROWS = (
    *(Row("rms_norm", f"N={columns}", f"16384x{columns}") for columns in (512, 2048, 8192)),
    *(Row("swiglu", f"N={columns}", f"16384x{columns}") for columns in (512, 4096)),
    *(Row("flash_attention", f"N={length}", f"1x{length}x{length}x16x16x64") for length in (1024, 2048)),
)

_HEADERS = (
    *("Kernel", "Dimension", "Shape", "PyTorch eager fp32 (us)", "Fused Triton fp32 (us)", "Speedup"),
    *("Passes over HBM, eager", "fused", "fused, counted", "Status"),
)
_NOTE = (
    "p50 in the `cold_clean` regime on the same float32 inputs. A pass moves as many bytes as the output has. Passes "
    "of the fused kernel are its logical bytes; passes of eager PyTorch are those of its operators, each of which "
    "reads its inputs once and writes its result once: {ops}. That is the least they move: an operator of several "
    "kernels moves more, and what a cache holds from one operator to the next need not come from HBM. Counted passes "
    "are the DRAM bytes of one call of the fused kernel, where the hardware counted them."
)


def _rms_norm(rows: int, columns: int) -> Iterator[Op]:
    x, scale, weight = (_SIZE * elements for elements in (rows * columns, rows, columns))
    yield Op("pow", x, x)
    yield Op("mean", x, scale)
    yield Op("add", scale, scale)
    yield Op("rsqrt", scale, scale)
    yield Op("mul", x + scale, x)
    yield Op("mul", weight + x, x)


def _swiglu(rows: int, columns: int) -> Iterator[Op]:
    x = _SIZE * rows * columns
    yield Op("silu", x, x)
    yield Op("mul", 2 * x, x)


def _attention(batch: int, queries: int, keys: int, heads: int, kv_heads: int, width: int) -> Iterator[Op]:
    """One sequence with as many key heads as query heads: more of them are copied into one piece first."""
    q, k = (_SIZE * batch * heads * length * width for length in (queries, keys))
    scores = _SIZE * batch * heads * queries * keys
    mask = queries * keys  # A byte each.
    yield Op("bmm", q + k, scores)
    yield Op("div", scores, scores)
    yield Op("ones", 0, mask)
    yield Op("triu", mask, mask)
    yield Op("masked_fill", scores + mask, scores)
    yield Op("softmax", scores, scores)
    yield Op("bmm", scores + k, q)
    yield Op("cat", q, q)


_EAGER: Mapping[str, Callable[..., Iterator[Op]]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "flash_attention": _attention,
}


def eager_ops(kernel: str, shape: str) -> list[Op]:
    """The operators of a kernel's eager form in float32 at a shape of ``ROWS``, in order."""
    return list(_EAGER[kernel](*map(int, shape.split("x"))))


def section(roofline: Artifact, correctness: Mapping[str, Artifact]) -> str:
    """The table, with a row for each of ``ROWS``; empty where nothing was timed."""
    if roofline["status"] != "measured":
        return ""
    first = {row.kernel: row for row in reversed(ROWS)}
    named = [", ".join(op.name for op in eager_ops(kernel, first[kernel].shape)) for kernel in _EAGER]
    ops = "; ".join(f"`{kernel}`: {names}" for kernel, names in zip(_EAGER, named, strict=True))
    rows = [_row(roofline, correctness, row) for row in ROWS]
    return "\n\n".join(["## Eager fp32 against fused", _NOTE.format(ops=ops), table(_HEADERS, rows)])


def _row(roofline: Artifact, correctness: Mapping[str, Artifact], row: Row) -> list[str]:
    names = [row.kernel, row.dimension, row.shape]
    timed = of_regime(roofline, "cold_clean", row.kernel)
    cell = next((each for each in timed if (each["shape"], each["dtype"]) == (row.shape, DTYPE)), None)
    if cell is None:
        return [*names, _ABSENT, _ABSENT, *[units.MISSING] * 4, _ABSENT]
    moved = cell["logical_read_bytes"] + cell["logical_write_bytes"]
    eager = sum(op.read + op.written for op in eager_ops(row.kernel, row.shape))
    return [
        *names,
        *(p50_text(cell, name) for name in ("eager", "triton")),
        units.ratio(cell["speedup_over_eager"]),
        *(units.factor(size / cell["logical_write_bytes"]) for size in (eager, moved)),
        _counted(roofline, row, cell["logical_write_bytes"]),
        _status(cell, correctness[row.kernel]),
    ]


def _counted(roofline: Artifact, row: Row, output: int) -> str:
    """Passes by the DRAM bytes of one call of ours; a dash where they were not counted."""
    for kernel in roofline["counters"]:
        for cell in kernel["cells"] if kernel["kernel"] == row.kernel else ():
            if (cell["shape"], cell["dtype"], cell["candidate"]) == (row.shape, DTYPE, "triton"):
                ways = [cell["dram_read_bytes"], cell["dram_write_bytes"]]
                return units.factor(None if None in ways else sum(ways) / output)
    return units.MISSING


def _status(cell: Mapping[str, Any], checked: Artifact) -> str:
    """The verdict of the correctness stage on the same shape, unless the timing says less of ours."""
    ours = find(cell, "triton")
    if ours is None or ours["stats"] is None:
        return f"{ours['status']}: {ours['reason']}" if ours else _ABSENT
    here = [each for each in checked["cells"] if (each["shape"], each["dtype"]) == (cell["shape"], DTYPE)]
    if not here:
        return "correct beside the samples"
    error, limit = (units.error_size(here[0][of]["max_error_ratio"]) for of in ("triton", "limit"))
    return f"{'correct' if all(each['passed'] for each in here) else 'WRONG'}: error ratio {error}, limit {limit}"
