"""SwiGLU: closed forms, halves of one tensor, layouts, gradients, launches; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, LOSSES, amid_poison, assert_right, assert_same_bits, randn, strided
from torch.utils.checkpoint import checkpoint

from triton_kernel_lab import routing, swiglu, swiglu_packed
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward, swiglu_packed_backward

op = importlib.import_module("triton_kernel_lab.ops.swiglu")
# The interpreter computes with NumPy, which warns where a GPU is silent.
overflowing = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def oracle(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    wide = gate.double()
    return wide * torch.sigmoid(wide) * up.double()


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 63, 80, 1000, 5121])
@pytest.mark.parametrize("rows", [1, 3])
def test_f06_a_closed_gate_lets_nothing_through(rows: int, columns: int, dtype: torch.dtype) -> None:
    """swiglu(0, u) is exactly 0 in every column, and what lies beside the rows is left alone."""
    up, untouched = amid_poison(randn(rows, columns, dtype=dtype).abs())
    assert_same_bits(swiglu(torch.zeros_like(up), up), torch.zeros(rows, columns, dtype=dtype, device=DEVICE))
    assert untouched()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_open_gate_multiplies(dtype: torch.dtype) -> None:
    """silu(32) is 32 to 14 digits, so swiglu(32, u) is exactly 32 u."""
    up = randn(3, 80, dtype=dtype)
    assert_same_bits(swiglu(torch.full_like(up, 32.0), up), up * 32)


@overflowing
@pytest.mark.parametrize("gate", [-100.0, -1e4])
def test_a_gate_far_below_zero_closes_without_nan(gate: float) -> None:
    """exp(-gate) overflows to infinity, and the quotient is zero of the right sign."""
    up = torch.ones(2, 80, device=DEVICE)
    y = swiglu(torch.full_like(up, gate), up)
    assert not y.isnan().any()
    assert y.abs().max() < 1e-35


def test_swiglu_is_linear_in_up() -> None:
    """Twice the up half gives exactly twice the output, and its negative the negative."""
    gate, up = randn(3, 200), randn(3, 200, seed=1)
    assert_same_bits(swiglu(gate, up * 2), swiglu(gate, up) * 2)
    assert_same_bits(swiglu(gate, -up), -swiglu(gate, up))


def test_gates_of_both_signs_differ_by_the_identity() -> None:
    """silu(x) - silu(-x) = x."""
    gate = randn(3, 200)
    ones = torch.ones_like(gate)
    assert torch.allclose(swiglu(gate, ones) - swiglu(-gate, ones), gate, atol=1e-6)


@overflowing
def test_what_is_not_finite_comes_out_where_pytorch_has_it() -> None:
    """NaN and infinity propagate as in PyTorch."""
    gate, up = randn(4, 80), randn(4, 80, seed=1)
    gate[0, 3], gate[1, 4], gate[2, 5], up[3, 6] = math.nan, math.inf, -math.inf, math.inf
    y, expected = swiglu(gate, up), op.swiglu_reference(gate, up)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())


@overflowing
def test_f15_a_product_beyond_fp16_is_infinite_and_not_nan() -> None:
    """The product is formed in fp32 and rounds to infinity, as in PyTorch; in range it is right."""
    gate, up = (torch.tensor([values], dtype=torch.float16, device=DEVICE) for values in ((300.0, 6e4), (200.0, 3.0)))
    assert swiglu(gate, up).tolist() == [[60000.0, math.inf]]


# Shapes.


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("shape", [(0, 4096), (2, 0, 128), (2, 0)])
def test_f04_an_empty_tensor_gives_an_empty_one(shape: tuple[int, ...], warm: bool) -> None:
    """Zero rows or columns give the right empty shape and dtype and launch nothing, first call or not."""
    if warm:
        swiglu(randn(2, 128), randn(2, 128))
    gate = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    bound = len(_launch.launches())
    for tensor in (gate, gate.transpose(0, -1)):
        y = swiglu(tensor, tensor)
        assert (y.shape, y.dtype, y.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert swiglu_packed(gate).shape == (*shape[:-1], shape[-1] // 2)
    assert len(_launch.launches()) == bound


def test_f04_empty_tensors_have_empty_gradients() -> None:
    """The backward pass of no rows gives no rows."""
    gate = torch.empty(2, 0, 128, device=DEVICE, requires_grad=True)
    swiglu(gate, gate.detach()).sum().backward()
    assert gate.grad is not None
    assert gate.grad.shape == gate.shape


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the rank, sizes, strides and dtype, and however the halves differ in layout."""
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(1, 70))]
    dtype = data.draw(st.sampled_from(DTYPES))
    halves = []
    for _ in range(2):
        strides = [data.draw(st.sampled_from([0, 1, 3, 70, 97, 210])) for _ in shape[:-1]]
        strides.append(data.draw(st.sampled_from([1, 1, 1, 2, 3])))
        halves.append(strided(shape, strides, dtype, offset=data.draw(st.integers(0, 9))))
    gate, up = halves
    y = swiglu(gate, up)
    assert_right(y, oracle(gate, up), dtype)
    assert_same_bits(y, swiglu(gate.contiguous(), up.contiguous()))


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing, swiglu, swiglu_packed
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    gate, up = x[:, :32], x[:, 32:]
    with routing.strict():
        expected = swiglu(gate.contiguous(), up.contiguous())
        assert torch.equal(swiglu(gate, up), expected)
        assert torch.equal(swiglu(gate, up.contiguous()), expected)
        assert torch.equal(swiglu_packed(x), expected)
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows that begin more than 2^31 elements apart are read where they are, in either half."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS = {
    "contiguous": lambda dtype: randn(12, 4, 80, dtype=dtype),
    "every_second_column": lambda dtype: randn(12, 4, 160, dtype=dtype)[..., ::2],
    "columns_first": lambda dtype: randn(80, 12, 4, dtype=dtype).permute(1, 2, 0),
    "packed": lambda dtype: randn(12, 4, 160, dtype=dtype)[..., 80:],
    "rows_swapped": lambda dtype: randn(4, 12, 80, dtype=dtype).transpose(0, 1),
    "expanded": lambda dtype: randn(1, 1, 80, dtype=dtype).expand(12, 4, 80),
    "middle_expanded": lambda dtype: randn(12, 1, 80, dtype=dtype).expand(12, 4, 80),
}


