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


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated activation ``silu(gate) * up``, computed in fp32 and rounded once.

    Shazeer 2020, section 2, without the projections.

    Args:
        gate: float16, bfloat16 or float32 [..., F] with any strides. Rows that
            lie at two strides are read in place; other layouts are copied first.
        up: as gate, with its shape, dtype and device.

    Returns:
        A contiguous tensor with the shape and dtype of gate. When a gradient
        is wanted the differentiable PyTorch form computes it.

    Raises:
        TypeError: gate is not floating-point, or the dtypes differ.
        ValueError: the shapes or devices differ.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    if _checks.wants_grad(gate, up):
        _check(gate, up)
        _checks.note_autograd(NAME)
        return swiglu_reference(gate, up)
    # The dispatcher also materialises a lazy negation, which the memory does not show. Compiling is asked
    # first, because Dynamo cannot trace is_neg.
    if (
        torch.compiler.is_compiling()
        or not {type(gate), type(up)} <= _launch.PLAIN_TYPES
        or gate.is_neg()
        or up.is_neg()
    ):
        result: torch.Tensor = _swiglu_op(gate, up)
        return result
    return _forward(gate, up)


def swiglu_packed(gate_up: torch.Tensor) -> torch.Tensor:
    """``swiglu`` of one tensor [..., 2F] whose first half is the gate.

    Both halves are read in place. Returns a contiguous tensor [..., F].

    Raises:
        ValueError: the last dimension is odd.
    """
    _checks.expect(
        gate_up.ndim >= 1 and gate_up.shape[-1] % 2 == 0,
        NAME,
        "gate_up",
        "an even last dimension",
        tuple(gate_up.shape),
    )
    half = gate_up.shape[-1] // 2
    return swiglu(gate_up[..., :half], gate_up[..., half:])
