"""A linear layer with 4-bit weights: y[..., n] = sum over k of x[..., k] * scale[n, k // group] * q[n, k].

Weights are signed integers from -8 to 7, symmetric, a scale a group of columns,
as in Dettmers and Zettlemoyer, "The case for 4-bit precision", 2022,
arXiv:2212.09720, section 2.1 (integer data type, blocks). How they are stored
stands at the head of ``_int4_pack``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch, _split
from triton_kernel_lab.ops._int4_pack import TILE_K, TILE_N, check_packed, pack_int4, unpack_int4
from triton_kernel_lab.ops._rows import row_count, row_layout
from triton_kernel_lab.ops._split import arrive
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = ["int4_linear", "int4_linear_reference", "pack_int4", "unpack_int4"]

NAME = "int4_linear"
# The columns that one nibble of a row's words spans.
_RUN = 32
_INT32 = 2**31 - 1
# What a stream keeps for its launches at most, 8 MiB of fp32 parts and 16 KiB of counters, and how many streams do.
_PARTS, _COUNTERS, _STREAMS = 1 << 21, 4096, 32


@triton.jit
def _integers(words, dtype: tl.constexpr, PACKED: tl.constexpr):
    """The four runs of columns in 16-bit words, exactly, as ``dtype``.

    A nibble set into the low bits of the mantissa of 128 (bf16) or 1024 (fp16)
    is that number plus the nibble: one AND-OR for two weights, then one
    subtraction of 136 or 1032. The second nibble of an fp16 stands 16 times too
    high, which the fused multiply-add that subtracts puts right.
    """
    if PACKED and dtype == tl.bfloat16:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, off;
            mov.b32 one, 0x3F803F80;
            mov.b32 off, 0xC308C308;
            shr.b32 b, $4, 4;
            shr.b32 c, $4, 8;
            shr.b32 d, $4, 12;
            lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, off;
            fma.rn.bf16x2 $1, b, one, off;
            fma.rn.bf16x2 $2, c, one, off;
            fma.rn.bf16x2 $3, d, one, off;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif PACKED and dtype == tl.float16:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, high, sixteenth, off, off16;
            mov.b32 sixteenth, 0x2C002C00;
            mov.b32 off, 0xE408E408;
            mov.b32 off16, 0xD480D480;
            shr.b32 high, $4, 8;
            lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 b, $4, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 c, high, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 d, high, 0x00F000F0, 0x64006400, 0xEA;
            add.rn.f16x2 $0, a, off;
            fma.rn.f16x2 $1, b, sixteenth, off16;
            add.rn.f16x2 $2, c, off;
            fma.rn.f16x2 $3, d, sixteenth, off16;
            }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = ((words & 15) - 8).to(dtype)
        b = (((words >> 4) & 15) - 8).to(dtype)
        c = (((words >> 8) & 15) - 8).to(dtype)
        d = (((words >> 12) & 15) - 8).to(dtype)
    return a, b, c, d


@triton.jit
def _loads_before(WARPS: tl.constexpr, PACKED: tl.constexpr):
    """Keep the loads above this line above it; without, the compiler moves some to where they are used."""
    if PACKED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
            "=r,r",
            [tl.arange(0, WARPS * 32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _streamed(
    acc,
    x_at,
    w_at,
    s_at,
    tile,
    K,
    s_group,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    K_WARPS: tl.constexpr,
    WARPS: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
):
    """Add what UNROLL tiles a warp, from ``tile`` on, contribute to ``acc`` [WARPS, rows of weights, rows of x].

    Vectors of one dimension are what loads get, because its order of elements
    over registers, lanes and warps is the same whatever the compiler prefers,
    and then is the one that the tensor cores want.
    """
    dtype: tl.constexpr = x_at.dtype.element_ty
    product: tl.constexpr = dtype if PACKED else tl.float32
    rows: tl.constexpr = 16 * N_TILES
    columns: tl.constexpr = 8 * M_TILES
    words = tl.arange(0, 2 * N_TILES * WARPS * 256)
    values = tl.arange(0, M_TILES * WARPS * 256)
    scales = tl.arange(0, 2 * N_TILES * WARPS * 32)
    ws = ()  # type: tuple[Any, ...]
    for u in tl.static_range(UNROLL):
        at = w_at + (tile + u * K_WARPS) * 512
        if MASKED:
            ws += (tl.load(at, mask=(tile + u * K_WARPS + words // 256 % K_WARPS) * 128 < K, other=0),)
        else:
            ws += (tl.load(at),)
    ss = ()  # type: tuple[Any, ...]
    if CHAIN > 0:
        for u in tl.static_range(UNROLL):
            for run in tl.static_range(0, 4, CHAIN):
                chain = (tile + u * K_WARPS + scales // 32 % K_WARPS) * (4 // CHAIN) + run // CHAIN
                group = chain // (GROUP // (32 * CHAIN))
                if WIDE:
                    group = group.to(tl.int64)
                if MASKED:
                    ss += (tl.load(s_at + group * s_group, mask=chain * (32 * CHAIN) < K, other=0.0),)
                else:
                    ss += (tl.load(s_at + group * s_group),)
    _loads_before(WARPS, PACKED)
    for u in tl.static_range(UNROLL):
        qs = _integers(ws[u], product, PACKED)
        for run in tl.static_range(4):
            k = (tile + u * K_WARPS) * 128 + run * 32
            if MASKED:
                own = values // 256 % K_WARPS * 128 + values % 32
                x = tl.load(x_at + k, mask=k + own < K, other=0.0)
            else:
                x = tl.load(x_at + k)
            q = qs[run]
            if CHAIN == 0:
                own = k + words // 256 % K_WARPS * 128 + words % 32
                group = own // GROUP
                if WIDE:
                    group = group.to(tl.int64)
                s = tl.load(s_at + group * s_group, mask=own < K, other=0.0).to(tl.float32)
                # Rounded to x's dtype, as eager PyTorch rounds the weight.
                q = (q.to(tl.float32) * s).to(dtype).to(product)
            # Registers, lanes and warps as they are, under the names that a dot has for them: of the eight
            # columns that a thread holds, which lane has which is free, because x is read in the same order.
            q = q.reshape(2 * N_TILES, WARPS, 8, 4, 4, 2).permute(1, 0, 2, 4, 3, 5).reshape(WARPS, rows, 32)
            x = x.reshape(M_TILES, WARPS, 8, 4, 4, 2).permute(1, 4, 3, 5, 0, 2).reshape(WARPS, 32, columns)
            if CHAIN == 0:
                acc = tl.dot(q, x.to(product), acc, input_precision="ieee")
            else:
                if run % CHAIN == 0:
                    part = tl.zeros((WARPS, rows, columns), tl.float32)
                part = tl.dot(q, x.to(product), part, input_precision="ieee")
                if run % CHAIN == CHAIN - 1:
                    s = ss[u * (4 // CHAIN) + run // CHAIN].to(tl.float32)
                    s = s.reshape(2 * N_TILES, WARPS, 8, 4).permute(1, 0, 2, 3).reshape(WARPS, rows, 1, 4, 1)
                    s = s.broadcast_to(WARPS, rows, M_TILES, 4, 2).reshape(WARPS, rows, columns)
                    acc += part * s
    return acc


@triton.jit
def _finish(y_ptr, parts_ptr, counter_ptr, y, at, inside, size, splits):
    """Store ``y``; where programs share a sum, the last of them to arrive adds the parts, in their order."""
    if splits > 1:
        tl.store(parts_ptr + tl.program_id(1).to(tl.int64) * size + at, y, mask=inside)
        if arrive(counter_ptr + tl.program_id(0), splits):
            total = tl.zeros_like(y)
            for _ in tl.range(0, splits, num_stages=1):
                total += tl.load(parts_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
                at += size
            tl.store(y_ptr + (at - size * splits), total.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _stream_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    y_ptr,
    parts_ptr,
    counter_ptr,
    M,
    N,
    K,
    tiles,
    share,
    splits,
    size,
    blocks_m,
    inner,
    x_outer,
    x_inner,
    s_row,
    s_group,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    UNROLL: tl.constexpr,
    K_WARPS: tl.constexpr,
    WARPS: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
):
    """16 N_TILES rows of weights and 8 M_TILES rows of x a warp; K_WARPS warps share the tiles of K, others the rows.

    The weights are the tall operand of the tensor cores and x the narrow one, in
    a batch of one product a warp. A program takes ``share`` tiles of K: all of
    them, unless ``splits`` programs share a sum.
    """
    N_WARPS: tl.constexpr = WARPS // K_WARPS
    first = tl.program_id(0) // blocks_m * (N_TILES * N_WARPS)
    first_m = tl.program_id(0) % blocks_m * (8 * M_TILES)
    words = tl.arange(0, 2 * N_TILES * WARPS * 256)
    half = words // (256 * WARPS)
    down = tl.minimum(first + words // (256 * K_WARPS) % N_WARPS * N_TILES + half // 2, (N + 15) // 16 - 1)
    w_at = w_ptr.to(tl.pointer_type(tl.int16)) + down.to(tl.int64) * tiles * 512
    w_at += half % 2 * 256 + words // 256 % K_WARPS * 512 + words % 256
    values = tl.arange(0, M_TILES * WARPS * 256)
    # Rows past the last repeat it, into results that are not stored.
    m = tl.minimum(first_m + values // (256 * WARPS) * 8 + values // 32 % 8, M - 1).to(tl.int64)
    x_at = x_ptr + m // inner * x_outer + m % inner * x_inner + (values // 256 % K_WARPS * 128 + values % 32)
    if CHAIN > 0:
        scales = tl.arange(0, 2 * N_TILES * WARPS * 32)
        n = (first + scales // (32 * K_WARPS) % N_WARPS * N_TILES + scales // (64 * WARPS)) * 16
        n += scales // (32 * WARPS) % 2 * 8 + scales // 4 % 8
    else:
        n = (first + words // (256 * K_WARPS) % N_WARPS * N_TILES + half // 2) * 16 + half % 2 * 8 + words // 32 % 8
    s_at = s_ptr + tl.minimum(n, N - 1).to(tl.int64) * s_row
    acc = tl.zeros((WARPS, 16 * N_TILES, 8 * M_TILES), tl.float32)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, tiles)
    STRIDE: tl.constexpr = K_WARPS * UNROLL
    # Strides of all warps over whole tiles need no mask. What is left follows, a tile a warp at a time.
    whole = end if EVEN else begin + tl.maximum(tl.minimum(end, K // 128) - begin, 0) // STRIDE * STRIDE
    for tile in tl.range(begin, whole, STRIDE, num_stages=1):
        acc = _streamed(
            acc, x_at, w_at, s_at, tile, K, s_group,
            CHAIN, GROUP, WIDE, UNROLL, False, PACKED, K_WARPS, WARPS, N_TILES, M_TILES,
        )  # fmt: skip
    if not EVEN:
        for tile in tl.range(whole, end, K_WARPS, num_stages=1):
            acc = _streamed(
                acc, x_at, w_at, s_at, tile, tl.minimum(K, end * 128), s_group,
                CHAIN, GROUP, WIDE, 1, True, PACKED, K_WARPS, WARPS, N_TILES, M_TILES,
            )  # fmt: skip
    y = tl.sum(acc.reshape(N_WARPS, K_WARPS, 16 * N_TILES, 8 * M_TILES), 1).reshape(16 * N_TILES * N_WARPS, 8 * M_TILES)
    n = (first * 16 + tl.arange(0, 16 * N_TILES * N_WARPS))[:, None]
    m = (first_m + tl.arange(0, 8 * M_TILES))[None, :]
    _finish(y_ptr, parts_ptr, counter_ptr, y, m.to(tl.int64) * N + n, (n < N) & (m < M), size, splits)


@triton.jit
def _side_by_side(a, b, c, d):
    """Four runs [rows, 32] of columns as one matrix [rows, 128]."""
    return tl.join(tl.join(a, c), tl.join(b, d)).permute(0, 2, 3, 1).reshape(a.shape[0], 128)


@triton.jit
def _scaled(q, s_at, tile, K, s_group, CHAIN: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """The weights [rows, 128] of a tile, rounded to ``dtype`` as eager PyTorch rounds them; ``s_at`` points per row."""
    ws = ()  # type: tuple[Any, ...]
    for run in tl.static_range(4):
        k = tile * 128 + run * 32
        if CHAIN > 0:
            group = tl.zeros((1,), tl.int64) + k // GROUP
            s = tl.load(s_at + group * s_group, mask=tl.zeros_like(group) + k < K, other=0.0)[:, None]
        else:
            column = k + tl.arange(0, 32)
            group = (column // GROUP).to(tl.int64)
            s = tl.load(s_at[:, None] + (group * s_group)[None, :], mask=(column < K)[None, :], other=0.0)
        ws += ((q[run].to(tl.float32) * s.to(tl.float32)).to(dtype),)
    return _side_by_side(ws[0], ws[1], ws[2], ws[3])


@triton.jit
def _tile_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    y_ptr,
    parts_ptr,
    counter_ptr,
    M,
    N,
    K,
    tiles,
    share,
    splits,
    size,
    blocks_m,
    inner,
    x_outer,
    x_inner,
    s_row,
    s_group,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows of x against BLOCK_N rows of weights a program: a matrix product that unpacks one operand."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    product: tl.constexpr = dtype if PACKED else tl.float32
    # Neighbours read the same weights, which so come from DRAM once.
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // blocks_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_m = tl.minimum(m, M - 1).to(tl.int64)
    inside_n = tl.minimum(n, N - 1).to(tl.int64)
    columns = tl.arange(0, 128)
    x_at = x_ptr + (inside_m // inner * x_outer + inside_m % inner * x_inner)[:, None] + columns[None, :]
    w_at = w_ptr.to(tl.pointer_type(tl.int16)) + (inside_n // 16 * tiles * 512 + inside_n % 16 * 32)[:, None]
    w_at += tl.arange(0, 32)[None, :]
    s_at = s_ptr + inside_n * s_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    begin = tl.program_id(1) * share
    for tile in tl.range(begin, tl.minimum(begin + share, tiles), num_stages=STAGES):
        if EVEN:
            x = tl.load(x_at + tile * 128)
        else:
            x = tl.load(x_at + tile * 128, mask=(tile * 128 + columns < K)[None, :], other=0.0)
        q = _integers(tl.load(w_at + tile * 512), product, PACKED)
        if CHAIN == 4:
            w = _side_by_side(q[0], q[1], q[2], q[3])
            s = tl.load(s_at + (tl.zeros((), tl.int64) + tile // (GROUP // 128)) * s_group).to(tl.float32)
            acc += tl.dot(x.to(product), w.trans(), input_precision="ieee") * s[None, :]
        else:
            w = _scaled(q, s_at, tile, K, s_group, CHAIN, GROUP, dtype).to(product)
            acc = tl.dot(x.to(product), w.trans(), acc, input_precision="ieee")
    at = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    _finish(y_ptr, parts_ptr, counter_ptr, acc, at, inside, size, splits)


@triton.jit
def _dense_kernel(
    w_ptr,
    s_ptr,
    out_ptr,
    N,
    K,
    tiles,
    s_row,
    s_group,
    CHAIN: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write out BLOCK_N rows of one tile of columns, for a product of large matrices that others do better."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) % tiles
    inside = tl.minimum(n, N - 1)
    w_at = w_ptr.to(tl.pointer_type(tl.int16)) + (inside // 16 * tiles + tile)[:, None] * 512
    words = tl.load(w_at + (inside % 16 * 32)[:, None] + tl.arange(0, 32)[None, :])
    q = _integers(words, dtype if PACKED else tl.float32, PACKED)
    k = tile * 128 + tl.arange(0, 128)
    w = _scaled(q, s_ptr + inside * s_row, tile, K, s_group, CHAIN, GROUP, dtype)
    tl.store(out_ptr + n[:, None] * K + k[None, :], w, mask=(n < N)[:, None] & (k < K)[None, :])


def int4_linear_reference(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """The PyTorch form of ``int4_linear``, differentiable in x and the scales; fp64 inputs are computed in fp64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = unpack_int4(packed, scales.to(wide), group_size, x.shape[-1])
    # Autocast would turn the product into a 16-bit one.
    with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False):
        return torch.nn.functional.linear(x.to(wide), weights).to(x.dtype)


