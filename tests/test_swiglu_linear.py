"""Fused gated projection: closed forms, layouts, tails, split sums, gradients; on the GPU where there is one."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import operator_checks as checks
import pytest
import torch
from operator_checks import DEVICE, DTYPES, LOSSES, assert_right, assert_same_bits, randn
from torch.utils.checkpoint import checkpoint

from triton_kernel_lab import routing
from triton_kernel_lab.cases.swiglu_linear import CASE, oracle
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward
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


DESCRIBED = {"kernel": "described", "block_m": 16, "block_n": 64, "block_k": 32, "group": 2, "per_processor": 1}
DESCRIBED |= {"num_stages": 1, "num_warps": 4}


@pytest.mark.parametrize("cuts", [1, 4])
def test_rows_that_repeat_or_overlap_are_read_where_they_are(cuts: int) -> None:
    """One row for all of x or of a weight, and rows a third of their length apart: no descriptor tells such strides."""
    x, w_gate, w_up = drawn(20, 96, 48)
    sliding = randn(95 * 16 + 48).as_strided((96, 48), (16, 1))
    with _launch.forced({**DESCRIBED, "cuts": cuts}), check.poisoned():
        for tensors in (
            (x[:1].expand(20, 48), w_gate, w_up),
            (x, w_gate[:1].expand(96, 48), w_up),
            (x, w_gate, w_up[:1].expand(96, 48)),
            (x, sliding, w_up),
            (randn(19 * 16 + 48).as_strided((20, 48), (16, 1)), w_gate, sliding),
        ):
            assert_right(swiglu_linear(*tensors), oracle(*tensors), torch.float32)


F01 = """
import sys, operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear
far = checks.far_apart(32)
if far is None:
    print("no memory")
else:
    near = [checks.randn(3, 32, dtype=torch.float16, seed=seed) for seed in (1, 2)]
    for kernel in sys.argv[1:]:
        extra = {"vector": {}, "streamed": {"split": 2}}.get(
            kernel, {"block_m": 16, "group": 2, "per_processor": 1, "cuts": 1}
        )
        config = {"kernel": kernel, "block_n": 16, "block_k": 16, "num_stages": 1, "num_warps": 4, **extra}
        with routing.strict(), _launch.forced(config):
            for place in range(3):
                tensors, copies = ([*near[:place], x, *near[place:]] for x in (far, far.contiguous()))
                assert torch.equal(swiglu_linear(*tensors), swiglu_linear(*copies)), (kernel, place)
        print(kernel, "same", flush=True)
"""
KERNELS = ("vector", "streamed", "tiled", "described")


@functools.cache
def far_apart() -> subprocess.CompletedProcess[str]:
    """Each kernel in turn in one process: starting it takes longest."""
    return checks.run_python(F01, *KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_f01_offsets_beyond_two_to_the_31(kernel: str) -> None:
    """Rows of x and of both weights that begin more than 2^31 elements apart are read where they are."""
    done = far_apart()
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert f"{kernel} same" in done.stdout.splitlines()


@pytest.mark.parametrize("kernel", ["vector", "streamed", "tiled", "described"])
def test_f60_every_kernel_is_right_for_every_number_of_rows(kernel: str) -> None:
    """Each kernel alone, on poisoned memory, at the sizes that the table gives to the others."""
    extra: dict[str, Any] = {"vector": {}, "streamed": {"split": 3}}.get(
        kernel, {"block_m": 16, "group": 2, "per_processor": 1, "cuts": 1}
    )
    config = {"kernel": kernel, "block_n": 16, "block_k": 32, "num_stages": 1, "num_warps": 4, **extra}
    with _launch.forced(config), check.poisoned():
        for rows in (1, 5, 20):
            tensors = drawn(rows, 24, 100)
            assert_right(swiglu_linear(*tensors), oracle(*tensors), torch.float32)


@pytest.mark.parametrize("cuts", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 104, 64), (16, 64, 100), (20, 320, 64), (40, 300, 32), (60, 256, 40)])
def test_every_output_is_written_however_the_last_wave_is_cut(shape: tuple[int, int, int], cuts: int) -> None:
    """No, some and only whole waves, tails in both directions: right on poisoned memory, the same in each launch."""
    tensors = drawn(*shape)
    with _launch.forced({**DESCRIBED, "cuts": cuts}), check.poisoned():
        first, second = swiglu_linear(*tensors), swiglu_linear(*tensors)
    assert_right(first, oracle(*tensors), torch.float32)
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("tiles", "programs", "most", "cuts"),
    [(448, 132, 8, 2), (280, 132, 8, 8), (280, 132, 4, 4), (1792, 132, 8, 1), (132, 132, 8, 1), (3, 132, 8, 8)],
)
def test_the_last_wave_is_cut_only_as_far_as_it_stays_one_wave(tiles: int, programs: int, most: int, cuts: int) -> None:
    """52 tiles of 132 programs halve, 16 take eight pieces each, 76 stay whole, and so does a full wave."""
    assert op._cuts(tiles, programs, most) == cuts


def laid_out(w_gate: torch.Tensor, w_up: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pair as any model may hold it: behind each other, row by row, of unlike rows, one twice."""
    rows, columns = w_gate.shape
    yield from itertools.permutations(torch.cat((w_gate, w_up)).split(rows))
    yield from itertools.permutations(torch.cat((w_gate, w_up), 1).split(columns, 1))
    # A row more: the second begins within the rows of the first.
    yield from itertools.permutations([(both := torch.cat((w_gate, w_up[:1])))[:-1], both[1:]])
    yield torch.cat((w_gate, w_up), 1)[:, :columns], w_up
    yield w_gate, w_gate


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cuts", [1, 4])
def test_weights_are_right_wherever_they_lie(cuts: int, dtype: torch.dtype) -> None:
    """Each layout of the two weights in memory is its own plan, and gives the right result."""
    x, *pair = drawn(20, 96, 48, dtype)
    with _launch.forced({**DESCRIBED, "cuts": cuts}), check.poisoned():
        for weights in laid_out(*pair):
            assert_right(swiglu_linear(x, *weights), oracle(x, *weights), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [256, 600])
