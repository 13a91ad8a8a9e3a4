"""Attention: closed forms, masks, layouts, gradients, launches; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, assert_same_bits, randn, strided

from triton_kernel_lab import routing
from triton_kernel_lab.cases import flash_attention as yardstick
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch

op = importlib.import_module("triton_kernel_lab.ops.flash_attention")
flash_attention = op.flash_attention

# Weights are rounded to the inputs' dtype before they meet the values: a little more than one rounding
# in the worst element, half of one in norm. fp32 promises 1e-5, whichever way its products are formed.
LIMITS = {
    torch.float16: check.Limit(2.0**-9, 2.0**-11),
    torch.bfloat16: check.Limit(2.0**-6, 2.0**-8),
    torch.float32: check.Limit(1e-5, 3e-6),
}


BLOCKS = {"kernel": "blocks", "num_warps": 4, "stages": 2, "cluster_mib": 16, "precision": "ieee"}
SPECIALISED = {"kernel": "specialised", "block": 128, "stages": 2, "cluster_mib": 16, "pairs": 0}


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def mask(queries: int, keys: int, causal: bool) -> torch.Tensor:
    """[Lq, Lk], whether a query sees a key: the last query sees the last key."""
    seen = torch.arange(keys)[None, :] <= torch.arange(queries)[:, None] + keys - queries
    return (seen if causal else torch.ones_like(seen)).to(DEVICE)


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64 with the mask spelt out; differentiable."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * (scale or q.shape[3] ** -0.5)
    blind = ~seen.any(1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(blind, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(blind, 0.0)
    sums = torch.logsumexp(scores, -1).masked_fill(blind[:, 0], -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.double()), sums


def assert_right(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """The output is dense, has the oracle's shape and its own dtype, and is near enough."""
    assert (out.shape, out.dtype, out.device) == (expected.shape, dtype, expected.device)
    assert out.is_contiguous()
    assert check.verdict(check.measure(out, expected), LIMITS[dtype]) == []


def assert_agrees(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """Output and log-sum-exp are those of float64."""
    expected, expected_lse = oracle(q, k, v, mask(q.shape[1], k.shape[1], causal))
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    assert_right(out, expected, q.dtype)
    assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def draw(
    queries: int, keys: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float32, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q [B, Lq, Hq, D], k and v [B, Lk, Hkv, D]."""
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (randn(batch, *shape, width, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return q, k, v


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (1, 1000), (3, 128), (40, 70)])
def test_f27_uniform_weights_give_means_up_to_the_bottom_right_diagonal(
    queries: int, keys: int, dtype: torch.dtype
) -> None:
    """With q = k = 0, row i is the mean of the values 0 .. Lk - Lq + i: the last row sees all of them."""
    zeros = torch.zeros(1, max(queries, keys), 1, 16, dtype=dtype, device=DEVICE)
    values = torch.arange(keys, device=DEVICE, dtype=dtype)[None, :, None, None].expand(1, keys, 1, 16)
    out, lse = flash_attention(zeros[:, :queries], zeros[:, :keys], values, causal=True, return_lse=True)
    seen = torch.arange(keys - queries + 1, keys + 1, device=DEVICE, dtype=torch.float64)
    assert torch.allclose(out[0, :, 0].double(), ((seen - 1) / 2)[:, None].expand(-1, 16), rtol=2e-3)
    assert torch.allclose(lse[0, 0].double(), seen.log(), atol=1e-5)


def test_f27_the_top_left_diagonal_would_fail_here() -> None:
    """PyTorch's own causal mask, aligned at the top left, is told from ours by the limits of these tests."""
    q, k, v = draw(3, 40, 1, 1, 16)
    wrong, _ = oracle(q, k, v, torch.ones(3, 40, dtype=torch.bool, device=DEVICE).tril())
    right, _ = oracle(q, k, v, mask(3, 40, True))
    assert check.verdict(check.measure(wrong, right), LIMITS[torch.float16]) != []
    assert_right(flash_attention(q, k, v, causal=True), right, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(5, 2), (130, 2), (70, 33)])
def test_f26_rows_that_see_no_key_are_zero(queries: int, keys: int, dtype: torch.dtype) -> None:
    """The first Lq - Lk rows are exactly 0 with LSE -inf, the next equals the first value, and nothing is NaN."""
    q, k, v = draw(queries, keys, 2, 1, 16, dtype)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    blind = queries - keys
    assert_same_bits(out[:, :blind], torch.zeros_like(out[:, :blind]))
    assert bool((lse[:, :, :blind] == -math.inf).all())
    assert_same_bits(out[:, blind], v[:, :1].expand(1, 1, 2, 16)[:, 0])
    assert bool(lse[:, :, blind:].isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "width", "query", "key"),
    [(torch.float16, 128, 16.0, -128.0), (torch.float16, 64, -3e4, 3e4), (torch.float32, 64, 1e5, -1e5)],
)
def test_f25_equal_scores_share_their_weight_however_low(
    dtype: torch.dtype, width: int, query: float, key: float
) -> None:
    """Padding never beats a real score, and no rounding of a huge maximum overflows: the mean of 1, 2, 3 is 2."""
    q = torch.full((1, 2, 1, width), query, dtype=dtype, device=DEVICE)
    k = torch.full((1, 3, 1, width), key, dtype=dtype, device=DEVICE)
    v = torch.arange(1.0, 4.0, device=DEVICE)[None, :, None, None].expand(1, 3, 1, width).to(dtype)
    for sign in (1, -1):
        out, lse = flash_attention(q * sign, k, v, causal=False, return_lse=True)
        assert torch.allclose(out, torch.full_like(out, 2.0), rtol=1e-3)
        score = float(q[0, 0, 0, 0].double() * sign * k[0, 0, 0, 0].double()) * math.sqrt(width)
        assert torch.allclose(lse.double(), torch.full_like(lse, score).double() + math.log(3.0), rtol=1e-6)


