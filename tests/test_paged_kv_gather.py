"""Paged KV gather: exact rows, poison outside them, bad tables, totals, layouts; on the GPU where there is one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import operator_checks as checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import DEVICE, assert_same_bits, randn

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops.paged_kv_gather import paged_kv_gather

op = importlib.import_module("triton_kernel_lab.ops.paged_kv_gather")
Cache = tuple[torch.Tensor, torch.Tensor]
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Bits are copied, so the interpreter's arithmetic on a dtype does not matter.
COPIED = [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def served_by_triton() -> Iterator[None]:
    """No test here is answered by the PyTorch form unless it says so."""
    _launch.forget_plans()
    with routing.strict():
        yield
    _launch.forget_plans()


def ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def numbered(pages: int, page_size: int, heads: int = 1, columns: int = 8) -> Cache:
    """Caches of fp32 in which each element tells where it lies: K counts up, V counts down."""
    count = torch.arange(pages * page_size * heads * columns, dtype=torch.float32, device=DEVICE)
    k = count.view(pages, page_size, heads, columns)
    return k, -1 - k


def plain(cache: torch.Tensor, table: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """One token after the other, as the definition reads."""
    page_size = cache.shape[1]
    rows = [
        cache[table[b][t // page_size], t % page_size].clone()
        for b, length in enumerate(lengths)
        for t in range(length)
    ]
    return torch.stack(rows) if rows else cache.new_empty((0, *cache.shape[2:]))


def gather(cache: Sequence[torch.Tensor], *rest: torch.Tensor, **more: Any) -> Packed:
    k, v = cache
    return paged_kv_gather(k, v, *rest, **more)


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.is_contiguous()
    same: bool = torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
    return same


def check(cache: Cache, table: list[list[int]], lengths: list[int], **more: Any) -> None:
    """The outputs are the tokens one by one, then zeros up to ``total``, and the running sum of the lengths."""
    k, v, offsets = gather(cache, ints(table), ints(lengths), **more)
    tokens = sum(lengths) if more.get("total") is None else more["total"]
    for found, source in zip((k, v), cache, strict=True):
        rows = plain(source, table, lengths)[:tokens]
        assert same_bytes(found, torch.cat([rows, rows.new_zeros((tokens - len(rows), *rows.shape[1:]))]))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [sum(lengths[:b]) for b in range(len(lengths) + 1)]


# What is gathered.


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("more", [{}, {"total": 90}, {"total": 40}], ids=str)
def test_every_token_comes_from_its_slot(page_size: int, more: dict[str, int]) -> None:
    """Lengths 0, 1, 17 and 64 in pages of any size; rows behind the last are zeros, tokens beyond are left out."""
    used = [math.ceil(length / page_size) for length in (0, 1, 17, 64)]
    order = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(page_size)).tolist()
    table = [[order.pop() if index < pages else 0 for index in range(max(used))] for pages in used]
    check(numbered(sum(used) + 3, page_size), table, [0, 1, 17, 64], **more)


@pytest.mark.parametrize("lengths", [[17], [0], [64], [1]])
@pytest.mark.parametrize("total", [None, 0, 17, 70])
def test_one_sequence_alone(lengths: list[int], total: int | None) -> None:
    """The form for one sequence, which looks for none, gives the same."""
    check(numbered(6, 16), [[4, 0, 5, 2]], lengths, total=total)


@pytest.mark.parametrize("table", [[[3, 0, 2]], [[1, 1, 1]], [[0, 1, 2]], [[2, 2, 0]]])
def test_f44_pages_may_come_in_any_order_and_again(table: list[list[int]]) -> None:
    """Unsorted and duplicate ids give the plain indexing result."""
    check(numbered(4, 16, heads=2), table, [41])
    check(numbered(4, 16, heads=2), [*table, table[0][::-1]], [41, 33], validate=True)


@pytest.mark.parametrize("dtype", COPIED)
def test_bits_are_copied_whatever_the_dtype(dtype: torch.dtype) -> None:
    """All bit patterns of 8 and 16 bits and random ones of 32 and 64, NaN payloads among them, arrive as they were."""
    raw = torch.randint(0, 256, (16, 16, 2, 128 * dtype.itemsize), dtype=torch.uint8, device=DEVICE)
    if dtype.itemsize <= 2:
        every = torch.arange(16 * 16 * 2 * 128, device=DEVICE)
        raw = every.to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(torch.uint8).view(raw.shape)
    cache = raw.view(dtype), raw.flip(1).contiguous().view(dtype)
    k, v, _ = gather(cache, ints([list(range(15, -1, -1))]), ints([256]), total=256)
    assert same_bytes(k, cache[0].flip(0).flatten(0, 1))
    assert same_bytes(v, cache[1].flip(0).flatten(0, 1))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_batch_agrees_with_the_definition(data: st.DataObject) -> None:
    """Whatever the lengths, page size, heads, columns, table and total."""
    page_size = data.draw(st.integers(1, 20))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6))
    heads, columns, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 8))
    width = max(math.ceil(max(lengths) / page_size), 1) + data.draw(st.integers(0, 2))
    table = [[data.draw(st.integers(0, pages - 1)) for _ in range(width)] for _ in lengths]
    total = data.draw(st.none() | st.integers(0, sum(lengths) + 20))
    check(numbered(pages, page_size, heads, columns), table, lengths, total=total)


@pytest.mark.parametrize("batch", [2, 8, 9, 30])
def test_more_sequences_than_are_read_at_once(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that reads the lengths in several parts finds every sequence, empty ones between them too."""
    monkeypatch.setattr(op, "_SEQUENCES", 8)
    lengths = [(7 * b) % 3 if b % 5 else 0 for b in range(batch)]
    check(numbered(4, 2), [[b % 4] for b in range(batch)], lengths)


