"""Selected attention: closed forms, choices, splits, pages, layouts, gradients; on the GPU where there is one."""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, assert_right, assert_same_bits, randn, strided

from triton_kernel_lab import routing
from triton_kernel_lab.cases import selected_attention as case
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.selected_attention import (
    selected_attention,
    selected_attention_paged,
    selected_attention_paged_reference,
    selected_attention_reference,
)

op = importlib.import_module("triton_kernel_lab.ops.selected_attention")

METHODS = ["rows", "group"]
FORMS = pytest.mark.parametrize("form", ["dense", "paged"])


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def config(method: str = "rows", block: int = 16, grain: int = 100) -> dict[str, Any]:
    """One tile a program, or with a grain of 10**6 one program for all."""
    shared = {"num_warps": 4, "stages": 1, "ahead": 0, "grain": grain, "join": "rounds", "depth": 4}
    return {"method": method, "block": block, **shared}


# Indices in a tile's own turn, and parts a few at a time; or indices a tile ahead, and all parts at once.
WAYS = pytest.mark.parametrize("way", [{"ahead": 0, "join": "rounds"}, {"ahead": 1, "join": "once"}])


ONE_PROGRAM = 10**6


def refuses(kind: type[Exception], sentence: str) -> Any:
    return pytest.raises(kind, match=f"^{re.escape(sentence)}$")


