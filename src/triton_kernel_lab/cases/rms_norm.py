"""The yardstick of ``rms_norm``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Bucket, Case, Cost, Dims, Outputs, Tensors, Variant, randn
from triton_kernel_lab.ops.rms_norm import rms_norm

EPS = 1e-6


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Llama's RMSNorm as eager PyTorch writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def _gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * (1.0 + weight.float())).to(x.dtype)


def oracle(x: torch.Tensor, weight: torch.Tensor | None = None, offset: float = 0.0) -> torch.Tensor:
    """The formula in float64, with no rounding in between."""
    wide = x.double()
    y = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * (weight.double() + offset)


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x [M, N] and weight [N]."""
    return randn(dims, dtype, generator), randn(dims[-1:], dtype, generator, mean=1.0, scale=0.1)


def _small_values(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Values about 1e-3, whose mean square is that of eps: a wrong eps shows nowhere else."""
    x, weight = inputs(dims, dtype, generator)
    return x * 2.0**-10, weight


def _wide_weight(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, weight = inputs(dims, dtype, generator)
    return x, weight.float()


def _every_second_column(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, weight = inputs((dims[0], 2 * dims[1]), dtype, generator)
    return x[:, ::2], weight[::2]


def _heads_of_packed_qkv(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, weight = inputs((dims[0], 8 * dims[1]), dtype, generator)
    heads = x[:, : 4 * dims[1]].view(dims[0], 4, dims[1])
    return heads, weight[: dims[1]]


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """x and weight in, y out; square, add, scale and weight are four operations an element."""
    rows, columns = dims
    size = dtype.itemsize
    return Cost(
        read={"x": rows * columns * size, "weight": columns * size},
        write={"y": rows * columns * size},
        flop=4 * rows * columns,
        unit="float32",
    )


def _rows(*choices: tuple[int, int]) -> list[dict[str, int | str]]:
    return [{"kernel": "rows", "rows": rows, "num_warps": warps} for rows, warps in choices]


def _streamed(held: tuple[int, ...], blocks: tuple[int, ...], warps: tuple[int, ...]) -> list[dict[str, int | str]]:
    return [
        {"kernel": "streamed", "block": block, "held": keep, "stream_stores": stores, "num_warps": count}
        for keep in held
        for block in blocks
        for count in warps
        for stores in (0, 1)
        # Fewer than 4 elements a thread waste lanes, more than 32 spill.
        if 128 * count <= block <= 1024 * count
    ]


BUCKETS = tuple(
    Bucket(itemsize, rows, columns, dims, tuple(configs))
    for itemsize, rows, columns, dims, configs in (
        (2, None, 256, (16384, 128), _rows((1, 1), (4, 1), (4, 2), (4, 4), (8, 4), (16, 4), (16, 8))),
        (2, None, 1024, (128, 1024), _rows((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (2, 8))),
        (2, 1024, 4096, (512, 4096), _rows((1, 4), (1, 8), (1, 16), (1, 32), (2, 8), (2, 16), (2, 32))),
        (
            2,
            None,
            4096,
            (2048, 4096),
            _rows((1, 4), (1, 8), (1, 16), (2, 16), (2, 32)) + _streamed((0,), (4096,), (8,)),
        ),
        (2, None, 32768, (16384, 8192), _rows((1, 8), (1, 16)) + _streamed((0,), (2048, 4096, 8192), (8, 16))),
        (2, None, None, (2048, 65536), _streamed((0, 16384, 32768), (4096, 8192, 16384), (16, 32))),
        (4, 1024, 4096, (512, 4096), _rows((1, 4), (1, 8), (1, 16), (1, 32))),
        (4, None, 4096, (2048, 4096), _rows((1, 4), (1, 8), (1, 16)) + _streamed((0,), (4096,), (8, 16))),
        (4, None, None, (4096, 16384), _streamed((0, 8192), (2048, 4096, 8192), (8, 16, 32))),
    )
)


def _liger() -> Callable[..., Outputs]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False)


def _flashinfer() -> Callable[..., Outputs]:
    from flashinfer.norm import rmsnorm

    return lambda x, w: rmsnorm(x, w, EPS)


def _quack() -> Callable[..., Outputs]:
    from quack.rmsnorm import rmsnorm

    return lambda x, w: rmsnorm(x, w, eps=EPS)


CASE = Case(
    name="rms_norm",
    cli_name="rmsnorm",
    axes=("M", "N"),
    variants=(
        Variant("default", inputs, lambda x, w: rms_norm(x, w, EPS), eager, oracle),
        Variant(
            "gemma",
            inputs,
            lambda x, w: rms_norm(x, w, EPS, casting="gemma", offset=1.0),
            _gemma,
            lambda x, w: oracle(x, w, 1.0),
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "no_weight",
            lambda *a: inputs(*a)[:1],
            lambda x: rms_norm(x, None, EPS),
            lambda x: eager(x, torch.ones_like(x[0])),
            oracle,
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "small_values",
            _small_values,
            lambda x, w: rms_norm(x, w, EPS),
            eager,
            oracle,
            dims=((128, 1024), (3, 5121)),
        ),
        Variant(
            "float32_weight",
            _wide_weight,
            lambda x, w: rms_norm(x, w, EPS),
            eager,
            oracle,
            dims=((128, 1024), (17, 1000)),
        ),
        Variant(
            "strided_columns",
            _every_second_column,
            lambda x, w: rms_norm(x, w, EPS),
            eager,
            oracle,
            dims=((64, 512), (3, 5121)),
        ),
        Variant(
            "packed_heads",
            _heads_of_packed_qkv,
            lambda x, w: rms_norm(x, w, EPS),
            eager,
            oracle,
            dims=((37, 128), (5, 80)),
        ),
    ),
    cost=cost,
    timed=((128, 1024), (512, 4096), (2048, 4096), (16384, 8192), (2048, 65536)),
    also=tuple(((16384, columns), "float32") for columns in (512, 2048, 8192)),
    checked=(
        (128, 1024),
        (512, 4096),
        (2048, 4096),
        (16384, 8192),
        (2048, 65536),
        (1, 1),
        (3, 63),
        (17, 1000),
        (3, 5121),
        (5, 32769),
        (2, 131073),
    ),
    smoke=((8, 128), (3, 63), (3, 5121)),
    library={"F.rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS)},
    peers={"Liger-Kernel": _liger, "FlashInfer": _flashinfer, "quack": _quack},
    buckets=BUCKETS,
)
