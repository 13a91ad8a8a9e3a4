"""Between the projections and attention in one launch: norms of heads, rotary positions, and the write to the cache.

Formula: Su et al., "RoFormer", 2021, arXiv:2104.09864, equation 34, with the two halves of a head as the pairs,
after RMSNorm of each head of queries and keys where the model has it (Qwen3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._norm import normalise, rms_norm_reference
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["Cache", "HeadNorms", "rotate_and_store", "rotate_and_store_reference", "slots"]

NAME = "rotate_and_store"


class Cache(NamedTuple):
    """Keys and values of one layer: [B, N, Hkv, D], or with a table int32 [B, max_pages] [pages, page_size, Hkv, D]."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None


class HeadNorms(NamedTuple):
    """The weights [D] by which heads of queries and of keys are normalised, and what is added to a mean of squares."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@triton.jit
def _rotate_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    q_norm_ptr,
    k_norm_ptr,
    table_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tokens,
    table_stride,
    k_outer,
    k_row,
    v_outer,
    v_row,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One head of one token a program; its two halves are the pairs that are rotated."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < HALF
    source = qkv_ptr + (row * (HQ + 2 * HKV) + head) * D + c
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    position = tl.load(position_ptr + row)
    entry = row // tokens
    if head < HQ + HKV:
        cos = tl.load(cos_ptr + position * HALF + c, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + c, mask=inside, other=0.0).to(tl.float32)
        x, y = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            weight_ptr = q_norm_ptr if head < HQ else k_norm_ptr
            rstd = tl.rsqrt(tl.sum(x * x + y * y, 0) / D + eps)
            first = tl.load(weight_ptr + c, mask=inside, other=0.0)
            second = tl.load(weight_ptr + HALF + c, mask=inside, other=0.0)
            x = normalise(x, rstd, first, 0.0, True, False, True, dtype).to(tl.float32)
            y = normalise(y, rstd, second, 0.0, True, False, True, dtype).to(tl.float32)
        low = (x * cos - y * sin).to(dtype)
        high = (y * cos + x * sin).to(dtype)
    if head < HQ:
        target = q_ptr + (row * HQ + head) * D + c
    else:
        outer, place = entry, position.to(tl.int64)
        if PAGE > 0:
            outer = tl.load(table_ptr + entry * table_stride + position // PAGE).to(tl.int64)
            place = (position % PAGE).to(tl.int64)
        if head < HQ + HKV:
            target = k_ptr + outer * k_outer + place * k_row + (head - HQ) * D + c
        else:
            target = v_ptr + outer * v_outer + place * v_row + (head - HQ - HKV) * D + c
    tl.store(target, low, mask=inside)
    tl.store(target + HALF, high, mask=inside)


def slots(table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Where positions [B, T] lie among all rows of all pages: int64 [B, T]."""
    positions = positions.long()
    return table.gather(1, positions // page_size).long() * page_size + positions % page_size


def rotate_and_store_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """The PyTorch form of ``rotate_and_store``."""
    kv_heads, d = cache.k.shape[2:]
    heads = qkv.unflatten(-1, (-1, d))
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    if norms is not None:
        q = rms_norm_reference(q, norms.q, norms.eps)
        k = rms_norm_reference(k, norms.k, norms.eps)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    c, s = (table[positions.long()].to(wide)[:, :, None] for table in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.to(wide).chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1).to(x.dtype)

    if cache.table is None:
        entry = torch.arange(qkv.shape[0], device=qkv.device)[:, None]
        cache.k[entry, positions.long()], cache.v[entry, positions.long()] = turned(k), v
    else:
        page_size = cache.k.shape[1]
        at = slots(cache.table, positions, page_size)
        page, row = at // page_size, at % page_size
        cache.k[page, row], cache.v[page, row] = turned(k), v
    return turned(q).contiguous()


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    norms: HeadNorms | None,
) -> None:
    _checks.expect_float(NAME, "qkv", qkv)
    heads, d = cache.k.shape[2:]
    fits = qkv.ndim == 3 and qkv.shape[2] % d == 0 and qkv.shape[2] // d > 2 * heads
    _checks.expect(fits, NAME, "qkv", f"[B, T, (Hq + 2 x {heads}) x {d}] as the cache has", tuple(qkv.shape))
    _checks.expect(d % 2 == 0, NAME, "cache", "an even number of features a head", d)
    for argument, x in (("cos", cos), ("sin", sin)):
        right = x.ndim == 2 and x.shape[1] == d // 2
        _checks.expect(right, NAME, argument, f"[positions, {d // 2}]", tuple(x.shape))
    right = positions.shape == qkv.shape[:2]
    _checks.expect(right, NAME, "positions", f"{tuple(qkv.shape[:2])} as qkv has", tuple(positions.shape))
    _checks.expect(positions.dtype == torch.int32, NAME, "positions", "int32", positions.dtype)
    dense = all(x.stride()[2:] == (d, 1) for x in (cache.k, cache.v))
    _checks.expect(dense, NAME, "cache", "heads that lie side by side", (cache.k.stride(), cache.v.stride()))
    weights = [] if norms is None else [norms.q, norms.k]
    for x in (cos, sin, cache.k, cache.v, *weights):
        _checks.expect(x.dtype == qkv.dtype, NAME, "qkv", f"the dtype of all others, {x.dtype}", qkv.dtype)


