"""Who decodes the same model, and how each is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from triton_kernel_lab.endtoend.model import Layers, Models, sharing
from triton_kernel_lab.endtoend.sessions import (
    HuggingFace,
    Ours,
    Session,
    dynamic_cache,
    liger_rope,
    static_cache,
)

__all__ = ["OPPONENTS", "Opponent", "Setting"]


@dataclass(frozen=True)
class Setting:
    """What a cell gives each of its opponents.

    Args:
        models: the model and its relatives.
        prompt: int64 [B, L].
        prefilled: the eager model's keys and values of the prompt.
        length: positions that a sequence will have at most.
    """

    models: Models
    prompt: torch.Tensor
    prefilled: Layers
    length: int


@dataclass(frozen=True)
class Opponent:
    """A way to decode; ``open`` raises ImportError where what it needs is not installed."""

    role: str
    served_by: str
    weights: str
    cache: str
    open: Callable[[Setting], Session]


def _ours(*, int4: bool, paged: bool) -> Opponent:
    def opened(setting: Setting) -> Session:
        model = setting.models.patched_int4 if int4 else setting.models.patched
        return Ours(model, setting.prompt, setting.length, paged=paged)

    return Opponent("triton", "triton", "int4" if int4 else "bfloat16", "paged" if paged else "static", opened)


def _eager_dynamic(setting: Setting) -> Session:
    model = setting.models.base
    return HuggingFace(model, dynamic_cache(model.config, setting.prefilled))


def _eager_static(setting: Setting) -> Session:
    model = setting.models.base
    return HuggingFace(model, static_cache(model.config, setting.prefilled, setting.length))


class _Compiled(HuggingFace):
    """A model compiled as one graph; where that cannot be, with breaks in it."""

    def __init__(self, setting: Setting, mode: str) -> None:
        self._model, self._mode = sharing(setting.models.base), mode
        cache = static_cache(self._model.config, setting.prefilled, setting.length)
        super().__init__(self._compile(whole=True), cache)

    def _compile(self, *, whole: bool) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            self._model.forward, mode=self._mode, fullgraph=whole, dynamic=False
        )
        return compiled

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As of ``Session``."""
        try:
            return super().step(tokens)
        except torch._dynamo.exc.Unsupported:
            # Raised while it traces: nothing of the step has run yet.
            self._forward, self.note = self._compile(whole=False), "with graph breaks"
            return super().step(tokens)


def _compiled(mode: str) -> Callable[[Setting], Session]:
    return lambda setting: _Compiled(setting, mode)


def _liger(setting: Setting) -> Session:
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    model = sharing(setting.models.base)
    classes = {name: getattr(modeling_llama, name) for name in ("LlamaMLP", "LlamaRMSNorm")}
    try:
        with liger_rope():
            # Nothing is trained, so that the loss stays the library's.
            apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    finally:
        # The patch also replaces these for every model yet to be made.
        for name, original in classes.items():
            setattr(modeling_llama, name, original)
    return HuggingFace(model, dynamic_cache(model.config, setting.prefilled), liger_rope)


OPPONENTS: Mapping[str, Opponent] = {
    "triton_static": _ours(int4=False, paged=False),
    "triton_paged": _ours(int4=False, paged=True),
    "triton_int4_static": _ours(int4=True, paged=False),
    "triton_int4_paged": _ours(int4=True, paged=True),
    "eager_dynamic": Opponent("baseline", "torch", "bfloat16", "dynamic", _eager_dynamic),
    "eager_static": Opponent("baseline", "torch", "bfloat16", "static", _eager_static),
    "liger": Opponent("baseline", "liger", "bfloat16", "dynamic", _liger),
    "torch_compile": Opponent("baseline", "inductor", "bfloat16", "static", _compiled("default")),
    "torch_compile_reduce_overhead": Opponent(
        "baseline", "inductor", "bfloat16", "static", _compiled("reduce-overhead")
    ),
}
"""By name, in the order in which they are set up: what compiles longest comes last."""
