"""Triton kernels for LLM inference, and the lab that measures them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["rms_norm", "swiglu", "swiglu_packed"]

if TYPE_CHECKING:
    from triton_kernel_lab.ops.rms_norm import rms_norm
    from triton_kernel_lab.ops.swiglu import swiglu, swiglu_packed

_HOME = {"rms_norm": "rms_norm", "swiglu": "swiglu", "swiglu_packed": "swiglu"}


def __getattr__(name: str) -> Any:
    """Import an operator when it is first asked for; the package itself loads no torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    operator = getattr(importlib.import_module(f"{__name__}.ops.{_HOME[name]}"), name)
    globals()[name] = operator
    return operator


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
