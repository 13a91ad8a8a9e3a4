"""The yardstick of ``flash_attention``: dimensions are B, Lq, Lk, Hq, Hkv, D."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from triton_kernel_lab.cases._base import (
    Baseline,
    Bucket,
    Case,
    Cost,
    Dims,
    Outputs,
    Tensors,
    Variant,
    dtype_name,
    randn,
)
from triton_kernel_lab.ops.flash_attention import flash_attention

# Scores that the eager form holds at once, 4 GiB in 16 bits; the oracle an eighth of that, 2 GiB in float64.
_SCORES = 1 << 31


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """q, k and v as [heads, L, D] with keys repeated for their group, as many heads at once as memory bears."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
    flat = [x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v)]
    yield from zip(*(x.split(max(_SCORES // (q.shape[1] * k.shape[1]), 1)) for x in flat), strict=True)


def _hidden(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[Lq, Lk], true where a causal query does not see a key: the last query sees the last key."""
    rows, columns = q.shape[1], k.shape[1]
    return torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    outputs = []
    for q_heads, k_heads, v_heads in _heads(q, k, v):
        s = q_heads @ k_heads.transpose(1, 2) / math.sqrt(q.shape[3])
        if causal:
            s = s.masked_fill(_hidden(q_heads, k_heads), float("-inf"))
        p = torch.softmax(s, -1, dtype=torch.float32).to(q.dtype)
        if causal and q.shape[1] > k.shape[1]:
            p = p.nan_to_num(0.0)
        outputs.append(p @ v_heads)
    return torch.cat(outputs).view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as a Llama block writes it in eager PyTorch: scores, mask, softmax in fp32, values."""
    return _eager(q, k, v, causal=True)


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    (batch, queries, heads, width), keys = q.shape, k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    columns = torch.arange(keys, device=q.device)
    step = max(_SCORES // 8 // keys, 1)
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        k_head, v_head = (x[b, :, h * x.shape[2] // heads].double() for x in (k, v))
        for start in range(0, queries, step):
            rows = torch.arange(start, min(start + step, queries), device=q.device)
            # Causal row i sees the keys 0 .. i + keys - queries: the last of the first row is what both lengths leave.
            limit = rows + keys - queries if causal else torch.full_like(rows, keys)
            scores = (q[b, rows, h].double() / math.sqrt(width)) @ k_head.T
            weights = torch.softmax(scores.masked_fill_(columns > limit[:, None], -math.inf), 1)
            out[b, rows, h] = weights.masked_fill_(limit[:, None] < 0, 0.0) @ v_head
    return out


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, a head and a block of rows at a time."""
    return _oracle(q, k, v, causal=True)


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """q [B, Lq, Hq, D], k and v [B, Lk, Hkv, D], contiguous."""
    batch, queries, keys, heads, kv_heads, width = dims
    return (
        randn((batch, queries, heads, width), dtype, generator),
        randn((batch, keys, kv_heads, width), dtype, generator),
        randn((batch, keys, kv_heads, width), dtype, generator),
    )


def _packed(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """q, k and v side by side in one tensor, as a fused projection leaves them."""
    batch, queries, _, heads, kv_heads, width = dims
    both = randn((batch, queries, heads + 2 * kv_heads, width), dtype, generator)
    q, k, v = both.split((heads, kv_heads, kv_heads), 2)
    return q, k, v


def _cached(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Keys as [B, Hkv, L, D] of a longer cache, values as every second row of another."""
    batch, queries, keys, heads, kv_heads, width = dims
    q = randn((batch, queries, heads, width), dtype, generator)
    k = randn((batch, kv_heads, keys + 7, width), dtype, generator).transpose(1, 2)[:, :keys]
    return q, k, randn((batch, 2 * keys, kv_heads, width), dtype, generator)[:, ::2]


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Each input once, the output once; two products over the scores that causality leaves, which is about half."""
    batch, queries, keys, heads, kv_heads, width = dims
    # Row i counts the keys 0 .. i + keys - queries; rows before the first key count none.
    first = max(queries - keys, 0)
    seen = sum(i + keys - queries + 1 for i in (first, queries - 1)) * (queries - first) // 2
    size = dtype.itemsize
    return Cost(
        read={
            "q": batch * queries * heads * width * size,
            "k": batch * keys * kv_heads * width * size,
            "v": batch * keys * kv_heads * width * size,
        },
        write={"out": batch * queries * heads * width * size},
        flop=4 * batch * heads * width * seen,
        unit=dtype_name(dtype),
    )


def _sdpa(backend: Any) -> Callable[..., torch.Tensor]:
    """PyTorch's attention on one backend; its causal mask is top-left aligned, so only for Lq = Lk."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return call


def _flash_attn() -> Callable[..., Outputs]:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = attention(q, k, v, causal=True)
        # Releases differ in whether the log-sum-exp comes along.
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return call


def _flashinfer() -> Baseline:
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    planned: dict[torch.device, Any] = {}

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """The sequences one behind the other, and the schedule for their lengths."""
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=q.device), kv_layout="NHD"
        )
        ends = [
            torch.arange(0, (x.shape[0] + 1) * x.shape[1], x.shape[1], dtype=torch.int32, device=q.device)
            for x in (q, k)
        ]
        shape = {"num_qo_heads": q.shape[2], "num_kv_heads": k.shape[2], "head_dim_qk": q.shape[3]}
        wrapper.plan(*ends, **shape, causal=True, q_data_type=q.dtype, kv_data_type=k.dtype)
        planned[q.device] = wrapper
        return q, k, v

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = planned[q.device].run(*(x.flatten(0, 1) for x in (q, k, v)))
        return out.view(q.shape)

    return Baseline(call, prepare)


def _tiles(
    *choices: tuple[int, int, int, int], mib: tuple[int, ...] = (16,), precision: str = "ieee"
) -> tuple[dict[str, int | str], ...]:
    """Queries and keys of a tile, warps, loads in flight; MiB of keys and values that are worked on side by side."""
    return tuple(
        {
            "kernel": "blocks",
            "rows": rows,
            "block": block,
            "num_warps": warps,
            "stages": stages,
            "cluster_mib": size,
            "precision": precision,
        }
        for rows, block, warps, stages in choices
        for size in mib
    )


def _specialised(*choices: tuple[int, int, int]) -> tuple[dict[str, int | str], ...]:
    """Keys of a tile, tiles in flight, and whether a program may take two tiles of queries; for sm_90 alone."""
    return tuple(
        {"kernel": "specialised", "block": block, "stages": stages, "cluster_mib": 16, "pairs": pairs}
        for block, stages, pairs in choices
    )


# Queries stand under rows; features of a head, padded to a power of two, under columns.
_SMALL = _tiles((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), mib=(16, 4096))
_SPECIALISED = (*_SMALL, *_specialised((128, 2, 0), (128, 2, 1), (64, 4, 1)))
_LONG = (1, 4096, 4096, 16, 16, 64)
BUCKETS = (
    Bucket(2, None, 64, (4, 2048, 2048, 32, 32, 64), (*_SMALL, *_specialised((128, 2, 0), (128, 3, 0)))),
    Bucket(2, 4096, 128, (2, 4096, 4096, 32, 32, 128), _SPECIALISED),
    Bucket(2, None, 128, (1, 16384, 16384, 32, 32, 128), _SPECIALISED),
    Bucket(
        2,
        None,
        None,
        (4, 1024, 1024, 16, 16, 256),
        (*_tiles((64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2)), *_specialised((64, 2, 0))),
    ),
    Bucket(4, 4096, 64, _LONG, _tiles((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), precision="tf32x3")),
    Bucket(
        4, 4096, 128, (*_LONG[:5], 128), _tiles((64, 32, 4, 2), (128, 32, 8, 2), (64, 64, 8, 2), precision="tf32x3")
    ),
    Bucket(4, None, 64, (1, 8192, 8192, 16, 16, 64), _tiles((64, 32, 8, 2), (32, 32, 4, 2), (64, 64, 8, 2))),
    Bucket(4, None, None, (1, 1024, 1024, 16, 16, 256), _tiles((32, 16, 8, 2), (32, 32, 8, 2), (32, 16, 4, 2))),
)

TIMED = tuple(
    (batch, length, length, 32, 32, 128) for batch, length in ((4, 1024), (4, 2048), (2, 4096), (1, 8192), (1, 16384))
)

CASE = Case(
    name="flash_attention",
    cli_name="flash-attention",
    axes=("B", "Lq", "Lk", "Hq", "Hkv", "D"),
    variants=(
        Variant("causal", inputs, lambda q, k, v: flash_attention(q, k, v, causal=True), eager, oracle),
        Variant(
            "full",
            inputs,
            lambda q, k, v: flash_attention(q, k, v, causal=False),
            lambda q, k, v: _eager(q, k, v, causal=False),
            lambda q, k, v: _oracle(q, k, v, causal=False),
            dims=((1, 64, 64, 2, 1, 64), (2, 33, 70, 4, 2, 40)),
        ),
        Variant(
            "packed",
            _packed,
            lambda q, k, v: flash_attention(q, k, v, causal=True),
            eager,
            oracle,
            dims=((2, 70, 70, 4, 2, 64), (1, 33, 33, 3, 1, 80)),
        ),
        Variant(
            "cached",
            _cached,
            lambda q, k, v: flash_attention(q, k, v, causal=True),
            eager,
            oracle,
            dims=((2, 17, 90, 4, 2, 128), (1, 1, 65, 2, 2, 96)),
        ),
    ),
    cost=cost,
    timed=TIMED,
    also=(
        *(((1, length, length, 16, 16, 64), "float32") for length in (1024, 2048)),
        *(((1, length, length, 32, 32, 128), "bfloat16") for length in (1024, 2048, 4096)),
    ),
    checked=(
        *TIMED,
        (2, 333, 333, 8, 2, 128),
        (1, 300, 200, 4, 4, 128),
        (3, 1, 1000, 8, 2, 128),
        *((1, 100, 150, 2, 1, width) for width in (40, 96, 256)),
    ),
    smoke=((1, 33, 33, 2, 1, 16), (1, 5, 40, 2, 2, 40), (1, 20, 7, 1, 1, 64)),
    timed_dtypes=("bfloat16",),
    library={
        "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "SDPA efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    },
    peers={"flash-attn": _flash_attn, "FlashInfer": _flashinfer},
    buckets=BUCKETS,
)