def test_f25_one_far_higher_score_takes_all() -> None:
    """Where scores lie 2^30 apart, across the bound at which the scale changes its form, the highest wins."""
    q = torch.full((1, 1, 1, 16), 2.0**17, device=DEVICE)
    k = torch.tensor([-(2.0**13), 1.0, 2.0**13, 2.0, -(2.0**13)], device=DEVICE)[None, :, None, None].expand(
        1, 5, 1, 16
    )
    v = torch.arange(5.0, device=DEVICE)[None, :, None, None].expand(1, 5, 1, 16)
    for order in ([0, 1, 2, 3, 4], [2, 1, 0, 4, 3], [1, 3, 0, 4, 2]):
        out = flash_attention(q, k[:, order], v[:, order], causal=False)
        assert_same_bits(out, torch.full_like(out, 2.0))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_finite_scale(scale: float) -> None:
    """No scale makes the weights equal, a negative one turns their order round."""
    q, k, v = draw(5, 9, 2, 2, 16)
    out = flash_attention(q, k, v, causal=True, scale=scale)
    expected, _ = oracle(q * scale, k, v, mask(5, 9, True), 1.0)
    assert_right(out, expected, torch.float32)


def test_weights_sum_to_one() -> None:
    """Values that are all equal come out unchanged."""
    q, k, v = draw(20, 50, 2, 2, 32)
    out = flash_attention(q, k, torch.full_like(v, 3.0), causal=True)
    assert torch.allclose(out, torch.full_like(out, 3.0), rtol=1e-6)


def test_two_halves_of_the_keys_combine_by_their_sums() -> None:
    """What attention to each half gives, weighted by exp(LSE), is attention to the whole."""
    q, k, v = draw(7, 60, 2, 1, 32)
    whole, total = flash_attention(q, k, v, causal=False, return_lse=True)
    parts = [
        flash_attention(q, k[:, part], v[:, part], causal=False, return_lse=True)
        for part in (slice(23), slice(23, None))
    ]
    weights = [(lse - total).exp().transpose(1, 2)[..., None] for _, lse in parts]
    assert torch.allclose(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole, atol=1e-5)


def test_later_keys_do_not_reach_earlier_queries() -> None:
    """Changing the last key and value changes the last row only, bit for bit."""
    q, k, v = draw(40, 40, 1, 1, 16)
    before = flash_attention(q, k, v, causal=True)
    k[:, -1], v[:, -1] = 7.0, 1e4
    after = flash_attention(q, k, v, causal=True)
    assert_same_bits(after[:, :-1], before[:, :-1])
    assert bool((after[:, -1] != before[:, -1]).all())


# Shapes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_f29_every_feature_of_any_head_dimension_counts(width: int, dtype: torch.dtype) -> None:
    """All signal lies in the last features of q, k and v, and the answer is that of float64."""
    q, k, v = draw(3, 20, 1, 1, width, dtype)
    for x in (q, k, v):
        x[..., : max(width - 8, 0)] = 0.0
    assert_agrees(q, k, v, causal=True)


