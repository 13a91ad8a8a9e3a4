"""Query-key scores: closed forms, groups, features, layouts, gradients, launches; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, DTYPES, INTERPRETED, POISON, assert_same_bits, randn, strided

from triton_kernel_lab import routing
from triton_kernel_lab.cases import qk_scores as case
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops._triton import tl, triton
from triton_kernel_lab.ops.qk_scores import qk_scores, qk_scores_reference

op = importlib.import_module("triton_kernel_lab.ops.qk_scores")
KEYS = {"kernel": "keys", "block": 32, "num_warps": 4, "evict": ""}
GROUP = {"kernel": "group", "block": 32, "num_warps": 4, "evict": "", "tile": 8, "steps": 2, "stages": 1}
# What the op promises in any dtype: the sum is fp32's, and the inputs are taken as they are.
LIMIT = check.Limit(1e-5, 2e-6)


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def oracle(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    scores: torch.Tensor = case.oracle(q, k)
    return scores if scale is None else scores * math.sqrt(q.shape[-1]) * scale


def drawn(
    batch: int, heads: int, kv_heads: int, keys: int, features: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    q = randn(batch, heads, features, dtype=dtype)
    return q, randn(batch, keys, kv_heads, features, dtype=dtype, seed=1)


def failures(scores: torch.Tensor, expected: torch.Tensor) -> list[str]:
    return check.verdict(check.measure(scores, expected), LIMIT)


def assert_same(scores: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; on a GPU, where the order of a sum follows the layout of the keys, the same to fp32's error."""
    if INTERPRETED:
        assert_same_bits(scores, expected)
    else:
        assert_scores(scores, expected.double())


def assert_scores(scores: torch.Tensor, expected: torch.Tensor) -> None:
    """The scores are fp32, dense and right."""
    assert (scores.shape, scores.dtype, scores.device) == (expected.shape, torch.float32, expected.device)
    assert scores.is_contiguous()
    assert failures(scores, expected) == []


# Closed forms.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [KEYS, GROUP], ids=["keys", "group"])
def test_a_query_that_is_one_feature_picks_it_out_of_each_key(config: dict[str, object], dtype: torch.dtype) -> None:
    """With q a row of the identity and scale 1, the scores are one column of k, exactly."""
    _, k = drawn(1, 5, 1, 37, 16, dtype)
    q = torch.eye(16, dtype=dtype, device=DEVICE)[None, :5]
    with _launch.forced(config):
        assert_same_bits(qk_scores(q, k, 1.0), k[:, :, 0, :5].float().transpose(1, 2).contiguous())


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_query_against_itself_is_its_squared_length(kv_heads: int) -> None:
    """The sum of D ones is D, and 1/sqrt(D) the default scale: ones give sqrt(D)."""
    q = torch.ones(2, 4, 64, dtype=torch.float16, device=DEVICE)
    k = torch.ones(2, 3, kv_heads, 64, dtype=torch.float16, device=DEVICE)
    assert_same_bits(qk_scores(q, k), torch.full((2, 4, 3), 8.0, device=DEVICE))


