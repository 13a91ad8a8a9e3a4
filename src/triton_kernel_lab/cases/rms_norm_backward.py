"""The yardstick of ``rms_norm_backward``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases import rms_norm as forward
from triton_kernel_lab.cases._base import (
    Baseline,
    Bucket,
    Case,
    Cost,
    Dims,
    Outputs,
    Tensors,
    Variant,
    randn,
    through_autograd,
)
from triton_kernel_lab.ops.rms_norm import rms_norm
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward

EPS = forward.EPS
# As large as the mean square: a wrong eps shows nowhere else. One column has next to no gradient without it.
_LARGE_EPS = 1.0
Pair = tuple[torch.Tensor, torch.Tensor]


def eager(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    casting: str = "llama",
    offset: float = 0.0,
    eps: float = EPS,
) -> Pair:
    """Both gradients in fp32 as eager PyTorch writes them, of the value that the casting rounds."""
    wide, g = x.float(), dy.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    scaled = g * (weight.float() + offset)
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    share = g * (normed.to(x.dtype).float() if casting == "llama" else normed)
    return dx.to(x.dtype), share.sum(0).to(weight.dtype)


def oracle(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, offset: float = 0.0, eps: float = EPS) -> Pair:
    """The derivative in float64, with no rounding in between."""
    wide, g = x.double(), dy.double()
    rstd = 1 / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    scaled = g * (weight.double() + offset)
    dx = scaled * rstd - wide * rstd.pow(3) * (scaled * wide).mean(-1, keepdim=True)
    return dx, (g * wide * rstd).sum(0)


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """dy and x [M, N], and weight [N]."""
    return randn(dims, dtype, generator), *forward.inputs(dims, dtype, generator)


def _one_row_for_all(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """A dy of stride 0, as ``sum`` leaves it, beside an x of every second column."""
    dy, x, weight = inputs((dims[0], 2 * dims[1]), dtype, generator)
    return dy[:1, : dims[1]].expand(dims), x[:, ::2], weight[::2]


def _run(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = EPS, **how: Any) -> Outputs:
    dx, dweight = rms_norm_backward(dy, x, weight, eps, **how)
    assert dx is not None
    assert dweight is not None
    return dx, dweight


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """dy, x and weight in, both gradients out; eleven operations an element.

    Two for the mean square, one to normalise, one to scale, two for the mean of
    the products, three for dx and two for the sum over the rows.
    """
    rows, columns = dims
    size, vector = rows * columns * dtype.itemsize, columns * dtype.itemsize
    return Cost(
        read={"dy": size, "x": size, "weight": vector},
        write={"dx": size, "dweight": vector},
        flop=11 * rows * columns,
        unit="float32",
    )


def _with_sums(config: dict[str, int | str]) -> tuple[dict[str, int | str], ...]:
    """A configuration with each way of adding up the parts of the weight's gradient."""
    return tuple(
        config | {"sum_columns": columns, "sum_rows": rows, "sum_warps": warps}
        for columns, rows, warps in ((32, 64, 8), (64, 32, 8), (16, 64, 4))
    )


def _rows(*choices: tuple[int, int]) -> tuple[dict[str, int | str], ...]:
    return tuple(
        config
        for rows, warps in choices
        for programs in (132, 264, 528)
        for stages in (1, 2, 3)
        for config in _with_sums(
            {"kernel": "rows", "rows": rows, "num_warps": warps, "programs": programs, "stages": stages}
        )
    )


def _tiles(*choices: tuple[int, int]) -> tuple[dict[str, int | str], ...]:
    return tuple(
        config
        for block, warps in choices
        for programs in (33, 66, 132)
        for stages in (1, 3)
        for config in _with_sums(
            {"kernel": "tiles", "block": block, "num_warps": warps, "programs": programs, "stages": stages}
        )
    )


def _fused() -> Baseline:
    """Torch's fused kernels, given the reciprocal roots that its forward pass keeps."""

    def prepare(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        _, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, EPS)
        return dy, x, weight, rstd

    def call(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> Outputs:
        both: Pair = torch.ops.aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rstd, weight, [True, True])
        return both

    return Baseline(call, prepare)


def _liger() -> Baseline:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    def prepare(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        _, _, rstd, *_ = rms_norm_forward(x, weight, EPS, 0.0, "llama", None)
        return dy, x, weight, rstd

    def call(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> Outputs:
        # 0 is the casting "llama"; over dy, as LigerRMSNorm does it by default.
        both: Pair = rms_norm_backward(dy, x, weight, rstd, 0.0, 0, *calculate_settings(x.shape[-1]), True, None)
        return both

    return Baseline(call, prepare, in_place=True)


def _quack() -> Baseline:
    from quack.rmsnorm import rmsnorm_bwd

    def prepare(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return dy, x, weight, torch.rsqrt(x.float().pow(2).mean(-1) + EPS)

    def call(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> Outputs:
        dx, dweight, *_ = rmsnorm_bwd(x, weight, dy, rstd)
        return dx, dweight

    return Baseline(call, prepare)


CASE = Case(
    name="rms_norm_backward",
    cli_name="rmsnorm-backward",
    axes=("M", "N"),
    variants=(
        Variant("default", inputs, _run, eager, oracle),
        Variant(
            "gemma",
            inputs,
            lambda dy, x, w: _run(dy, x, w, casting="gemma", offset=1.0),
            lambda dy, x, w: eager(dy, x, w, casting="gemma", offset=1.0),
            lambda dy, x, w: oracle(dy, x, w, offset=1.0),
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "large_eps",
            inputs,
            lambda dy, x, w: _run(dy, x, w, _LARGE_EPS),
            lambda dy, x, w: eager(dy, x, w, eps=_LARGE_EPS),
            lambda dy, x, w: oracle(dy, x, w, eps=_LARGE_EPS),
            dims=((128, 1024), (1, 1)),
        ),
        Variant("strided", _one_row_for_all, _run, eager, oracle, dims=((64, 512), (3, 5121))),
    ),
    cost=cost,
    timed=((2048, 4096), (16384, 8192)),
    timed_dtypes=("bfloat16",),
    checked=((2048, 4096), (16384, 8192), (3, 63), (17, 1000), (3, 5121), (5, 32769)),
    smoke=((8, 128), (3, 63), (3, 5121)),
    output_dtypes=(None, None),
    library={
        "aten._fused_rms_norm_backward": _fused(),
        "F.rms_norm .backward()": through_autograd(lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS)),
        "eager .backward()": through_autograd(forward.eager),
    },
    peers={"Liger-Kernel": _liger, "quack": _quack},
    companions={".backward()": through_autograd(lambda x, w: rms_norm(x, w, EPS))},
    buckets=(
        Bucket(2, None, 512, (16384, 512), _rows((4, 4), (8, 4))),
        Bucket(2, None, 1024, (16384, 1024), _rows((2, 4), (4, 4))),
        Bucket(2, None, 2048, (8192, 2048), _rows((1, 4), (2, 4))),
        Bucket(2, None, 4096, (2048, 4096), _rows((1, 4), (1, 8))),
        Bucket(2, None, 8192, (16384, 8192), _rows((1, 8), (1, 16))),
        Bucket(2, None, None, (4096, 16384), _tiles((2048, 4), (2048, 8), (4096, 8))),
        Bucket(4, None, 1024, (16384, 1024), _rows((1, 4), (2, 4))),
        Bucket(4, None, 4096, (2048, 4096), _rows((1, 8), (1, 16))),
        Bucket(4, None, None, (4096, 16384), _tiles((2048, 4), (2048, 8))),
    ),
)
