"""Fused gated projection: closed forms, layouts, tails, split sums, gradients; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
from operator_checks import DEVICE, DTYPES, LOSSES, assert_right, assert_same_bits, randn

from triton_kernel_lab import routing
from triton_kernel_lab.cases.swiglu_linear import CASE, oracle
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear, swiglu_linear_reference

op = importlib.import_module("triton_kernel_lab.ops.swiglu_linear")


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def drawn(M: int, N: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, w_gate and w_up whose products are of order one."""
    weights = ((randn(N, K, seed=seed) / math.sqrt(K)).to(dtype) for seed in (1, 2))
    return randn(M, K, dtype=dtype), *weights


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_weights_that_pick_a_column_give_the_gate_of_two_columns(rows: int, dtype: torch.dtype) -> None:
    """With one 1 in each row of the weights no sum rounds: the output is silu(x_i) * x_j."""
    K, N = 48, 40
    x = randn(rows, K, dtype=dtype)
    gate_of, up_of = torch.arange(N) % K, (7 * torch.arange(N) + 3) % K
    weights = (torch.nn.functional.one_hot(index, K).to(dtype).to(DEVICE) for index in (gate_of, up_of))
    gate, up = x[:, gate_of].double(), x[:, up_of].double()
    assert_right(swiglu_linear(x, *weights), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_a_closed_gate_lets_nothing_through(rows: int) -> None:
    """A gate weight of zeros gives exact zeros, whatever the up half says."""
    x, w_gate, w_up = drawn(rows, 24, 40)
    y = swiglu_linear(x, torch.zeros_like(w_gate), w_up)
    # A zero of either sign: it has that of the up half.
    assert torch.equal(y, torch.zeros(rows, 24, device=DEVICE))


def test_gate_and_up_are_not_exchanged() -> None:
    """Gate 32 and up 2 give 64; the other way round it would be 2 silu(2) * 16."""
    x = torch.ones(1, 16, device=DEVICE)
    w_gate, w_up = torch.full((8, 16), 2.0, device=DEVICE), torch.full((8, 16), 0.125, device=DEVICE)
    assert_same_bits(swiglu_linear(x, w_gate, w_up), torch.full((1, 8), 64.0, device=DEVICE))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_what_is_not_finite_stays_in_its_row(rows: int) -> None:
    """NaN in one row of x is NaN in that row of the output and in no other."""
    x, w_gate, w_up = drawn(rows, 24, 40)
    x[rows - 1, 39] = math.nan
    y = swiglu_linear(x, w_gate, w_up)
    assert y[rows - 1].isnan().all()
    assert y[: rows - 1].isfinite().all()


# Shapes and layouts.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 37, 63), (2, 32, 64), (16, 17, 80), (17, 33, 65), (40, 48, 100)])
def test_every_size_is_right_and_reads_nothing_beside_it(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Odd sizes, few and many rows: right against float64 amid poison that a wrong mask would read (F06)."""
    poisoned = [checks.amid_poison(tensor) for tensor in drawn(*shape, dtype)]
    tensors = [tensor for tensor, _ in poisoned]
    assert_right(swiglu_linear(*tensors), oracle(*tensors), dtype)
    assert all(untouched() for _, untouched in poisoned)


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 8, 0), (2, 0, 8, 4)])
def test_f04_empties(shape: tuple[int, ...]) -> None:
    """No rows or no outputs give an empty tensor; a sum of nothing is 0; nothing is launched."""
    *lead, N, K = shape
    x, weight = torch.ones(*lead, K, device=DEVICE), torch.ones(N, K, device=DEVICE)
    bound = len(_launch.launches())
    y = swiglu_linear(x, weight, weight)
    assert_same_bits(y, torch.zeros(*lead, N, device=DEVICE))
    assert len(_launch.launches()) == bound


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_f07_any_strides_give_the_bits_of_a_dense_copy(rows: int) -> None:
    """Transposed, every second column, halves of one tensor, more dimensions: the same bits."""
    x, w_gate, w_up = drawn(rows, 24, 40)
    expected = swiglu_linear(x, w_gate, w_up)
    wide = torch.stack((x, x + 1), -1).view(rows, 80)[:, ::2]
    both = torch.cat((w_gate, w_up))
    for tensors in (
        (x.t().contiguous().t(), w_gate, w_up),
        (x, w_gate.t().contiguous().t(), w_up),
        (wide, both[:24], both[24:]),
        (x.expand(1, rows, 40), w_gate, w_up),
    ):
        assert_same_bits(swiglu_linear(*tensors).view(rows, 24), expected)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_f10_misaligned_tensors(rows: int) -> None:
    """Aligned, one element off, aligned again: three right results of one shape."""
    aligned = drawn(rows, 24, 40, torch.float16)
    shifted = []
    for tensor in aligned:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)
        shifted.append(buffer[1:].view(tensor.shape).copy_(tensor))
    for tensors in (aligned, tuple(shifted), aligned):
        assert_right(swiglu_linear(*tensors), oracle(*tensors), torch.float16)


@pytest.mark.parametrize("kernel", ["vector", "streamed", "tiled", "described"])
def test_f60_every_kernel_is_right_for_every_number_of_rows(kernel: str) -> None:
    """Each kernel alone, on poisoned memory, at the sizes that the table gives to the others."""
    extra: dict[str, Any] = {"vector": {}, "streamed": {"split": 3}}.get(
        kernel, {"block_m": 16, "group": 2, "per_processor": 1}
    )
    config = {"kernel": kernel, "block_n": 16, "block_k": 32, "num_stages": 1, "num_warps": 4, **extra}
    with _launch.forced(config), check.poisoned():
        for rows in (1, 5, 20):
            tensors = drawn(rows, 24, 100)
            assert_right(swiglu_linear(*tensors), oracle(*tensors), torch.float32)


@pytest.mark.parametrize("split", [1, 2, 5, 8])
def test_f32_parts_without_a_share_of_the_sum_add_nothing(split: int) -> None:
    """More parts than blocks of K: the result is that of one part, in every launch of the same memory."""
    tensors = drawn(3, 24, 40)
    config = {"kernel": "streamed", "block_n": 16, "block_k": 32, "num_stages": 1, "num_warps": 4, "split": split}
    with _launch.forced(config):
        first, second = swiglu_linear(*tensors), swiglu_linear(*tensors)
    assert_right(first, oracle(*tensors), torch.float32)
    assert_same_bits(first, second)


# Errors, gradients, the compiler.


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((2, 8), (4, 9), (4, 9)), "w_gate: expected 8 columns, as x has, got 9"),
        (((2, 8), (4, 8), (5, 8)), "w_up: expected shape (4, 8), got (5, 8)"),
        (((2, 8), (8,), (8,)), "w_gate: expected shape (N, K), got (8,)"),
        (((), (4, 8), (4, 8)), "x: expected at least one dimension, got a scalar"),
    ],
)
def test_shapes_that_do_not_fit_are_one_sentence(shapes: Any, said: str) -> None:
    """Argument, expected and found."""
    with pytest.raises(ValueError, match="swiglu_linear") as caught:
        swiglu_linear(*(torch.ones(shape, device=DEVICE) for shape in shapes))
    assert str(caught.value) == f"swiglu_linear: {said}."


def test_weights_of_another_dtype_are_a_type_error() -> None:
    """Tensor cores multiply operands of one dtype; nothing is converted unasked."""
    x, w_gate, w_up = drawn(2, 4, 8)
    with pytest.raises(TypeError, match=r"^swiglu_linear: w_up: expected the dtype of x, torch.float32, got"):
        swiglu_linear(x, w_gate, w_up.half())


@pytest.mark.parametrize("loss", LOSSES)
def test_f08_f50_exactly_the_gradients_asked_for(loss: str) -> None:
    """Whatever reaches the backward pass, each asked for gradient is float64's, and the others are None."""
    for asked in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        tensors = [t.view(2, 3, 16) if i == 0 else t for i, t in enumerate(drawn(6, 8, 16))]
        tensors = [tensor.requires_grad_(wanted) for tensor, wanted in zip(tensors, asked, strict=True)]
        with routing.strict(False):
            found = checks.gradients(swiglu_linear, LOSSES[loss], *tensors)
        wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]
        expected = checks.gradients(swiglu_linear_reference, LOSSES[loss], *wide)
        assert [gradient is not None for gradient in found] == list(asked)
        for gradient, reference in zip(found, expected, strict=True):
            if gradient is not None:
                assert torch.allclose(gradient.double(), reference, rtol=1e-4, atol=1e-5)


def test_f56_the_operator_is_one_node_of_a_graph() -> None:
    """torch.library's own checks pass, and meta tensors give the shape without memory."""
    tensors = drawn(5, 24, 40)
    torch.library.opcheck(torch.ops.triton_kernel_lab.swiglu_linear.default, tensors)
    y = swiglu_linear(torch.empty(2, 5, 40, device="meta"), *(t.to("meta") for t in tensors[1:]))
    assert (y.shape, y.device.type) == ((2, 5, 24), "meta")


@pytest.mark.gpu
def test_f62_a_captured_call_follows_its_inputs() -> None:
    """After a warm-up, replays of a graph see new contents of the same tensors, also with a split sum."""
    for rows in (1, 16, 256):
        tensors = drawn(rows, 512, 1024, torch.bfloat16)
        swiglu_linear(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = swiglu_linear(*tensors)
        for _ in range(3):
            tensors[0].normal_()
            graph.replay()
            assert_same_bits(y, swiglu_linear(*tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", CASE.timed)
def test_f22_twenty_runs_give_the_same_bits(dims: tuple[int, int, int]) -> None:
    """The order in which parts arrive changes nothing."""
    tensors = CASE.variants[0].inputs(dims, torch.bfloat16, torch.Generator(DEVICE).manual_seed(0))
    first = swiglu_linear(*tensors)
    for _ in range(20):
        assert_same_bits(swiglu_linear(*tensors), first)


@pytest.mark.gpu
def test_f34_fp32_is_not_tf32() -> None:
    """A sum over 4096 in fp32 keeps 1e-5 against float64."""
    for rows in (1, 16, 200):
        tensors = drawn(rows, 128, 4096)
        y, reference = swiglu_linear(*tensors).double(), oracle(*tensors)
        assert (y - reference).norm() <= 1e-5 * reference.norm()