def test_a_power_of_two_as_scale_is_exact() -> None:
    """Scaling by 4 multiplies the scores of scale 1 by 4, bit for bit; scale 0 gives zeros."""
    q, k = drawn(2, 4, 2, 19, 48)
    assert_same_bits(qk_scores(q, k, 4.0), qk_scores(q, k, 1.0) * 4)
    assert not qk_scores(q, k, 0.0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_the_range_of_16_bits_are_finite(dtype: torch.dtype) -> None:
    """300 x 300 x 128 overflows fp16; the scores are fp32 from the first product on."""
    q, k = (torch.full(shape, 300.0, dtype=dtype, device=DEVICE) for shape in ((1, 2, 128), (1, 3, 1, 128)))
    assert_same_bits(qk_scores(q, k, 1.0), torch.full((1, 2, 3), 300.0 * 300.0 * 128, device=DEVICE))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("config", [KEYS, GROUP], ids=["keys", "group"])
def test_what_is_not_finite_stays_with_its_key_and_query(config: dict[str, object]) -> None:
    """NaN and infinity come out where PyTorch has them, and in no other score."""
    q, k = drawn(1, 4, 2, 21, 40)
    k[0, 3, 0, 5], k[0, 7, 1, 0], k[0, 20, 1, 39], q[0, 1, 2] = math.nan, math.inf, -math.inf, math.inf
    with _launch.forced(config):
        scores, expected = qk_scores(q, k), qk_scores_reference(q, k)
    assert 0 < expected.isnan().sum() < 10
    assert torch.equal(scores.isnan(), expected.isnan())
    assert torch.equal(scores == math.inf, expected == math.inf)
    assert torch.equal(scores == -math.inf, expected == -math.inf)


# Shapes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [1, 8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 300])
def test_f29_every_feature_counts(features: int, dtype: torch.dtype) -> None:
    """All the signal lies in the last 8 features, whatever their number, and none beyond them is read."""
    q, k = drawn(1, 4, 1, 5, features, dtype)
    q[..., : max(features - 8, 0)] = 0
    (q, q_untouched), (k, k_untouched) = checks.amid_poison(q), checks.amid_poison(k)
    for config in (KEYS, GROUP):
        with _launch.forced(config):
            assert_scores(qk_scores(q, k), oracle(q, k))
    assert q_untouched()
    assert k_untouched()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("dims", [(0, 4, 2, 5, 8), (2, 0, 2, 5, 8), (2, 4, 2, 0, 8)])
def test_f04_no_scores_launch_nothing(dims: tuple[int, ...], warm: bool) -> None:
    """Zero sequences, queries or keys give the right empty shape, first call or not."""
    if warm:
        qk_scores(*drawn(2, 4, 2, 5, 8))
    batch, heads, kv_heads, keys, features = dims
    q = torch.empty(batch, heads, features, dtype=torch.float16, device=DEVICE)
    k = torch.empty(batch, keys, kv_heads, features, dtype=torch.float16, device=DEVICE)
    bound = len(_launch.launches())
    scores = qk_scores(q, k)
    assert (scores.shape, scores.dtype, scores.device) == ((batch, heads, keys), torch.float32, q.device)
    assert len(_launch.launches()) == bound


def test_f04_a_product_of_no_features_is_zero() -> None:
    """The empty sum is 0 in every score, not what the memory held."""
    q, k = torch.empty(2, 4, 0, device=DEVICE), torch.empty(2, 3, 2, 0, device=DEVICE)
    assert_same_bits(qk_scores(q, k), torch.zeros(2, 4, 3, device=DEVICE))


def test_f06_keys_beyond_the_last_are_not_read() -> None:
    """A cache whose unused rows hold large values gives the scores of the used ones alone."""
    q, cache = drawn(2, 4, 2, 40, 24)
    cache[:, 33:] = POISON
    assert_scores(qk_scores(q, cache[:, :33]), oracle(q, cache[:, :33].contiguous()))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_f07_any_shape_and_strides_agree_with_float64(data: st.DataObject) -> None:
    """Whatever the sizes, groups, strides, dtype and kernel, q and k laid out apart."""
    batch, kv_heads, group, keys = (data.draw(st.integers(1, high)) for high in (3, 3, 4, 40))
    features, dtype = data.draw(st.integers(1, 70)), data.draw(st.sampled_from(DTYPES))
    q_strides = [data.draw(st.sampled_from([0, 3, 70, 97, 210])) for _ in range(2)]
    k_strides = [data.draw(st.sampled_from([0, 1, 16, 70, 97, 560])) for _ in range(3)]
    q_strides.append(data.draw(st.sampled_from([1, 1, 2])))
    k_strides.append(data.draw(st.sampled_from([1, 1, 2, 40])))
    q = strided([batch, kv_heads * group, features], q_strides, dtype, offset=data.draw(st.integers(0, 9)))
    k = strided([batch, keys, kv_heads, features], k_strides, dtype, offset=data.draw(st.integers(0, 9)))
    with _launch.forced({**data.draw(st.sampled_from([KEYS, GROUP])), "block": data.draw(st.sampled_from([4, 32]))}):
        scores = qk_scores(q, k)
        assert failures(scores, oracle(q, k)) == []
        assert_same(scores, qk_scores(q.contiguous(), k.contiguous()))


@pytest.mark.parametrize("dims", [(8, 1, 1, 1, 128), (3, 6, 3, 1, 40), (5, 4, 1, 1, 8)])
def test_each_query_with_a_key_of_its_own(dims: tuple[int, ...]) -> None:
    """With one key a sequence the scores are dot products of rows, several of them a program."""
    q, k = drawn(*dims)
    assert_scores(qk_scores(q, k), oracle(q, k))


def test_more_sequences_than_a_launch_has_along_an_axis() -> None:
    """Where the grid is too small for the sequences, rows of all of them share a program."""
    q, k = drawn(6, 4, 2, 5, 24)
    expected = oracle(q, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_GRID_LIMIT", 5)
        assert_scores(qk_scores(q, k), expected)


# Groups.


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (4, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("route", ["kernel", "reference", "autograd", "meta"])
def test_f31_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, route: str) -> None:
    """ValueError before anything is launched, on every path: no key head is made up or left out."""
    dtype = torch.float64 if route == "reference" else torch.float16
    device = "meta" if route == "meta" else DEVICE
    q = torch.zeros(2, heads, 8, dtype=dtype, device=device, requires_grad=route == "autograd")
    k = torch.zeros(2, 5, kv_heads, 8, dtype=dtype, device=device)
    with routing.strict(False), pytest.raises(ValueError, match="divides") as caught:
        qk_scores(q, k)
    assert str(caught.value) == f"qk_scores: k: expected a number of heads that divides q's {heads}, got {kv_heads}."
    assert _launch.launches() == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (8, 2), (140, 1)])
