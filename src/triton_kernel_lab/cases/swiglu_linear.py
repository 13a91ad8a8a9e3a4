"""The yardstick of ``swiglu_linear``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Baseline, Bucket, Case, Cost, Dims, Tensors, Variant, dtype_name, randn
from triton_kernel_lab.ops.swiglu import swiglu_packed
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear


def eager(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """The first half of a Llama MLP in eager PyTorch: two linears and the gate."""
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def oracle(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    """The formula in float64, with no rounding in between."""
    wide = x.double()
    gate, up = wide @ w_gate.double().t(), wide @ w_up.double().t()
    return gate / (1.0 + torch.exp(-gate)) * up


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x [M, K], w_gate [N, K] and w_up [N, K], scaled so that the products are of order one."""
    M, N, K = dims
    weights = (randn((N, K), dtype, generator, scale=K**-0.5) for _ in range(2))
    return randn((M, K), dtype, generator), *weights


def _transposed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    x, w_gate, w_up = inputs(dims, dtype, generator)
    return x.t().contiguous().t(), w_gate.t().contiguous().t(), w_up


def _halves(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    M, N, K = dims
    both = randn((2 * N, K), dtype, generator, scale=K**-0.5)
    return randn((M, K), dtype, generator), both[:N], both[N:]


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """x and both weights in, y out; two products of 2 M N K operations each."""
    M, N, K = dims
    weight = N * K * dtype.itemsize
    return Cost(
        read={"x": M * K * dtype.itemsize, "w_gate": weight, "w_up": weight},
        write={"y": M * N * dtype.itemsize},
        flop=4 * M * N * K,
        unit=dtype_name(dtype),
    )


def _packed() -> Baseline:
    """One product with both weights stacked, then the gate of this project: cuBLAS and one pass more."""
    return Baseline(
        call=lambda x, both: swiglu_packed(F.linear(x, both)),
        prepare=lambda x, w_gate, w_up: (x, torch.cat((w_gate, w_up))),
    )


Config = Mapping[str, int | str]


def _vector() -> Iterator[Config]:
    for block_n, block_k, warps in ((1, 512, 2), (1, 512, 4), (1, 1024, 4), (2, 512, 4), (2, 1024, 4), (4, 512, 4)):
        for stages in (1, 3):
            yield {
                "kernel": "vector",
                "block_n": block_n,
                "block_k": block_k,
                "num_warps": warps,
                "num_stages": stages,
            }


def _streamed() -> Iterator[Config]:
    for block_n, block_k, stages in ((64, 64, 5), (64, 128, 3), (64, 128, 4), (128, 64, 4), (32, 128, 4), (32, 256, 3)):
        for split in (1, 2, 4):
            yield {
                "kernel": "streamed",
                "block_n": block_n,
                "block_k": block_k,
                "num_warps": 4,
                "num_stages": stages,
                "split": split,
            }


def _tiled(kernel: str, blocks: tuple[tuple[int, int, int, int, int], ...]) -> Iterator[Config]:
    for block_m, block_n, block_k, warps, stages in blocks:
        yield {
            "kernel": kernel,
            "block_m": block_m,
            "block_n": block_n,
            "block_k": block_k,
            "group": 8,
            "num_warps": warps,
            "num_stages": stages,
            **({"per_processor": 1 if stages > 3 else 2, "cuts": 8} if kernel == "described" else {}),
        }


_STREAMED = tuple(_streamed())
_TILES = (
    *_tiled("described", ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (256, 64, 64, 8, 3))),
    *_tiled("tiled", ((128, 128, 64, 8, 3), (128, 64, 64, 8, 4))),
)
# Rows on both sides of where stacking the weights for cuBLAS begins to pay.
_TIMED = (
    (1, 14336, 4096),
    (1, 8960, 1536),
    (16, 14336, 4096),
    (16, 8960, 1536),
    (64, 14336, 4096),
    (128, 14336, 4096),
    (512, 14336, 4096),
    (512, 8960, 1536),
    (2048, 14336, 4096),
    (2048, 8960, 1536),
)

CASE = Case(
    name="swiglu_linear",
    cli_name="swiglu-linear",
    axes=("M", "N", "K"),
    variants=(
        Variant("default", inputs, swiglu_linear, eager, oracle),
        Variant("transposed", _transposed, swiglu_linear, eager, oracle, dims=((3, 40, 48), (20, 40, 48))),
        Variant("halves_of_one", _halves, swiglu_linear, eager, oracle, dims=((1, 48, 64), (17, 48, 64))),
    ),
    cost=cost,
    timed=_TIMED,
    checked=(
        *_TIMED,
        (1, 1, 1),
        (3, 37, 63),
        (65, 100, 1000),
        (256, 256, 512),
    ),
    smoke=((2, 32, 64), (1, 37, 63), (17, 40, 80)),
    timed_dtypes=("bfloat16",),
    library={"cuBLAS packed + Triton swiglu": _packed()},
    # Rows are those of x, columns the outputs.
    buckets=(
        Bucket(2, 1, 9 << 10, (1, 8960, 1536), (*_vector(), *_STREAMED)),
        Bucket(2, 1, None, (1, 14336, 4096), (*_vector(), *_STREAMED)),
        Bucket(2, 16, 9 << 10, (16, 8960, 1536), _STREAMED),
        Bucket(2, 16, None, (16, 14336, 4096), _STREAMED),
        Bucket(2, 64, None, (64, 14336, 4096), _STREAMED),
        Bucket(2, 512, None, (512, 14336, 4096), _TILES),
        Bucket(2, None, None, (2048, 14336, 4096), _TILES),
        Bucket(4, 1, None, (1, 8960, 1536), tuple(config for config in _vector() if int(config["block_k"]) <= 512)),
        Bucket(4, None, None, (256, 8960, 1536), tuple(_tiled("tiled", ((64, 32, 32, 4, 2), (64, 64, 32, 8, 2))))),
    ),
)
