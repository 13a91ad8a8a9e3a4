"""The yardstick of the gradients of ``add_rms_norm``: ``rms_norm_backward``, given the gradient of the sum, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases import add_rms_norm as forward
from triton_kernel_lab.cases import rms_norm_backward as alone
from triton_kernel_lab.cases._base import (
    Baseline,
    Case,
    Cost,
    Dims,
    Outputs,
    Tensors,
    Variant,
    randn,
    through_autograd,
)
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward

EPS = forward.EPS
# As large as the mean square of the sums: a wrong eps shows nowhere else.
_LARGE_EPS = 1.0
Pair = tuple[torch.Tensor, torch.Tensor]


def eager(dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, **how: Any) -> Pair:
    """The gradients of the norm in fp32, then, as autograd adds what reaches the sum, an addition in its dtype."""
    dx, dweight = alone.eager(dnormed, summed, weight, **how)
    return dx + dsummed, dweight


def oracle(
    dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, **how: Any
) -> Pair:
    """The derivative in float64, with no rounding in between."""
    dx, dweight = alone.oracle(dnormed, summed, weight, **how)
    return dx + dsummed.double(), dweight


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """dnormed, dsummed and summed [M, N], and weight [N]."""
    return randn(dims, dtype, generator), *alone.inputs(dims, dtype, generator)


def _strided(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """A dnormed of stride 0, as ``sum`` leaves it, every second row of dsummed, every second column of the sum."""
    rows, columns = dims
    dnormed, dsummed, summed, weight = inputs((2 * rows, 2 * columns), dtype, generator)
    return dnormed[:1, :columns].expand(dims), dsummed[::2, :columns], summed[:rows, ::2], weight[::2]


def _run(
    dnormed: torch.Tensor,
    dsummed: torch.Tensor,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float = EPS,
    **how: Any,
) -> Outputs:
    dx, dweight = rms_norm_backward(dnormed, summed, weight, eps, plus=dsummed, **how)
    assert dx is not None
    assert dweight is not None
    return dx, dweight


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Both incoming gradients, the sum and weight in, both gradients out; an addition more than ``rms_norm_backward``.

    x and the residual have one gradient, which is written once.
    """
    rows, columns = dims
    size, vector = rows * columns * dtype.itemsize, columns * dtype.itemsize
    return Cost(
        read={"dnormed": size, "dsummed": size, "summed": size, "weight": vector},
        write={"dx": size, "dweight": vector},
        flop=12 * rows * columns,
        unit="float32",
    )


def _then_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, EPS), total


def _through(norm: Callable[..., Pair]) -> Baseline:
    """The backward pass of both results, where x is the sum already and the residual zeros without a gradient."""
    return through_autograd(lambda x, weight: norm(x, torch.zeros_like(x), weight), outputs=2)


def _fused() -> Baseline:
    """Torch's fused kernels, given the reciprocal roots that its forward pass keeps, then the addition."""

    def prepare(dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor) -> Tensors:
        _, rstd = torch.ops.aten._fused_rms_norm(summed, [summed.shape[-1]], weight, EPS)
        return dnormed, dsummed, summed, weight, rstd

    def call(
        dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> Outputs:
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            dnormed, summed, [summed.shape[-1]], rstd, weight, [True, True]
        )
        return dx.add_(dsummed), dweight

    return Baseline(call, prepare)


def _liger() -> Baseline:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward, fused_add_rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    def prepare(dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor) -> Tensors:
        _, _, rstd, *_ = fused_add_rms_norm_forward(summed, torch.zeros_like(summed), weight, EPS, 0.0, "llama")
        return dnormed, dsummed, summed, weight, rstd

    def call(
        dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> Outputs:
        # 0 is the casting "llama", 2 the stages of its forward pass; not over dnormed, as by default in
        # LigerFusedAddRMSNorm.
        settings = (*calculate_settings(summed.shape[-1]), 2)
        dx, _, dweight = fused_add_rms_norm_backward(
            dnormed, dsummed, summed, weight, rstd, 0.0, 0, *settings, False, True
        )
        return dx, dweight

    return Baseline(call, prepare)


def _quack() -> Baseline:
    from quack.rmsnorm import rmsnorm_bwd

    def prepare(dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return dnormed, dsummed, summed, weight, torch.rsqrt(summed.float().pow(2).mean(-1) + EPS)

    def call(
        dnormed: torch.Tensor, dsummed: torch.Tensor, summed: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
    ) -> Outputs:
        dx, dweight, *_ = rmsnorm_bwd(summed, weight, dnormed, rstd, dresidual_out=dsummed)
        return dx, dweight

    return Baseline(call, prepare)


# It has no buckets: its kernels are chosen by the launch table of rms_norm_backward, and tuned there.
CASE = Case(
    name="add_rms_norm_backward",
    cli_name="residual-rmsnorm-backward",
    aliases=("add-rms-norm-backward",),
    axes=("M", "N"),
    variants=(
        Variant("default", inputs, _run, eager, oracle),
        Variant(
            "gemma",
            inputs,
            lambda dn, ds, s, w: _run(dn, ds, s, w, casting="gemma", offset=1.0),
            lambda dn, ds, s, w: eager(dn, ds, s, w, casting="gemma", offset=1.0),
            lambda dn, ds, s, w: oracle(dn, ds, s, w, offset=1.0),
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "large_eps",
            inputs,
            lambda dn, ds, s, w: _run(dn, ds, s, w, _LARGE_EPS),
            lambda dn, ds, s, w: eager(dn, ds, s, w, eps=_LARGE_EPS),
            lambda dn, ds, s, w: oracle(dn, ds, s, w, eps=_LARGE_EPS),
            dims=((128, 1024), (7, 1)),
        ),
        Variant("strided", _strided, _run, eager, oracle, dims=((64, 512), (3, 5121))),
    ),
    cost=cost,
    timed=((2048, 4096), (16384, 8192)),
    timed_dtypes=("bfloat16",),
    checked=((2048, 4096), (16384, 8192), (3, 63), (17, 1000), (3, 5121), (5, 32769)),
    smoke=((8, 128), (3, 63), (3, 5121)),
    output_dtypes=(None, None),
    library={
        "aten._fused_rms_norm_backward + add": _fused(),
        "F.rms_norm .backward()": _through(_then_norm),
        "eager .backward()": _through(forward.eager),
    },
    peers={"Liger-Kernel": _liger, "quack": _quack},
    companions={".backward()": _through(lambda x, residual, w: add_rms_norm(x, residual, w, EPS))},
)