def test_heads_wider_than_the_kernel_takes_are_refused_with_a_reason() -> None:
    """Beyond 256 features the reference serves, and strict mode says why."""
    q, k, v = draw(2, 3, 1, 1, 257)
    with pytest.raises(routing.FallbackError, match="heads of up to 256 features, not 257"):
        flash_attention(q, k, v, causal=True)
    with routing.strict(False), pytest.warns(routing.FallbackWarning):
        out = flash_attention(q, k, v, causal=True)
    assert_right(out, oracle(q, k, v, mask(2, 3, True))[0], torch.float32)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_f04_empty_tensors_launch_nothing(batch: int, queries: int, keys: int, warm: bool) -> None:
    """No batch or no query gives the empty shape; no key gives zeros and LSE -inf."""
    if warm:
        flash_attention(*draw(3, 4, 2, 1, 16), causal=True)
    bound = len(_launch.launches())
    q, k, v = draw(queries, keys, 2, 1, 16, torch.float16, batch)
    for causal in (True, False):
        out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
        assert (out.shape, out.dtype, lse.shape) == (q.shape, q.dtype, (batch, 2, queries))
        assert not out.count_nonzero()
        assert bool((lse == -math.inf).all())
    assert len(_launch.launches()) == bound


def test_f04_empty_tensors_have_gradients_of_zero() -> None:
    """Without keys q's gradient is zero, without queries those of keys and values are."""
    for queries, keys in ((3, 0), (0, 3)):
        q, k, v = (x.requires_grad_() for x in draw(queries, keys, 2, 1, 16))
        flash_attention(q, k, v, causal=True).sum().backward()
        for x in (q, k, v):
            assert x.grad is not None
            assert x.grad.shape == x.shape
            assert not x.grad.count_nonzero()


@settings(max_examples=8)
@given(data=st.data())
def test_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the lengths, heads, head dimension, mask, dtype, and however q, k and v lie in memory."""

    def integer(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    batch, kv_heads, width = integer(1, 2), integer(1, 2), integer(1, 40)
    heads, dtype = kv_heads * integer(1, 3), data.draw(st.sampled_from(DTYPES))
    tensors: list[torch.Tensor] = []
    for length, count in ((integer(1, 36), heads), *((integer(1, 36), kv_heads),) * 2):
        shape = (batch, length if not tensors or len(tensors) == 1 else tensors[1].shape[1], count, width)
        last = data.draw(st.sampled_from([1, 1, 1, 2]))
        rows = [data.draw(st.sampled_from([0, 41, 64, 97, 240])) for _ in range(3)]
        tensors.append(strided(shape, (*rows, last), dtype, offset=integer(0, 9)))
    q, k, v = tensors
    causal = data.draw(st.booleans())
    assert_agrees(q, k, v, causal)
    assert_same_bits(
        flash_attention(q, k, v, causal=causal),
        flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=causal),
    )


# Addressing and layouts.

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "every_second_token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "heads_first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features_apart": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "expanded_heads": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("k_layout", LAYOUTS)
def test_f12_keys_and_values_of_any_two_layouts(k_layout: str, v_layout: str) -> None:
    """Neither is read with the strides of the other: each pair gives the bits of contiguous copies."""
    q, k, v = draw(8, 40, 2, 2, 64, torch.float16)
    k, v = LAYOUTS[k_layout](k), LAYOUTS[v_layout](v)
    out = flash_attention(q, k, v, causal=True)
    assert_same_bits(out, flash_attention(q, k.contiguous(), v.contiguous(), causal=True))


def test_f12_heads_of_one_fused_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of 16, 1 and 1 heads side by side in one tensor are read in place."""
    both = randn(1, 40, 18, 64, dtype=torch.float16)
    q, k, v = both.split((16, 1, 1), 2)
    copies = checks.copies(monkeypatch)
    out = flash_attention(q, k, v, causal=True)
    assert copies == []
    assert_right(out, oracle(q, k, v, mask(40, 40, True))[0], torch.float16)


def test_a_group_of_heads_shares_its_keys() -> None:
    """Query head h reads key head h // group: the same as with the keys repeated, bit for bit."""
    q, k, v = draw(20, 30, 6, 2, 16, torch.float16)
    repeated = (x.repeat_interleave(3, 2) for x in (k, v))
    assert_same_bits(flash_attention(q, k, v, causal=True), flash_attention(q, *repeated, causal=True))


