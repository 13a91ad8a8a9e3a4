"""The gradients of SwiGLU with respect to both halves.

With s = 1 / (1 + exp(-gate)), as y = gate s up:

    dgate = dy up s (1 + gate (1 - s)),    dup = dy gate s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._rows import RowLayout, row_count, row_layout
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["swiglu_backward", "swiglu_backward_dispatched", "swiglu_packed_backward", "swiglu_packed_backward_op"]

NAME = "swiglu_backward"
Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
_Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Gradients]


@triton.jit
def _backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    columns,
    blocks,
    inner,
    dy_outer,
    dy_inner,
    gate_outer,
    gate_inner,
    up_outer,
    up_inner,
    out_stride,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
    WANT_GATE: tl.constexpr,
    WANT_UP: tl.constexpr,
):
    """BLOCK elements of one row a program; dense tensors are one long row (FLAT)."""
    program = tl.program_id(0).to(tl.int64)
    if FLAT:
        offsets = program * BLOCK + tl.arange(0, BLOCK)
        dy_at = offsets
        gate_at = offsets
        up_at = offsets
        out_at = offsets
    else:
        row = program // blocks
        offsets = program % blocks * BLOCK + tl.arange(0, BLOCK)
        outer = row // inner
        step = row % inner
        dy_at = outer * dy_outer + step * dy_inner + offsets
        gate_at = outer * gate_outer + step * gate_inner + offsets
        up_at = outer * up_outer + step * up_inner + offsets
        out_at = row * out_stride + offsets
    mask = offsets < columns
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    dy = tl.load(dy_ptr + dy_at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if WANT_GATE:
        up = tl.load(up_ptr + up_at, mask=mask, other=0.0).to(tl.float32)
        dgate = dy * up * opened * (1.0 + gate * (1.0 - opened))
        tl.store(dgate_ptr + out_at, dgate.to(dtype), mask=mask)
    if WANT_UP:
        tl.store(dup_ptr + out_at, (dy * (gate * opened)).to(dtype), mask=mask)


_plans = _launch.PlanCache()


def _common(layouts: list[RowLayout]) -> list[RowLayout] | None:
    """All layouts told with one ``inner``, or None where they fold at different dimensions."""
    inner = max(layout.inner for layout in layouts)
    if any(layout.inner not in (1, inner) for layout in layouts):
        return None
    return [layout if layout.inner == inner else layout.split(inner) for layout in layouts]


def _reference(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both gradients by PyTorch, of fp64 in fp64."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, wide = dy.to(dtype), gate.to(dtype)
    opened = torch.sigmoid(wide)
    dgate = g * up.to(dtype) * opened * (1.0 + wide * (1.0 - opened))
    return dgate.to(gate.dtype), (g * (wide * opened)).to(gate.dtype)


def _route(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, want: tuple[bool, bool], packed: bool) -> _Run:
    """How every call of this signature is served: a function of dy, gate and up."""

    def reference(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Gradients:
        dgate, dup = _reference(dy, gate, up)
        if packed:
            return torch.cat([dgate, dup], -1), None
        return dgate if want[0] else None, dup if want[1] else None

    if gate.is_meta:
        return lambda dy, gate, up: _outputs(gate, want, packed)
    refusal = _checks.refusal(gate, dy, up)
    run: _Run = routing.triton_route(NAME, refusal, lambda: _plan(dy, gate, up, want, packed), reference)
    return run


def _plan(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, want: tuple[bool, bool], packed: bool) -> _Run:
    """What launches the kernel for this signature: a function of dy, gate and up."""
    rows, columns = row_count(gate), gate.shape[-1]
    if gate.numel() == 0 or not any(want):
        return lambda dy, gate, up: _outputs(gate, want, packed)
    found = [row_layout(tensor) for tensor in (dy, gate, up)]
    layouts = _common([layout for layout in found if layout]) if all(found) else None
    if layouts is None:
        return lambda dy, gate, up: _forward(dy.contiguous(), gate.contiguous(), up.contiguous(), want, packed)
    flat = not packed and all(tensor.is_contiguous() for tensor in (dy, gate, up))
    if flat:
        rows, columns = 1, rows * columns
    arch = _launch.architecture(gate.get_device())
    config = _launch.choose(NAME, arch, itemsize=gate.element_size(), rows=rows, columns=columns)
    block = min(config["block"], max(triton.next_power_of_2(columns), 16))
    blocks = math.ceil(columns / block)
    strides = [stride for layout in layouts for stride in layout[1:]]
    launch = _launch.bind(
        _backward_kernel,
        (rows * blocks,),
        (dy, gate, up, *_targets(gate, _outputs(gate, want, packed), packed)),
        (columns, blocks, layouts[0].inner, *strides, columns * 2 if packed else columns),
        {"BLOCK": block, "FLAT": flat, "WANT_GATE": want[0], "WANT_UP": want[1]},
        config=config,
        num_warps=config["num_warps"],
    )

    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = not packed and gate.stride() == gate.new_empty(gate.shape).stride()

    def run(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Gradients:
        outputs: Gradients
        if alike:
            # empty_like costs half of new_empty on the host.
            outputs = torch.empty_like(gate) if want[0] else None, torch.empty_like(gate) if want[1] else None
        else:
            outputs = _outputs(gate, want, packed)
        launch(dy, gate, up, *_targets(gate, outputs, packed))
        return outputs

    return run


def _outputs(gate: torch.Tensor, want: tuple[bool, bool], packed: bool) -> Gradients:
    """Memory for the gradients: one dense tensor each, or one for both, which stands first."""
    if packed:
        return gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1])), None
    dgate, dup = (gate.new_empty(gate.shape) if wanted else None for wanted in want)
    return dgate, dup


def _targets(gate: torch.Tensor, outputs: Gradients, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the kernel writes; a gradient that is not wanted gets a pointer that it never follows."""
    dgate, dup = (gate if output is None else output for output in outputs)
    if packed:
        return dgate[..., : gate.shape[-1]], dgate[..., gate.shape[-1] :]
    return dgate, dup


