"""The gradients of SwiGLU: closed forms, halves of one tensor, layouts; on the GPU where there is one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import operator_checks as checks
import pytest
import torch
from operator_checks import DEVICE, DTYPES, amid_poison, assert_right, assert_same_bits, randn

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops.swiglu import swiglu_reference
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward, swiglu_packed_backward

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


def both(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dgate, dup = swiglu_backward(dy, gate, up)
    assert dgate is not None
    assert dup is not None
    return dgate, dup


def oracle(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """Both gradients by automatic differentiation of the formula in float64."""
    wide = [tensor.double().requires_grad_() for tensor in (gate, up)]
    (wide[0] * torch.sigmoid(wide[0]) * wide[1]).backward(dy.double())
    return [tensor.grad for tensor in wide if tensor.grad is not None]


def assert_gradients(found: tuple[torch.Tensor, ...], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for output, reference in zip(found, expected, strict=True):
        assert_right(output, reference, dtype)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("columns", [1, 63, 128, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f06_gradients_of_any_width_and_block(dtype: torch.dtype, columns: int, block: int) -> None:
    """Dense or by rows, one block or several with a rest: the answer, and nothing beside the rows is touched."""
    tensors = [randn(3, columns, dtype=dtype, seed=seed) for seed in range(3)]
    amid = [amid_poison(tensor) for tensor in tensors]
    with _launch.forced({"block": block, "num_warps": 4}):
        assert_gradients(both(*tensors), oracle(*tensors), dtype)
        for found, dense in zip(both(*(tensor for tensor, _ in amid)), both(*tensors), strict=True):
            assert_same_bits(found, dense)
    assert all(untouched() for _, untouched in amid)


def test_an_open_gate_passes_the_gradient_on() -> None:
    """silu(32) is 32 and its slope 1 to 14 digits: dup is 32 dy and dgate is dy up."""
    dy, up = randn(3, 80), randn(3, 80, seed=1)
    dgate, dup = both(dy, torch.full_like(dy, 32.0), up)
    assert_same_bits(dup, dy * 32)
    assert_same_bits(dgate, dy * up)


@overflowing
def test_a_closed_gate_has_no_slope() -> None:
    """Far below zero both gradients are zero and not NaN, though exp overflows."""
    dy = torch.ones(2, 80, device=DEVICE)
    for gradient in both(dy, torch.full_like(dy, -1e4), dy):
        assert not gradient.any()


@overflowing
def test_what_is_not_finite_comes_out_where_pytorch_has_it() -> None:
    """NaN and infinity propagate as in PyTorch."""
    dy, gate, up = (randn(6, 80, seed=seed) for seed in range(3))
    gate[0, 3], gate[1, 4], gate[2, 5], up[3, 6], dy[4, 7], dy[5, 8] = (
        math.nan,
        math.inf,
        -math.inf,
        math.inf,
        math.nan,
        -math.inf,
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    swiglu_reference(*leaves).backward(dy)
    for found, leaf in zip(both(dy, gate, up), leaves, strict=True):
        assert leaf.grad is not None
        assert torch.equal(found.isnan(), leaf.grad.isnan())
        assert torch.equal(found.isinf(), leaf.grad.isinf())


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: randn(2, 3, 40),
    "ones_expanded": lambda: torch.ones((), device=DEVICE).expand(2, 3, 40),
    "one_row_expanded": lambda: randn(40).expand(2, 3, 40),
    "every_second": lambda: randn(2, 3, 80)[..., ::2],
    "transposed": lambda: randn(3, 2, 40).transpose(0, 1),
    "half": lambda: randn(2, 3, 80)[..., 40:],
    "sliced": lambda: randn(2, 5, 40)[:, :3],
}


@pytest.mark.parametrize("gate_layout", LAYOUTS)
@pytest.mark.parametrize("dy_layout", LAYOUTS)
def test_f08_f12_f52_any_layouts(dy_layout: str, gate_layout: str) -> None:
    """No tensor is read with the strides of another, and the incoming gradient is as it was."""
    dy, gate, up = LAYOUTS[dy_layout](), LAYOUTS[gate_layout](), randn(2, 3, 40, seed=2)
    before = dy.clone()
    found = both(dy, gate, up)
    dense = both(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in (dy, gate, up)))
    assert all(torch.equal(*pair) for pair in zip(found, dense, strict=True))
    assert torch.equal(dy, before)
    assert_gradients(found, oracle(dy, gate, up), torch.float32)


def test_f12_rows_that_fold_at_different_dimensions() -> None:
    """Where leading dimensions fold before the second in one tensor and after it in another, copies are made."""
    dy = randn(2, 6, 5, 16)[:, ::2]
    gate, up = randn(2, 3, 10, 16)[:, :, ::2], randn(2, 3, 5, 16)
    assert_gradients(both(dy, gate, up), oracle(dy, gate, up), torch.float32)


@pytest.mark.parametrize("want", list(itertools.product([False, True], repeat=2)))
def test_f50_exactly_the_gradients_asked_for(want: tuple[bool, bool]) -> None:
    """What is not wanted is None and changes no bit of what is."""
    tensors = [randn(5, 80, seed=seed) for seed in range(3)]
    found = swiglu_backward(*tensors, want_gate=want[0], want_up=want[1])
    for wanted, output, expected in zip(want, found, both(*tensors), strict=True):
        assert (output is not None) == wanted
        if output is not None:
            assert_same_bits(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2), (5, 126), (3, 4, 160), (2000,), (0, 8), (3, 0)])
def test_packed_is_both_gradients_side_by_side(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One tensor holds the gate's gradient and then the up's, bit for bit; empty ones launch nothing."""
    packed, half = randn(*shape, dtype=dtype), shape[-1] // 2
    dy = randn(*shape[:-1], half, dtype=dtype, seed=1)
    found = swiglu_packed_backward(dy, packed)
    assert found.is_contiguous()
    assert_same_bits(found, torch.cat(both(dy, packed[..., :half].contiguous(), packed[..., half:].contiguous()), -1))


