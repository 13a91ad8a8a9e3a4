"""The gradients of RMSNorm with respect to x and to the weight.

With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = dy (weight + offset):

    dx = r (g - n mean(g n)),    dweight = sum over rows of dy n.

Both follow from Zhang and Sennrich 2019, equation 4. r is computed anew: x has
to be read anyway, and a second sum over what is in registers costs less than
keeping a tensor from the forward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._rows import RowLayout, row_count, row_layout
from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["rms_norm_backward", "rms_norm_backward_op"]

NAME = "rms_norm_backward"
Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""dy, x, weight and plus."""
_Run = Callable[..., Gradients]


@triton.jit
def _row_start(row, inner, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Where a row begins; strides are constants so that whole vectors are seen to be aligned."""
    return row // inner * OUTER + row % inner * INNER


@triton.jit
def _gain(w_ptr, columns, inside, offset, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        gain = tl.load(w_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    else:
        gain = tl.full(columns.shape, 1.0, tl.float32)
    return gain


@triton.jit
def _share(dy, normed, dtype: tl.constexpr, LLAMA: tl.constexpr):
    """What each element adds to the weight's gradient: the weight multiplied what the casting made of it."""
    if LLAMA:
        normed = normed.to(dtype).to(tl.float32)
    return dy * normed


@triton.jit
def _rows_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    plus_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    dy_inner,
    x_inner,
    eps,
    offset,
    DY_OUTER: tl.constexpr,
    DY_INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_INNER: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_PLUS: tl.constexpr,
    LLAMA: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
):
    """Whole rows in registers, ROWS at a time; a program keeps its share of the weight's gradient to the end."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    gain = _gain(w_ptr, columns, inside, offset, HAS_WEIGHT)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        # int64: row * stride passes 2^31 long before memory runs out.
        row = tl.full((ROWS,), tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside[None, :]
        x_at = _row_start(row, x_inner, X_OUTER, X_INNER)[:, None] + columns[None, :]
        dy_at = _row_start(row, dy_inner, DY_OUTER, DY_INNER)[:, None] + columns[None, :]
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at, mask=mask, other=0.0).to(tl.float32)
        square = tl.sum(x * x, 1) / N
        if ROWS > 1:
            # With eps = 0 the rows beyond the last would be 0 * inf, and add NaN.
            square = tl.where(row < rows, square, 1.0)
        rstd = tl.rsqrt(square + eps)
        normed = x * rstd[:, None]
        if WANT_X:
            scaled = dy * gain
            mean = tl.sum(scaled * normed, 1) / N
            dx = (scaled - normed * mean[:, None]) * rstd[:, None]
            at = row[:, None] * N + columns[None, :]
            if HAS_PLUS:
                dx += tl.load(plus_ptr + at, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + at, dx.to(dtype), mask=mask)
        if WANT_WEIGHT:
            total += _share(dy, normed, dtype, LLAMA)
    if WANT_WEIGHT:
        part = tl.program_id(0).to(tl.int64) * N
        tl.store(parts_ptr + part + columns, tl.sum(total, 0), mask=inside)


@triton.jit
def _means_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    means_ptr,
    rows,
    dy_inner,
    x_inner,
    eps,
    offset,
    DY_OUTER: tl.constexpr,
    DY_INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_INNER: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """r and mean(g n) of one long row a program, read in chunks of BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + _row_start(row, x_inner, X_OUTER, X_INNER)
    dy_row = dy_ptr + _row_start(row, dy_inner, DY_OUTER, DY_INNER)
    squares = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=1):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < N
        x = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        squares += x * x
        products += x * dy * _gain(w_ptr, columns, inside, offset, HAS_WEIGHT)
    rstd = tl.rsqrt(tl.sum(squares, 0) / N + eps)
    tl.store(means_ptr + row, rstd)
    tl.store(means_ptr + rows + row, tl.sum(products, 0) * rstd / N)