def test_f31_each_group_meets_its_own_keys(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Query head h sees key head h // group and no other; groups wider than a tile are cut."""
    q, k = drawn(1, heads, kv_heads, 33, 24, dtype)
    for config in (KEYS, GROUP):
        with _launch.forced(config):
            scores = qk_scores(q, k)
        assert_scores(scores, oracle(q, k))
        for h in range(kv_heads):
            group = slice(h * heads // kv_heads, (h + 1) * heads // kv_heads)
            alone = k.clone()
            alone[:, :, torch.arange(kv_heads, device=DEVICE) != h] = POISON
            with _launch.forced(config):
                assert_same_bits(qk_scores(q, alone)[:, group].contiguous(), scores[:, group].contiguous())


def test_f31_heads_mapped_the_other_way_would_be_noticed() -> None:
    """The check that these tests make fails for a kernel that takes key head h % Hkv."""
    q, k = drawn(1, 8, 2, 33, 24)
    wrong = qk_scores(q.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2), k)
    assert failures(wrong, oracle(q, k)) != []
    assert failures(qk_scores(q, k), oracle(q, k)) == []


# Addressing and layouts.

F01 = """
import operator_checks as checks, torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.qk_scores import qk_scores
def same(scores, expected):
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-5), scores.shape
x = checks.far_apart(64)
if x is None:
    print("no memory")
else:
    q = checks.randn(1, 4, 64, dtype=torch.float16)
    with routing.strict():
        for block in (1, 4):
            for config in ({"kernel": "keys"}, {"kernel": "group", "tile": 8, "steps": 2, "stages": 1}):
                with _launch.forced({"block": block, "num_warps": 4, "evict": "", **config}):
                    for k in (x[None, :, None], x[None, None], x[:, None, None], x[:, :32].T[None, :, None]):
                        heads, features = k.shape[2], k.shape[3]
                        queries = q.repeat(k.shape[0], 3, 1)[:, : 4 * heads, :features]
                        same(qk_scores(queries, k), qk_scores(queries, k.contiguous()))
                    k = checks.randn(3, 5, 1, 64, dtype=torch.float16)
                    same(qk_scores(x[:, None], k), qk_scores(x[:, None].contiguous(), k))
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Keys, heads, sequences and features more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS = {
    "contiguous": lambda: randn(2, 12, 2, 40, dtype=torch.float16),
    "heads_first": lambda: randn(2, 2, 12, 40, dtype=torch.float16).transpose(1, 2),
    "keys_last": lambda: randn(2, 2, 40, 12, dtype=torch.float16).permute(0, 3, 1, 2),
    "every_second_feature": lambda: randn(2, 12, 2, 80, dtype=torch.float16)[..., ::2],
    "packed_with_values": lambda: randn(2, 12, 4, 40, dtype=torch.float16)[:, :, :2],
    "one_key_for_all": lambda: randn(1, 1, 2, 40, dtype=torch.float16).expand(2, 12, 2, 40),
}


@pytest.mark.parametrize("config", [KEYS, GROUP], ids=["keys", "group"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_f07_layouts_are_read_in_place(layout: str, config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """No layout of the cache is copied first, and each gives the scores of a contiguous copy."""
    q, k = randn(2, 4, 40, dtype=torch.float16), LAYOUTS[layout]()
    dense = k.clone(memory_format=torch.contiguous_format)
    copies = checks.copies(monkeypatch)
    with _launch.forced(config):
        scores, expected = qk_scores(q, k), qk_scores(q, dense)
    assert copies == []
    assert_same(scores, expected)


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A view that is not 16-byte aligned never runs what was compiled for an aligned one."""
    queries, cache = randn(1 + 160, dtype=torch.float16), randn(1 + 800, dtype=torch.float16)
    plans = []
    for q_start, k_start in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        q, k = queries[q_start:][:160].view(2, 2, 40), cache[k_start:][:800].view(2, 5, 2, 40)
        assert_scores(qk_scores(q, k), oracle(q, k))
        plans.append(len(op._plans))
    assert plans == [1, 2, 3, 4, 4]


def test_the_same_bits_on_every_run() -> None:
    """Sums are formed in one order: twenty calls agree to the last bit."""
    q, k = drawn(1, 2, 1, 70, 96)
    first = qk_scores(q, k)
    for _ in range(19):
        assert_same_bits(qk_scores(q, k), first)


# Dtypes.


def test_f34_fp32_inputs_are_summed_in_ieee_fp32() -> None:
    """4096 features in fp32 are within 1e-5 of float64, which TF32's 10 bits would miss by far."""
    q, k = drawn(1, 2, 1, 33, 4096, torch.float32)
    expected = oracle(q, k)
    assert_scores(qk_scores(q, k), expected)
    # What TF32 would make of the inputs.
    truncated = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k)]
    assert failures(qk_scores(*truncated), expected) != []


