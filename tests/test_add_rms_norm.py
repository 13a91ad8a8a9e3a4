"""Add and RMSNorm: the rounded sum, in place and not, aliases, layouts, gradients; on the GPU where there is one."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, LOSSES, amid_poison, assert_right, assert_same_bits, randn, strided
from torch.utils.checkpoint import checkpoint

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm, add_rms_norm_
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward

op = importlib.import_module("triton_kernel_lab.ops.add_rms_norm")
Pair = tuple[torch.Tensor, torch.Tensor]
Form = Callable[..., Pair]
# The interpreter computes with NumPy, which warns where a GPU is silent.
not_finite = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
)

CONFIGS = [
    *({"kernel": "rows", "rows": rows, "num_warps": 4, "ordered": rows % 2} for rows in (1, 2, 16)),
    {"kernel": "streamed", "block": 128, "num_warps": 4},
]


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def oracle(
    total: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> torch.Tensor:
    wide = total.double()
    y = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * (weight.double() + offset)


def in_place(x: torch.Tensor, residual: torch.Tensor, *rest: Any, **more: Any) -> Pair:
    """The in-place form on dense copies, and the proof that it is these that it returns."""
    x, residual = x.contiguous().clone(), residual.contiguous().clone()
    normed, summed = add_rms_norm_(x, residual, *rest, **more)
    assert normed is x
    assert summed is residual
    return normed, summed


FORMS = pytest.mark.parametrize("form", [add_rms_norm, in_place], ids=["functional", "in_place"])


# The sum.


@not_finite
@FORMS
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_that_of_eager_pytorch_bit_for_bit(form: Form, dtype: torch.dtype) -> None:
    """Ties, subnormals, signed zeros and what is not finite are rounded as x + residual rounds them."""
    special = [0.0, -0.0, 1.0, -1.0, 2048.0, 6e-8, -6e-8, 3e-5, 65504.0, -65504.0, 1 / 3, math.inf, -math.inf, math.nan]
    pairs = torch.tensor(list(itertools.product(special, special)), device=DEVICE).to(dtype)
    some, other = randn(7, 196, dtype=dtype), randn(7, 196, dtype=dtype, seed=1) * 2.0**-8
    x = torch.cat([pairs[:, 0][None], some, other])
    residual = torch.cat([pairs[:, 1][None], other, some])
    summed = form(x, residual)[1]
    assert torch.equal(summed.isnan(), (x + residual).isnan())
    assert_same_bits(summed.nan_to_num(nan=7.0), (x + residual).nan_to_num(nan=7.0))


@FORMS
def test_the_variance_is_that_of_the_rounded_sum(form: Form) -> None:
    """4096 + 2 is 4096 in fp16, so a row of such sums and one 4096 + 0 is constant, and comes out as ones."""
    x = torch.full((2, 64), 4096.0, dtype=torch.float16, device=DEVICE)
    residual = torch.full_like(x, 2.0)
    residual[:, 5] = 0.0
    normed, summed = form(x, residual)
    assert_same_bits(summed, x)
    assert_same_bits(normed, torch.ones_like(x))


@not_finite
@FORMS
def test_f15_an_overflowing_sum_follows_eager(form: Form) -> None:
    """40000 + 40000 is infinite in fp16: inf in the sum, NaN at its place, zeros beside it, nothing in other rows."""
    x = torch.full((3, 80), 150.0, dtype=torch.float16, device=DEVICE)
    x[1, 7] = 40000.0
    normed, summed = form(x, x)
    expected = torch.ones_like(x)
    expected[1], expected[1, 7] = 0.0, math.nan
    assert summed[1, 7] == math.inf
    assert torch.equal(normed.isnan(), expected.isnan())
    assert_same_bits(normed.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    # The other sums are 300, whose squares pass fp16 and not fp32.
    assert summed[0].eq(300.0).all()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(("value", "expected"), [(1e25, 0.0), (1e18, 1.0)])
def test_f16_squares_beyond_fp32_do_as_pytorch_does(value: float, expected: float) -> None:
    """Where the sum of squares leaves the range of fp32 a row becomes zeros, never NaN."""
    x = torch.full((2, 64), value / 2, device=DEVICE)
    normed, _ = add_rms_norm(x, x)
    assert torch.allclose(normed, torch.full_like(x, expected))


@not_finite
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_f23_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    """NaN and infinity come out where the PyTorch form has them, and nowhere else."""
    x, residual = randn(3, 200), randn(3, 200, seed=1)
    residual[1, 7] = bad
    normed, summed = add_rms_norm(x, residual)
    expected = op.add_rms_norm_reference(x, residual)
    assert torch.equal(normed.isnan(), expected[0].isnan())
    assert torch.equal(summed.isfinite(), expected[1].isfinite())
    assert normed[[0, 2]].isfinite().all()


# Closed forms and properties.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 2), (3, 63), (17, 80), (3, 1000), (1, 5121), (3, 5121)])
def test_f06_sums_of_one_give_one_value_in_every_column(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Of 1/4 + 3/4 every output is 1/sqrt(1 + eps), here a half; what lies beside the rows is left alone."""
    ones = torch.ones(rows, columns, dtype=dtype, device=DEVICE)
    (x, x_untouched), (residual, residual_untouched) = amid_poison(ones * 0.25), amid_poison(ones * 0.75)
    normed, summed = add_rms_norm(x, residual, eps=3.0)
    assert x_untouched()
    assert residual_untouched()
    assert_same_bits(normed, ones * 0.5)
    assert_same_bits(summed, ones)
    before = [view._base.clone() for view in (x, residual) if view._base is not None]
    assert add_rms_norm_(x, residual, eps=3.0) == (x, residual)
    for view, values, wide in zip((x, residual), (ones * 0.5, ones), before, strict=True):
        assert_same_bits(view.contiguous(), values)
        view.copy_(ones * (0.25 if view is x else 0.75))
        assert torch.equal(view._base, wide)


