"""Attention of many queries: softmax(scale * q k^T) v by tiles, in memory linear in the sequence.

Algorithm: Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _attention_hopper, _checks, _launch
from triton_kernel_lab.ops._attention_backward import attend, gradients
from triton_kernel_lab.ops._fp32 import dot_add, rounded
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["flash_attention", "flash_attention_reference"]

NAME = "flash_attention"
MAX_HEAD = 256
# Features of a head whose products are added one after the other, in fp32.
_CHAIN = tl.constexpr(32)


@triton.jit
def _tile_of(program, tiles, heads, cluster):
    """Head and tile of a program: heads in clusters, in each the longest rows first, heads fastest.

    The last programs then have the least to do, and a cluster's keys and values stay in the L2.
    """
    per_cluster = tiles * cluster
    first = program // per_cluster * cluster
    within = program % per_cluster
    width = tl.minimum(cluster, heads - first)
    return first + within % width, tiles - 1 - within // width


@triton.jit
def _rows_at(ptr, offsets, columns, d, Lk, D: tl.constexpr, DPAD: tl.constexpr, TAIL: tl.constexpr):
    """A tile of keys or values; zeros beyond their end, so that 0 x NaN never arises."""
    if TAIL:
        inside = (columns < Lk)[:, None]
        if D < DPAD:
            inside = inside & (d < D)[None, :]
        x = tl.load(ptr + offsets, mask=inside, other=0.0)
    elif D < DPAD:
        x = tl.load(ptr + offsets, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(ptr + offsets)
    return x


@triton.jit
def _products(q, k, PRECISION: tl.constexpr):
    """q k^T in fp32 [ROWS, BLOCK].

    In IEEE fp32 rows of products are summed by themselves and then added: the error of a score, which the
    exponential makes one of a weight, grows with the length of a row. Rows that see few keys average
    none of it away.
    """
    if q.dtype == tl.float32 and PRECISION == "ieee" and q.shape[1] > _CHAIN:
        CHAINS: tl.constexpr = q.shape[1] // _CHAIN
        q = tl.permute(tl.reshape(q, (q.shape[0], CHAINS, _CHAIN)), (1, 0, 2))
        k = tl.permute(tl.reshape(k, (k.shape[0], CHAINS, _CHAIN)), (1, 2, 0))
        s = tl.sum(tl.dot(q, k, input_precision="ieee"), 0)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return s


@triton.jit
def _attend(
    acc,
    highest,
    m,
    total,
    q,
    k_ptr,
    v_ptr,
    k_offsets,
    v_offsets,
    start,
    row,
    d,
    Lk,
    shift,
    scale,
    even_scale,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Add one block of keys and values to the weighted values acc.

    ``highest`` is the largest score so far, ``m`` the same scaled, ``total`` the sum of the weights.
    """
    columns = start + tl.arange(0, BLOCK)
    k = _rows_at(k_ptr, k_offsets, columns, d, Lk, D, DPAD, TAIL)
    s = _products(q, k, PRECISION)
    if SIGN != 1:
        s *= SIGN
    if TAIL:
        see = (columns < Lk)[None, :]
        if CAUSAL:
            see = see & (columns[None, :] <= row[:, None] + shift)
        s = tl.where(see, s, float("-inf"))
    highest = tl.maximum(highest, tl.max(s, 1))
    # A multiply-add forms the product exactly and subtracts a rounded maximum. From 2^28 on that rounding
    # could overflow the exponential, and only equal scores share weight: a power of two, which rounds
    # nothing, then stands for the scale. It is the larger of the two, so the scaled maximum only grows.
    by = tl.where(tl.abs(highest) * scale >= 268435456.0, even_scale, scale)
    m_new = highest * by
    if q.dtype == tl.float32:
        # Or where the maximum stays the fade would not be one but a rounding error from it, each time.
        m_new = rounded(m_new)
    p = tl.exp2(s * by[:, None] - m_new[:, None])
    fade = tl.exp2(m - m_new)
    total = total * fade + tl.sum(p, 1)
    v = _rows_at(v_ptr, v_offsets, columns, d, Lk, D, DPAD, TAIL)
    acc = dot_add(p.to(v.dtype), v, acc * fade[:, None], PRECISION)
    return acc, highest, m_new, total