# What is not.


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("lengths", [[0, 1, 17, 64], [17]])
def test_f23_poison_in_unused_slots_never_leaks(lengths: list[int], poison: float) -> None:
    """With every slot poisoned that holds no token of a sequence, the result is the clean one."""
    cache, size = numbered(4 * len(lengths) + 1, 16, heads=2, columns=5), 4 * len(lengths)
    table = torch.randperm(size, generator=torch.Generator().manual_seed(0)).view(len(lengths), 4).to(DEVICE)
    used = torch.zeros(size + 1, 16, dtype=torch.bool, device=DEVICE)
    for b, length in enumerate(lengths):
        for t in range(length):
            used[table[b, t // 16], t % 16] = True
    dirty = tuple(x.where(used[:, :, None, None], torch.full_like(x, poison)) for x in cache)
    for total in (None, sum(lengths), sum(lengths) + 9):
        clean = gather(cache, table, ints(lengths), total=total)
        assert all(map(torch.equal, gather(dirty, table, ints(lengths), total=total), clean))


GARBAGE = [-1, 4, 2**31 - 1, -(2**31), 2**40]


@pytest.mark.parametrize("lengths", [[20, 33], [33]])
@pytest.mark.parametrize("bad", GARBAGE)
def test_f44_garbage_in_the_unused_tail_is_ignored(bad: int, lengths: list[int]) -> None:
    """Behind the last page of a sequence the table may hold anything, also when it is validated."""
    cache = numbered(4, 16)
    table = ints([[3, 1, 0, 2][: len(lengths) * 4]] * len(lengths), torch.int64)
    expected = gather(cache, table, ints(lengths))
    for b, length in enumerate(lengths):
        table[b, math.ceil(length / 16) :] = bad
    for more in ({}, {"validate": True}, {"total": sum(lengths)}):
        assert all(map(torch.equal, gather(cache, table, ints(lengths), **more), expected))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[20, 33], [33]])
