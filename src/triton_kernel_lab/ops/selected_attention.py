"""Decode attention over chosen rows of a cache: one query a head attends to the rows that a list of indices names.

out[b, h] = sum_s softmax_s(scale * q[b, h] . k[b, indices[b, g, s], g]) * v[b, indices[b, g, s], g], where g is
the head of keys that query head h belongs to.

Formula: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1, over the chosen
rows. Heads of queries share a head of keys as in Ainslie et al., "GQA", 2023, arXiv:2305.13245, section 2;
parts of a softmax are joined as in Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
arXiv:1805.02867, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, overload

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch, _split
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = [
    "selected_attention",
    "selected_attention_paged",
    "selected_attention_paged_reference",
    "selected_attention_reference",
]

NAME, PAGED = "selected_attention", "selected_attention_paged"
# Wider rows do not fit the registers of a program beside their weighted sum.
_WIDEST_HEAD = 256
# Query heads that one program of the tensor cores serves; a longer group is dealt out to several.
_HEADS_TOGETHER = 16
# Rows are counted in 32 bits, up to a tile beyond the last.
_MOST_ROWS = 2**31 - 2**16
# fp32 numbers of parts that a warp holds at once: more would leave the registers.
_JOINED = 4096
# A launch has so many programs along its second and third axis.
_GRID_LIMIT = 65535
# What is assumed of a device that is not there: codegen and the interpreter plan as for an H200.
_MULTIPROCESSORS = 132

Both: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Result: TypeAlias = torch.Tensor | Both


class Inputs(NamedTuple):
    """The tensors of a call of either form; ``table`` is None where the cache has no pages."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    indices: torch.Tensor


@triton.jit
def _below(x, limit):
    """Whether integers lie in [0, limit), by one unsigned comparison."""
    unsigned: tl.constexpr = tl.uint64 if x.dtype == tl.int64 else tl.uint32
    return x.to(unsigned, bitcast=True) < tl.full((), limit, unsigned)