@triton.jit(do_not_specialize=["Lq", "Lk", "Hq", "heads", "tiles", "cluster"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    Lq,
    Lk,
    Hq,
    heads,
    tiles,
    cluster,
    q_b,
    q_h,
    k_b,
    k_h,
    v_b,
    v_h,
    scale,
    even_scale,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DPAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CAUSAL: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """ROWS queries of one head a program; strides of rows are constants, which saves the registers of pointers."""
    head, tile = _tile_of(tl.program_id(0), tiles, heads, cluster)
    # int64: an offset in elements passes 2^31 long before memory runs out.
    b = (head // Hq).to(tl.int64)
    h = (head % Hq).to(tl.int64)
    start = tile * ROWS
    lane = tl.arange(0, ROWS)
    row = start + lane
    there = tl.arange(0, BLOCK)
    d = tl.arange(0, DPAD)
    shift = Lk - Lq
    q_ptr += b * q_b + h * q_h + start.to(tl.int64) * Q_ROW
    k_ptr += b * k_b + h // GROUP * k_h
    v_ptr += b * v_b + h // GROUP * v_h
    q_offsets = (lane.to(tl.int64) if ROWS * Q_ROW >= 2**31 else lane)[:, None] * Q_ROW + d[None, :]
    k_offsets = (there.to(tl.int64) if BLOCK * K_ROW >= 2**31 else there)[:, None] * K_ROW + d[None, :]
    v_offsets = (there.to(tl.int64) if BLOCK * V_ROW >= 2**31 else there)[:, None] * V_ROW + d[None, :]
    mine = (row < Lq)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mine, other=0.0)
    # The lowest start from which a scaled maximum is finite, so that no -inf is ever subtracted from -inf.
    highest = tl.full((ROWS,), 0.0, tl.float32) - 3e38 / tl.maximum(even_scale, 1.0)
    m = highest * even_scale
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DPAD), tl.float32)
    if CAUSAL:
        # Every row of the tile sees the keys before ``whole``, none sees those from ``end`` on.
        end = tl.minimum(Lk, tl.maximum(start + ROWS + shift, 0))
        whole = tl.minimum(Lk, tl.maximum(start + shift + 1, 0)) // BLOCK * BLOCK
    else:
        end = Lk
        whole = Lk // BLOCK * BLOCK
    for at in tl.range(0, whole, BLOCK, num_stages=STAGES):
        acc, highest, m, total = _attend(
            *(acc, highest, m, total, q, k_ptr, v_ptr, k_offsets, v_offsets, at, row, d, Lk, shift, scale, even_scale),
            *(D, DPAD, BLOCK, CAUSAL, SIGN, PRECISION, False),
        )
        k_ptr += BLOCK * K_ROW
        v_ptr += BLOCK * V_ROW
    for at in tl.range(whole, end, BLOCK, num_stages=STAGES):
        acc, highest, m, total = _attend(
            *(acc, highest, m, total, q, k_ptr, v_ptr, k_offsets, v_offsets, at, row, d, Lk, shift, scale, even_scale),
            *(D, DPAD, BLOCK, CAUSAL, SIGN, PRECISION, True),
        )
        k_ptr += BLOCK * K_ROW
        v_ptr += BLOCK * V_ROW
    sees = row + shift >= 0 if CAUSAL else row >= 0
    total = tl.where(sees, total, 1.0)
    y = acc * (1.0 / total)[:, None]
    out_ptr += (b * Lq + start) * Hq * D + h * D
    out_offsets = lane[:, None] * (Hq * D) + d[None, :]
    tl.store(out_ptr + out_offsets, y.to(out_ptr.dtype.element_ty), mask=mine)
    if HAS_LSE:
        lse = tl.where(sees, (highest * scale + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + (b * Hq + h) * Lq + row, lse, mask=row < Lq)


def flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The differentiable PyTorch form of ``flash_attention``: output and LSE; fp64 is computed in fp64."""
    return attend(q, k, v, causal, _scale(q, scale))


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
    for argument, x in (("q", q), ("k", k), ("v", v)):
        _checks.expect_float(NAME, argument, x)
        _checks.expect(x.ndim == 4, NAME, argument, "four dimensions [B, L, H, D]", tuple(x.shape))
        if x.dtype != q.dtype:
            raise TypeError(f"{NAME}: {argument}: expected the dtype of q, {q.dtype}, got {x.dtype}.")
        _checks.expect_alike(NAME, argument, x, "q", q)
    batch, _, heads, width = q.shape
    _checks.expect(width >= 1, NAME, "q", "at least one feature a head", tuple(q.shape))
    fits = k.shape[0] == batch and k.shape[3] == width
    _checks.expect(fits, NAME, "k", f"[{batch}, Lk, Hkv, {width}] as q has", tuple(k.shape))
    _checks.expect(v.shape == k.shape, NAME, "v", f"the shape of k, {tuple(k.shape)}", tuple(v.shape))
    divides = k.shape[2] > 0 and heads % k.shape[2] == 0
    _checks.expect(divides, NAME, "k", f"a number of heads that divides q's {heads}", k.shape[2])
    _checks.expect(scale is None or math.isfinite(scale), NAME, "scale", "a finite number or None", scale)


_plans = _launch.PlanCache()


def _refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[str, str] | None:
    if q.shape[3] > MAX_HEAD:
        return "inputs", f"the kernel takes heads of up to {MAX_HEAD} features, not {q.shape[3]}"
    return _checks.refusal(q, k, v)


def _sums(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Memory for the LSE [B, Hq, Lq], or for nothing."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]) if wanted else (0,), dtype=dtype)


def _route(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, lse: bool) -> Any:
    """How every call of this signature is served: a function of q, k and v that returns output and LSE."""
    _check(q, k, v, scale)
    if q.is_meta:
        return lambda q, k, v: (q.new_empty(q.shape), _sums(q, lse))

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = attend(q, k, v, causal, scale)
        return out, sums if lse else _sums(q, False)

    return routing.triton_route(NAME, _refusal(q, k, v), lambda: _plan(q, k, v, causal, scale, lse), reference)


def _plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, lse: bool) -> Any:
    """What launches the kernel for this signature: a function of q, k and v that returns output and LSE."""
    if q.numel() == 0 or k.numel() == 0:
        return lambda q, k, v: (q.new_zeros(q.shape), _sums(q, lse).fill_(float("-inf")))
    if not all(x.shape[3] == 1 or x.stride(3) == 1 for x in (q, k, v)):
        return lambda q, k, v: _forward(_unit_stride(q), _unit_stride(k), _unit_stride(v), causal, scale, lse)
    out = q.new_empty(q.shape)
    tensors = (q, k, v, out, _sums(q, True) if lse else out)
    launch: Any = None
    # What the kernel of an architecture does not take goes to the portable one, as older architectures run it.
    for arch in (_launch.architecture(q.get_device()), "sm_80"):
        if launch is None:
            sizes = {"itemsize": q.element_size(), "rows": q.shape[1], "columns": _padded(q)}
            launch = _bind(tensors, _launch.choose(NAME, arch, **sizes), causal, scale, lse)
    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = q.stride() == out.stride()
    nothing = _sums(q, False)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # empty_like costs half of new_empty on the host.
        out = torch.empty_like(q) if alike else q.new_empty(q.shape)
        sums = _sums(q, True) if lse else nothing
        launch(q, k, v, out, sums if lse else out)
        return out, sums

    return run


def _bind(tensors: tuple[torch.Tensor, ...], config: Any, causal: bool, scale: float, lse: bool) -> Any:
    """The launcher for q, k, v, the output and the LSE; None where a kernel does not take them."""
    q, k, v = tensors[:3]
    batch, queries, heads, width = q.shape
    group = heads // k.shape[2]
    # As many heads side by side as leave their keys and values in the L2.
    of_head = 2 * k.shape[1] * width * k.element_size()
    cluster = min(max(int(config["cluster_mib"] * 2**20) // of_head, 1) * group, batch * heads)
    # A negative scale turns the order of the scores round; none makes them equal.
    sign = (scale > 0) - (scale < 0)
    positive = abs(scale) * math.log2(math.e) if sign else 1.0
    even = 2.0 ** math.ceil(math.log2(positive))
    if config["kernel"] == "specialised":
        given = {"cluster": cluster, "padded": _padded(q), "scale": positive, "even_scale": even}
        return _attention_hopper.bind(tensors, config, **given, causal=causal, lse=lse) if sign > 0 else None
    tiles = math.ceil(queries / config["rows"])
    return _launch.bind(
        _attention_kernel,
        (batch * heads * tiles,),
        tensors,
        (
            *(queries, k.shape[1], heads, batch * heads, tiles, cluster),
            *(_stride(x, dim) for x in (q, k, v) for dim in (0, 2)),
            *(positive, even),
        ),
        {
            "Q_ROW": _stride(q, 1),
            "K_ROW": _stride(k, 1),
            "V_ROW": _stride(v, 1),
            "GROUP": group,
            "D": width,
            "DPAD": _padded(q),
            "ROWS": config["rows"],
            "BLOCK": config["block"],
            "STAGES": config["stages"],
            "CAUSAL": causal,
            "SIGN": sign,
            "PRECISION": config["precision"],
            "HAS_LSE": lse,
        },
        config=config,
        num_warps=config["num_warps"],
    )


def _padded(q: torch.Tensor) -> int:
    """The features of a tile: a power of two that the tensor cores take."""
    return max(int(triton.next_power_of_2(q.shape[3])), 16)


def _stride(x: torch.Tensor, dim: int) -> int:
    """The stride of a dimension; that of a single element counts for nothing."""
    return x.stride(dim) if x.shape[dim] > 1 else 0


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where the features of a head do not lie side by side."""
    return x if x.shape[3] == 1 or x.stride(3) == 1 else x.contiguous()


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    key = (
        *(q.dtype, q.shape, q.stride(), q.device, q.data_ptr() & 15),
        *(k.dtype, k.shape, k.stride(), k.device, k.data_ptr() & 15),
        *(v.dtype, v.shape, v.stride(), v.device, v.data_ptr() & 15),
        *(causal, scale, lse),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(q, k, v, causal, scale, lse))
    result: tuple[torch.Tensor, torch.Tensor] = plan(q, k, v)
    return result


@torch.library.custom_op("triton_kernel_lab::flash_attention", mutates_args=())
def _attention_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _forward(q, k, v, causal, scale, lse)
    # An operator must not return one tensor twice.
    return out, sums if lse else _sums(q, False)


@_attention_op.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k, v, scale)
    return q.new_empty(q.shape), _sums(q, lse)


