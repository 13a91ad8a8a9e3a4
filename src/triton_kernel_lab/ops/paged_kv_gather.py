"""Paged KV gather: the tokens of every sequence, packed out of a paged cache in order.

Token t of sequence b lies in slot t % page_size of page ``page_table[b, t // page_size]``:
Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023, arXiv:2309.06180, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = ["paged_kv_gather", "paged_kv_gather_reference"]

NAME = "paged_kv_gather"
Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# The kernel copies bytes: all that it knows of a dtype is its size.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Tokens are counted in int32, as the cumulative lengths of attention kernels are.
_TOKEN_LIMIT = 2**31
# How many lengths a program reads at once when it looks for its sequence.
_SEQUENCES = 1024
# Rows of a program at most: of narrow rows it would look up more pages than it has threads.
_ROWS = 128
# Sizes of the output that a signature keeps launches for.
_SIZE_LIMIT = 256


@triton.jit
def _find_sequence(
    program, lens_ptr, lens_stride, offsets_ptr, batch, HEADS: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr
):
    """The sequence of a program, at which token of the output it begins, and which of its blocks this is.

    Each sequence has as many programs as its rows fill blocks of ROWS, in
    order. What programs are left belong to sequence ``batch``, which begins
    behind the last token; the very last of them also writes the offsets.
    """
    sequence = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    block = program
    end = tl.zeros((), tl.int32)
    for chunk in tl.range(0, batch, SEQUENCES, num_stages=1):
        b = chunk + tl.arange(0, SEQUENCES)
        lengths = tl.load(lens_ptr + b.to(tl.int64) * lens_stride, mask=b < batch, other=0).to(tl.int32)
        lengths = tl.maximum(lengths, 0)
        blocks = (lengths * HEADS + (ROWS - 1)) // ROWS
        # Of this chunk nothing lies before the program unless all earlier chunks do.
        before = (tl.cumsum(blocks, 0) <= block) & (b < batch) & (sequence == chunk)
        sequence += tl.sum(before.to(tl.int32), 0)
        start += tl.sum(tl.where(before, lengths, 0), 0)
        block -= tl.sum(tl.where(before, blocks, 0), 0)
        if program == tl.num_programs(0) - 1:
            tl.store(offsets_ptr + 1 + b, end + tl.cumsum(lengths, 0), mask=b < batch)
            end += tl.sum(lengths, 0)
    if program == tl.num_programs(0) - 1:
        tl.store(offsets_ptr, 0)
    return sequence, start, block


@triton.jit
def _gather_kernel(
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    k_out_ptr,
    v_out_ptr,
    offsets_ptr,
    total,
    batch,
    pages,
    max_pages,
    k_page,
    k_slot,
    k_head,
    k_column,
    v_page,
    v_slot,
    v_head,
    v_column,
    table_row,
    table_column,
    lens_stride,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    ALIGN: tl.constexpr,
    ALIKE: tl.constexpr,
    WIDE: tl.constexpr,
    FILL: tl.constexpr,
):
    """ROWS rows of one sequence a program, of both caches; a row is a token, or one of HEADS heads of it.

    FILL writes every token below ``total`` and none beyond, zeros where no
    sequence has one; otherwise the tokens of the sequences are written, and no
    others. SEQUENCES is 1 where there is one sequence. ALIKE: K and V have the
    same strides. WIDE: offsets within a page pass 2^31.
    """
    # A block that divides a page looks its page up once for all of its rows.
    ONE_PAGE: tl.constexpr = PAGE * HEADS % ROWS == 0
    program = tl.program_id(0)
    if SEQUENCES == 1:
        length = tl.load(lens_ptr).to(tl.int32)
        sequence = 0
        start = 0
        block = program
    else:
        sequence, start, block = _find_sequence(
            program, lens_ptr, lens_stride, offsets_ptr, batch, HEADS, ROWS, SEQUENCES
        )
        length = tl.load(lens_ptr + sequence.to(tl.int64) * lens_stride, mask=sequence < batch, other=0).to(tl.int32)
        table_ptr += sequence.to(tl.int64) * table_row
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Unsigned, so that dividing by a power of two is one instruction.
    position = (row // HEADS).to(tl.uint32)
    index = (block.to(tl.int64) * ROWS // (PAGE * HEADS)).to(tl.int32) if ONE_PAGE else (position // PAGE).to(tl.int32)
    # Up to the end of the table, not of the sequence: both are asked for before either is waited for.
    page = tl.load(table_ptr + index.to(tl.int64) * table_column, mask=index < max_pages, other=-1)
    token = position.to(tl.int32)
    live = token < length
    found = live & (page >= 0) & (page < pages)
    page = page.to(tl.int64)
    slot = (position % PAGE).to(tl.int64 if WIDE else tl.int32)
    head = (row % HEADS).to(tl.int64 if WIDE else tl.int32)
    k_row = tl.multiple_of(page * k_page + (slot * k_slot + head * k_head), ALIGN)
    v_row = k_row if ALIKE else tl.multiple_of(page * v_page + (slot * v_slot + head * v_head), ALIGN)
    column = tl.arange(0, BLOCK).to(tl.int64 if WIDE else tl.int32)
    if COLUMNS > BLOCK:
        column += tl.program_id(1) * BLOCK
    inside = (column < COLUMNS)[None, :]
    k = tl.load(k_ptr + k_row[:, None] + column[None, :] * k_column, mask=found[:, None] & inside, other=0)
    v = tl.load(v_ptr + v_row[:, None] + column[None, :] * v_column, mask=found[:, None] & inside, other=0)
    if FILL:
        # A lone sequence has all rows to itself; of several, none has those behind the last token.
        if SEQUENCES == 1:
            live = token < total
        else:
            # Lengths that nobody checked may add up to what int32 does not hold.
            live = (live | (sequence == batch)) & (start + token < total) & (start >= 0)
    out = (start * HEADS + row)[:, None] * COLUMNS + column[None, :]
    tl.store(k_out_ptr + out, k, mask=live[:, None] & inside)
    tl.store(v_out_ptr + out, v, mask=live[:, None] & inside)
    if SEQUENCES == 1:
        # Last, because it waits for the length.
        end = tl.maximum(length, 0)
        if program == 0:
            tl.store(offsets_ptr, 0)
            tl.store(offsets_ptr + 1, end)


def paged_kv_gather_reference(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    total: int | None = None,
) -> Packed:
    """The differentiable PyTorch form of ``paged_kv_gather``; it synchronises where ``total`` is None."""
    pages, page_size = k_cache.shape[:2]
    batch, max_pages = page_table.shape
    ends = seq_lens.clamp(min=0).long().cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    rows = int(offsets[-1]) if total is None else total
    packed = [cache.new_zeros((rows, *cache.shape[2:])) for cache in (k_cache, v_cache)]
    if batch and max_pages and pages and rows:
        token = torch.arange(rows, device=k_cache.device)
        sequence = torch.searchsorted(ends, token, right=True).clamp(max=batch - 1)
        position = token - offsets[sequence]
        index = position // page_size
        page = page_table[sequence, index.clamp(max=max_pages - 1)].long()
        found = (token < ends[-1]) & (index < max_pages) & (page >= 0) & (page < pages)
        rows_of = [cache[page.where(found, 0), position % page_size] for cache in (k_cache, v_cache)]
        packed = [torch.where(found[:, None, None], x, zeros) for x, zeros in zip(rows_of, packed, strict=True)]
    return packed[0], packed[1], offsets.int()


def _check(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, total: int | None
) -> None:
    shape = tuple(k_cache.shape)
    _checks.expect(k_cache.ndim == 4 and k_cache.shape[1] > 0, NAME, "k_cache", "[pages, page_size, Hkv, D]", shape)
    _checks.expect(v_cache.shape == k_cache.shape, NAME, "v_cache", f"the shape of k_cache, {shape}", (*v_cache.shape,))
    _checks.expect(page_table.ndim == 2, NAME, "page_table", "[B, max_pages]", (*page_table.shape,))
    batch = page_table.shape[0]
    _checks.expect(seq_lens.shape == (batch,), NAME, "seq_lens", f"shape {(batch,)}", (*seq_lens.shape,))
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{NAME}: v_cache: expected the dtype of k_cache, {k_cache.dtype}, got {v_cache.dtype}.")
    for argument, tensor in (("page_table", page_table), ("seq_lens", seq_lens)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{NAME}: {argument}: expected int32 or int64, got {tensor.dtype}.")
    for argument, tensor in (("v_cache", v_cache), ("page_table", page_table), ("seq_lens", seq_lens)):
        _checks.expect_alike(NAME, argument, tensor, "k_cache", k_cache)
    _check_total(total)


def _check_total(total: int | None) -> None:
    _checks.expect(total is None or 0 <= total < _TOKEN_LIMIT, NAME, "total", "a number of tokens below 2^31", total)


def _validate(k_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, total: int | None) -> None:
    """Raise ValueError for lengths and ids that name no token of the cache; waits for the device."""
    pages, page_size = k_cache.shape[:2]
    capacity = page_table.shape[1] * page_size
    lengths = seq_lens.cpu()
    for b in ((lengths < 0) | (lengths > capacity)).nonzero().flatten().tolist()[:1]:
        expected = f"lengths from 0 to {page_table.shape[1]} pages of {page_size}"
        _checks.expect(False, NAME, "seq_lens", expected, f"{int(lengths[b])} at [{b}]")
    if total is not None:
        tokens = int(lengths.sum())
        _checks.expect(tokens <= total, NAME, "total", f"at least the {tokens} tokens of seq_lens", total)
    first_token = torch.arange(page_table.shape[1], device=page_table.device) * page_size
    outside = (first_token < seq_lens[:, None]) & ((page_table < 0) | (page_table >= pages))
    for b, index in outside.nonzero().tolist()[:1]:
        expected = f"ids from 0 to {pages - 1} in the used range"
        _checks.expect(False, NAME, "page_table", expected, f"{int(page_table[b, index])} at [{b}, {index}]")


def _tokens(seq_lens: torch.Tensor) -> int:
    """The sum of the lengths, for which the host waits."""
    lengths = seq_lens.cpu()
    if lengths.numel() == 0:
        return 0
    _checks.expect(int(lengths.min()) >= 0, NAME, "seq_lens", "lengths of 0 and more", int(lengths.min()))
    total = int(lengths.sum())
    _check_total(total)
    return total


def _rounded(tokens: int) -> int:
    """The next larger of sixteen sizes between two powers of two: few launches serve all totals."""
    step = 1 << max(tokens.bit_length() - 5, 0)
    return -(-tokens // step) * step


_plans = _launch.PlanCache()


class _Layout(NamedTuple):
    """Rows of a cache: how many a token has, of how many elements, and the strides of page, slot, head and element."""

    heads: int
    columns: int
    strides: tuple[int, int, int, int]


def _layouts(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[_Layout, _Layout]:
    """Both caches told with the same rows: whole tokens where the heads of both lie side by side."""
    _, _, heads, columns = k_cache.shape
    strides = [cache.stride() for cache in (k_cache, v_cache)]
    if heads == 1 or all(head == columns * column for _, _, head, column in strides):
        heads, columns = 1, heads * columns
    k, v = (_Layout(heads, columns, (page, slot, head, column)) for page, slot, head, column in strides)
    return k, v


def _route(k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> Any:
    """How every call of this signature is served: a function of the four tensors and ``total``."""
    _check(k_cache, v_cache, page_table, seq_lens, None)
    if k_cache.is_meta:
        return _described
    refusal = _checks.refusal(k_cache)
    # What the kernel takes of a dtype is its size alone.
    if refusal is not None and refusal[0] == "inputs" and k_cache.element_size() in _WORDS:
        refusal = None
    served: dict[tuple[int, bool], Any] = {}

    def run(
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        total: int | None,
    ) -> Packed:
        tokens = _tokens(seq_lens) if total is None else total
        size = (_rounded(tokens), False) if total is None else (total, True)
        serve = served.get(size)
        if serve is None:
            tensors = (k_cache, v_cache, page_table, seq_lens)
            if len(served) >= _SIZE_LIMIT:
                served.clear()
            serve = served[size] = routing.triton_route(NAME, refusal, lambda: _plan(*tensors, *size), _reference)
        packed: Packed = serve(k_cache, v_cache, page_table, seq_lens, tokens)
        return packed

    return run


def _reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, total: int
) -> Packed:
    return paged_kv_gather_reference(k_cache, v_cache, page_table, seq_lens, total=total)


def _plan(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    size: int,
    fill: bool,
) -> Any:
    """What launches the kernel for up to ``size`` tokens: a function of the four tensors and their number."""
    # No token can be found, whatever is asked for.
    if 0 in (size, k_cache.numel(), page_table.numel()):
        return _nothing
    batch, shape, short = page_table.shape[0], k_cache.shape[2:], seq_lens.dtype == torch.int32
    offsets = seq_lens.new_empty(batch + 1, dtype=torch.int32)
    launch = _bind(k_cache, v_cache, page_table, seq_lens, offsets, size, fill)

    def run(
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        tokens: int,
    ) -> Packed:
        k = k_cache.new_empty((tokens, *shape))
        v = torch.empty_like(k)
        # Naming a dtype takes time too.
        offsets = seq_lens.new_empty(batch + 1) if short else seq_lens.new_empty(batch + 1, dtype=torch.int32)
        launch(k_cache, v_cache, page_table, seq_lens, k, v, offsets)
        return k, v, offsets

    return run


def _nothing(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, tokens: int
) -> Packed:
    """Zeros for tokens that nothing holds."""
    shape = (tokens, *k_cache.shape[2:])
    offsets = torch.nn.functional.pad(seq_lens.clamp(min=0).cumsum(0), (1, 0))
    return k_cache.new_zeros(shape), k_cache.new_zeros(shape), offsets.int()


def _bind(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    offsets: torch.Tensor,
    tokens: int,
    fill: bool,
) -> Callable[..., None]:
    """The kernel that the launch table chooses, bound to this signature."""
    pages, page_size = k_cache.shape[:2]
    batch, max_pages = page_table.shape
    (heads, columns, k_strides), (_, _, v_strides) = _layouts(k_cache, v_cache)
    arch = _launch.architecture(k_cache.get_device())
    elements = tokens * heads * columns
    # The tables end at four bytes; longer elements are launched alike.
    itemsize = min(k_cache.element_size(), 4)
    config = _launch.choose(NAME, arch, itemsize=itemsize, rows=batch, columns=elements)
    block = min(triton.next_power_of_2(columns), config["tile"])
    rows = min(config["tile"] // block, _ROWS)
    # Each sequence ends with a block of its own, and so do the rows that are filled.
    blocks = math.ceil(tokens * heads / rows) + (batch if batch > 1 else 0)
    scalars = (tokens, batch, pages, max_pages, *k_strides, *v_strides, *page_table.stride(), seq_lens.stride(0))
    constants = {
        "PAGE": page_size,
        "HEADS": heads,
        "COLUMNS": columns,
        "BLOCK": block,
        "ROWS": rows,
        "SEQUENCES": min(triton.next_power_of_2(batch), _SEQUENCES),
        # Elements that every row starts at a multiple of: sixteen bytes can be read at a time, or fewer.
        "ALIGN": math.gcd(16, *k_strides[:2], *v_strides[:2], *(k_strides[2], v_strides[2]) * (heads > 1)),
        "ALIKE": k_strides == v_strides,
        "WIDE": max(_page_reach(k_cache), _page_reach(v_cache)) >= 2**31,
        "FILL": fill,
    }
    # An output of any size stands for all: freshly allocated, they are aligned alike.
    out = k_cache.new_empty((1,))
    tensors = (k_cache, v_cache, page_table, seq_lens, out, out, offsets)
    launch = _launch.bind(
        _gather_kernel,
        (blocks, math.ceil(columns / block)),
        tuple(map(_words, tensors)),
        scalars,
        constants,
        config=config,
        num_warps=config["num_warps"],
    )
    # A compiled kernel takes addresses; the interpreter reads the tensors.
    return (lambda *tensors: launch(*map(_words, tensors))) if INTERPRET else launch


def _page_reach(cache: torch.Tensor) -> int:
    """Elements from the first to the last of a page."""
    return sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORDS[x.element_size()])


def _described(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor, total: int | None
) -> Packed:
    """The outputs of tensors that hold no data."""
    _checks.expect(total is not None, NAME, "total", "a number, since meta tensors hold no lengths", total)
    shape = (total, *k_cache.shape[2:])
    offsets = seq_lens.new_empty(page_table.shape[0] + 1, dtype=torch.int32)
    return k_cache.new_empty(shape), k_cache.new_empty(shape), offsets


def _forward(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    total: int | None,
    validate: bool,
) -> Packed:
    # Written out flat: unpacking parts into it takes as long as asking for them.
    key = (
        k_cache.dtype, k_cache.shape, k_cache.stride(), k_cache.device, k_cache.data_ptr() & 15,
        v_cache.dtype, v_cache.shape, v_cache.stride(), v_cache.device, v_cache.data_ptr() & 15,
        page_table.dtype, page_table.shape, page_table.stride(), page_table.device, page_table.data_ptr() & 15,
        seq_lens.dtype, seq_lens.shape, seq_lens.stride(), seq_lens.device, seq_lens.data_ptr() & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(k_cache, v_cache, page_table, seq_lens))
    if total is not None and not 0 <= total < _TOKEN_LIMIT:
        _check_total(total)
    if validate and not k_cache.is_meta:
        _validate(k_cache, page_table, seq_lens, total)
    result: Packed = plan(k_cache, v_cache, page_table, seq_lens, total)
    return result


@torch.library.custom_op("triton_kernel_lab::paged_kv_gather", mutates_args=())
def _paged_kv_gather_op(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    total: int | None,
    validate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward(k_cache, v_cache, page_table, seq_lens, total, validate)


@_paged_kv_gather_op.register_fake
def _(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    total: int | None,
    validate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(k_cache, v_cache, page_table, seq_lens, total)
    if total is None:
        total = torch.library.get_ctx().new_dynamic_size()
    return _described(k_cache, v_cache, page_table, seq_lens, total)


def paged_kv_gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    total: int | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack the keys and values of every sequence out of a paged cache, in order and without padding.

    Token t of sequence b is slot ``t % page_size`` of page
    ``page_table[b, t // page_size]`` (Kwon et al. 2023, section 4) and becomes
    row ``offsets[b] + t``. Bits are copied, NaN payloads included. Ids may come
    in any order and more than once. Table entries behind a sequence's last page
    and slots behind its last token are never used, whatever they hold.

    T, the number of rows, is the sum of the lengths. Without ``total`` the host
    has to wait for the device once, to learn it. With ``total`` it does not, so
    that the call can be captured in a CUDA graph: rows behind the last token
    are zeros, and tokens for which there is no row are left out.

    Args:
        k_cache: [pages, page_size, Hkv, D] of any dtype and strides.
        v_cache: as k_cache, with its shape, dtype and device; its strides are its own.
        page_table: int32 or int64 [B, max_pages], any strides.
        seq_lens: int32 or int64 [B], tokens of each sequence.
        total: rows of the outputs, or None for as many as there are tokens.
        validate: check lengths and used ids first, which makes the host wait.
            Unchecked, an id outside the cache and a token beyond the table give
            zeros, and negative lengths count as none.

    Returns:
        (k, v, offsets): contiguous [T, Hkv, D] of the caches' dtype, twice, and
        int32 [B + 1], the running sum of the lengths, also where it passes
        ``total``. When a gradient is wanted the differentiable PyTorch form
        computes them.

    Raises:
        TypeError: the caches' dtypes differ, or table or lengths are no int32 or int64.
        ValueError: shapes or devices do not fit, or total is negative or 2^31
            and more; without total, a negative length; with validate, a length
            that is negative or longer than the table, lengths that exceed
            total, or an id outside the cache in the used range.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    if _checks.wants_grad(k_cache, v_cache):
        _check(k_cache, v_cache, page_table, seq_lens, total)
        if validate:
            _validate(k_cache, page_table, seq_lens, total)
        _checks.note_autograd(NAME)
        return paged_kv_gather_reference(k_cache, v_cache, page_table, seq_lens, total=total)
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    if (
        torch.compiler.is_compiling()
        or type(k_cache) not in _launch.PLAIN_TYPES
        or type(v_cache) not in _launch.PLAIN_TYPES
        or type(page_table) not in _launch.PLAIN_TYPES
        or type(seq_lens) not in _launch.PLAIN_TYPES
        or k_cache.is_neg()
        or v_cache.is_neg()
    ):
        k, v, offsets = _paged_kv_gather_op(k_cache, v_cache, page_table, seq_lens, total, validate)
        return k, v, offsets
    return _forward(k_cache, v_cache, page_table, seq_lens, total, validate)
