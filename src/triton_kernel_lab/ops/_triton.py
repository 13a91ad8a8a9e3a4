"""Triton, or a stand-in that lets the operators import without it."""

from typing import Any

__all__ = ["HAS_TRITON", "INTERPRET", "tl", "triton"]


class _Missing:
    """Accepts decorators and annotations; nothing that it makes is launched."""

    def __getattr__(self, name: str) -> "_Missing":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Missing":
        return self


try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    INTERPRET: bool = triton.knobs.runtime.interpret
except ImportError:
    triton = tl = _Missing()
    HAS_TRITON = INTERPRET = False