def test_the_sum_is_symmetric_and_its_norm_has_no_scale() -> None:
    """Exchanging x and residual changes no bit; doubling both doubles the sum and keeps the rest but for eps."""
    x, residual = randn(3, 200), randn(3, 200, seed=1)
    normed, summed = add_rms_norm(x, residual, eps=1e-3)
    assert all(map(torch.equal, add_rms_norm(residual, x, eps=1e-3), (normed, summed)))
    assert all(map(torch.equal, add_rms_norm(2 * x, 2 * residual, eps=4e-3), (normed, 2 * summed)))


@FORMS
def test_llama_rounds_before_the_weight_and_gemma_after(form: Form) -> None:
    """The two castings and Gemma's offset are those of rms_norm on the sum, bit for bit."""
    rms_norm = importlib.import_module("triton_kernel_lab.ops.rms_norm").rms_norm
    x, residual, weight = randn(5, 256, dtype=torch.float16), randn(5, 256, dtype=torch.float16, seed=1), randn(256)
    for more in ({}, {"casting": "gemma"}, {"casting": "gemma", "offset": 1.0}):
        normed, summed = form(x, residual, weight, **more)
        expected = rms_norm(summed, weight, **more)
        # The mean is a product here and a quotient there, so a rounding may fall on the other side.
        assert (normed == expected).double().mean() > 0.99
    llama, gemma = (form(x, residual, weight, casting=name)[0] for name in ("llama", "gemma"))
    assert (llama == gemma).double().mean() < 0.9


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("shape", [(0, 4096), (2, 0, 128), (2, 0)])
def test_f04_empty_tensors_give_empty_ones(shape: tuple[int, ...], warm: bool) -> None:
    """Zero rows or columns give the right empty shapes and launch nothing, first call or not, in place or not."""
    if warm:
        add_rms_norm(randn(2, 128), randn(2, 128))
    x = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    bound = len(_launch.launches())
    for tensor in (x, x.transpose(0, -1)):
        for y in (*add_rms_norm(tensor, tensor), *add_rms_norm_(tensor, tensor.clone())):
            assert (y.shape, y.dtype, y.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert len(_launch.launches()) == bound


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the rank, sizes, strides and dtype, and however x and residual differ in layout."""
    shape = [*data.draw(st.lists(st.integers(1, 5), max_size=3)), data.draw(st.integers(1, 70))]
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors = []
    for _ in range(2):
        strides = [data.draw(st.sampled_from([0, 1, 3, 70, 97, 210])) for _ in shape[:-1]]
        strides.append(data.draw(st.sampled_from([1, 1, 1, 2, 3])))
        tensors.append(strided(shape, strides, dtype, offset=data.draw(st.integers(0, 9))))
    weight = randn(2 * shape[-1])[:: data.draw(st.sampled_from([1, 2]))][: shape[-1]]
    x, residual = tensors
    normed, summed = add_rms_norm(x, residual, weight, 1e-3)
    assert_same_bits(summed, (x + residual).contiguous())
    assert_right(normed, oracle(x + residual, weight, 1e-3), dtype)
    for view, expected in zip(in_place(x, residual, weight, 1e-3), (normed, summed), strict=True):
        assert_same_bits(view, expected)


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm, add_rms_norm_
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    dense, residual = x.contiguous(), checks.randn(3, 64, dtype=x.dtype, seed=5)
    with routing.strict():
        for pair in ((x, residual), (residual, x), (x, x)):
            expected = add_rms_norm(*(each.contiguous() for each in pair))
            assert all(map(torch.equal, add_rms_norm(*pair), expected)), pair
        expected = add_rms_norm(dense, residual)
        add_rms_norm_(x, residual)
        assert torch.equal(x, expected[0]) and torch.equal(residual, expected[1])
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows that begin more than 2^31 elements apart are read and written where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS = {
    "contiguous": lambda: randn(4, 3, 40, dtype=torch.float16),
    "every_second_column": lambda: randn(4, 3, 80, dtype=torch.float16)[..., ::2],
    "columns_first": lambda: randn(40, 4, 3, dtype=torch.float16).permute(1, 2, 0),
    "packed": lambda: randn(4, 3, 80, dtype=torch.float16)[..., 40:],
    "rows_swapped": lambda: randn(3, 4, 40, dtype=torch.float16).transpose(0, 1),
}


@pytest.mark.parametrize("residual_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
def test_f07_f12_x_and_residual_of_any_two_layouts(x_layout: str, residual_layout: str) -> None:
    """Neither is read or written with the strides of the other: the bits are those of contiguous copies."""
    x, residual = LAYOUTS[x_layout](), LAYOUTS[residual_layout]() * 2
    weight = randn(80, dtype=torch.float16, seed=3)[::2]
    expected = add_rms_norm(x.contiguous(), residual.contiguous(), weight.contiguous())
    for found, wanted in zip(add_rms_norm(x, residual, weight), expected, strict=True):
        assert found.is_contiguous()
        assert_same_bits(found, wanted)
    strides = x.stride(), residual.stride()
    for found, wanted in zip(add_rms_norm_(x, residual, weight), expected, strict=True):
        assert_same_bits(found.contiguous(), wanted)
    assert (x.stride(), residual.stride()) == strides


def test_f07_rows_at_two_strides_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tensor is copied where its rows lie at two strides, in either form."""
    copies = checks.copies(monkeypatch)
    x, residual = randn(4, 3, 80).transpose(0, 1), randn(3, 4, 160)[..., :80]
    add_rms_norm(x, residual)
    add_rms_norm_(x, residual)
    assert copies == []


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    base = [randn(1 + 3 * 80, dtype=torch.float16, seed=seed) for seed in (0, 1)]
    weights = randn(81, dtype=torch.float16, seed=2)
    plans = []
    for starts in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        x, residual = (each[start : start + 240].view(3, 80) for each, start in zip(base, starts[:2], strict=True))
        weight = weights[starts[2] :][:80]
        assert_right(add_rms_norm(x, residual, weight)[0], oracle(x + residual, weight), x.dtype)
        plans.append(len(op._plans))
    assert plans == [1, 2, 3, 4, 4]


@FORMS
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_f18_weight_and_input_may_differ_in_dtype(
    form: Form, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Both outputs have x's dtype, and no pair gives NaN."""
    x, residual = randn(4, 80, dtype=dtype), randn(4, 80, dtype=dtype, seed=1)
    weight = None if weight_dtype is None else randn(80, dtype=weight_dtype, seed=1)
    normed, summed = form(x, residual, weight)
    assert_right(normed, oracle(x + residual, weight), dtype)
    assert_same_bits(summed, x + residual)


# In place.


def bytes_of(x: torch.Tensor) -> list[int]:
    """The address of every byte of every element, one after the other."""
    size = x.element_size()
    steps = [[i * stride * size for i in range(n)] for n, stride in zip(x.shape, x.stride(), strict=True)]
    return [x.data_ptr() + sum(step) + byte for step in itertools.product(*steps) for byte in range(size)]


Drawn = tuple[list[tuple[int, int]], int, torch.dtype]
VIEWS = st.tuples(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3),
    st.integers(0, 24),
    st.sampled_from([torch.float16, torch.float32]),
)


def view_of(buffer: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    dims, offset, dtype = drawn
    return buffer.view(dtype).as_strided([size for size, _ in dims], [stride for _, stride in dims], offset)


@settings(max_examples=200)
@given(one=VIEWS, other=VIEWS)
def test_two_views_meet_exactly_where_they_share_a_byte(one: Drawn, other: Drawn) -> None:
    """Whether two views of one buffer share memory is what listing all their bytes says."""
    buffer = torch.empty(1024, dtype=torch.uint8)
    x, y = view_of(buffer, one), view_of(buffer, other)
    assert op._meet(x, y) == (not set(bytes_of(x)).isdisjoint(bytes_of(y)))


@settings(max_examples=100)
@given(drawn=VIEWS)
def test_a_view_that_is_taken_has_one_place_for_each_element(drawn: Drawn) -> None:
    """No view whose elements share memory passes; every one whose strides nest does."""
    x = view_of(torch.empty(1024, dtype=torch.uint8), drawn)
    assume(x.numel())
    spans = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
    nested = all(stride >= below * size for (below, size), (stride, _) in itertools.pairwise([(1, 1), *spans]))
    try:
        op._expect_one_place_each("x", x)
    except ValueError:
        assert not nested
    else:
        addresses = bytes_of(x)
        assert len(set(addresses)) == len(addresses)


def overlapping() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    rows = randn(9, 16)
    return {
        "x_expanded": (rows[:1].expand(4, 16), rows[4:8].clone(), None),
        "residual_expanded": (rows[4:8].clone(), rows[0, :1].expand(4, 16), None),
        "x_sliding": (rows.flatten().as_strided((4, 16), (8, 1)), rows[:4].clone(), None),
        "same": (rows[:4], rows[:4], None),
        "one_row_shared": (rows[:4], rows[3:7], None),
        "columns_shared": (rows[:4, :8], rows[:4, 7:15], None),
        "weight_in_x": (rows[:4], rows[4:8], rows[2]),
        "weight_in_residual": (rows[:4], rows[4:8], rows[7]),
    }


@pytest.mark.parametrize("name", overlapping())
def test_f59_views_that_overlap_are_refused_before_anything_is_written(name: str) -> None:
    """Expanded, sliding or shared memory raises ValueError naming the argument; no kernel is launched."""
    x, residual, weight = overlapping()[name]
    before = [tensor.clone() for tensor in (x, residual)]
    bound = len(_launch.launches())
    argument = "x" if name.startswith("x_") else "weight" if name.startswith("weight") else "residual"
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^add_rms_norm_: {argument}: expected .*, got .*\.$"):
            add_rms_norm_(x, residual, weight)
    assert all(map(torch.equal, (x, residual), before))
    assert len(_launch.launches()) == bound


def test_overlap_is_looked_for_wherever_later_calls_lie() -> None:
    """A call of the same signature whose tensors do overlap is refused although an earlier one was served."""
    rows = randn(9, 16)
    add_rms_norm_(rows[:4], rows[4:8])
    with pytest.raises(ValueError, match=r"^add_rms_norm_: residual: expected memory apart from x, got"):
        add_rms_norm_(rows[:4], rows[3:7])


CUTS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "alternating_rows": lambda buffer: (buffer[:, 0], buffer[:, 1]),
    "halves_of_rows": lambda buffer: (buffer[..., :8], buffer[..., 8:16]),
    "alternating_columns": lambda buffer: (buffer[..., ::4], buffer[..., 1::4]),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_views_that_interleave_without_sharing_are_served(cut: Callable[[torch.Tensor], Pair]) -> None:
    """Parts of one buffer that are apart are overwritten, and the rest of it is kept."""
    buffer = randn(6, 3, 32)
    expected = buffer.clone()
    x, residual = cut(expected)
    normed, summed = add_rms_norm(x, residual)
    x.copy_(normed)
    residual.copy_(summed)
    for _ in range(2):
        trial = buffer.clone()
        add_rms_norm_(*cut(trial))
        assert_same_bits(trial, expected)


@pytest.mark.parametrize(
    "error",
    [None, RuntimeError("CUDA error: an illegal memory access was encountered"), KeyboardInterrupt()],
    ids=["none", "cuda", "interrupt"],
)
def test_f53_what_was_written_in_place_is_noticed(error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward pass computes from an x or residual written over after it was saved, by a launch that failed too."""

    def bind(*arguments: object, **options: object) -> Callable[..., None]:
        def launch(x: torch.Tensor, residual: torch.Tensor, *rest: torch.Tensor) -> None:
            # As a kernel writes: behind the back of autograd.
            x.data.zero_()
            residual.data.zero_()
            if error is not None:
                raise error

        return launch

    monkeypatch.setattr(_launch, "bind", bind)
    x, residual, weight = randn(2, 8), randn(2, 8, seed=1), randn(8).requires_grad_()
    for _ in range(2):
        products = [x * weight, residual * weight]
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            add_rms_norm_(x, residual)
        for product in products:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()


def test_f53_a_refused_call_has_written_nothing() -> None:
    """What autograd saved of the tensors of a call that raises ValueError stays good, first call and later ones."""
    calls = [*overlapping().values(), (randn(2, 8), randn(3, 8), None)]
    rows = randn(9, 16)
    add_rms_norm_(rows[:4], rows[4:8])
    for x, residual, weight in (*calls, (rows[:4], rows[3:7], None)):
        before = x._version, residual._version
        with pytest.raises(ValueError, match=r"^add_rms_norm_: "):
            add_rms_norm_(x, residual, weight)
        assert (x._version, residual._version) == before


def test_f53_autograd_is_told_of_a_call_on_the_meta_device() -> None:
    """Nothing is written there, but a graph that saved the tensors is described as on any other device."""
    x, residual = (torch.empty(2, 8, device="meta") for _ in range(2))
    add_rms_norm_(x, residual)
    assert (x._version, residual._version) == (1, 1)


def test_f59_the_first_call_is_like_the_second() -> None:
    """Nothing is tried out on the caller's tensors: a signature's first call, negative inputs too, is its second."""
    x, residual = -randn(5, 300).abs(), -randn(5, 300, seed=1).abs()
    first, second = in_place(x, residual), in_place(x, residual)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, add_rms_norm(x, residual)))
    kernels = (op._rows_kernel, op._streamed_kernel)
    assert not any("Autotuner" in kind.__name__ for kernel in kernels for kind in type(kernel).__mro__)


def test_a_residual_stream_runs_on_in_place() -> None:
    """Layer after layer, the residual is the running sum of all that was added."""
    residual = randn(3, 200)
    expected = residual.clone()
    for layer in range(4):
        x = randn(3, 200, seed=layer + 1)
        expected = expected + x
        add_rms_norm_(x, residual)
        assert_same_bits(residual, expected)
        assert_right(x, oracle(expected), x.dtype)


def test_f52_autograd_learns_that_its_saved_tensors_changed() -> None:
    """A backward pass that needs the old values raises rather than uses the new ones."""
    x, scale = randn(3, 80), randn(3, 80, seed=1).requires_grad_()
    y = (x * scale).sum()
    with torch.no_grad():
        add_rms_norm_(x, randn(3, 80, seed=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("which", range(3))
def test_f49_in_place_refuses_to_cut_a_gradient(which: int) -> None:
    """Whichever argument wants a gradient, the in-place form raises and writes nothing; no_grad serves it."""
    tensors = [randn(3, 80), randn(3, 80, seed=1), randn(80, seed=2)]
    before = [tensor.clone() for tensor in tensors]
    tensors[which].requires_grad_()
    with pytest.raises(ValueError, match=r"^add_rms_norm_: x: expected no gradient to be wanted: call add_rms_norm"):
        add_rms_norm_(*tensors)
    assert all(map(torch.equal, tensors, before))
    with torch.no_grad():
        normed, _ = add_rms_norm_(*tensors)
    assert_right(normed.detach(), oracle(before[0] + before[1], before[2]), torch.float32)


# Gradients of the functional form.


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("output", [0, 1])
def test_f08_gradients_through_either_output_are_the_references(output: int, loss: str) -> None:
    """Whatever the layout of the incoming gradient, all three gradients are those of float64."""
    tensors = [randn(2, 16, 64), randn(2, 16, 64, seed=1), randn(64, seed=2)]
    found = checks.gradients(lambda *t: add_rms_norm(*t)[output], LOSSES[loss], *(t.requires_grad_() for t in tensors))
    wide = (tensor.detach().double().requires_grad_() for tensor in tensors)
    expected = checks.gradients(lambda x, r, w: (oracle(x + r, w), x + r)[output], LOSSES[loss], *wide)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("casting", "offset"), [("llama", 0.0), ("llama", 1.0), ("gemma", 1.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_both_outputs_add_up_as_in_float64(dtype: torch.dtype, casting: str, offset: float) -> None:
    """What comes through the sum is added before the one rounding, whatever eps, casting and offset are."""
    x, residual, weight = randn(5, 80, dtype=dtype), randn(5, 80, dtype=dtype, seed=1), randn(80, dtype=dtype, seed=2)
    incoming = [randn(5, 80, dtype=dtype, seed=seed) for seed in (3, 4)]
    # The sum is rounded, and its derivative is that of the exact one.
    total = (x + residual).double()
    wide = total.requires_grad_(), weight.double().requires_grad_()
    outputs = oracle(*wide, eps=0.5, offset=offset), total
    expected = torch.autograd.grad(outputs, wide, [each.double() for each in incoming])
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight)]
    both = add_rms_norm(x, residual, weight, 0.5, casting=casting, offset=offset)
    found = torch.autograd.grad(both, leaves, incoming)
    assert_same_bits(found[0], found[1])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for output, wanted in zip(found[1:], expected, strict=True):
        assert output.dtype == dtype
        assert torch.allclose(output.double(), wanted, rtol=limit, atol=limit)


# The interpreter truncates what is stored in bf16.
@pytest.mark.parametrize(
    ("dtype", "small", "sums"),
    [
        (torch.float16, 1.0003, [2047.0, 2050.0]),
        pytest.param(torch.bfloat16, 8.01, [2040.0, 2064.0], marks=pytest.mark.gpu),
    ],
)
def test_f20_the_gradient_of_the_sum_is_added_in_fp32(dtype: torch.dtype, small: float, sums: list[float]) -> None:
    """A little over half a step of 2048 rounds up, where it alone rounded first makes a tie that goes to 2048."""
    x = torch.ones(4, 64, dtype=dtype, device=DEVICE, requires_grad=True)
    dnormed = torch.ones(4, 64, dtype=dtype, device=DEVICE)
    # Alternating signs leave no mean to take away.
    dnormed[:, ::2] = -1
    outputs = add_rms_norm(x, torch.zeros_like(x), torch.full((64,), small, device=DEVICE))
    (dx,) = torch.autograd.grad(outputs, x, (dnormed, torch.full_like(dnormed, 2048)))
    assert dx.tolist() == [sums * 32] * 4


@pytest.mark.parametrize("asked", list(itertools.product([False, True], repeat=3)))
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool, bool]) -> None:
    """The graph is never cut, what asks for no gradient gets none, and the incoming gradient is left as it was."""
    shapes = ((3, 80), (3, 80), (80,))
    tensors = [
        randn(*shape, seed=seed).requires_grad_(want)
        for seed, (shape, want) in enumerate(zip(shapes, asked, strict=True))
    ]
    normed, summed = add_rms_norm(*tensors)
    assert normed.requires_grad == any(asked)
    assert summed.requires_grad == (asked[0] or asked[1])
    if any(asked):
        gradient = randn(3, 80, seed=9)
        before = gradient.clone()
        normed.backward(gradient)
        assert torch.equal(gradient, before)
    assert tuple(tensor.grad is not None for tensor in tensors) == asked


def test_f50_one_gradient_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are told exactly what is wanted, and are not run where only the sum is used."""
    wanted = []

    def recording(*tensors: Any, want_x: bool, want_weight: bool, plus: Any, **how: Any) -> object:
        wanted.append((want_x, want_weight, plus is not None))
        return rms_norm_backward(*tensors, want_x=want_x, want_weight=want_weight, plus=plus, **how)

    monkeypatch.setattr(op, "rms_norm_backward", recording)
    for asked, used in (((1, 0, 0), (1, 0)), ((0, 1, 0), (1, 1)), ((0, 0, 1), (1, 0)), ((1, 1, 1), (0, 1))):
        shapes = ((3, 80), (3, 80), (80,))
        leaves = [randn(*shape).requires_grad_(bool(want)) for shape, want in zip(shapes, asked, strict=True)]
        outputs = [output for output, use in zip(add_rms_norm(*leaves), used, strict=True) if use]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert wanted == [(True, False, False), (True, False, True), (False, True, False)]
    # Of the last call: the gradient of the sum is that of both, and the weight has none.
    assert torch.equal(leaves[0].grad, torch.ones(3, 80, device=DEVICE))
    assert torch.equal(leaves[1].grad, leaves[0].grad)
    assert leaves[2].grad is None


def test_f50_gradients_of_x_and_residual_are_not_one_memory() -> None:
    """What accumulates into one of them is not seen in the other, nor in the incoming gradient."""
    leaves = [randn(3, 80, seed=seed).requires_grad_() for seed in (0, 1)]
    gradient = randn(3, 80, seed=2)
    before = gradient.clone()
    for output in (0, 1):
        for leaf in leaves:
            leaf.grad = None
        add_rms_norm(*leaves)[output].backward(gradient)
        kept = leaves[1].grad.clone()
        leaves[0].grad.zero_()
        assert torch.equal(leaves[1].grad, kept)
        assert torch.equal(gradient, before)


def test_f51_only_the_sum_and_the_weight_are_kept() -> None:
    """The graph holds one tensor of the size of x, and it is the sum that the caller holds anyway."""
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x, residual, weight = (randn(*shape).requires_grad_() for shape in ((3, 80), (3, 80), (80,)))
        _, summed = add_rms_norm(x, residual, weight)
    assert [tensor.data_ptr() for tensor in kept] == [summed.data_ptr(), weight.data_ptr()]


def test_f53_a_sum_changed_in_place_is_noticed() -> None:
    """The backward pass never computes from a sum that was written over after the forward pass."""
    normed, summed = add_rms_norm(randn(3, 80).requires_grad_(), randn(3, 80, seed=1))
    with torch.no_grad():
        summed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()


def test_f54_activation_checkpointing_changes_no_gradient() -> None:
    """A checkpointed call gives the same bits as a plain one."""
    found = []
    for call in (add_rms_norm, lambda *leaves: checkpoint(add_rms_norm, *leaves, use_reentrant=False)):
        leaves = [randn(*shape, seed=7).requires_grad_() for shape in ((3, 80), (3, 80), (80,))]
        normed, summed = call(*leaves)
        (normed.pow(2).sum() + summed.pow(3).sum()).backward()
        found.append([leaf.grad for leaf in leaves])
    for output, expected in zip(*found, strict=True):
        assert_same_bits(output, expected)


def test_gradcheck_finds_the_reference_right() -> None:
    """In float64 the PyTorch form, which the kernels are held against, agrees with finite differences."""
    leaves = [randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((2, 7), (2, 7), (7,))]
    assert torch.autograd.gradcheck(lambda *t: op.add_rms_norm_reference(*t, 0.5, casting="gemma", offset=1.0), leaves)


def test_a_second_derivative_is_refused_in_one_sentence() -> None:
    """It raises even where the incoming gradient needs none; the PyTorch form has the second derivative."""
    x, residual = randn(3, 80).requires_grad_(), randn(3, 80, seed=1)
    sentence = r"^add_rms_norm: a second derivative .* call add_rms_norm_reference instead\.$"
    with pytest.raises(RuntimeError, match=sentence):
        torch.autograd.grad(add_rms_norm(x, residual)[0].sum(), x, create_graph=True)
    (dx,) = torch.autograd.grad(op.add_rms_norm_reference(x, residual)[0].sum(), x, create_graph=True)
    assert dx.requires_grad


def test_f49_what_triton_does_not_differentiate_leaves_it() -> None:
    """In strict mode float64 and per-sample gradients raise; else the PyTorch form gives them."""
    x, residual = randn(3, 80), randn(3, 80, seed=1)
    wide = x.double().requires_grad_()

    def each(rows: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda x, r: add_rms_norm(x, r)[0].pow(3).sum()))(rows, residual)

    with pytest.raises(routing.FallbackError, match=r"add_rms_norm: not served by Triton \(inputs: "):
        add_rms_norm(wide, residual.double())
    with pytest.raises(routing.FallbackError, match=r"add_rms_norm: not served by Triton \(autograd: "):
        each(x)
    with routing.strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = each(x)
        add_rms_norm(wide, residual.double())[0].pow(3).sum().backward()
        assert wide.grad is not None
        assert torch.allclose(found.double(), wide.grad, atol=1e-4)
    routing.forget()


@pytest.mark.parametrize("negated", range(3))
def test_a_lazily_negated_view_is_negated(negated: int) -> None:
    """A view whose sign is still to be flipped is the tensor that it stands for, also where it is written."""
    tensors = [randn(3, 80), randn(3, 80, seed=1), randn(80, seed=2)]
    tensors[negated] = torch._neg_view(tensors[negated])
    expected = add_rms_norm(*(tensor.resolve_neg().clone() for tensor in tensors))
    assert all(map(torch.equal, add_rms_norm(*tensors), expected))
    assert all(map(torch.equal, add_rms_norm_(*tensors), expected))


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool) -> None:
    """torch.compile meets no graph break, and the result is the eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: add_rms_norm(*t)[0] * 2, fullgraph=True, backend="aot_eager")
    residual, weight = randn(3, 80, seed=1), randn(80, seed=2)
    x = randn(3, 80).requires_grad_(wants_grad)
    assert torch.equal(compiled(x, residual, weight), add_rms_norm(x, residual, weight)[0] * 2)


@pytest.mark.parametrize("asked", [(True, True, True), (False, True, False), (False, False, True)])
def test_f56_training_compiles_into_one_graph(asked: tuple[bool, bool, bool]) -> None:
    """Compiled forward and backward passes give the gradients of the eager ones, served by Triton, no more of them."""

    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed, summed = add_rms_norm(x, residual, weight, 0.5, casting="gemma", offset=1.0)
        return normed * 3 + summed

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    shapes = ((3, 80), (3, 80), (80,))
    tensors = [randn(*shape, seed=5).requires_grad_(want) for shape, want in zip(shapes, asked, strict=True)]
    found = checks.gradients(compiled, LOSSES["every_second"], *tensors)
    eager = checks.gradients(block, LOSSES["every_second"], *tensors)
    for output, expected, wanted in zip(found, eager, asked, strict=True):
        assert (output is not None) == wanted
        assert not wanted or torch.equal(output, expected)


def test_f56_the_in_place_form_compiles_and_writes() -> None:
    """In a compiled function the caller's tensors hold the results afterwards."""
    torch._dynamo.reset()

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed, summed = add_rms_norm_(x, residual)
        return normed + summed

    x, residual = randn(3, 80), randn(3, 80, seed=1)
    normed, summed = add_rms_norm(x, residual)
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x, residual), normed + summed)
    assert torch.equal(x, normed)
    assert torch.equal(residual, summed)


