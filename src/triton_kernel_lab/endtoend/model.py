"""A Llama-style model of random weights, and what is made from it: copies, exact references, prefilled caches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["INT4_GROUP", "LLAMA", "Layers", "Models", "Sizes", "quantised", "sharing"]

INT4_GROUP = 128

Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The keys and values of each layer, [B, Hkv, L, D]."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama-style decoder."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def record(self) -> dict[str, int]:
        """The sizes by name, as the artifact keeps them."""
        return asdict(self)


LLAMA = Sizes(layers=16, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000)


class Models:
    """One model and what shares or follows from its weights, each made when it is first asked for.

    Args:
        sizes: its layers, widths, heads and vocabulary.
        device: where it lives.
        positions: the most positions that a sequence may have.
        seed: of its weights.
        dtype: of its weights, 16-bit.
    """

    def __init__(
        self, sizes: Sizes, device: torch.device, positions: int, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self._positions, self._seed = positions, seed

    @functools.cached_property
    def base(self) -> Any:
        """The ``LlamaForCausalLM`` of the library."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = self.sizes
        config = LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab_size=sizes.vocab,
            max_position_embeddings=self._positions,
            tie_word_embeddings=False,
        )
        torch.manual_seed(self._seed)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        return model.eval().requires_grad_(False)

    def exact(self, weights: str) -> Any:
        """The same model in float32, of the weights as they are or, for "int4", as INT4 stores them."""
        return self._exact_int4 if weights == "int4" else self._exact_dense

    @functools.cached_property
    def _exact_dense(self) -> Any:
        return copy.deepcopy(self.base).float()

    @functools.cached_property
    def _exact_int4(self) -> Any:
        model = copy.deepcopy(self.base).float()
        for name, linear in _layer_linears(model):
            # Packed from the 16-bit weights, as patch() does, and told exactly in float32.
            linear.weight.copy_(quantised(self.base.get_submodule(name).weight))
        return model

    @functools.cached_property
    def patched(self) -> Any:
        """A copy that shares its weights, with the kernels of this project in it."""
        from triton_kernel_lab.integrations.transformers import patch

        return patch(sharing(self.base))

    @functools.cached_property
    def patched_int4(self) -> Any:
        """The same with the linears of attention and MLP in INT4."""
        from triton_kernel_lab.integrations.transformers import patch

        # The patch moves the dense weights to the host: those must not be the base's.
        return patch(copy.deepcopy(self.base), int4=True, group_size=INT4_GROUP)

    def prefill(self, model: Any, prompt: torch.Tensor, chunk: int | None = None) -> Layers:
        """The keys and values that a model of the library has after a prompt int64 [B, L], read by chunks if asked."""
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in prompt.split(chunk or prompt.shape[1], 1):
                model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1)
        return [(layer.keys, layer.values) for layer in cache.layers]


def sharing(model: Any) -> Any:
    """A copy of a model whose parameters are those of the model itself."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """What the INT4 form of a weight [N, K] stands for, float32."""
    from triton_kernel_lab.ops.int4_linear import pack_int4, unpack_int4

    packed, scales = pack_int4(weight, INT4_GROUP)
    return unpack_int4(packed, scales.float(), INT4_GROUP, weight.shape[1])


def _layer_linears(model: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The linears of attention and MLP by name; not the head."""
    modules: Mapping[str, Any] = dict(model.named_modules())
    yield from (
        (name, each) for name, each in modules.items() if isinstance(each, torch.nn.Linear) and ".layers." in name
    )
