"""Replacing the modules of a model: in place, reversible, and only where the formula is known to be the kernel's."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from triton_kernel_lab.integrations.transformers._attention import NAME as ATTENTION
from triton_kernel_lab.integrations.transformers._attention import register
from triton_kernel_lab.integrations.transformers._modules import Int4Linear, bare, linears, refusal, role
from triton_kernel_lab.ops import _checks
from triton_kernel_lab.ops.rms_norm import rms_norm
from triton_kernel_lab.ops.swiglu import swiglu
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear

__all__ = ["PatchReport", "patch", "patch_report", "unpatch"]


@dataclass(frozen=True)
class PatchReport:
    """What ``patch`` did to a model.

    Attributes:
        replaced: how many modules of each kind: rms_norm, swiglu, attention, int4_linear.
        kept: why each module that looks like one of those kinds was left as it was, by its name in the model.
    """

    replaced: dict[str, int]
    kept: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{kind}: {count} replaced" for kind, count in self.replaced.items()]
        return "\n".join([*lines, *(f"{name or 'model'} kept: {reason}" for name, reason in self.kept.items())])


@dataclass
class _Patch:
    """What is needed to describe a patch and to undo it; holds no reference to the model itself."""

    replaced: Counter[str] = field(default_factory=Counter)
    kept: dict[str, str] = field(default_factory=dict)
    methods: list[nn.Module] = field(default_factory=list)
    dense: list[tuple[nn.Module, str, nn.Linear]] = field(default_factory=list)
    attention: str | None = None


_patches: WeakKeyDictionary[nn.Module, _Patch] = WeakKeyDictionary()


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if hidden_states.dtype != self.weight.dtype:
        # Eager PyTorch promotes the product; the kernel keeps the dtype of its input.
        result: torch.Tensor = type(self).forward(self, hidden_states)
        return result
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_proj, self.up_proj
    fused = bare(gate) and bare(up) and gate.bias is None and up.bias is None
    # Autocast casts inside the linear layers.
    if fused and not torch.is_autocast_enabled(x.device.type):
        hidden = swiglu_linear(x, gate.weight, up.weight)
    else:
        hidden = swiglu(gate(x), up(x))
    result: torch.Tensor = self.down_proj(hidden)
    return result


_FORWARDS = {"rms_norm": _norm_forward, "swiglu": _mlp_forward}


def patch(model: nn.Module, *, int4: bool = False, group_size: int = 128) -> nn.Module:
    """Let the kernels serve a Hugging Face model of the Llama, Mistral, Qwen2 or Qwen3 family.

    RMSNorms and SwiGLU MLPs get another ``forward``; attention goes through
    transformers' registry of attention functions under the name "triton_kernel_lab". The state dict
    stays as it is, unless ``int4`` is set. What is not known to compute the kernel's formula stays
    eager; ``patch_report`` tells what was replaced, and why the rest was not.

    Of attention, prompts without padding run ``flash_attention``, and one new token a sequence runs
    ``selected_attention`` over the cache, padded or not. Dropout, a custom mask and gradients of one
    token go to PyTorch's scaled_dot_product_attention, as they would without a patch.

    Args:
        model: a model or a part of one; changed in place.
        int4: whether to quantise the linear layers of attention and MLP to 4 bits. The embedding
            and the head of the vocabulary stay dense, and so does a weight that two modules share.
            Dense weights are kept in host memory, for ``unpatch``.
        group_size: columns a scale of ``int4``, positive and even; multiples of 32 run fastest.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: the model is patched already, or group_size is not positive and even. Nothing has
            been changed then.
    """
    _checks.expect(model not in _patches, "patch", "model", "a model that is not patched", "one that is")
    even = isinstance(group_size, int) and group_size > 0 and group_size % 2 == 0
    _checks.expect(even, "patch", "group_size", "a positive even number", group_size)
    done = _Patch()
    attentions: list[nn.Module] = []
    for name, module in model.named_modules():
        kind = role(module)
        if kind is None:
            continue
        if reason := refusal(module):
            done.kept[name] = reason
        elif "forward" in vars(module):
            done.kept[name] = "something has replaced its forward already"
        elif kind == "attention":
            attentions.append(module)
        else:
            module.forward = types.MethodType(_FORWARDS[kind], module)
            done.methods.append(module)
            done.replaced[kind] += 1
    _patch_attention(model, attentions, done)
    if int4:
        _quantise(model, [*attentions, *done.methods], group_size, done)
    _patches[model] = done
    return model


def _patch_attention(model: Any, attentions: list[nn.Module], done: _Patch) -> None:
    """Switch the whole model's attention, which hangs on one configuration."""
    names = {module: name for name, module in model.named_modules()}
    strange = [name for name in done.kept if role(model.get_submodule(name)) == "attention"]
    switchable = hasattr(model, "set_attn_implementation")
    if attentions and switchable and not strange:
        register()
        done.attention = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        done.replaced["attention"] += len(attentions)
        return
    reason = f"the model also has {strange[0]}" if strange else "the model cannot switch its attention"
    done.kept |= {names[module]: reason for module in attentions}


def _quantise(model: nn.Module, parents: list[nn.Module], group_size: int, done: _Patch) -> None:
    """Put INT4 layers where the linear layers of the parents are."""
    names = {module: name for name, module in model.named_modules()}
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for parent in parents:
        for part, layer in linears(parent):
            name = f"{names[parent]}.{part}".lstrip(".")
            if not bare(layer):
                done.kept[name] = f"{type(layer).__name__} is no plain linear layer"
            elif uses[id(layer.weight)] > 1:
                done.kept[name] = "its weight belongs to another module too"
            elif layer.in_features % 2:
                done.kept[name] = f"{layer.in_features} columns are no even number"
            else:
                assert isinstance(layer, nn.Linear)
                setattr(parent, part, Int4Linear(layer, group_size))
                done.dense.append((parent, part, layer))
                # A new parameter: the old one may also be another model's.
                layer.weight = _moved(layer.weight, torch.device("cpu"))
                done.replaced["int4_linear"] += 1


def _moved(weight: Any, device: torch.device) -> Any:
    """The parameter itself where it is on the device already, else a copy."""
    if weight.device == device:
        return weight
    return nn.Parameter(weight.detach().to(device), requires_grad=weight.requires_grad)


def _found(function: str, model: nn.Module) -> _Patch:
    done = _patches.get(model)
    _checks.expect(done is not None, function, "model", "a model that patch has changed", "another")
    assert done is not None
    return done


def patch_report(model: nn.Module) -> PatchReport:
    """What ``patch`` replaced in a model and what it kept; ``print`` shows a line for each.

    Raises:
        ValueError: the model is not patched.
    """
    done = _found("patch_report", model)
    return PatchReport(dict(done.replaced), dict(done.kept))


def unpatch(model: nn.Module) -> nn.Module:
    """Undo ``patch``: the modules, the weights and the attention are the model's own again.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: the model is not patched.
    """
    done = _found("unpatch", model)
    for module in done.methods:
        del module.forward
    for parent, part, layer in done.dense:
        layer.weight = _moved(layer.weight, getattr(parent, part).packed.device)
        setattr(parent, part, layer)
    if done.attention is not None:
        switch: Any = model
        switch.set_attn_implementation(done.attention)
    del _patches[model]
    return model
