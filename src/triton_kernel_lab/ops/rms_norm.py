"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

Formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
arXiv:1910.07467, equation 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._norm import check as check_norm
from triton_kernel_lab.ops._norm import normalise, rms_norm_reference
from triton_kernel_lab.ops._rows import row_count, row_layout
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward, rms_norm_backward_op

__all__ = ["rms_norm", "rms_norm_reference"]

NAME = "rms_norm"


@triton.jit
def _rows_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    offset,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """ROWS whole rows a program, each read once into registers."""
    # int64: row * stride passes 2^31 long before memory runs out.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    mask = (row < rows)[:, None] & inside[None, :]
    start = row // inner * outer_stride + row % inner * inner_stride
    x = tl.load(x_ptr + start[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    # Asked for before the reduction, so that its latency hides behind it.
    w = tl.load(w_ptr + columns, mask=inside, other=0.0) if HAS_WEIGHT else columns
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + eps)
    y = normalise(x, rstd[:, None], w[None, :], offset, HAS_WEIGHT, HAS_OFFSET, LLAMA, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * N + columns[None, :], y, mask=mask)


@triton.jit
def _streamed_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    inner,
    outer_stride,
    inner_stride,
    eps,
    offset,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    PACK: tl.constexpr,
    STREAM_STORES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """One row a program in chunks of BLOCK, read twice; its first HELD elements stay in registers.

    The second read of a chunk hits the L2 cache, so DRAM sees one. Holding part
    of the row takes that much from the L2's traffic, which binds on long rows.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    # Chunks that fill the row need no mask.
    EVEN: tl.constexpr = (N - HELD) % BLOCK == 0
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row // inner * outer_stride + row % inner * inner_stride
    y_row = y_ptr + row * N
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(HELD, N, BLOCK, num_stages=1):
        c = start + columns
        inside = (c < N) | EVEN
        x = tl.load(x_row + c, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    if HELD > 0:
        # Before the first reduction: no load moves up across its barrier.
        first = tl.arange(0, HELD)
        held = tl.load(x_row + first, eviction_policy="evict_first")
        wide = held.to(tl.float32)
        total = tl.sum(squares, 0) + tl.sum(wide * wide, 0)
    else:
        total = tl.sum(squares, 0)
    rstd = tl.rsqrt(total / N + eps)
    for start in tl.range(HELD, N, BLOCK, num_stages=1):
        c = start + columns
        inside = (c < N) | EVEN
        x = tl.load(x_row + c, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(w_ptr + c, mask=inside, other=0.0) if HAS_WEIGHT else c
        y = normalise(x, rstd, w, offset, HAS_WEIGHT, HAS_OFFSET, LLAMA, dtype)
        if STREAM_STORES:
            tl.store(y_row + c, y, mask=inside, cache_modifier=".cs")
        else:
            tl.store(y_row + c, y, mask=inside)
    if HELD > 0:
        if PACK > 0:
            # An opaque copy. Without it the compiler keeps the fp32 values of the
            # first pass alive instead of the 16-bit ones: twice the registers, and spills.
            held = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [held], dtype=held.dtype, is_pure=False, pack=PACK
            )
        w = tl.load(w_ptr + first) if HAS_WEIGHT else first
        y = normalise(held.to(tl.float32), rstd, w, offset, HAS_WEIGHT, HAS_OFFSET, LLAMA, dtype)
        tl.store(y_row + first, y, cache_modifier=".cs")


def _check(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str) -> None:
    check_norm(NAME, x, weight, eps, casting)


_plans = _launch.PlanCache()


def _route(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float) -> Any:
    """How every call of this signature is served: a function of x and weight."""
    _check(x, weight, eps, casting)
    if x.is_meta:
        return lambda x, weight: x.new_empty(x.shape)
    return routing.triton_route(
        NAME,
        _checks.refusal(x, weight),
        lambda: _plan(x, weight, eps, casting, offset),
        lambda x, weight: rms_norm_reference(x, weight, eps, casting=casting, offset=offset),
    )


def _plan(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float) -> Any:
    """What launches a kernel for this signature: a function of x and weight."""
    # An empty tensor counts as contiguous whatever its strides, so it must leave first.
    if x.numel() == 0:
        return lambda x, weight: x.new_empty(x.shape)
    layout, rows, columns = row_layout(x), row_count(x), x.shape[-1]
    if layout is None or (weight is not None and columns > 1 and weight.stride(0) != 1):
        return lambda x, weight: _forward(
            x if layout else x.contiguous(), weight if weight is None else weight.contiguous(), eps, casting, offset
        )
    arch = _launch.architecture(x.get_device())
    config = _launch.choose(NAME, arch, itemsize=x.element_size(), rows=rows, columns=columns)
    out = x.new_empty(x.shape)
    tensors = (x, x if weight is None else weight, out)
    scalars: tuple[float, ...] = (*layout, float(eps), float(offset))
    constants = {"N": columns, "HAS_WEIGHT": weight is not None, "HAS_OFFSET": offset != 0, "LLAMA": casting == "llama"}
    if config["kernel"] == "rows":
        constants |= {"BLOCK": triton.next_power_of_2(columns), "ROWS": config["rows"]}
        kernel, grid, scalars = _rows_kernel, (math.ceil(rows / config["rows"]),), (rows, *scalars)
    else:
        held = config["held"] if config["held"] < columns else 0
        pack = 0 if INTERPRET else 4 // x.element_size()
        constants |= {"BLOCK": config["block"], "HELD": held, "PACK": pack, "STREAM_STORES": config["stream_stores"]}
        kernel, grid = _streamed_kernel, (rows,)
    launch = _launch.bind(kernel, grid, tensors, scalars, constants, config=config, num_warps=config["num_warps"])
    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = x.stride() == out.stride()

    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        # empty_like costs half of new_empty on the host.
        out = torch.empty_like(x) if alike else x.new_empty(x.shape)
        launch(x, x if weight is None else weight, out)
        return out

    return run


def _forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float) -> torch.Tensor:
    key: tuple[Any, ...] = (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15, eps, casting, offset)
    if weight is not None:
        key += (weight.dtype, weight.shape, weight.stride(), weight.device, weight.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(x, weight, eps, casting, offset))
    result: torch.Tensor = plan(x, weight)
    return result


@torch.library.custom_op("triton_kernel_lab::rms_norm", mutates_args=())
def _rms_norm_op(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float) -> torch.Tensor:
    return _forward(x, weight, eps, casting, offset)


@_rms_norm_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float) -> torch.Tensor:
    _check(x, weight, eps, casting)
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, *ctx.how = inputs
    ctx.save_for_backward(x, weight)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients through the dispatcher, which asks no more of a tensor than its shape."""
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    found = iter(rms_norm_backward_op(dy, x, weight, None, *ctx.how, *wanted))
    return (*(next(found) if each else None for each in wanted), None, None, None)


_rms_norm_op.register_autograd(_op_backward, setup_context=_keep)


class _RMSNorm(torch.autograd.Function):
    """The operator and its gradients without the dispatcher, which costs more than a small kernel runs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _checks.expect_first_derivative(NAME)
        x, weight = ctx.saved_tensors
        if _checks.dispatched(dy, x, weight):
            return _op_backward(ctx, dy)
        eps, casting, offset = ctx.how
        want_x, want_weight = ctx.needs_input_grad[:2]
        found = rms_norm_backward(
            dy, x, weight, eps, casting=casting, offset=offset, want_x=want_x, want_weight=want_weight
        )
        return (*found, None, None, None)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    offset: float = 0.0,
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension.

    ``y = x / sqrt(mean(x^2) + eps) * (weight + offset)``, Zhang and Sennrich
    2019, equation 4. The mean is taken in fp32; a row whose sum of x^2 leaves
    the fp32 range (3.4e38) comes out as zeros, as in PyTorch.

    Args:
        x: float16, bfloat16 or float32 [..., N] with any strides. Rows that lie
            at two strides are read in place; other layouts are copied first.
        weight: [N] of any floating dtype, or None for no weight.
        eps: added to the mean of squares, dimensionless.
        casting: "llama" rounds the normalised value to x's dtype before the
            weight multiplies it, as Llama's RMSNorm does; "gemma" rounds once,
            at the end.
        offset: added to the weight in fp32; Gemma's checkpoints want 1.0.

    Returns:
        A contiguous tensor with the shape and dtype of x. When a gradient is
        wanted the backward pass runs Triton kernels too, and computes exactly
        the gradients asked for: dx in x's dtype, and that of the weight in the
        weight's, summed over the rows in fp32. The differentiable PyTorch form
        serves forward mode, torch.func, and what Triton does not take.

    Raises:
        TypeError: x or weight is not floating-point.
        ValueError: the shape of weight is not [N], the devices differ, casting
            is unknown or eps is negative.
        RuntimeError: from the backward pass where it is called with
            create_graph=True: there is no second derivative. That of
            ``rms_norm_reference`` has one.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    wanted = _checks.wants_grad(x, weight)
    if wanted and (reason := _checks.no_gradient(x, weight)):
        _check(x, weight, eps, casting)
        if not torch.compiler.is_compiling():
            routing.fallback(NAME, *reason)
        return rms_norm_reference(x, weight, eps, casting=casting, offset=offset)
    result: torch.Tensor
    if _checks.dispatched(x, weight):
        result = _rms_norm_op(x, weight, eps, casting, offset)
    elif wanted:
        result = _RMSNorm.apply(x, weight, eps, casting, offset)
    else:
        result = _forward(x, weight, eps, casting, offset)
    return result
