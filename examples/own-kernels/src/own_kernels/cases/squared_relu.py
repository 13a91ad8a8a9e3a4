"""The yardstick of ``squared_relu``."""

from __future__ import annotations

import torch
from triton_kernel_lab.extend import Bucket, Case, Cost, Dims, Tensors, Variant, randn

from own_kernels.ops.squared_relu import TABLE, squared_relu


def eager(x: torch.Tensor) -> torch.Tensor:
    """The formula as a model writes it in eager PyTorch."""
    return torch.relu(x).square()


def oracle(x: torch.Tensor) -> torch.Tensor:
    """The formula in float64, with no rounding in between."""
    return x.double().clamp(min=0.0).square()


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x [M, N]."""
    return (randn(dims, dtype, generator),)


def _transposed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    return (randn(dims, dtype, generator).t(),)


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """x in, y out; compare and multiply are two operations an element."""
    elements = dims[0] * dims[1]
    size = elements * dtype.itemsize
    return Cost(read={"x": size}, write={"y": size}, flop=2 * elements, unit="float32")


CONFIGS = tuple({"block": block, "num_warps": warps} for block in (512, 1024, 2048, 4096) for warps in (2, 4, 8))

CASE = Case(
    name="squared_relu",
    cli_name="squared-relu",
    axes=("M", "N"),
    variants=(
        Variant("default", inputs, squared_relu, eager, oracle),
        Variant("transposed", _transposed, squared_relu, eager, oracle, dims=((64, 512), (3, 63))),
    ),
    cost=cost,
    timed=((128, 1024), (2048, 4096), (8192, 8192)),
    checked=((128, 1024), (2048, 4096), (8192, 8192), (1, 1), (3, 63), (17, 1000)),
    smoke=((8, 128), (1, 1), (3, 63)),
    # What `triton-kernel-lab tune squared_relu` fills the launch table from.
    buckets=(
        Bucket(2, None, 1 << 18, (128, 1024), CONFIGS),
        Bucket(4, None, None, (2048, 4096), CONFIGS),
    ),
    table=TABLE,
)
