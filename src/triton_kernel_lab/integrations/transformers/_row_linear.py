"""A dense linear layer of one row: a sum of products that only the bytes of the weight hold up.

cuBLAS multiplies one row by matrix kernels or by splitting the sum into two launches; here each weight is
read once, by one launch, in the order in which memory has it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["row_linear"]

NAME = "row_linear"
_CONFIG = {"block_n": 2, "bytes": 2048, "num_warps": 4}


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """BLOCK_N outputs a program, multiplied and summed in fp32."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # A tail that reads the last row again needs no mask; it is not stored.
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    columns = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=1):
        c = start + columns
        inside = (c < K) | EVEN
        w = tl.load(rows + c[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + c, mask=inside, other=0.0)
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


_plans = _launch.PlanCache()


def _plan(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """What launches the kernel for this signature."""
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    launch = _launch.bind(
        _row_kernel,
        (math.ceil(n / _CONFIG["block_n"]),),
        (x, weight, x if bias is None else bias, x.new_empty(shape)),
        (n,),
        {
            "K": k,
            "BLOCK_N": _CONFIG["block_n"],
            "BLOCK_K": min(_CONFIG["bytes"] // x.element_size(), triton.next_power_of_2(k)),
            "HAS_BIAS": bias is not None,
        },
        config=_CONFIG,
        num_warps=_CONFIG["num_warps"],
    )

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.new_empty(shape)
        launch(x, weight, x if bias is None else bias, y)
        return y

    return run


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, by one launch where x is one row and everything lies densely. No gradient.

    Args:
        x: float16, bfloat16 or float32 [..., K].
        weight: [N, K] of x's dtype.
        bias: [N] of x's dtype, or None.

    Returns:
        [..., N] of x's dtype, for one row summed in fp32 and rounded once.

    Raises:
        RuntimeError: as ``linear``, where shapes or dtypes do not fit.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does not serve a call of one row.
    """
    row = x.numel() == weight.shape[-1] == x.shape[-1] > 0
    dense = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if not (row and dense and x.dtype == weight.dtype and weight.shape[0]):
        return F.linear(x, weight, bias)
    tensors = (x, weight) if bias is None else (x, weight, bias)
    key = tuple((each.dtype, each.shape, each.device, each.data_ptr() & 15) for each in tensors)
    plan = _plans.get(key)
    if plan is None:
        route = routing.triton_route(NAME, _checks.refusal(*tensors), lambda: _plan(x, weight, bias), F.linear)
        plan = _plans.keep(key, route)
    result: torch.Tensor = plan(x, weight, bias)
    return result
