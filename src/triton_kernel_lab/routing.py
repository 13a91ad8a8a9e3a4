"""Where each operator call was served, and why.

A call reaches Triton only if Triton imports, every tensor is on a CUDA device
that Triton can drive, the operator supports the inputs, and the kernel can be
compiled and loaded. Otherwise the PyTorch reference serves it, the reason is
recorded and a warning is given once. All that is decided once a signature.
Strict mode raises instead: tests and measurements run in it, so that no number
ever comes from the reference.

Nothing else is caught. An operator's own ValueError or TypeError, a lack of
memory, an illegal access or an interrupt would be hidden by a second answer,
and a kernel that has started may have written already.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["FallbackError", "FallbackWarning", "Route", "fallback", "forget", "report", "strict", "triton_route"]

LAYERS = ("import", "device", "inputs", "launch", "autograd")
# What Triton raises, by name, before anything of a kernel has run.
_NOT_LAUNCHED = frozenset(
    {
        "CompilationError",
        "CompileTimeAssertionFailure",
        "OutOfResources",
        "PTXASError",
        "UnsupportedLanguageConstruct",
    }
)


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


def triton_route(
    operator: str, refusal: tuple[str, str] | None, build: Callable[[], Any], reference: Callable[..., Any]
) -> Any:
    """How every call of one signature is served: a function of the operator's tensors.

    Args:
        operator: its name.
        refusal: the layer and the reason why Triton does not take the inputs, or None.
        build: compiles and loads the kernel without running it, and returns what launches it.
        reference: the PyTorch form, a function of the same tensors.

    Returns:
        What ``build`` made; where Triton does not serve, a function that notes
        the fallback on each call and calls ``reference``.
    """
    if refusal is None:
        try:
            return build()
        except Exception as error:
            if not before_launch(error):
                raise
            refusal = "launch", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    layer, reason = refusal

    def fall_back(*tensors: Any) -> Any:
        # Noted on each call: strict mode and the record may have changed since.
        fallback(operator, layer, reason)
        return reference(*tensors)

    return fall_back


def before_launch(error: Exception) -> bool:
    """Whether Triton itself says that a kernel cannot be compiled or loaded, so that another may serve."""
    kind = type(error)
    return kind.__module__.startswith("triton.") and kind.__name__ in _NOT_LAUNCHED


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