@pytest.mark.skipif(not INTERPRETED, reason="shows what the interpreter does")
def test_f64_the_interpreter_multiplies_bf16_without_tl_dot() -> None:
    """The interpreter never sees a product of bf16 matrices; its loads and fp32 arithmetic are right."""
    q, k = drawn(1, 4, 1, 33, 40, torch.bfloat16)
    with _launch.forced(GROUP), pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_group_kernel", None)
        assert_scores(qk_scores(q, k), oracle(q, k))


@triton.jit  # type: ignore[untyped-decorator]  # Triton's decorators have no types.
def _product(a_ptr: Any, b_ptr: Any, c_ptr: Any) -> None:
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@pytest.mark.skipif(not INTERPRETED, reason="shows what the interpreter does")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_f64_the_interpreter_still_gets_bf16_products_wrong() -> None:
    """The day that this fails, bf16 may take the kernel of groups in the interpreter too."""
    for dtype, right in ((torch.float16, True), (torch.bfloat16, False)):
        a, b, c = torch.full((16, 16), 1.5, dtype=dtype), torch.ones(16, 16, dtype=dtype), torch.zeros(16, 16)
        _product[(1,)](a, b, c)
        assert torch.equal(c, torch.full((16, 16), 24.0)) == right


def test_rows_too_long_for_a_tile_take_pytorch() -> None:
    """Strict mode names the reason; otherwise the reference serves the call, and the record says so."""
    q, k = drawn(1, 2, 1, 3, 8193, torch.float32)
    with pytest.raises(routing.FallbackError, match="up to 8192 features"):
        qk_scores(q, k)
    with routing.strict(False), pytest.warns(routing.FallbackWarning):
        assert_scores(qk_scores(q, k), oracle(q, k))


