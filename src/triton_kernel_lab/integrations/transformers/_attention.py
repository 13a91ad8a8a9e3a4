"""Attention as transformers calls it: one function for every mask, cache and number of queries."""

from __future__ import annotations

from typing import Any

import torch

from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops.flash_attention import MAX_HEAD, flash_attention
from triton_kernel_lab.ops.selected_attention import selected_attention

__all__ = ["NAME", "attention", "register"]

NAME = "triton_kernel_lab"


def register() -> None:
    """Make ``attention`` known to transformers, with the masks that PyTorch's own attention gets."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' registry; what no kernel serves goes to its "sdpa".

    Args:
        module: the attention module, whose ``is_causal`` counts where no such keyword is given.
        query: [B, Hq, Lq, D].
        key: [B, Hkv, Lk, D].
        value: as key.
        attention_mask: None for none or a causal one, else as "sdpa" takes it.
        dropout: the probability of a weight to be dropped.
        scaling: factor of the scores; None for 1 / sqrt(D).
        kwargs: what the model adds; a bias or a soft cap of the scores is left to "sdpa".

    Returns:
        The output [B, Lq, Hq, D], and None for the weights.
    """
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    plain = not dropout and causal and query.shape[-1] <= MAX_HEAD and query.shape[0] == key.shape[0]
    if plain and all(kwargs.get(extra) is None for extra in ("position_bias", "softcap", "s_aux")):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if query.shape[2] > 1 and attention_mask is None:
            # An empty static cache gives all its rows, of which the queries' own come first.
            return flash_attention(q, k[:, : q.shape[1]], v[:, : q.shape[1]], causal=True, scale=scaling), None
        if query.shape[2] == 1 and not _checks.wants_grad(q, k, v):
            indices = _choice(attention_mask, key)
            if indices is not None:
                return selected_attention(q[:, 0], k, v, indices, scaling)[:, None], None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    served: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return served


def _choice(mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """The rows of the cache that one query sees, int32 [B, Lk] with -1 for none; None where the mask says more."""
    rows = torch.arange(key.shape[2], dtype=torch.int32, device=key.device)
    if mask is None:
        return rows.expand(key.shape[0], -1)
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1:] != (1, 1, key.shape[2]):
        return None
    return torch.where(mask[:, 0, 0], rows, -1).expand(key.shape[0], -1)