@pytest.mark.parametrize("bad", GARBAGE)
def test_f44_a_bad_id_in_the_used_range(bad: int, lengths: list[int], dtype: torch.dtype) -> None:
    """Validated it raises, naming id and place; otherwise its tokens are zeros and nothing outside is read."""
    if dtype == torch.int32 and bad == 2**40:
        bad = 7
    cache, last = numbered(4, 16), len(lengths) - 1
    table = ints([[3, 1, 0]] * len(lengths), torch.int64)
    good = gather(cache, table, ints(lengths))
    table[last, 1] = bad
    sentence = (
        rf"^paged_kv_gather: page_table: expected ids from 0 to 3 in the used range, got {bad} at \[{last}, 1\]\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        gather(cache, table.to(dtype), ints(lengths), validate=True)
    start = sum(lengths[:last])
    for found, expected in zip(gather(cache, table.to(dtype), ints(lengths))[:2], good[:2], strict=True):
        expected[start + 16 : start + 32] = 0
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("lengths", "total", "sentence"),
    [
        ([5, -1], None, "seq_lens: expected lengths from 0 to 3 pages of 16, got -1 at [1]."),
        ([49, 5], None, "seq_lens: expected lengths from 0 to 3 pages of 16, got 49 at [0]."),
        ([17, 5], 21, "total: expected at least the 22 tokens of seq_lens, got 21."),
    ],
)
def test_lengths_that_do_not_fit_are_named(lengths: list[int], total: int | None, sentence: str) -> None:
    """Validating, a negative or too long sequence, or a total that is too small, raises."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        gather(numbered(4, 16), ints([[3, 1, 0]] * 2), ints(lengths), total=total, validate=True)
    assert str(caught.value) == f"paged_kv_gather: {sentence}"


def test_unchecked_lengths_write_nothing_they_should_not() -> None:
    """Without validation negative lengths count as none and tokens beyond the table are zeros, within ``total``."""
    k, v = numbered(4, 16)
    for lengths, counted in (([5, -7, 20], [5, 0, 20]), ([3, 60, 1], [3, 60, 1]), ([-3, -2, -1], [0, 0, 0])):
        table = [[3, 1], [2, 0], [1, 2]]
        found = paged_kv_gather(k, v, ints(table), ints(lengths), total=70)
        tokens = [(b, t) for b, length in enumerate(counted) for t in range(length)][:70]
        rows = [k[table[b][t // 16], t % 16] if t < 32 else torch.zeros_like(k[0, 0]) for b, t in tokens]
        expected = torch.cat([torch.stack(rows), k.new_zeros(70 - len(rows), 1, 8)]) if rows else k.new_zeros(70, 1, 8)
        assert torch.equal(found[0], expected)
        assert found[2].tolist() == [sum(counted[:b]) for b in range(4)]


def test_a_negative_length_is_an_error_where_the_host_reads_it() -> None:
    """The number of rows is the sum of lengths, so without ``total`` a negative one raises."""
    with pytest.raises(ValueError, match=r"^paged_kv_gather: seq_lens: expected lengths of 0 and more, got -1\.$"):
        gather(numbered(4, 16), ints([[3], [1]]), ints([5, -1]))


# Shapes.


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("total", [None, 0, 3])
def test_f04_nothing_to_gather_gives_empty_outputs_or_zeros(total: int | None, warm: bool) -> None:
    """No sequence, no token, no page or no column: right shapes, zeros up to ``total``, true offsets, no launch."""
    if warm:
        gather(numbered(2, 4), ints([[1]]), ints([3]))
    bound = len(_launch.launches())
    empty = torch.empty(0, 1, dtype=torch.int32, device=DEVICE)
    for cache, table, lengths in (
        (numbered(2, 4), empty, ints([])),
        (numbered(2, 4), empty.view(1, 0).repeat(2, 1), ints([0, 0])),
        (numbered(0, 4), ints([[0], [0]]), ints([0, 0])),
        (numbered(2, 4, heads=0), ints([[0], [0]]), ints([0, 0])),
    ):
        k, v, offsets = gather(cache, table, lengths, total=total)
        assert_same_bits(k, cache[0].new_zeros((total or 0, *cache[0].shape[2:])))
        assert_same_bits(v, k)
        assert torch.equal(offsets, torch.zeros(len(lengths) + 1, dtype=torch.int32, device=DEVICE))
    assert len(_launch.launches()) == bound


def test_f04_sequences_without_tokens_give_no_rows() -> None:
    """Of lengths that are all zero there is nothing, and of a total of zero nothing is kept but the offsets."""
    k, v, offsets = gather(numbered(2, 4), ints([[0], [1]]), ints([0, 0]))
    assert k.shape == v.shape == (0, 1, 8)
    assert offsets.tolist() == [0, 0, 0]
    assert gather(numbered(2, 4), ints([[0], [1]]), ints([3, 2]), total=0)[2].tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("tile", "heads", "columns"), [(16, 1, 1), (16, 3, 8), (16, 1, 18), (64, 3, 7), (64, 1, 64), (64, 2, 70)]
)
def test_f06_f60_every_tile_is_right_alone(tile: int, heads: int, columns: int) -> None:
    """Rows in one block of columns or several with a rest, heads together or apart, give the rows and no more."""
    k, v = numbered(3, 5, heads, columns)
    apart = k.transpose(1, 2).contiguous().transpose(1, 2)
    with _launch.forced({"tile": tile, "num_warps": 4}):
        check((k, v), [[2, 0], [1, 1]], [6, 1])
        check((apart, v), [[2, 0]], [6], total=7)
        check((k, apart), [[2, 0]], [6])


# Addressing and layouts.

F01 = """
import torch
from triton_kernel_lab import routing
from triton_kernel_lab.ops.paged_kv_gather import paged_kv_gather
stride, device = 2**30 + 16, "cuda" if torch.cuda.device_count() else "cpu"
try:
    buffer = torch.empty(2 * stride + 128, dtype=torch.float16, device=device)