@pytest.mark.parametrize("up_layout", LAYOUTS)
@pytest.mark.parametrize("gate_layout", LAYOUTS)
def test_f07_f12_halves_of_any_two_layouts(gate_layout: str, up_layout: str) -> None:
    """No half is read with the strides of the other: each pair gives the bits of contiguous copies."""
    gate, up = LAYOUTS[gate_layout](torch.float16), LAYOUTS[up_layout](torch.float16)
    y = swiglu(gate, up)
    assert_same_bits(y, swiglu(gate.contiguous(), up.contiguous()))
    assert_right(y, oracle(gate, up), gate.dtype)


def test_f12_rows_that_fold_at_different_dimensions() -> None:
    """Where one half folds its leading dimensions before the second and the other after it, copies are made."""
    gate = randn(2, 6, 5, 16)[:, ::2].expand(2, 3, 5, 16)
    up = randn(2, 3, 10, 16)[:, :, ::2]
    assert {op.row_layout(gate).inner, op.row_layout(up).inner} == {15, 5} or op.row_layout(gate) is not None
    assert_same_bits(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2), (5, 126), (3, 4, 160), (3, 10242), (2000,)])
def test_packed_equals_its_halves(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """swiglu_packed is swiglu of the first and second half, bit for bit."""
    both = randn(*shape, dtype=dtype)
    half = shape[-1] // 2
    y = swiglu_packed(both)
    assert_same_bits(y, swiglu(both[..., :half].contiguous(), both[..., half:].contiguous()))
    assert_right(y, oracle(*both.chunk(2, -1)), dtype)


def test_packed_halves_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half of a packed tensor is copied first."""
    copies = checks.copies(monkeypatch)
    swiglu_packed(randn(3, 4, 160))
    assert copies == []


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    base = [randn(1 + 3 * 80, dtype=torch.float16, seed=seed) for seed in (0, 1)]
    plans = []
    for starts in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        gate, up = (each[start : start + 240].view(3, 80) for each, start in zip(base, starts, strict=True))
        assert_right(swiglu(gate, up), oracle(gate, up), gate.dtype)
        plans.append(len(op._plans))
    assert plans == [1, 2, 3, 4, 4]


# Gradients.


@pytest.mark.parametrize("loss", LOSSES)
def test_f08_strided_and_expanded_gradients_are_the_references(loss: str) -> None:
    """Whatever the layout of the incoming gradient, both halves' gradients are those of float64."""
    gate, up = (randn(2, 16, 256, seed=seed).requires_grad_() for seed in (0, 1))
    found = checks.gradients(swiglu, LOSSES[loss], gate, up)
    wide = (tensor.detach().double().requires_grad_() for tensor in (gate, up))
    expected = checks.gradients(oracle, LOSSES[loss], *wide)
    assert all(torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool]) -> None:
    """The graph is never cut, and what asks for no gradient gets none."""
    gate, up = randn(3, 80).requires_grad_(asked[0]), randn(3, 80).requires_grad_(asked[1])
    y = swiglu(gate, up)
    assert y.requires_grad == any(asked)
    if any(asked):
        y.sum().backward()
    assert (gate.grad is not None, up.grad is not None) == asked


