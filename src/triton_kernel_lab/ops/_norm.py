"""What the operators that normalise a row by its root mean square share."""

from __future__ import annotations

import torch

from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["CASTINGS", "check", "normalise", "rms_norm_reference"]

CASTINGS = ("llama", "gemma")


@triton.jit
def normalise(
    x,
    rstd,
    weight,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
    dtype: tl.constexpr,
):
    """Normalise fp32 ``x`` and apply the weight, rounding where the casting says."""
    y = x * rstd
    if LLAMA:
        y = y.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        w = weight.to(tl.float32)
        # Without an offset the compiler sees a product of two 16-bit values and uses the packed multiply.
        if HAS_OFFSET:
            w += offset
        y = y * w
    return y.to(dtype)


def check(operator: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str) -> None:
    """Raise TypeError or ValueError unless x, weight, eps and casting fit together."""
    _checks.expect_float(operator, "x", x)
    _checks.expect(x.ndim >= 1, operator, "x", "at least one dimension", "a scalar")
    _checks.expect(casting in CASTINGS, operator, "casting", f"one of {CASTINGS}", repr(casting))
    _checks.expect(eps >= 0, operator, "eps", "a number that is not negative", eps)
    if weight is not None:
        _checks.expect_float(operator, "weight", weight)
        _checks.expect(
            weight.shape == x.shape[-1:], operator, "weight", f"shape {tuple(x.shape[-1:])}", tuple(weight.shape)
        )
        _checks.expect_alike(operator, "weight", weight, "x", x)


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    offset: float = 0.0,
) -> torch.Tensor:
    """The differentiable PyTorch form of ``rms_norm``; fp64 inputs are computed in fp64."""
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        y = y.to(x.dtype)
    if weight is not None:
        scale = weight.to(wide.dtype) + offset
        y = y.to(wide.dtype) * scale
    return y.to(x.dtype)
