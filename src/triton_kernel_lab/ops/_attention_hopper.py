"""The attention kernel for sm_90: one warp loads, two warp groups compute and overlap softmax with products.

Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608, algorithm 2, written in
Gluon, the layer of Triton that names warp groups, barriers and layouts. The
tensor memory accelerator moves all tiles; the kernel makes its descriptors
itself, so that a launch takes plain pointers.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import torch

from triton_kernel_lab.ops._triton import HAS_TRITON, triton

__all__ = ["HAS_GLUON", "HEADS", "ROWS", "attention_kernel", "with_scratch"]

HAS_GLUON = False
if HAS_TRITON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.hopper import (
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )

        HAS_GLUON = True
    except ImportError:
        pass
if not HAS_GLUON:
    from triton_kernel_lab.ops._triton import _Missing

    gluon = gl = _Missing()

HEADS = (64, 128)
"""The widths of a tile: heads of any multiple of 8 features up to them, the rest zeros in shared memory only."""
ROWS = 128
"""Queries of one tile, 64 for each computing warp group."""


@gluon.jit
def _turns(sizes):
    """How many tiles fall to this program."""
    _, _, _, _, heads, tiles, _ = sizes
    programs = gl.num_programs(0)
    rounds = tiles * heads // programs
    rest = tiles * heads % programs
    mine = gl.program_id(0)
    if rounds % 2 == 1:
        mine = programs - 1 - mine
    return rounds + (mine < rest).to(gl.int32)


@gluon.jit
def _tile_of(i, sizes):
    """Head and tile of turn ``i`` of this program.

    Tiles are dealt from the longest to the shortest, heads fastest within a
    cluster of heads, every other round in the opposite direction: otherwise the
    first program would get the longest of each round.
    """
    _, _, _, _, heads, tiles, cluster = sizes
    mine = gl.program_id(0)
    if i % 2 == 1:
        mine = gl.num_programs(0) - 1 - mine
    dealt = i * gl.num_programs(0) + mine
    per_cluster = tiles * cluster
    first = dealt // per_cluster * cluster
    within = dealt % per_cluster
    width = gl.minimum(cluster, heads - first)
    return first + within % width, tiles - 1 - within // width


@gluon.jit
def _blocks_of(tile, Lq, Lk, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys all rows of a tile see whole, and how many any row sees."""
    whole = Lk
    end = Lk
    if CAUSAL:
        first = tile * 128 + Lk - Lq
        whole = gl.minimum(Lk, gl.maximum(first + 1, 0))
        end = gl.minimum(Lk, gl.maximum(first + 128, 0))
    return whole // BLOCK, (end + BLOCK - 1) // BLOCK


