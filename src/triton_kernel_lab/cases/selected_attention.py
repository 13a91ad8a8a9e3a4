"""The yardstick of ``selected_attention``."""

from __future__ import annotations

import math

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
from triton_kernel_lab.ops.selected_attention import selected_attention, selected_attention_paged

_PAGE = 16


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gather, score, softmax in fp32, weigh: as eager PyTorch writes decode attention over chosen rows."""
    kv_heads = k.shape[2]
    if indices.ndim == 2:
        indices = indices.unsqueeze(1).expand(-1, kv_heads, -1)
    rows = indices.clamp_min(0).long().unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])
    keys, values = (x.transpose(1, 2).gather(2, rows) for x in (k, v))
    scores = q.unflatten(1, (kv_heads, -1)) @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill((indices < 0).unsqueeze(2), -math.inf)
    # No row at all leaves NaN.
    weights = scores.softmax(-1, dtype=torch.float32).nan_to_num(0.0).to(q.dtype)
    return (weights @ values).flatten(1, 2)


def _eager_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The LSE in the dtype of the scores, of a choice that is all there."""
    if indices.ndim == 2:
        indices = indices.unsqueeze(1).expand(-1, k.shape[2], -1)
    rows = indices.long().unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])
    keys = k.transpose(1, 2).gather(2, rows)
    scores = q.unflatten(1, (k.shape[2], -1)) @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.float().logsumexp(-1).flatten(1, 2).to(q.dtype)


