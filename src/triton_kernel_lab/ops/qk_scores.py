"""Attention scores of one query a head: scores[b, h, n] = scale * sum_d q[b, h, d] * k[b, n, h // group, d].

Formula: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762,
equation 1, before the softmax. Heads of queries share a head of keys as in
Ainslie et al., "GQA", 2023, arXiv:2305.13245, section 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton

__all__ = ["qk_scores", "qk_scores_reference"]

NAME = "qk_scores"
# A row longer than this no longer fits the registers of a program; one longer than the second not the shared memory.
_LONGEST_ROW, _LONGEST_DOT_ROW = 8192, 256
_GROUP_TILE = 64
# A launch has so many programs along its second axis; numbers of keys are 32 bits wide but in _rows_kernel.
_GRID_LIMIT, _MOST_KEYS = 65535, 2**31 - 2**16


@triton.jit
def _steps(COUNT: tl.constexpr, STRIDE: tl.constexpr):
    """How far COUNT elements at a stride lie from the first: in 32 bits where two of them add up in 32 bits."""
    return tl.arange(0, COUNT).to(tl.int64 if COUNT * STRIDE >= 2**30 else tl.int32) * STRIDE


@triton.jit
def _rows_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    rows,
    scale,
    Q_B: tl.constexpr,
    Q_H: tl.constexpr,
    Q_D: tl.constexpr,
    K_B: tl.constexpr,
    K_N: tl.constexpr,
    K_H: tl.constexpr,
    K_D: tl.constexpr,
    N: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK keys a program, whichever queries they belong to: the cache of a query is shorter than a tile."""
    # int64: row * stride passes 2^31 long before memory runs out.
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = row < rows
    mask = inside[:, None] & (columns < D)[None, :]
    h = row % HKV
    n = row // HKV % N
    b = row // (HKV * N)
    k_row = b * K_B + n * K_N + h * K_H
    k = tl.load(k_ptr + k_row[:, None] + _steps(BLOCK_D, K_D)[None, :], mask=mask, other=0.0).to(tl.float32)
    for g in tl.range(0, GROUP, num_stages=1):
        q_row = b * Q_B + (h * GROUP + g) * Q_H
        q = tl.load(q_ptr + q_row[:, None] + _steps(BLOCK_D, Q_D)[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + ((b * HKV + h) * GROUP + g) * N + n, tl.sum(k * q, 1) * scale, mask=inside)


@triton.jit
def _place(HKV: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    """This program's sequence, its head of keys, and the number of its first key."""
    # Neighbouring programs take neighbouring heads, which lie side by side in memory.
    h = (tl.program_id(0) % HKV).to(tl.int64)
    b = tl.program_id(1).to(tl.int64) if not ALONE else tl.zeros((), tl.int64)
    return b, h, tl.program_id(0) // HKV * BLOCK


@triton.jit
def _keys_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    N,
    k_b,
    scale,
    K_B_UNIT: tl.constexpr,
    Q_B: tl.constexpr,
    Q_H: tl.constexpr,
    Q_D: tl.constexpr,
    K_N: tl.constexpr,
    K_H: tl.constexpr,
    K_D: tl.constexpr,
    ALONE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    EVICT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK keys of one head a program, held in registers while each query of the group passes."""
    b, h, start = _place(HKV, ALONE, BLOCK)
    n = start + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = n < N
    within = (columns < D)[None, :]
    k_first = k_ptr + b * k_b * K_B_UNIT + h * K_H + start.to(tl.int64) * K_N
    where = _steps(BLOCK, K_N)[:, None] + _steps(BLOCK_D, K_D)[None, :]
    mask = inside[:, None] & within
    k = tl.load(k_first + where, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    # One address in every row: the query arrives in the layout of the keys, without a trip through shared memory.
    where = _steps(BLOCK_D, Q_D)[None, :] + tl.zeros((BLOCK, 1), tl.int32)
    for g in tl.range(0, GROUP, num_stages=1):
        head = h * GROUP + g
        q = tl.load(q_ptr + b * Q_B + head * Q_H + where, mask=within, other=0.0).to(tl.float32)
        tl.store(out_ptr + (b * HKV * GROUP + head) * N + n, tl.sum(k * q, 1) * scale, mask=inside)


@triton.jit
def _group_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    N,
    k_b,
    scale,
    K_B_UNIT: tl.constexpr,
    Q_B: tl.constexpr,
    Q_H: tl.constexpr,
    Q_D: tl.constexpr,
    K_N: tl.constexpr,
    K_H: tl.constexpr,
    K_D: tl.constexpr,
    ALONE: tl.constexpr,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVICT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """STEPS times BLOCK keys of one head a program against TILE queries of its group on the tensor cores.

    The products of 16-bit values are exact in fp32, in which they are summed.
    """
    b, h, first = _place(HKV, ALONE, BLOCK * STEPS)
    g = tl.program_id(2) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK_D)
    within = (columns < D)[None, :]
    head = h * GROUP + g
    q_row = b * Q_B + head * Q_H
    q = tl.load(q_ptr + q_row[:, None] + _steps(BLOCK_D, Q_D)[None, :], mask=(g < GROUP)[:, None] & within, other=0.0)
    out_row = (b * HKV * GROUP + head) * N
    k_head = k_ptr + b * k_b * K_B_UNIT + h * K_H
    where = _steps(BLOCK, K_N)[:, None] + _steps(BLOCK_D, K_D)[None, :]
    for step in tl.range(0, STEPS, num_stages=STAGES):
        start = first + step * BLOCK
        n = start + tl.arange(0, BLOCK)
        inside = (n < N)[:, None]
        k_first = k_head + start.to(tl.int64) * K_N
        k = tl.load(k_first + where, mask=inside & within, other=0.0, eviction_policy=EVICT)
        # Keys are the tall operand: padding the group costs columns of the accumulator, not rows of the cache.
        scores = tl.dot(k, tl.trans(q)) * scale
        tl.store(out_ptr + out_row[None, :] + n[:, None], scores, mask=inside & (g < GROUP)[None, :])


def qk_scores_reference(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """The differentiable PyTorch form of ``qk_scores``; fp64 inputs are computed, and given back, in fp64."""
    wide = _output_dtype(q)
    heads = k.shape[2]
    queries = q.to(wide).unflatten(1, (heads, q.shape[1] // heads))
    # Autocast would turn the product into a 16-bit one.
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        scores = torch.einsum("bhgd,bnhd->bhgn", queries, k.to(wide))
    return scores.flatten(1, 2) * _scale(q, scale)


def _output_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)


def _check(q: torch.Tensor, k: torch.Tensor) -> None:
    _checks.expect_float(NAME, "q", q)
    _checks.expect(q.ndim == 3, NAME, "q", "three dimensions [B, Hq, D]", tuple(q.shape))
    _checks.expect(k.ndim == 4, NAME, "k", "four dimensions [B, N, Hkv, D]", tuple(k.shape))
    batch, heads, features = q.shape
    fits = k.shape[0] == batch and k.shape[3] == features
    _checks.expect(fits, NAME, "k", f"shape ({batch}, N, Hkv, {features}) as q has it", tuple(k.shape))
    divides = k.shape[2] > 0 and heads % k.shape[2] == 0
    _checks.expect(divides, NAME, "k", f"a number of heads that divides q's {heads}", k.shape[2])
    if k.dtype != q.dtype:
        raise TypeError(f"{NAME}: k: expected the dtype of q, {q.dtype}, got {k.dtype}.")
    _checks.expect_alike(NAME, "k", k, "q", q)


_plans = _launch.PlanCache()
_Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _new_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], k.shape[1]), dtype=_output_dtype(q))


def _route(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> Any:
    """How every call of this signature is served: a function of q and k."""
    _check(q, k)
    if q.is_meta:
        return _new_scores
    refusal = _checks.refusal(q, k)
    if refusal is None and q.shape[-1] > _LONGEST_ROW:
        refusal = "inputs", f"the kernel takes up to {_LONGEST_ROW} features, not {q.shape[-1]}"
    return routing.triton_route(
        NAME, refusal, lambda: _plan(q, k, scale), lambda q, k: qk_scores_reference(q, k, scale)
    )


def _plan(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> _Scores:
    """What launches a kernel for this signature: a function of q and k."""
    out = _new_scores(q, k)
    if out.numel() == 0:
        return _new_scores
    if q.shape[-1] == 0:
        return lambda q, k: _new_scores(q, k).zero_()
    launch = _bind(q, k, out, _scale(q, scale))
    # empty_like costs half of empty on the host; this takes no memory.
    like = out.new_empty(()).expand(out.shape)

    def run(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(like)
        launch(q, k, out)
        return out

    return run


def _strides(x: torch.Tensor) -> list[int]:
    """The strides of ``x``; that of a dimension of size one, which is never taken, is 0."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]


def _bind(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float) -> Callable[..., None]:
    """The launcher of a signature.

    Strides are constants of the kernels, so that the compiler sees which
    addresses are multiples of 16 bytes; only that from one sequence to the next
    may grow from call to call, with the cache.
    """
    (batch, heads, features), (keys, kv_heads) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    (q_b, q_h, q_d), (k_b, k_n, k_h, k_d) = _strides(q), _strides(k)
    arch = _launch.architecture(q.get_device())
    config = _launch.choose(NAME, arch, itemsize=q.element_size(), rows=group, columns=batch * keys * kv_heads)
    # Tensor cores would round fp32 to TF32, and the interpreter's product of bf16 matrices is wrong.
    no_dot = q.element_size() > 2 or (INTERPRET and q.dtype == torch.bfloat16)
    row = triton.next_power_of_2(features)
    # The table counts keys of 128 features; a program takes as many elements of any other length.
    block = max(config["block"] * 128 // row, 1)
    constants: dict[str, Any] = {"Q_B": q_b, "Q_H": q_h, "Q_D": q_d, "K_N": k_n, "K_H": k_h, "K_D": k_d}
    constants |= {"HKV": kv_heads, "GROUP": group, "D": features, "BLOCK_D": row}
    bind = functools.partial(_launch.bind, config=config, num_warps=config["num_warps"])
    if keys == 1 or keys > _MOST_KEYS or batch > _GRID_LIMIT:
        rows = batch * keys * kv_heads
        constants |= {"K_B": k_b, "N": keys, "BLOCK": block}
        return bind(_rows_kernel, (triton.cdiv(rows, block),), (q, k, out), (rows, scale), constants)
    unit = math.gcd(k_b, 16)
    constants |= {"K_B_UNIT": unit, "ALONE": batch == 1, "EVICT": config["evict"]}
    tensors, scalars = (q, k, out), (keys, k_b // unit, scale)
    if config["kernel"] == "keys" or features > _LONGEST_DOT_ROW or no_dot:
        block = min(block, triton.next_power_of_2(keys))
        constants |= {"BLOCK": block}
        return bind(_keys_kernel, (kv_heads * triton.cdiv(keys, block), batch), tensors, scalars, constants)
    block, steps = max(block, 16), config["steps"]
    tile = min(max(triton.next_power_of_2(group), config["tile"]), _GROUP_TILE)
    constants |= {"STEPS": steps, "STAGES": config["stages"], "TILE": tile, "BLOCK": block, "BLOCK_D": max(row, 16)}
    grid = kv_heads * triton.cdiv(keys, block * steps), batch, triton.cdiv(group, tile)
    return bind(_group_kernel, grid, tensors, scalars, constants)


def _forward(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    key = (
        *(q.dtype, q.shape, q.stride(), q.device, q.data_ptr() & 15),
        *(k.dtype, k.shape, k.stride(), k.device, k.data_ptr() & 15),
        scale,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(q, k, scale))
    result: torch.Tensor = plan(q, k)
    return result


@torch.library.custom_op("triton_kernel_lab::qk_scores", mutates_args=())
def _qk_scores_op(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    return _forward(q, k, scale)


@_qk_scores_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    _check(q, k)
    return _new_scores(q, k)


def qk_scores(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Attention scores of one query a head against every cached key, before mask and softmax.

    ``scores[b, h, n] = scale * sum_d q[b, h, d] * k[b, n, h // (Hq // Hkv), d]``,
    Vaswani et al. 2017, equation 1; heads share keys as in Ainslie et al. 2023.
    Products and sums are formed in fp32, for fp32 inputs too (no TF32). A key
    is read once for all the queries of its group. Strides are followed in place,
    and the order of a sum follows them: the same values laid out otherwise may
    differ in the last bits, the same tensors never do.

    Args:
        q: float16, bfloat16 or float32 [B, Hq, D] with any strides.
        k: [B, N, Hkv, D] with any strides, of q's dtype and device. Hkv divides
            Hq; query head h meets key head ``h // (Hq // Hkv)``.
        scale: what multiplies the products, dimensionless; None for 1 / sqrt(D).

    Returns:
        A contiguous float32 tensor [B, Hq, N], never rounded to 16 bits;
        float64 for float64 inputs, which PyTorch computes. When a gradient is
        wanted the differentiable PyTorch form computes it.

    Raises:
        TypeError: q is not floating-point, or the dtypes differ.
        ValueError: the shapes do not fit, Hkv does not divide Hq or is zero, or
            the devices differ.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    if _checks.wants_grad(q, k):
        _check(q, k)
        _checks.note_autograd(NAME)
        return qk_scores_reference(q, k, scale)
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    if torch.compiler.is_compiling() or not {type(q), type(k)} <= _launch.PLAIN_TYPES or q.is_neg() or k.is_neg():
        result: torch.Tensor = _qk_scores_op(q, k, scale)
        return result
    return _forward(q, k, scale)
