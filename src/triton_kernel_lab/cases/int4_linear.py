"""The yardstick of ``int4_linear``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Baseline, Bucket, Case, Cost, Dims, Tensors, Variant, dtype_name, randn
from triton_kernel_lab.ops.int4_linear import int4_linear, pack_int4, unpack_int4

GROUP = 128


def eager(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The layer in eager PyTorch: the weights are written out in x's dtype and multiplied."""
    return F.linear(x, unpack_int4(packed, scales, group, x.shape[-1]).to(x.dtype))


def _run(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return int4_linear(x, packed, scales, GROUP)


def oracle(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The formula in float64, each column's nibble looked up where the layout puts it."""
    column = torch.arange(x.shape[-1], device=x.device)
    tile, run, word = column // 128, column % 128 // 32, column % 32
    rows = packed.permute(0, 2, 1, 3).reshape(packed.shape[0] * 16, -1)[: scales.shape[0]]
    codes = rows.view(torch.uint8)[:, tile * 64 + 2 * word + run // 2] >> (4 * (run % 2)).to(torch.uint8)
    weights = (codes & 15).double().sub_(8.0).mul_(scales.double()[:, column // group])
    return x.double() @ weights.t()


def _inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator, group: int) -> Tensors:
    M, N, K = dims
    # Products of order one.
    packed, scales = pack_int4(randn((N, K), dtype, generator, scale=K**-0.5), group)
    return randn((M, K), dtype, generator), packed, scales


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """x [M, K], and weights [N, K] quantised in groups of 128."""
    return _inputs(dims, dtype, generator, GROUP)


def _strided(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Columns of x in memory, scales row by row and in fp32, packed as int8."""
    x, packed, scales = inputs(dims, dtype, generator)
    return x.t().contiguous().t(), packed.view(torch.int8), scales.float().contiguous()


def _grouped(name: str, group: int, dims: tuple[Dims, ...]) -> Variant:
    """Another group size."""
    return Variant(
        name,
        lambda dims, dtype, generator: _inputs(dims, dtype, generator, group),
        lambda x, packed, scales: int4_linear(x, packed, scales, group),
        lambda x, packed, scales: eager(x, packed, scales, group),
        lambda x, packed, scales: oracle(x, packed, scales, group),
        dims=dims,
    )


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """x, half a byte a weight and a scale a group in, y out; a multiply-add a weight and row of x."""
    M, N, K = dims
    return Cost(
        read={
            "x": M * K * dtype.itemsize,
            "packed": N * K // 2,
            "scales": N * -(-K // GROUP) * dtype.itemsize,
        },
        write={"y": M * N * dtype.itemsize},
        flop=2 * M * N * K,
        unit=dtype_name(dtype),
    )


def _dense() -> Baseline:
    """cuBLAS with the weights written out beforehand: four times the bytes."""
    return Baseline(
        call=F.linear,
        prepare=lambda x, packed, scales: (x, unpack_int4(packed, scales, GROUP, x.shape[-1]).to(x.dtype)),
    )


def _codes(packed: torch.Tensor, scales: torch.Tensor, k: int) -> torch.Tensor:
    """Nibbles [N, K], one a byte."""
    return (unpack_int4(packed, torch.ones_like(scales), GROUP, k) + 8).to(torch.uint8)


def _tinygemm() -> Baseline:
    """torch's own 4-bit product, bf16 alone, with its weights in its own tiles."""

    def prepare(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> Tensors:
        codes = _codes(packed, scales, x.shape[-1])
        tiles = torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
        # A scale and a zero point, which the symmetric weights have at 0.
        pairs = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
        return x, tiles, pairs

    return Baseline(call=lambda x, tiles, pairs: torch._weight_int4pack_mm(x, tiles, GROUP, pairs), prepare=prepare)


def _gemlite() -> Baseline:
    from gemlite.core import TORCH_TO_DTYPE, GemLiteLinearTriton, forward_functional

    # The layer's settings, which are the same for each input set.
    settings: dict[str, Any] = {}

    def prepare(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> Tensors:
        k, dtype = x.shape[-1], TORCH_TO_DTYPE[x.dtype]
        layer = GemLiteLinearTriton(4, GROUP, k, scales.shape[0], input_dtype=dtype, output_dtype=dtype)
        layer.pack(_codes(packed, scales, k), scales.contiguous().view(-1, 1), zeros=8, bias=None)
        settings["meta"] = layer.get_meta_args()
        return x, *layer.get_tensor_args()

    return Baseline(
        call=lambda x, *tensors: forward_functional(x, None, list(tensors), settings["meta"]), prepare=prepare
    )


def _streams(m_tiles: int, *choices: tuple[int, int, int, int]) -> Iterator[dict[str, int | str]]:
    """Configurations of the streaming kernel: tiles of rows a warp, warps along rows and K, tiles of K at once."""
    for n_tiles, n_warps, k_warps, unroll in choices:
        yield {
            "kernel": "stream",
            "m_tiles": m_tiles,
            "n_tiles": n_tiles,
            "n_warps": n_warps,
            "k_warps": k_warps,
            "unroll": unroll,
            "programs": 128,
        }


def _tiled(*choices: tuple[int, int, int, int]) -> Iterator[dict[str, int | str]]:
    for block_m, block_n, warps, stages in choices:
        yield {
            "kernel": "tile",
            "block_m": block_m,
            "block_n": block_n,
            "num_warps": warps,
            "stages": stages,
            "programs": 264,
        }


_NARROW = (
    *((1, 1, 2, 3), (1, 1, 2, 4), (1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 3), (1, 1, 4, 4), (1, 1, 8, 1), (1, 1, 8, 4)),
    *((2, 1, 4, 1), (2, 1, 4, 2), (2, 1, 8, 2), (2, 2, 2, 2)),
)
_WIDE = ((1, 1, 4, 2), (1, 4, 1, 1), (1, 4, 1, 2), (2, 1, 4, 1), (2, 2, 2, 1), (2, 4, 1, 1), (2, 4, 1, 2))
_TILES = tuple(
    _tiled((64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 4, 3), (128, 128, 8, 3))
)
_DENSE = tuple({"kernel": "dense", "block_n": rows, "num_warps": warps} for rows in (32, 64, 128) for warps in (4, 8))

TIMED = (
    (1, 1536, 1536),
    (1, 8960, 1536),
    (1, 4096, 4096),
    (1, 8192, 28672),
    # From one row of x to so many that four times the bytes of a dense product no longer matter.
    *((rows, 14336, 4096) for rows in (1, 4, 16, 64, 256)),
)

CASE = Case(
    name="int4_linear",
    cli_name="int4-linear",
    aliases=("int4-gemv",),
    axes=("M", "N", "K"),
    # A shape of two numbers always meant one row of x.
    short=(("N", "K"), lambda n, k: (1, n, k)),
    variants=(
        Variant("default", inputs, _run, eager, oracle),
        _grouped("groups_of_32", 32, ((1, 256, 4304), (3, 40, 300))),
        _grouped("groups_of_64", 64, ((16, 512, 1024), (17, 33, 100))),
        _grouped("groups_of_48", 48, ((2, 64, 1000), (70, 40, 200))),
        Variant(
            "strided",
            _strided,
            _run,
            eager,
            oracle,
            dims=((3, 512, 512), (20, 17, 130)),
        ),
    ),
    cost=cost,
    timed=TIMED,
    timed_dtypes=("bfloat16",),
    checked=(
        *TIMED,
        (1, 64, 28672),
        (7, 33, 2),
        (17, 100, 258),
        *((rows, 4096, 4096) for rows in (32, 64, 512)),
        (100, 1000, 1000),
    ),
    smoke=((1, 48, 256), (3, 33, 130), (17, 40, 256)),
    library={"torch._weight_int4pack_mm": _tinygemm(), "cuBLAS, 16-bit weights": _dense()},
    peers={"gemlite": _gemlite},
    # Rows of the table are those of x; its columns count weights.
    buckets=(
        Bucket(2, 8, 1 << 22, (1, 1536, 1536), tuple(_streams(1, *_NARROW))),
        Bucket(2, 8, 14 << 20, (1, 8960, 1536), tuple(_streams(1, *_NARROW))),
        Bucket(2, 8, 1 << 25, (1, 4096, 4096), tuple(_streams(1, *_NARROW))),
        Bucket(2, 8, 1 << 27, (1, 14336, 4096), tuple(_streams(1, *_NARROW))),
        Bucket(2, 8, None, (1, 8192, 28672), tuple(_streams(1, *_NARROW))),
        Bucket(2, 16, None, (16, 14336, 4096), tuple(_streams(2, *_WIDE))),
        Bucket(2, 32, None, (32, 14336, 4096), (*_streams(4, *_WIDE), *_TILES)),
        Bucket(2, 256, 1 << 25, (64, 4096, 4096), _TILES),
        Bucket(2, 64, None, (64, 14336, 4096), (*_streams(4, *_WIDE), *_TILES)),
        Bucket(2, 256, None, (256, 14336, 4096), (*_TILES, *_DENSE)),
        Bucket(2, None, None, (1024, 14336, 4096), (*_TILES, *_DENSE)),
        Bucket(4, None, None, (1, 4096, 4096), tuple(_streams(1, (1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 8, 1)))),
    ),
)