except RuntimeError:
    print("no memory")
else:
    far = [(stride, 64, 16, 1), (32, stride, 16, 1), (32, 64, stride, 1), (32, 8, 4, stride)]
    with routing.strict():
        for strides, shape in zip(far, [(3, 2, 2, 16), (2, 3, 2, 16), (2, 2, 3, 16), (2, 2, 2, 3)]):
            k = buffer.as_strided(shape, strides)
            k.copy_(torch.arange(k.numel(), device=device).view(shape))
            v = -k.contiguous()
            table = torch.tensor([[shape[0] - 1, 0]], device=device)
            lens = torch.tensor([shape[1] + 1], device=device)
            for pair in ((k, v), (v, k)):
                expected = paged_kv_gather(*(x.contiguous() for x in pair), table, lens)
                assert all(map(torch.equal, paged_kv_gather(*pair, table, lens), expected)), strides
    print("same")
"""


def test_f01_offsets_beyond_two_to_the_31() -> None:
    """Pages, slots, heads or columns that lie more than 2^31 elements apart are read where they are."""
    done = checks.run_python(F01)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "no memory":
        pytest.skip("the host does not reserve 4 GiB of virtual memory")
    assert done.stdout.strip() == "same"


LAYOUTS = {
    "dense": lambda: randn(5, 4, 3, 6, dtype=torch.float16),
    "heads_first": lambda: randn(5, 3, 4, 6, dtype=torch.float16).transpose(1, 2),
    "columns_first": lambda: randn(5, 6, 3, 4, dtype=torch.float16).permute(0, 3, 2, 1),
    "pages_last": lambda: randn(4, 3, 6, 5, dtype=torch.float16).permute(3, 0, 1, 2),
    "every_second_column": lambda: randn(5, 4, 3, 12, dtype=torch.float16)[..., ::2],
    "part_of_a_page": lambda: randn(5, 6, 4, 6, dtype=torch.float16)[:, 1:5, 1:],
    "expanded": lambda: randn(5, 4, 1, 6, dtype=torch.float16).expand(5, 4, 3, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", ["dense", "heads_first"])
def test_f07_f12_k_and_v_of_any_two_layouts(layout: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cache is read with the strides of the other, or copied: the bits are those of dense caches."""
    table, lengths = ints([[4, 0], [2, 2]]), ints([5, 7])
    for cache in ((LAYOUTS[layout](), LAYOUTS[other]() * 2), (LAYOUTS[other]() * 2, LAYOUTS[layout]())):
        expected = gather([x.contiguous() for x in cache], table, lengths)
        with monkeypatch.context() as patched:
            copies = checks.copies(patched)
            found = gather(cache, table, lengths)
            assert copies == []
        assert all(map(torch.equal, found, expected))


def test_f12_k_and_v_of_one_tensor() -> None:
    """Caches that are the two halves of one tensor are told apart."""
    both = randn(4, 2, 16, 2, 8)
    table, lengths = ints([[3, 0, 1]]), ints([40])
    k, v, _ = paged_kv_gather(both[:, 0], both[:, 1], table, lengths)
    for found, half in ((k, both[:, 0]), (v, both[:, 1])):
        assert torch.equal(found, half[[3, 0, 1]].flatten(0, 1)[:40])