F01 = """
import importlib, operator_checks as checks, torch
from triton_kernel_lab import routing
attention = importlib.import_module("triton_kernel_lab.ops.flash_attention").flash_attention
x = checks.far_apart(32)
if x is None:
    print("no memory")
else:
    far, near = x[None, :, None, :], x.contiguous()[None, :, None, :]
    with routing.strict():
        expected = attention(near, near, near, causal=True)
        for tensors in ((far, near, near), (near, far, near), (near, near, far)):
            assert torch.equal(attention(*tensors, causal=True), expected)
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows that begin more than 2^31 elements apart are read where they are, as queries, keys and values."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 64), (33, 17)])
def test_f23_poison_beyond_the_keys_stays_out(queries: int, keys: int, poison: float) -> None:
    """What lies behind the last key of a longer cache, or behind the last query, changes no bit."""
    q, k, v = draw(queries, keys, 1, 1, 40, torch.float16)
    longer = []
    for x in (q, k, v):
        wide = torch.full((1, x.shape[1] + 70, 1, 48), poison, dtype=x.dtype, device=DEVICE)
        longer.append(wide[:, : x.shape[1], :, :40].copy_(x))
    assert_same_bits(flash_attention(*longer, causal=True), flash_attention(q, k, v, causal=True))


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    base = randn(1 + 5 * 64, dtype=torch.float16)
    plans = []
    for start in (0, 1, 0):
        x = base[start : start + 320].view(1, 5, 1, 64)
        assert_agrees(x, x, x, causal=True)
        plans.append(len(op._plans))
    assert plans == [1, 2, 2]


# Gradients.


def grads(call: Callable[..., Any], tensors: tuple[torch.Tensor, ...], wide: bool = False) -> list[torch.Tensor]:
    """Gradients of a loss that weighs every output differently, and the finite sums too."""
    leaves = [(x.detach().double() if wide else x.detach().clone()).requires_grad_() for x in tensors]
    out, lse = call(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out)
    (torch.where(lse.isfinite(), lse, 0.0).square().sum() * 0.1 + (out * weight).sum()).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 20), (20, 5)])
def test_gradients_are_those_of_float64(queries: int, keys: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of q, k and v, groups of heads and rows without keys included, in several blocks of queries."""
    monkeypatch.setattr("triton_kernel_lab.ops._attention_backward._SCORES", 4 * 3 * keys)
    q, k, v = draw(queries, keys, 4, 2, 24)
    found = grads(lambda *x: flash_attention(*x, causal=causal, return_lse=True), (q, k, v))
    expected = grads(lambda q, k, v: oracle(q, k, v, mask(queries, keys, causal)), (q, k, v), wide=True)
    for a, b in zip(found, expected, strict=True):
        assert check.verdict(check.measure(a, b), check.Limit(2e-5, 5e-6)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtype_of_their_tensors(dtype: torch.dtype) -> None:
    """16-bit tensors get 16-bit gradients, near those of float64."""
    q, k, v = draw(17, 30, 2, 1, 32, dtype)
    found = grads(lambda *x: flash_attention(*x, causal=True, return_lse=True), (q, k, v))
    expected = grads(lambda q, k, v: oracle(q, k, v, mask(17, 30, True)), (q, k, v), wide=True)
    assert [x.dtype for x in found] == [dtype] * 3
    for a, b in zip(found, expected, strict=True):
        assert check.verdict(check.measure(a, b), check.Limit(2e-2, 1e-2)) == []


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
def test_gradcheck_passes_in_float64() -> None:
    """Finite differences agree, for the output alone and with the sums."""
    with routing.strict(False):
        q, k, v = (x.double().requires_grad_() for x in draw(4, 3, 2, 1, 3))
        assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=True), (q, k, v))
        assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal=False, return_lse=True), (q, k, v))


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, True), (False, False, False)])
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool, bool]) -> None:
    """The graph is never cut, what asks for no gradient gets none, and without any the kernel alone runs."""
    tensors = [x.requires_grad_(wanted) for x, wanted in zip(draw(3, 5, 2, 1, 16), asked, strict=True)]
    out = flash_attention(*tensors, causal=True)
    assert out.requires_grad == any(asked)
    if any(asked):
        out.sum().backward()
    assert tuple(x.grad is not None for x in tensors) == asked
    with torch.no_grad():
        assert not flash_attention(*tensors, causal=True).requires_grad