def test_fp64_comes_back_in_fp64() -> None:
    """The reference serves float64 and keeps its digits."""
    q, k = drawn(1, 4, 2, 5, 40, torch.float64)
    with routing.strict(False), pytest.warns(routing.FallbackWarning):
        scores = qk_scores(q, k)
    assert scores.dtype == torch.float64
    assert torch.allclose(scores, oracle(q, k), rtol=1e-14, atol=1e-14)


def test_autocast_leaves_the_scores_alone() -> None:
    """Within autocast fp32 inputs are scored in fp32, by the kernel and by the reference."""
    q, k = drawn(1, 4, 2, 33, 40, torch.float32)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert_scores(qk_scores(q, k), oracle(q, k))
        assert_scores(qk_scores_reference(q, k), oracle(q, k))


# Gradients.


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
def test_f49_f50_exactly_the_gradients_asked_for(asked: tuple[bool, bool]) -> None:
    """The graph is never cut, and what asks for no gradient gets none."""
    q, k = (x.requires_grad_(wanted) for x, wanted in zip(drawn(2, 4, 2, 5, 8, torch.float32), asked, strict=True))
    with routing.strict(False):
        scores = qk_scores(q, k)
        assert scores.requires_grad == any(asked)
        if any(asked):
            scores.sum().backward()
    assert (q.grad is not None, k.grad is not None) == asked


def test_f49_gradients_are_those_of_finite_differences() -> None:
    """torch.autograd.gradcheck passes in float64; under no_grad the kernel serves tensors that ask for gradients."""
    q, k = (x.requires_grad_() for x in drawn(1, 4, 2, 3, 5, torch.float64))
    with routing.strict(False):
        assert torch.autograd.gradcheck(qk_scores, (q, k))
    q, k = (x.requires_grad_() for x in drawn(1, 4, 2, 3, 5))
    with torch.no_grad():
        assert not qk_scores(q, k).requires_grad


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool) -> None:
    """torch.compile meets no graph break in either form, and the result is the eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: qk_scores(q, k) + 1, fullgraph=True, backend="eager")
    with routing.strict(False):
        for batch in (2, 3):
            q, k = (x.requires_grad_(wants_grad) for x in drawn(batch, 4, 2, 5, 40))
            assert torch.equal(compiled(q, k), qk_scores(q, k) + 1)


def test_f56_a_batch_of_any_size_recompiles_no_more_than_expected() -> None:
    """One sequence, two and none make a graph each at most, and every other number takes that of two."""
    batches = (drawn(batch, 4, 2, 5, 40) for batch in (1, 2, 0, 5, 7, 1, 0))
    assert checks.graphs_compiled(qk_scores, batches) <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs, and the scores are described as they would come."""
    q, k = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((3, 8, 64), (3, 7, 2, 64)))
    scores = qk_scores(q, k)
    assert (scores.shape, scores.dtype, scores.stride(), scores.is_meta) == ((3, 8, 7), torch.float32, (56, 7, 1), True)