def test_f56_a_batch_that_grows_recompiles_once() -> None:
    """After the second batch size the graph holds for every other, also for none."""
    calls = [(randn(rows, 80), randn(rows, 80)) for rows in (4, 2, 5, 0)]
    for output in range(2):
        assert checks.graphs_compiled(lambda x, residual, output=output: add_rms_norm(x, residual)[output], calls) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs, and the outputs are described as they would come."""
    x = torch.empty(6, 4, 160, dtype=dtype, device="meta")[:, :, ::2]
    residual = torch.empty(6, 4, 80, dtype=dtype, device="meta")
    for y in add_rms_norm(x, residual, torch.empty(80, device="meta")):
        assert (y.shape, y.dtype, y.stride(), y.is_meta) == ((6, 4, 80), dtype, (320, 80, 1), True)
    assert add_rms_norm_(x, residual) == (x, residual)


@pytest.mark.parametrize("operator", ["_add_rms_norm_op", "_add_rms_norm_in_place_op"])
def test_f56_torch_library_finds_the_ops_sound(operator: str) -> None:
    """torch.library's own check of schema, mutation, fake kernel and dispatch passes, strided input included."""
    for x in (randn(3, 80), randn(3, 160)[:, ::2]):
        torch.library.opcheck(getattr(op, operator), (x, randn(3, 80, seed=1), randn(80), 1e-6, "llama", 0.0))