def _forward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, want: tuple[bool, bool], packed: bool
) -> Gradients:
    key: tuple[Any, ...] = (want, packed)
    for tensor in (dy, gate, up):
        key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(dy, gate, up, want, packed))
    result: Gradients = plan(dy, gate, up)
    return result


def swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, want_gate: bool = True, want_up: bool = True
) -> Gradients:
    """The gradients of ``swiglu`` for the incoming gradient ``dy``, which stays as it is.

    Args:
        dy: [..., F] of gate's dtype, any strides; gate and up as ``swiglu`` was given them.
        want_gate: whether the first gradient is wanted; it is None otherwise.
        want_up: the same of the second.

    Returns:
        dgate and dup, contiguous, computed in fp32 and rounded once.
    """
    return _forward(dy, gate, up, (want_gate, want_up), packed=False)


def swiglu_packed_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of ``swiglu_packed``: one contiguous tensor [..., 2F], both halves written in one launch.

    Autograd of two slices would fill two tensors of that size with zeros, and add them.
    """
    half = gate_up.shape[-1] // 2
    both, _ = _forward(dy, gate_up[..., :half], gate_up[..., half:], (True, True), packed=True)
    assert both is not None
    return both


@torch.library.custom_op("triton_kernel_lab::swiglu_backward", mutates_args=())
def _swiglu_backward_op(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, want_gate: bool, want_up: bool
) -> list[torch.Tensor]:
    """``swiglu_backward`` for the dispatcher: a list of the gradients that are wanted, as no output may be None."""
    found = swiglu_backward(dy, gate, up, want_gate=want_gate, want_up=want_up)
    return [gradient for gradient in found if gradient is not None]


@_swiglu_backward_op.register_fake
def _(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, want_gate: bool, want_up: bool) -> list[torch.Tensor]:
    return [gate.new_empty(gate.shape) for wanted in (want_gate, want_up) if wanted]


def swiglu_backward_dispatched(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, want_gate: bool, want_up: bool
) -> Gradients:
    """``swiglu_backward`` through the dispatcher, which asks no more of a tensor than its shape."""
    found = iter(_swiglu_backward_op(dy, gate, up, want_gate, want_up))
    return next(found) if want_gate else None, next(found) if want_up else None


@torch.library.custom_op("triton_kernel_lab::swiglu_packed_backward", mutates_args=())
def swiglu_packed_backward_op(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu_packed_backward`` for the dispatcher."""
    return swiglu_packed_backward(dy, gate_up)


@swiglu_packed_backward_op.register_fake
def _(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape)
