"""Which modules of a model compute what the kernels compute, and the INT4 layer that stands for a dense one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops.int4_linear import int4_linear, pack_int4, unpack_int4

__all__ = ["FAMILIES", "Int4Linear", "bare", "linears", "refusal", "role"]

# Their formulas have been read. A module of another family may have the same attributes and compute something else:
# Cohere's norm subtracts the mean, GPT-OSS's rounds elsewhere, Falcon-H1's MLP multiplies twice more.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_PARTS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "swiglu": ("gate_proj", "up_proj", "down_proj"),
}
_SILU = ("SiLU", "SiLUActivation")


class Int4Linear(nn.Module):
    """A linear layer whose weight is stored as 4-bit integers with a scale a group, and multiplied from there.

    Args:
        dense: the layer to quantise, with or without bias, on any device; it is left as it is.
        group_size: columns a scale, positive and even.

    Raises:
        TypeError, ValueError: as ``pack_int4`` of the weight.
    """

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, dense: nn.Linear, group_size: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = dense.in_features, dense.out_features, group_size
        packed, scales = pack_int4(dense.weight.detach(), group_size)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias = dense.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        y = int4_linear(x, self.packed, self.scales, self.group_size)
        return y if self.bias is None else y + self.bias

    def weight_stored(self) -> torch.Tensor:
        """The weight that the integers stand for, [out_features, in_features] in the dtype of the scales."""
        return unpack_int4(self.packed, self.scales, self.group_size, self.in_features)

    def extra_repr(self) -> str:
        """What ``print`` shows of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None},"
            f" group_size={self.group_size}"
        )


def role(module: nn.Module) -> str | None:
    """What a module of any family looks like: "rms_norm", "swiglu", "attention" or None."""
    for name, parts in _PARTS.items():
        if all(isinstance(getattr(module, part, None), nn.Module) for part in parts):
            return name
    return "rms_norm" if type(module).__name__.endswith("Norm") else None


def refusal(module: nn.Module) -> str | None:
    """Why a module that looks like one of the known ones is none of them; None where it is."""
    kind = type(module)
    if kind.__module__ not in {f"transformers.models.{family}.modeling_{family}" for family in FAMILIES}:
        return f"{kind.__name__} of {kind.__module__} is no module of {', '.join(FAMILIES)}"
    activation = type(getattr(module, "act_fn", None)).__name__
    if role(module) == "swiglu" and activation not in _SILU:
        return f"{kind.__name__} activates with {activation}, not with SiLU"
    return None


def linears(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The projections of an attention or of an MLP, by name."""
    return [(part, getattr(module, part)) for part in _PARTS.get(role(module) or "", ())]


def bare(layer: nn.Module) -> bool:
    """Whether a layer is a dense linear one of an ordinary weight that nothing listens to.

    Adapters, quantisers and offloading put another class, another forward or a hook there.
    """
    watched: Any = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.dtype in _checks.FLOATS
        and "forward" not in vars(layer)
        and not any(watched)
    )
