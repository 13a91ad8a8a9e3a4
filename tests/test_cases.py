"""The yardsticks: what each case says an operator costs, what its oracle is, and how shapes are read."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_checks import DEVICE, DTYPES

from triton_kernel_lab.cases import PENDING
from triton_kernel_lab.cases import rms_norm as norm_case
from triton_kernel_lab.cases import selected_attention as chosen_case
from triton_kernel_lab.cases import swiglu as gate_case
from triton_kernel_lab.cases._base import (
    DTYPES as NAMED,
)
from triton_kernel_lab.cases._base import (
    Baseline,
    Cost,
    Dims,
    dtype_name,
    find,
    load,
    parse_shape,
    randn,
    shape_name,
)
from triton_kernel_lab.lab import candidates, check, correctness
from triton_kernel_lab.lab.check import as_tuple
from triton_kernel_lab.lab.timing import cost_record
from triton_kernel_lab.project import kernel_names
from triton_kernel_lab.report import selection

ROOT = Path(__file__).parents[1]
KERNELS = kernel_names(ROOT)
# What waits for a measurement is held to the same rules.
ALL = [*KERNELS, *PENDING]
# Operators that read chosen rows of a larger tensor.
GATHERING = {"paged_kv_gather", "selected_attention"}
# Without a CPU form, or with one that takes a C++ compiler half a minute.
GPU_ONLY = {
    "aten._fused_rms_norm_backward",
    "aten._fused_rms_norm_backward + add",
    "torch._weight_int4pack_mm",
    "torch.compile of multiply and sum",
    "SDPA cuDNN",
    "SDPA efficient",
}
VARIANTS = [
    pytest.param(kernel, number, id=f"{kernel}-{variant.name}")
    for kernel in ALL
    for number, variant in enumerate(load(kernel).variants)
]


def smallest(kernel: str, number: int) -> Dims:
    """The least work among the shapes of a variant."""
    case = load(kernel)
    return min(case.variants[number].dims or case.smoke, key=math.prod)


@pytest.mark.parametrize(
    ("kernel", "dims", "dtype", "expected"),
    [
        (
            "rms_norm",
            (128, 1024),
            torch.float16,
            Cost({"x": 262_144, "weight": 2_048}, {"y": 262_144}, 524_288, "float32"),
        ),
        (
            "rms_norm",
            (2048, 65536),
            torch.bfloat16,
            Cost({"x": 268_435_456, "weight": 131_072}, {"y": 268_435_456}, 536_870_912, "float32"),
        ),
        ("rms_norm", (3, 5), torch.float32, Cost({"x": 60, "weight": 20}, {"y": 60}, 60, "float32")),
        (
            "swiglu",
            (128, 1024),
            torch.float16,
            Cost({"gate": 262_144, "up": 262_144}, {"y": 262_144}, 524_288, "float32"),
        ),
        (
            "swiglu",
            (8192, 14336),
            torch.bfloat16,
            Cost({"gate": 234_881_024, "up": 234_881_024}, {"y": 234_881_024}, 469_762_048, "float32"),
        ),
        ("swiglu", (3, 5), torch.float32, Cost({"gate": 60, "up": 60}, {"y": 60}, 60, "float32")),
        (
            "swiglu_backward",
            (2048, 4096),
            torch.bfloat16,
            Cost(
                {"dy": 16_777_216, "gate": 16_777_216, "up": 16_777_216},
                {"dgate": 16_777_216, "dup": 16_777_216},
                92_274_688,
                "float32",
            ),
        ),
        (
            "swiglu_backward",
            (3, 5),
            torch.float32,
            Cost({"dy": 60, "gate": 60, "up": 60}, {"dgate": 60, "dup": 60}, 165, "float32"),
        ),
        (
            "swiglu_linear",
            (16, 8960, 1536),
            torch.bfloat16,
            Cost({"x": 49_152, "w_gate": 27_525_120, "w_up": 27_525_120}, {"y": 286_720}, 880_803_840, "bfloat16"),
        ),
        (
            "add_rms_norm",
            (4, 1536),
            torch.bfloat16,
            Cost(
                {"x": 12_288, "residual": 12_288, "weight": 3_072},
                {"normed": 12_288, "summed": 12_288},
                30_720,
                "float32",
            ),
        ),
        (
            "paged_kv_gather",
            (1, 256, 16, 1, 128),
            torch.float16,
            Cost(
                {"k": 65_536, "v": 65_536, "page_table": 64, "seq_lens": 4},
                {"k": 65_536, "v": 65_536, "offsets": 8},
                0,
                "float32",
            ),
        ),
        (
            "qk_scores",
            (512, 1, 1, 1, 128),
            torch.float16,
            Cost({"q": 131_072, "k": 131_072}, {"scores": 2_048}, 131_584, "float32"),
        ),
        (
            "qk_scores",
            (8, 32, 8, 4096, 128),
            torch.float16,
            Cost({"q": 65_536, "k": 67_108_864}, {"scores": 4_194_304}, 269_484_032, "float16"),
        ),
        ("qk_scores", (1, 3, 1, 5, 7), torch.float32, Cost({"q": 84, "k": 140}, {"scores": 60}, 225, "float32")),
        (
            "swiglu_linear",
            (1, 14336, 4096),
            torch.bfloat16,
            Cost({"x": 8_192, "w_gate": 117_440_512, "w_up": 117_440_512}, {"y": 28_672}, 234_881_024, "bfloat16"),
        ),
        (
            "swiglu_linear",
            (2, 3, 5),
            torch.float32,
            Cost({"x": 40, "w_gate": 60, "w_up": 60}, {"y": 24}, 120, "float32"),
        ),
        (
            "selected_attention",
            (1, 1, 1, 256, 64, 128),
            torch.bfloat16,
            Cost({"q": 256, "k": 16_384, "v": 16_384, "indices": 256}, {"out": 256}, 32_768, "float32"),
        ),
        (
            "selected_attention",
            (2, 8, 2, 32, 32, 16),
            torch.float16,
            Cost({"q": 512, "k": 4_096, "v": 4_096, "indices": 256}, {"out": 512}, 32_768, "float16"),
        ),
        (
            "int4_linear",
            (1, 1536, 1536),
            torch.bfloat16,
            Cost({"x": 3_072, "packed": 1_179_648, "scales": 36_864}, {"y": 3_072}, 4_718_592, "bfloat16"),
        ),
        (
            "int4_linear",
            (16, 14336, 4096),
            torch.bfloat16,
            Cost({"x": 131_072, "packed": 29_360_128, "scales": 917_504}, {"y": 458_752}, 1_879_048_192, "bfloat16"),
        ),
        (
            "flash_attention",
            (1, 3, 5, 1, 1, 8),
            torch.float16,
            Cost({"q": 48, "k": 80, "v": 80}, {"out": 48}, 384, "float16"),
        ),
        (
            "flash_attention",
            (1, 3, 2, 2, 1, 4),
            torch.float32,
            Cost({"q": 96, "k": 32, "v": 32}, {"out": 96}, 96, "float32"),
        ),
        (
            "rms_norm_backward",
            (2048, 4096),
            torch.bfloat16,
            Cost(
                {"dy": 16_777_216, "x": 16_777_216, "weight": 8_192},
                {"dx": 16_777_216, "dweight": 8_192},
                92_274_688,
                "float32",
            ),
        ),
        (
            "rms_norm_backward",
            (3, 5),
            torch.float32,
            Cost({"dy": 60, "x": 60, "weight": 20}, {"dx": 60, "dweight": 20}, 165, "float32"),
        ),
        (
            "add_rms_norm_backward",
            (2048, 4096),
            torch.bfloat16,
            Cost(
                {"dnormed": 16_777_216, "dsummed": 16_777_216, "summed": 16_777_216, "weight": 8_192},
                {"dx": 16_777_216, "dweight": 8_192},
                100_663_296,
                "float32",
            ),
        ),
        (
            "add_rms_norm_backward",
            (3, 5),
            torch.float32,
            Cost({"dnormed": 60, "dsummed": 60, "summed": 60, "weight": 20}, {"dx": 60, "dweight": 20}, 180, "float32"),
        ),
    ],
)
def test_f77_costs_are_those_worked_out_by_hand(kernel: str, dims: Dims, dtype: torch.dtype, expected: Cost) -> None:
    """Each input is read once and each output written once, in bytes; operations as each operator's formula has."""
    assert load(kernel).cost(dims, dtype) == expected