_plans = _launch.PlanCache()
_CONFIG = {"num_warps": 1}


def _plan(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    norms: HeadNorms | None,
) -> Any:
    """What launches the kernel for this signature."""
    batch, tokens, width = qkv.shape
    kv_heads, d = cache.k.shape[2:]
    heads = width // d
    shape = batch, tokens, heads - 2 * kv_heads, d
    q = qkv.new_empty(shape)
    q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
    table = positions if cache.table is None else cache.table
    launch = _launch.bind(
        _rotate_kernel,
        (batch * tokens, heads),
        (qkv, cos, sin, positions, q_norm, k_norm, table, q, cache.k, cache.v),
        (tokens, table.stride(0), *cache.k.stride()[:2], *cache.v.stride()[:2], eps),
        {
            "HQ": heads - 2 * kv_heads,
            "HKV": kv_heads,
            "D": d,
            "BLOCK": triton.next_power_of_2(d // 2),
            "PAGE": 0 if cache.table is None else cache.k.shape[1],
            "HAS_NORM": norms is not None,
        },
        config=_CONFIG,
        num_warps=_CONFIG["num_warps"],
    )

    def run(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        q = qkv.new_empty(shape)
        q_norm, k_norm, _ = norms or (qkv, qkv, 0.0)
        table = positions if cache.table is None else cache.table
        launch(qkv, cos, sin, positions, q_norm, k_norm, table, q, cache.k, cache.v)
        return q

    return run


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Turn queries and keys by their positions, and write keys and values to the cache at them.

    Su et al. 2021, equation 34; computed in fp32 and rounded once. No gradient.

    Args:
        qkv: float16, bfloat16 or float32 [B, T, (Hq + 2 Hkv) D], contiguous: queries, keys, values.
        cos: the cosines, [positions, D / 2] of qkv's dtype, contiguous.
        sin: the sines, as cos.
        positions: int32 [B, T], contiguous: the row of ``cos`` and of the cache that each token takes. None may lie
            beyond either; nobody looks.
        cache: where keys and values go; written in place. Heads lie side by side.
        norms: the norms of heads, or None where the model has none.

    Returns:
        The queries, contiguous [B, T, Hq, D].

    Raises:
        TypeError: qkv is not floating-point.
        ValueError: shapes or dtypes do not fit.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does not serve the call.
    """
    tensors = (qkv, cos, sin, positions, cache.k, cache.v, cache.table, *(norms or ())[:2])
    key = (
        *((x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15) if x is not None else None for x in tensors),
        norms and norms.eps,
    )
    arguments = (qkv, cos, sin, positions, cache, norms)
    plan = _plans.get(key)
    if plan is None:
        _check(*arguments)
        route = routing.triton_route(NAME, _checks.refusal(qkv), lambda: _plan(*arguments), rotate_and_store_reference)
        plan = _plans.keep(key, route)
    result: torch.Tensor = plan(*arguments)
    return result