def test_weights_are_right_wherever_they_lie_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """The tensor memory accelerator takes any distance between the two that is a multiple of 16 bytes."""
    x, *pair = drawn(rows, 1040, 520, dtype)
    for weights in laid_out(*pair):
        assert_right(swiglu_linear(x, *weights), oracle(x, *weights), dtype)


@pytest.mark.gpu
def test_a_plan_of_one_thread_serves_another() -> None:
    """Triton keeps what allocates a launch's descriptors for each thread; a plan brings its own."""
    tensors = drawn(256, 256, 512, torch.bfloat16)
    here = swiglu_linear(*tensors)
    with ThreadPoolExecutor(1) as pool:
        assert_same_bits(pool.submit(swiglu_linear, *tensors).result(), here)


def test_weights_too_far_apart_for_a_descriptor_have_no_order() -> None:
    """The sign of the distance, below 2^40 bytes; else, and for a distance of nothing, 0."""
    far = 1 << 40
    assert [op._order(0, at) for at in (16, far - 16, far, 0)] == [1, 1, 0, 0]
    assert [op._order(at, 0) for at in (16, far - 16, far)] == [-1, -1, 0]


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


ASKED = [asked for asked in itertools.product([True, False], repeat=3) if any(asked)]


def asking(asked: tuple[bool, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [2, 3, 16] and weights [8, 16], of which some ask for a gradient."""
    x, w_gate, w_up = drawn(6, 8, 16, dtype)
    tensors = (x.view(2, 3, 16), w_gate, w_up)
    return [tensor.requires_grad_(wanted) for tensor, wanted in zip(tensors, asked, strict=True)]


def wide_gradients(loss: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor) -> list[Any]:
    """The gradients by automatic differentiation of the PyTorch form in float64."""
    wide = (tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors)
    return checks.gradients(swiglu_linear_reference, loss, *wide)


def assert_gradients(found: Sequence[Any], expected: Sequence[Any], dtype: torch.dtype) -> None:
    """Each is float64's or None as it is, has the dtype of its tensor and lies densely."""
    limit = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for gradient, reference in zip(found, expected, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            assert (gradient.dtype, gradient.shape, gradient.is_contiguous()) == (dtype, reference.shape, True)
            assert (gradient.double() - reference).norm() <= limit * reference.norm()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("loss", LOSSES)
def test_f08_f50_exactly_the_gradients_asked_for(loss: str, asked: tuple[bool, ...]) -> None:
    """Whatever reaches the backward pass, each gradient asked for is float64's, and the others are None."""
    tensors = asking(asked)
    found = checks.gradients(swiglu_linear, LOSSES[loss], *tensors)
    assert_gradients(found, wide_gradients(LOSSES[loss], *tensors), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 37, 63), (5, 24, 40), (17, 33, 65)])
def test_f18_gradients_of_few_and_many_rows_have_the_dtype_of_x(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Odd sizes, each forward kernel: the gradients are float64's and none is NaN."""
    tensors = [tensor.requires_grad_() for tensor in drawn(*shape, dtype)]
    assert_gradients(checks.gradients(swiglu_linear, torch.sum, *tensors), wide_gradients(torch.sum, *tensors), dtype)


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 8, 0)])
def test_f04_gradients_of_empties(shape: tuple[int, int, int]) -> None:
    """No rows give the weights zeros, no outputs give them to x, and no columns give empty gradients."""
    M, N, K = shape
    tensors = [torch.ones(size, device=DEVICE).requires_grad_() for size in ((M, K), (N, K), (N, K))]
    for gradient, tensor in zip(checks.gradients(swiglu_linear, torch.sum, *tensors), tensors, strict=True):
        assert_same_bits(gradient, torch.zeros_like(tensor))


