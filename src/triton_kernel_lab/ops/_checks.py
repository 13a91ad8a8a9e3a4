"""Checks that every operator makes of its arguments, in one wording."""

from __future__ import annotations

import functools

import torch
from torch.autograd import forward_ad

from triton_kernel_lab import routing
from triton_kernel_lab.ops._launch import PLAIN_TYPES
from triton_kernel_lab.ops._triton import HAS_TRITON, INTERPRET, triton

__all__ = [
    "FLOATS",
    "dispatched",
    "expect",
    "expect_alike",
    "expect_first_derivative",
    "expect_float",
    "forward_mode",
    "no_gradient",
    "note_autograd",
    "refusal",
    "wants_grad",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def expect(condition: bool, operator: str, argument: str, expected: str, found: object) -> None:
    """Raise ValueError naming operator, argument, expected and found."""
    if not condition:
        raise ValueError(f"{operator}: {argument}: expected {expected}, got {found}.")


def expect_float(operator: str, argument: str, x: torch.Tensor) -> None:
    """Raise TypeError unless ``x`` is a real floating-point tensor."""
    if not x.is_floating_point():
        raise TypeError(f"{operator}: {argument}: expected a floating-point tensor, got {x.dtype}.")


def expect_alike(operator: str, argument: str, x: torch.Tensor, other: str, y: torch.Tensor) -> None:
    """Raise ValueError unless both tensors are on one device."""
    expect(x.device == y.device, operator, argument, f"the device of {other}, {y.device}", x.device)


def forward_mode(*tensors: torch.Tensor | None) -> bool:
    """Whether one of these tensors carries a tangent.

    An open level alone does not count: a forward pass within it and its
    recomputation outside must save the same tensors.
    """
    if forward_ad._current_level < 0:
        return False
    # What is compiled, and what torch.func wraps once more, does not show its tangent.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def wants_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a derivative of an operator of these tensors is wanted, backward or forward."""
    # A dual tensor of forward-mode differentiation does not say requires_grad.
    if forward_ad._current_level >= 0 and forward_mode(*tensors):
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


@functools.cache
def driver_failure() -> str | None:
    """Why Triton cannot drive the CUDA device, such as a missing C compiler; None if it can."""
    try:
        triton.runtime.driver.active.get_current_device()
    except Exception as error:
        # Whatever keeps it from starting, no kernel has run yet.
        return f"Triton's driver does not start: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def refusal(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[str, str] | None:
    """The layer and the reason why the Triton kernel does not take these tensors, or None where it does."""
    dtypes = {tensor.dtype for tensor in (x, *others) if tensor is not None}
    if not HAS_TRITON:
        return "import", "Triton is not installed"
    if not (x.is_cuda or (INTERPRET and x.device.type == "cpu")):
        return "device", f"tensors are on {x.device.type}, not on a CUDA device"
    if not INTERPRET and (failure := driver_failure()):
        return "device", failure
    if unknown := dtypes - set(FLOATS):
        names = ", ".join(sorted(map(str, unknown)))
        return "inputs", f"the kernel takes float16, bfloat16 and float32, not {names}"
    return None


def dispatched(*tensors: torch.Tensor | None) -> bool:
    """Whether a call of these tensors must go through torch's dispatcher.

    The dispatcher also materialises a lazy negation, which the memory does not
    show. Compiling is asked first, because Dynamo cannot trace is_neg.
    """
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:  # noqa: SIM110  A generator in any() costs half as much again, on every call.
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_neg()):
            return True
    return False


def no_gradient(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[str, str] | None:
    """The layer and the reason why the kernels do not give the derivative that is wanted, or None where they do."""
    if forward_mode(x, *others):
        return "autograd", "a derivative in forward mode is wanted, and the kernels have none"
    # What is compiled asks when it runs; on the meta device nothing runs.
    if torch.compiler.is_compiling() or x.is_meta:
        return None
    if torch._C._are_functorch_transforms_active():
        return "autograd", "a transform of torch.func is active, and the kernels do not see through it"
    return refusal(x, *others)


def expect_first_derivative(operator: str) -> None:
    """Raise RuntimeError in a backward pass that builds a graph of itself."""
    # Not once_differentiable: it lets a call pass whose incoming gradient needs none, though the result depends
    # on the inputs.
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{operator}: a second derivative (create_graph=True) is wanted, and the kernels have only the first;"
            f" call {operator}_reference instead."
        )


def note_autograd(operator: str) -> None:
    """Record that the reference serves a call because a gradient is wanted."""
    if not torch.compiler.is_compiling():
        routing.fallback(operator, "autograd", "a gradient is wanted, and the kernel has only a forward pass")
