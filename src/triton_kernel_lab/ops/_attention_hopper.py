"""The attention of sm_90: warps that load, and two groups of warps that multiply.

A program has three groups of four warps. One copies tiles of keys and values
into a ring in shared memory through tensor memory descriptors. The two others
hold 64 queries each. They issue a block's scores and the block before's
weighted values together, and form weights while the tensor cores work.

Algorithm: Shah et al., "FlashAttention-3", 2024, arXiv:2407.08608, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops._triton import HAS_GLUON, gl, gluon, hopper

__all__ = ["bind"]

_ROWS = 128
# The queries of one group of warps: half of a tile's.
_PART = gl.constexpr(64)
# Bytes. A descriptor takes memory that starts at, and strides by, multiples of this.
_ALIGNMENT = 16
# Programs of two tiles are long, and must not leave more of the multiprocessors idle in their last turn.
_IDLE = 0.1
# Triton 3.7's launcher asks this of a descriptor, too.
_launch._Described.round_f32_to_tf32 = False  # type: ignore[attr-defined]


@gluon.jit
def _tiles_of(program, tiles, heads, cluster, EACH: gl.constexpr):
    """Head of a program, its tiles and their number: one, or one from the end and its mirror from the start.

    Heads go in clusters, in each the longest rows first, heads fastest. With two the programs are equally
    long, and a tile's first loads run beside the end of the one before.
    """
    groups = gl.cdiv(tiles, EACH)
    per_cluster = groups * cluster
    first = program // per_cluster * cluster
    within = program % per_cluster
    width = gl.minimum(cluster, heads - first)
    near = within // width
    far = tiles - 1 - near
    count = gl.where((far == near) | (EACH == 1), 1, 2)
    return first + within % width, far, near, count


@gluon.jit
def _blocks(tile, Lq, Lk, BLOCK: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys some query of a tile sees."""
    end = Lk
    if CAUSAL:
        end = gl.minimum(Lk, gl.maximum((tile + 1) * (2 * _PART) + Lk - Lq, 0))
    return gl.cdiv(end, BLOCK)