@gluon.jit
def _next(slot, turn, STAGES: gl.constexpr):
    """The slot of a ring after this one, and the parity of the turn that it belongs to."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, turn ^ 1, turn)


@gluon.jit
def _fill(desc, barrier, shared, b, row, h, BYTES: gl.constexpr):
    """Begin to copy one tile; what lies beyond the last row comes as zeros."""
    mbarrier.expect(barrier, BYTES)
    tma.async_copy_global_to_shared(desc, [b, row, h, 0], barrier, shared)


@gluon.jit
def _load(
    descriptors,
    tiles_of,
    barriers,
    sizes,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The loading warp: queries, then keys and values from the diagonal backwards, for every turn of this program."""
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = tiles_of
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    Lq, Lk, Hq, group, _, _, _ = sizes
    # Whatever is empty counts as released one turn ago, so that the first turn does not wait.
    slot = 0
    turn = 1
    q_turn = 1
    for i in range(_turns(sizes)):
        head, tile = _tile_of(i, sizes)
        _, blocks = _blocks_of(tile, Lq, Lk, BLOCK, CAUSAL)
        b = head // Hq
        h = head % Hq
        mbarrier.wait(q_empty, q_turn)
        mbarrier.expect(q_full, 2 * 64 * D * 2)
        tma.async_copy_global_to_shared(q_desc, [b, tile * 128, h, 0], q_full, q_tiles.index(0))
        tma.async_copy_global_to_shared(q_desc, [b, tile * 128 + 64, h, 0], q_full, q_tiles.index(1))
        q_turn = q_turn ^ 1
        for j in range(blocks):
            row = (blocks - 1 - j) * BLOCK
            mbarrier.wait(k_empty.index(slot), turn)
            _fill(k_desc, k_full.index(slot), k_tiles.index(slot), b, row, h // group, BLOCK * D * 2)
            mbarrier.wait(v_empty.index(slot), turn)
            _fill(v_desc, v_full.index(slot), v_tiles.index(slot), b, row, h // group, BLOCK * D * 2)
            slot, turn = _next(slot, turn, STAGES)


@gluon.jit
def _seen(s, block, row, Lk, shift, BLOCK: gl.constexpr, CAUSAL: gl.constexpr, LAYOUT: gl.constexpr):
    """The scores with -inf where a row does not see a key."""
    columns = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    see = (columns < Lk)[None, :]
    if CAUSAL:
        see = see & (columns[None, :] <= row[:, None] + shift)
    return gl.where(see, s, float("-inf"))


@gluon.jit
def _softmax(s, highest, m, total, scale, even_scale):
    """Weights of a block of scores, the new maximum and sum, and by how much older weights fade.

    ``highest`` is the largest score so far and ``m`` the same scaled, as in ``_attend`` of
    ``flash_attention``, where the two scales are explained.
    """
    highest = gl.maximum(highest, gl.max(s, 1))
    by = gl.where(gl.abs(highest) * scale >= 268435456.0, even_scale, scale)
    m_new = highest * by
    x = gl.exp2(s * by[:, None] - m_new[:, None])
    fade = gl.exp2(m - m_new)
    return x, highest, m_new, total * fade + gl.sum(x, 1), fade


@gluon.jit
def _step(
    state,
    q_shared,
    rings,
    slots,
    block,
    more,
    row,
    Lk,
    shift,
    scale,
    even_scale,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    TAIL: gl.constexpr,
    dtype: gl.constexpr,
):
    """Softmax of one block while the values of the block before are added.

    ``state`` is the output so far without the block before, its weights x, and
    the running maximum and sum with it.
    """
    acc, x, highest, m, total = state
    before, before_turn, slot, turn = slots
    k_shared, v_shared, k_full, k_empty, v_full, v_empty = rings
    S_LAYOUT: gl.constexpr = x.type.layout
    # Rounded here and not where it was made: as a value that a loop carries, each pair would be unpacked.
    p = gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    nothing = gl.zeros((64, BLOCK), gl.float32, S_LAYOUT)
    s_later = warpgroup_mma(q_shared, k_shared.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), before_turn)
    acc_later = warpgroup_mma(p, v_shared.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_later])
    if TAIL:
        s = _seen(s, block, row, Lk, shift, BLOCK, CAUSAL, S_LAYOUT)
    x, highest, m, total, fade = _softmax(s, highest, m, total, scale, even_scale)
    after, after_turn = _next(slot, turn, STAGES)
    # Waited for here and not before its use: the branch keeps ptxas from moving the exponentials
    # behind the wait below, where nothing would overlap them.
    mbarrier.wait(k_full.index(after), after_turn, pred=more)
    acc, p = warpgroup_mma_wait(0, deps=[acc_later, p])
    # Both here: each arrival costs a barrier of the warp group before it and one after.
    mbarrier.arrive(k_empty.index(slot), count=1)
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    return (acc, x, highest, m, total), (slot, turn, after, after_turn)


