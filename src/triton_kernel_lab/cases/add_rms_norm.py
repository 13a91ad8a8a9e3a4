"""The yardstick of ``add_rms_norm``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Baseline, Bucket, Case, Cost, Dims, Outputs, Tensors, Variant, randn
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm, add_rms_norm_

EPS = 1e-6
# As large as the mean square of the sums: a wrong eps shows nowhere else.
_LARGE_EPS = 16.0
Pair = tuple[torch.Tensor, torch.Tensor]


def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> Pair:
    """The residual addition and Llama's RMSNorm as eager PyTorch writes them."""
    total = x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype), total


def _gemma(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    total = x + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1.0 + weight.float())).to(x.dtype), total


def oracle(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    offset: float = 0.0,
    eps: float = EPS,
) -> Pair:
    """The formula in float64, of the sum that the contract rounds once and with no other rounding."""
    total = (x.double() + residual.double()).to(x.dtype).double()
    y = total / torch.sqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight.double() + offset), total


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x and residual [M, N], the residual of four times x's scale, and weight [N]."""
    x, residual = randn(dims, dtype, generator), randn(dims, dtype, generator, scale=4.0)
    return x, residual, randn(dims[-1:], dtype, generator, mean=1.0, scale=0.1)


def _wide_weight(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, residual, weight = inputs(dims, dtype, generator)
    return x, residual, weight.float()


def _strided_residual(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """A residual that is every second column of another tensor, beside a dense x."""
    x, _, weight = inputs(dims, dtype, generator)
    return x, randn((dims[0], 2 * dims[1]), dtype, generator)[:, ::2], weight


def _rows_of_one_buffer(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x and residual as alternating rows of one buffer."""
    both = randn((dims[0], 2, dims[1]), dtype, generator)
    return both[:, 0], both[:, 1], randn(dims[-1:], dtype, generator, mean=1.0, scale=0.1)


def _in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    """The in-place form on copies, so that the inputs stay; their strides are kept."""
    return add_rms_norm_(x.clone(), residual.clone(), weight, EPS)


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """x, residual and weight in, both results out; add, square, sum, scale and weight are five operations."""
    rows, columns = dims
    size = rows * columns * dtype.itemsize
    return Cost(
        read={"x": size, "residual": size, "weight": columns * dtype.itemsize},
        write={"normed": size, "summed": size},
        flop=5 * rows * columns,
        unit="float32",
    )


def _rows(*choices: tuple[int, int]) -> tuple[dict[str, int | str], ...]:
    return tuple(
        {"kernel": "rows", "rows": rows, "num_warps": warps, "ordered": ordered}
        for rows, warps in choices
        for ordered in (0, 1)
    )


def _streamed(*choices: tuple[int, int]) -> tuple[dict[str, int | str], ...]:
    return tuple({"kernel": "streamed", "block": block, "num_warps": warps} for block, warps in choices)


def _liger() -> Callable[..., Outputs]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, residual, w: LigerFusedAddRMSNormFunction.apply(x, residual, w, EPS, 0.0, "llama", False)


def _flashinfer() -> Baseline:
    from flashinfer.norm import fused_add_rmsnorm

    def call(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> Pair:
        fused_add_rmsnorm(x, residual, w, EPS)
        return x, residual

    return Baseline(call, in_place=True)


def _quack() -> Callable[..., Outputs]:
    from quack.rmsnorm import rmsnorm

    return lambda x, residual, w: rmsnorm(x, w, residual=residual, eps=EPS, prenorm=True)


def _then_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    total = x + residual
    return F.rms_norm(total, (x.shape[-1],), weight, EPS), total


CASE = Case(
    name="add_rms_norm",
    cli_name="add-rms-norm",
    aliases=("residual-rmsnorm",),
    axes=("M", "N"),
    variants=(
        Variant("default", inputs, lambda x, r, w: add_rms_norm(x, r, w, EPS), eager, oracle),
        Variant("in_place", inputs, _in_place, eager, oracle, dims=((128, 1024), (3, 5121), (2, 40000))),
        Variant(
            "gemma",
            inputs,
            lambda x, r, w: add_rms_norm(x, r, w, EPS, casting="gemma", offset=1.0),
            _gemma,
            lambda x, r, w: oracle(x, r, w, offset=1.0),
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "no_weight",
            lambda *a: inputs(*a)[:2],
            lambda x, r: add_rms_norm(x, r, None, EPS),
            lambda x, r: eager(x, r, torch.ones_like(x[0])),
            oracle,
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "large_eps",
            inputs,
            lambda x, r, w: add_rms_norm(x, r, w, _LARGE_EPS),
            lambda x, r, w: eager(x, r, w, _LARGE_EPS),
            lambda x, r, w: oracle(x, r, w, eps=_LARGE_EPS),
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "float32_weight",
            _wide_weight,
            lambda x, r, w: add_rms_norm(x, r, w, EPS),
            eager,
            oracle,
            dims=((128, 1024), (17, 1000)),
        ),
        Variant(
            "strided_residual",
            _strided_residual,
            lambda x, r, w: add_rms_norm(x, r, w, EPS),
            eager,
            oracle,
            dims=((64, 512), (3, 5121)),
        ),
        Variant(
            "interleaved_rows",
            _rows_of_one_buffer,
            lambda x, r, w: add_rms_norm(x, r, w, EPS),
            eager,
            oracle,
            dims=((64, 512), (5, 80)),
        ),
    ),
    cost=cost,
    timed=((4, 1536), (64, 4096), (2048, 4096), (16384, 8192)),
    timed_dtypes=("bfloat16",),
    checked=(
        (4, 1536),
        (64, 4096),
        (2048, 4096),
        (16384, 8192),
        (1, 1),
        (3, 63),
        (17, 1000),
        (3, 5121),
        (5, 32769),
        (2, 131073),
    ),
    smoke=((4, 1536), (3, 63), (3, 5121)),
    output_dtypes=(None, None),
    library={"F.rms_norm": _then_norm},
    peers={"Liger-Kernel": _liger, "FlashInfer": _flashinfer, "quack": _quack},
    buckets=(
        Bucket(2, None, 256, (16384, 128), _rows((4, 2), (4, 4), (8, 4), (8, 8), (16, 8))),
        Bucket(2, None, 1024, (128, 1024), _rows((1, 2), (1, 4), (2, 4), (2, 8), (4, 8))),
        Bucket(2, 16, 2048, (4, 1536), _rows((1, 2), (1, 4), (1, 8), (1, 16))),
        Bucket(2, 256, 4096, (64, 4096), _rows((1, 4), (1, 8), (1, 16), (1, 32))),
        Bucket(2, None, 4096, (2048, 4096), _rows((1, 4), (1, 8), (1, 16))),
        Bucket(2, None, 16384, (16384, 8192), _rows((1, 8), (1, 16), (1, 32))),
        Bucket(2, None, None, (2048, 65536), _streamed((4096, 16), (8192, 16), (8192, 32), (16384, 32))),
        Bucket(4, None, 8192, (2048, 4096), _rows((1, 4), (1, 8), (1, 16))),
        Bucket(4, None, None, (4096, 16384), _streamed((2048, 8), (4096, 16), (8192, 32))),
    ),
)