def _counts(k: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """How often each row of each head is chosen: float64 [B, Hkv, N]."""
    if indices.ndim == 2:
        indices = indices.unsqueeze(1).expand(-1, k.shape[2], -1)
    counts = torch.zeros(k.shape[0], k.shape[2], k.shape[1], dtype=torch.float64, device=k.device)
    return counts.scatter_add_(2, indices.clamp_min(0).long(), (indices >= 0).double())


def _weights(q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of every row of the cache before division, and the maximal score: [B, Hkv, G, N], [.., 1]."""
    keys = k.double().permute(0, 2, 3, 1)
    scores = q.double().unflatten(1, (k.shape[2], -1)) @ keys * q.shape[-1] ** -0.5
    counts = _counts(k, indices).unsqueeze(2)
    top = scores.masked_fill(counts == 0, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    return counts * torch.exp(torch.minimum(scores - top, torch.zeros_like(top))), top


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The formula in float64 over the whole cache, each row with the number of times that it is chosen."""
    weights, _ = _weights(q, k, indices)
    total = weights.sum(-1, keepdim=True)
    values = v.double().transpose(1, 2)
    return (weights @ values / total.masked_fill(total == 0, 1.0)).flatten(1, 2)


def _lse_oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    weights, top = _weights(q, k, indices)
    return (top + weights.sum(-1, keepdim=True).log()).flatten(1)


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """q [B, Hq, D], k and v [B, N, Hkv, D], int32 indices.

    Where S is N the choice is the whole cache in order, [B, S]; else S distinct
    rows in random order for each head of keys, [B, Hkv, S].
    """
    batch, heads, kv_heads, rows, chosen, features = dims
    q = randn((batch, heads, features), dtype, generator)
    k, v = (randn((batch, rows, kv_heads, features), dtype, generator) for _ in range(2))
    if chosen == rows:
        indices = torch.arange(rows, dtype=torch.int32, device=generator.device).repeat(batch, 1)
        return q, k, v, indices
    drawn = torch.rand((batch, kv_heads, rows), generator=generator, device=generator.device)
    return q, k, v, drawn.argsort(-1)[..., :chosen].to(torch.int32)


def _paged(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """The same rows in pages of 16 that lie in random order, two pages more than are used."""
    batch, heads, kv_heads, rows, _, features = dims
    _, _, _, indices = inputs(dims, dtype, generator)
    q = randn((batch, heads, features), dtype, generator)
    each = math.ceil(rows / _PAGE)
    pages = batch * each + 2
    k_cache, v_cache = (randn((pages, _PAGE, kv_heads, features), dtype, generator) for _ in range(2))
    order = torch.rand((pages,), generator=generator, device=generator.device).argsort()
    return q, k_cache, v_cache, order[: batch * each].view(batch, each).to(torch.int32), indices


def _gathered(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, indices: torch.Tensor
) -> Tensors:
    """A paged cache without its pages."""
    k, v = (cache[table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    return q, k, v, indices


def _into_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> Tensors:
    """A cache laid out in pages of 16, which lie in the same random order each time."""
    batch, rows, kv_heads, features = k.shape
    each = math.ceil(rows / _PAGE)
    order = torch.randperm(batch * each, generator=torch.Generator(k.device).manual_seed(0), device=k.device)
    caches = []
    for x in (k, v):
        whole = F.pad(x, (0, 0, 0, 0, 0, each * _PAGE - rows)).reshape(-1, _PAGE, kv_heads, features)
        caches.append(torch.empty_like(whole).index_copy_(0, order, whole))
    return q, *caches, order.view(batch, each).to(torch.int32), indices


def _repeats_and_holes(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Rows that are named several times, -1 among them, and nothing for the last head of keys."""
    q, k, v, _ = inputs(dims, dtype, generator)
    few = torch.rand((dims[0], dims[2], dims[4]), generator=generator, device=generator.device) * 9 - 2
    few[:, -1] = -1
    return q, k, v, few.floor().clamp_min(-1).to(torch.int32)


def _strided(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Every second row of a longer cache of keys, values with their heads first, int64 indices of all heads."""
    batch, heads, kv_heads, rows, chosen, features = dims
    q, k, v, _ = inputs((batch, heads, kv_heads, 2 * rows, chosen, features), dtype, generator)
    v = randn((batch, kv_heads, rows, features), dtype, generator)
    drawn = torch.rand((batch, chosen), generator=generator, device=generator.device)
    return q, k[:, ::2], v.transpose(1, 2), (drawn * rows).long()


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """Chosen rows, queries and indices in once, outputs out; two products of D columns a score.

    A group of queries in 16 bits is a product for the tensor cores; a single
    query is not.
    """
    batch, heads, kv_heads, rows, chosen, features = dims
    gathered = batch * kv_heads * chosen * features * dtype.itemsize
    queries = batch * heads * features * dtype.itemsize
    lists = batch * chosen * (1 if chosen == rows else kv_heads)
    return Cost(
        read={"q": queries, "k": gathered, "v": gathered, "indices": 4 * lists},
        write={"out": queries},
        flop=4 * batch * heads * chosen * features,
        unit=dtype_name(dtype) if heads > kv_heads and dtype.itemsize == 2 else "float32",
    )


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Flash attention over the gathered rows; in place where the choice is the whole cache."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    if indices.ndim == 3:
        rows = indices.long().unsqueeze(-1).expand(-1, -1, -1, q.shape[-1])
        keys, values = keys.gather(2, rows), values.gather(2, rows)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)


def _pages(k: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The choice as numbers of pages [B, pages] of a cache that lies as one, and the rows of a page."""
    batch, rows, kv_heads, _ = k.shape
    if indices.ndim == 3 and kv_heads > 1:
        raise ValueError("one list of pages serves all heads of keys")
    size = 1 if indices.ndim == 3 else _PAGE
    first = torch.arange(batch, device=k.device).unsqueeze(1) * (rows // size)
    return (indices.flatten(1)[:, ::size] // size + first).to(torch.int32), size


def _flashinfer() -> Baseline:
    """FlashInfer's paged decode: chosen rows are pages of one row, the whole cache is pages of 16.

    Its plan reads the list of pages on the host, which is not timed.
    """
    import flashinfer
    from torch.utils.weak import WeakTensorKeyDictionary

    planned = WeakTensorKeyDictionary()

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor) -> Tensors:
        pages, size = _pages(k, indices)
        batch, each = pages.shape
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=k.device)
        planned[pages] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * each
        filled = torch.full((batch,), size, dtype=torch.int32, device=k.device)
        heads = (q.shape[1], *k.shape[2:])
        planned[pages].plan(starts, pages.flatten(), filled, *heads, size, q_data_type=q.dtype, kv_data_type=k.dtype)
        return q, k.view(-1, size, *k.shape[2:]), v.view(-1, size, *v.shape[2:]), pages

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> Outputs:
        out: torch.Tensor = planned[pages].run(q, (k, v))
        return out

    return Baseline(call, prepare)


def _config(
    method: str, block: int, warps: int, stages: int, ahead: int, grain: int, join: str, depth: int
) -> dict[str, int | str]:
    shape: dict[str, int | str] = {"method": method, "block": block, "num_warps": warps, "stages": stages}
    return {**shape, "ahead": ahead, "grain": grain, "join": join, "depth": depth}


def _configs(
    blocks: tuple[int, ...],
    stages: tuple[int, ...],
    grains: tuple[int, ...],
    depths: tuple[int, ...],
    joins: tuple[str, ...] = ("rounds",),
    aheads: tuple[int, ...] = (0,),
) -> tuple[dict[str, int | str], ...]:
    """Configurations of the tensor cores: 8 or 16 rows a warp and pass, and how parts are read."""
    return tuple(
        _config("group", block, warps, stage, ahead, grain, join, depth)
        for block in blocks
        for warps in (4, 8)
        for stage in stages
        for ahead in aheads
        for grain in grains
        for join in joins
        for depth in depths
        if 8 * warps <= block <= 32 * warps
    )


_ROWS = tuple(_config("rows", block, warps, 1, 0, 100, "rounds", 8) for block in (16, 32, 64) for warps in (2, 4, 8))

CASE = Case(
    name="selected_attention",
    cli_name="selected-attention",
    axes=("B", "Hq", "Hkv", "N", "S", "D"),
    # S of 4 S rows for one query: as a shape of two numbers always meant it.
    short=(("S", "D"), lambda chosen, features: (1, 1, 1, 4 * chosen, chosen, features)),
    variants=(
        Variant("default", inputs, selected_attention, eager, oracle),
        Variant(
            "paged",
            _paged,
            selected_attention_paged,
            lambda *tensors: eager(*_gathered(*tensors)),
            lambda *tensors: oracle(*_gathered(*tensors)),
            dims=((2, 8, 2, 200, 70, 128), (2, 3, 1, 50, 33, 80)),
        ),
        Variant(
            "repeats_and_holes",
            _repeats_and_holes,
            selected_attention,
            eager,
            oracle,
            dims=((2, 8, 2, 100, 70, 128), (2, 4, 4, 20, 33, 64)),
        ),
        Variant(
            "strided",
            _strided,
            selected_attention,
            eager,
            oracle,
            dims=((2, 8, 2, 128, 70, 64), (3, 6, 3, 40, 17, 72)),
        ),
        Variant(
            "lse",
            inputs,
            lambda q, k, v, indices: selected_attention(q, k, v, indices, return_lse=True)[1].to(q.dtype),
            _eager_lse,
            _lse_oracle,
            dims=((2, 8, 2, 200, 70, 128), (1, 3, 3, 40, 20, 16)),
        ),
    ),
    cost=cost,
    timed=(
        (1, 1, 1, 256, 64, 128),
        (1, 1, 1, 1024, 256, 128),
        (1, 1, 1, 16384, 4096, 128),
        (1, 32, 8, 4096, 4096, 128),
        (8, 32, 8, 4096, 4096, 128),
        (16, 32, 8, 16384, 16384, 128),
    ),
    timed_dtypes=("bfloat16",),
    checked=(
        (1, 1, 1, 256, 64, 128),
        (1, 1, 1, 1024, 256, 128),
        (1, 1, 1, 16384, 4096, 128),
        (1, 32, 8, 4096, 4096, 128),
        (8, 32, 8, 4096, 4096, 128),
        (16, 32, 8, 16384, 16384, 128),
        (2, 6, 2, 100, 37, 80),
        (1, 33, 1, 200, 150, 16),
        (2, 16, 2, 300, 300, 256),
        (2, 8, 1, 700, 600, 96),
    ),
    smoke=((1, 1, 1, 64, 33, 32), (2, 6, 2, 40, 37, 80), (1, 8, 2, 48, 48, 16)),
    library={"sdpa_flash": _sdpa},
    peers={"FlashInfer": _flashinfer},
    companions={"paged": Baseline(selected_attention_paged, _into_pages)},
    # Rows of the table are query heads a key head, columns are chosen rows over all key heads and entries.
    buckets=(
        Bucket(2, 1, 1 << 7, (1, 1, 1, 256, 64, 128), _configs((32, 64), (3,), (100,), (8,))),
        Bucket(2, 1, 1 << 10, (1, 1, 1, 1024, 256, 128), _configs((32, 64, 128, 256), (3,), (100,), (8,))),
        Bucket(
            2, 1, 1 << 12, (1, 1, 1, 16384, 4096, 128), _configs((32, 64, 128), (3,), (100,), (32,), ("rounds", "once"))
        ),
        Bucket(2, 1, None, (1, 1, 1, 65536, 16384, 128), _configs((32, 64, 128), (3,), (100,), (8, 16, 32))),
        Bucket(2, None, 1 << 16, (1, 32, 8, 4096, 4096, 128), _configs((64, 128), (3, 5), (50, 100), (8, 16))),
        Bucket(2, None, 1 << 20, (8, 32, 8, 4096, 4096, 128), _configs((64, 128), (1, 3, 5), (100, 200), (8,))),
        Bucket(
            *(2, None, None, (16, 32, 8, 16384, 16384, 128)),
            _configs((64, 128), (2, 3), (200, 575), (8,), aheads=(0, 1)),
        ),
        Bucket(4, None, None, (1, 32, 8, 4096, 4096, 128), _ROWS),
    ),
)
