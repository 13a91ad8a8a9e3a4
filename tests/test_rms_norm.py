"""RMSNorm: closed forms, shapes, layouts, dtypes, gradients, launches; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, LOSSES, amid_poison, assert_right, assert_same_bits, randn, strided
from torch.utils.checkpoint import checkpoint

from triton_kernel_lab import rms_norm, routing
from triton_kernel_lab.cases.rms_norm import eager
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward

op = importlib.import_module("triton_kernel_lab.ops.rms_norm")
# The interpreter computes with NumPy, which warns where a GPU is silent.
overflowing = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
dividing_by_zero = pytest.mark.filterwarnings(
    "ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)

CONFIGS = [
    *({"kernel": "rows", "rows": rows, "num_warps": 4} for rows in (1, 2, 4, 16)),
    *(
        {"kernel": "streamed", "block": 128, "held": held, "stream_stores": stores, "num_warps": 4}
        for held in (0, 64, 256)
        for stores in (0, 1)
    ),
]


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def oracle(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    y = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight.double() + offset)


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 63, 80, 127, 1000, 5121])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_f06_ones_give_one_value_in_every_column(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Of ones every output is 1/sqrt(1 + eps), here exactly a half, whatever the padding of the block."""
    x, untouched = amid_poison(torch.ones(rows, columns, dtype=dtype, device=DEVICE))
    assert_same_bits(rms_norm(x, eps=3.0), torch.full_like(x, 0.5, memory_format=torch.contiguous_format))
    assert untouched()


@pytest.mark.parametrize(("eps", "expected"), [(0.0, 1.0), (1e-6, 1 / math.sqrt(1 + 1e-6)), (8.0, 1 / 3)])
def test_ones_give_the_rounded_closed_form(eps: float, expected: float) -> None:
    """Of ones the fp16 output is 1/sqrt(1 + eps) rounded to fp16."""
    y = rms_norm(torch.ones(2, 80, dtype=torch.float16, device=DEVICE), eps=eps)
    assert_same_bits(y, torch.full_like(y, expected))


@pytest.mark.parametrize("power", [-8, -1, 1, 12])
def test_scaling_by_a_power_of_two_changes_nothing(power: int) -> None:
    """RMSNorm is homogeneous of degree 0: x times 2^k with eps times 4^k gives the same bits."""
    x = randn(3, 200)
    assert_same_bits(rms_norm(x * 2.0**power, eps=1e-3 * 4.0**power), rms_norm(x, eps=1e-3))


@dividing_by_zero
def test_the_output_has_unit_mean_square() -> None:
    """Without weight and eps the mean square of every row is one."""
    y = rms_norm(randn(5, 1000), eps=0.0)
    assert [checks.root_mean_square(row) for row in y.tolist()] == pytest.approx([1.0] * 5, rel=1e-6)


@dividing_by_zero
def test_a_zero_row_stays_zero_unless_eps_is_zero_too() -> None:
    """0 / sqrt(0 + eps) is 0; with eps 0 it is NaN, as in PyTorch, and the row beside it does not notice."""
    x = torch.stack([torch.zeros(64), torch.ones(64)]).to(DEVICE)
    assert_same_bits(rms_norm(x)[0], torch.zeros_like(x[0]))
    without = rms_norm(x, eps=0.0)
    assert without[0].isnan().all()
    assert_same_bits(without[1], x[1])


@dividing_by_zero
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    """NaN and infinity come out where the PyTorch form has them, and nowhere else."""
    x = randn(3, 200)
    x[1, 7] = bad
    y, expected = rms_norm(x), op.rms_norm_reference(x)
    assert torch.equal(y.isnan(), expected.isnan())
    assert y[[0, 2]].isfinite().all()