@pytest.mark.parametrize("with_weight", [False, True])
def test_f56_torch_library_finds_the_gradients_sound(with_weight: bool) -> None:
    """The same check passes with leaves that want gradients, traced through autograd."""
    leaves = [randn(*shape).requires_grad_() for shape in ((3, 80), (3, 80), (80,))]
    weight = leaves[2] if with_weight else None
    torch.library.opcheck(op._add_rms_norm_op, (*leaves[:2], weight, 1e-6, "gemma", 1.0))


def test_f56_meta_tensors_have_meta_gradients() -> None:
    """Training on the meta device describes every gradient and runs nothing."""
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
    shapes = ((6, 80), (6, 80), (80,))
    leaves = [
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    normed, summed = add_rms_norm(*leaves)
    (normed.sum() + summed.sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.is_meta) == (leaf.shape, leaf.dtype, True)


def test_f56_tensors_made_in_inference_mode_are_served() -> None:
    """Inference-mode inputs, which count no versions, go through both forms."""
    with torch.inference_mode():
        x, residual = randn(3, 80), randn(3, 80, seed=1)
        assert all(map(torch.equal, in_place(x, residual), add_rms_norm(x, residual)))


# Launch configurations.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 65, 128, 257])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_f60_every_kind_of_launch_is_right_alone(
    config: dict[str, int | str], columns: int, dtype: torch.dtype
) -> None:
    """Each kernel and number of rows gives both answers, in place too, and writes nothing else."""
    (x, x_untouched), (residual, residual_untouched) = (
        amid_poison(randn(5, columns, dtype=dtype, seed=s)) for s in (0, 1)
    )
    weight = randn(columns, seed=2)
    with _launch.forced(config):
        normed, summed = add_rms_norm(x, residual, weight)
        assert_same_bits(summed, (x + residual).contiguous())
        assert_right(normed, oracle(x + residual, weight), dtype)
        assert x_untouched()
        assert residual_untouched()
        assert all(map(torch.equal, add_rms_norm_(x, residual, weight), (normed, summed)))
        for view in (x, residual):
            view.fill_(checks.POISON)
            assert view._base is not None
            assert view._base.eq(checks.POISON).all()