@triton.jit
def _choose(index_ptr, table_ptr, at, S, N, pages, i_s, t_p, PAGE: tl.constexpr, EVEN: tl.constexpr):
    """Page, row in the page and validity of the choices ``at``; without pages the page is 0.

    An index that names no row of the cache chooses nothing, so no read leaves the cache.
    """
    places = index_ptr + at.to(tl.int64) * i_s
    index = tl.load(places) if EVEN else tl.load(places, mask=at < S, other=-1)
    valid = _below(index, N)
    row = index.to(tl.int32)
    if PAGE > 0:
        row = row.to(tl.uint32, bitcast=True)
        page = tl.load(table_ptr + (row // PAGE).to(tl.int64) * t_p, mask=valid, other=-1)
        valid = _below(page, pages)
        page, row = page.to(tl.int32), (row % PAGE).to(tl.int32)
    else:
        page = row
    return page, row, valid


@triton.jit
def _prefetch(list_ptr, entries, stride):
    """Ask for the first 128 lines of a list of integers, which are then in the L2 cache when they are read."""
    line: tl.constexpr = 128 // (list_ptr.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.minimum(tl.arange(0, 128) * line, entries - 1).to(tl.int64) * stride
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [list_ptr + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _rows_at(x_ptr, page, row, valid, columns, x_p, x_n, x_d, D: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr):
    """A tile of the chosen rows, [rows, columns]; zeros where nothing is chosen, so that no 0 x NaN arises."""
    if FAR:
        # row * stride passes 2^31 long before memory runs out; the host has looked.
        page, row, columns = page.to(tl.int64), row.to(tl.int64), columns.to(tl.int64)
    start = row * x_n
    if PAGE > 0:
        start += page * x_p
    mask = valid[:, None]
    if columns.shape[0] > D:
        mask = mask & (columns < D)[None, :]
    return tl.load((x_ptr + columns * x_d)[None, :] + start[:, None], mask=mask, other=0.0)


@triton.jit
def _base(m):
    """What to subtract before exponentiating: -inf from itself would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _finish(acc, m, den, out_ptr, lse_ptr, heads, inside, D: tl.constexpr, HAS_LSE: tl.constexpr):
    """Store the quotient of acc [heads, columns] and the denominator; zeros and -inf where no row has weight."""
    columns = tl.arange(0, acc.shape[1])
    some = tl.where(den == 0.0, 1.0, den)
    y = acc * (1.0 / some)[:, None]
    mask = inside[:, None]
    if acc.shape[1] > D:
        mask = mask & (columns < D)[None, :]
    tl.store(out_ptr + heads[:, None] * D + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_LSE:
        # m counts in powers of two.
        tl.store(lse_ptr + heads, (m + tl.log2(some)) * 0.6931471805599453, mask=inside)


@triton.jit
def _one_head(
    q_ptr,
    k_ptr,
    v_ptr,
    index_ptr,
    table_ptr,
    scale,
    start,
    tiles,
    S,
    N,
    pages,
    q_d,
    k_p,
    k_n,
    k_d,
    v_p,
    v_n,
    v_d,
    i_s,
    t_p,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Weighted sum [1, DPAD], maximum [1] and denominator [1] for one query, by plain fp32 arithmetic.

    Eight columns a thread are read at once, and rows lie over the warps, so that a score
    needs shuffles alone.
    """
    columns = tl.arange(0, DPAD)
    slots = tl.arange(0, BLOCK)
    page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, EVEN)
    q = tl.load(q_ptr + columns.to(tl.int64) * q_d, mask=columns < D, other=0.0).to(tl.float32) * scale
    if SINGLE:
        k = _rows_at(k_ptr, page, row, valid, columns, k_p, k_n, k_d, D, PAGE, FAR)
        v = _rows_at(v_ptr, page, row, valid, columns, v_p, v_n, v_d, D, PAGE, FAR)
        x = tl.where(valid, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
        m = tl.max(x, 0)
        p = tl.exp2(x - _base(m))
        den = tl.sum(p, 0)
        acc = tl.sum(p[:, None] * v.to(tl.float32), 0)
    else:
        # Each slot of a tile keeps a softmax of its own: nothing crosses a warp before the end.
        ms = tl.full((BLOCK,), float("-inf"), tl.float32)
        ls = tl.zeros((BLOCK,), tl.float32)
        accs = tl.zeros((BLOCK, DPAD), tl.float32)
        for _ in tl.range(0, tiles, num_stages=1):
            k = _rows_at(k_ptr, page, row, valid, columns, k_p, k_n, k_d, D, PAGE, FAR)
            v = _rows_at(v_ptr, page, row, valid, columns, v_p, v_n, v_d, D, PAGE, FAR)
            chosen = valid
            # The next tile's indices are asked for before this tile's rows are used.
            start += BLOCK
            page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, False)
            x = tl.where(chosen, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
            top = tl.maximum(ms, x)
            below = _base(top)
            fade = tl.exp2(ms - below)
            p = tl.exp2(x - below)
            ms = top
            ls = ls * fade + p
            accs = accs * fade[:, None] + p[:, None] * v.to(tl.float32)
        m = tl.max(ms, 0)
        w = tl.exp2(ms - _base(m))
        den = tl.sum(ls * w, 0)
        acc = tl.sum(accs * w[:, None], 0)
    one = tl.zeros((1,), tl.float32)
    return acc[None, :], one + m, one + den


@triton.jit
def _scores(q, k, valid, scale):
    """Scaled scores [heads, rows] of a tile, -inf where nothing is chosen."""
    return tl.where(valid[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))


@triton.jit
def _weigh_rows(x, base, v, acc):
    """Denominator, and weighted sum added to ``acc``, of a tile's scores."""
    p = tl.exp2(x - base[:, None])
    return tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit
def _group(
    q_ptr,
    k_ptr,
    v_ptr,
    index_ptr,
    table_ptr,
    scale,
    start,
    tiles,
    S,
    N,
    pages,
    taken,
    q_h,
    q_d,
    k_p,
    k_n,
    k_d,
    v_p,
    v_n,
    v_d,
    i_s,
    t_p,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SINGLE: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PACK: tl.constexpr,
):
    """Weighted sums [HEADS, DPAD], maxima and denominators [HEADS] of a group's heads, by the tensor cores."""
    heads = tl.arange(0, HEADS)
    columns = tl.arange(0, DPAD)
    slots = tl.arange(0, BLOCK)
    mask = (heads < taken)[:, None]
    if DPAD > D:
        mask = mask & (columns < D)[None, :]
    q = tl.load(q_ptr + heads[:, None].to(tl.int64) * q_h + columns[None, :].to(tl.int64) * q_d, mask=mask, other=0.0)
    acc = tl.zeros((HEADS, DPAD), tl.float32)
    if SINGLE:
        page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, EVEN)
        k = _rows_at(k_ptr, page, row, valid, columns, k_p, k_n, k_d, D, PAGE, FAR)
        v = _rows_at(v_ptr, page, row, valid, columns, v_p, v_n, v_d, D, PAGE, FAR)
        if PACK > 0:
            # A barrier, and an opaque copy behind it. Without them the compiler puts the keys into shared
            # memory as soon as they are loaded, and asks for the values only when the keys are there.
            tl.debug_barrier()
            k, v = tl.inline_asm_elementwise(
                "mov.b32 $0, $2; mov.b32 $1, $3;",
                "=r,=r,r,r",
                [k, v],
                dtype=(k.dtype, v.dtype),
                is_pure=False,
                pack=PACK,
            )
        x = _scores(q, k, valid, scale)
        m = tl.max(x, 1)
        den, acc = _weigh_rows(x, _base(m), v, acc)
    else:
        m = tl.full((HEADS,), float("-inf"), tl.float32)
        den = tl.zeros((HEADS,), tl.float32)
        if AHEAD:
            if PACK > 0:
                # Otherwise each tile that is asked for before the loop waits for memory anew.
                _prefetch(index_ptr + start.to(tl.int64) * i_s, S - start, i_s)
            page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, False)
        for _ in tl.range(0, tiles, num_stages=STAGES):
            if not AHEAD:
                page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, EVEN)
            k = _rows_at(k_ptr, page, row, valid, columns, k_p, k_n, k_d, D, PAGE, FAR)
            v = _rows_at(v_ptr, page, row, valid, columns, v_p, v_n, v_d, D, PAGE, FAR)
            chosen = valid
            start += BLOCK
            if AHEAD:
                # Read in a tile's own turn, the indices take one of the stages for themselves.
                page, row, valid = _choose(index_ptr, table_ptr, start + slots, S, N, pages, i_s, t_p, PAGE, False)
            x = _scores(q, k, chosen, scale)
            top = tl.maximum(m, tl.max(x, 1))
            base = _base(top)
            fade = tl.exp2(m - base)
            m = top
            more, acc = _weigh_rows(x, base, v, acc * fade[:, None])
            den = den * fade + more
    return acc, m, den