def test_f08_f52_incoming_gradients_are_read_in_any_layout_and_left_alone() -> None:
    """One row expanded to all is as good as a dense gradient, and neither is written to."""
    tensors = [x.requires_grad_() for x in draw(6, 8, 2, 2, 16)]
    row = torch.linspace(-1, 1, 16, device=DEVICE)
    found = []
    for grad in (row.expand(1, 6, 2, 16), row.expand(1, 6, 2, 16).contiguous()):
        before = grad.clone()
        found.append(torch.autograd.grad(flash_attention(*tensors, causal=True), tensors, grad))
        assert_same_bits(grad, before)
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def test_f54_checkpointing_gives_the_same_gradients() -> None:
    """Recomputed in the backward pass, the operator saves and gives the same."""
    tensors = [x.requires_grad_() for x in draw(6, 8, 2, 2, 16)]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_attention(*tensors, causal=True)
        return out

    plain = torch.autograd.grad(call(*tensors).square().sum(), tensors)
    again = torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.square().sum(), tensors), strict=True):
        assert_same_bits(a, b)


def test_a_second_derivative_raises() -> None:
    """The gradients are not differentiable, and say so instead of leaving a term out."""
    q, k, v = (x.requires_grad_() for x in draw(3, 4, 1, 1, 16))
    (grad,) = torch.autograd.grad(flash_attention(q, k, v, causal=True).square().sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention_backward"):
        grad.sum().backward()


# Forward mode compiles a few rules of PyTorch's own with a deprecated function.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_goes_through_the_reference() -> None:
    """A tangent is carried, and the record says who served."""
    q, k, v = draw(3, 4, 1, 1, 16)
    tangent = torch.ones_like(q)
    with routing.strict(False):
        _, found = torch.func.jvp(lambda x: flash_attention(x, k, v, causal=True), (q,), (tangent,))
    _, expected = torch.func.jvp(lambda x: oracle(x, k, v, mask(3, 4, True))[0], (q,), (tangent,))
    assert torch.allclose(found.double(), expected.double(), atol=1e-5)


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool) -> None:
    """torch.compile meets no graph break, forward or backward, and gives the bits of the eager call."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: flash_attention(*x, causal=True) * 2, fullgraph=True, backend="aot_eager")
    tensors = [x.requires_grad_(wants_grad) for x in draw(5, 7, 2, 1, 16)]
    out, expected = compiled(*tensors), flash_attention(*tensors, causal=True) * 2
    assert_same_bits(out, expected)
    if wants_grad:
        for a, b in zip(
            torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
        ):
            assert_same_bits(a, b)


def test_f56_meta_tensors_give_shapes_and_dtypes() -> None:
    """On the meta device nothing runs, and the outputs are described as they would come."""
    q, k = (torch.empty(2, length, 4, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2) for length in (4, 4))
    out, lse = flash_attention(q, k, k, causal=True, return_lse=True)
    assert (out.shape, out.dtype, out.is_contiguous(), out.is_meta) == (q.shape, q.dtype, True, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 4), torch.float32)


@pytest.mark.parametrize("lse", [False, True])
def test_f56_torch_library_finds_the_op_sound(lse: bool) -> None:
    """torch.library's own check of schema, fake kernel, dispatch and autograd passes."""
    q, k, v = draw(3, 5, 2, 1, 16)
    torch.library.opcheck(op._attention_op, (q, k, v, True, 0.25, lse))
    # Only with the sums is there a gradient: the public function asks for them.
    torch.library.opcheck(op._attention_op, (q.requires_grad_(), k, v, True, 0.25, True))


# Launch configurations.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "block"), [(16, 16), (16, 64), (64, 16), (32, 32)])
def test_f60_every_tile_is_right_alone(rows: int, block: int, dtype: torch.dtype) -> None:
    """Whole blocks, a diagonal that cuts several, and a rest of each: output and sums are right."""
    config = BLOCKS | {"rows": rows, "block": block, "cluster_mib": 16}
    q, k, v = draw(40, 55, 2, 1, 24, dtype)
    with _launch.forced(config), check.poisoned():
        assert_agrees(q, k, v, causal=True)
        assert_agrees(q, k, v, causal=False)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("cluster", [1, 2, 3])