@triton.jit
def _tiles_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    plus_ptr,
    dx_ptr,
    parts_ptr,
    means_ptr,
    rows,
    dy_inner,
    x_inner,
    offset,
    DY_OUTER: tl.constexpr,
    DY_INNER: tl.constexpr,
    X_OUTER: tl.constexpr,
    X_INNER: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_PLUS: tl.constexpr,
    LLAMA: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
):
    """BLOCK columns of every so manieth row: both gradients, once the rows' means are known."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gain = _gain(w_ptr, columns, inside, offset, HAS_WEIGHT)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.full((), step, tl.int64)
        x_at = _row_start(row, x_inner, X_OUTER, X_INNER) + columns
        dy_at = _row_start(row, dy_inner, DY_OUTER, DY_INNER) + columns
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(means_ptr + row)
        normed = x * rstd
        if WANT_X:
            dx = (dy * gain - normed * tl.load(means_ptr + rows + row)) * rstd
            if HAS_PLUS:
                dx += tl.load(plus_ptr + row * N + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * N + columns, dx.to(dtype), mask=inside)
        if WANT_WEIGHT:
            total += _share(dy, normed, dtype, LLAMA)
    if WANT_WEIGHT:
        part = tl.program_id(0).to(tl.int64) * N
        tl.store(parts_ptr + part + columns, total, mask=inside)


@triton.jit
def _columns_kernel(parts_ptr, dw_ptr, parts, N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The sum of all parts of BLOCK columns, in the order of the programs that made them."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(0, parts, ROWS, num_stages=1):
        part = start + tl.arange(0, ROWS)
        mask = (part < parts)[:, None] & (columns < N)[None, :]
        total += tl.load(parts_ptr + part.to(tl.int64)[:, None] * N + columns[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + columns, tl.sum(total, 0).to(dw_ptr.dtype.element_ty), mask=columns < N)


def _reference(inputs: Inputs, eps: float, llama: bool, offset: float) -> Gradients:
    """Both gradients by PyTorch, of fp64 in fp64.

    Its gradient of the rounding to x's dtype is 1, as the kernels take it to be.
    """
    dy, x, weight, plus = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, g = x.to(dtype), dy.to(dtype)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * rstd
    scaled = g if weight is None else g * (weight.to(dtype) + offset)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    if plus is not None:
        dx = dx + plus.to(dtype)
    share = g * (normed.to(x.dtype).to(dtype) if llama else normed)
    return dx.to(x.dtype), None if weight is None else share.reshape(-1, share.shape[-1]).sum(0).to(weight.dtype)


_plans = _launch.PlanCache()


def _nothing(want: tuple[bool, bool], dy: torch.Tensor, x: torch.Tensor, weight: Any, plus: Any) -> Gradients:
    """The gradients where nothing is launched: no rows add up to a gradient of zeros."""
    return x.new_empty(x.shape) if want[0] else None, weight.new_zeros(weight.shape) if want[1] else None


def _route(inputs: Inputs, how: tuple[Any, ...], want: tuple[bool, bool]) -> _Run:
    """How every call of this signature is served; ``how`` is eps, whether the casting is llama, offset."""

    def reference(*inputs: Any) -> Gradients:
        dx, dw = _reference(inputs, *how)
        return dx if want[0] else None, dw if want[1] else None

    dy, x, weight, plus = inputs
    if x.is_meta:
        return functools.partial(_nothing, want)
    refusal = _checks.refusal(x, dy, weight, plus)
    run: _Run = routing.triton_route(NAME, refusal, lambda: _plan(inputs, how, want), reference)
    return run


def _plan(inputs: Inputs, how: tuple[Any, ...], want: tuple[bool, bool]) -> _Run:
    """What launches the kernels for this signature: a function of dy, x, weight and plus."""
    dy, x, weight, plus = inputs
    want_x, want_weight = want
    if x.numel() == 0 or not any(want):
        return functools.partial(_nothing, want)
    dy_layout, x_layout = row_layout(dy), row_layout(x)
    scattered = weight is not None and weight.numel() > 1 and weight.stride(0) != 1
    if dy_layout is None or x_layout is None or scattered or not (plus is None or plus.is_contiguous()):

        def densely(dy: torch.Tensor, x: torch.Tensor, weight: Any, plus: Any) -> Gradients:
            dy, x = dy if dy_layout else dy.contiguous(), x if x_layout else x.contiguous()
            weight, plus = (each if each is None else each.contiguous() for each in (weight, plus))
            return _forward((dy, x, weight, plus), how, want)

        return densely
    rows, columns = row_count(x), x.shape[-1]
    arch = _launch.architecture(x.get_device())
    config = _launch.choose(NAME, arch, itemsize=x.element_size(), rows=rows, columns=columns)
    launch = _bind(inputs, (dy_layout, x_layout), how, want, config)
    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = x.stride() == x.new_empty(x.shape).stride()

    def run(dy: torch.Tensor, x: torch.Tensor, weight: Any, plus: Any) -> Gradients:
        # empty_like costs half of new_empty on the host.
        dx = (torch.empty_like(x) if alike else x.new_empty(x.shape)) if want_x else None
        dw = torch.empty_like(weight) if want_weight else None
        launch(dy, x, x if weight is None else weight, x if plus is None else plus, dx, dw)
        return dx, dw

    return run


def _bind(
    inputs: Inputs,
    layouts: tuple[RowLayout, RowLayout],
    how: tuple[Any, ...],
    want: tuple[bool, bool],
    config: _launch.Config,
) -> Callable[..., None]:
    """The launches of a signature as one function of the inputs and the gradients, None where not wanted."""
    dy, x, weight, plus = inputs
    (dy_inner, dy_outer, dy_step), (x_inner, x_outer, x_step) = layouts
    eps, llama, offset = how
    flags = {"HAS_WEIGHT": weight is not None, "HAS_PLUS": plus is not None, "LLAMA": llama}
    flags |= {"WANT_X": want[0], "WANT_WEIGHT": want[1]}
    rows, columns = row_count(x), x.shape[-1]
    gain, plus, dx = x if weight is None else weight, x if plus is None else plus, x.new_empty(x.shape)
    strides = {"DY_OUTER": dy_outer, "DY_INNER": dy_step, "X_OUTER": x_outer, "X_INNER": x_step, "N": columns}
    block, whole = triton.next_power_of_2(columns), config["kernel"] == "rows"
    group = config["rows"] if whole else 1
    programs = min(math.ceil(rows / group), config["programs"])
    parts = torch.empty((programs, columns) if want[1] else (1,), dtype=torch.float32, device=x.device)
    means = torch.empty((1,) if whole else (2, rows), dtype=torch.float32, device=x.device)
    measure = reduce = None
    if want[1]:
        width = config["sum_columns"]
        narrow = {"N": columns, "BLOCK": width, "ROWS": config["sum_rows"]}
        bind = functools.partial(_launch.bind, config=config, num_warps=config["sum_warps"])
        # Before the kernel that computes the gradients: what is bound last stands on record for the call.
        reduce = bind(_columns_kernel, (math.ceil(columns / width),), (parts, gain), (programs,), narrow)
    bind = functools.partial(_launch.bind, config=config, num_warps=config["num_warps"])
    scalars: tuple[float, ...] = (rows, dy_inner, x_inner, eps, offset)
    constants: dict[str, int] = strides | flags | {"STAGES": config["stages"]}
    if whole:
        constants |= {"BLOCK": block, "ROWS": group}
        gradients = bind(_rows_kernel, (programs,), (dy, x, gain, plus, dx, parts), scalars, constants)
    else:
        tile = min(block, config["block"])
        narrow = strides | {"BLOCK": tile, "HAS_WEIGHT": weight is not None}
        measure = bind(_means_kernel, (rows,), (dy, x, gain, means), scalars, narrow)
        constants |= {"BLOCK": tile}
        scalars, tensors = (rows, dy_inner, x_inner, offset), (dy, x, gain, plus, dx, parts, means)
        gradients = bind(_tiles_kernel, (programs, math.ceil(columns / tile)), tensors, scalars, constants)
    parts_shape, means_shape, device = parts.shape, means.shape, x.device

    def launch(dy: torch.Tensor, x: torch.Tensor, gain: torch.Tensor, plus: torch.Tensor, dx: Any, dw: Any) -> None:
        # Where a gradient is not wanted, the kernel takes a pointer that it never follows.
        parts = x if dw is None else torch.empty(parts_shape, dtype=torch.float32, device=device)
        dx = x if dx is None else dx
        if measure is None:
            gradients(dy, x, gain, plus, dx, parts)
        else:
            means = torch.empty(means_shape, dtype=torch.float32, device=device)
            measure(dy, x, gain, means)
            gradients(dy, x, gain, plus, dx, parts, means)
        if reduce is not None:
            reduce(parts, dw)

    return launch


def _forward(inputs: Inputs, how: tuple[Any, ...], want: tuple[bool, bool]) -> Gradients:
    key: tuple[Any, ...] = (how, want)
    for tensor in inputs:
        if tensor is None:
            key += (None,)
        else:
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(inputs, how, want))
    result: Gradients = plan(*inputs)
    return result


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    casting: str = "llama",
    offset: float = 0.0,
    plus: torch.Tensor | None = None,
    want_x: bool = True,
    want_weight: bool = True,
) -> Gradients:
    """The gradients of ``rms_norm`` for the incoming gradient ``dy``, which stays as it is.

    Args:
        dy: [..., N] of x's dtype, any strides.
        x: as ``rms_norm`` was given it; so weight, eps, casting and offset.
        plus: a gradient that reaches x by another way, such as that of the sum
            in ``add_rms_norm``: added to dx in fp32, before it is rounded.
        want_x: whether the first gradient is wanted; it is None otherwise.
        want_weight: the same of the second; with no weight it is None.

    Returns:
        dx with the shape and dtype of x, contiguous; dweight [N] in weight's
        dtype, summed in fp32 in a fixed order.
    """
    how = (float(eps), casting == "llama", float(offset))
    return _forward((dy, x, weight, plus if want_x else None), how, (want_x, want_weight and weight is not None))


@torch.library.custom_op("triton_kernel_lab::rms_norm_backward", mutates_args=())
def rms_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    plus: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> list[torch.Tensor]:
    """``rms_norm_backward`` for the dispatcher: a list of the gradients that are wanted, as no output may be None."""
    found = rms_norm_backward(
        dy, x, weight, eps, casting=casting, offset=offset, plus=plus, want_x=want_x, want_weight=want_weight
    )
    return [gradient for gradient in found if gradient is not None]


@rms_norm_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    plus: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    want_x: bool,
    want_weight: bool,
) -> list[torch.Tensor]:
    wanted = (x if want_x else None, weight if want_weight else None)
    return [tensor.new_empty(tensor.shape) for tensor in wanted if tensor is not None]