def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def random_choice(shape: Sequence[int], rows: int, seed: int = 0) -> torch.Tensor:
    """Indices from -1 to rows - 1, repeats among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, rows, tuple(shape), generator=generator, dtype=torch.int32).to(DEVICE)


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head over lists of rows, in float64: the output and the LSE."""
    group, factor = q.shape[1] // k.shape[2], q.shape[2] ** -0.5 if scale is None else scale
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            chosen = indices[b] if indices.ndim == 2 else indices[b, h // group]
            rows = [row for row in chosen.tolist() if 0 <= row < k.shape[1]]
            if rows:
                x = (k[b, rows, h // group].double() @ q[b, h].double()).cpu() * factor
                lse[b, h] = x.logsumexp(0)
                out[b, h] = x.softmax(0) @ v[b, rows, h // group].double().cpu()
    return out.to(q.device), lse.to(q.device)


def paged(
    k: torch.Tensor, v: torch.Tensor, size: int, dtype: torch.dtype = torch.int32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same rows in pages in descending order, NaN in the page between and where pages are not full."""
    batch, rows, heads, columns = k.shape
    each = math.ceil(rows / size)
    table = torch.arange(batch * each).flip(0).view(batch, each).to(dtype).to(DEVICE) + 1
    caches = []
    for x in (k, v):
        cache = torch.full((batch * each + 1, size, heads, columns), math.nan, dtype=x.dtype, device=x.device)
        whole = torch.full((batch, each * size, heads, columns), math.nan, dtype=x.dtype, device=x.device)
        whole[:, :rows] = x
        cache[table.flatten().long()] = whole.view(batch * each, size, heads, columns)
        caches.append(cache)
    return caches[0], caches[1], table


def attend(form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, **options: Any) -> Any:
    """The operator over these rows, wherever they lie."""
    if form == "dense":
        return selected_attention(q, k, v, indices, **options)
    k_cache, v_cache, table = paged(k, v, 4)
    return selected_attention_paged(q, k_cache, v_cache, table, indices, **options)


# Closed forms.


# Lists of indices into 12 rows, the mean of what they choose and how many that is.
CHOICES: list[tuple[list[int], float, int]] = [
    ([2, 2, 5], 3.0, 3),
    ([-1, 3, -1], 3.0, 1),
    ([-7, 9, 1, -(2**31)], 5.0, 2),
    ([*range(10), *[-1] * 5, 4], 49 / 11, 11),
    ([3, 4, 12, 2**31 - 1], 3.5, 2),
    ([*range(12), *range(12)], 5.5, 24),
]


@FORMS
@pytest.mark.parametrize("method", METHODS)
def test_f46_equal_weights_give_the_mean_of_what_is_chosen(method: str, form: str) -> None:
    """Repeats count as often as they occur, negatives and indices beyond the cache not at all, S may pass N."""
    q = torch.zeros(len(CHOICES), 1, 16, dtype=torch.float16, device=DEVICE)
    k = randn(len(CHOICES), 12, 1, 16, dtype=torch.float16)
    v = torch.arange(12, device=DEVICE).half()[None, :, None, None].expand_as(k)
    indices = ints([[*chosen, *[-1] * (24 - len(chosen))] for chosen, _, _ in CHOICES])
    with _launch.forced(config(method)):
        out, lse = attend(form, q, k, v, indices, return_lse=True)
    assert out[:, 0].tolist() == [[pytest.approx(mean, rel=2e-3)] * 16 for _, mean, _ in CHOICES]
    assert lse[:, 0].tolist() == [pytest.approx(math.log(count), abs=1e-6) for _, _, count in CHOICES]


@FORMS
@pytest.mark.parametrize("method", METHODS)
def test_f46_no_choice_gives_zeros_and_an_infinite_lse(method: str, form: str) -> None:
    """Where every index is negative the output is exactly 0 and the LSE -inf, beside heads that have rows."""
    q, k, v = randn(2, 4, 16), randn(2, 8, 2, 16), randn(2, 8, 2, 16, seed=1)
    indices = random_choice((2, 2, 20), 8)
    indices[0, 1], indices[1, 0] = -1, -5
    with _launch.forced(config(method)):
        out, lse = attend(form, q, k, v, indices, return_lse=True)
    assert_right(out, oracle(q, k, v, indices)[0], q.dtype)
    assert (out[0, 2:] == 0).all()
    assert lse.isneginf().tolist() == [[False, False, True, True], [True, True, False, False]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_given_back(dtype: torch.dtype) -> None:
    """A single choice has weight 1: its value comes out bit for bit, and the LSE is its score."""
    q, k, v = randn(1, 2, 40, dtype=dtype), randn(1, 9, 2, 40, dtype=dtype), randn(1, 9, 2, 40, dtype=dtype, seed=1)
    out, lse = selected_attention(q, k, v, ints([[5]]), 0.25, return_lse=True)
    assert_same_bits(out, v[:, 5])
    assert torch.allclose(lse.double(), 0.25 * (q.double() * k[:, 5].double()).sum(-1), atol=1e-5)


def test_twice_the_list_changes_the_lse_alone() -> None:
    """Each row named twice as often: the same weights, and log 2 more in the LSE; any order will do."""
    q, k, v = randn(1, 4, 32), randn(1, 30, 2, 32), randn(1, 30, 2, 32, seed=1)
    indices = random_choice((1, 2, 20), 30)
    out, lse = selected_attention(q, k, v, indices, return_lse=True)
    again, more = selected_attention(q, k, v, torch.cat([indices.flip(-1), indices], -1), return_lse=True)
    assert torch.allclose(out, again, atol=1e-6)
    assert torch.allclose(lse + math.log(2), more, atol=1e-6)


def test_the_output_is_linear_in_the_values() -> None:
    """Twice the values give exactly twice the output."""
    q, k, v = randn(1, 4, 32), randn(1, 30, 2, 32), randn(1, 30, 2, 32, seed=1)
    indices = random_choice((1, 20), 30)
    assert_same_bits(selected_attention(q, k, v * 2, indices), selected_attention(q, k, v, indices) * 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "query", "key", "columns"), [(torch.float16, 16, -128, 128), (torch.float32, 1e5, -1e5, 64)]
)
def test_f25_scores_far_below_zero_still_win_over_the_mask(
    dtype: torch.dtype, query: float, key: float, columns: int, method: str
) -> None:
    """Equal scores of -262144 and less give the mean of three values exactly, and an LSE that is finite and right."""
    q = torch.full((1, 1, columns), query, dtype=dtype, device=DEVICE)
    k = torch.full((1, 3, 1, columns), key, dtype=dtype, device=DEVICE)
    v = torch.arange(1, 4, device=DEVICE).to(dtype)[None, :, None, None].expand_as(k)
    with _launch.forced(config(method, 64)):
        out, lse = selected_attention(q, k, v, ints([[0, 1, 2, -1]]), return_lse=True)
    assert (out == 2.0).all()
    score = columns * query * key / math.sqrt(columns)
    assert lse.item() == pytest.approx(score + math.log(3), rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_comes_out_where_pytorch_has_it(method: str) -> None:
    """NaN in a chosen key or value, and an infinite score, spread as in PyTorch; other heads stay clean."""
    q, k, v = randn(1, 8, 16).abs(), randn(1, 6, 4, 16), randn(1, 6, 4, 16, seed=1)
    k[0, 2, 0, 3], v[0, 2, 1, 4], k[0, 2, 2, 5] = math.nan, math.inf, -math.inf
    with _launch.forced(config(method)):
        out = selected_attention(q, k, v, ints([[2, 4, 1]]))
    expected, _ = selected_attention_reference(q, k, v, ints([[2, 4, 1]]))
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    assert out[0, :2].isnan().all()
    assert out[0, 2:4, 4].isinf().all()
    assert out[0, 4:].isfinite().all()


def test_the_oracle_of_the_case_is_the_formula() -> None:
    """Counting each row of the cache gives what lists of rows give, to 13 digits; so does the LSE."""
    for variant in case.CASE.variants:
        if variant.name != "paged":
            tensors = variant.inputs((2, 6, 2, 40, 17, 24), torch.float16, torch.Generator(DEVICE).manual_seed(1))
            found, expected = variant.oracle(*tensors), oracle(*tensors)[1 if variant.name == "lse" else 0]
            assert isinstance(found, torch.Tensor)
            assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


# Checks that must not accept another operator.


def _unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return selected_attention_reference(q, k, v, indices.clamp_min(0))[0]


def _without_repeats(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return selected_attention_reference(q, k, v, indices.unique()[None])[0]


def _finite_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    rows = indices[0].clamp_min(0).long()
    scores = (q[0, 0].double() * k[0, rows, 0].double()).sum(-1).masked_fill(indices[0] < 0, -5e4)
    return (scores.softmax(0)[:, None] * v[0, rows, 0].double())[None].sum(1, keepdim=True).to(q.dtype)


def _others_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return selected_attention_reference(q, k.roll(1, 2), v.roll(1, 2), indices)[0]


@pytest.mark.parametrize("wrong", [_unmasked, _without_repeats, _finite_mask, _others_head])
def test_a_planted_error_is_found(wrong: Callable[..., torch.Tensor]) -> None:
    """-1 read as row 0, repeats counted once, a finite mask and another head's rows all fail these checks."""
    q, k, v = randn(1, 4, 16) * 50, randn(1, 6, 4, 16), randn(1, 6, 4, 16, seed=1)
    k = -k.abs() * 1e4 * q.sign().amax()
    q = q.abs()
    one = wrong is _finite_mask
    indices = ints([[-1, 2, 2, 3, -1]])
    q, k, v = (q[:, :1], k[:, :, :1], v[:, :, :1]) if one else (q / 1e4, k / 1e2, v)
    expected, _ = oracle(q, k, v, indices)
    assert_right(selected_attention(q, k, v, indices), expected, q.dtype)
    with pytest.raises(AssertionError):
        assert_right(wrong(q, k, v, indices), expected, q.dtype)


# What is not chosen.


@FORMS
@pytest.mark.parametrize("method", METHODS)
def test_f23_nothing_leaks_from_rows_that_are_not_chosen(method: str, form: str) -> None:
    """NaN and infinity in other rows, beside the columns and under -1 leave every bit as it is."""
    q, lengths = randn(4, 2, 24, dtype=torch.float16), (0, 1, 17, 20)
    indices = torch.full((4, 1, 24), -1, dtype=torch.int32, device=DEVICE)
    clean = [randn(4, 20, 1, 24, dtype=torch.float16, seed=seed) for seed in (1, 2)]
    wide = torch.full((2, 4, 20, 1, 40), math.nan, dtype=torch.float16, device=DEVICE)
    wide[:, ::2] = math.inf
    for b, length in enumerate(lengths):
        indices[b, 0, :length] = random_choice((length,), 20).abs()
        rows = indices[b, 0, :length].long()
        wide[0, b, rows, :, 8:32], wide[1, b, rows, :, 8:32] = clean[0][b, rows], clean[1][b, rows]
    with _launch.forced(config(method)):
        expected = attend(form, q, clean[0], clean[1], indices, return_lse=True)
        found = attend(form, q, wide[0, ..., 8:32], wide[1, ..., 8:32], indices, return_lse=True)
    for each, right in zip(found, expected, strict=True):
        assert_same_bits(each, right)
    assert (found[0][0] == 0).all()
    assert found[0].isfinite().all()


# Shapes.


@pytest.mark.parametrize("method", ["rows", "group"])
@pytest.mark.parametrize("columns", [8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_f29_every_column_counts(columns: int, method: str) -> None:
    """With all the signal in the last eight columns the answer is right, whatever the head's size."""
    q, k, v = (
        randn(1, *shape, columns, dtype=torch.float16, seed=seed) for seed, shape in enumerate([(2,), (9, 1), (9, 1)])
    )
    for x in (q, k, v):
        x[..., :-8] = 0
    indices = random_choice((1, 20), 9)
    expected, expected_lse = oracle(q, k, v, indices, 0.5)
    with _launch.forced(config(method, 32)):
        out, lse = selected_attention(q, k, v, indices, 0.5, return_lse=True)
    assert_right(out[..., -8:].contiguous(), expected[..., -8:], q.dtype)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)
    assert (out[..., :-8] == 0).all()


def test_f29_a_head_wider_than_the_kernel_takes_is_said() -> None:
    """More than 256 columns are served by PyTorch, with the reason."""
    q, k = randn(1, 1, 264), randn(1, 5, 1, 264)
    with pytest.raises(routing.FallbackError, match=r"inputs: the kernel takes heads of up to 256 columns, not 264"):
        selected_attention(q, k, k, ints([[1, 2]]))
    with routing.strict(False), pytest.warns(routing.FallbackWarning):
        out = selected_attention(q, k, k, ints([[1, 2]]))
    assert_right(out, oracle(q, k, k, ints([[1, 2]]))[0], q.dtype)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("batch", "heads", "rows", "chosen"), [(2, 4, 8, 0), (2, 4, 0, 3), (0, 4, 8, 3), (2, 0, 8, 3)])
def test_f04_empty_inputs_launch_nothing(batch: int, heads: int, rows: int, chosen: int, warm: bool) -> None:
    """No choice, no row, no entry or no head: zeros of the right shape and LSE -inf, first call or not."""
    if warm:
        selected_attention(randn(1, 1, 16), randn(1, 2, 1, 16), randn(1, 2, 1, 16), ints([[0]]))
    bound = len(_launch.launches())
    q, k = randn(batch, heads, 16), randn(batch, rows, 2, 16)
    indices = torch.zeros(batch, chosen, dtype=torch.int32, device=DEVICE)
    pages = randn(rows, 4, 2, 16)
    table = torch.zeros(batch, min(rows, 2), dtype=torch.int32, device=DEVICE)
    for out, lse in (
        (
            selected_attention(q, k, k, indices, return_lse=True),
            selected_attention_paged(q, pages, pages, table, indices, return_lse=True),
        )
        if not (batch and heads and rows and chosen)
        else ()
    ):
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert (out == 0).all()
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
        assert lse.isneginf().all()
    assert len(_launch.launches()) == bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("hq", "hkv"), [(3, 2), (33, 2), (4, 8), (4, 0)])
def test_f31_heads_that_do_not_divide_raise(hq: int, hkv: int, dtype: torch.dtype) -> None:
    """A ValueError before anything runs, also where PyTorch would serve the call; nothing is left unwritten."""
    q, k = torch.zeros(1, hq, 16, dtype=dtype, device=DEVICE), torch.zeros(1, 5, hkv, 16, dtype=dtype, device=DEVICE)
    expected = f"q: expected a number of heads that %s's, {hkv}, divides, got {hq} heads."
    with refuses(ValueError, "selected_attention: " + expected % "k"):
        selected_attention(q, k, k, ints([[0]]))
    with refuses(ValueError, "selected_attention_paged: " + expected % "k_cache"):
        selected_attention_paged(q, k, k, ints([[0]]), ints([[0]]))


@WAYS
@pytest.mark.parametrize(("method", "hq", "hkv"), [("rows", 6, 2), ("group", 6, 2), ("group", 33, 1), ("group", 32, 2)])
def test_groups_of_every_size(method: str, hq: int, hkv: int, way: dict[str, Any]) -> None:
    """Groups below, at and above what one program takes are each served whole, in one split and in several."""
    q, k, v = randn(1, hq, 16), randn(1, 40, hkv, 16), randn(1, 40, hkv, 16, seed=1)
    indices = random_choice((1, hkv, 40), 40)
    expected, expected_lse = oracle(q, k, v, indices)
    for grain in (100, ONE_PROGRAM):
        with _launch.forced(config(method, 32, grain) | way):
            out, lse = selected_attention(q, k, v, indices, return_lse=True)
        assert_right(out, expected, q.dtype)
        assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the sizes, dtypes and layouts, and wherever indices come from."""
    batch, hkv, group, rows, chosen, columns = (data.draw(st.integers(1, top)) for top in (2, 2, 3, 9, 24, 33))
    dtype = data.draw(st.sampled_from(DTYPES))
    k, v = (
        strided(
            (batch, rows, hkv, columns),
            [*(data.draw(st.sampled_from([0, 33, 70, 297])) for _ in range(3)), data.draw(st.sampled_from([1, 1, 2]))],
            dtype,
            offset=data.draw(st.integers(0, 9)),
        )
        for _ in range(2)
    )
    q = randn(batch, hkv * group, columns, dtype=dtype)
    indices = random_choice((batch, chosen) if data.draw(st.booleans()) else (batch, hkv, chosen), rows)
    if data.draw(st.booleans()):
        indices = indices.long()
    assert_right(selected_attention(q, k, v, indices), oracle(q, k, v, indices)[0], dtype)


# Splits.


@FORMS
@WAYS
@pytest.mark.parametrize("method", METHODS)
def test_f32_empty_splits_change_nothing(method: str, way: dict[str, Any], form: str) -> None:
    """Eight splits of which seven own no row, for lists of 0, 1, 3 and 7 in a batch: the bits of one split."""
    q, k, v = randn(4, 1, 16), randn(4, 8, 1, 16), randn(4, 8, 1, 16, seed=1)
    indices = torch.full((4, 128), -1, dtype=torch.int32, device=DEVICE)
    for b, length in enumerate((0, 1, 3, 7)):
        indices[b, :length] = random_choice((length,), 8).abs()
    with _launch.forced(config(method) | way):
        parts = attend(form, q, k, v, indices, return_lse=True)
        whole = attend(form, q, k, v, indices[..., :16], return_lse=True)
    for found, expected in zip(parts, whole, strict=True):
        assert_same_bits(found, expected)
    assert (parts[0][0] == 0).all()
    assert parts[1][0].isneginf().all()


@WAYS
@pytest.mark.parametrize("method", METHODS)
def test_splits_of_any_number_are_the_one_split(method: str, way: dict[str, Any]) -> None:
    """One tile a program or all in one: the same to rounding, last tile short, more parts than are joined at once."""
    q, k, v = randn(1, 1, 256), randn(1, 60, 1, 256), randn(1, 60, 1, 256, seed=1)
    indices = random_choice((1, 150), 60)
    expected, _ = oracle(q, k, v, indices)
    for grain in (100, 1200, ONE_PROGRAM):
        with _launch.forced(config(method, 32, grain) | way | {"num_warps": 1}):
            assert_right(selected_attention(q, k, v, indices), expected, q.dtype)


def test_f42_a_second_call_is_the_first() -> None:
    """The counters are left at zero and nothing is added to what an earlier call has written."""
    q, k, v = (torch.ones(1, *shape, 16, dtype=torch.float16, device=DEVICE) for shape in ((2,), (8, 1), (8, 1)))
    indices = random_choice((1, 100), 8).abs()
    for _ in range(3):
        out, lse = selected_attention(q, k, v, indices, return_lse=True)
        assert (out == 1).all()
        assert lse.tolist() == [[pytest.approx(4 + math.log(100), rel=1e-6)] * 2]
    assert any(launch.kernel for launch in _launch.launches()) or checks.INTERPRETED


@pytest.mark.parametrize("grain", [50, 100, 200])
@pytest.mark.parametrize("tasks", [1, 8, 64, 128, 4096])
def test_shares_grow_without_cliffs(tasks: int, grain: int) -> None:
    """Every tile has a program and every program a tile; one tile more never changes a share by much."""
    before = 1
    for tiles in range(1, 400):
        splits, each = op._shares(tiles, tasks, 132, grain)
        assert (splits - 1) * each < tiles <= splits * each
        assert abs(each - before) <= max(1, before / 2)
        before = each


# Pages.


@WAYS
@pytest.mark.parametrize(("method", "size"), [("rows", 3), ("group", 1), ("group", 16)])
def test_pages_give_the_bits_of_a_cache_without(size: int, method: str, way: dict[str, Any]) -> None:
    """Through a table, in any order and with pages of any size, the result is that of the gathered rows."""
    q, k, v = randn(2, 2, 24), randn(2, 50, 2, 24), randn(2, 50, 2, 24, seed=1)
    indices = random_choice((2, 2, 137), 50)
    k_cache, v_cache, table = paged(k, v, size)
    # A tile a program, two, and all of them.
    for grain in (100, 800, ONE_PROGRAM):
        with _launch.forced(config(method, 32, grain) | way):
            assert_same_bits(
                selected_attention_paged(q, k_cache, v_cache, table, indices), selected_attention(q, k, v, indices)
            )


@functools.cache
def four_pages() -> tuple[torch.Tensor, ...]:
    """A query, and 4 pages of 16 rows of keys and values."""
    return randn(1, 2, 16), randn(4, 16, 1, 16), randn(4, 16, 1, 16, seed=1)


TABLES: dict[str, tuple[Callable[[], torch.Tensor], list[int]]] = {
    "unsorted": (lambda: ints([[3, 0, 2]]), [3, 0, 2]),
    "duplicate": (lambda: ints([[1, 1]]), [1, 1]),
    "int64": (lambda: ints([[3, 0, 2]], torch.int64), [3, 0, 2]),
    "every_second": (lambda: ints([[3, 9, 0, 9, 2, 9]])[:, ::2], [3, 0, 2]),
    "at_the_end": (lambda: ints([9, 9, 9, 3, 0, 2])[3:].view(1, 3), [3, 0, 2]),
}


@pytest.mark.parametrize("table", TABLES)
def test_f44_tables_of_any_order_type_and_layout(table: str) -> None:
    """Unsorted, repeated, 64-bit, strided and at the end of its storage: plain indexing's result."""
    q, k, v = four_pages()
    made, pages = TABLES[table]
    rows, values = (x[pages].flatten(0, 1)[None] for x in (k, v))
    indices = random_choice((1, 40), rows.shape[1])
    assert_right(selected_attention_paged(q, k, v, made(), indices), oracle(q, rows, values, indices)[0], q.dtype)


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_f44_pages_outside_the_cache_raise_when_validating_and_choose_nothing_else(bad: int) -> None:
    """Within the chosen rows a bad page is an error or no choice; among rows that nobody chose it is ignored."""
    q, k, v = four_pages()
    table = ints([[2, bad, 1]])
    used, unused = ints([[3, 17, 40]]), ints([[3, -1, 40]])
    expected = selected_attention_paged(q, k, v, ints([[2, 0, 1]]), unused)
    assert_same_bits(selected_attention_paged(q, k, v, table, unused, validate=True), expected)
    assert_same_bits(selected_attention_paged(q, k, v, table, used), expected)
    assert torch.allclose(selected_attention_paged_reference(q, k, v, table, used)[0], expected, atol=1e-6)
    sentence = f"selected_attention_paged: page_table: expected pages below 4 for chosen rows, got [{bad}]."
    with refuses(ValueError, sentence):
        selected_attention_paged(q, k, v, table, used, validate=True)


def test_f46_indices_beyond_the_cache_raise_when_validating() -> None:
    """The sentence says how many rows there are; negative indices are allowed."""
    q, k, v = four_pages()
    selected_attention(q, k[:1], v[:1], ints([[15, -1]]), validate=True)
    with pytest.raises(ValueError, match=r"^selected_attention: indices: expected indices below 16, got \[16\]\.$"):
        selected_attention(q, k[:1], v[:1], ints([[15, 16]]), validate=True)
    with pytest.raises(
        ValueError, match=r"^selected_attention_paged: indices: expected indices below 32, got \[32\]\.$"
    ):
        selected_attention_paged(q, k, v, ints([[0, 1]]), ints([[32]]), validate=True)


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops.selected_attention import selected_attention, selected_attention_paged
rows = checks.far_apart(64)
if rows is None:
    print("no memory")
else:
    k, v = rows[None, :, None, :32], rows[None, :, None, 32:]
    q = checks.randn(1, 1, 32, dtype=torch.float16)
    indices = torch.tensor([[2, 0, 2]], device=q.device)
    with routing.strict():
        expected = selected_attention(q, k.contiguous(), v.contiguous(), indices)
        assert torch.equal(selected_attention(q, k, v, indices), expected)
        table = torch.tensor([[0, 1, 2]], device=q.device)
        pages = (x.transpose(0, 1) for x in (k, v))
        assert torch.equal(selected_attention_paged(q, *pages, table, indices), expected)
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Rows and pages that begin more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "contiguous": lambda seed: randn(1, 40, 2, 64, dtype=torch.float16, seed=seed),
    "every_second_row": lambda seed: randn(1, 80, 2, 64, dtype=torch.float16, seed=seed)[:, ::2],
    "heads_first": lambda seed: randn(1, 2, 40, 64, dtype=torch.float16, seed=seed).transpose(1, 2),
    "packed": lambda seed: randn(1, 40, 6, 64, dtype=torch.float16, seed=seed)[:, :, 2 * seed : 2 * seed + 2],
    "columns_first": lambda seed: randn(1, 64, 2, 40, dtype=torch.float16, seed=seed).transpose(1, 3),
    "one_head": lambda seed: randn(1, 40, 1, 64, dtype=torch.float16, seed=seed).expand(1, 40, 2, 64),
}


@pytest.mark.parametrize(("k_layout", "v_layout"), [(a, b) for a in LAYOUTS for b in LAYOUTS if "contiguous" in (a, b)])
def test_f12_keys_and_values_of_different_layouts(
    k_layout: str, v_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is read with the strides of the other, and neither is copied: the bits of contiguous copies."""
    q, k, v = randn(1, 2, 64, dtype=torch.float16), LAYOUTS[k_layout](1), LAYOUTS[v_layout](2)
    indices = random_choice((1, 2, 8), 40)
    expected = selected_attention(q, k.contiguous(), v.contiguous(), indices)
    assert_right(expected, oracle(q, k, v, indices)[0], q.dtype)
    copies = checks.copies(monkeypatch)
    out = selected_attention(q, k, v, indices)
    assert copies == []
    assert_same_bits(out, expected)


def test_f12_queries_and_indices_of_any_layout() -> None:
    """One packed tensor for q, k and v, and every second index of a transposed list: the bits of copies."""
    packed = randn(40, 1, 18, 64, dtype=torch.float16)
    q, k, v = packed[3, :, :16], packed[:, :, 16:17].transpose(0, 1), packed[:, :, 17:].transpose(0, 1)
    indices = random_choice((16, 2, 1), 40).transpose(0, 2)[:, ::2]
    expected = selected_attention(*(x.contiguous() for x in (q, k, v, indices)))
    assert_same_bits(selected_attention(q, k, v, indices), expected)
    assert_same_bits(selected_attention(q, k, v, indices[:, 0].long()), expected)


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    q, base = randn(1, 2, 16, dtype=torch.float16), randn(1 + 640, dtype=torch.float16)
    plans = []
    for start in (0, 1, 0):
        k = base[start : start + 640].view(1, 40, 1, 16)
        indices = random_choice((1, 20), 40)
        assert_right(selected_attention(q, k, k, indices), oracle(q, k, k, indices)[0], q.dtype)
        plans.append(len(op._plans))
    assert plans == [1, 2, 2]


# Gradients.


@FORMS
def test_f49_gradients_are_right(form: str) -> None:
    """By finite differences, through output and LSE, with repeats, -1, an empty head, and NaN that is not chosen."""
    q, k, v = (randn(1, *shape, 3, seed=seed).double() for seed, shape in enumerate([(4,), (5, 2), (5, 2)]))
    k[:, 4], v[:, 4] = math.nan, math.nan
    indices = ints([[[3, 3, -1, 0, 2], [-1, -1, -1, -1, -1]]])
    leaves = [x.requires_grad_() for x in (q, k[:, :4].clone(), v[:, :4].clone())]

    def whole(q: torch.Tensor, k_used: torch.Tensor, v_used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.cat([a, b[:, 4:]], 1) for a, b in ((k_used, k), (v_used, v)))
        out, lse = attend(form, q, keys, values, indices, return_lse=True)
        return out, lse[:, :2]

    with routing.strict(False):
        assert torch.autograd.gradcheck(whole, leaves)
        whole(*leaves)[0].sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize(
    "asked", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, ...]) -> None:
    """The graph is never cut, what asks for no gradient gets none, and under no_grad Triton serves the call."""
    q, k, v = (
        randn(1, *shape, 16, seed=7).requires_grad_(wanted)
        for shape, wanted in zip([(2,), (5, 1), (5, 1)], asked, strict=True)
    )
    indices = ints([[1, 4]])
    with torch.no_grad():
        expected = selected_attention(q, k, v, indices)
    with pytest.raises(routing.FallbackError, match="autograd"):
        selected_attention(q, k, v, indices)
    with routing.strict(False):
        out = selected_attention(q, k, v, indices)
        out.sum().backward()
    assert torch.allclose(out, expected, atol=1e-6)
    assert tuple(x.grad is not None for x in (q, k, v)) == asked


# The compiler, fake and meta tensors.


@pytest.mark.parametrize(("wants_grad", "form"), [(False, "dense"), (True, "dense"), (False, "paged")])
def test_f56_compiles_into_one_graph(wants_grad: bool, form: str) -> None:
    """torch.compile meets no graph break, and the result is the eager call's."""
    torch._dynamo.reset()
    k, v = randn(1, 8, 1, 16), randn(1, 8, 1, 16, seed=1)
    k_cache, v_cache, table = paged(k, v, 4)

    def both(q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if form == "dense":
            out, lse = selected_attention(q, k, v, indices, return_lse=True)
            return out + lse[..., None] + selected_attention(q, k, v, indices)
        return selected_attention_paged(q, k_cache, v_cache, table, indices)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    with routing.strict(False):
        for chosen in (1, 20):
            q, indices = randn(1, 2, 16).requires_grad_(wants_grad), random_choice((1, chosen), 8).abs()
            assert torch.equal(compiled(q, indices), both(q, indices))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs, and both results are described as they would come."""
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((3, 8, 80), (3, 50, 2, 80)))
    indices = torch.empty(3, 2, 7, dtype=torch.int32, device="meta")
    out, lse = selected_attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, k, indices, return_lse=True)
    assert (out.shape, out.dtype, out.stride(), out.is_meta) == (q.shape, dtype, (640, 80, 1), True)
    assert (lse.shape, lse.dtype, lse.is_meta) == ((3, 8), torch.float32, True)


def test_f56_torch_library_finds_the_op_sound() -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes, with pages and without."""
    q, k, v = four_pages()
    torch.library.opcheck(op._selected_attention_op, (q, k, v, ints([[3, 0]]), ints([[1, 20]]), 0.25))
    torch.library.opcheck(op._selected_attention_op, (q, k[:1], v[:1], None, ints([[1, 9]]), 0.25))


# Errors.


def _call(**changes: Any) -> torch.Tensor:
    tensors = {"q": torch.zeros(2, 4, 16), "k": torch.zeros(2, 5, 2, 16), "v": torch.zeros(2, 5, 2, 16)}
    tensors |= {"indices": torch.zeros(2, 2, 3, dtype=torch.int32)} | changes
    return selected_attention(**{name: x.to(DEVICE) for name, x in tensors.items()})


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("q", torch.zeros(4, 16), "q: expected a shape [B, Hq, D], got (4, 16)."),
        ("k", torch.zeros(2, 5, 16), "k: expected a shape [B, N, Hkv, D], got (2, 5, 16)."),
        ("k", torch.zeros(2, 5, 2, 8), "k: expected the D of q, 16, last, got (2, 5, 2, 8)."),
        ("k", torch.zeros(1, 5, 2, 16), "k: expected the B of q, 2, first, got (1, 5, 2, 16)."),
        ("v", torch.zeros(2, 6, 2, 16), "v: expected the shape of k, (2, 5, 2, 16), got (2, 6, 2, 16)."),
        ("indices", torch.zeros(2, 4, 3).int(), "indices: expected a shape [2, 2, S] or [2, S], got (2, 4, 3)."),
        ("indices", torch.zeros(3).int(), "indices: expected a shape [2, 2, S] or [2, S], got (3,)."),
    ],
)
def test_shapes_that_do_not_fit_are_named(argument: str, value: torch.Tensor, sentence: str) -> None:
    """Nothing is broadcast: one sentence names argument, expected and found."""
    with refuses(ValueError, f"selected_attention: {sentence}"):
        _call(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("q", torch.zeros(2, 4, 16).int(), "q: expected a floating-point tensor, got torch.int32."),
        ("k", torch.zeros(2, 5, 2, 16).half(), "k: expected the dtype of q, torch.float32, got torch.float16."),
        ("v", torch.zeros(2, 5, 2, 16).half(), "v: expected the dtype of q, torch.float32, got torch.float16."),
        ("indices", torch.zeros(2, 2, 3), "indices: expected int32 or int64, got torch.float32."),
    ],
)
def test_dtypes_that_do_not_fit_are_named(argument: str, value: torch.Tensor, sentence: str) -> None:
    """Dtypes that differ, or indices that are no integers, are a TypeError before anything is launched."""
    with refuses(TypeError, f"selected_attention: {sentence}"):
        _call(**{argument: value})


@pytest.mark.parametrize(
    ("table", "kind", "sentence"),
    [
        (torch.zeros(3).int(), ValueError, "page_table: expected a shape [1, max_pages], got (3,)."),
        (torch.zeros(2, 3).int(), ValueError, "page_table: expected a shape [1, max_pages], got (2, 3)."),
        (torch.zeros(1, 3), TypeError, "page_table: expected int32 or int64, got torch.float32."),
    ],
)
def test_tables_that_do_not_fit_are_named(table: torch.Tensor, kind: type[Exception], sentence: str) -> None:
    """The page table has a row an entry, of integers."""
    q, k, v = four_pages()
    with refuses(kind, f"selected_attention_paged: {sentence}"):
        selected_attention_paged(q, k, v, table.to(DEVICE), ints([[0]]))


# On a GPU.


@pytest.mark.gpu
def test_f62_a_captured_call_follows_its_inputs() -> None:
    """Warmed up and captured with splits, each replay attends to what q and the indices hold by then."""
    q, k, v = randn(1, 8, 128).half(), randn(1, 2000, 2, 128).half(), randn(1, 2000, 2, 128, seed=1).half()
    indices = random_choice((1, 2, 1500), 2000)
    selected_attention(q, k, v, indices, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = selected_attention(q, k, v, indices, return_lse=True)
    for seed in (1, 2, 3):
        q.copy_(randn(1, 8, 128, seed=seed))
        indices.copy_(random_choice((1, 2, 1500), 2000, seed))
        graph.replay()
        expected, expected_lse = oracle(q, k, v, indices)
        assert_right(out, expected, q.dtype)
        assert torch.allclose(lse.double(), expected_lse, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_f22_twenty_runs_give_the_same_bits(method: str) -> None:
    """Whoever comes last joins the parts, the bits are the same, and so they are on another stream."""
    q, k, v = randn(2, 8, 128).half(), randn(2, 4096, 2, 128).half(), randn(2, 4096, 2, 128, seed=1).half()
    indices = random_choice((2, 2, 4096), 4096)
    with _launch.forced(config(method, 64)):
        first = selected_attention(q, k, v, indices)
        for _ in range(20):
            assert_same_bits(selected_attention(q, k, v, indices), first)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert_same_bits(selected_attention(q, k, v, indices), first)


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_line_for_large_batches_is_right_on_a_gpu(dtype: torch.dtype, form: str) -> None:
    """With indices a tile ahead, a short last tile and a few large programs: right, and the same bits in each run."""
    line = [each["config"] for each in _launch._table("selected_attention")["sm_90"] if each["max_itemsize"] == 2][-1]
    assert line["ahead"] == 1
    q, k, v = randn(2, 8, 128).to(dtype), randn(2, 5000, 2, 128).to(dtype), randn(2, 5000, 2, 128, seed=1).to(dtype)
    indices = random_choice((2, 2, 3000), 5000)
    with _launch.forced(line):
        first = attend(form, q, k, v, indices)
        assert_right(first, oracle(q, k, v, indices)[0], dtype)
        for _ in range(20):
            assert_same_bits(attend(form, q, k, v, indices), first)


@pytest.mark.gpu
def test_f10_misaligned_after_aligned_on_a_gpu() -> None:
    """Aligned, shifted by one element, aligned again: three right results."""
    q, base = randn(1, 8, 128, dtype=torch.float16), randn(1 + 100 * 256, dtype=torch.float16)
    indices = random_choice((1, 2, 90), 100)
    for start in (0, 1, 0):
        k = base[start : start + 100 * 256].view(1, 100, 2, 128)
        assert_right(selected_attention(q, k, k, indices), oracle(q, k, k, indices)[0], q.dtype)


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize(
    ("batch", "hq", "hkv", "rows", "chosen", "columns"),
    [
        (1, 1, 1, 256, 64, 128),
        (1, 1, 1, 1024, 256, 128),
        (1, 1, 1, 8192, 4096, 128),
        (2, 32, 8, 1024, 1024, 128),
        (3, 12, 3, 500, 333, 80),
        (1, 40, 1, 300, 300, 256),
        (2, 4, 4, 100, 99, 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tracked_launches_are_right_on_a_gpu(
    batch: int, hq: int, hkv: int, rows: int, chosen: int, columns: int, dtype: torch.dtype, form: str
) -> None:
    """What the launch table chooses for this GPU gives the answer, bf16 included, with pages and without."""
    q, k, v = (
        randn(batch, *shape, columns, dtype=dtype, seed=seed)
        for seed, shape in enumerate([(hq,), (rows, hkv), (rows, hkv)])
    )
    indices = random_choice((batch, hkv, chosen), rows)
    out, lse = attend(form, q, k, v, indices, return_lse=True)
    expected, expected_lse = oracle(q, k, v, indices)
    # Weights are rounded before they meet the values.
    assert (out.double() - expected).norm() <= (
        1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    ) * expected.norm()
    assert torch.allclose(lse.double(), expected_lse, atol=1e-4)