def test_however_many_heads_lie_side_by_side_every_tile_is_computed(cluster: int, group: int) -> None:
    """The order in which programs take heads and tiles changes no bit and leaves nothing out."""
    q, k, v = draw(20, 12, 5 * group, 5, 16)
    of_head = 2 * k[0, :, 0].numel() * k.element_size()
    config = BLOCKS | {"rows": 16, "block": 16}
    found = []
    for heads in (cluster, 5):
        with _launch.forced(config | {"cluster_mib": heads * of_head / 2**20}), check.poisoned():
            found.append(flash_attention(q, k, v, causal=True))
    assert_same_bits(*found)
    assert_right(found[0], oracle(q, k, v, mask(20, 12, True))[0], torch.float32)


# Of what smaller GPUs have: sm_86, sm_89 and sm_120 give a block 99 KiB.
F63 = """
import importlib, torch
from unittest import mock
from triton_kernel_lab.codegen.compiling import compile_launch
from triton_kernel_lab.codegen.launches import Call, plan
from triton_kernel_lab.cases.flash_attention import CASE
for dtype in (torch.float16, torch.float32):
    call = Call(CASE.variants[0], (1, 256, 256, 2, 2, 256), dtype)
    for launch in plan(call, "sm_86"):
        print(compile_launch(launch, "sm_86").metadata.shared)
"""


def test_f63_the_widest_heads_fit_the_smallest_shared_memory() -> None:
    """D = 256 compiles for sm_86 in fp16 and fp32 within 99 KiB; sm_89 and sm_120 choose the same tiles."""
    for arch in ("sm_86", "sm_89", "sm_120"):
        for itemsize in (2, 4):
            for columns in (16, 64, 128, 256):
                chosen = _launch.choose("flash_attention", arch, itemsize=itemsize, rows=64, columns=columns)
                assert chosen == _launch.choose("flash_attention", "sm_80", itemsize=itemsize, rows=64, columns=columns)
    done = checks.run_python(F63, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == 2
    assert all(size <= 99 << 10 for size in sizes), sizes


def test_f63_what_does_not_fit_falls_back_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that needs more shared memory than there is leaves the call to PyTorch, inputs untouched."""
    from triton.runtime.errors import OutOfResources

    def bind(*args: Any, **options: Any) -> None:
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(_launch, "bind", bind)
    q, k, v = draw(3, 5, 2, 1, 16)
    with pytest.raises(routing.FallbackError, match="shared memory"):
        flash_attention(q, k, v, causal=True)
    with routing.strict(False), pytest.warns(routing.FallbackWarning, match="shared memory"):
        out = flash_attention(q, k, v, causal=True)
    assert_right(out, oracle(q, k, v, mask(3, 5, True))[0], torch.float32)


@pytest.mark.parametrize("missing", ["memory", "gluon", "alignment", "scale"])
def test_where_specialised_warps_cannot_serve_the_portable_kernel_does(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal of the compiler, no Gluon, odd rows, and a negative scale cost speed and no fallback."""
    from triton.runtime.errors import OutOfResources

    bound: list[str] = []

    def bind(kernel: Any, *args: Any, **options: Any) -> Any:
        if options.get("tiled") and missing == "memory":
            raise OutOfResources(300_000, 232_448, "shared memory")
        bound.append(kernel.__name__)
        return given(kernel, *args, **options)

    given = _launch.bind
    monkeypatch.setattr(_launch, "bind", bind)
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(op._attention_hopper, "HAS_GLUON", missing != "gluon")
    width = 127 if missing == "alignment" else 128
    q, k, v = draw(33, 40, 2, 1, width, torch.float16)
    scale = -0.1 if missing == "scale" else None
    out = flash_attention(q, k, v, causal=True, scale=scale)
    assert bound == ["_attention_kernel"]
    assert_right(out, oracle(q, k, v, mask(33, 40, True), scale)[0], torch.float16)


def test_a_mistake_in_binding_specialised_warps_is_not_covered_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what Triton itself says of a kernel that it cannot compile leads to the portable one."""

    def bind(*args: Any, **options: Any) -> Any:
        raise TypeError("planted")

    monkeypatch.setattr(_launch, "bind", bind)
    monkeypatch.setattr(_launch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(op._attention_hopper, "HAS_GLUON", True)
    with pytest.raises(TypeError, match="planted"):
        flash_attention(*draw(33, 40, 2, 1, 128, torch.float16), causal=True)


def test_a_described_tensor_has_what_the_launcher_of_this_triton_reads() -> None:
    """Triton's launcher takes base, shape and strides from our descriptors, in whichever release is installed."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    x = torch.zeros(2, 3, 4, 8)
    found = make_tensordesc_arg(_launch._Described(x, (2, 4, 3, 8), (96, 8, 32, 1)), None)
    assert found[:9] == [x, 2, 4, 3, 8, 96, 8, 32, 1]
    assert not any(found[9:-8])


# Errors.


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (((3, 4), (1, 4, 2, 8), (1, 4, 2, 8)), "q: expected four dimensions [B, L, H, D], got (3, 4)."),
        (((1, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 8)), "k: expected [1, Lk, Hkv, 8] as q has, got (2, 4, 2, 8)."),
        (((1, 4, 2, 8), (1, 4, 2, 9), (1, 4, 2, 9)), "k: expected [1, Lk, Hkv, 8] as q has, got (1, 4, 2, 9)."),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), "v: expected the shape of k, (1, 4, 2, 8), got (1, 5, 2, 8)."),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], sentence: str) -> None:
    """One sentence names argument, expected and found."""
    with pytest.raises(ValueError, match=r"^flash_attention: ") as caught:
        flash_attention(*(torch.zeros(shape, device=DEVICE) for shape in shapes), causal=True)
    assert str(caught.value) == f"flash_attention: {sentence}"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (4, 8), (4, 0)])
