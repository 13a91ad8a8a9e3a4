"""What a decoder's logits must be: the float32 model's, on the tokens that the decoder itself was fed."""

from __future__ import annotations

from typing import Any

import torch

from triton_kernel_lab.endtoend.model import Layers, Models
from triton_kernel_lab.endtoend.sessions import dynamic_cache

__all__ = ["Reference"]

# PyTorch's attention of grouped heads in float32 holds the scores of all queries at a time.
_CHUNK = 1024


class Reference:
    """The float32 model after a prompt.

    Args:
        models: the model and its relatives.
        weights: "bfloat16", or "int4" for the weights that INT4 stands for.
        prompt: int64 [B, L]; sequences do not depend on each other, so that a few of a batch are enough.
    """

    def __init__(self, models: Models, weights: str, prompt: torch.Tensor) -> None:
        self._model: Any = models.exact(weights)
        self._prompt: Layers = models.prefill(self._model, prompt, _CHUNK)

    def logits(self, tokens: torch.Tensor, last: int) -> torch.Tensor:
        """Logits float32 [B, last, V] that follow each of the last tokens of int64 [B, T]."""
        cache = dynamic_cache(self._model.config, self._prompt)
        with torch.no_grad():
            logits: torch.Tensor = self._model(
                input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=last
            ).logits
        return logits