# Shapes.


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("shape", [(0, 4096), (2, 0, 128), (2, 0)])
def test_f04_an_empty_tensor_gives_an_empty_one(shape: tuple[int, ...], warm: bool) -> None:
    """Zero rows or columns give the right empty shape and dtype and launch nothing, first call or not."""
    if warm:
        rms_norm(randn(2, 128))
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(shape[-1], dtype=torch.float16, device=DEVICE)
    bound = len(_launch.launches())
    for tensor in (x, x.transpose(0, -1)):
        y = rms_norm(tensor, None if tensor is not x else weight)
        assert (y.shape, y.dtype, y.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert len(_launch.launches()) == bound


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
def test_f04_the_weight_of_no_rows_has_a_gradient_of_zeros(shape: tuple[int, ...]) -> None:
    """An empty batch gives the weight zeros, not whatever memory held."""
    x = torch.empty(shape, device=DEVICE, requires_grad=True)
    weight = torch.ones(shape[-1], device=DEVICE, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert_same_bits(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("columns", [65535, 65536, 65537, 102400, 131073, 1048577])
def test_f05_a_row_longer_than_any_block(columns: int) -> None:
    """The longest rows are looped over, and right."""
    x = randn(2, columns, dtype=torch.float16)
    # The interpreter takes a second for each million of elements that it reads.
    weight = randn(columns, dtype=torch.float16, seed=1) if columns < 1 << 18 else None
    # As the table of a GPU does; the interpreter's own small block would take it seconds.
    config = {"kernel": "streamed", "block": 16384, "held": 16384, "stream_stores": 1, "num_warps": 32}
    with _launch.forced(config):
        assert_right(rms_norm(x, weight), oracle(x, weight), x.dtype)


def test_f05_a_long_row_has_gradients() -> None:
    """The backward pass has no limit on the row either."""
    x = randn(2, 65537).requires_grad_()
    (found,) = checks.gradients(rms_norm, torch.sum, x)
    (expected,) = checks.gradients(oracle, torch.sum, x.detach().double().requires_grad_())
    assert torch.allclose(found.double(), expected, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the rank, sizes, strides, dtype and casting: within one rounding of the oracle."""
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(1, 70))]
    strides = [data.draw(st.sampled_from([0, 1, 3, 70, 97, 210])) for _ in shape[:-1]]
    strides.append(data.draw(st.sampled_from([1, 1, 1, 2, 3])))
    dtype = data.draw(st.sampled_from(DTYPES))
    x = strided(shape, strides, dtype, offset=data.draw(st.integers(0, 9)))
    weight = data.draw(st.sampled_from([None, randn(shape[-1]), randn(2 * shape[-1], dtype=torch.float16)[::2]]))
    offset = data.draw(st.sampled_from([0.0, 1.0]))
    # An eps that no row of a single element comes near: its output is +-1 with no cancellation.
    y = rms_norm(x, weight, 0.25, casting="gemma", offset=offset)
    assert_right(y, oracle(x, weight, 0.25, offset), dtype)
    assert_same_bits(y, rms_norm(x.contiguous(), weight, 0.25, casting="gemma", offset=offset))


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import rms_norm, routing
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    with routing.strict():
        assert torch.equal(rms_norm(x), rms_norm(x.contiguous()))
        assert torch.equal(rms_norm(x[2]), rms_norm(x[2].clone()))
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows that begin more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS = {
    "every_second_column": lambda dtype: randn(64, 512, dtype=dtype)[:, ::2],
    "transposed": lambda dtype: randn(256, 64, dtype=dtype).t(),
    "split_of_qkv": lambda dtype: randn(5, 4096, dtype=dtype).split([2048, 1024, 1024], -1)[0].view(5, 16, 128),
    "expanded": lambda dtype: randn(1, 80, dtype=dtype).expand(7, 80),
    "middle_expanded": lambda dtype: randn(3, 1, 80, dtype=dtype).expand(3, 4, 80),
    "three_strides": lambda dtype: randn(4, 3, 10, 80, dtype=dtype)[:, :, ::2].transpose(0, 1),
    "one_row": lambda dtype: randn(80, dtype=dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_f07_any_layout_gives_the_bits_of_the_contiguous_copy(layout: str, dtype: torch.dtype) -> None:
    """Where the elements lie changes no bit of the output."""
    x = LAYOUTS[layout](dtype)
    weight = randn(2 * x.shape[-1], dtype=dtype, seed=1)[::2]
    y = rms_norm(x, weight)
    assert_same_bits(y, rms_norm(x.contiguous(), weight.contiguous()))
    assert_right(y, oracle(x, weight), dtype)


def test_two_strides_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of heads out of packed QKV is not copied first."""
    copies = checks.copies(monkeypatch)
    rms_norm(LAYOUTS["split_of_qkv"](torch.float16))
    rms_norm(LAYOUTS["middle_expanded"](torch.float16))
    assert copies == []
    rms_norm(LAYOUTS["three_strides"](torch.float16))
    assert copies == [(3, 4, 5, 80)]


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    rows, columns = 3, 80
    base, weight = randn(1 + rows * columns, dtype=torch.float16), randn(1 + columns, dtype=torch.float16)
    plans = []
    for start, of_weight in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        x = base[start : start + rows * columns].view(rows, columns)
        w = weight[of_weight : of_weight + columns]
        assert_right(rms_norm(x, w), oracle(x, w), x.dtype)
        plans.append(len(op._plans))
    assert plans == [1, 2, 3, 4, 4]


def test_degenerate_strides_do_not_reach_the_output() -> None:
    """A dimension of size one may have any stride; the output's strides are those of a new tensor."""
    x = randn(108).as_strided((1, 8), (100, 1))
    assert rms_norm(x).stride() == (8, 1)


# Numerics.


@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_f15_squares_beyond_fp16_do_not_overflow(value: float) -> None:
    """The mean square is taken in fp32, so large fp16 values still give ones."""
    x = torch.full((1, 4096), value, dtype=torch.float16, device=DEVICE)
    assert_same_bits(rms_norm(x), torch.ones_like(x))


def test_f15_one_outlier_is_normalised_like_any_value() -> None:
    """A single 7600 among zeros comes out as sqrt(N)."""
    x = torch.zeros(1, 4096, dtype=torch.float16, device=DEVICE)
    x[0, 17] = 7600
    expected = torch.zeros_like(x)
    expected[0, 17] = 64
    assert_same_bits(rms_norm(x), expected)


@overflowing
@pytest.mark.parametrize(("value", "expected"), [(1e25, 0.0), (1e19, 0.0), (1e17, 1.0)])
@pytest.mark.parametrize("columns", [64, 5000])
def test_f16_squares_beyond_fp32_do_as_pytorch_does(value: float, expected: float, columns: int) -> None:
    """Where the sum of squares leaves the range of fp32 a row becomes zeros, as in PyTorch, and never NaN."""
    x = torch.full((2, columns), value, device=DEVICE)
    y = rms_norm(x)
    assert torch.allclose(y, op.rms_norm_reference(x))
    assert torch.allclose(y, torch.full_like(x, expected))


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f18_weight_and_input_may_differ_in_dtype(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    """The output and dx have x's dtype and dweight has the weight's; no pair gives NaN."""
    x = randn(4, 80, dtype=dtype)
    weight = None if weight_dtype is None else randn(80, dtype=weight_dtype, seed=1)
    assert_right(rms_norm(x, weight), oracle(x, weight), dtype)
    tensors = [tensor.requires_grad_() for tensor in (x, weight) if tensor is not None]
    found = checks.gradients(rms_norm, torch.sum, *tensors)
    assert [grad.dtype for grad in found] == [tensor.dtype for tensor in tensors]
    assert all(grad.isfinite().all() for grad in found)


def test_llama_rounds_before_the_weight_and_gemma_after() -> None:
    """The two castings are the eager forms of the two models, bit for bit."""
    x, weight = randn(64, 256, dtype=torch.float16), randn(256, dtype=torch.float16, seed=1)
    llama, gemma = rms_norm(x, weight), rms_norm(x, weight, casting="gemma", offset=1.0)
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    # The sum runs in another order than torch's, so a rounding in sixteen may fall on the other side.
    assert (llama == eager(x, weight)).double().mean() > 0.95
    assert (gemma == (wide * (1.0 + weight.float())).half()).double().mean() > 0.95
    assert (llama == rms_norm(x, weight, casting="gemma")).double().mean() < 0.9


# Gradients.


@pytest.mark.parametrize("loss", LOSSES)
def test_f08_strided_and_expanded_gradients_are_the_references(loss: str) -> None:
    """Whatever the layout of the incoming gradient, dx and dweight are those of float64."""
    x, weight = randn(2, 16, 256).requires_grad_(), randn(256, seed=1).requires_grad_()
    found = checks.gradients(rms_norm, LOSSES[loss], x, weight)
    wide = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    expected = checks.gradients(oracle, LOSSES[loss], *wide)
    assert all(torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool]) -> None:
    """The graph is never cut, and what asks for no gradient gets none."""
    x, weight = randn(3, 80).requires_grad_(asked[0]), randn(80).requires_grad_(asked[1])
    y = rms_norm(x, weight)
    assert y.requires_grad == any(asked)
    if any(asked):
        y.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == asked


def test_f49_no_gradient_is_wanted_under_no_grad() -> None:
    """Parameters in no_grad or inference mode are served by Triton and give a plain output."""
    x, weight = randn(3, 80), torch.nn.Parameter(randn(80))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = rms_norm(x, weight)
        assert not y.requires_grad
        assert_right(y, oracle(x, weight.detach()), x.dtype)


@pytest.mark.parametrize(("casting", "offset"), [("llama", 0.0), ("llama", 1.0), ("gemma", 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_casting_and_offset_are_those_of_float64(
    dtype: torch.dtype, casting: str, offset: float
) -> None:
    """A large eps, an offset and either casting reach the backward pass as they reached the forward pass."""
    x, weight, dy = randn(5, 80, dtype=dtype), randn(80, dtype=dtype, seed=1), randn(5, 80, dtype=dtype, seed=2)
    pairs = []
    functions: list[tuple[Any, torch.dtype]] = [(rms_norm, dtype), (op.rms_norm_reference, torch.float64)]
    for function, wide in functions:
        leaves = [tensor.to(wide).requires_grad_() for tensor in (x.detach(), weight.detach())]
        function(*leaves, eps=0.5, casting=casting, offset=offset).backward(dy.to(wide))
        pairs.append([leaf.grad for leaf in leaves])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for found, expected in zip(*pairs, strict=True):
        assert found.dtype == dtype
        assert torch.allclose(found.double(), expected, rtol=limit, atol=limit)


def test_f50_one_gradient_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass is told exactly what is wanted, also by autograd.grad of one input out of two."""
    wanted = []

    def recording(*tensors: Any, want_x: bool, want_weight: bool, **how: Any) -> object:
        wanted.append((want_x, want_weight))
        return rms_norm_backward(*tensors, want_x=want_x, want_weight=want_weight, **how)

    monkeypatch.setattr(op, "rms_norm_backward", recording)
    for asked in ((True, True), (True, False), (False, True)):
        rms_norm(randn(3, 80).requires_grad_(asked[0]), randn(80).requires_grad_(asked[1])).sum().backward()
    assert wanted == [(True, True), (True, False), (False, True)]


def test_f52_the_incoming_gradient_is_left_alone() -> None:
    """A gradient that the caller keeps, one row for all or lazily negated, is as it was after the backward pass."""
    for dy in (randn(80, seed=2).expand(3, 80), torch._neg_view(randn(3, 80, seed=2))):
        before, x = dy.clone(), randn(3, 80).requires_grad_()
        (found,) = torch.autograd.grad(rms_norm(x), x, dy)
        (expected,) = torch.autograd.grad(rms_norm(x), x, before)
        assert torch.equal(dy, before)
        assert_same_bits(found, expected)


# 2088 is no bf16, so the weight is fp32 there; the interpreter's truncation keeps 1 and 2048.
@dividing_by_zero
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
def test_f20_half_precision_rows_are_summed_in_fp32(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """An incoming 2048 and forty ones make 2088, where a running sum in fp16 or bf16 stays at 2048."""
    x = torch.ones(41, 16, dtype=dtype, device=DEVICE)
    weight = torch.ones(16, dtype=weight_dtype, device=DEVICE, requires_grad=True)
    dy = x.clone()
    dy[0] = 2048
    rms_norm(x, weight, 0.0).backward(dy)
    assert weight.grad is not None
    assert_same_bits(weight.grad, torch.full_like(weight, 2088.0))


def test_f53_an_input_changed_in_place_is_noticed() -> None:
    """The backward pass never computes from an x that was written over after the forward pass."""
    x = randn(3, 80).requires_grad_() * 1
    y = rms_norm(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_f54_activation_checkpointing_changes_no_gradient() -> None:
    """A checkpointed call gives the same bits as a plain one."""
    found = []
    for call in (rms_norm, lambda *leaves: checkpoint(rms_norm, *leaves, use_reentrant=False)):
        leaves = [randn(3, 80).requires_grad_(), randn(80, seed=1).requires_grad_()]
        call(*leaves).pow(2).sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for output, expected in zip(*found, strict=True):
        assert_same_bits(output, expected)


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    """It raises even where the incoming gradient needs none; the PyTorch form has the second derivative."""
    x = randn(3, 80).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^rms_norm: a second derivative .* call rms_norm_reference instead\.$"):
        torch.autograd.grad(rms_norm(x).sum(), x, create_graph=True)
    (dx,) = torch.autograd.grad(op.rms_norm_reference(x).sum(), x, create_graph=True)
    assert dx.requires_grad


def test_f49_what_triton_does_not_differentiate_leaves_it() -> None:
    """In strict mode float64 and per-sample gradients raise; else the PyTorch form gives them."""
    x = randn(3, 80)
    wide = x.double().requires_grad_()

    def each(rows: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: rms_norm(row).pow(3).sum()))(rows)

    with pytest.raises(routing.FallbackError, match=r"rms_norm: not served by Triton \(inputs: "):
        rms_norm(wide)
    with pytest.raises(routing.FallbackError, match=r"rms_norm: not served by Triton \(autograd: "):
        each(x)
    with routing.strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = each(x)
        rms_norm(wide).pow(3).sum().backward()
        assert wide.grad is not None
        assert torch.allclose(found.double(), wide.grad, atol=1e-4)
    routing.forget()


# Torch itself scripts a decomposition when forward mode first meets an operator.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_f49_forward_mode_tangents_are_not_cut() -> None:
    """A dual tensor comes out with its tangent."""
    with routing.strict(False), torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(randn(3, 80), randn(3, 80, seed=1))
        assert torch.autograd.forward_ad.unpack_dual(rms_norm(x)).tangent is not None


def test_a_lazily_negated_view_is_negated() -> None:
    """A view whose sign is still to be flipped is the tensor that it stands for."""
    x = torch._neg_view(randn(3, 80))
    assert_same_bits(rms_norm(x), rms_norm(x.resolve_neg()))


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool, dynamic: bool) -> None:
    """torch.compile meets no graph break, and the result is the eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, weight: rms_norm(x, weight) * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    weight = randn(80, seed=1)
    for rows in (1, 3):
        x = randn(rows, 80).requires_grad_(wants_grad)
        assert torch.equal(compiled(x, weight), rms_norm(x, weight) * 2)


@pytest.mark.parametrize("asked", [(True, True), (False, True)])
def test_f56_training_compiles_into_one_graph(asked: tuple[bool, bool]) -> None:
    """Compiled forward and backward passes give the gradients of the eager ones, served by Triton, no more of them."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, weight: rms_norm(x, weight, 0.5, casting="gemma", offset=1.0), fullgraph=True, backend="aot_eager"
    )
    x, weight = randn(3, 80).requires_grad_(asked[0]), randn(80, seed=1).requires_grad_(asked[1])
    found = checks.gradients(compiled, LOSSES["every_second"], x, weight)
    eager = checks.gradients(
        lambda x, weight: rms_norm(x, weight, 0.5, casting="gemma", offset=1.0), LOSSES["every_second"], x, weight
    )
    for output, expected, wanted in zip(found, eager, asked, strict=True):
        assert (output is not None) == wanted
        assert not wanted or torch.equal(output, expected)


def test_f56_a_batch_that_grows_recompiles_once() -> None:
    """After the second batch size the graph holds for every other, also for none."""
    assert checks.graphs_compiled(rms_norm, [(randn(rows, 80),) for rows in (4, 2, 5, 7, 0)]) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs, and the output is described as it would come."""
    x = torch.empty(6, 4, 160, dtype=dtype, device="meta")[:, :, ::2]
    y = rms_norm(x, torch.empty(80, device="meta"))
    assert (y.shape, y.dtype, y.stride(), y.is_meta) == ((6, 4, 80), dtype, (320, 80, 1), True)


@pytest.mark.parametrize("with_weight", [False, True])
def test_f56_torch_library_finds_the_op_sound(with_weight: bool) -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes, strided input included."""
    weight = randn(80) if with_weight else None
    for x in (randn(3, 80), randn(3, 160)[:, ::2]):
        torch.library.opcheck(op._rms_norm_op, (x, weight, 1e-6, "llama", 0.0))
    leaves = [None if tensor is None else tensor.requires_grad_() for tensor in (randn(3, 80), weight)]
    torch.library.opcheck(op._rms_norm_op, (*leaves, 1e-6, "gemma", 1.0))


def test_f56_meta_tensors_have_meta_gradients() -> None:
    """Training on the meta device describes both gradients and runs nothing."""
    x = torch.empty(6, 80, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(80, device="meta", requires_grad=True)
    rms_norm(x, weight).sum().backward()
    for leaf in (x, weight):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.is_meta) == (leaf.shape, leaf.dtype, True)


def test_f56_tensors_made_in_inference_mode_compile() -> None:
    """Inference-mode inputs go through the compiler like any other."""
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        x = randn(3, 80)
        assert torch.equal(compiled(x), rms_norm(x))


# Launch configurations.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 65, 128, 257, 1000])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_f60_every_kind_of_launch_is_right_alone(
    config: dict[str, int | str], columns: int, dtype: torch.dtype
) -> None:
    """Each kernel, rows a program, held part and kind of store gives the answer in NaN-filled memory, and no more."""
    x, untouched = amid_poison(randn(5, columns, dtype=dtype))
    weight = randn(columns, seed=1)
    with _launch.forced(config), check.poisoned():
        assert_right(rms_norm(x, weight), oracle(x, weight), dtype)
        assert_right(rms_norm(x, casting="gemma", offset=1.0), oracle(x), dtype)
    assert untouched()


# On a GPU.


def aligned_then_not(columns: int) -> None:
    base = randn(1 + 5 * columns, dtype=torch.float16)
    for start in (0, 1, 0):
        x = base[start : start + 5 * columns].view(5, columns)
        assert_right(rms_norm(x), oracle(x), x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [80, 1185, 4096, 8192])
def test_f10_misaligned_after_aligned_on_a_gpu(columns: int) -> None:
    """Aligned, shifted by one element, aligned again: three right results."""
    aligned_then_not(columns)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [128, 1000, 4096, 5121, 8192, 65536])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tracked_launches_are_right_on_a_gpu(columns: int, dtype: torch.dtype) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 included."""
    x, weight = randn(33, columns, dtype=dtype), randn(columns, dtype=dtype, seed=1)
    assert_right(rms_norm(x, weight, casting="gemma"), oracle(x, weight), dtype)


@pytest.mark.gpu
def test_f01_the_last_rows_of_a_large_tensor_on_a_gpu() -> None:
    """Rows whose elements lie beyond 2^31 equal the same rows alone."""
    x = torch.ones(524290, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = randn(2, 4096, dtype=torch.bfloat16)
    assert_same_bits(rms_norm(x)[-2:], rms_norm(x[-2:].clone()))


@pytest.mark.gpu
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured after a warm-up, a replay follows the inputs that were changed in place."""
    x = randn(16, 4096, dtype=torch.bfloat16)
    rms_norm(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x)
    x.copy_(randn(16, 4096, dtype=torch.bfloat16, seed=9))
    graph.replay()
    assert_same_bits(y, rms_norm(x))


@pytest.mark.gpu
def test_twenty_runs_give_the_same_bits() -> None:
    """Nothing depends on which block runs first."""
    x = randn(64, 8192, dtype=torch.float16)
    first = rms_norm(x)
    for _ in range(20):
        assert_same_bits(rms_norm(x), first)
