"""Attention by blocks of queries in PyTorch: the reference, and the gradients by recomputing the scores.

Gradients: Dao, "FlashAttention-2", 2023, arXiv:2307.08691, algorithm 2, in
matrix form. Only one block of the score matrix exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["attend", "gradients"]

# Scores of one block: 128 MiB in fp32.
_SCORES = 1 << 25


class _Block(NamedTuple):
    """Queries ``rows`` of every head, and how many keys the last of them sees.

    ``hidden`` [R, keys] says which keys a query does not see, ``blind`` [R] which queries see none.
    """

    rows: slice
    keys: int
    hidden: torch.Tensor | None
    blind: torch.Tensor


def _blocks(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[_Block]:
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    step = min(max(_SCORES // max(batch * heads * keys, 1), 1), queries)
    for start in range(0, queries, max(step, 1)):
        rows = slice(start, min(start + step, queries))
        # The last query sees the last key: bottom-right alignment.
        last = torch.arange(rows.start, rows.stop, device=q.device) + (keys - queries)
        if not causal:
            yield _Block(rows, keys, None, torch.full_like(last, keys == 0, dtype=torch.bool))
            continue
        end = min(max(rows.stop + keys - queries, 0), keys)
        yield _Block(rows, end, torch.arange(end, device=q.device) > last[:, None], last < 0)


def _by_group(x: torch.Tensor, rows: slice, kv_heads: int) -> torch.Tensor:
    """[B, L, Hq, D] to [B, Hkv, group, R, D]: the query heads that share keys side by side."""
    return x[:, rows].unflatten(2, (kv_heads, x.shape[2] // kv_heads)).permute(0, 2, 3, 1, 4)


def _from_group(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_by_group``, for its rows."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    """Scaled scores [B, Hkv, group, R, keys] of q [B, Hkv, group, R, D], -inf where a key is not seen."""
    s = torch.einsum("bhgrd,bhkd->bhgrk", q, k[:, :, : block.keys]) * scale
    return s if block.hidden is None else s.masked_fill(block.hidden, float("-inf"))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in the dtype of q and log-sum-exp [B, Hq, Lq]; differentiable; fp64 is computed in fp64."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k.shape[2]
    wide_k, wide_v = (x.to(wide).transpose(1, 2) for x in (k, v))
    outputs, sums = [q.new_empty(q.shape[0], 0, *q.shape[2:])], [q.new_empty(q.shape[0], q.shape[2], 0, dtype=wide)]
    for block in _blocks(q, k, causal):
        s = _scores(_by_group(q.to(wide), block.rows, kv_heads), wide_k, block, scale)
        # Where nothing is seen any finite score does: its weights and their gradients are zeroed.
        blind = block.blind[:, None]
        s = s.masked_fill(blind, 0.0)
        p = torch.softmax(s, -1).masked_fill(blind, 0.0)
        outputs.append(_from_group(torch.einsum("bhgrk,bhkd->bhgrd", p, wide_v[:, :, : block.keys])).to(q.dtype))
        sums.append(torch.logsumexp(s, -1).masked_fill(block.blind, float("-inf")).flatten(1, 2))
    return torch.cat(outputs, 1), torch.cat(sums, 2)


def gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, in their dtypes, accumulated in fp32 (fp64 for fp64), in a fixed order."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k.shape[2]
    wide_k, wide_v = (x.to(wide).transpose(1, 2) for x in (k, v))
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    # A row's weights sum to one, so what its output's gradient adds to all scores alike is taken off again.
    common = (grad_out.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)
    if grad_lse is not None:
        common = common - grad_lse
    for block in _blocks(q, k, causal):
        rows, keys = block.rows, slice(0, block.keys)
        q_rows, g_rows = (_by_group(x.to(wide), rows, kv_heads) for x in (q, grad_out))
        lse_rows, common_rows = (
            x[:, :, rows].to(wide).unflatten(1, (kv_heads, q.shape[2] // kv_heads))[..., None] for x in (lse, common)
        )
        s = _scores(q_rows, wide_k, block, scale)
        p = torch.exp(s - lse_rows.masked_fill(block.blind[:, None], float("inf")))
        grad_s = torch.einsum("bhgrd,bhkd->bhgrk", g_rows, wide_v[:, :, keys]).sub_(common_rows).mul_(p).mul_(scale)
        grad_v[:, :, keys] += torch.einsum("bhgrk,bhgrd->bhkd", p, g_rows)
        grad_k[:, :, keys] += torch.einsum("bhgrk,bhgrd->bhkd", grad_s, q_rows)
        grad_q[:, rows] = _from_group(torch.einsum("bhgrk,bhkd->bhgrd", grad_s, wide_k[:, :, keys])).to(q.dtype)
    return grad_q, grad_k.transpose(1, 2).to(k.dtype), grad_v.transpose(1, 2).to(v.dtype)
