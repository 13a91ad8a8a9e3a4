"""The yardstick of ``swiglu``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Bucket, Case, Cost, Dims, Outputs, Tensors, Variant, randn
from triton_kernel_lab.ops.swiglu import swiglu, swiglu_packed


def eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation as a Llama MLP writes it in eager PyTorch."""
    return F.silu(gate) * up


def oracle(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formula in float64, with no rounding in between."""
    wide = gate.double()
    return wide / (1.0 + torch.exp(-wide)) * up.double()


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """gate [M, F] and up [M, F]."""
    return randn(dims, dtype, generator, scale=2.0), randn(dims, dtype, generator)


def _packed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    return (randn((dims[0], 2 * dims[1]), dtype, generator),)


def _interleaved(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    (both,) = _packed(dims, dtype, generator)
    return both[:, ::2], both[:, 1::2]


def _transposed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    gate, up = inputs((dims[0] * 4, dims[1]), dtype, generator)
    return gate.view(4, dims[0], dims[1]).transpose(0, 1), up.view(dims[0], 4, dims[1])


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Both halves in, y out; exp, add, divide and multiply are four operations an element."""
    elements = dims[0] * dims[1]
    size = elements * dtype.itemsize
    return Cost(read={"gate": size, "up": size}, write={"y": size}, flop=4 * elements, unit="float32")


CONFIGS = tuple(
    {"block": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096, 8192)
    for warps in (1, 2, 4, 8, 16, 32)
    # 4 to 32 elements a thread.
    if 128 * warps <= block <= 1024 * warps
)


def _liger() -> Callable[..., Outputs]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda gate, up: LigerSiLUMulFunction.apply(gate, up)


CASE = Case(
    name="swiglu",
    cli_name="swiglu",
    axes=("M", "F"),
    variants=(
        Variant("default", inputs, swiglu, eager, oracle),
        Variant(
            "packed",
            _packed,
            swiglu_packed,
            lambda x: eager(*x.chunk(2, -1)),
            lambda x: oracle(*x.chunk(2, -1)),
            dims=((128, 1024), (17, 1000), (3, 5121)),
        ),
        Variant("interleaved", _interleaved, swiglu, eager, oracle, dims=((64, 512), (3, 63))),
        Variant("transposed", _transposed, swiglu, eager, oracle, dims=((16, 128), (3, 80))),
    ),
    cost=cost,
    timed=((128, 1024), (512, 4096), (2048, 4096), (8192, 14336)),
    also=tuple(((16384, columns), "float32") for columns in (512, 4096)),
    checked=((128, 1024), (512, 4096), (2048, 4096), (8192, 14336), (1, 1), (3, 63), (17, 1000), (3, 5121)),
    smoke=((8, 128), (3, 63), (3, 5121)),
    # FlashInfer's silu_and_mul takes packed halves only, which are other inputs than these.
    peers={"Liger-Kernel": _liger},
    # A dense tensor is launched as one long row: its size stands under columns.
    buckets=(
        Bucket(2, None, 1 << 19, (128, 1024), CONFIGS),
        Bucket(2, None, 1 << 22, (512, 4096), CONFIGS),
        Bucket(2, None, 1 << 24, (2048, 4096), CONFIGS),
        Bucket(2, None, None, (8192, 14336), CONFIGS),
        Bucket(4, None, None, (8192, 14336), CONFIGS),
    ),
)