def test_f49_a_packed_tensor_gets_the_gradients_of_both_halves() -> None:
    """The gradient of a packed tensor holds the gate's and the up's side by side."""
    both = randn(3, 160).requires_grad_()
    (found,) = checks.gradients(swiglu_packed, torch.sum, both)
    halves = checks.gradients(swiglu, torch.sum, *(half.detach().requires_grad_() for half in both.chunk(2, -1)))
    assert_same_bits(found, torch.cat(halves, -1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_f18_gradients_have_the_dtype_of_their_tensors(dtype: torch.dtype) -> None:
    """Half-precision halves get half-precision gradients, none of them NaN."""
    halves = [randn(3, 80, dtype=dtype, seed=seed).requires_grad_() for seed in (0, 1)]
    found = checks.gradients(swiglu, torch.sum, *halves)
    assert [grad.dtype for grad in found] == [dtype, dtype]
    assert all(grad.isfinite().all() for grad in found)


def test_f50_one_gradient_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass is told exactly what is wanted."""
    wanted = []

    def recording(*tensors: torch.Tensor, want_gate: bool, want_up: bool) -> object:
        wanted.append((want_gate, want_up))
        return swiglu_backward(*tensors, want_gate=want_gate, want_up=want_up)

    monkeypatch.setattr(op, "swiglu_backward", recording)
    for asked in ((True, True), (True, False), (False, True)):
        swiglu(*(randn(3, 80).requires_grad_(each) for each in asked)).sum().backward()
    assert wanted == [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("function", [swiglu, swiglu_packed])
def test_f52_the_incoming_gradient_is_left_alone(function: Callable[..., torch.Tensor]) -> None:
    """A gradient that the caller keeps, dense, one row for all or lazily negated, is as it was."""
    x = randn(3, 80).requires_grad_()
    inputs = (x,) if function is swiglu_packed else (x, randn(3, 80, seed=1))
    width = function(*inputs).shape[-1]
    dense = randn(3, width, seed=2)
    for dy in (dense, dense[:1].expand(3, width), torch._neg_view(dense)):
        before = dy.clone()
        (found,) = torch.autograd.grad(function(*inputs), x, dy)
        (expected,) = torch.autograd.grad(function(*inputs), x, before)
        assert torch.equal(dy, before)
        assert_same_bits(found, expected)


def test_f54_activation_checkpointing_changes_no_gradient() -> None:
    """A checkpointed call gives the same bits as a plain one."""
    found = []
    for call in (swiglu_packed, lambda x: checkpoint(swiglu_packed, x, use_reentrant=False)):
        x = randn(3, 80).requires_grad_()
        call(x).pow(2).sum().backward()
        found.append(x.grad)
    assert_same_bits(*found)


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    """It raises even where the incoming gradient needs none."""
    x = randn(3, 80).requires_grad_()
    for y in (swiglu(x, x), swiglu_packed(x)):
        with pytest.raises(RuntimeError, match=r"^swiglu: a second derivative .* call swiglu_reference instead\.$"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("function", [lambda x: swiglu(x, x), swiglu_packed], ids=["halves", "packed"])
def test_f49_what_triton_does_not_differentiate_leaves_it(function: Callable[..., torch.Tensor]) -> None:
    """Float64 raises in strict mode; else the PyTorch form gives its gradient and its second."""
    wide = randn(2, 6).double().requires_grad_()
    with pytest.raises(routing.FallbackError, match=r"swiglu: not served by Triton \(inputs: "):
        function(wide)
    with routing.strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(function, wide)
        assert torch.autograd.gradgradcheck(function, wide)
    routing.forget()


def test_one_launch_writes_the_gradient_of_a_packed_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd adds no two tensors filled up with zeros: the packed kernel gives the gradient as it is."""
    given = []

    def recording(*tensors: torch.Tensor) -> torch.Tensor:
        given.append(swiglu_packed_backward(*tensors))
        return given[-1]

    monkeypatch.setattr(op, "swiglu_packed_backward", recording)
    x = randn(3, 4, 160).requires_grad_()
    (found,) = torch.autograd.grad(swiglu_packed(x).sum(), x)
    assert [gradient.data_ptr() for gradient in given] == [found.data_ptr()]


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool) -> None:
    """torch.compile meets no graph break in either form, and the result is the eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: swiglu_packed(x) + swiglu(x, x)[..., ::2], fullgraph=True, backend="eager")
    for rows in (1, 3):
        x = randn(rows, 80).requires_grad_(wants_grad)
        assert torch.equal(compiled(x), swiglu_packed(x) + swiglu(x, x)[..., ::2])


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)])
def test_f56_training_compiles_into_one_graph(asked: tuple[bool, bool]) -> None:
    """Compiled forward and backward passes give the gradients of the eager ones, served by Triton, no more of them."""

    def both(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up)[..., ::2] * swiglu_packed(gate)

    torch._dynamo.reset()
    halves = [randn(3, 80, seed=seed).requires_grad_(each) for seed, each in enumerate(asked)]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    found, eager = (checks.gradients(function, torch.sum, *halves) for function in (compiled, both))
    for output, expected, wanted in zip(found, eager, asked, strict=True):
        assert (output is not None) == wanted
        assert not wanted or torch.equal(output, expected)


@pytest.mark.parametrize("function", [swiglu, swiglu_packed])
def test_f56_a_batch_of_any_size_recompiles_no_more_than_expected(function: Callable[..., torch.Tensor]) -> None:
    """One row, two and none make a graph each at most, and every other number takes that of two."""
    inputs = 1 if function is swiglu_packed else 2
    batches = (tuple(randn(rows, 80, seed=seed) for seed in range(inputs)) for rows in (1, 2, 0, 5, 7, 1, 0))
    assert checks.graphs_compiled(function, batches) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs, and the output is described as it would come."""
    y = swiglu_packed(torch.empty(6, 4, 160, dtype=dtype, device="meta"))
    assert (y.shape, y.dtype, y.stride(), y.is_meta) == ((6, 4, 80), dtype, (320, 80, 1), True)


def test_f56_torch_library_finds_the_op_sound() -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes, strided halves included."""
    for both in (randn(3, 160).chunk(2, -1), (randn(3, 160)[:, ::2], randn(3, 80))):
        torch.library.opcheck(op._swiglu_op, tuple(both))
    torch.library.opcheck(op._swiglu_op, (randn(3, 80).requires_grad_(), randn(3, 80)))
    torch.library.opcheck(op._swiglu_packed_op, (randn(3, 160)[:, :80].requires_grad_(),))


# Launch configurations.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 17, 256, 300])
@pytest.mark.parametrize("block", [16, 128, 512])
def test_f60_every_block_is_right_alone(block: int, columns: int, dtype: torch.dtype) -> None:
    """Dense or by rows, one block or several with a rest: the answer, in NaN-filled memory, and nothing else."""
    (gate, gate_untouched), (up, up_untouched) = (
        amid_poison(randn(3, columns, dtype=dtype, seed=seed)) for seed in (0, 1)
    )
    with _launch.forced({"block": block, "num_warps": 4}), check.poisoned():
        assert_right(swiglu(gate, up), oracle(gate, up), dtype)
        assert_right(swiglu(gate.contiguous(), up.contiguous()), oracle(gate, up), dtype)
    assert gate_untouched()
    assert up_untouched()


# Errors.


@pytest.mark.parametrize(
    ("gate", "up", "kind", "sentence"),
    [
        ((2, 8), (2, 9), ValueError, "swiglu: up: expected the shape of gate, (2, 8), got (2, 9)."),
        ((2, 8), (1, 8), ValueError, "swiglu: up: expected the shape of gate, (2, 8), got (1, 8)."),
        ((), (), ValueError, "swiglu: gate: expected at least one dimension, got a scalar."),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    gate: tuple[int, ...], up: tuple[int, ...], kind: type[Exception], sentence: str
) -> None:
    """Shapes are never broadcast: one sentence names argument, expected and found."""
    with pytest.raises(kind) as caught:
        swiglu(torch.zeros(gate, device=DEVICE), torch.zeros(up, device=DEVICE))
    assert str(caught.value) == sentence


def test_dtypes_that_differ_or_are_no_floats_are_named() -> None:
    """Halves of two dtypes, or of integers, are a TypeError before anything is launched."""
    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(TypeError, match=r"^swiglu: up: expected the dtype of gate, torch.float32, got torch.float16.$"):
        swiglu(x, x.half())
    with pytest.raises(TypeError, match=r"^swiglu: gate: expected a floating-point tensor, got torch.int32.$"):
        swiglu(x.int(), x.int())


@pytest.mark.parametrize("shape", [(2, 7), (1,), ()])
def test_an_odd_packed_dimension_is_named(shape: tuple[int, ...]) -> None:
    """A packed tensor that has no two halves is refused."""
    with pytest.raises(ValueError, match=r"^swiglu: gate_up: expected an even last dimension, got "):
        swiglu_packed(torch.zeros(shape, device=DEVICE))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [80, 1185, 4096])
def test_f10_misaligned_after_aligned_on_a_gpu(columns: int) -> None:
    """Aligned, shifted by one element, aligned again: three right results."""
    base, up = randn(1 + 5 * columns, dtype=torch.float16), randn(5, columns, dtype=torch.float16)
    for start in (0, 1, 0):
        gate = base[start : start + 5 * columns].view(5, columns)
        assert_right(swiglu(gate, up), oracle(gate, up), gate.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 1024), (17, 1000), (512, 4096), (2048, 4096)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tracked_launches_are_right_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 included, dense and packed."""
    gate, up = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    assert_right(swiglu(gate, up), oracle(gate, up), dtype)
    assert_right(swiglu_packed(torch.cat([gate, up], -1)), oracle(gate, up), dtype)


@pytest.mark.gpu
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured after a warm-up, both forms follow inputs that were changed in place."""
    gate, up = (randn(16, 4096, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    packed = randn(16, 8192, dtype=torch.bfloat16)
    swiglu(gate, up)
    swiglu_packed(packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = swiglu(gate, up), swiglu_packed(packed)
    for seed, tensor in enumerate((gate, up, packed), start=7):
        tensor.copy_(randn(*tensor.shape, dtype=torch.bfloat16, seed=seed))
    for _ in range(2):
        graph.replay()
        for output, halves in zip(found, ((gate, up), packed.chunk(2, -1)), strict=True):
            assert_same_bits(output, swiglu(*halves))
            assert_right(output, oracle(*halves), torch.bfloat16)
