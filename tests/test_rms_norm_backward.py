"""The gradients of RMSNorm: closed forms, dtypes, layouts, sums over rows; on the GPU where there is one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import operator_checks as checks
import pytest
import torch
from operator_checks import DEVICE, DTYPES, INTERPRETED, assert_right, assert_same_bits, randn

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops.rms_norm import rms_norm_reference
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward

ROWS = {"kernel": "rows", "rows": 2, "programs": 3, "stages": 1, "num_warps": 4}
TILES = {"kernel": "tiles", "block": 32, "programs": 3, "stages": 1, "num_warps": 4}
SUM = {"sum_columns": 32, "sum_rows": 4, "sum_warps": 4}
CONFIGS = pytest.mark.parametrize("config", [ROWS | SUM, TILES | SUM], ids=["rows", "tiles"])


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def oracle(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, offset: float = 0.0
) -> list[torch.Tensor | None]:
    """Both gradients in float64, of the formula that rounds nothing."""
    wide = [None if tensor is None else tensor.double().requires_grad_() for tensor in (x, weight)]
    assert wide[0] is not None
    y = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + eps)
    (y if wide[1] is None else y * (wide[1] + offset)).backward(dy.double())
    return [None if tensor is None else tensor.grad for tensor in wide]


def assert_gradients(
    found: tuple[torch.Tensor | None, ...], expected: list[torch.Tensor | None], *sources: torch.Tensor | None
) -> None:
    """Each gradient is there, has the dtype of its tensor, and is right; None where there is none."""
    for output, reference, source in zip(found, expected, sources, strict=True):
        assert (output is None) == (reference is None)
        if output is not None and reference is not None and source is not None:
            assert_right(output, reference, source.dtype)


def assert_same(output: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """The same bits; on a GPU, where a product and a sum may be fused in one kernel and not in another, to rounding."""
    assert output is not None
    assert expected is not None
    if INTERPRETED:
        assert_same_bits(output, expected)
    else:
        assert_right(output, expected.double(), output.dtype)


@CONFIGS
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 80), (5, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f18_gradients_of_any_pair_of_dtypes(
    config: dict[str, object], rows: int, columns: int, dtype: torch.dtype
) -> None:
    """dx has x's dtype and dweight the weight's, whichever they are; with no weight there is one gradient."""
    x, dy = randn(rows, columns, dtype=dtype), randn(rows, columns, dtype=dtype, seed=1)
    for weight in (None, *(randn(columns, dtype=other) for other in DTYPES)):
        with _launch.forced(config):
            found = rms_norm_backward(dy, x, weight, 0.5, casting="gemma")
        assert_gradients(found, oracle(dy, x, weight, 0.5), x, weight)


@CONFIGS
def test_llama_rounds_what_the_weight_multiplied(config: dict[str, object]) -> None:
    """dweight is the sum of dy times the normalised value as the forward pass rounded it; gemma rounds nothing."""
    x, weight = randn(1, 80, dtype=torch.float16), randn(80)
    normed = rms_norm_reference(x, None)[0]
    found = {}
    for casting in ("llama", "gemma"):
        with _launch.forced(config):
            _, dw = rms_norm_backward(torch.ones_like(x), x, weight, 1e-6, casting=casting)
        assert dw is not None
        assert_right(dw.half(), normed.double(), torch.float16)
        found[casting] = dw
    assert torch.equal(found["llama"], found["llama"].half().float())
    assert not torch.equal(found["gemma"], found["gemma"].half().float())


@CONFIGS
def test_the_offset_belongs_to_the_gain(config: dict[str, object]) -> None:
    """With a weight of zeros and offset 1, dx is that of no weight; dweight does not depend on the offset."""
    x, dy = randn(5, 80), randn(5, 80, seed=1)
    with _launch.forced(config):
        dx, dw = rms_norm_backward(dy, x, torch.zeros(80, device=DEVICE), 1e-6, offset=1.0)
        plain, _ = rms_norm_backward(dy, x, None, 1e-6)
        _, other = rms_norm_backward(dy, x, torch.ones(80, device=DEVICE), 1e-6)
    assert_same(dx, plain)
    assert_same(dw, other)


@CONFIGS
def test_dx_is_orthogonal_to_x(config: dict[str, object]) -> None:
    """The norm does not see the length of x: with eps 0 each row of dx has no part along x."""
    x, dy = randn(5, 80), randn(5, 80, seed=1)
    with _launch.forced(config):
        dx, _ = rms_norm_backward(dy, x, randn(80), 0.0)
    assert dx is not None
    assert ((dx * x).sum(-1).abs() < 1e-5 * dx.norm(dim=-1) * x.norm(dim=-1)).all()


# The interpreter's truncation to bf16 keeps 1 and 2048, and the sum is stored in fp32.
@CONFIGS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f20_rows_are_summed_in_fp32(config: dict[str, object], dtype: torch.dtype) -> None:
    """2048 and forty ones make 2088, where a running sum in fp16 or bf16 stays at 2048."""
    ones = torch.ones(41, 16, dtype=dtype, device=DEVICE)
    dy = ones.clone()
    dy[0] = 2048
    with _launch.forced(config):
        _, dw = rms_norm_backward(dy, ones, torch.ones(16, device=DEVICE), 0.0)
    assert dw is not None
    assert_same_bits(dw, torch.full((16,), 2088.0, device=DEVICE))


@CONFIGS
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 13])
def test_f21_every_part_is_written_or_left_out(
    config: dict[str, object], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the rows are to the programs, no memory is read that no program wrote, nor a row counted twice."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    x, dy, weight = randn(rows, 40), randn(rows, 40, seed=1), randn(40)
    with _launch.forced(config):
        assert_gradients(rms_norm_backward(dy, x, weight, 0.0), oracle(dy, x, weight, 0.0), x, weight)


@CONFIGS
@pytest.mark.parametrize("want", list(itertools.product([False, True], repeat=2)))
def test_f50_exactly_the_gradients_asked_for(config: dict[str, object], want: tuple[bool, bool]) -> None:
    """What is not wanted is None and does not change what is."""
    x, dy, weight = randn(5, 80), randn(5, 80, seed=1), randn(80)
    with _launch.forced(config):
        both = rms_norm_backward(dy, x, weight, 1e-6)
        found = rms_norm_backward(dy, x, weight, 1e-6, want_x=want[0], want_weight=want[1])
    for wanted, output, expected in zip(want, found, both, strict=True):
        assert (output is not None) == wanted
        if wanted:
            assert_same(output, expected)


@CONFIGS
@pytest.mark.parametrize("layout", ["dense", "expanded"])
def test_a_second_gradient_of_x_is_added_before_the_rounding(config: dict[str, object], layout: str) -> None:
    """dx is the sum of both ways in fp32, rounded once, and the second gradient is as it was; dweight has no part."""
    x, dy, weight = randn(5, 80, dtype=torch.float16), randn(5, 80, dtype=torch.float16, seed=1), randn(80)
    plus = randn(5, 80, dtype=torch.float16, seed=2)
    plus = plus if layout == "dense" else plus[:1].expand(5, 80)
    before = plus.clone()
    with _launch.forced(config):
        dx, dw = rms_norm_backward(dy, x, weight, 1e-6, plus=plus)
        _, alone = rms_norm_backward(dy, x, weight, 1e-6)
        assert rms_norm_backward(dy, x, weight, 1e-6, plus=plus, want_x=False)[0] is None
    wide, _ = oracle(dy, x, weight)
    assert dx is not None
    assert wide is not None
    assert_right(dx, wide + plus.double(), x.dtype)
    assert_same(dw, alone)
    assert torch.equal(plus, before)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "ones_expanded": lambda: torch.ones((), device=DEVICE).expand(2, 3, 40),
    "one_row_expanded": lambda: randn(40).expand(2, 3, 40),
    "every_second": lambda: randn(2, 3, 80)[..., ::2],
    "transposed": lambda: randn(3, 2, 40).transpose(0, 1),
    "columns_first": lambda: randn(40, 2, 3).permute(1, 2, 0),
    "sliced": lambda: randn(2, 5, 40)[:, :3],
}


@CONFIGS
@pytest.mark.parametrize("x_layout", ["one_row_expanded", "transposed", "columns_first", "sliced"])
@pytest.mark.parametrize("dy_layout", LAYOUTS)
def test_f08_f52_any_layout_of_dy_and_x(config: dict[str, object], dy_layout: str, x_layout: str) -> None:
    """Each pair gives the bits of dense copies, and the incoming gradient is as it was."""
    dy, x, weight = LAYOUTS[dy_layout](), LAYOUTS[x_layout](), randn(80)[::2]
    before = dy.clone()
    with _launch.forced(config):
        found = rms_norm_backward(dy, x, weight, 1e-6)
        dense = rms_norm_backward(dy.clone(memory_format=torch.contiguous_format), x.contiguous(), weight, 1e-6)
    for output, expected in zip(found, dense, strict=True):
        assert_same(output, expected)
    assert torch.equal(dy, before)
    assert_gradients(found, oracle(dy, x, weight), x, weight)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (3, 0)])
def test_f04_no_rows_give_a_gradient_of_zeros(shape: tuple[int, ...]) -> None:
    """dx is empty, and dweight is zeros rather than what the memory held."""
    x, weight = torch.empty(shape, device=DEVICE), torch.ones(shape[-1], device=DEVICE)
    dx, dw = rms_norm_backward(x, x, weight, 1e-6)
    assert dx is not None
    assert dw is not None
    assert dx.shape == shape
    assert_same_bits(dw, torch.zeros_like(weight))
    assert _launch.launches() == []


def test_f06_what_lies_beside_the_rows_is_left_alone() -> None:
    """Large values before and after each row of x and dy are neither read nor written."""
    weight = randn(63)
    (x, x_untouched), (dy, dy_untouched) = (checks.amid_poison(randn(5, 63, seed=seed)) for seed in (0, 1))
    for config in (ROWS | SUM, TILES | SUM):
        with _launch.forced(config):
            assert_gradients(rms_norm_backward(dy, x, weight, 1e-6), oracle(dy, x, weight), x, weight)
    assert x_untouched()
    assert dy_untouched()


@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize(("shape", "with_weight"), [((2, 3, 80), True), ((80,), True), ((3, 80), False)])
def test_where_no_kernel_can_be_compiled_pytorch_gives_the_same(
    casting: str, shape: tuple[int, ...], with_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The PyTorch form serves a signature whose kernel is refused, with both gradients and the same roundings."""
    x, dy = (randn(*shape, dtype=torch.float16, seed=seed) for seed in (0, 1))
    weight = randn(80) if with_weight else None
    kernel = rms_norm_backward(dy, x, weight, 1e-6, casting=casting, offset=1.0)
    _launch.forget_plans()
    monkeypatch.setattr(_checks, "refusal", lambda *tensors: ("inputs", "a test says so"))
    with routing.strict(False), pytest.warns(routing.FallbackWarning, match="rms_norm_backward"):
        found = rms_norm_backward(dy, x, weight, 1e-6, casting=casting, offset=1.0)
    expected = [None if output is None else output.double() for output in kernel]
    assert_gradients(found, expected, x, weight)
    routing.forget()


