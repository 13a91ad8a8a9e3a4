"""Where each operator call was served, and why.

A call reaches Triton only if Triton imports, every tensor is on a CUDA device
and the operator supports the inputs. Otherwise the PyTorch reference serves
it, the reason is recorded and a warning is given once. Strict mode raises
instead: tests and measurements run in it, so that no number ever comes from
the reference.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["FallbackError", "FallbackWarning", "Route", "fallback", "forget", "report", "strict"]

LAYERS = ("import", "device", "inputs", "launch", "autograd")


class FallbackError(RuntimeError):
    """Strict mode met a call that Triton does not serve."""


class FallbackWarning(UserWarning):
    """A call was served by the PyTorch reference."""


@dataclass(frozen=True)
class Route:
    """One way in which an operator left Triton.

    ``layer`` is the check that sent it away: ``import`` (Triton is missing),
    ``device`` (no CUDA device, or tensors elsewhere), ``inputs`` (a dtype or
    layout that the kernel does not take), ``launch`` (the kernel could not be
    compiled or launched) or ``autograd`` (a gradient is wanted from an
    operator whose kernel has none).
    """

    operator: str
    served_by: str
    layer: str
    reason: str


_routes: dict[Route, None] = {}
_strict: contextvars.ContextVar[bool | None] = contextvars.ContextVar("triton_kernel_lab_strict", default=None)


def _is_strict() -> bool:
    chosen = _strict.get()
    return os.environ.get("TRITON_KERNEL_LAB_STRICT", "") not in ("", "0") if chosen is None else chosen


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within the context, raise FallbackError instead of falling back."""
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def fallback(operator: str, layer: str, reason: str) -> None:
    """Note that the PyTorch reference is about to serve a call.

    Raises:
        FallbackError: in strict mode.
    """
    assert layer in LAYERS, layer
    if _is_strict():
        raise FallbackError(f"{operator}: not served by Triton ({layer}: {reason}), and strict mode is on.")
    route = Route(operator, "torch", layer, reason)
    if route not in _routes:
        _routes[route] = None
        # A gradient through the reference is the documented path, not a surprise.
        if layer != "autograd":
            warnings.warn(f"{operator} is served by PyTorch ({layer}: {reason}).", FallbackWarning, stacklevel=_depth())


def _depth() -> int:
    """How many frames above ``fallback``, itself counted, the caller's own code is."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("triton_kernel_lab", "torch"):
        frame, depth = frame.f_back, depth + 1
    return depth


def report() -> list[Route]:
    """The distinct fallbacks so far, in the order in which they first came."""
    return list(_routes)


def forget() -> None:
    """Empty the record, so that the next fallback warns again."""
    _routes.clear()