@pytest.mark.parametrize("kernel", ALL)
def test_f77_costs_are_the_bytes_of_the_tensors(kernel: str) -> None:
    """The bytes of a case are those of the tensors that its timed variant takes and gives; a cache is read in part."""
    case = load(kernel)
    for dtype in DTYPES:
        dims = case.smoke[0]
        inputs = case.variants[0].inputs(dims, dtype, torch.Generator(DEVICE).manual_seed(0))
        outputs = as_tuple(case.variants[0].run(*inputs))
        cost = case.cost(dims, dtype)
        read, given = sum(cost.read.values()), sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        # Of a cache only the rows that are chosen.
        assert read < given if kernel in GATHERING else read == given
        assert list(cost.write.values()) == [output.numel() * output.element_size() for output in outputs]


def test_f77_tracked_timings_carry_the_costs_of_their_cases() -> None:
    """No tracked timing was divided by bytes that the case no longer says."""
    for path in sorted(ROOT.glob("artifacts/*/timing/*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            case = load(path.stem)
            expected = case.cost(case.parse_dims(cell["shape"]), NAMED[cell["dtype"]])
            assert cell["cost"] == cost_record(expected), f"{path}: {cell['shape']} {cell['dtype']}"


# Oracles.


def slow_rms_norm(row: list[float], weight: list[float], offset: float) -> list[float]:
    mean = math.fsum(value * value for value in row) / len(row)
    return [value / math.sqrt(mean + norm_case.EPS) * (w + offset) for value, w in zip(row, weight, strict=True)]


def slow_swiglu(gate: list[float], up: list[float]) -> list[float]:
    return [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_oracle_of_rms_norm_is_the_formula(offset: float) -> None:
    """Row by row with exact sums, the same to 14 digits."""
    x, weight = norm_case.inputs((3, 41), torch.float16, torch.Generator().manual_seed(1))
    found = norm_case.oracle(x, weight, offset)
    assert found.dtype == torch.float64
    for row, y in zip(x.tolist(), found.tolist(), strict=True):
        assert y == pytest.approx(slow_rms_norm(row, weight.tolist(), offset), rel=1e-14)
    assert torch.equal(norm_case.oracle(x), norm_case.oracle(x, torch.ones_like(weight)))


def test_the_oracle_of_swiglu_is_the_formula() -> None:
    """Element by element, the same to 14 digits."""
    gate, up = gate_case.inputs((3, 41), torch.float16, torch.Generator().manual_seed(1))
    found = gate_case.oracle(gate, up)
    assert found.dtype == torch.float64
    for g, u, y in zip(gate.tolist(), up.tolist(), found.tolist(), strict=True):
        assert y == pytest.approx(slow_swiglu(g, u), rel=1e-14)


@pytest.mark.parametrize(("kernel", "number"), VARIANTS)
def test_eager_and_oracle_mean_the_same_operator(kernel: str, number: int) -> None:
    """In fp32 the eager form of each variant is its oracle to single precision, in x's shape."""
    case = load(kernel)
    variant = case.variants[number]
    inputs = variant.inputs(smallest(kernel, number), torch.float32, torch.Generator(DEVICE).manual_seed(2))
    eager, oracle = as_tuple(variant.eager(*inputs)), as_tuple(variant.oracle(*inputs))
    assert len(eager) == len(oracle) == len(case.output_dtypes)
    for output, reference, dtype in zip(eager, oracle, case.output_dtypes, strict=True):
        integer = dtype is not None and not dtype.is_floating_point
        assert integer or reference.dtype == torch.float64
        assert torch.allclose(output.double(), reference.double(), rtol=1e-5, atol=1e-6)


def wrong(kernel: str, dims: Dims, names: Container[str]) -> dict[str, list[str]]:
    """What is wrong with each of some candidates of a cell, by name."""
    case = load(kernel)
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    inputs = case.variants[0].inputs(dims, dtype, torch.Generator(DEVICE).manual_seed(2))
    expected = check.expect(case, case.variants[0], inputs, dtype)
    return {
        each.name: check.run_checked(each.call, each.prepare(*inputs), expected, in_place=each.in_place).failures
        for each in candidates.build(case, dims, dtype, DEVICE)
        if each.name in names
    }


@pytest.mark.parametrize("kernel", ALL)
def test_library_operators_mean_the_same_operator(kernel: str) -> None:
    """What is timed as torch's own operator for the job does the job."""
    names = set(load(kernel).library) - GPU_ONLY
    assert wrong(kernel, load(kernel).smoke[0], names) == {name: [] for name in names}


@pytest.mark.parametrize("kernel", [kernel for kernel in ALL if load(kernel).companions])
def test_companions_mean_the_same_operator(kernel: str) -> None:
    """Each further way into our own kernels does the job, at every shape that the interpreter runs."""
    names = load(kernel).companions
    for dims in load(kernel).smoke:
        assert wrong(kernel, dims, names) == {name: [] for name in names}


def test_the_rows_of_the_paged_companion_are_those_of_the_cache() -> None:
    """Page by page in the order of the table, the last one filled up, and the pages lie in no order."""
    q, k, v, indices = chosen_case.inputs((2, 6, 2, 100, 37, 8), torch.float16, torch.Generator().manual_seed(1))
    companion = load("selected_attention").companions["paged"]
    assert isinstance(companion, Baseline)
    prepared = companion.prepare(q, k, v, indices)
    table = prepared[3]
    assert table.shape == (2, 7)
    assert sorted(table.flatten().tolist()) == list(range(14))
    assert table.flatten().tolist() != list(range(14))
    gathered = chosen_case._gathered(*prepared)
    assert all(torch.equal(found[:, :100], given) for found, given in zip(gathered[1:3], (k, v), strict=True))
    assert gathered[0] is q
    assert gathered[3] is indices


def test_the_report_holds_the_time_from_pages_against_that_from_one_piece() -> None:
    """Its sentence has the least and the largest ratio of the cold cells that have both, and the size of a page."""

    def cell(
        ours: int | None, pages: int | None, regime: str = "cold_clean", kernel: str = "selected_attention"
    ) -> Any:
        times = [("triton", ours), ("paged", pages)]
        timed = [{"name": name, "stats": None if p50 is None else {"p50_ns": p50}} for name, p50 in times]
        return {"kernel": kernel, "regime": regime, "candidates": timed}

    void = [cell(1000, None), cell(None, 1000), cell(1000, 9000, "warm"), cell(1000, 9000, kernel="rms_norm")]
    assert selection.paged({"cells": void}) == []
    (sentence,) = selection.paged({"cells": [*void, cell(1000, 1050), cell(1000, 990), cell(2000, 2000)]})
    assert sentence == (
        f"`selected_attention`, straight from pages of {chosen_case._PAGE}: 0.990x to 1.050x the time from a "
        "contiguous cache."
    )


# Inputs.


@pytest.mark.parametrize(("kernel", "number"), VARIANTS)
def test_inputs_are_seeded_random_and_have_a_signal(kernel: str, number: int) -> None:
    """The same seed gives the same tensors, another seed others; none is mostly zeros."""
    case = load(kernel)
    variant = case.variants[number]
    dims = smallest(kernel, number)
    first, again, other = (
        variant.inputs(dims, torch.float16, torch.Generator(DEVICE).manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    drawn = [(a, b) for a, b in zip(first, other, strict=True) if a.is_floating_point()]
    assert not any(torch.equal(a, b) for a, b in drawn)
    assert all((a != 0).double().mean() > 0.99 for a, _ in drawn)
    outputs = [output for output in as_tuple(variant.run(*first)) if output.is_floating_point()]
    assert all(output.isfinite().all() and output.abs().mean() > 0.05 for output in outputs)


def test_random_numbers_have_mean_and_scale() -> None:
    """Normal numbers about the mean, and an empty shape without a draw."""
    values = randn((100, 100), torch.float32, torch.Generator().manual_seed(0), mean=1.0, scale=0.1)
    assert values.mean().item() == pytest.approx(1.0, abs=0.01)
    assert values.std().item() == pytest.approx(0.1, abs=0.01)
    assert randn((0, 4), torch.float16, torch.Generator()).shape == (0, 4)


@pytest.mark.parametrize("kernel", ALL)
def test_shapes_and_buckets_fit_the_axes(kernel: str) -> None:
    """Every shape of a case has its axes, what is timed is also checked, and each bucket covers its own shape."""
    case = load(kernel)
    assert case.name == kernel
    timed = [dims for dims, _ in case.cells]
    for dims in (*timed, *case.checked, *case.smoke, *(bucket.dims for bucket in case.buckets)):
        assert len(dims) == len(case.axes)
    checked = [(dims, dtype) for each, dims, dtype in correctness._cells(case, smoke=False) if each is case.variants[0]]
    assert set(case.cells) <= set(checked)
    assert len(set(case.cells)) == len(case.cells)
    assert {dtype for _, dtype in case.cells} <= set(case.checked_dtypes) <= set(NAMED)
    assert len({variant.name for variant in case.variants}) == len(case.variants)
    assert all(bucket.configs for bucket in case.buckets)


# Names.


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_found_by_both_its_names(kernel: str) -> None:
    """The registry's name, the command line's and its aliases find the same case."""
    case = load(kernel)
    assert all(find(name) is case for name in (kernel, case.cli_name, *case.aliases))


@pytest.mark.parametrize("kernel", ALL)
def test_a_shorter_shape_means_a_full_one(kernel: str) -> None:
    """Where a case has a short form, its dimensions have all the axes."""
    case = load(kernel)
    if case.short:
        axes, expand = case.short
        assert len(axes) < len(case.axes)
        assert case.parse_dims("x".join(["64"] * len(axes))) == expand(*[64] * len(axes))
        assert len(expand(*[64] * len(axes))) == len(case.axes)


@pytest.mark.parametrize("name", ["", "rms", "RMSNorm", "cases"])
def test_an_unknown_kernel_is_named_with_the_known_ones(name: str) -> None:
    """The sentence says what was asked for and what there is."""
    with pytest.raises(ValueError, match=r"^kernel .*: expected one of rmsnorm, .*swiglu, .*\.$"):
        find(name)


@pytest.mark.parametrize("text", ["128x1024", "128X1024", "0128x1024"])
def test_a_shape_is_whole_numbers_joined_by_x(text: str) -> None:
    """Read back as the dimensions, whichever case the x has."""
    assert parse_shape(text) == (128, 1024)
    assert shape_name(parse_shape(text)) == "128x1024"


@pytest.mark.parametrize(
    "text",
    ["", "x", "128x", "x128", "0x4", "4x0", "-1x4", "1.5x4", "4 x 4", "4*4", "four", "٤x4", "²x4", "1_0x4", "+4x4"],
)
def test_anything_else_is_no_shape(text: str) -> None:
    """One sentence with the text and an example."""
    with pytest.raises(
        ValueError, match=r"^shape .*: expected positive whole numbers joined by x, such as 128x1024\.$"
    ):
        parse_shape(text)


@pytest.mark.parametrize(("text", "count"), [("128", 1), ("1x2x3", 3)])
def test_a_shape_of_another_rank_is_refused(text: str, count: int) -> None:
    """The sentence names the axes that the kernel has."""
    with pytest.raises(ValueError, match=rf"^rmsnorm: shape {text}: expected MxN, found {count} numbers\.$"):
        load("rms_norm").parse_dims(text)


@pytest.mark.parametrize("name", NAMED)
def test_dtypes_go_by_torchs_own_names(name: str) -> None:
    """A dtype and its name are each other's."""
    assert dtype_name(NAMED[name]) == name
