"""SwiGLU: y = silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

Formula: Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202,
section 2, without the projections.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._rows import RowLayout, row_count, row_layout
from triton_kernel_lab.ops._triton import tl, triton
from triton_kernel_lab.ops.swiglu_backward import (
    swiglu_backward,
    swiglu_backward_dispatched,
    swiglu_packed_backward,
    swiglu_packed_backward_op,
)

__all__ = ["swiglu", "swiglu_packed", "swiglu_reference"]

NAME = "swiglu"


@triton.jit
def _swiglu_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    columns,
    blocks,
    inner,
    gate_outer,
    gate_inner,
    up_outer,
    up_inner,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):
    """BLOCK elements of one row a program; a dense tensor is one long row (FLAT)."""
    program = tl.program_id(0).to(tl.int64)
    if FLAT:
        offsets = program * BLOCK + tl.arange(0, BLOCK)
        gate_at = offsets
        up_at = offsets
        y_at = offsets
    else:
        row = program // blocks
        offsets = program % blocks * BLOCK + tl.arange(0, BLOCK)
        gate_at = row // inner * gate_outer + row % inner * gate_inner + offsets
        up_at = row // inner * up_outer + row % inner * up_inner + offsets
        y_at = row * columns + offsets
    mask = offsets < columns
    gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The differentiable PyTorch form of ``swiglu``; fp64 inputs are computed in fp64."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    _checks.expect_float(NAME, "gate", gate)
    _checks.expect(gate.ndim >= 1, NAME, "gate", "at least one dimension", "a scalar")
    _checks.expect(up.shape == gate.shape, NAME, "up", f"the shape of gate, {tuple(gate.shape)}", tuple(up.shape))
    if up.dtype != gate.dtype:
        raise TypeError(f"{NAME}: up: expected the dtype of gate, {gate.dtype}, got {up.dtype}.")
    _checks.expect_alike(NAME, "up", up, "gate", gate)


_plans = _launch.PlanCache()


def _common_layouts(gate: RowLayout, up: RowLayout) -> tuple[RowLayout, RowLayout] | None:
    """Both layouts told with one ``inner``, or None where they fold at different dimensions."""
    if gate.inner == up.inner:
        return gate, up
    if gate.inner == 1:
        return gate.split(up.inner), up
    if up.inner == 1:
        return gate, up.split(gate.inner)
    return None


def _route(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """How every call of this signature is served: a function of gate and up."""
    _check(gate, up)
    if gate.is_meta:
        return lambda gate, up: gate.new_empty(gate.shape)
    return routing.triton_route(NAME, _checks.refusal(gate, up), lambda: _plan(gate, up), swiglu_reference)


def _plan(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """What launches the kernel for this signature: a function of gate and up."""
    # An empty tensor counts as contiguous whatever its strides, so it must leave first.
    if gate.numel() == 0:
        return lambda gate, up: gate.new_empty(gate.shape)
    gate_rows, up_rows = row_layout(gate), row_layout(up)
    layouts = _common_layouts(gate_rows, up_rows) if gate_rows and up_rows else None
    if layouts is None:
        return lambda gate, up: _forward(gate.contiguous(), up.contiguous())
    rows, columns = row_count(gate), gate.shape[-1]
    flat = gate.is_contiguous() and up.is_contiguous()
    if flat:
        rows, columns = 1, rows * columns
    arch = _launch.architecture(gate.get_device())
    config = _launch.choose(NAME, arch, itemsize=gate.element_size(), rows=rows, columns=columns)
    block = min(config["block"], max(triton.next_power_of_2(columns), 16))
    blocks = math.ceil(columns / block)
    (inner, *gate_strides), (_, *up_strides) = layouts
    out = gate.new_empty(gate.shape)
    launch = _launch.bind(
        _swiglu_kernel,
        (rows * blocks,),
        (gate, up, out),
        (columns, blocks, inner, *gate_strides, *up_strides),
        {"BLOCK": block, "FLAT": flat},
        config=config,
        num_warps=config["num_warps"],
    )

    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = gate.stride() == out.stride()

    def run(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        # empty_like costs half of new_empty on the host.
        out = torch.empty_like(gate) if alike else gate.new_empty(gate.shape)
        launch(gate, up, out)
        return out

    return run


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    key = (
        *(gate.dtype, gate.shape, gate.stride(), gate.device, gate.data_ptr() & 15),
        *(up.dtype, up.shape, up.stride(), up.device, up.data_ptr() & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(gate, up))
    result: torch.Tensor = plan(gate, up)
    return result


@torch.library.custom_op("triton_kernel_lab::swiglu", mutates_args=())
def _swiglu_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _forward(gate, up)


@_swiglu_op.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    _check(gate, up)
    return gate.new_empty(gate.shape)


@torch.library.custom_op("triton_kernel_lab::swiglu_packed", mutates_args=())
def _swiglu_packed_op(gate_up: torch.Tensor) -> torch.Tensor:
    return _forward(*_halves(gate_up))


@_swiglu_packed_op.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = _halves(gate_up)
    _check(gate, up)
    return gate.new_empty(gate.shape)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = gate_up.shape[-1] // 2
    return gate_up[..., :half], gate_up[..., half:]


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    want_gate, want_up = ctx.needs_input_grad
    return swiglu_backward_dispatched(dy, *ctx.saved_tensors, want_gate=want_gate, want_up=want_up)


def _packed_op_backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    return swiglu_packed_backward_op(dy, *ctx.saved_tensors)


_swiglu_op.register_autograd(_op_backward, setup_context=_keep)
_swiglu_packed_op.register_autograd(_packed_op_backward, setup_context=_keep)


class _SwiGLU(torch.autograd.Function):
    """The operator and its gradients without the dispatcher, which costs more than a small kernel runs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _checks.expect_first_derivative(NAME)
        gate, up = ctx.saved_tensors
        if _checks.dispatched(dy, gate, up):
            return _op_backward(ctx, dy)
        want_gate, want_up = ctx.needs_input_grad
        return swiglu_backward(dy, gate, up, want_gate=want_gate, want_up=want_up)


