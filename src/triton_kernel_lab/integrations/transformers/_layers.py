"""The layers of a model as the launches that they take, where their formulas are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from triton_kernel_lab.integrations.transformers._modules import Int4Linear, bare, linears, refusal, role
from triton_kernel_lab.integrations.transformers._rotate import Cache, HeadNorms
from triton_kernel_lab.integrations.transformers._row_linear import row_linear
from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops.int4_linear import int4_linear
from triton_kernel_lab.ops.swiglu import swiglu_packed
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear

__all__ = ["Layer", "expect_known", "layer_of", "norm_of", "projection_of"]

_NAME = "Decoder"
# Their frequencies depend on how long the sequence has become.
_MOVING_ROPES = ("dynamic", "longrope")

Projection: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class _Norm(NamedTuple):
    weight: torch.Tensor
    eps: float


class Layer(NamedTuple):
    """One layer of the model, as the launches that it takes."""

    norm: _Norm
    qkv: Projection
    heads: HeadNorms | None
    scale: float
    out: Projection
    mlp_norm: _Norm
    gated: Projection
    down: Projection
    cache: Cache


def norm_of(module: Any) -> _Norm:
    """The weight and the eps of an RMSNorm."""
    return _Norm(module.weight.detach(), module.variance_epsilon)


def projection_of(layer: Any) -> Projection:
    """What multiplies by a linear layer: of one row a kernel of this package, unless the layer is no plain one."""
    if not bare(layer):
        return lambda x: layer(x)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    return lambda x: row_linear(x, weight, bias)


def _joined(layers: list[Any]) -> Projection:
    """One projection to the outputs of all layers side by side, from copies of their weights."""
    some = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(some) if some else None
    if len(some) in (0, len(layers)):
        if all(bare(layer) for layer in layers):
            weight = torch.cat([layer.weight.detach() for layer in layers])
            return lambda x: row_linear(x, weight, bias)
        sizes = {getattr(layer, "group_size", 0) for layer in layers}
        # Blocks of sixteen rows are what packed weights are made of.
        if len(sizes) == 1 and all(layer.out_features % 16 == 0 for layer in layers):
            return _joined_int4(layers, bias, *sizes)
    return lambda x: torch.cat([layer(x) for layer in layers], -1)


def _joined_int4(layers: list[Any], bias: torch.Tensor | None, group_size: int) -> Projection:
    packed = torch.cat([layer.packed for layer in layers])
    # Column by column, as they are read fastest.
    scales = torch.cat([layer.scales.t() for layer in layers], 1).t()

    def project(x: torch.Tensor) -> torch.Tensor:
        y = int4_linear(x, packed, scales, group_size)
        return y if bias is None else y + bias

    return project


def _gated(mlp: Any) -> Projection:
    """The first half of the MLP: silu(gate) * up."""
    gate, up = mlp.gate_proj, mlp.up_proj
    if bare(gate) and bare(up) and gate.bias is None and up.bias is None:
        w_gate, w_up = gate.weight.detach(), up.weight.detach()
        return lambda x: swiglu_linear(x, w_gate, w_up)
    joined = _joined([gate, up])
    return lambda x: swiglu_packed(joined(x))


def layer_of(block: Any, cache: Cache) -> Layer:
    """A decoder layer of transformers as its launches, over this cache."""
    attention = block.self_attn
    heads = None
    if hasattr(attention, "q_norm"):
        norm = attention.q_norm
        heads = HeadNorms(norm.weight.detach(), attention.k_norm.weight.detach(), norm.variance_epsilon)
    return Layer(
        norm=norm_of(block.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        heads=heads,
        scale=attention.scaling,
        out=projection_of(attention.o_proj),
        mlp_norm=norm_of(block.post_attention_layernorm),
        gated=_gated(block.mlp),
        down=projection_of(block.mlp.down_proj),
        cache=cache,
    )


def _ours(module: nn.Module) -> bool:
    """Whether a module runs the forward of its class, or that of ``patch``."""
    forward = vars(module).get("forward")
    return forward is None or str(forward.__module__).startswith("triton_kernel_lab.")


def expect_known(model: Any, max_length: int) -> None:
    """Raise ValueError unless the layers of the model compute what the decoder does."""
    base: Any = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    whole = base is not None and hasattr(model, "lm_head") and all(hasattr(base, part) for part in parts)
    _checks.expect(whole, _NAME, "model", "a causal language model of transformers", type(model).__name__)
    for name, module in model.named_modules():
        if role(module) is None:
            continue
        reason = refusal(module) if _ours(module) else "something has replaced its forward"
        _checks.expect(reason is None, _NAME, "model", "layers whose formulas are known", f"{name}: {reason}")
        for part, layer in linears(module):
            known = bare(layer) or isinstance(layer, Int4Linear)
            _checks.expect(known, _NAME, "model", "plain linear layers", f"{name}.{part}: {type(layer).__name__}")
    window = getattr(model.config, "sliding_window", None)
    fits = window is None or max_length <= window
    _checks.expect(fits, _NAME, "max_length", f"at most the sliding window, {window}", max_length)
    rope = base.rotary_emb.rope_type
    _checks.expect(rope not in _MOVING_ROPES, _NAME, "model", "rotary frequencies that do not move", f"{rope} ones")