def test_gradients_of_strided_weights_and_of_a_single_row() -> None:
    """Transposed weights, every second column of x and an x of one dimension reach the backward pass as they are."""
    x, w_gate, w_up = drawn(6, 8, 16)
    for tensors in (
        (torch.stack((x, x + 1), -1).view(6, 32)[:, ::2], w_gate.t().contiguous().t(), w_up),
        (x[0], w_gate, torch.cat((w_gate, w_up))[8:]),
    ):
        leaves = [tensor.requires_grad_() for tensor in tensors]
        found = torch.autograd.grad(swiglu_linear(*leaves).pow(2).sum(), leaves)
        assert_gradients(found, wide_gradients(lambda y: y.pow(2).sum(), *leaves), torch.float32)


@pytest.mark.parametrize("asked", ASKED)
def test_f50_one_gradient_costs_no_product_of_another(asked: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is computed anew, and up unless w_up alone asks; each gradient costs its own products."""
    want_x, want_w_gate, want_w_up = asked
    products = []

    def counted(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*tensors: torch.Tensor) -> torch.Tensor:
            products.append(name)
            return function(*tensors)

        return call

    monkeypatch.setattr(torch, "mm", counted("mm", torch.mm))
    monkeypatch.setattr(torch.Tensor, "addmm_", counted("addmm_", torch.Tensor.addmm_))
    checks.gradients(swiglu_linear, torch.sum, *asking(asked))
    assert products.count("addmm_") == want_x
    assert products.count("mm") == 1 + (want_x or want_w_gate) + want_x + want_w_gate + want_w_up


def test_f50_the_kernel_is_told_which_halves_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the products runs one kernel of ours, for one half where one weight asks."""
    wanted = []

    def recording(*tensors: torch.Tensor, want_gate: bool, want_up: bool) -> object:
        wanted.append((want_gate, want_up))
        return swiglu_backward(*tensors, want_gate=want_gate, want_up=want_up)

    monkeypatch.setattr(op, "swiglu_backward", recording)
    for asked in ((True, False, False), (False, True, False), (False, False, True)):
        checks.gradients(swiglu_linear, torch.sum, *asking(asked))
    assert wanted == [(True, True), (True, False), (False, True)]


def test_only_x_and_the_weights_are_kept_for_the_backward_pass() -> None:
    """No tensor [M, N] waits in the graph, neither the products nor the output."""
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    tensors = asking((True, True, True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu_linear(*tensors)
    assert [tensor.data_ptr() for tensor in kept] == [tensor.data_ptr() for tensor in tensors]


def test_f52_the_incoming_gradient_is_left_alone() -> None:
    """A gradient that the caller keeps, one row for all or lazily negated, is as it was after the backward pass."""
    tensors = asking((True, True, True))
    for dy in (randn(8).expand(2, 3, 8), torch._neg_view(randn(2, 3, 8))):
        before = dy.clone()
        found = torch.autograd.grad(swiglu_linear(*tensors), tensors, dy)
        expected = torch.autograd.grad(swiglu_linear(*tensors), tensors, before)
        assert torch.equal(dy, before)
        assert all(map(torch.equal, found, expected))


def test_autocast_changes_no_gradient() -> None:
    """fp32 operands are multiplied in fp32 in the backward pass as in the forward pass."""
    tensors = asking((True, True, True))
    expected = checks.gradients(swiglu_linear, torch.sum, *tensors)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = checks.gradients(swiglu_linear, torch.sum, *tensors)
    for gradient, reference in zip(found, expected, strict=True):
        assert_same_bits(gradient, reference)


# PyTorch says so of any product that comes first in a thread of autograd's.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize(
    "shape", [None, pytest.param((256, 256, 512), marks=pytest.mark.gpu)], ids=["few_rows", "many_rows"]
)
def test_f54_activation_checkpointing_changes_no_gradient(shape: tuple[int, int, int] | None) -> None:
    """A checkpointed call, computed anew in a thread of autograd's, gives the same bits as a plain one."""
    tensors = asking((True, True, True))
    if shape:
        tensors = [tensor.requires_grad_() for tensor in drawn(*shape, torch.bfloat16)]
    plain = checks.gradients(swiglu_linear, torch.sum, *tensors)
    again = checks.gradients(
        lambda *leaves: checkpoint(swiglu_linear, *leaves, use_reentrant=False), torch.sum, *tensors
    )
    for gradient, reference in zip(again, plain, strict=True):
        assert_same_bits(gradient, reference)


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    """It raises in both ways of calling, even where the incoming gradient needs none; the PyTorch form has it."""
    tensors = asking((True, True, True))
    said = r"^swiglu_linear: a second derivative .* call swiglu_linear_reference instead\.$"
    for function in (swiglu_linear, op._swiglu_linear_op):
        with pytest.raises(RuntimeError, match=said):
            torch.autograd.grad(function(*tensors).sum(), tensors, create_graph=True)
    found = torch.autograd.grad(swiglu_linear_reference(*tensors).sum(), tensors, create_graph=True)
    assert all(gradient.requires_grad for gradient in found)


def test_f49_what_triton_does_not_differentiate_leaves_it() -> None:
    """Float64 raises in strict mode; else the PyTorch form gives its gradient and its second."""
    wide = [tensor.detach().double().requires_grad_() for tensor in drawn(2, 3, 4)]
    with pytest.raises(routing.FallbackError, match=r"swiglu_linear: not served by Triton \(inputs: "):
        swiglu_linear(*wide)
    with routing.strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(swiglu_linear, wide)
        assert torch.autograd.gradgradcheck(swiglu_linear, wide)
    routing.forget()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("asked", [(True, True, True), (True, False, False), (False, False, True)])
def test_f56_training_compiles_into_one_graph(asked: tuple[bool, ...], dynamic: bool) -> None:
    """Compiled forward and backward passes give the gradients of the eager ones, served by Triton, no more of them."""
    torch._dynamo.reset()
    compiled = torch.compile(swiglu_linear, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    tensors = asking(asked)
    found, eager = (
        checks.gradients(function, LOSSES["every_second"], *tensors) for function in (compiled, swiglu_linear)
    )
    for gradient, expected, wanted in zip(found, eager, asked, strict=True):
        assert (gradient is not None) == wanted
        assert not wanted or torch.equal(gradient, expected)


def test_f56_the_operator_is_one_node_of_a_graph() -> None:
    """torch.library's own checks pass, with gradients and without."""
    for asked in ((False, False, False), (True, True, True), (False, True, False)):
        torch.library.opcheck(torch.ops.triton_kernel_lab.swiglu_linear.default, tuple(asking(asked)))


def test_f56_meta_tensors_are_described_with_their_gradients() -> None:
    """On the meta device nothing runs: the shapes of the output and of every gradient, without memory."""
    tensors = [tensor.detach().to("meta").requires_grad_() for tensor in asking((True, True, True))]
    y = swiglu_linear(*tensors)
    assert (y.shape, y.device.type) == ((2, 3, 8), "meta")
    y.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert (tensor.grad.shape, tensor.grad.is_meta) == (tensor.shape, True)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 512, 1024), (16, 512, 1024), (256, 256, 512)])
def test_f35_f50_the_output_and_each_gradient_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """What is launched for this GPU gives each its own right value, bf16 included; no wrong one hides behind others."""
    tensors = [tensor.requires_grad_() for tensor in drawn(*shape, dtype)]
    assert_right(swiglu_linear(*tensors).detach(), oracle(*(tensor.detach() for tensor in tensors)), dtype)
    found = checks.gradients(swiglu_linear, LOSSES["every_second"], *tensors)
    assert_gradients(found, wide_gradients(LOSSES["every_second"], *tensors), dtype)