def _check(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> None:
    _checks.expect_float(NAME, "x", x)
    _checks.expect(x.ndim >= 1, NAME, "x", "at least one dimension", "a scalar")
    check_packed(NAME, packed, scales, group_size, x.shape[-1])
    if scales.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{NAME}: scales: expected the dtype of x, {x.dtype}, or torch.float32, got {scales.dtype}.")
    _checks.expect_alike(NAME, "packed", packed, "x", x)


_plans = _launch.PlanCache()
_streams: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _new(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], scales.shape[0]))


def _route(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> _Linear:
    """How every call of this signature is served: a function of x, packed and scales."""
    _check(x, packed, scales, group_size)
    if x.is_meta:
        return _new

    def reference(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return int4_linear_reference(x, packed, scales, group_size)

    refusal = _checks.refusal(x, scales)
    route: _Linear = routing.triton_route(NAME, refusal, lambda: _plan(x, packed, scales, group_size), reference)
    return route


def _plan(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> _Linear:
    """What launches the kernel for this signature: a function of x, packed and scales."""
    # An empty tensor counts as contiguous whatever its strides, so it must leave first.
    if row_count(x) * scales.shape[0] == 0:
        return _new
    if x.shape[-1] == 0:
        return lambda x, packed, scales: _new(x, packed, scales).zero_()
    copies_x = row_layout(x) is None
    # Words of 16 bits are read, so bytes that begin at an odd address are copied too.
    copies_packed = not packed.is_contiguous() or packed.data_ptr() & 1
    if copies_x or copies_packed:
        dense = torch.contiguous_format

        def copied(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            x = x.contiguous() if copies_x else x
            packed = packed.clone(memory_format=dense) if copies_packed else packed
            return _forward(x, packed, scales, group_size)

        return copied
    return _bound(x, packed, scales, group_size)


def _split_of(programs: int, tiles: int, stride: int, aim: int) -> tuple[int, int]:
    """The tiles of K that fall to a program, and how many programs share a sum, so that about ``aim`` run."""
    splits = max(min(aim // programs, tiles // stride), 1)
    share = math.ceil(tiles / splits / stride) * stride if splits > 1 else tiles
    return share, math.ceil(tiles / share)


def _unroll(most: int, tiles: int, warps: int) -> int:
    """How many tiles a warp asks for at once: a number near ``most`` with which all strides are whole, or ``most``."""
    most = max(min(most, tiles // warps), 1)
    return next((each for each in range(most, most // 2, -1) if tiles % (warps * each) == 0), most)


def _bound(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> _Linear:
    """The plan of a signature that a kernel serves."""
    weights = scales.shape[0] * x.shape[-1]
    arch = _launch.architecture(x.get_device())
    config = _launch.choose(NAME, arch, itemsize=x.element_size(), rows=row_count(x), columns=weights)
    # The longest run of columns, in nibbles of a word, that has one scale.
    chain = next((runs for runs in (4, 2, 1) if group_size % (runs * _RUN) == 0), 0)
    constants: dict[str, Any] = {"CHAIN": chain, "GROUP": group_size}
    constants["PACKED"] = not INTERPRET and x.dtype != torch.float32
    if config["kernel"] == "dense":
        return _dense(x, packed, scales, constants, config)
    return _fused(x, packed, scales, constants, config)


def _dense(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, constants: dict[str, Any], config: _launch.Config
) -> _Linear:
    """The weights are written out, and cuBLAS multiplies."""
    n, k, tiles = scales.shape[0], x.shape[-1], packed.shape[1]
    out = _new(x, packed, scales)
    shape, strides = out.shape, out.stride()
    constants["BLOCK_N"] = config["block_n"]
    launch = _launch.bind(
        _dense_kernel,
        (math.ceil(n / config["block_n"]) * tiles,),
        (packed, scales, x.new_empty((n, k))),
        (n, k, tiles, *scales.stride()),
        constants,
        config=config,
        num_warps=config["num_warps"],
    )

    def run(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        weights = x.new_empty_strided((k, n), (1, k))
        out = x.new_empty_strided(shape, strides)
        launch(packed, scales, weights)
        # Autocast leaves products into a given tensor alone.
        torch.mm(x.reshape(-1, k), weights, out=out.view(-1, n))
        return out

    return run


def _geometry(
    rows: int, n: int, k: int, constants: dict[str, Any], config: _launch.Config
) -> tuple[Any, int, tuple[int, int], tuple[int, int]]:
    """The kernel, its warps, the blocks of outputs and of rows, and the tiles of K a program and programs a sum."""
    tiles = math.ceil(k / TILE_K)
    if config["kernel"] == "tile":
        blocks = math.ceil(n / config["block_n"]), math.ceil(rows / config["block_m"])
        constants |= {"BLOCK_M": config["block_m"], "BLOCK_N": config["block_n"], "STAGES": config["stages"]}
        constants["EVEN"] = k % TILE_K == 0
        return _tile_kernel, config["num_warps"], blocks, _split_of(math.prod(blocks), tiles, 4, config["programs"])
    k_warps = min(config["k_warps"], triton.next_power_of_2(tiles))
    unroll = _unroll(config["unroll"], tiles, k_warps)
    blocks = math.ceil(n / (TILE_N * config["n_tiles"] * config["n_warps"])), math.ceil(rows / (8 * config["m_tiles"]))
    share = _split_of(math.prod(blocks), tiles, k_warps * unroll, config["programs"])
    warps = k_warps * config["n_warps"]
    constants |= {"UNROLL": unroll, "K_WARPS": k_warps, "WARPS": warps}
    constants |= {"N_TILES": config["n_tiles"], "M_TILES": config["m_tiles"]}
    constants["EVEN"] = k % (TILE_K * k_warps * unroll) == 0 and share[0] % (k_warps * unroll) == 0
    return _stream_kernel, warps, blocks, share


def _fused(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, constants: dict[str, Any], config: _launch.Config
) -> _Linear:
    """One kernel unpacks and multiplies."""
    layout = row_layout(x)
    assert layout is not None
    rows, k, n = row_count(x), x.shape[-1], scales.shape[0]
    kernel, warps, (blocks_n, blocks_m), (share, splits) = _geometry(rows, n, k, constants, config)
    if kernel is _stream_kernel:
        constants["WIDE"] = scales.shape[1] * scales.stride(1) > _INT32
    programs, size = blocks_n * blocks_m, rows * n
    scalars = (rows, n, k, packed.shape[1], share, splits, size, blocks_m, *layout, *scales.stride())
    out, device = _new(x, packed, scales), x.device
    # Told its strides, new_empty_strided costs the host half of what empty does.
    shape, strides = out.shape, out.stride()

    def bind(out: torch.Tensor, parts: torch.Tensor, counters: torch.Tensor) -> Callable[..., None]:
        tensors = (x, packed, scales, out, parts, counters)
        return _launch.bind(kernel, (programs, splits), tensors, scalars, constants, config=config, num_warps=warps)

    if splits == 1:
        launch = bind(out, out, out)

        def run(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            out = x.new_empty_strided(shape, strides)
            launch(x, packed, scales, out, out, out)
            return out

        return run
    workspace = _workspace(device, splits * size, programs)
    launch_parts = bind(out, *workspace())

    def run_parts(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out = x.new_empty_strided(shape, strides)
        launch_parts(x, packed, scales, out, *workspace())
        return out

    return run_parts


def _workspace(device: torch.device, numbers: int, programs: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """What gives parts, fp32 [numbers], and counters, int32 [programs] zeros, to a launch on the current stream.

    Launches of one stream follow each other and share memory that is kept, as far as it is small; either tensor
    may then be longer. A graph may later run beside anything, so a launch that is being captured gets its own.
    """

    def own() -> tuple[torch.Tensor, torch.Tensor]:
        parts = torch.empty(numbers, dtype=torch.float32, device=device)
        return parts, _split.counters(device, programs)

    if INTERPRET or numbers > _PARTS or programs > _COUNTERS:
        return own
    index, stream_of = device.index, triton.runtime.driver.active.get_current_stream
    current_device, capturing = torch.cuda.current_device, torch.cuda.is_current_stream_capturing
    # PyTorch then fills new memory with NaN, so that what a kernel leaves out shows.
    filling = torch.are_deterministic_algorithms_enabled

    def shared() -> tuple[torch.Tensor, torch.Tensor]:
        # Of the current device alone is told whether it captures.
        if current_device() != index or capturing() or filling():
            return own()
        stream = index, stream_of(index)
        kept = _streams.get(stream)
        if kept is None or kept[0].numel() < numbers:
            if len(_streams) >= _STREAMS:
                _streams.clear()
            parts = _split.lasting(device, lambda: torch.empty(numbers, dtype=torch.float32, device=device))
            kept = _streams[stream] = parts, _split.counters(device, _COUNTERS) if kept is None else kept[1]
        return kept

    return shared


def _forward(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    # Written out flat: unpacking parts into it costs as much as some of them. Of the strides of packed a plan
    # knows only whether they are dense.
    key = (
        x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15, group_size,
        packed.dtype, packed.shape, packed.is_contiguous(), packed.device, packed.data_ptr() & 15,
        scales.dtype, scales.shape, scales.stride(), scales.device, scales.data_ptr() & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(x, packed, scales, group_size))
    result: torch.Tensor = plan(x, packed, scales)
    return result


@torch.library.custom_op("triton_kernel_lab::int4_linear", mutates_args=())
def _int4_linear_op(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    return _forward(x, packed, scales, group_size)


@_int4_linear_op.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    _check(x, packed, scales, group_size)
    return _new(x, packed, scales)


def int4_linear(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """A linear layer without bias whose weights are 4-bit integers, a scale a group of columns.

    ``y[..., n] = sum over k of x[..., k] * scales[n, k // group_size] * q[n, k]``
    with q from -8 to 7, Dettmers and Zettlemoyer 2022, section 2.1. There are no
    zero points. Products of 16-bit values are summed in fp32, in an order that
    follows from the shapes and the launch table; fp32 inputs are computed in
    IEEE fp32. Up to 32 rows of x a scale multiplies the sum of its group if
    group_size is a multiple of 32; otherwise it may multiply the weight, which
    is then rounded to x's dtype. Many rows of x have the weights written out
    once a call, N K elements of memory, and multiplied by cuBLAS. Where programs
    share a sum, each CUDA stream keeps up to 8 MiB for its next call.

    Args:
        x: float16, bfloat16 or float32 [..., K] with any strides. Rows that lie
            at two strides are read in place; other layouts are copied first.
        packed: uint8, or a view of it as int8, [ceil(N / 16), ceil(K / 128), 16, 64],
            as ``pack_int4`` makes it. Copied on each call where it is not
            contiguous or begins at an odd address.
        scales: [N, ceil(K / group_size)] of x's dtype or float32, with any strides;
            ``pack_int4`` returns those that are read fastest.
        group_size: columns a scale, as it was packed with.

    Returns:
        A contiguous tensor [..., N] of x's dtype; zeros where K is 0. When a
        gradient is wanted the differentiable PyTorch form computes it.

    Raises:
        TypeError: x or scales is not floating-point, packed is not uint8 or
            int8, or the dtype of scales is neither x's nor float32.
        ValueError: K is odd, group_size is not positive and even, the shapes do
            not belong to each other, or the devices differ.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    if _checks.wants_grad(x, scales):
        _check(x, packed, scales, group_size)
        _checks.note_autograd(NAME)
        return int4_linear_reference(x, packed, scales, group_size)
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    if (
        torch.compiler.is_compiling()
        or not {type(x), type(packed), type(scales)} <= _launch.PLAIN_TYPES
        or x.is_neg()
        or scales.is_neg()
    ):
        result: torch.Tensor = _int4_linear_op(x, packed, scales, group_size)
        return result
    return _forward(x, packed, scales, group_size)