def test_f31_heads_that_do_not_divide_are_a_value_error(
    heads: int, kv_heads: int, dtype: torch.dtype, strict: bool
) -> None:
    """Before anything is launched, also where the reference would serve."""
    q, k = (torch.zeros(1, 3, count, 8, dtype=dtype, device=DEVICE) for count in (heads, kv_heads))
    bound = len(_launch.launches())
    with routing.strict(strict), pytest.raises(ValueError, match=f"divides q's {heads}, got {kv_heads}"):
        flash_attention(q, k, k, causal=True)
    assert len(_launch.launches()) == bound


def test_dtypes_and_scales_that_cannot_be_are_named() -> None:
    """Two dtypes, integers and a scale that is not finite are refused."""
    x = torch.zeros(1, 3, 2, 8, device=DEVICE)
    with pytest.raises(TypeError, match=r"v: expected the dtype of q, torch.float32, got torch.float16\.$"):
        flash_attention(x, x, x.half(), causal=True)
    with pytest.raises(TypeError, match=r"q: expected a floating-point tensor, got torch.int32\.$"):
        flash_attention(x.int(), x.int(), x.int(), causal=True)
    with pytest.raises(ValueError, match=r"scale: expected a finite number or None, got nan\.$"):
        flash_attention(x, x, x, causal=True, scale=math.nan)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(1, 700, 128), (300, 300, 128), (900, 257, 128), (257, 900, 80), (257, 900, 256)]
)
def test_tracked_launches_are_right_on_a_gpu(queries: int, keys: int, width: int, dtype: torch.dtype) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 and fp32 (F34) included."""
    q, k, v = draw(queries, keys, 4, 2, width, dtype, batch=2)
    for causal in (True, False):
        expected, expected_lse = oracle(q, k, v, mask(queries, keys, causal))
        # Single elements by the rule of the lab: in rows that see few keys one of them is off by more than LIMITS say.
        eager = check.measure(yardstick._eager(q, k, v, causal), expected)
        bound = check.Limit(check.limit(dtype, eager).max_error_ratio, LIMITS[dtype].rel_norm)
        out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
        assert check.verdict(check.measure(out, expected), bound) == []
        assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_f34_early_rows_of_a_long_fp32_sequence_keep_their_promise(length: int, width: int) -> None:
    """Rows that see few of all keys average no error away, and stay within 1e-5 of an element and the typical one."""
    q, k, v = draw(length, length, 1, 1, width, torch.float32)
    out = flash_attention(q, k, v, causal=True)
    few = 1024
    expected, _ = oracle(q[:, :few], k[:, :few], v[:, :few], mask(few, few, True))
    allowed = 1e-5 * (expected.abs() + out.double().square().mean().sqrt())
    assert ((out[:, :few].double() - expected).abs() <= allowed).all()


def on_hopper() -> bool:
    """Whether this GPU has the kernel whose warps are specialised."""
    return _launch.architecture(torch.cuda.current_device()) == "sm_90"


def kernels() -> set[str]:
    """The kernels bound since the plans were forgotten."""
    return {launch.kernel for launch in _launch.launches()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "block", "pairs"), [(64, 128, 0), (96, 128, 1), (128, 128, 0), (128, 64, 1), (256, 64, 0)]
)
@pytest.mark.parametrize(
    ("queries", "keys", "batch"),
    [(1, 700, 2), (128, 128, 66), (129, 300, 1), (640, 640, 33), (513, 130, 2), (257, 900, 1)],
)
def test_specialised_warps_compute_what_the_portable_kernel_does(
    queries: int, keys: int, batch: int, width: int, block: int, pairs: int, dtype: torch.dtype
) -> None:
    """Odd and even numbers of tiles, alone and in pairs, tails, blind rows, grouped heads: within a rounding."""
    if not on_hopper():
        pytest.skip("the kernel is for sm_90")
    q, k, v = draw(queries, keys, 4, 2, width, dtype, batch=batch)
    # A view into a projection of everything, whose heads and rows stride as they come.
    q = torch.cat((q, q), 3)[..., :width]
    found = []
    for config in (SPECIALISED | {"block": block, "pairs": pairs}, BLOCKS | {"rows": 64, "block": 32}):
        for causal in (True, False):
            with _launch.forced(config), check.poisoned():
                found.append(flash_attention(q, k, v, causal=causal, return_lse=True))
    for (out, lse), (other, other_lse) in zip(found[:2], found[2:], strict=True):
        assert check.verdict(check.measure(out, other.double()), LIMITS[dtype]) == []
        assert torch.equal(lse.isinf(), other_lse.isinf())
        assert torch.allclose(lse, other_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_what_descriptors_cannot_take_goes_to_the_portable_kernel() -> None:
    """Odd strides, odd starts, expanded keys and negative scales are served, as right as any."""
    if not on_hopper():
        pytest.skip("the kernel is for sm_90")
    q, k, v = draw(200, 200, 2, 2, 128, torch.bfloat16)
    flash_attention(q, k, v, causal=True)
    assert kernels() == {"_specialised_attention_kernel"}
    odd = randn(1, 200, 2, 129, dtype=torch.bfloat16)[..., :128]
    late = randn(1 + k.numel(), dtype=torch.bfloat16)[1:].view(k.shape)
    for keys, scale in ((odd, None), (late, None), (k[:, :1].expand_as(k), None), (k, -0.1)):
        _launch.forget_plans()
        out = flash_attention(q, keys, v, causal=True, scale=scale)
        assert kernels() == {"_attention_kernel"}
        assert_right(out, oracle(q, keys, v, mask(200, 200, True), scale)[0], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_f10_the_kernel_for_aligned_rows_is_not_used_for_others(width: int) -> None:
    """Aligned, shifted by one element, rows at an odd stride: three right results."""
    base = randn(1 + 200 * (width + 1), dtype=torch.bfloat16)
    for start, row in ((0, width), (1, width), (0, width + 1), (0, width)):
        x = base.as_strided((1, 200, 1, width), (0, row, 0, 1), start)
        assert_agrees(x, x, x, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f22_twenty_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    """Neither the output nor a gradient depends on which program runs first."""
    tensors = [x.requires_grad_() for x in draw(500, 700, 8, 2, 128, dtype)]
    runs = []
    for _ in range(20):
        out = flash_attention(*tensors, causal=True)
        runs.append([out.detach(), *torch.autograd.grad(out.sum(), tensors)])
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert_same_bits(a, b)


@pytest.mark.gpu
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured after a warm-up, a replay follows the inputs that were changed in place."""
    q, k, v = draw(300, 300, 4, 2, 128, torch.bfloat16)
    flash_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention(q, k, v, causal=True)
    q.copy_(randn(1, 300, 4, 128, dtype=torch.bfloat16, seed=9))
    graph.replay()
    assert_same_bits(out, flash_attention(q, k, v, causal=True))


@pytest.mark.gpu
def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    """Beside the inputs a call takes what its output takes."""
    q, k, v = draw(8192, 8192, 4, 4, 64, torch.bfloat16)
    flash_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = flash_attention(q, k, v, causal=True)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.numel() * out.element_size()


@pytest.mark.gpu
def test_f47_tensors_of_another_device_than_the_current_one() -> None:
    """The work runs where the tensors are, and the current device stays what it was."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    q, k, v = (x.to(last) for x in draw(300, 300, 4, 2, 128, torch.bfloat16))
    with torch.cuda.device(0):
        out = flash_attention(q, k, v, causal=True)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(last):
        assert_same_bits(out, flash_attention(q, k, v, causal=True))
