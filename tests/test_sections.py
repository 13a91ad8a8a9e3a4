"""The tables and sentences of results.md that are made of particular cells."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.cases import flash_attention, rms_norm, swiglu
from triton_kernel_lab.report import crossover, fused, memory, units

Cell = dict[str, Any]


def candidate(name: str, p50_ns: int | None, role: str = "baseline", **facts: Any) -> Cell:
    found = None if p50_ns is None else {"p50_ns": p50_ns}
    status, reason = ("ok", None) if found else ("failed", "wrong result")
    return {"name": name, "role": role, "status": status, "reason": reason, "stats": found, **facts}


def cell(kernel: str, shape: str, dtype: str, candidates: Sequence[Cell], **facts: Any) -> Cell:
    names = {"kernel": kernel, "shape": shape, "dtype": dtype, "regime": "cold_clean"}
    return {**names, "candidates": list(candidates), **facts}


def roofline(*cells: Cell, counters: Sequence[Mapping[str, Any]] = ()) -> Artifact:
    return {"status": "measured", "reason": None, "cells": list(cells), "counters": list(counters)}


def rows(text: str) -> list[dict[str, str]]:
    """The rows of the one table in a text, by column."""
    lines = [[each.strip() for each in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


# Memory


def attention(length: int, dtype: str = "bfloat16", keys: int | None = None) -> Cell:
    """One cell in which eager holds a score a pair and everybody else only the output."""
    return cell(
        "flash_attention",
        f"1x{length}x{keys or length}x32x32x128",
        dtype,
        [
            candidate("triton", length * 10, "triton", peak_bytes=length << 13),
            candidate("eager", length * 90, peak_bytes=length**2 << 7),
            candidate("SDPA flash", length * 12, peak_bytes=(length << 13) + 4),
            candidate("flash-attn", None, peak_bytes=None),
            candidate("copy", length, "anchor", peak_bytes=0),
        ],
    )


def test_memory_stands_beside_time_by_length() -> None:
    """Each candidate of each length has its time, its peak and how far that is from eager's, short lengths first."""
    found = rows(memory.section(roofline(attention(2048), attention(1024))))
    ours = [row for row in found if row["Candidate"] == "Triton"]
    assert [row["B x N x N x Hq x Hkv x D"] for row in ours] == ["1x1024x1024x32x32x128", "1x2048x2048x32x32x128"]
    assert [row["p50 (us)"] for row in ours] == ["10.240", "20.480"]
    assert [row["Peak memory (MiB)"] for row in ours] == ["8.00", "16.00"]
    assert [row["Against eager"] for row in ours] == ["-93.75 %", "-96.88 %"]
    eager = next(row for row in found if row["Candidate"] == "PyTorch eager")
    assert (eager["Peak memory (MiB)"], eager["Against eager"]) == ("128.00", units.MISSING)
    missing = next(row for row in found if row["Candidate"] == "flash-attn")
    assert [*missing.values()][3:] == ["failed", units.MISSING, units.MISSING]
    assert "copy" not in {row["Candidate"] for row in found}


def test_the_note_on_eager_is_what_its_code_does() -> None:
    """From so many scores on, as the note says, eager attention works on some of the heads at a time."""
    said = memory.section(roofline(attention(1024)))
    assert f"beyond 2^{flash_attention._SCORES.bit_length() - 1} scores it works on some of the heads" in said


def test_memory_compares_as_many_queries_as_keys() -> None:
    """A cell of other lengths, or of another number of axes, has no place on the line over N."""
    odd = attention(1024, keys=2048)
    short = {**attention(1024), "shape": "128x1024"}
    assert [*memory.by_length(roofline(odd, short, attention(512))).values()] == [{512: attention(512)}]


def test_without_a_measured_peak_the_section_says_so() -> None:
    """Artifacts from before memory was measured give a sentence; a project without attention gives nothing."""
    old = attention(1024)
    for each in old["candidates"]:
        del each["peak_bytes"]
    text = memory.section(roofline(old))
    assert text.endswith("Not measured: the timing of `flash_attention` says nothing of memory.")
    assert memory.section(roofline()) == ""


# Fused against eager