@gluon.jit
def _compute(
    own,
    common,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PART: gl.constexpr,
):
    """A computing warp group: 64 rows of every tile of this program."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    out_desc, lse_ptr, q_shared, staged, staged_tile = own
    rings, q_full, q_empty, sizes, scale, even_scale = common
    dtype: gl.constexpr = q_shared.dtype
    k_shared, v_shared, k_full, k_empty, v_full, v_empty = rings
    Lq, Lk, Hq, _, _, _, _ = sizes
    shift = Lk - Lq
    # The lowest start from which a scaled maximum is finite, so that no -inf is ever subtracted from -inf.
    lowest = -3e38 / gl.maximum(even_scale, 1.0)
    slots = (0, 0, 0, 0)
    q_turn = 0
    for i in range(_turns(sizes)):
        head, tile = _tile_of(i, sizes)
        whole, blocks = _blocks_of(tile, Lq, Lk, BLOCK, CAUSAL)
        first = tile * 128 + PART * 64
        row = first + gl.arange(0, 64, ROW)
        highest = gl.full((64,), lowest, gl.float32, ROW)
        m = highest * even_scale
        total = gl.zeros((64,), gl.float32, ROW)
        acc = gl.zeros((64, D), gl.float32, O_LAYOUT)
        mbarrier.wait(q_full, q_turn)
        q_turn = q_turn ^ 1
        if blocks > 0:
            _, _, slot, turn = slots
            mbarrier.wait(k_full.index(slot), turn)
            nothing = gl.zeros((64, BLOCK), gl.float32, S_LAYOUT)
            s_later = warpgroup_mma(
                q_shared, k_shared.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(0, deps=[s_later])
            mbarrier.arrive(k_empty.index(slot), count=1)
            s = _seen(s, blocks - 1, row, Lk, shift, BLOCK, CAUSAL, S_LAYOUT)
            x, highest, m, total, _ = _softmax(s, highest, m, total, scale, even_scale)
            after, after_turn = _next(slot, turn, STAGES)
            mbarrier.wait(k_full.index(after), after_turn, pred=blocks > 1)
            slots = (slot, turn, after, after_turn)
            state = (acc, x, highest, m, total)
            tail = gl.maximum(blocks - whole, 1)
            for j in range(1, tail):
                state, slots = _step(
                    *(state, q_shared, rings, slots, blocks - 1 - j, j + 1 < blocks, row, Lk, shift, scale, even_scale),
                    *(BLOCK, STAGES, CAUSAL, True, dtype),
                )
            for j in range(tail, blocks):
                state, slots = _step(
                    *(state, q_shared, rings, slots, blocks - 1 - j, j + 1 < blocks, row, Lk, shift, scale, even_scale),
                    *(BLOCK, STAGES, CAUSAL, False, dtype),
                )
            acc, x, highest, m, total = state
            before, before_turn, _, _ = slots
            p = gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
            mbarrier.wait(v_full.index(before), before_turn)
            acc_later = warpgroup_mma(p, v_shared.index(before), acc, is_async=True)
            # The next turn's queries may come while this one ends.
            mbarrier.arrive(q_empty, count=1)
            acc, p = warpgroup_mma_wait(0, deps=[acc_later, p])
            mbarrier.arrive(v_empty.index(before), count=1)
        else:
            mbarrier.arrive(q_empty, count=1)
        sees = row >= 0
        if CAUSAL:
            sees = row + shift >= 0
        total = gl.where(sees, total, 1.0)
        y = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # What the turn before left here has been read.
        tma.store_wait(0)
        staged.store(y.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [head // Hq, first, head % Hq, 0], staged_tile)
        if HAS_LSE:
            lse = gl.where(sees, (highest * scale + gl.log2(total)) * 0.6931471805599453, float("-inf"))
            gl.store(lse_ptr + head.to(gl.int64) * Lq + row, lse, mask=row < Lq)
    tma.store_wait(0)


_PLAIN = ["batch", "Lq", "Lk", "Hq", "group", "tiles", "cluster", "width"]
_PLAIN += [f"{x}_{dim}" for x in "qkv" for dim in "blh"]


# Nothing here depends on which numbers 16 divides, so one binary serves all shapes and strides.
@gluon.jit(do_not_specialize=_PLAIN)
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    batch,
    Lq,
    Lk,
    Hq,
    group,
    tiles,
    cluster,
    width,
    q_b,
    q_l,
    q_h,
    k_b,
    k_l,
    k_h,
    v_b,
    v_l,
    v_h,
    scale,
    even_scale,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """128 queries of one head a turn, for all the turns that fall to this program."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_heads = Hq // group
    q_desc = tma.make_tensor_descriptor(q_ptr, [batch, Lq, Hq, width], [q_b, q_l, q_h, 1], [1, 64, 1, D], TILE)
    k_desc = tma.make_tensor_descriptor(k_ptr, [batch, Lk, kv_heads, width], [k_b, k_l, k_h, 1], [1, BLOCK, 1, D], TILE)
    v_desc = tma.make_tensor_descriptor(v_ptr, [batch, Lk, kv_heads, width], [v_b, v_l, v_h, 1], [1, BLOCK, 1, D], TILE)
    out_h = width
    out_l = Hq * out_h
    out_desc = tma.make_tensor_descriptor(
        out_ptr, [batch, Lq, Hq, width], [Lq.to(gl.int64) * out_l, out_l, out_h, 1], [1, 64, 1, D], TILE
    )
    # The same memory as matrices for the tensor cores and, with the outer dimensions, for the copies.
    q_shared = gl.allocate_shared_memory(dtype, [2, 64, D], SHARED)
    staged = gl.allocate_shared_memory(dtype, [2, 64, D], SHARED)
    k_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], SHARED)
    v_shared = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, D], SHARED)
    q_tiles = q_shared._reinterpret(dtype, [2, 1, 64, 1, D], TILE)
    staged_tiles = staged._reinterpret(dtype, [2, 1, 64, 1, D], TILE)
    k_tiles = k_shared._reinterpret(dtype, [STAGES, 1, BLOCK, 1, D], TILE)
    v_tiles = v_shared._reinterpret(dtype, [STAGES, 1, BLOCK, 1, D], TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(q_full, count=1)
    # Both computing warp groups are done with a tile before it is filled again.
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    rings = (k_shared, v_shared, k_full, k_empty, v_full, v_empty)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (Lq, Lk, Hq, group, batch * Hq, tiles, cluster)
    one = (out_desc, lse_ptr, q_shared.index(0), staged.index(0), staged_tiles.index(0))
    two = (out_desc, lse_ptr, q_shared.index(1), staged.index(1), staged_tiles.index(1))
    rest = (rings, q_full, q_empty, sizes, scale, even_scale)
    gl.warp_specialize(
        [
            (_compute, (one, rest, D, BLOCK, STAGES, CAUSAL, HAS_LSE, 0)),
            (_compute, (two, rest, D, BLOCK, STAGES, CAUSAL, HAS_LSE, 1)),
            (_load, ((q_desc, k_desc, v_desc), (q_tiles, k_tiles, v_tiles), barriers, sizes, D, BLOCK, STAGES, CAUSAL)),
        ],
        [4, 1],
        # Registers a thread: what computes holds two blocks of scores and the sum, what loads needs few.
        [240, 24],
    )


def with_scratch(launch: Callable[..., None]) -> Callable[..., None]:
    """A launcher that lends the kernel the memory in which it makes its descriptors."""

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        # On the launch's device and stream, which are current; torch aligns to more than is asked for.
        return torch.empty(size, dtype=torch.int8, device="cuda")

    def lent(tensors: tuple[Any, ...]) -> None:
        triton.set_allocator(allocate)
        launch(*tensors)

    # In a context of its own: the caller's allocator stays what it was.
    return lambda *tensors: contextvars.copy_context().run(lent, tensors)