# Errors.


@pytest.mark.parametrize("form", [add_rms_norm, add_rms_norm_])
def test_arguments_that_do_not_fit_are_named(form: Form) -> None:
    """Nothing is broadcast or converted: one sentence names operator, argument, expected and found."""
    x, name = torch.zeros(2, 8, device=DEVICE), form.__name__
    sentences: list[tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = [
        ((x, x[:1]), {}, "residual: expected the shape of x, (2, 8), got (1, 8)."),
        ((x, x.half()), {}, "residual: expected the dtype of x, torch.float32, got torch.float16."),
        ((x, x.to("meta")), {}, f"residual: expected the device of x, {DEVICE}"),
        ((x, x, x[0, :7]), {}, "weight: expected shape (8,), got (7,)."),
        ((x, x), {"eps": -1.0}, "eps: expected a number that is not negative, got -1.0."),
        ((x, x), {"casting": "bloom"}, "casting: expected one of ('llama', 'gemma'), got 'bloom'."),
        ((x.int(), x.int()), {}, "x: expected a floating-point tensor, got torch.int32."),
        ((x[0, 0], x[0, 0]), {}, "x: expected at least one dimension, got a scalar."),
    ]
    for arguments, more, sentence in sentences:
        with pytest.raises((TypeError, ValueError)) as caught:
            form(*arguments, **more)
        assert str(caught.value).startswith(f"{name}: {sentence}")


@pytest.mark.parametrize("in_place_form", [False, True])
def test_what_triton_does_not_take_is_computed_by_pytorch(in_place_form: bool) -> None:
    """Double precision leaves Triton with a reason, and is right, in place too."""
    x, residual = randn(3, 80).double(), randn(3, 80, seed=1).double()
    expected = oracle(x + residual), x + residual
    form = add_rms_norm_ if in_place_form else add_rms_norm
    routing.forget()
    with routing.strict(False), pytest.warns(routing.FallbackWarning, match="float64"):
        found = form(x, residual)
    assert all(map(torch.allclose, found, expected))
    with pytest.raises(routing.FallbackError):
        form(x, residual)
    assert torch.allclose(found[1], expected[1])


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [80, 1185, 1536, 4096, 8192, 65536])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f10_tracked_launches_are_right_on_a_gpu(columns: int, dtype: torch.dtype) -> None:
    """What the launch table chooses gives the answer, aligned, shifted by an element, and aligned again."""
    base, weight = randn(1 + 33 * columns, dtype=dtype), randn(columns, dtype=dtype, seed=1)
    residual = randn(33, columns, dtype=dtype, seed=2)
    for start in (0, 1, 0):
        x = base[start : start + 33 * columns].view(33, columns)
        normed, summed = add_rms_norm(x, residual, weight, casting="gemma")
        assert_same_bits(summed, x + residual)
        assert_right(normed, oracle(summed, weight), dtype)
        assert all(map(torch.equal, in_place(x, residual, weight, casting="gemma"), (normed, summed)))


