"""Fused gated projection: silu(x Wg^T) * (x Wu^T), the first half of a Llama MLP.

Formula: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202,
section 2, with its two projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch, _split
from triton_kernel_lab.ops._fp32 import dot_add
from triton_kernel_lab.ops._rows import row_count
from triton_kernel_lab.ops._split import arrive
from triton_kernel_lab.ops._triton import tl, triton
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward, swiglu_backward_dispatched

__all__ = ["swiglu_linear", "swiglu_linear_reference"]

NAME = "swiglu_linear"
# A stride of a tensor descriptor has 40 bits, and counts bytes.
_FAR = 1 << 40


@triton.jit
def _gated(gate, up):
    """silu(gate) * up of fp32 values; 1 / (1 + inf) closes a gate far below zero without NaN."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _vector_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    x_stride,
    gate_stride,
    up_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row of x against BLOCK_N rows of both weights: every weight is read once and multiplied in fp32."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A tail that reads its last row again needs no mask; it is not stored.
    read = tl.minimum(n, N - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    gate_rows = gate_ptr + read[:, None] * gate_stride
    up_rows = up_ptr + read[:, None] * up_stride
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        c = start + columns
        inside = (c < K) | EVEN
        g = tl.load(gate_rows + c[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        u = tl.load(up_rows + c[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0).to(tl.float32)
        gate += g.to(tl.float32) * x[None, :]
        up += u.to(tl.float32) * x[None, :]
    y = _gated(tl.sum(gate, 1), tl.sum(up, 1))
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _streamed_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    parts_ptr,
    counter_ptr,
    M,
    N,
    x_stride,
    gate_stride,
    up_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    FAR: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Few rows of x: the weights are the tall operand, so that each is read once and padding costs no bytes.

    SPLIT programs share the sum over K of a tile; the last one adds their parts
    in order.
    """
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT) == 0
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    # Rows of x may lie further apart than 32 bits count; the host has looked.
    rows = (m.to(tl.int64) if FAR else m)[None, :] * x_stride
    read = tl.minimum(n, N - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = part * (STEPS * BLOCK_K)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        c = first + step * BLOCK_K + columns
        if EVEN:
            g = tl.load(gate_ptr + read[:, None] * gate_stride + c[None, :], eviction_policy="evict_first")
            u = tl.load(up_ptr + read[:, None] * up_stride + c[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + rows + c[:, None], mask=(m < M)[None, :], other=0.0)
        else:
            inside = c < K
            g = tl.load(gate_ptr + read[:, None] * gate_stride + c[None, :], mask=inside[None, :], other=0.0)
            u = tl.load(up_ptr + read[:, None] * up_stride + c[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + rows + c[:, None], mask=(m < M)[None, :] & inside[:, None], other=0.0)
        gate = dot_add(g, x, gate, PRECISION)
        up = dot_add(u, x, up, PRECISION)
    inside = (n < N)[:, None] & (m < M)[None, :]
    y_ptrs = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
    if SPLIT == 1:
        tl.store(y_ptrs, _gated(gate, up).to(y_ptr.dtype.element_ty), mask=inside)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = parts_ptr + (tile * SPLIT + part).to(tl.int64) * (2 * SIZE) + at
        tl.store(mine, gate)
        tl.store(mine + SIZE, up)
        if arrive(counter_ptr + tile, SPLIT):
            gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in tl.static_range(SPLIT):
                theirs = parts_ptr + (tile * SPLIT + other).to(tl.int64) * (2 * SIZE) + at
                gate += tl.load(theirs, cache_modifier=".cg")
                up += tl.load(theirs + SIZE, cache_modifier=".cg")
            tl.store(y_ptrs, _gated(gate, up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles share a sweep over the columns, so that weights stay in the L2."""
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    return band * GROUP + tile % (GROUP * tiles_n) % height, tile % (GROUP * tiles_n) // height


@triton.jit
def _tiled_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    x_stride,
    gate_stride,
    up_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Many rows of x: a tile of both products at once, so that x is read once for the two."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    tile_m, tile_n = _place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + tl.minimum(m, M - 1).to(tl.int64)[:, None] * x_stride
    read = tl.minimum(n, N - 1).to(tl.int64)[None, :]
    gate_rows, up_rows = gate_ptr + read * gate_stride, up_ptr + read * up_stride
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        c = start + columns
        if EVEN:
            x = tl.load(x_rows + c[None, :])
            g = tl.load(gate_rows + c[:, None])
            u = tl.load(up_rows + c[:, None])
        else:
            inside = c < K
            x = tl.load(x_rows + c[None, :], mask=inside[None, :], other=0.0)
            g = tl.load(gate_rows + c[:, None], mask=inside[:, None], other=0.0)
            u = tl.load(up_rows + c[:, None], mask=inside[:, None], other=0.0)
        gate = dot_add(x, g, gate, PRECISION)
        up = dot_add(x, u, up, PRECISION)
    y_ptrs = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, _gated(gate, up).to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _weight_tiles(
    gate_ptr,
    up_ptr,
    N,
    gate_stride,
    up_stride,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ORDER: tl.constexpr,
):
    """The descriptors of both weights, or twice the one of the pair [2, N, K], whose outer stride is their distance."""
    if ORDER == 0:
        gate_tiles = tl.make_tensor_descriptor(gate_ptr, [N, K], [gate_stride, 1], [BLOCK_N, BLOCK_K])
        up_tiles = tl.make_tensor_descriptor(up_ptr, [N, K], [up_stride, 1], [BLOCK_N, BLOCK_K])
    else:
        BYTES: tl.constexpr = gate_ptr.dtype.element_ty.primitive_bitwidth // 8
        apart = (up_ptr.to(tl.int64) - gate_ptr.to(tl.int64)) // BYTES * ORDER
        first = gate_ptr if ORDER > 0 else up_ptr
        # The distance need be no multiple of a row.
        gate_tiles = tl.make_tensor_descriptor(first, [2, N, K], [apart, gate_stride, 1], [2, BLOCK_N, BLOCK_K])
        up_tiles = gate_tiles
    return gate_tiles, up_tiles


@triton.jit
def _gated_tile(
    x_tiles,
    gate_tiles,
    up_tiles,
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ORDER: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The fp32 outputs [BLOCK_M, BLOCK_N] from row m and column n on, of descriptors whose tiles have these blocks.

    Tiles of a pair of weights make one product twice as wide, which reads x
    from shared memory once instead of twice: narrow products are bound by that.
    """
    if ORDER == 0:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            x = x_tiles.load([m, k])
            gate = dot_add(x, gate_tiles.load([n, k]).T, gate, PRECISION)
            up = dot_add(x, up_tiles.load([n, k]).T, up, PRECISION)
    else:
        both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            weights = gate_tiles.load([0, n, k]).reshape(2 * BLOCK_N, BLOCK_K)
            both = dot_add(x_tiles.load([m, k]), weights.T, both, PRECISION)
        first, second = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        gate = first if ORDER > 0 else second
        up = second if ORDER > 0 else first
    return _gated(gate, up)


@triton.jit
def _described_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    x_stride,
    gate_stride,
    up_stride,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    CUTS: tl.constexpr,
    ORDER: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``_tiled_kernel`` with the copies left to the tensor memory accelerator, which also pads the tails.

    As many programs as the device holds take one tile after the other. Without
    addresses and masks the warps issue little but products. When fewer tiles
    than programs are left, each is cut into CUTS narrower ones, so that more
    programs share what would take them as long as a whole wave. ORDER is that
    of the weights in memory, 0 where a descriptor cannot tell their distance.
    """
    THIN: tl.constexpr = BLOCK_N // CUTS
    x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [BLOCK_M, BLOCK_K])
    gate_tiles, up_tiles = _weight_tiles(gate_ptr, up_ptr, N, gate_stride, up_stride, K, BLOCK_N, BLOCK_K, ORDER)
    y_tiles = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles = tiles_m * tiles_n
    whole = tiles if CUTS == 1 else tiles // programs * programs
    # Flattened, the copies of the next tile are on their way while this one is stored: 2 % for one
    # product a step, but with two the loop loses a quarter.
    for tile in tl.range(program, whole, programs, flatten=ORDER != 0):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        m, n = tile_m * BLOCK_M, tile_n * BLOCK_N
        y = _gated_tile(x_tiles, gate_tiles, up_tiles, m, n, K, BLOCK_M, BLOCK_N, BLOCK_K, ORDER, STAGES, PRECISION)
        y_tiles.store([m, n], y.to(y_ptr.dtype.element_ty))
    if CUTS > 1:
        gate_thin, up_thin = _weight_tiles(gate_ptr, up_ptr, N, gate_stride, up_stride, K, THIN, BLOCK_K, ORDER)
        y_thin = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BLOCK_M, THIN])
        for piece in tl.range(program, (tiles - whole) * CUTS, programs):
            tile_m, tile_n = _place(whole + piece // CUTS, tiles_m, tiles_n, GROUP)
            m, n = tile_m * BLOCK_M, tile_n * BLOCK_N + piece % CUTS * THIN
            y = _gated_tile(x_tiles, gate_thin, up_thin, m, n, K, BLOCK_M, THIN, BLOCK_K, ORDER, STAGES, PRECISION)
            y_thin.store([m, n], y.to(y_ptr.dtype.element_ty))


def swiglu_linear_reference(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """The differentiable PyTorch form of ``swiglu_linear``; the products round to the dtype of x, as two linears do."""
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def _check(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> None:
    _checks.expect_float(NAME, "x", x)
    _checks.expect(x.ndim >= 1, NAME, "x", "at least one dimension", "a scalar")
    _checks.expect(w_gate.ndim == 2, NAME, "w_gate", "shape (N, K)", tuple(w_gate.shape))
    _checks.expect(w_gate.shape[1] == x.shape[-1], NAME, "w_gate", f"{x.shape[-1]} columns, as x has", w_gate.shape[1])
    _checks.expect(w_up.shape == w_gate.shape, NAME, "w_up", f"shape {tuple(w_gate.shape)}", tuple(w_up.shape))
    for name, weight in (("w_gate", w_gate), ("w_up", w_up)):
        if weight.dtype != x.dtype:
            raise TypeError(f"{NAME}: {name}: expected the dtype of x, {x.dtype}, got {weight.dtype}.")
        _checks.expect_alike(NAME, name, weight, "x", x)


_plans = _launch.PlanCache()


def _route(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> Any:
    """How every call of this signature is served: a function of x and both weights."""
    _check(x, w_gate, w_up)
    shape = (*x.shape[:-1], w_gate.shape[0])
    if x.is_meta:
        return lambda x, w_gate, w_up: x.new_empty(shape)
    return routing.triton_route(
        NAME, _checks.refusal(x, w_gate, w_up), lambda: _plan(x, w_gate, w_up), swiglu_linear_reference
    )


def _dense(x: torch.Tensor) -> bool:
    """Whether the last dimension of a matrix lies densely."""
    return bool(x.stride(-1) == 1 or x.shape[-1] == 1)


def _plan(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> Any:
    """What launches a kernel for this signature: a function of x and both weights."""
    (N, K), M = w_gate.shape, row_count(x)
    shape = (*x.shape[:-1], N)
    if M * N == 0 or K == 0:
        # A sum of nothing is 0, and silu(0) * 0 is, too.
        return lambda x, w_gate, w_up: x.new_zeros(shape)
    if x.ndim != 2 or not (_dense(x) and _dense(w_gate) and _dense(w_up)):

        def folded(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
            dense = (tensor if _dense(tensor) else tensor.contiguous() for tensor in (w_gate, w_up))
            rows = x.reshape(M, K)
            return _forward(rows if _dense(rows) else rows.contiguous(), *dense).view(shape)

        return folded
    arch = _launch.architecture(x.get_device())
    config = dict(_launch.choose(NAME, arch, itemsize=x.element_size(), rows=M, columns=N))
    if config["kernel"] == "described" and not _describable(x, w_gate, w_up):
        config["kernel"] = "tiled"
    makers = {"vector": _vector, "streamed": _streamed, "tiled": _tiled, "described": _tiled}
    return makers[config["kernel"]](x, w_gate, w_up, config)


def _describable(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> bool:
    """Whether tensor descriptors can tell the layouts: rows apart, at multiples of 16 bytes, in the output too."""
    tensors = (x, w_gate, w_up)
    # One row for all, or rows that overlap: a descriptor is told no stride below a row.
    if any(tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1] for tensor in tensors):
        return False
    starts = [tensor.data_ptr() for tensor in tensors]
    steps = [max(tensor.stride(0), tensor.shape[1]) * tensor.element_size() for tensor in tensors]
    return all(number % 16 == 0 for number in (*starts, *steps, w_gate.shape[0] * x.element_size()))


def _order(gate_at: int, up_at: int) -> int:
    """1 for up behind gate, -1 for gate behind up; 0 if they are one, or further apart than a descriptor's strides."""
    apart = up_at - gate_at
    return (apart > 0) - (apart < 0) if -_FAR < apart < _FAR else 0


def _strides(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> tuple[int, ...]:
    return x.shape[0], w_gate.shape[0], x.stride(0), w_gate.stride(0), w_up.stride(0)


def _precision(x: torch.Tensor) -> str:
    """fp32 promises IEEE arithmetic; for 16-bit operands there is no choice to make."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _vector(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, config: dict[str, Any]) -> Any:
    (N, K), M = w_gate.shape, x.shape[0]
    constants = {
        "K": K,
        "BLOCK_N": config["block_n"],
        "BLOCK_K": min(config["block_k"], triton.next_power_of_2(K)),
        "STAGES": config["num_stages"],
    }
    launch = _launch.bind(
        _vector_kernel,
        (math.ceil(N / config["block_n"]), M),
        (x, w_gate, w_up, x.new_empty(M, N)),
        _strides(x, w_gate, w_up),
        constants,
        config=config,
        num_warps=config["num_warps"],
    )

    def run(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(M, N)
        launch(x, w_gate, w_up, y)
        return y

    return run


def _streamed(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, config: dict[str, Any]) -> Any:
    (N, K), M = w_gate.shape, x.shape[0]
    block_m = max(16, triton.next_power_of_2(M))
    block_k = max(16, min(config["block_k"], triton.next_power_of_2(K)))
    split, tiles = config["split"], math.ceil(N / config["block_n"])
    constants = {
        "K": K,
        "BLOCK_M": block_m,
        "BLOCK_N": config["block_n"],
        "BLOCK_K": block_k,
        "SPLIT": split,
        "FAR": (M - 1) * x.stride(0) + K >= 2**31,
        "STAGES": config["num_stages"],
        "PRECISION": _precision(x),
    }
    size = tiles * split * 2 * config["block_n"] * block_m if split > 1 else 0
    device = x.device
    parts, counters = x.new_empty(size, dtype=torch.float32), _split.counters(device, tiles if split > 1 else 1)
    launch = _launch.bind(
        _streamed_kernel,
        (tiles, split),
        (x, w_gate, w_up, x.new_empty(M, N), parts, counters),
        _strides(x, w_gate, w_up),
        constants,
        config=config,
        num_warps=config["num_warps"],
    )

    def run(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(M, N)
        if split == 1:
            launch(x, w_gate, w_up, y, y, y)
        else:
            parts = x.new_empty(size, dtype=torch.float32)
            launch(x, w_gate, w_up, y, parts, _split.counters(device, tiles))
        return y

    return run


def _cuts(tiles: int, programs: int, most: int) -> int:
    """Into how many pieces each tile of the last wave is cut: a power of two, and a piece for each program at most."""
    left = tiles % programs
    return 1 << (min(most, programs // left).bit_length() - 1) if left else 1


def _tiled(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, config: dict[str, Any]) -> Any:
    (N, K), M = w_gate.shape, x.shape[0]
    tiles = math.ceil(M / config["block_m"]) * math.ceil(N / config["block_n"])
    constants = {
        "K": K,
        "BLOCK_M": config["block_m"],
        "BLOCK_N": config["block_n"],
        "BLOCK_K": max(16, min(config["block_k"], triton.next_power_of_2(K))),
        "GROUP": config["group"],
        "STAGES": config["num_stages"],
        "PRECISION": _precision(x),
    }
    strides = _strides(x, w_gate, w_up)
    kernel = _tiled_kernel
    if config["kernel"] == "described":
        programs = config["per_processor"] * _launch.processors(x.get_device())
        cuts = constants["CUTS"] = _cuts(tiles, programs, min(config["cuts"], config["block_n"] // 16))
        alike = w_gate.stride(0) == w_up.stride(0)
        constants["ORDER"] = _order(w_gate.data_ptr(), w_up.data_ptr()) if alike else 0
        tiles = programs if cuts > 1 else min(tiles, programs)
        # The stride of a single row is never taken, but a descriptor wants one that is a multiple of 16 bytes.
        strides = (*strides[:2], *(max(stride, K) for stride in strides[2:]))
        kernel = _described_kernel
    launch = _launch.bind(
        kernel,
        (tiles,),
        (x, w_gate, w_up, x.new_empty(M, N)),
        strides,
        constants,
        config=config,
        num_warps=config["num_warps"],
    )

    def run(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(M, N)
        launch(x, w_gate, w_up, y)
        return y

    return run


def _forward(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    gate_at, up_at = w_gate.data_ptr(), w_up.data_ptr()
    key = (
        *(x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15),
        *(w_gate.dtype, w_gate.shape, w_gate.stride(), w_gate.device, gate_at & 15),
        *(w_up.dtype, w_up.shape, w_up.stride(), w_up.device, up_at & 15),
        _order(gate_at, up_at),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(x, w_gate, w_up))
    result: torch.Tensor = plan(x, w_gate, w_up)
    return result


@torch.library.custom_op("triton_kernel_lab::swiglu_linear", mutates_args=())
def _swiglu_linear_op(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    return _forward(x, w_gate, w_up)


@_swiglu_linear_op.register_fake
def _(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    _check(x, w_gate, w_up)
    return x.new_empty(*x.shape[:-1], w_gate.shape[0])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _of_products(
    dy: torch.Tensor, x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor, want_gate: bool, want_up: bool
) -> tuple[Any, Any]:
    """The gradients of the two products, which are computed anew and kept no longer than this."""
    gate = torch.mm(x, w_gate.t())
    # The gradient of up does not depend on up.
    up = torch.mm(x, w_up.t()) if want_gate else gate
    run = swiglu_backward_dispatched if _checks.dispatched(dy, gate, up) else swiglu_backward
    return run(dy, gate, up, want_gate=want_gate, want_up=want_up)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """With g and u the gradients of the products: dx = g w_gate + u w_up, dw_gate = g^T x, dw_up = u^T x."""
    _checks.expect_first_derivative(NAME)
    x, w_gate, w_up = ctx.saved_tensors
    want_x, want_w_gate, want_w_up = ctx.needs_input_grad
    (N, K), M = w_gate.shape, row_count(x)
    dx = dw_gate = dw_up = None
    # The kernel has multiplied in the dtype of its inputs, whatever autocast makes of a linear.
    with torch._C._DisableAutocast():
        rows = x.reshape(M, K)
        of_gate, of_up = _of_products(dy.reshape(M, N), rows, w_gate, w_up, want_x or want_w_gate, want_x or want_w_up)
        if want_x:
            dx = torch.mm(of_gate, w_gate).addmm_(of_up, w_up).view(x.shape)
        if want_w_gate:
            dw_gate = torch.mm(of_gate.t(), rows)
        if want_w_up:
            dw_up = torch.mm(of_up.t(), rows)
    return dx, dw_gate, dw_up


_swiglu_linear_op.register_autograd(_backward, setup_context=_keep)


class _SwiGLULinear(torch.autograd.Function):
    """The operator and its gradients without the dispatcher, which costs more than a small kernel runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w_gate, w_up)
        return _forward(x, w_gate, w_up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, dy)


def swiglu_linear(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """Gated projection ``silu(x @ w_gate.T) * (x @ w_up.T)``, accumulated in fp32 and rounded once.

    Shazeer 2020, section 2. Few rows of x stream the weights once; many rows
    go through tensor-core tiles that hold both products. float32 inputs are
    multiplied in IEEE arithmetic, not TF32.

    Args:
        x: float16, bfloat16 or float32 [..., K] with any strides.
        w_gate: [N, K], of x's dtype.
        w_up: as w_gate.

    Returns:
        A contiguous tensor [..., N] with the dtype of x. For a gradient only
        x and both weights are kept: the backward pass computes the products
        anew, rounded to the dtype of x, runs the kernel of ``swiglu`` between
        them, and computes exactly the gradients asked for, in the dtype of x.
        Its products are ``torch.mm``, which accumulates in fp32 and obeys
        torch's own switches, such as that for TF32. The differentiable PyTorch
        form serves forward mode, torch.func, and what Triton does not take.

    Raises:
        TypeError: x is not floating-point, or the dtypes differ.
        ValueError: the shapes do not fit, or the devices differ.
        RuntimeError: from the backward pass where it is called with
            create_graph=True: there is no second derivative. That of
            ``swiglu_linear_reference`` has one.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    tensors = (x, w_gate, w_up)
    wanted = _checks.wants_grad(*tensors)
    if wanted and (reason := _checks.no_gradient(*tensors)):
        _check(*tensors)
        if not torch.compiler.is_compiling():
            routing.fallback(NAME, *reason)
        return swiglu_linear_reference(*tensors)
    result: torch.Tensor
    if _checks.dispatched(*tensors):
        result = _swiglu_linear_op(*tensors)
    elif wanted:
        result = _SwiGLULinear.apply(*tensors)
    else:
        result = _forward(*tensors)
    return result
