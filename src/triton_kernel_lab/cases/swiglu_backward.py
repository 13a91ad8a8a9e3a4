"""The yardstick of ``swiglu_backward``."""

from __future__ import annotations

import torch

from triton_kernel_lab.cases import swiglu as forward
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
from triton_kernel_lab.ops.swiglu import swiglu
from triton_kernel_lab.ops.swiglu_backward import swiglu_backward, swiglu_packed_backward

Pair = tuple[torch.Tensor, torch.Tensor]


def eager(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """Both gradients in fp32 as eager PyTorch writes them."""
    g, wide = dy.float(), gate.float()
    opened = torch.sigmoid(wide)
    dgate = g * up.float() * opened * (1.0 + wide * (1.0 - opened))
    return dgate.to(gate.dtype), (g * (wide * opened)).to(gate.dtype)


def oracle(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """The derivative in float64, with no rounding in between: silu'(x) = (1 + e + x e) / (1 + e)^2 with e = exp(-x)."""
    g, wide = dy.double(), gate.double()
    e = torch.exp(-wide)
    return g * up.double() * (1.0 + e + wide * e) / (1.0 + e).square(), g * wide / (1.0 + e)


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """dy, gate and up [M, F]."""
    return randn(dims, dtype, generator), *forward.inputs(dims, dtype, generator)


def _packed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    rows, columns = dims
    return randn(dims, dtype, generator), randn((rows, 2 * columns), dtype, generator)


def _one_row_for_all(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """A dy of stride 0, as ``sum`` leaves it, beside a gate of every second column."""
    dy, gate, up = inputs((dims[0], 2 * dims[1]), dtype, generator)
    return dy[:1, : dims[1]].expand(dims), gate[:, ::2], up[:, dims[1] :]


def _run(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Outputs:
    dgate, dup = swiglu_backward(dy, gate, up)
    assert dgate is not None
    assert dup is not None
    return dgate, dup


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """dy and both halves in, both gradients out; eleven operations an element.

    Three for the sigmoid (exp, add, divide), six for dgate and two for dup.
    """
    elements = dims[0] * dims[1]
    size = elements * dtype.itemsize
    return Cost(
        read={"dy": size, "gate": size, "up": size},
        write={"dgate": size, "dup": size},
        flop=11 * elements,
        unit="float32",
    )


def _liger() -> Baseline:
    from liger_kernel.ops.swiglu import swiglu_backward as theirs

    # Over gate and up, as LigerSiLUMulFunction does it.
    return Baseline(lambda dy, gate, up: theirs(gate, up, dy), in_place=True)


CASE = Case(
    name="swiglu_backward",
    cli_name="swiglu-backward",
    axes=("M", "F"),
    variants=(
        Variant("default", inputs, _run, eager, oracle),
        Variant(
            "packed",
            _packed,
            lambda dy, x: swiglu_packed_backward(dy, x).chunk(2, -1),
            lambda dy, x: eager(dy, *x.chunk(2, -1)),
            lambda dy, x: oracle(dy, *x.chunk(2, -1)),
            dims=((128, 1024), (17, 1000), (3, 5121)),
        ),
        Variant("strided", _one_row_for_all, _run, eager, oracle, dims=((64, 512), (3, 63))),
    ),
    cost=cost,
    timed=((2048, 4096), (16384, 8192)),
    timed_dtypes=("bfloat16",),
    checked=((2048, 4096), (16384, 8192), (1, 1), (3, 63), (17, 1000), (3, 5121)),
    smoke=((8, 128), (3, 63), (3, 5121)),
    output_dtypes=(None, None),
    library={"eager .backward()": through_autograd(forward.eager)},
    peers={"Liger-Kernel": _liger},
    companions={".backward()": through_autograd(swiglu)},
    # A dense tensor is launched as one long row: its size stands under columns.
    buckets=(
        Bucket(2, None, 1 << 19, (128, 1024), forward.CONFIGS),
        Bucket(2, None, 1 << 24, (2048, 4096), forward.CONFIGS),
        Bucket(2, None, None, (16384, 8192), forward.CONFIGS),
        Bucket(4, None, None, (16384, 8192), forward.CONFIGS),
    ),
)