@torch.library.custom_op("triton_kernel_lab::flash_attention_backward", mutates_args=())
def _backward_op(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients(grad_out, grad_lse, q, k, v, out, lse, causal, scale)


@_backward_op.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 6
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = _backward_op(grad_out, grad_lse, q, k, v, out, lse, ctx.causal, ctx.scale)
    asked = zip(found, ctx.needs_input_grad[:3], strict=True)
    return (*(grad if wanted else None for grad, wanted in asked), None, None, None)


_attention_op.register_autograd(_backward, setup_context=_setup_context)


@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention, ``softmax(scale * q k^T) v`` for each head, by tiles.

    Dao 2023, arXiv:2307.08691, algorithm 1. Memory beside the inputs and the
    output does not grow with Lq x Lk.

    Args:
        q: float16, bfloat16 or float32 [B, Lq, Hq, D], D up to 256, any
            strides; heads whose features do not lie side by side are copied
            first.
        k: [B, Lk, Hkv, D] of q's dtype, any strides of its own. Hkv divides
            Hq: query head h reads key head h // (Hq / Hkv).
        v: as k, with its shape.
        causal: query i sees keys 0 .. i + Lk - Lq, so that the last query sees
            the last key (bottom-right alignment, not that of PyTorch's
            ``is_causal``); else every query sees every key.
        scale: factor of the scores, dimensionless; None for 1 / sqrt(D).
        return_lse: also return the natural logarithm of the sum of the
            exponentials of each query's scaled scores.

    Returns:
        A contiguous tensor with the shape and dtype of q, and with
        ``return_lse`` the fp32 log-sum-exp [B, Hq, Lq]. A query that sees no
        key gives zeros and -inf. Products are accumulated in fp32. Those of
        fp32 inputs are formed in IEEE fp32, but on sm_90 for up to 4096
        queries and D = 128 of three products in TF32, without low times low:
        either way within 1e-5 of an element and the typical one. Gradients are
        computed by recomputing blocks of scores; a second derivative raises.

    Raises:
        TypeError: an input is not floating-point, or the dtypes differ.
        ValueError: the shapes or devices do not fit, Hq is not a multiple of
            Hkv, or scale is not finite.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    wants_grad = _checks.wants_grad(q, k, v)
    if wants_grad and _checks.forward_mode(q, k, v):
        _check(q, k, v, scale)
        _checks.note_autograd(NAME)
        result = attend(q, k, v, causal, _scale(q, scale))
        return result if return_lse else result[0]
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    if (
        wants_grad
        or torch.compiler.is_compiling()
        or not {type(q), type(k), type(v)} <= _launch.PLAIN_TYPES
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
    ):
        # Checked first: a tensor of another rank may have no features to scale by.
        _check(q, k, v, scale)
        result = _attention_op(q, k, v, causal, _scale(q, scale), return_lse or wants_grad)
        return result if return_lse else result[0]
    if q.ndim != 4:
        _check(q, k, v, scale)
    out, lse = _forward(q, k, v, causal, _scale(q, scale), return_lse)
    return (out, lse) if return_lse else out