def test_f56_torch_library_finds_the_op_sound() -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes, strided keys included."""
    q, k = drawn(2, 4, 2, 5, 8)
    for keys in (k, randn(2, 2, 8, 5, dtype=torch.float16).permute(0, 3, 1, 2)):
        torch.library.opcheck(op._qk_scores_op, (q, keys, 0.5))


# Launch configurations and errors.


@pytest.mark.parametrize("config", [KEYS, GROUP], ids=["keys", "group"])
@pytest.mark.parametrize("block", [2, 8, 64])
@pytest.mark.parametrize("keys", [1, 2, 65])
def test_f60_every_block_is_right_alone(keys: int, block: int, config: dict[str, object]) -> None:
    """One block or several with a rest: the answer, in NaN-filled memory."""
    q, k = drawn(2, 4, 2, keys, 40)
    expected = oracle(q, k)
    with _launch.forced({**config, "block": block}), check.poisoned():
        assert_scores(qk_scores(q, k), expected)


@pytest.mark.parametrize(
    ("q", "k", "sentence"),
    [
        ((8,), (1, 2, 1, 8), "qk_scores: q: expected three dimensions [B, Hq, D], got (8,)."),
        ((1, 2, 8), (2, 1, 8), "qk_scores: k: expected four dimensions [B, N, Hkv, D], got (2, 1, 8)."),
        ((1, 2, 8), (1, 3, 1, 9), "qk_scores: k: expected shape (1, N, Hkv, 8) as q has it, got (1, 3, 1, 9)."),
        ((1, 2, 8), (2, 3, 1, 8), "qk_scores: k: expected shape (1, N, Hkv, 8) as q has it, got (2, 3, 1, 8)."),
    ],
)
def test_shapes_that_do_not_fit_are_named(q: tuple[int, ...], k: tuple[int, ...], sentence: str) -> None:
    """Shapes are never broadcast: one sentence names argument, expected and found."""
    with pytest.raises(ValueError, match="expected") as caught:
        qk_scores(torch.zeros(q, device=DEVICE), torch.zeros(k, device=DEVICE))
    assert str(caught.value) == sentence


def test_dtypes_that_differ_or_are_no_floats_are_named() -> None:
    """Tensors of two dtypes, or of integers, are a TypeError before anything is launched."""
    q, k = drawn(1, 2, 1, 3, 8, torch.float32)
    with pytest.raises(TypeError, match=r"^qk_scores: k: expected the dtype of q, torch.float32, got torch.float16.$"):
        qk_scores(q, k.half())
    with pytest.raises(TypeError, match=r"^qk_scores: q: expected a floating-point tensor, got torch.int32.$"):
        qk_scores(q.int(), k.int())


# On a GPU.


@pytest.mark.gpu
def test_f10_misaligned_after_aligned_on_a_gpu() -> None:
    """Aligned, shifted by one element, aligned again: three right results."""
    q, base = randn(1, 4, 80, dtype=torch.float16), randn(1 + 33 * 80, dtype=torch.float16)
    for start in (0, 1, 0):
        k = base[start:][: 33 * 80].view(1, 33, 1, 80)
        assert_scores(qk_scores(q, k), oracle(q, k))


@pytest.mark.gpu
def test_f62_a_captured_call_follows_its_inputs() -> None:
    """After a warm call a CUDA graph captures the launch, and a replay reads what the inputs hold then."""
    q, k = drawn(2, 8, 2, 300, 128)
    qk_scores(q, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = qk_scores(q, k)
    k.normal_()
    graph.replay()
    assert_scores(scores, oracle(q, k))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [dims for dims in case.CASE.checked if dims[3] < 2**20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f34_tracked_launches_are_right_on_a_gpu(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    """What the launch table chooses for this GPU is within fp32's error, bf16 included, and fp32 is no TF32."""
    batch, heads, kv_heads, keys, features = dims
    q, k = drawn(batch, heads, kv_heads, keys, features, dtype)
    assert_scores(qk_scores(q, k), oracle(q, k))
