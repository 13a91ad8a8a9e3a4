"""The yardstick of ``paged_kv_gather``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from triton_kernel_lab.cases._base import Bucket, Case, Cost, Dims, Tensors, Variant, randn
from triton_kernel_lab.ops.paged_kv_gather import paged_kv_gather

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_PAGE = 16


def eager(k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> Packed:
    """Whole pages out of both caches, as eager PyTorch packs sequences that fill their pages."""
    pages = page_table.flatten()
    k, v = (cache.index_select(0, pages).flatten(0, 1) for cache in (k_cache, v_cache))
    return k, v, F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


def _full_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor
) -> Packed:
    """The same for one who knows the lengths: the offsets are counted and not summed."""
    k, v, _ = eager(k_cache, v_cache, page_table, seq_lens[:0])
    step = page_table.shape[1] * k_cache.shape[1]
    return k, v, torch.arange(0, k.shape[0] + 1, step, dtype=torch.int32, device=k.device)


def _tokens(k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> Packed:
    """Sequences of any length: page and slot of every token, and zeros up to the size of the table."""
    page_size = k_cache.shape[1]
    offsets = F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    token = torch.arange(page_table.numel() * page_size, device=k_cache.device)
    sequence = torch.searchsorted(offsets[1:].long(), token, right=True).clamp(max=len(seq_lens) - 1)
    position = token - offsets[sequence]
    live = token < offsets[-1]
    page = page_table[sequence, (position // page_size).clamp(max=page_table.shape[1] - 1)].where(live, 0).long()
    k, v = (cache[page, position % page_size] * live[:, None, None] for cache in (k_cache, v_cache))
    return k, v, offsets


def oracle(k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> Packed:
    """One sequence after the other, cut out of the pages that it names; zeros up to the size of the table."""
    lengths, page_size = seq_lens.tolist(), k_cache.shape[1]
    packed = []
    for cache in (k_cache, v_cache):
        rows = [
            cache[page_table[b, : math.ceil(length / page_size)].long()].flatten(0, 1)[:length].double()
            for b, length in enumerate(lengths)
        ]
        rest = page_table.numel() * page_size - sum(lengths)
        packed.append(torch.cat([*rows, rows[0].new_zeros((rest, *cache.shape[2:]))]))
    starts = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
    return packed[0], packed[1], torch.tensor(starts, dtype=torch.int32, device=k_cache.device)


def _table(batch: int, per_sequence: int, pages: int, generator: torch.Generator) -> torch.Tensor:
    """Different pages in random order, int32 [B, max_pages]."""
    order = torch.rand((pages,), generator=generator, device=generator.device).argsort()
    return order[: batch * per_sequence].view(batch, per_sequence).int()


def inputs(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Caches a quarter larger than what is gathered, a table of pages in random order, sequences that fill it.

    Raises:
        ValueError: L is no multiple of page_size.
    """
    batch, length, page_size, heads, features = dims
    if length % page_size:
        raise ValueError(f"paged-kv-gather: L: expected a multiple of page_size, {page_size}, got {length}.")
    used = batch * length // page_size
    pages = used + max(used // 4, 1)
    k, v = (randn((pages, page_size, heads, features), dtype, generator) for _ in range(2))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=generator.device)
    return k, v, _table(batch, length // page_size, pages, generator), lengths


def _ragged(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """Lengths from 0 to L, and ids behind the last page of a sequence that name no page."""
    k, v, table, lengths = inputs(dims, dtype, generator)
    batch, length, page_size, _, _ = dims
    drawn = torch.rand((batch,), generator=generator, device=generator.device)
    # The first is empty, the last full.
    drawn = torch.cat([drawn[:1] * 0, drawn[1:-1], drawn[-1:] * 0 + 1]) if batch > 1 else drawn
    lengths = (drawn * length).round().int()
    unused = torch.arange(table.shape[1], device=table.device) * page_size >= lengths[:, None]
    return k, v, table.masked_fill(unused, 2**31 - 1), lengths


def _other_layouts(dims: Dims, dtype: torch.dtype, generator: torch.Generator) -> Tensors:
    """K with its heads before its slots, V dense, and every second column of an int64 table."""
    k, v, table, lengths = inputs(dims, dtype, generator)
    wide = table.long().repeat_interleave(2, 1)
    return k.transpose(1, 2).contiguous().transpose(1, 2), v, wide[:, ::2], lengths


def _whole_table(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor
) -> Packed:
    """As many rows as the table has room for, which the host knows without asking the device."""
    return paged_kv_gather(k_cache, v_cache, page_table, seq_lens, total=page_table.numel() * k_cache.shape[1])


def cost(dims: Dims, dtype: torch.dtype) -> Cost:
    """The rows of both caches that are gathered, in and out, the table, the lengths and the offsets; no arithmetic."""
    batch, length, page_size, heads, features = dims
    size = batch * length * heads * features * dtype.itemsize
    return Cost(
        read={"k": size, "v": size, "page_table": batch * math.ceil(length / page_size) * 4, "seq_lens": batch * 4},
        write={"k": size, "v": size, "offsets": (batch + 1) * 4},
        flop=0,
        unit="float32",
    )


def _tiles(*tiles: int) -> tuple[dict[str, int | str], ...]:
    """Four to thirty-two elements of each cache a thread."""
    return tuple(
        {"tile": tile, "num_warps": warps} for tile in tiles for warps in (1, 2, 4, 8) if 128 <= tile // warps <= 1024
    )


CASE = Case(
    name="paged_kv_gather",
    cli_name="paged-kv-gather",
    axes=("B", "L", "page_size", "Hkv", "D"),
    # R rows of one sequence and one head, half of them keys and half values, in pages of sixteen where that goes.
    short=(("R", "D"), lambda rows, features: (1, -(-rows // 2), math.gcd(-(-rows // 2), _PAGE), 1, features)),
    variants=(
        Variant("default", inputs, _whole_table, eager, oracle),
        Variant(
            "ragged",
            _ragged,
            _whole_table,
            _tokens,
            oracle,
            dims=((8, 512, 16, 8, 128), (40, 48, 16, 2, 80), (5, 17, 1, 3, 40)),
        ),
        Variant(
            "other_layouts",
            _other_layouts,
            _whole_table,
            eager,
            oracle,
            dims=((4, 256, 16, 4, 128), (3, 96, 32, 2, 72)),
        ),
    ),
    cost=cost,
    timed=(
        (1, 256, 16, 1, 128),
        (1, 1024, 16, 1, 128),
        (1, 16384, 16, 1, 128),
        (1, 524288, 16, 1, 128),
        (8, 4096, 16, 8, 128),
    ),
    timed_dtypes=("float16",),
    checked=(
        (1, 256, 16, 1, 128),
        (1, 1024, 16, 1, 128),
        (1, 16384, 16, 1, 128),
        (1, 524288, 16, 1, 128),
        (8, 4096, 16, 8, 128),
        (3, 37, 1, 2, 80),
        (2, 512, 256, 3, 40),
        (300, 32, 16, 1, 64),
        (2, 34, 17, 1, 1),
        (2, 64, 64, 3, 576),
    ),
    smoke=((1, 64, 16, 1, 128), (3, 12, 3, 2, 40), (2, 5, 1, 1, 7)),
    output_dtypes=(None, None, torch.int32),
    exact=True,
    library={"torch.index_select": _full_pages},
    # Rows are sequences, columns all elements that one cache gives.
    buckets=(
        Bucket(2, None, 1 << 19, (1, 1024, 16, 1, 128), _tiles(512, 1024, 2048)),
        Bucket(2, None, 1 << 25, (1, 16384, 16, 1, 128), _tiles(1024, 2048, 4096, 8192)),
        Bucket(2, None, None, (1, 524288, 16, 1, 128), _tiles(1024, 2048, 4096, 8192)),
        Bucket(4, None, None, (1, 16384, 16, 1, 128), _tiles(512, 1024, 2048)),
    ),
)