F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward
x = checks.far_apart(32)
if x is None:
    print("no memory")
else:
    weight, sums = checks.randn(32), {"sum_columns": 32, "sum_rows": 4, "sum_warps": 4}
    for config in ({"kernel": "rows", "rows": 2}, {"kernel": "tiles", "block": 16}):
        with _launch.forced({**config, **sums, "programs": 2, "stages": 1, "num_warps": 4}):
            dense = x.contiguous() if not x.is_contiguous() else x.clone()
            expected = rms_norm_backward(dense, dense, weight, 1e-6)
            for dy, rows in ((x, dense), (dense, x)):
                found = rms_norm_backward(dy, rows, weight, 1e-6)
                assert all(torch.allclose(*pair, rtol=1e-3, atol=1e-4) for pair in zip(found, expected)), config
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows of x and of dy that begin more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (131, 1000), (132, 4096), (133, 8192), (37, 16384), (17, 65536)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f21_f22_tracked_launches_are_right_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What the launch table chooses gives both gradients, bf16 included, the same bits each time and in any mode."""
    x, dy, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[1], dtype=dtype)
    found = rms_norm_backward(dy, x, weight, 1e-6, casting="gemma")
    assert_gradients(found, oracle(dy, x, weight), x, weight)
    for mode in (contextlib.nullcontext, checks.deterministic):
        with mode():
            runs = [rms_norm_backward(dy, x, weight, 1e-6, casting="gemma") for _ in range(19)]
        for output, again in (pair for run in runs for pair in zip(found, run, strict=True)):
            assert output is not None
            assert again is not None
            assert_same_bits(again, output)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [None, ROWS | SUM, TILES | SUM], ids=["chosen", "rows", "tiles"])
def test_f62_a_graph_replays_on_new_inputs(config: dict[str, object] | None) -> None:
    """Captured after a warm-up, all launches of a backward pass follow inputs that were changed in place."""
    x, dy = (randn(67, 4096, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    weight = randn(4096, dtype=torch.bfloat16, seed=2)
    with contextlib.nullcontext() if config is None else _launch.forced(config):
        rms_norm_backward(dy, x, weight, 1e-6)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = rms_norm_backward(dy, x, weight, 1e-6)
        for seed, tensor in enumerate((dy, x, weight), start=7):
            tensor.copy_(randn(*tensor.shape, dtype=torch.bfloat16, seed=seed))
        for _ in range(2):
            graph.replay()
            for output, expected in zip(found, rms_norm_backward(dy, x, weight, 1e-6), strict=True):
                assert output is not None
                assert expected is not None
                assert_same_bits(output, expected)
