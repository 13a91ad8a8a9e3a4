"""The yardstick of ``qk_scores``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Bucket, Case, Cost, Dims, Tensors, Variant, dtype_name, randn
from triton_kernel_lab.ops.qk_scores import qk_scores


def eager(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The scores as eager PyTorch forms them: one product of matrices in the inputs' dtype, then fp32."""
    queries = q.unflatten(1, (k.shape[2], -1))
    return torch.einsum("bhgd,bnhd->bhgn", queries, k).flatten(1, 2).float() / math.sqrt(q.shape[-1])


def oracle(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The formula in float64, one head of queries after the other."""
    group = q.shape[1] // k.shape[2]
    heads = [k[:, :, h // group].double() @ q[:, h].double().unsqueeze(-1) for h in range(q.shape[1])]
    return torch.cat(heads, -1).transpose(1, 2) * q.shape[-1] ** -0.5


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """q [B, Hq, D] and k [B, N, Hkv, D]."""
    batch, heads, kv_heads, keys, features = dims
    q = randn((batch, heads, features), dtype, generator)
    return q, randn((batch, keys, kv_heads, features), dtype, generator)


def _heads_first(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Keys in a cache [B, Hkv, N + 3, D] of which the first N are filled."""
    batch, heads, kv_heads, keys, features = dims
    q, k = inputs((batch, heads, keys + 3, kv_heads, features), dtype, generator)
    return q, k.transpose(1, 2)[:, :keys]


def _keys_last(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Keys in a cache [B, Hkv, D, N]; the queries of all sequences are one."""
    batch, heads, kv_heads, keys, features = dims
    q, _ = inputs((1, heads, kv_heads, 1, features), dtype, generator)
    k = randn((batch, kv_heads, features, keys), dtype, generator)
    return q.expand(batch, -1, -1), k.permute(0, 3, 1, 2)


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Each key and query in once, fp32 scores out; D multiply-adds and a scale a score.

    A group of queries in 16 bits is a product for the tensor cores; a single
    query is not.
    """
    batch, heads, kv_heads, keys, features = dims
    queries, cache, scores = batch * heads * features, batch * keys * kv_heads * features, batch * heads * keys
    return Cost(
        read={"q": queries * dtype.itemsize, "k": cache * dtype.itemsize},
        write={"scores": scores * 4},
        flop=scores * (2 * features + 1),
        unit=dtype_name(dtype) if heads > kv_heads else "float32",
    )


def _matmul(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A product with the keys as the weight of a linear layer; without a copy where there is one head of keys."""
    if k.shape[0] == k.shape[2] == 1:
        scores = F.linear(q[0], k[0, :, 0]).unsqueeze(0)
    else:
        scores = (q.unflatten(1, (k.shape[2], -1)) @ k.permute(0, 2, 3, 1)).flatten(1, 2)
    return scores.float() / math.sqrt(q.shape[-1])


@functools.cache
def _summed() -> Callable[..., torch.Tensor]:
    """A product and a sum in fp32, which the compiler makes one kernel."""

    def summed(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        queries = q.unflatten(1, (k.shape[2], -1)).float().unsqueeze(-2)
        keys = k.transpose(1, 2).float().unsqueeze(2)
        return (queries * keys).sum(-1).flatten(1, 2) / math.sqrt(q.shape[-1])

    compiled: Callable[..., torch.Tensor] = torch.compile(summed, fullgraph=True, dynamic=False)
    return compiled


def _keys(*blocks: int, evict: str = "") -> tuple[dict[str, int | str], ...]:
    """Configurations of 4 to 64 elements a thread at 128 features."""
    return tuple(
        {"kernel": "keys", "block": block, "num_warps": warps, "evict": evict}
        for block in blocks
        for warps in (1, 2, 4, 8, 16)
        if warps <= block <= 16 * warps
    )


def _groups(*steps: int, evict: str = "", tiles: tuple[int, ...] = (8,)) -> tuple[dict[str, int | str], ...]:
    """Configurations of 16 to 32 keys a warp; what is loaded a step ahead cannot be told how to be evicted."""
    return tuple(
        {"kernel": "group", "block": block, "num_warps": warps, "tile": tile, "steps": many, "evict": evict}
        | {"stages": min(many, 3)}
        for block in (16, 32, 64, 128)
        for warps in (1, 2, 4)
        for tile in tiles
        for many in steps
        if 16 * warps <= block <= 32 * warps or block == 16
    )


CASE = Case(
    name="qk_scores",
    cli_name="qk-scores",
    aliases=("qk-dot",),
    axes=("B", "Hq", "Hkv", "N", "D"),
    # R queries, each with one key of its own: as a shape of two numbers always meant it.
    short=(("R", "D"), lambda rows, features: (rows, 1, 1, 1, features)),
    variants=(
        Variant("default", inputs, qk_scores, eager, oracle),
        Variant("heads_first", _heads_first, qk_scores, eager, oracle, dims=((2, 8, 2, 300, 128), (1, 6, 3, 37, 80))),
        Variant("keys_last", _keys_last, qk_scores, eager, oracle, dims=((2, 2, 2, 256, 64), (3, 4, 1, 33, 72))),
        Variant(
            "unscaled",
            inputs,
            lambda q, k: qk_scores(q, k, 1.0),
            lambda q, k: eager(q, k) * math.sqrt(q.shape[-1]),
            lambda q, k: oracle(q, k) * math.sqrt(q.shape[-1]),
            dims=((1, 1, 1, 512, 128), (1, 3, 1, 17, 40)),
        ),
    ),
    cost=cost,
    timed=(
        (512, 1, 1, 1, 128),
        (2048, 1, 1, 1, 128),
        (1, 1, 1, 512, 128),
        (1, 1, 1, 2048, 128),
        (1, 1, 1, 32768, 128),
        (1, 1, 1, 1048576, 128),
        (8, 32, 8, 4096, 128),
    ),
    timed_dtypes=("float16",),
    checked=(
        (512, 1, 1, 1, 128),
        (2048, 1, 1, 1, 128),
        (1, 1, 1, 512, 128),
        (1, 1, 1, 2048, 128),
        (1, 1, 1, 32768, 128),
        (1, 1, 1, 1048576, 128),
        (8, 32, 8, 4096, 128),
        (2, 6, 2, 37, 80),
        (3, 4, 4, 300, 96),
        (2, 8, 1, 65, 256),
        (2, 9, 3, 50, 72),
        (1, 160, 2, 33, 40),
        (1, 4, 1, 1, 8),
    ),
    smoke=((2, 6, 2, 37, 80), (8, 1, 1, 1, 128), (1, 1, 1, 70, 128)),
    library={"torch.matmul": _matmul, "torch.compile of multiply and sum": lambda q, k: _summed()(q, k)},
    output_dtypes=(torch.float32,),
    # Rows of the table are queries a key head, columns are keys over all heads and sequences. A cache that the L2
    # cannot hold is read so as to leave it first; a smaller one may be read again from there.
    buckets=(
        Bucket(2, 1, 1 << 10, (1, 1, 1, 512, 128), _keys(2, 4, 8, 16)),
        Bucket(2, 1, 1 << 13, (1, 1, 1, 2048, 128), _keys(2, 4, 8, 16)),
        Bucket(2, 1, 1 << 17, (1, 1, 1, 32768, 128), _keys(8, 16, 32, 64)),
        Bucket(2, 1, None, (1, 1, 1, 1048576, 128), _keys(16, 32, 64, 128, evict="evict_first")),
        Bucket(2, 8, 1 << 14, (1, 32, 8, 512, 128), _groups(1)),
        Bucket(2, 8, 1 << 17, (2, 32, 8, 4096, 128), _groups(1, 2, 4)),
        Bucket(2, 8, None, (8, 32, 8, 4096, 128), _groups(1, evict="evict_first") + _groups(2, 4)),
        Bucket(2, None, 1 << 16, (1, 64, 4, 4096, 128), _groups(1, 2, tiles=(16,))),
        Bucket(2, None, None, (8, 128, 8, 4096, 128), _groups(1, 2, 4, tiles=(16,))),
        Bucket(4, None, 1 << 12, (1, 1, 1, 2048, 128), _keys(2, 4, 8, 16)),
        Bucket(4, None, 1 << 16, (1, 1, 1, 32768, 128), _keys(4, 8, 16, 32)),
        Bucket(4, None, None, (1, 1, 1, 262144, 128), _keys(8, 16, 32, 64, evict="evict_first")),
    ),
)