@triton.jit
def _join(
    parts_ptr,
    stats_ptr,
    first,
    splits,
    taken,
    HELD: tl.constexpr,
    DPAD: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
):
    """The parts of all splits, up to MOST, added in a fixed order.

    With ONCE all reads are on their way before the first sum, else those of CHUNK parts at a time.
    """
    held = tl.arange(0, HELD)
    columns = tl.arange(0, DPAD)
    every = tl.arange(0, MOST)
    # Scalars hold the offsets of 64 bits, tiles those of 32.
    parts_ptr += first * (HELD * DPAD)
    stats_ptr += first * (HELD * 2)
    spot = every[:, None] * HELD + held[None, :]
    known = (every < splits)[:, None] & (held < taken)[None, :]
    # From the L2 cache: other multiprocessors wrote them.
    if ONCE:
        at = (spot * DPAD)[:, :, None] + columns[None, None, :]
        part = tl.load(parts_ptr + at, mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        tops = tl.load(stats_ptr + 2 * spot, mask=known, other=float("-inf"), cache_modifier=".cg")
        more = tl.load(stats_ptr + 2 * spot + 1, mask=known, other=0.0, cache_modifier=".cg")
        m = tl.max(tops, 0)
        w = tl.exp2(tops - _base(m)[None, :])
        total = tl.sum(more * w, 0)
        acc = tl.sum(part * w[:, :, None], 0)
    else:
        tops = tl.load(stats_ptr + 2 * spot, mask=known, other=float("-inf"), cache_modifier=".cg")
        m = tl.max(tops, 0)
        base = _base(m)[:, None]
        # With a column of one no layout changes in the loop.
        den = tl.zeros((HELD, 1), tl.float32)
        acc = tl.zeros((HELD, DPAD), tl.float32)
        for s in tl.range(0, splits, CHUNK, num_stages=1):
            for c in tl.static_range(CHUNK):
                row = ((s + c) * HELD + held)[:, None]
                at = parts_ptr + row * DPAD + columns[None, :]
                if WHOLE:
                    top = tl.load(stats_ptr + 2 * row, cache_modifier=".cg")
                    more = tl.load(stats_ptr + 2 * row + 1, cache_modifier=".cg")
                    part = tl.load(at, cache_modifier=".cg")
                else:
                    there = (s + c < splits) & (held < taken)[:, None]
                    top = tl.load(stats_ptr + 2 * row, mask=there, other=float("-inf"), cache_modifier=".cg")
                    more = tl.load(stats_ptr + 2 * row + 1, mask=there, other=0.0, cache_modifier=".cg")
                    part = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
                w = tl.exp2(top - base)
                den += more * w
                acc += part * w
        total = tl.sum(den, 1)
    return acc, m, total


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    index_ptr,
    table_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    counter_ptr,
    scale,
    S,
    N,
    pages,
    splits,
    tiles,
    q_b,
    q_h,
    q_d,
    k_p,
    k_n,
    k_h,
    k_d,
    v_p,
    v_n,
    v_h,
    v_d,
    i_b,
    i_h,
    i_s,
    t_b,
    t_p,
    METHOD: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    DEALS: tl.constexpr,
    TAKEN: tl.constexpr,
    HELD: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    PAGE: tl.constexpr,
    FAR: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    SINGLE: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
    ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
    PACK: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """``tiles`` tiles of BLOCK chosen rows a program, for TAKEN query heads of one batch entry and key head.

    A group of query heads is dealt out to DEALS programs. Of the programs that split the rows
    among them, the last to arrive joins what all have found.
    """
    # Heads of one row lie side by side in memory: programs that run together read whole pages of DRAM.
    task = tl.program_id(0)
    split = tl.program_id(1)
    b = (task // (HKV * DEALS) + tl.program_id(2)).to(tl.int64)
    h = task // DEALS % HKV
    dealt = task % DEALS * TAKEN
    # The last deal may be short.
    taken = tl.minimum(GROUP - dealt, TAKEN)
    first = (b * HKV + h) * GROUP + dealt
    h = h.to(tl.int64)
    q_ptr += b * q_b + (h * GROUP + dealt) * q_h
    index_ptr += b * i_b + h * i_h
    if PAGE > 0:
        table_ptr += b * t_b
        if PACK > 0:
            # Otherwise indices, table and cache are three trips to memory, one after the other.
            _prefetch(table_ptr, N // PAGE, t_p)
        k_ptr += h * k_h
        v_ptr += h * v_h
    else:
        k_ptr += b * k_p + h * k_h
        v_ptr += b * v_p + h * v_h
    start = split * (tiles * BLOCK)
    if METHOD == "rows":
        acc, m, den = _one_head(
            q_ptr, k_ptr, v_ptr, index_ptr, table_ptr, scale, start, tiles, S, N, pages, q_d, k_p, k_n, k_d, v_p, v_n,
            v_d, i_s, t_p, D, DPAD, PAGE, FAR, EVEN, BLOCK, SINGLE,
        )  # fmt: skip
    else:
        acc, m, den = _group(
            q_ptr, k_ptr, v_ptr, index_ptr, table_ptr, scale, start, tiles, S, N, pages, taken, q_h, q_d, k_p, k_n, k_d,
            v_p, v_n, v_d, i_s, t_p, D, DPAD, HEADS, PAGE, FAR, EVEN, BLOCK, SINGLE, STAGES, AHEAD, PACK,
        )  # fmt: skip
    heads = tl.arange(0, acc.shape[0])
    if not SPLIT:
        _finish(acc, m, den, out_ptr, lse_ptr, first + heads, heads < taken, D, HAS_LSE)
    else:
        tasks = tl.num_programs(0) * tl.num_programs(2)
        task += tl.program_id(2) * tl.num_programs(0)
        part = task.to(tl.int64) * splits
        stats_ptr = parts_ptr + tasks.to(tl.int64) * splits * (HELD * DPAD)
        row = (part + split) * HELD + heads
        columns = tl.arange(0, DPAD)
        tl.store(parts_ptr + row[:, None] * DPAD + columns[None, :], acc, mask=(heads < taken)[:, None])
        tl.store(stats_ptr + 2 * row, m, mask=heads < taken)
        tl.store(stats_ptr + 2 * row + 1, den, mask=heads < taken)
        if _split.arrive(counter_ptr + task, splits):
            total, top, weight = _join(parts_ptr, stats_ptr, part, splits, taken, HELD, DPAD, MOST, CHUNK, WHOLE, ONCE)
            held = tl.arange(0, HELD)
            _finish(total, top, weight, out_ptr, lse_ptr, first + held, held < taken, D, HAS_LSE)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _by_heads(indices: torch.Tensor, heads: int) -> torch.Tensor:
    """The indices as int64 [B, heads, S]."""
    return (indices if indices.ndim == 3 else indices[:, None].expand(-1, heads, -1)).long()


def _weigh(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, scale: float) -> Both:
    """Output and LSE of q [B, Hq, D] over rows k and v [B, Hkv, S, D], those that are valid [B, Hkv, S]."""
    wide = _lse_dtype(q)
    # Zeros, not merely no weight: 0 x NaN would reach the output and the gradients.
    k, v = (torch.where(valid[..., None], x.to(wide), 0.0) for x in (k, v))
    grouped = q.to(wide).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    x = torch.where(valid[:, :, None], torch.einsum("bhgd,bhsd->bhgs", grouped, k) * scale, -math.inf)
    # It cancels, so no gradient goes through it. Nothing has no maximum.
    m = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -math.inf)
    p = torch.exp(x - torch.where(m == -math.inf, 0.0, m))
    den = p.sum(-1, keepdim=True)
    some = torch.where(den == 0, 1.0, den)
    out = torch.einsum("bhgs,bhsd->bhgd", p, v) / some
    lse = torch.where(den == 0, -math.inf, m + torch.log(some))
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 3)


def _rows(inputs: Inputs) -> int:
    """How many rows there are to choose from."""
    rows: int = inputs.k.shape[1] * (1 if inputs.table is None else inputs.table.shape[1])
    return rows


def _places(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First and second coordinate in the cache of each choice, and whether it names a row there: [B, Hkv, S]."""
    _, k, _, table, indices = inputs
    row = _by_heads(indices, k.shape[2])
    page = torch.arange(row.shape[0], device=row.device)[:, None, None].expand_as(row)
    if table is None:
        return page, row, (row >= 0) & (row < k.shape[1])
    size = k.shape[1]
    valid = (row >= 0) & (row < size * table.shape[1])
    if table.numel():
        page = table[page, torch.where(valid, row, 0) // size].long()
    return page, row % size, valid & (page >= 0) & (page < k.shape[0])


def _reference(inputs: Inputs, scale: float) -> Both:
    """Output and LSE of either form, differentiable."""
    q, k, v, _, _ = inputs
    page, row, valid = _places(inputs)
    if k.numel() == 0:
        none = q.new_zeros(q.shape[0], k.shape[2], 0, q.shape[2])
        return _weigh(q, none, none, valid[..., :0], scale)
    page, row = (torch.where(valid, at, 0) for at in (page, row))
    head = torch.arange(k.shape[2], device=q.device)[:, None]
    return _weigh(q, k[page, row, head], v[page, row, head], valid, scale)


def _scale_of(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)


def selected_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
) -> Both:
    """Output and LSE of ``selected_attention`` in differentiable PyTorch; fp64 inputs are computed in fp64."""
    return _reference(Inputs(q, k, v, None, indices), _scale_of(q, scale))


def selected_attention_paged_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
) -> Both:
    """Output and LSE of ``selected_attention_paged`` in differentiable PyTorch; fp64 inputs are computed in fp64."""
    return _reference(Inputs(q, k_cache, v_cache, page_table, indices), _scale_of(q, scale))


def _expect_shape(name: str, argument: str, x: torch.Tensor, right: bool, expected: str) -> None:
    _checks.expect(right, name, argument, expected, tuple(x.shape))


def _expect_integers(name: str, argument: str, x: torch.Tensor, q: torch.Tensor) -> None:
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: {argument}: expected int32 or int64, got {x.dtype}.")
    _checks.expect_alike(name, argument, x, "q", q)


def _check_cache(name: str, inputs: Inputs) -> None:
    q, k, v, table, _ = inputs
    key, value, axes = ("k", "v", "B, N") if table is None else ("k_cache", "v_cache", "pages, page_size")
    _checks.expect_float(name, "q", q)
    _expect_shape(name, "q", q, q.ndim == 3, "a shape [B, Hq, D]")
    _expect_shape(name, key, k, k.ndim == 4, f"a shape [{axes}, Hkv, D]")
    _expect_shape(name, key, k, k.shape[3] == q.shape[2], f"the D of q, {q.shape[2]}, last")
    if table is None:
        _expect_shape(name, key, k, k.shape[0] == q.shape[0], f"the B of q, {q.shape[0]}, first")
    else:
        _expect_shape(name, key, k, k.shape[1] > 0, "a page size above 0")
    _expect_shape(name, value, v, v.shape == k.shape, f"the shape of {key}, {tuple(k.shape)}")
    hq, hkv = q.shape[1], k.shape[2]
    multiple = hkv > 0 and hq % hkv == 0
    _checks.expect(multiple, name, "q", f"a number of heads that {key}'s, {hkv}, divides", f"{hq} heads")
    for argument, x in ((key, k), (value, v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: {argument}: expected the dtype of q, {q.dtype}, got {x.dtype}.")
        _checks.expect_alike(name, argument, x, "q", q)


def _check(inputs: Inputs) -> str:
    """Raise unless the tensors fit together; the name of the form that takes them."""
    q, k, _, table, indices = inputs
    name = NAME if table is None else PAGED
    _check_cache(name, inputs)
    batch, hkv = q.shape[0], k.shape[2]
    fit = indices.shape[:-1] in ((batch, hkv), (batch,))
    _expect_shape(name, "indices", indices, fit, f"a shape [{batch}, {hkv}, S] or [{batch}, S]")
    _expect_integers(name, "indices", indices, q)
    if table is not None:
        fit = table.ndim == 2 and table.shape[0] == batch
        _expect_shape(name, "page_table", table, fit, f"a shape [{batch}, max_pages]")
        _expect_integers(name, "page_table", table, q)
    return name


def _validate(name: str, inputs: Inputs) -> None:
    """Raise unless each index that is not negative names a row of the cache. Waits for the device."""
    _, k, _, table, indices = inputs
    rows = _rows(inputs)
    beyond = indices[indices >= rows].tolist()
    _checks.expect(not beyond, name, "indices", f"indices below {rows}", beyond[:1])
    if table is None:
        return
    page, _, valid = _places(inputs)
    outside = page[~valid & (_by_heads(indices, k.shape[2]) >= 0)].tolist()
    _checks.expect(not outside, name, "page_table", f"pages below {k.shape[0]} for chosen rows", outside[:1])


def _shares(tiles: int, tasks: int, multiprocessors: int, grain: int) -> tuple[int, int]:
    """How many programs split the ``tiles`` of each task among them, and how many tiles each takes.

    The cost of starting programs falls with the tiles that one takes, and what the last
    ones leave idle grows with it: of the two the sum is least near the square root of the
    tiles a multiprocessor. ``grain`` scales that, in hundredths.
    """
    each = max(1, round(grain / 100 * math.sqrt(tiles * tasks / multiprocessors)))
    splits = math.ceil(tiles / each)
    each = math.ceil(tiles / splits)
    return math.ceil(tiles / each), each


class _Work(NamedTuple):
    """How a call is dealt out: ``taken`` of a group's heads a program, ``each`` tiles of ``block`` rows.

    ``padded`` and ``held`` are the columns and the heads of a part, powers of two.
    """

    config: _launch.Config
    deals: int
    taken: int
    held: int
    padded: int
    block: int
    tasks: int
    splits: int
    each: int


def _work(inputs: Inputs) -> _Work:
    q, k, _, _, indices = inputs
    (batch, hq, d), hkv, chosen = q.shape, k.shape[2], indices.shape[-1]
    group, arch = hq // hkv, _launch.architecture(q.get_device())
    # The table's rows are the query heads of a group, its columns all rows that are chosen.
    config = _launch.choose(NAME, arch, itemsize=q.element_size(), rows=group, columns=batch * hkv * chosen)
    deals = group if config["method"] == "rows" else math.ceil(group / _HEADS_TOGETHER)
    taken, padded = math.ceil(group / deals), max(16, triton.next_power_of_2(d))
    # Twice the columns take the registers and the shared memory of twice the rows.
    block = config["block"] if padded <= 128 else max(config["block"] // 2, 16)
    tiles, tasks = math.ceil(chosen / block), batch * hkv * deals
    multiprocessors = _launch.processors(q.get_device()) if q.is_cuda else _MULTIPROCESSORS
    splits, each = _shares(tiles, tasks, multiprocessors, config["grain"])
    if max(batch, splits) > _GRID_LIMIT:
        splits, each = 1, tiles
    held = triton.next_power_of_2(taken)
    return _Work(config, deals, taken, held, padded, block, tasks, splits, each)


def _reach(x: torch.Tensor, table: torch.Tensor | None) -> int:
    """How far the last element of a head lies behind its first, within an entry or within all pages."""
    sizes = x.shape if table is not None else (1, *x.shape[1:])
    return sum((size - 1) * stride for size, stride in zip(sizes, x.stride(), strict=True))


def _constants(inputs: Inputs, work: _Work, with_lse: bool) -> dict[str, object]:
    q, k, v, table, indices = inputs
    group = q.shape[1] // k.shape[2]
    most = triton.next_power_of_2(work.splits)
    chunk = min(most, work.config["depth"])
    return {
        "METHOD": work.config["method"],
        "HKV": k.shape[2],
        "GROUP": group,
        "DEALS": work.deals,
        "TAKEN": work.taken,
        "HELD": work.held,
        "HEADS": _HEADS_TOGETHER,
        "D": q.shape[2],
        "DPAD": work.padded,
        "PAGE": 0 if table is None else k.shape[1],
        "FAR": max(_reach(k, table), _reach(v, table)) >= 2**31,
        "EVEN": indices.shape[-1] == work.splits * work.each * work.block,
        "BLOCK": work.block,
        "STAGES": work.config["stages"],
        "SPLIT": work.splits > 1,
        "SINGLE": work.each == 1,
        "MOST": most,
        "CHUNK": chunk,
        "WHOLE": work.splits % chunk == 0 and work.deals * work.held == group,
        "ONCE": work.config["join"] == "once" and most * work.held * work.padded <= _JOINED * work.config["num_warps"],
        "AHEAD": work.config["ahead"] == 1,
        "PACK": 0 if INTERPRET else 4 // q.element_size(),
        "HAS_LSE": with_lse,
    }


def _scalars(inputs: Inputs, work: _Work, scale: float) -> tuple[int | float, ...]:
    q, k, v, table, indices = inputs
    shared = (indices.stride(0), 0, indices.stride(-1))
    return (
        # A power of two costs one instruction.
        scale * math.log2(math.e),
        *(indices.shape[-1], _rows(inputs), k.shape[0], work.splits, work.each),
        *(*q.stride(), *k.stride(), *v.stride()),
        *(indices.stride() if indices.ndim == 3 else shared),
        *((0, 0) if table is None else table.stride()),
    )


_plans = _launch.PlanCache()
Run = Callable[[Inputs], Both]


def _nothing(inputs: Inputs) -> Both:
    """The answer where no row can be chosen: zeros, and LSE -inf."""
    q = inputs.q
    return q.new_zeros(q.shape), q.new_full(q.shape[:2], -math.inf, dtype=_lse_dtype(q))


def _refusal(inputs: Inputs) -> tuple[str, str] | None:
    """The layer and the reason why the kernel does not take these tensors, or None where it does."""
    q, k, v, _, indices = inputs
    if q.shape[2] > _WIDEST_HEAD:
        return "inputs", f"the kernel takes heads of up to {_WIDEST_HEAD} columns, not {q.shape[2]}"
    if max(_rows(inputs), indices.shape[-1]) >= _MOST_ROWS:
        return "inputs", f"the kernel counts fewer than {_MOST_ROWS} rows of a cache and of a choice"
    return _checks.refusal(q, k, v)


def _route(inputs: Inputs, scale: float, with_lse: bool) -> Run:
    """How every call of this signature is served. Without ``with_lse`` the second result means nothing."""
    name = _check(inputs)
    if inputs.q.is_meta:
        return _nothing
    route: Run = routing.triton_route(
        name,
        _refusal(inputs),
        lambda: _plan(inputs, scale, with_lse),
        lambda inputs: _reference(inputs, scale),
    )
    return route


def _plan(inputs: Inputs, scale: float, with_lse: bool) -> Run:
    """What launches the kernel for this signature."""
    q, k, v, table, indices = inputs
    if not all(x is None or x.numel() for x in inputs):
        return _nothing
    work = _work(inputs)
    tasks, splits, device, lse_shape = work.tasks, work.splits, q.device, q.shape[:2]
    # Something to pass where a kernel takes no notice of what it is given.
    out, unused = q.new_empty(q.shape), torch.empty(4, dtype=torch.float32, device=device)
    table_or_not = indices if table is None else table
    launch = _launch.bind(
        _attend_kernel,
        (tasks, 1) if splits == 1 else (tasks // q.shape[0], splits, q.shape[0]),
        (q, k, v, indices, table_or_not, out, unused, unused, _split.counters(device, tasks)),
        _scalars(inputs, work, scale),
        _constants(inputs, work, with_lse),
        config=work.config,
        num_warps=work.config["num_warps"],
    )
    # Of each part its sums, then for each of its heads the maximum and the denominator.
    parts_size = tasks * splits * work.held * (work.padded + 2)
    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = q.stride() == out.stride()

    def run(inputs: Inputs) -> Both:
        q, k, v, table, indices = inputs
        out = torch.empty_like(q) if alike else q.new_empty(q.shape)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device) if with_lse else unused
        parts, counter = unused, indices
        if splits > 1:
            parts = torch.empty(parts_size, dtype=torch.float32, device=device)
            counter = _split.counters(device, tasks)
        launch(q, k, v, indices, indices if table is None else table, out, lse, parts, counter)
        return out, lse

    return run


def _signature(x: torch.Tensor) -> tuple[object, ...]:
    """All of a tensor that a plan depends on."""
    return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15


def _forward(inputs: Inputs, scale: float, with_lse: bool) -> Both:
    q, k, v, table, indices = inputs
    pages = None if table is None else _signature(table)
    key = _signature(q), _signature(k), _signature(v), pages, _signature(indices), scale, with_lse
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(inputs, scale, with_lse))
    result: Both = plan(inputs)
    return result


@torch.library.custom_op("triton_kernel_lab::selected_attention", mutates_args=())
def _selected_attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None, indices: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(Inputs(q, k, v, table, indices), scale, True)


@_selected_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None, indices: torch.Tensor, scale: float
) -> Both:
    _check(Inputs(q, k, v, table, indices))
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_lse_dtype(q))


_PLAIN = _launch.PLAIN_TYPES | {type(None)}


def _attend(inputs: Inputs, scale: float | None, return_lse: bool, validate: bool) -> Result:
    """Either form: where the call goes, and what of the two results is wanted."""
    q, k, v, _, _ = inputs
    factor = _scale_of(q, scale)
    if validate:
        _validate(_check(inputs), inputs)
    if _checks.wants_grad(q, k, v):
        _checks.note_autograd(_check(inputs))
        both = _reference(inputs, factor)
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    elif (
        torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, inputs)) or any(x.is_neg() for x in (q, k, v))
    ):
        both = _selected_attention_op(*inputs, factor)
    else:
        both = _forward(inputs, factor, return_lse)
    return both if return_lse else both[0]


@overload
def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    validate: bool = False,
) -> torch.Tensor: ...
@overload
def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    validate: bool = False,
) -> Both: ...
def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    validate: bool = False,
) -> Result:
    """Attention of one query a head over the rows of a cache that ``indices`` names.

    ``softmax(scale * q k^T) v`` over the chosen rows; Vaswani et al. 2017, equation 1. Scores, softmax
    and sums are taken in fp32. A row that is named twice counts twice. A negative index is no choice,
    and neither is one of N or more: such a row is never read. Where nothing is chosen the output is 0
    and the LSE -inf.

    Args:
        q: float16, bfloat16 or float32 [B, Hq, D] with any strides, D up to 256. As all arguments it is
            read in place.
        k: the keys of the cache, [B, N, Hkv, D] of q's dtype. Hq is a multiple of Hkv; query head h
            belongs to head h // (Hq / Hkv).
        v: the values, with the shape of k and strides of its own.
        indices: int32 or int64 [B, Hkv, S], or [B, S] for one choice that all heads share; in any order.
        scale: what scores are multiplied by; 1 / sqrt(D) if None.
        return_lse: whether to return the logarithm of the denominator too.
        validate: whether to look at the indices first, which waits for the device.

    Returns:
        A contiguous tensor [B, Hq, D] of q's dtype; with ``return_lse`` also the natural logarithm of
        the sum of the exponentials of the scaled scores, fp32 [B, Hq]. When a gradient is wanted the
        differentiable PyTorch form computes both.

    Raises:
        TypeError: q is not floating-point, the dtypes of q, k and v differ, or indices are no int32 or int64.
        ValueError: shapes or devices do not fit, Hq is no multiple of Hkv, or, with ``validate``, an
            index is N or more.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    return _attend(Inputs(q, k, v, None, indices), scale, return_lse, validate)


@overload
def selected_attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[False] = False,
    validate: bool = False,
) -> torch.Tensor: ...
@overload
def selected_attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: Literal[True],
    validate: bool = False,
) -> Both: ...
def selected_attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    indices: torch.Tensor,
    scale: float | None = None,
    *,
    return_lse: bool = False,
    validate: bool = False,
) -> Result:
    """``selected_attention`` over a paged cache, without gathering it first.

    Row i of batch entry b is row ``i % page_size`` of page ``page_table[b, i // page_size]``. Pages may
    stand in any order and belong to several entries. Only table entries of chosen rows are read; a row
    whose page is not in the cache (-1, say) is no choice, as an index beyond the table is none.

    Args:
        q: as for ``selected_attention``.
        k_cache: the keys, [pages, page_size, Hkv, D] of q's dtype with any strides.
        v_cache: the values, with the shape of k_cache and strides of its own.
        page_table: int32 or int64 [B, max_pages] with any strides.
        indices: int32 or int64 [B, Hkv, S] or [B, S], row numbers from 0 to max_pages x page_size - 1;
            negative ones are no choice.
        scale: as for ``selected_attention``.
        return_lse: as for ``selected_attention``.
        validate: whether to look at the indices and at the pages of chosen rows first, which waits
            for the device.

    Returns:
        As ``selected_attention``.

    Raises:
        TypeError: as ``selected_attention``, and page_table is no int32 or int64.
        ValueError: as ``selected_attention``, and, with ``validate``, an index beyond the table or the
            page of a chosen row outside the cache.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    return _attend(Inputs(q, k_cache, v_cache, page_table, indices), scale, return_lse, validate)