def test_f44_a_table_of_any_strides_at_the_end_of_its_storage() -> None:
    """Every second column, a transposed table and expanded lengths are read where they are; no entry behind is."""
    cache = numbered(6, 16)
    table, lengths = ints([[3, 0, 2], [5, 1, 4]]), ints([48, 48])
    expected = gather(cache, table, lengths)
    tail = torch.full((2, 6), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    tail[:, ::2] = table
    end = torch.full((100,), -1, dtype=torch.int32, device=DEVICE)
    end[94:] = table.flatten()
    for view in (tail[:, ::2], table.t().contiguous().t(), end[94:].view(2, 3), table.long()):
        for many in (lengths, lengths[:1].expand(2), lengths.long(), ints([48, 0, 48, 0])[::2]):
            assert all(map(torch.equal, gather(cache, view, many), expected))


def test_f10_plans_of_aligned_and_misaligned_pointers_differ() -> None:
    """A cache that is not 16-byte aligned never runs what was compiled for an aligned one."""
    base = [randn(1 + 4 * 16 * 80, dtype=torch.float16, seed=seed) for seed in (0, 1)]
    table, lengths, plans = ints([[3, 0]]), ints([20]), []
    for starts in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        cache = [x[start : start + 5120].view(4, 16, 1, 80) for x, start in zip(base, starts, strict=True)]
        found = gather(cache, table, lengths)
        assert all(torch.equal(x, y[[3, 0]].flatten(0, 1)[:20]) for x, y in zip(found[:2], cache, strict=True))
        plans.append(len(op._plans))
    assert plans == [1, 2, 3, 4, 4]


def test_a_growing_batch_binds_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that grow token by token, as in decoding, are served by a launch for many of them."""
    bound: list[object] = []
    bind = _launch.bind

    def recording(*arguments: Any, **more: Any) -> Any:
        bound.append(arguments)
        return bind(*arguments, **more)

    monkeypatch.setattr(_launch, "bind", recording)
    cache, table = numbered(40, 16), ints([list(range(20)), list(range(20, 40))])
    for length in range(200, 232, 4):
        k, _, offsets = gather(cache, table, ints([length, length]))
        assert k.shape[0] == offsets[-1] == 2 * length
    assert len(bound) <= 5
    assert all(op._rounded(n) >= n and op._rounded(n) <= max(n * 17 / 16, n) for n in range(1, 5000))


# Gradients.


@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("total", [None, 30])
def test_f49_f50_f52_exactly_the_gradients_asked_for(asked: tuple[bool, bool], total: int | None) -> None:
    """A page read twice gathers both gradients, an unused slot none, and the incoming gradient is left alone."""
    cache = [randn(4, 4, 2, 3, seed=seed).requires_grad_(want) for seed, want in enumerate(asked)]
    table, lengths = ints([[1, 1], [3, 0]]), ints([7, 5])
    with routing.strict(False):
        k, v, _ = gather(cache, table, lengths, total=total)
    assert (k.requires_grad, v.requires_grad) == asked
    counts = torch.zeros(4, 4)
    for b, length in enumerate(lengths.tolist()):
        for t in range(length):
            counts[table[b, t // 4], t % 4] += 1
    for output, source, want in zip((k, v), cache, asked, strict=True):
        if want:
            gradient = torch.ones_like(output)
            output.backward(gradient)
            assert gradient.eq(1).all()
            assert source.grad is not None
            assert torch.equal(source.grad, counts[:, :, None, None].expand(source.shape).to(source))
        else:
            assert source.grad is None


def test_f49_no_gradient_is_wanted_under_no_grad() -> None:
    """Under no_grad Triton serves caches that require one; otherwise strict mode says that it does not."""
    cache = [x.requires_grad_() for x in numbered(2, 4)]
    with torch.no_grad():
        assert not gather(cache, ints([[1]]), ints([3]))[0].requires_grad
    with pytest.raises(routing.FallbackError, match=r"paged_kv_gather: not served by Triton \(autograd: "):
        gather(cache, ints([[1]]), ints([3]))


def test_a_lazily_negated_view_is_negated() -> None:
    """A cache whose sign is still to be flipped is the tensor that it stands for."""
    k, v = numbered(4, 16)
    found = paged_kv_gather(torch._neg_view(k), v, ints([[3, 1]]), ints([20]))
    assert torch.equal(found[0], -k[[3, 1]].flatten(0, 1)[:20])


# The compiler, fake and meta tensors.


@pytest.mark.parametrize("wants_grad", [False, True])
def test_f56_compiles_into_one_graph(wants_grad: bool) -> None:
    """With ``total`` torch.compile meets no graph break, and the result is the eager call's."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda k, v, table, lens: paged_kv_gather(k, v, table, lens, total=30)[0] * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    k, v = numbered(4, 16)
    with routing.strict(False):
        arguments = (k.requires_grad_(wants_grad), v, ints([[3, 1], [0, 2]]), ints([20, 5]))
        assert torch.equal(compiled(*arguments), paged_kv_gather(*arguments, total=30)[0] * 2)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_f56_a_batch_of_any_size_recompiles_no_more_than_expected(output: int) -> None:
    """One sequence, two and none make a graph each at most, and every other number takes that of two."""
    cache = numbered(8, 16)

    def gathered(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return gather(cache, table, lengths, total=40)[output]

    batches = (
        (ints([[b, 7 - b] for b in range(batch)]).view(batch, 2), ints([5 + b for b in range(batch)]))
        for batch in (1, 2, 0, 5, 4, 1, 0)
    )
    assert checks.graphs_compiled(gathered, batches) <= 3


def test_f56_a_learned_total_is_a_size_of_the_graph() -> None:
    """Where Dynamo may capture sizes that depend on data, a call without ``total`` compiles into one graph too."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: paged_kv_gather(*tensors)[1] + 1, fullgraph=True, backend="aot_eager")
    arguments = (*numbered(4, 16), ints([[3, 1], [0, 2]]), ints([20, 5]))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(*arguments), paged_kv_gather(*arguments)[1] + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_f56_meta_tensors_give_shape_dtype_and_strides(dtype: torch.dtype) -> None:
    """On the meta device nothing runs and ``total`` says how many rows there are; without it there is an error."""
    cache = torch.empty(4, 3, 16, 40, dtype=dtype, device="meta").transpose(1, 2)
    table, lengths = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 2), (2,)))
    k, v, offsets = paged_kv_gather(cache, cache, table, lengths, total=30, validate=True)
    for y in (k, v):
        assert (y.shape, y.dtype, y.stride(), y.is_meta) == ((30, 3, 40), dtype, (120, 40, 1), True)
    assert (offsets.shape, offsets.dtype) == ((3,), torch.int32)
    with pytest.raises(ValueError, match=r"^paged_kv_gather: total: expected a number"):
        paged_kv_gather(cache, cache, table, lengths)


@pytest.mark.parametrize("total", [None, 30])
def test_f56_torch_library_finds_the_op_sound(total: int | None) -> None:
    """torch.library's own check of schema, fake kernel and dispatch passes, with a learned total too."""
    arguments = (*numbered(4, 16), ints([[3, 1], [0, 2]]), ints([20, 5]), total, False)
    torch.library.opcheck(op._paged_kv_gather_op, arguments)


# Errors.


def test_arguments_that_do_not_fit_are_named() -> None:
    """One sentence names argument, expected and found, before anything is launched."""
    k, v = numbered(4, 16)
    table, lengths, bound = ints([[3, 1]]), ints([20]), len(_launch.launches())
    sentences = [
        ((k[0], v, table, lengths), None, "k_cache: expected [pages, page_size, Hkv, D], got (16, 1, 8)."),
        ((k[:, :0], v[:, :0], table, lengths), None, "k_cache: expected [pages, page_size, Hkv, D], got (4, 0, 1, 8)."),
        ((k, v[:3], table, lengths), None, "v_cache: expected the shape of k_cache, (4, 16, 1, 8), got (3, 16, 1, 8)."),
        (
            (k, v.half(), table, lengths),
            None,
            "v_cache: expected the dtype of k_cache, torch.float32, got torch.float16.",
        ),
        ((k, v, table[0], lengths), None, "page_table: expected [B, max_pages], got (2,)."),
        ((k, v, table.float(), lengths), None, "page_table: expected int32 or int64, got torch.float32."),
        ((k, v, table, lengths.to(torch.int16)), None, "seq_lens: expected int32 or int64, got torch.int16."),
        ((k, v, table, lengths.repeat(2)), None, "seq_lens: expected shape (1,), got (2,)."),
        ((k, v, table.to("meta"), lengths), None, f"page_table: expected the device of k_cache, {k.device}, got meta."),
        ((k, v, table, lengths), -1, "total: expected a number of tokens below 2^31, got -1."),
        ((k, v, table, lengths), 2**31, "total: expected a number of tokens below 2^31, got 2147483648."),
    ]
    for arguments, total, sentence in sentences:
        with pytest.raises((TypeError, ValueError)) as caught:
            paged_kv_gather(*arguments, total=total)
        assert str(caught.value) == f"paged_kv_gather: {sentence}"
    assert len(_launch.launches()) == bound


def test_elements_that_the_kernel_has_no_word_for_are_gathered_by_pytorch() -> None:
    """Sixteen-byte complex numbers leave Triton with a reason, and are right."""
    k = torch.randn(4, 16, 1, 8, dtype=torch.complex128).to(DEVICE)
    routing.forget()
    with routing.strict(False), pytest.warns(routing.FallbackWarning, match="complex128"):
        found, _, offsets = paged_kv_gather(k, k, ints([[3, 1]]), ints([20]))
    assert torch.equal(found, k[[3, 1]].flatten(0, 1)[:20])
    assert offsets.tolist() == [0, 20]


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("page_size", "heads", "columns"), [(16, 8, 128), (1, 1, 128), (256, 2, 80), (17, 3, 72), (5, 1, 1)]
)
def test_f10_tracked_launches_are_right_on_a_gpu(page_size: int, heads: int, columns: int, dtype: torch.dtype) -> None:
    """What the launch table chooses equals PyTorch's indexing, aligned, shifted by an element, and aligned again."""
    lengths = ints([0, 1, 17, 64, 300, 5])
    pages = math.ceil(300 / page_size)
    size = 6 * pages * page_size * heads * columns
    base = torch.randint(0, 256, ((size + 1) * dtype.itemsize,), dtype=torch.uint8, device=DEVICE).view(dtype)
    table = torch.randperm(6 * pages, device=DEVICE).view(6, pages)
    for start in (0, 1, 0):
        k = base[start : start + size].view(6 * pages, page_size, heads, columns)
        v = base[:size].view(6 * pages, heads, page_size, columns).transpose(1, 2)
        for total in (None, 387, 400, 100):
            found = paged_kv_gather(k, v, table, lengths, total=total)
            expected = op.paged_kv_gather_reference(k, v, table, lengths, total=total)
            assert all(map(same_bytes, found, expected))
            assert all(
                map(
                    same_bytes,
                    paged_kv_gather(k, v, table[4:5], lengths[4:5], total=total),
                    op.paged_kv_gather_reference(k, v, table[4:5], lengths[4:5], total=total),
                )
            )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_f62_a_graph_replays_on_new_inputs() -> None:
    """Captured with ``total``, a replay follows new lengths, tables and caches; no call synchronises."""
    k, v = (randn(64, 16, 2, 64, dtype=torch.float16, seed=seed) for seed in (0, 1))
    table, lengths = torch.randperm(64, device=DEVICE).view(4, 16), ints([10, 200, 0, 256])
    paged_kv_gather(k, v, table, lengths, total=600)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_kv_gather(k, v, table, lengths, total=600)
    k.copy_(randn(64, 16, 2, 64, dtype=torch.float16, seed=7))
    table.copy_(torch.randperm(64, device=DEVICE).view(4, 16))
    lengths.copy_(ints([256, 3, 77, 0]))
    graph.replay()
    assert all(map(torch.equal, found, op.paged_kv_gather_reference(k, v, table, lengths, total=600)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        paged_kv_gather(k, v, table, lengths, total=600)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_f47_another_device_than_the_current_one_is_used() -> None:
    """Inputs on the last device are served there while the first is current, and the first stays so."""
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    k, v, table, lengths = (x.to(last) for x in (*numbered(4, 16), ints([[3, 1]]), ints([20])))
    with torch.cuda.device(0):
        found = paged_kv_gather(k, v, table, lengths)
        assert torch.cuda.current_device() == 0
    assert all(x.device == last for x in found)
    assert torch.equal(found[0], k[[3, 1]].flatten(0, 1)[:20])