def test_packed_rows_need_not_lie_densely() -> None:
    """A packed tensor with strides of its own, and a gradient that is one row for all, give the same bits."""
    packed, dy = randn(3, 5, 90)[:, :3, :80], randn(40).expand(3, 3, 40)
    assert_same_bits(swiglu_packed_backward(dy, packed), swiglu_packed_backward(dy.contiguous(), packed.contiguous()))


@overflowing
def test_where_no_kernel_can_be_compiled_pytorch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The PyTorch form serves a signature whose kernel is refused, packed or not."""
    dy, gate, up = (randn(3, 40, seed=seed) for seed in range(3))
    expected = [gradient.double() for gradient in both(dy, gate, up)]
    _launch.forget_plans()
    monkeypatch.setattr(_checks, "refusal", lambda *tensors: ("inputs", "a test says so"))
    with routing.strict(False):
        with pytest.warns(routing.FallbackWarning, match="swiglu_backward"):
            found = both(dy, gate, up)
        assert_gradients(found, expected, torch.float32)
        assert_right(swiglu_packed_backward(dy, torch.cat([gate, up], -1)), torch.cat(expected, -1), torch.float32)
        assert swiglu_backward(dy, gate, up, want_up=False)[1] is None
    routing.forget()


F01 = """
import operator_checks as checks, torch
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward, swiglu_packed_backward
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    gate, up, dy = x[:, :32], x[:, 32:], x[:, 16:48]
    expected = swiglu_backward(*(tensor.contiguous() for tensor in (dy, gate, up)))
    assert all(map(torch.equal, swiglu_backward(dy, gate, up), expected))
    assert torch.equal(swiglu_packed_backward(dy, x), torch.cat(expected, -1))
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows that begin more than 2^31 elements apart are read where they are, in any of the three tensors."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 1024), (17, 1000), (512, 4096), (2048, 4096)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tracked_launches_are_right_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 included, dense and packed."""
    dy, gate, up = (randn(*shape, dtype=dtype, seed=seed) for seed in range(3))
    assert_gradients(both(dy, gate, up), oracle(dy, gate, up), dtype)
    packed = swiglu_packed_backward(dy, torch.cat([gate, up], -1))
    assert_right(packed, torch.cat(oracle(dy, gate, up), -1), dtype)


@pytest.mark.gpu
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured after a warm-up, both forms follow inputs that were changed in place, the incoming gradient too."""
    dy, gate, up = (randn(16, 4096, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    packed = torch.cat([gate, up], -1)
    both(dy, gate, up)
    swiglu_packed_backward(dy, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, together = both(dy, gate, up), swiglu_packed_backward(dy, packed)
    for seed, tensor in enumerate((dy, gate, up), start=7):
        tensor.copy_(randn(16, 4096, dtype=torch.bfloat16, seed=seed))
    packed.copy_(torch.cat([gate, up], -1))
    for _ in range(2):
        graph.replay()
        for output, expected in zip(found, both(dy, gate, up), strict=True):
            assert_same_bits(output, expected)
        assert_same_bits(together, swiglu_packed_backward(dy, packed))
        assert_gradients(found, oracle(dy, gate, up), torch.bfloat16)
        assert_right(together, torch.cat(oracle(dy, gate, up), -1), torch.bfloat16)
