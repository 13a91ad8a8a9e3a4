"""Squared relu: y = max(x, 0)^2.

Formula: So et al., "Primer", 2021, arXiv:2109.08668, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton_kernel_lab.extend import checks, launching, routing

__all__ = ["squared_relu", "squared_relu_reference"]

NAME = "squared_relu"
TABLE = Path(__file__).parent / "launch" / f"{NAME}.json"


@triton.jit
def _squared_relu_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    """BLOCK elements a program."""
    # int64: an offset passes 2^31 before memory runs out.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # Not tl.maximum, which loses a NaN.
    positive = tl.where(x < 0.0, 0.0, x)
    tl.store(y_ptr + offsets, (positive * positive).to(y_ptr.dtype.element_ty), mask=mask)


def squared_relu_reference(x: torch.Tensor) -> torch.Tensor:
    """The differentiable PyTorch form of ``squared_relu``; fp64 inputs are computed in fp64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.relu(x.to(wide)).square().to(x.dtype)


_plans = launching.PlanCache()


def _plan(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What launches the kernel for this size, dtype and device: a function of x."""
    count = x.numel()
    if count == 0:
        return lambda x: torch.empty_like(x)
    arch = launching.architecture(x.get_device())
    config = launching.choose(TABLE, arch, itemsize=x.element_size(), rows=1, columns=count)
    launch = launching.bind(
        _squared_relu_kernel,
        (math.ceil(count / config["block"]),),
        (x, torch.empty_like(x)),
        (count,),
        {"BLOCK": config["block"]},
        config=config,
        num_warps=config["num_warps"],
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch(x, y)
        return y

    return run


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of the positive part of x, computed in fp32 and rounded once.

    Args:
        x: float16, bfloat16 or float32 of any shape; one that is not contiguous
            is copied first.

    Returns:
        A contiguous tensor with the shape and dtype of x. Where a gradient is
        wanted, or Triton does not serve the call, the PyTorch form computes it.

    Raises:
        TypeError: x is not floating-point.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    checks.expect_float(NAME, "x", x)
    if checks.wants_grad(x):
        checks.note_autograd(NAME)
        return squared_relu_reference(x)
    x = x.resolve_neg().contiguous()
    # All that a plan depends on: Triton compiles anew for another alignment.
    key = (x.numel(), x.dtype, x.device, x.data_ptr() % 16)
    plan = _plans.get(key)
    if plan is None:
        route = routing.triton_route(NAME, checks.refusal(x), lambda: _plan(x), squared_relu_reference)
        plan = _plans.keep(key, route)
    result: torch.Tensor = plan(x)
    return result
