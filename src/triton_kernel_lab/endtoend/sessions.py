"""What decodes: one batch of sequences with its cache, fed a token a sequence and step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from triton_kernel_lab.endtoend.model import Layers

__all__ = ["HuggingFace", "Ours", "Session", "dynamic_cache", "liger_rope", "static_cache"]

# Attention of the library runs slower over a mask whose rows are not aligned.
_ALIGNED = 64


class Session(Protocol):
    """A batch whose cache holds its prompt; ``note`` says what is out of the ordinary in how it decodes."""

    note: str | None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feed tokens int64 [B]; the logits [B, V] of what follows, in memory that the next step may overwrite."""


def dynamic_cache(config: Any, prompt: Layers) -> Any:
    """A cache of the library that grows by concatenation, with the prompt in it."""
    from transformers import DynamicCache

    return _filled(DynamicCache(config=config), prompt)


def static_cache(config: Any, prompt: Layers, length: int) -> Any:
    """A cache of the library of a fixed ``length``, rounded up to what its attention likes, with the prompt in it."""
    from transformers import StaticCache

    return _filled(StaticCache(config=config, max_cache_len=-(-length // _ALIGNED) * _ALIGNED), prompt)


def _filled(cache: Any, prompt: Layers) -> Any:
    for index, (keys, values) in enumerate(prompt):
        cache.update(keys, values, index)
    return cache


class HuggingFace:
    """A model of the library, eager or compiled.

    Args:
        forward: the model or its compiled forward.
        cache: holds the prompt.
        scope: is entered around each step.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: Any,
        scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._forward, self._cache, self._scope = forward, cache, scope
        self.note: str | None = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As of ``Session``."""
        # A graph of torch.compile writes over the outputs of the step before, which are no longer wanted.
        torch.compiler.cudagraph_mark_step_begin()
        with self._scope():
            logits: torch.Tensor = self._forward(input_ids=tokens[:, None], cache=self._cache, use_cache=True).logits
        return logits[:, -1]


class Ours:
    """The decoder of this project on a patched model."""

    def __init__(self, model: Any, prompt: torch.Tensor, length: int, *, paged: bool) -> None:
        from triton_kernel_lab.integrations.transformers import Decoder

        self.note: str | None = None
        self._decoder = Decoder(model, prompt.shape[0], length, paged=paged)
        self._decoder.prefill(prompt)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As of ``Session``."""
        return self._decoder.step(tokens)


@contextlib.contextmanager
def liger_rope() -> Iterator[None]:
    """Liger's rotary embedding in the library's module, where its patch puts it for every model of the process."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
    try:
        yield
    finally:
        modeling_llama.apply_rotary_pos_emb = original
