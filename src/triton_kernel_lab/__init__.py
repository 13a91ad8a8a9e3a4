"""Triton kernels for LLM inference, and the lab that measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "add_rms_norm",
    "add_rms_norm_",
    "flash_attention",
    "int4_linear",
    "pack_int4",
    "paged_kv_gather",
    "qk_scores",
    "rms_norm",
    "selected_attention",
    "selected_attention_paged",
    "swiglu",
    "swiglu_linear",
    "swiglu_packed",
    "unpack_int4",
]

if TYPE_CHECKING:
    from triton_kernel_lab.ops.add_rms_norm import add_rms_norm, add_rms_norm_
    from triton_kernel_lab.ops.flash_attention import flash_attention
    from triton_kernel_lab.ops.int4_linear import int4_linear, pack_int4, unpack_int4
    from triton_kernel_lab.ops.paged_kv_gather import paged_kv_gather
    from triton_kernel_lab.ops.qk_scores import qk_scores
    from triton_kernel_lab.ops.rms_norm import rms_norm
    from triton_kernel_lab.ops.selected_attention import selected_attention, selected_attention_paged
    from triton_kernel_lab.ops.swiglu import swiglu, swiglu_packed
    from triton_kernel_lab.ops.swiglu_linear import swiglu_linear

_HOME = {name: name.rstrip("_") for name in __all__} | {
    "pack_int4": "int4_linear",
    "selected_attention_paged": "selected_attention",
    "swiglu_packed": "swiglu",
    "unpack_int4": "int4_linear",
}


def __getattr__(name: str) -> Any:
    """Import an operator when it is first asked for; the package itself loads no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        operator = getattr(importlib.import_module(f"{__name__}.ops.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sentence = f"{__name__}.{name}: expected torch, found none; install the extra gpu."
        raise ImportError(sentence, name="torch") from error
    globals()[name] = operator
    return operator


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
