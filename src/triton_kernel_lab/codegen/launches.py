"""What an operator would launch on a target, learned by calling it with no device and no data.

The operator runs as it does for a user, on CPU tensors whose memory is reserved
and never touched; only where it asks for the architecture, and where it would
compile, does it get another answer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import DTYPES, Case, Dims, Tensors, Variant, dtype_name, shape_name
from triton_kernel_lab.ops import _checks, _launch

__all__ = ["Call", "Launch", "calls", "plan"]

# Bytes; a device's allocator starts no tensor at a lesser multiple.
_APART = 256


@dataclass(frozen=True)
class Call:
    """One way of calling an operator: what is called, at which shape and dtype."""

    variant: Variant
    dims: Dims
    dtype: torch.dtype

    @property
    def label(self) -> str:
        """The text of the call, such as ``default 128x1024 float16``."""
        return f"{self.variant.name} {shape_name(self.dims)} {dtype_name(self.dtype)}"


@dataclass(frozen=True)
class Launch:
    """A kernel with all that decides how it is compiled, and how much one launch does.

    ``tiled`` tells how the first tensors are described, if they are; ``elements``
    counts the operator's results; ``options`` holds ``num_warps`` and whatever
    else the operator gives the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    tensors: Tensors
    tiled: tuple[_launch.Tiled, ...]
    scalars: tuple[int | float, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    elements: int


def calls(case: Case) -> list[Call]:
    """The calls that stand for a kernel.

    Each timed shape in each timed dtype; the shape at which each line of the
    launch table is tuned, in the dtype that it is tuned in; and one call of
    each other variant.
    """
    default, *others = case.variants
    found = [Call(default, dims, DTYPES[dtype]) for dims, dtype in case.cells]
    for bucket in case.buckets:
        found.append(Call(default, bucket.dims, torch.float32 if bucket.itemsize == 4 else torch.bfloat16))
    found += [Call(other, (other.dims or case.timed)[0], DTYPES[case.timed_dtypes[0]]) for other in others]
    return list({call.label: call for call in found}.values())


def plan(call: Call, target: str) -> list[Launch]:
    """What one call would launch on ``target``, such as ``sm_90``, in order.

    Raises:
        triton_kernel_lab.routing.FallbackError: Triton does not serve the call.
    """
    inputs = _unfilled(call)
    with _instead_of_a_device(target) as bound, torch.no_grad(), routing.strict():
        outputs = call.variant.run(*inputs)
    elements = sum(each.numel() for each in (outputs if isinstance(outputs, tuple) else (outputs,)))
    return [Launch(**launch, elements=elements) for launch in bound]


# Where lint runs torch is not installed, and its classes are of no known type.
class _Unseeded(TorchFunctionMode):  # type: ignore[misc]
    """Lets a case draw on the meta device, for which torch has no generator."""

    device = torch.device("meta")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = {name: value for name, value in (kwargs or {}).items() if value is not self}
        # Nothing to fill. Asked all the same, torch imports its compiler, which takes seconds.
        return args[0] if func.__name__ == "normal_" else func(*args, **others)


def _unfilled(call: Call) -> Tensors:
    """The inputs of a call without their values: drawn without memory, then reserved.

    They lie side by side in their order, for an operator may ask which of two comes first in memory, and
    what it compiles must not depend on where an allocator happens to put them.
    """
    with _Unseeded() as generator:
        drawn = call.variant.inputs(call.dims, call.dtype, generator)
    sizes = [math.ceil(tensor.untyped_storage().nbytes() / _APART) * _APART for tensor in drawn]
    places = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    return tuple(map(_reserved, drawn, places))


def _reserved(drawn: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """A tensor in ``place`` with the layout of one that has no memory."""
    if not drawn.is_meta:
        return drawn
    elements = place[: drawn.untyped_storage().nbytes()].view(drawn.dtype)
    # Integers may be lengths or indices, which an operator may look at.
    if not drawn.is_floating_point():
        elements.zero_()
    return elements.as_strided(drawn.shape, drawn.stride(), elements.storage_offset() + drawn.storage_offset())


@contextlib.contextmanager
def _instead_of_a_device(target: str) -> Iterator[list[dict[str, Any]]]:
    """Within the context operators plan for ``target``; what they would compile is listed instead."""
    bound: list[dict[str, Any]] = []

    def bind(
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[torch.Tensor],
        scalars: Sequence[int | float],
        constants: Mapping[str, Any],
        *,
        config: Mapping[str, Any],
        tiled: Sequence[_launch.Tiled] = (),
        **options: Any,
    ) -> Callable[..., None]:
        launch = {"kernel": kernel, "grid": tuple(grid), "tensors": tuple(tensors), "scalars": tuple(scalars)}
        launch |= {"tiled": tuple(tiled), "constants": dict(constants)}
        bound.append(launch | {"options": options, "config": dict(config)})
        return lambda *tensors: None

    plans = _launch.snapshot()
    _launch.forget_plans()
    with (
        # Served by Triton on the CPU, as under the interpreter.
        mock.patch.object(_checks, "INTERPRET", True),
        mock.patch.object(_launch, "architecture", return_value=target),
        mock.patch.object(_launch, "bind", bind),
        # None of the tensors', so that no stream is asked for.
        mock.patch.object(torch.cuda, "current_device", return_value=-1),
    ):
        try:
            yield bound
        finally:
            _launch.restore(plans)