class Traffic(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it.
    """Records name and bytes of each operator that is no view: inputs read once, results written once."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[fused.Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = (self._tensors(each) for each in ((args, kwargs), out))
        if not {self._place(each) for each in read} & {self._place(each) for each in written}:
            sizes = (sum(each.numel() * each.element_size() for each in tensors) for tensors in (read, written))
            self.ops.append(fused.Op(func.__name__.partition(".")[0].lstrip("_"), *sizes))
        return out

    @staticmethod
    def _tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    @staticmethod
    def _place(tensor: torch.Tensor) -> int:
        return int(tensor.untyped_storage().data_ptr())


@pytest.mark.parametrize(
    ("case", "shape"), [(rms_norm, "48x96"), (swiglu, "48x96"), (flash_attention, "1x40x40x3x3x16")]
)
def test_passes_of_eager_are_those_of_the_operators_that_it_runs(case: Any, shape: str) -> None:
    """The operators that the table counts, and their bytes, are what PyTorch runs for the case's eager form."""
    dims = tuple(map(int, shape.split("x")))
    inputs = case.inputs(dims, torch.float32, torch.Generator().manual_seed(0))
    with Traffic() as traffic:
        case.eager(*inputs)
    assert traffic.ops == fused.eager_ops(case.CASE.name, shape)


def float32_cell(row: fused.Row, **facts: Any) -> Cell:
    elements = 16384 * int(row.dimension.removeprefix("N="))
    sizes = {"logical_read_bytes": 4 * elements, "logical_write_bytes": 4 * elements, "speedup_over_eager": 3.5}
    return cell(row.kernel, row.shape, "float32", [candidate("triton", 10_000, "triton"), *facts.pop("more", ())]) | {
        **sizes,
        **facts,
    }


def checked(row: fused.Row, *, passed: bool = True) -> dict[str, Artifact]:
    error = {"max_error_ratio": 2e-7}
    verdict = {
        "shape": row.shape,
        "dtype": "float32",
        "passed": passed,
        "triton": error,
        "limit": {"max_error_ratio": 1e-5},
    }
    return {row.kernel: {"cells": [verdict]}}


def test_a_measured_row_has_times_passes_and_verdict_and_a_missing_one_says_so() -> None:
    """Passes are bytes over those of the output, of ours by the case and of eager by its operators."""
    row = fused.ROWS[0]
    made = float32_cell(row, more=[candidate("eager", 35_000)])
    found = rows(fused.section(roofline(made), checked(row)))
    assert [each["Dimension"] for each in found] == [each.dimension for each in fused.ROWS]
    first, second = found[:2]
    assert [*first.values()][3:6] == ["35.000", "10.000", "3.500x"]
    assert [*first.values()][6:] == ["7.01", "2.00", "-", "correct: error ratio 2.00e-07, limit 1.00e-05"]
    assert [*second.values()][3:] == ["not measured", "not measured", *["-"] * 4, "not measured"]


def test_counted_bytes_stand_beside_the_logical_ones() -> None:
    """Where the hardware counted the row's own call, its DRAM bytes are passes, too; those of another dtype are not."""
    row = fused.ROWS[0]
    made = float32_cell(row)
    counted = {"shape": row.shape, "dtype": "float32", "candidate": "triton"}
    counted |= {"dram_read_bytes": made["logical_write_bytes"], "dram_write_bytes": made["logical_write_bytes"] // 2}
    for dtype, expected in (("float32", "1.50"), ("float16", "-")):
        counters = [{"kernel": row.kernel, "cells": [{**counted, "dtype": dtype}]}]
        first, *_ = rows(fused.section(roofline(made, counters=counters), checked(row)))
        assert first["fused, counted"] == expected


def test_a_wrong_or_void_kernel_is_not_called_correct() -> None:
    """A failed check is said in capitals, and a void time with its reason."""
    row = fused.ROWS[0]
    wrong, *_ = rows(fused.section(roofline(float32_cell(row)), checked(row, passed=False)))
    assert wrong["Status"].startswith("WRONG: error ratio 2.00e-07")
    void = float32_cell(row, candidates=[candidate("triton", None, "triton")])
    assert rows(fused.section(roofline(void), checked(row)))[0]["Status"] == "failed: wrong result"


def test_the_caption_names_each_operator() -> None:
    """Whoever reads the passes of eager finds the operators that were counted."""
    text = fused.section(roofline(), {})
    assert "`rms_norm`: pow, mean, add, rsqrt, mul, mul; `swiglu`: silu, mul; `flash_attention`: bmm, div, " in text
    assert fused.section({**roofline(), "status": "not_measured"}, {}) == ""


# Crossovers


def races(kernel: str, weights: str, times: Mapping[int, tuple[int, int | None]]) -> Iterator[Cell]:
    for m, (ours, theirs) in times.items():
        dense = candidate(crossover.DENSE[kernel], theirs)
        yield cell(kernel, f"{m}x{weights}", "bfloat16", [candidate("triton", ours, "triton"), dense])


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            {64: (90, 80), 1: (10, 30), 16: (20, 31)},
            "from M = 64 on, of the measured 1, 16, 64 (0.080 us against 0.090 us).",
        ),
        ({1: (10, 30), 16: (30, 30)}, "at none of the measured M (1, 16)."),
        (
            {1: (10, 9), 2: (10, 10), 4: (10, 8)},
            "from M = 1 on, of the measured 1, 2, 4 (0.009 us against 0.010 us), but not at M = 2.",
        ),
        (
            {1: (10, 30), 16: (20, None), 32: (9, 8)},
            "from M = 32 on, of the measured 1, 32 (0.008 us against 0.009 us).",
        ),
    ],
    ids=["crossed", "never, a tie included", "back and forth", "a void time is no measurement"],
)
def test_the_crossover_is_the_smallest_size_at_which_dense_is_faster(
    times: Mapping[int, tuple[int, int | None]], said: str
) -> None:
    """M ascends by value whatever the order of cells, and what is not measured is not claimed."""
    (sentence,) = crossover.sentences(roofline(*races("int4_linear", "14336x4096", times)))
    assert sentence == f"`int4_linear`, N x K = 14336x4096, bfloat16: `cuBLAS, 16-bit weights` is faster {said}"


def test_weights_of_one_size_alone_have_no_crossover() -> None:
    """A weight that was timed at one M says nothing of where another form takes over."""
    lone = races("int4_linear", "4096x4096", {1: (9, 8)})
    both = races("swiglu_linear", "8960x1536", {1: (9, 8), 16: (7, 6)})
    assert crossover.section(roofline(*lone)) == ""
    text = crossover.section(roofline(*lone, *both))
    assert text.count("\n- `") == 1
    assert "`cuBLAS packed + Triton swiglu` is faster from M = 1 on" in text


@pytest.mark.parametrize("make", [memory.section, crossover.section])
def test_other_regimes_have_no_say(make: Callable[[Artifact], str]) -> None:
    """The sections are of the primary regime alone."""
    cells = [attention(1024), *races("int4_linear", "4096x4096", {1: (9, 8), 2: (9, 8)})]
    assert make(roofline(*cells))
    others = [{**copy.deepcopy(each), "regime": "warm"} for each in cells]
    assert make(roofline(*others)) == ""