@gluon.jit
def _load(
    descs,
    shared,
    ready,
    free,
    tiles,
    place,
    Lq,
    Lk,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Copy what the other groups need, blocks of keys from the last to the first."""
    q_desc, k_desc, v_desc = descs
    queries, keys, values = shared
    q_ready, k_ready, v_ready = ready
    k_free, v_free = free
    b, h, kv = place
    far, near, count = tiles
    done = 0
    for turn in range(count):
        tile = gl.where(turn == 0, far, near)
        at = tile * (2 * _PART)
        hopper.mbarrier.expect(q_ready.index(turn), 2 * q_desc.block_type.nbytes)
        for part in gl.static_range(2):
            first = at + part * _PART
            half = queries.index(2 * turn + part)
            hopper.tma.async_copy_global_to_shared(q_desc, [b, h, first, 0], q_ready.index(turn), half)
        blocks = _blocks(tile, Lq, Lk, BLOCK, CAUSAL)
        for i in range(blocks):
            slot = (done + i) % STAGES
            phase = ((done + i) // STAGES & 1) ^ 1
            row = (blocks - 1 - i) * BLOCK
            hopper.mbarrier.wait(k_free.index(slot), phase)
            hopper.mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(k_desc, [b, kv, row, 0], k_ready.index(slot), keys.index(slot))
            hopper.mbarrier.wait(v_free.index(slot), phase)
            hopper.mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
            hopper.tma.async_copy_global_to_shared(v_desc, [b, kv, row, 0], v_ready.index(slot), values.index(slot))
        done += blocks


@gluon.jit
def _weigh(s, highest, m, total, start, limit, Lk, scale, even_scale, CAUSAL: gl.constexpr, TAIL: gl.constexpr):
    """Weights of a block's scores, what fades the block before, and the new maxima and sum: see the portable kernel."""
    if TAIL:
        columns = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        see = (columns < Lk)[None, :]
        if CAUSAL:
            see = see & (columns[None, :] <= limit[:, None])
        s = gl.where(see, s, float("-inf"))
    highest = gl.maximum(highest, gl.max(s, 1))
    by = gl.where(gl.abs(highest) * scale >= 268435456.0, even_scale, scale)
    m_new = highest * by
    p = gl.exp2(s * by[:, None] - m_new[:, None])
    fade = gl.exp2(m - m_new)
    total = total * fade + gl.sum(p, 1)
    return p, fade, highest, m_new, total


@gluon.jit
def _step(
    g,
    start,
    acc,
    p,
    highest,
    m,
    total,
    q,
    shared,
    ready,
    free,
    limit,
    Lk,
    scale,
    even_scale,
    CAUSAL: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Scores of block g of the ring, and while their weights are formed, the values of block g - 1."""
    _, keys, values = shared
    _, k_ready, v_ready = ready
    k_free, v_free = free
    BLOCK: gl.constexpr = keys.shape[3]
    D: gl.constexpr = keys.shape[4]
    zeros = gl.zeros((_PART, BLOCK), gl.float32, S_LAYOUT)
    slot = g % STAGES
    hopper.mbarrier.wait(k_ready.index(slot), g // STAGES & 1)
    k = keys.index(slot).reshape([BLOCK, D])
    s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    last = (g - 1) % STAGES
    hopper.mbarrier.wait(v_ready.index(last), (g - 1) // STAGES & 1)
    acc = hopper.warpgroup_mma(p, values.index(last).reshape([BLOCK, D]), acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, deps=[s])
    hopper.mbarrier.arrive(k_free.index(slot))
    w, fade, highest, m, total = _weigh(s, highest, m, total, start, limit, Lk, scale, even_scale, CAUSAL, TAIL)
    # The weights in registers are read until here.
    acc, p = hopper.warpgroup_mma_wait(0, deps=[acc, p])
    hopper.mbarrier.arrive(v_free.index(last))
    acc *= gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(w.to(p.dtype), p.type.layout)
    return acc, p, highest, m, total


@gluon.jit
def _attend(
    out_ptr,
    lse_ptr,
    shared,
    ready,
    free,
    tiles,
    sizes,
    PART: gl.constexpr,
    OUT_ROW: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """Half a tile's output; ``highest``, ``m`` and ``total`` as in the portable kernel."""
    queries, keys, values = shared
    q_ready, k_ready, v_ready = ready
    k_free, v_free = free
    far, near, count = tiles
    Lq, Lk, scale, even_scale = sizes
    BLOCK: gl.constexpr = keys.shape[3]
    DPAD: gl.constexpr = keys.shape[4]
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DPAD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DPAD, DPAD // 8], [4, 1], [1, 0])
    done = 0
    for turn in range(count):
        tile = gl.where(turn == 0, far, near)
        start = tile * (2 * _PART) + PART * _PART
        row = start + gl.arange(0, _PART, gl.SliceLayout(1, S_LAYOUT))
        limit = row + (Lk - Lq)
        # The lowest start from which a scaled maximum is finite, so that no -inf is ever subtracted from -inf.
        highest = gl.full((_PART,), 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT)) - 3e38 / gl.maximum(even_scale, 1.0)
        m = highest * even_scale
        total = gl.full((_PART,), 0.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        acc = gl.zeros((_PART, DPAD), gl.float32, O_LAYOUT)
        q = queries.index(2 * turn + PART).reshape([_PART, DPAD])
        hopper.mbarrier.wait(q_ready.index(turn), 0)
        blocks = _blocks(tile, Lq, Lk, BLOCK, CAUSAL)
        if blocks > 0:
            slot = done % STAGES
            hopper.mbarrier.wait(k_ready.index(slot), done // STAGES & 1)
            k = keys.index(slot).reshape([BLOCK, DPAD])
            zeros = gl.zeros((_PART, BLOCK), gl.float32, S_LAYOUT)
            s = hopper.warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False)
            hopper.mbarrier.arrive(k_free.index(slot))
            at = (blocks - 1) * BLOCK
            w, _, highest, m, total = _weigh(s, highest, m, total, at, limit, Lk, scale, even_scale, CAUSAL, True)
            p = gl.convert_layout(w.to(DTYPE), P_LAYOUT)
            # Every row of this half sees the whole of the blocks before.
            whole = Lk // BLOCK
            if CAUSAL:
                whole = gl.minimum(Lk, gl.maximum(start + Lk - Lq + 1, 0)) // BLOCK
            cut = gl.maximum(blocks - whole, 1)
            for i in range(1, cut):
                at = (blocks - 1 - i) * BLOCK
                acc, p, highest, m, total = _step(
                    *(done + i, at, acc, p, highest, m, total, q, shared, ready, free, limit, Lk, scale, even_scale),
                    *(CAUSAL, True, STAGES, S_LAYOUT),
                )
            for i in range(cut, blocks):
                at = (blocks - 1 - i) * BLOCK
                acc, p, highest, m, total = _step(
                    *(done + i, at, acc, p, highest, m, total, q, shared, ready, free, limit, Lk, scale, even_scale),
                    *(CAUSAL, False, STAGES, S_LAYOUT),
                )
            done += blocks
            last = (done - 1) % STAGES
            hopper.mbarrier.wait(v_ready.index(last), (done - 1) // STAGES & 1)
            acc = hopper.warpgroup_mma(p, values.index(last).reshape([BLOCK, DPAD]), acc)
            hopper.mbarrier.arrive(v_free.index(last))
        sees = row >= 0
        if CAUSAL:
            sees = limit >= 0
        total = gl.where(sees, total, 1.0)
        y = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
        # Through the memory of these queries, which nobody reads again: a row then leaves in stores of 16 bytes.
        q.store(y.to(DTYPE))
        lane = gl.arange(0, _PART, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, DPAD, gl.SliceLayout(0, WIDE))
        mine = (start + lane < Lq)[:, None] & (d < D)[None, :]
        at_row = out_ptr + start.to(gl.int64) * OUT_ROW
        gl.store(at_row + lane[:, None] * OUT_ROW + d[None, :], q.load(WIDE), mask=mine)
        if HAS_LSE:
            lse = gl.where(sees, (highest * scale + gl.log2(total)) * 0.6931471805599453, float("-inf"))
            gl.store(lse_ptr + row, lse, mask=row < Lq)


@gluon.jit(do_not_specialize=["Lq", "Lk", "Hq", "heads", "tiles", "cluster"])
def _specialised_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    Lq,
    Lk,
    Hq,
    heads,
    tiles,
    cluster,
    scale,
    even_scale,
    GROUP: gl.constexpr,
    OUT_ROW: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    EACH: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_LSE: gl.constexpr,
):
    """EACH tiles of 128 queries of one head a program."""
    head, far, near, count = _tiles_of(gl.program_id(0), tiles, heads, cluster, EACH)
    b = head // Hq
    h = head % Hq
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    BLOCK: gl.constexpr = k_desc.block_type.shape[2]
    DPAD: gl.constexpr = k_desc.block_type.shape[3]
    queries = gl.allocate_shared_memory(DTYPE, [2 * EACH, 1, 1, _PART, DPAD], q_desc.layout)
    keys = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK, DPAD], k_desc.layout)
    values = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK, DPAD], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [EACH, 1], hopper.mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(EACH):
        hopper.mbarrier.init(q_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_ready.index(i), count=1)
        hopper.mbarrier.init(v_ready.index(i), count=1)
        # One arrival of each group that multiplies.
        hopper.mbarrier.init(k_free.index(i), count=2)
        hopper.mbarrier.init(v_free.index(i), count=2)
    # int64: an offset in elements passes 2^31 long before memory runs out.
    out_ptr += (b.to(gl.int64) * Lq * Hq + h) * D
    lse_ptr += (b.to(gl.int64) * Hq + h) * Lq
    shared = (queries, keys, values)
    ready = (q_ready, k_ready, v_ready)
    free = (k_free, v_free)
    mine = (far, near, count)
    descs = (q_desc, k_desc, v_desc)
    place = (b, h, h // GROUP)
    sizes = (Lq, Lk, scale, even_scale)
    gl.warp_specialize(
        [
            (_attend, (out_ptr, lse_ptr, shared, ready, free, mine, sizes, 0, OUT_ROW, D, STAGES, CAUSAL, HAS_LSE)),
            (_attend, (out_ptr, lse_ptr, shared, ready, free, mine, sizes, 1, OUT_ROW, D, STAGES, CAUSAL, HAS_LSE)),
            (_load, (descs, shared, ready, free, mine, place, Lq, Lk, BLOCK, STAGES, CAUSAL)),
        ],
        [4, 1],
        # Registers a thread; what remains goes to the first group.
        [240, 24],
    )


def _describable(x: torch.Tensor) -> bool:
    """Whether a descriptor can describe a tensor whose features lie side by side."""
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    return x.data_ptr() % _ALIGNMENT == 0 and all(step > 0 and step % _ALIGNMENT == 0 for step in steps)


def _tiled(x: torch.Tensor, rows: int, padded: int) -> _launch.Tiled:
    """[B, L, H, D] as [B, H, L, D], copied in tiles of rows and of D padded with zeros."""
    # The stride of a single element counts for nothing, but has to be a valid one.
    steps = [x.stride(dim) if x.shape[dim] > 1 else _ALIGNMENT for dim in (0, 2, 1)]
    tile = [1, 1, rows, padded]
    layout = gl.NVMMASharedLayout.get_default_for(tile, getattr(gl, str(x.dtype).removeprefix("torch.")))
    return _launch.Tiled((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), (*steps, 1), tile, layout)


def bind(
    tensors: Sequence[torch.Tensor],
    config: Mapping[str, Any],
    *,
    cluster: int,
    padded: int,
    scale: float,
    even_scale: float,
    causal: bool,
    lse: bool,
) -> Callable[..., None] | None:
    """The launcher for q, k, v, the output and the LSE.

    Returns:
        None where descriptors cannot describe the inputs, or where this Triton's
        Gluon cannot compile the kernel.
    """
    if not HAS_GLUON or not all(map(_describable, tensors[:3])):
        return None
    q, k = tensors[:2]
    batch, queries, heads, width = q.shape
    tiles = math.ceil(queries / _ROWS)
    pairs = batch * heads * math.ceil(tiles / 2)
    turns = math.ceil(pairs / _launch.processors(q.get_device()))
    full = pairs >= (1 - _IDLE) * turns * _launch.processors(q.get_device())
    each = 2 if tiles > 1 and full and config["pairs"] else 1
    block = config["block"]
    try:
        return _launch.bind(
            _specialised_attention_kernel,
            (batch * heads * math.ceil(tiles / each),),
            tensors,
            (queries, k.shape[1], heads, batch * heads, tiles, cluster, scale, even_scale),
            {
                "GROUP": heads // k.shape[2],
                "OUT_ROW": heads * width,
                "D": width,
                "STAGES": config["stages"],
                "EACH": each,
                "CAUSAL": causal,
                "HAS_LSE": lse,
            },
            config=config,
            num_warps=4,
            tiled=[_tiled(x, rows, padded) for x, rows in zip(tensors[:3], (_PART.value, block, block), strict=True)],
        )
    except Exception as error:
        if not routing.before_launch(error):
            raise
        return None
