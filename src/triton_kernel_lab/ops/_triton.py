"""Triton and its Gluon, or stand-ins that let the operators import without them."""

from typing import Any

__all__ = ["HAS_GLUON", "HAS_TRITON", "INTERPRET", "gl", "gluon", "hopper", "tl", "triton"]


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

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    HAS_GLUON = True
except ImportError:
    gluon = gl = hopper = _Missing()
    HAS_GLUON = False