class _PackedSwiGLU(torch.autograd.Function):
    """As ``_SwiGLU``, with one gradient for both halves."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(*_halves(gate_up))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        _checks.expect_first_derivative(NAME)
        (gate_up,) = ctx.saved_tensors
        return _packed_op_backward(ctx, dy) if _checks.dispatched(dy, gate_up) else swiglu_packed_backward(dy, gate_up)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation ``silu(gate) * up``, computed in fp32 and rounded once.

    Shazeer 2020, section 2, without the projections.

    Args:
        gate: float16, bfloat16 or float32 [..., F] with any strides. Rows that
            lie at two strides are read in place; other layouts are copied first.
        up: as gate, with its shape, dtype and device.

    Returns:
        A contiguous tensor with the shape and dtype of gate. When a gradient
        is wanted the backward pass runs a Triton kernel too, and computes
        exactly the gradients asked for. The differentiable PyTorch form serves
        forward mode, torch.func, and what Triton does not take.

    Raises:
        TypeError: gate is not floating-point, or the dtypes differ.
        ValueError: the shapes or devices differ.
        RuntimeError: from the backward pass where it is called with
            create_graph=True: there is no second derivative. That of
            ``swiglu_reference`` has one.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    wanted = _checks.wants_grad(gate, up)
    if wanted and (reason := _checks.no_gradient(gate, up)):
        _check(gate, up)
        if not torch.compiler.is_compiling():
            routing.fallback(NAME, *reason)
        return swiglu_reference(gate, up)
    result: torch.Tensor
    if _checks.dispatched(gate, up):
        result = _swiglu_op(gate, up)
    elif wanted:
        result = _SwiGLU.apply(gate, up)
    else:
        result = _forward(gate, up)
    return result


def swiglu_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu`` of one tensor [..., 2F] whose first half is the gate.

    Both halves are read in place. Returns a contiguous tensor [..., F]. Its
    gradient is one tensor [..., 2F], which one launch writes.

    Raises:
        ValueError: the last dimension is odd.
        TypeError, RuntimeError, FallbackError: as ``swiglu``.
    """
    _checks.expect(
        gate_up.ndim >= 1 and gate_up.shape[-1] % 2 == 0,
        NAME,
        "gate_up",
        "an even last dimension",
        tuple(gate_up.shape),
    )
    if _checks.wants_grad(gate_up) and _checks.no_gradient(gate_up) is None:
        packed = _swiglu_packed_op if _checks.dispatched(gate_up) else _PackedSwiGLU.apply
        result: torch.Tensor = packed(gate_up)
        return result
    return swiglu(*_halves(gate_up))