@pytest.mark.gpu
def test_f01_the_last_rows_of_a_large_tensor_on_a_gpu() -> None:
    """Rows whose elements lie beyond 2^31 equal the same rows alone."""
    x = torch.ones(524290, 4096, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = randn(2, 4096, dtype=torch.bfloat16)
    for large, alone in zip(add_rms_norm(x, x), add_rms_norm(x[-2:].clone(), x[-2:].clone()), strict=True):
        assert_same_bits(large[-2:], alone)


@pytest.mark.gpu
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured after a warm-up, both forms follow inputs that were changed in place."""
    x, residual = randn(16, 4096, dtype=torch.bfloat16), randn(16, 4096, dtype=torch.bfloat16, seed=1)
    stream = [tensor.clone() for tensor in (x, residual)]
    add_rms_norm(x, residual)
    add_rms_norm_(*stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = add_rms_norm(x, residual)
        add_rms_norm_(*stream)
    for tensor, fresh in zip((x, *stream), (9, 9, 1), strict=True):
        tensor.copy_(randn(16, 4096, dtype=torch.bfloat16, seed=fresh))
    graph.replay()
    expected = add_rms_norm(x, residual)
    assert all(map(torch.equal, (*y, *stream), (*expected, *expected)))


@pytest.mark.gpu
def test_f22_twenty_runs_give_the_same_bits() -> None:
    """Nothing depends on which block runs first."""
    x, residual = randn(64, 8192, dtype=torch.float16), randn(64, 8192, dtype=torch.float16, seed=1)
    first = add_rms_norm(x, residual)
    for _ in range(20):
        assert all(map(torch.equal, add_rms_norm(x, residual), first))


@pytest.mark.gpu
def test_f47_another_device_than_the_current_one_is_used() -> None:
    """Inputs on the last device are served there while the first is current, and the first stays so."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    x, residual = randn(5, 1000).to(last), randn(5, 1000, seed=1).to(last)
    with torch.cuda.device(0):
        normed, summed = add_rms_norm(x, residual)
        assert torch.cuda.current_device() == 0
    assert (normed.device, summed.device) == (last, last)
    assert_right(normed, oracle(x + residual), x.dtype)
