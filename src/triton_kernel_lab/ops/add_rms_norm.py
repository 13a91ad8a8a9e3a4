"""Residual addition and RMSNorm in one pass: s = x + residual, y = s / sqrt(mean(s^2) + eps) * weight.

Formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019,
arXiv:1910.07467, equation 4, of the sum that a pre-norm transformer block
carries on (Xiong et al. 2020, arXiv:2002.04745, figure 1b).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._norm import check as check_norm
from triton_kernel_lab.ops._norm import normalise, rms_norm_reference
from triton_kernel_lab.ops._rows import RowLayout, row_count, row_layout
from triton_kernel_lab.ops._triton import tl, triton
from triton_kernel_lab.ops.rms_norm_backward import rms_norm_backward, rms_norm_backward_op

__all__ = ["add_rms_norm", "add_rms_norm_", "add_rms_norm_reference"]

NAME = "add_rms_norm"
IN_PLACE = "add_rms_norm_"
Pair = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _rows_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rows,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    offset,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ORDERED: tl.constexpr,
    DENSE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """ROWS whole rows a program, each read once into registers.

    DENSE inputs are indexed alike. ORDERED asks for all three inputs before any
    of them is waited for.
    """
    # int64: row * stride passes 2^31 long before memory runs out.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    # One row a program leaves none over.
    mask = inside[None, :] if ROWS == 1 else (row < rows)[:, None] & inside[None, :]
    dense = row[:, None] * N + columns[None, :]
    if DENSE:
        x_at = dense
        residual_at = dense
    else:
        x_at = (row // inner * x_outer + row % inner * x_inner)[:, None] + columns[None, :]
        residual_at = (row // inner * residual_outer + row % inner * residual_inner)[:, None] + columns[None, :]
    # The compiler moves a load that is not volatile down to its use: the weight would be asked for after x and
    # residual have come, and waited for once more.
    w = tl.load(w_ptr + columns, mask=inside, other=0.0, volatile=ORDERED) if HAS_WEIGHT else columns
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0, volatile=ORDERED)
    residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0, volatile=ORDERED)
    # In the tensors' own dtype: one rounding, as eager's; fp32 between would round to the same bits.
    total = x + residual
    tl.store(sum_ptr + (residual_at if IN_PLACE else dense), total, mask=mask)
    wide = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) * (1.0 / N) + eps)
    y = normalise(wide, rstd[:, None], w[None, :], offset, HAS_WEIGHT, HAS_OFFSET, LLAMA, y_ptr.dtype.element_ty)
    tl.store(y_ptr + (x_at if IN_PLACE else dense), y, mask=mask)


@triton.jit
def _streamed_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    eps,
    offset,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    LLAMA: tl.constexpr,
):
    """One row a program in chunks of BLOCK; what is read a second time is the sum just written."""
    # Chunks that fill the row need no mask.
    EVEN: tl.constexpr = N % BLOCK == 0
    row = tl.program_id(0).to(tl.int64)
    x_start = row // inner * x_outer + row % inner * x_inner
    residual_start = row // inner * residual_outer + row % inner * residual_inner
    x_row = x_ptr + x_start
    residual_row = residual_ptr + residual_start
    y_row = y_ptr + (x_start if IN_PLACE else row * N)
    sum_row = sum_ptr + (residual_start if IN_PLACE else row * N)
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=1):
        c = start + columns
        inside = (c < N) | EVEN
        x = tl.load(x_row + c, mask=inside, other=0.0, eviction_policy="evict_first")
        residual = tl.load(residual_row + c, mask=inside, other=0.0, eviction_policy="evict_first")
        total = x + residual
        tl.store(sum_row + c, total, mask=inside)
        wide = total.to(tl.float32)
        squares += wide * wide
    rstd = tl.rsqrt(tl.sum(squares, 0) * (1.0 / N) + eps)
    # The sums come back to the threads that wrote them or to others of the program.
    tl.debug_barrier()
    for start in tl.range(0, N, BLOCK, num_stages=1):
        c = start + columns
        inside = (c < N) | EVEN
        wide = tl.load(sum_row + c, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + c, mask=inside, other=0.0) if HAS_WEIGHT else c
        y = normalise(wide, rstd, w, offset, HAS_WEIGHT, HAS_OFFSET, LLAMA, y_ptr.dtype.element_ty)
        tl.store(y_row + c, y, mask=inside)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    offset: float = 0.0,
) -> Pair:
    """The differentiable PyTorch form of ``add_rms_norm``; fp64 inputs are computed in fp64."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, casting=casting, offset=offset), total


def _check(
    operator: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str
) -> None:
    check_norm(operator, x, weight, eps, casting)
    shape = tuple(x.shape)
    _checks.expect(residual.shape == x.shape, operator, "residual", f"the shape of x, {shape}", tuple(residual.shape))
    if residual.dtype != x.dtype:
        raise TypeError(f"{operator}: residual: expected the dtype of x, {x.dtype}, got {residual.dtype}.")
    _checks.expect_alike(operator, "residual", residual, "x", x)


def _spans(x: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and reach in bytes of each dimension that has more than one element, longest stride first."""
    size = x.element_size()
    spans = [(stride * size, (n - 1) * stride * size) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]
    return sorted(spans, reverse=True)


def _extent(x: torch.Tensor) -> int:
    """The bytes from the first element to the end of the last; 0 of an empty tensor."""
    return sum(reach for _, reach in _spans(x)) + x.element_size() if x.numel() else 0


def _expect_one_place_each(argument: str, x: torch.Tensor) -> None:
    """Raise ValueError unless no two elements of ``x`` share memory: each stride must pass what the shorter reach."""
    below = 0
    for stride, reach in reversed(_spans(x)):
        _checks.expect(
            stride > below,
            *(IN_PLACE, argument, "a view whose elements do not overlap"),
            f"shape {tuple(x.shape)} with strides {x.stride()}",
        )
        below += reach


def _meet(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether some element of ``x`` shares bytes with one of ``other``; a tensor is where its pointer says."""
    distance = other.data_ptr() - x.data_ptr()
    if not -_extent(other) < distance < _extent(x):
        return False
    # From an element of x to one of other: the distance less a multiple of each stride, within what the
    # dimensions of that stride reach, those of x upwards and those of other downwards.
    terms: dict[int, tuple[int, int]] = {}
    for stride, reach in _spans(x):
        low, high = terms.get(stride, (0, 0))
        terms[stride] = low, high + reach
    for stride, reach in _spans(other):
        low, high = terms.get(stride, (0, 0))
        terms[stride] = low - reach, high
    slack = max(x.element_size(), other.element_size())
    ranges = [(stride, *terms[stride]) for stride in sorted(terms, reverse=True) if stride]
    return any(-other.element_size() < rest < x.element_size() for rest in _rests(ranges, distance, slack))


def _rests(ranges: list[tuple[int, int, int]], distance: int, slack: int) -> Iterator[int]:
    """What multiples of the strides, longest first, leave of a distance, where that can come within the slack."""
    if not ranges:
        yield distance
        return
    (stride, low, high), *shorter = ranges
    least = distance - slack - sum(top for _, _, top in shorter)
    most = distance + slack - sum(bottom for _, bottom, _ in shorter)
    first, last = max(low, -(-least // stride) * stride), min(high, most)
    for step in range(first, last + 1, stride):
        yield from _rests(shorter, distance - step, slack)


def _check_in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str
) -> None:
    """What can be said against a call in place without knowing where its tensors lie."""
    _check(IN_PLACE, x, residual, weight, eps, casting)
    _expect_one_place_each("x", x)
    _expect_one_place_each("residual", residual)


def _expect_apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Raise ValueError where one of the three shares memory with another."""
    pairs = [("residual", residual, "x", x)]
    if weight is not None:
        pairs += [("weight", weight, "x", x), ("weight", weight, "residual", residual)]
    for argument, tensor, name, other in pairs:
        _checks.expect(not _meet(other, tensor), IN_PLACE, argument, f"memory apart from {name}", "a view of the same")


def _guarded(plan: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Any:
    """The plan of an in-place call behind the check that its tensors lie apart, wherever later ones lie.

    Whatever ends the plan, autograd is told that x and residual were written:
    a call that is not dispatched has nobody else to tell it, and what was saved
    of the old values must not be used.
    """
    x_extent, residual_extent = _extent(x), _extent(residual)
    weight_extent = 0 if weight is None else _extent(weight)
    # By how far the tensors lie from each other: views into one buffer come again and again.
    apart: set[tuple[int, int]] = set()

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Pair:
        start = x.data_ptr()
        to_residual = residual.data_ptr() - start
        to_weight = 0 if weight is None else weight.data_ptr() - start
        near = -residual_extent < to_residual < x_extent
        if weight_extent:
            near = near or -weight_extent < to_weight < x_extent
            near = near or -weight_extent < to_weight - to_residual < residual_extent
        if near and (to_residual, to_weight) not in apart:
            _expect_apart(x, residual, weight)
            apart.add((to_residual, to_weight))
        try:
            result: Pair = plan(x, residual, weight)
        finally:
            torch.autograd.graph.increment_version([each for each in (x, residual) if not each.is_inference()])
        return result

    return run


_plans = _launch.PlanCache()


def _common(x: RowLayout | None, residual: RowLayout | None) -> tuple[RowLayout, RowLayout] | None:
    """Both layouts told with one ``inner``, or None where a copy is needed."""
    if x is None or residual is None:
        return None
    if x.inner == residual.inner:
        return x, residual
    if x.inner == 1:
        return x.split(residual.inner), residual
    if residual.inner == 1:
        return x, residual.split(x.inner)
    return None


def _route(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    in_place: bool,
) -> Any:
    """How every call of this signature is served: a function of x, residual and weight."""
    operator = IN_PLACE if in_place else NAME
    if in_place:
        _check_in_place(x, residual, weight, eps, casting)
    else:
        _check(NAME, x, residual, weight, eps, casting)
    if x.is_meta:
        # There is nothing to copy in place, but the copying tells autograd.
        return lambda x, residual, weight: (
            _written(x, residual, (x, residual)) if in_place else _outputs(x, residual, False)
        )
    if in_place:
        # Before anything is compiled for them.
        _expect_apart(x, residual, weight)

    def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Pair:
        found = add_rms_norm_reference(x, residual, weight, eps, casting=casting, offset=offset)
        return _written(x, residual, found) if in_place else found

    def build() -> Any:
        return _plan(x, residual, weight, eps, casting, offset, in_place)

    served = routing.triton_route(operator, _checks.refusal(x, residual, weight), build, reference)
    return _guarded(served, x, residual, weight) if in_place else served


def _plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    in_place: bool,
) -> Any:
    """What launches the kernel for this signature, after copies where it does not take the layout."""
    # An empty tensor counts as contiguous whatever its strides, so it must leave first.
    if x.numel() == 0:
        return lambda x, residual, weight: _outputs(x, residual, in_place)
    layouts = _common(row_layout(x), row_layout(residual))
    if layouts is None or (weight is not None and x.shape[-1] > 1 and weight.stride(0) != 1):

        def copy_first(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Pair:
            weight = weight if weight is None else weight.contiguous()
            if layouts is not None:
                return _forward(x, residual, weight, eps, casting, offset, in_place)
            found = _forward(x.contiguous(), residual.contiguous(), weight, eps, casting, offset, False)
            return _written(x, residual, found) if in_place else found

        return copy_first
    return _kernel_plan(x, residual, weight, eps, casting, offset, in_place, layouts)


def _kernel_plan(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    in_place: bool,
    layouts: tuple[RowLayout, RowLayout],
) -> Any:
    """A launch of the kernel that the table chooses, bound to this signature."""
    rows, columns = row_count(x), x.shape[-1]
    arch = _launch.architecture(x.get_device())
    config = _launch.choose(NAME, arch, itemsize=x.element_size(), rows=rows, columns=columns)
    (inner, *x_strides), (_, *residual_strides) = layouts
    scalars: tuple[float, ...] = (inner, *x_strides, *residual_strides, float(eps), float(offset))
    constants = {"N": columns, "IN_PLACE": in_place}
    constants |= {"HAS_WEIGHT": weight is not None, "HAS_OFFSET": offset != 0, "LLAMA": casting == "llama"}
    if config["kernel"] == "rows":
        dense = x.is_contiguous() and residual.is_contiguous()
        constants |= {"BLOCK": triton.next_power_of_2(columns), "ROWS": config["rows"]}
        constants |= {"ORDERED": bool(config["ordered"]), "DENSE": dense}
        kernel, grid, scalars = _rows_kernel, (math.ceil(rows / config["rows"]),), (rows, *scalars)
    else:
        constants |= {"BLOCK": config["block"]}
        kernel, grid = _streamed_kernel, (rows,)
    y, total = _outputs(x, residual, in_place)
    tensors = (x, residual, x if weight is None else weight, y, total)
    launch = _launch.bind(kernel, grid, tensors, scalars, constants, config=config, num_warps=config["num_warps"])

    def run_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Pair:
        launch(x, residual, x if weight is None else weight, x, residual)
        return x, residual

    # Not is_contiguous(): it overlooks the stride of a dimension of size one, and empty_like keeps it.
    alike = x.stride() == y.stride()

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> Pair:
        # empty_like costs half of new_empty on the host.
        y, total = (torch.empty_like(x), torch.empty_like(x)) if alike else _outputs(x, residual, False)
        launch(x, residual, x if weight is None else weight, y, total)
        return y, total

    return run_in_place if in_place else run


def _outputs(x: torch.Tensor, residual: torch.Tensor, in_place: bool) -> Pair:
    return (x, residual) if in_place else (x.new_empty(x.shape), x.new_empty(x.shape))


def _written(x: torch.Tensor, residual: torch.Tensor, found: Pair) -> Pair:
    """The inputs, overwritten with what was computed beside them."""
    return x.copy_(found[0]), residual.copy_(found[1])


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    casting: str,
    offset: float,
    in_place: bool,
) -> Pair:
    # Written out flat: unpacking parts into it takes as long as asking for them.
    key: tuple[Any, ...] = (
        x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15, eps, casting, offset, in_place,
        residual.dtype, residual.shape, residual.stride(), residual.device, residual.data_ptr() & 15,
    )  # fmt: skip
    if weight is not None:
        key += (weight.dtype, weight.shape, weight.stride(), weight.device, weight.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.keep(key, _route(x, residual, weight, eps, casting, offset, in_place))
    result: Pair = plan(x, residual, weight)
    return result


@torch.library.custom_op("triton_kernel_lab::add_rms_norm", mutates_args=())
def _add_rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(x, residual, weight, eps, casting, offset, False)


@_add_rms_norm_op.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(NAME, x, residual, weight, eps, casting)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("triton_kernel_lab::add_rms_norm_", mutates_args=("x", "residual"))
def _add_rms_norm_in_place_op(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float
) -> None:
    _forward(x, residual, weight, eps, casting, offset, True)


@_add_rms_norm_in_place_op.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str, offset: float
) -> None:
    _check_in_place(x, residual, weight, eps, casting)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    _, _, weight, *ctx.how = inputs
    _, summed = output
    # All that both gradients need: neither x nor the residual is kept.
    ctx.save_for_backward(summed, weight)
    # A result that nothing depends on has no gradient, rather than one of zeros that would be read.
    ctx.set_materialize_grads(False)
    if not any(ctx.needs_input_grad[:2]):
        ctx.mark_non_differentiable(summed)


def _gradients(ctx: Any, dx: torch.Tensor | None, dweight: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What the inputs are given: x and the residual the same gradient, and only those that are wanted."""
    want_x, want_residual, *_ = ctx.needs_input_grad
    return dx if want_x else None, dx if want_residual else None, dweight, None, None, None


def _op_backward(
    ctx: Any, dnormed: torch.Tensor | None, dsummed: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The gradients through the dispatcher, which asks no more of a tensor than its shape."""
    if dnormed is None:
        return _gradients(ctx, dsummed, None)
    summed, weight = ctx.saved_tensors
    want_x, want_residual, want_weight, *_ = ctx.needs_input_grad
    wanted = want_x or want_residual, want_weight
    found = iter(rms_norm_backward_op(dnormed, summed, weight, dsummed, *ctx.how, *wanted))
    return _gradients(ctx, *(next(found) if each else None for each in wanted))


_add_rms_norm_op.register_autograd(_op_backward, setup_context=_keep)


class _AddRMSNorm(torch.autograd.Function):
    """The operator and its gradients without the dispatcher, which costs more than a small kernel runs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Pair:
        x, residual, weight, eps, casting, offset = inputs
        output = _forward(x, residual, weight, eps, casting, offset, False)
        _keep(ctx, inputs, output)
        return output

    @staticmethod
    def backward(
        ctx: Any, dnormed: torch.Tensor | None, dsummed: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        _checks.expect_first_derivative(NAME)
        summed, weight = ctx.saved_tensors
        if dnormed is None or _checks.dispatched(dnormed, dsummed, summed, weight):
            return _op_backward(ctx, dnormed, dsummed)
        eps, casting, offset = ctx.how
        want_x, want_residual, want_weight, *_ = ctx.needs_input_grad
        found = rms_norm_backward(
            *(dnormed, summed, weight, eps),
            casting=casting,
            offset=offset,
            plus=dsummed,
            want_x=want_x or want_residual,
            want_weight=want_weight,
        )
        return _gradients(ctx, *found)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise the sum over the last dimension.

    ``summed = x + residual``, rounded to the dtype of both as eager PyTorch
    rounds it, bit for bit; ``normed`` is ``rms_norm(summed, weight, eps)``
    (Zhang and Sennrich 2019, equation 4), whose mean is taken of the rounded
    sum in fp32. A sum that overflows its dtype is infinite in ``summed`` and
    leaves NaN at its place and zeros elsewhere in its row of ``normed``, as in
    PyTorch.

    Args:
        x: float16, bfloat16 or float32 [..., N] with any strides. Rows that lie
            at two strides are read in place; other layouts are copied first.
        residual: as x, with its shape, dtype and device.
        weight: [N] of any floating dtype, or None for no weight.
        eps: added to the mean of squares, dimensionless.
        casting: "llama" rounds the normalised value to x's dtype before the
            weight multiplies it; "gemma" rounds once, at the end.
        offset: added to the weight in fp32; Gemma's checkpoints want 1.0.

    Returns:
        (normed, summed), contiguous tensors with the shape and dtype of x. When
        a gradient is wanted the backward pass runs Triton kernels too, and
        computes exactly the gradients asked for: x and residual have the same
        one, in their dtype, to which that of ``summed`` is added in fp32; that of
        the weight has the weight's dtype and is summed over the rows in fp32. It
        keeps ``summed`` and the weight, neither x nor residual. The
        differentiable PyTorch form serves forward mode, torch.func, and what
        Triton does not take.

    Raises:
        TypeError: x or weight is not floating-point, or residual's dtype is not x's.
        ValueError: shapes or devices differ, casting is unknown or eps is negative.
        RuntimeError: from the backward pass where it is called with
            create_graph=True: there is no second derivative. That of
            ``add_rms_norm_reference`` has one.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    wanted = _checks.wants_grad(x, residual, weight)
    if wanted and (reason := _checks.no_gradient(x, residual, weight)):
        _check(NAME, x, residual, weight, eps, casting)
        if not torch.compiler.is_compiling():
            routing.fallback(NAME, *reason)
        return add_rms_norm_reference(x, residual, weight, eps, casting=casting, offset=offset)
    if _checks.dispatched(x, residual, weight):
        normed, summed = _add_rms_norm_op(x, residual, weight, eps, casting, offset)
        return normed, summed
    if wanted:
        normed, summed = _AddRMSNorm.apply(x, residual, weight, eps, casting, offset)
        return normed, summed
    return _forward(x, residual, weight, eps, casting, offset, False)


def add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: str = "llama",
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``add_rms_norm`` in place: ``x`` becomes ``normed`` and ``residual`` becomes ``summed``.

    Both results have the bits of the form that is not in place. Strides are
    kept; neither tensor may overlap itself, and no two of x, residual and
    weight may share an element. Views that interleave in one buffer without
    sharing an element are taken; views whose strides do not nest are refused,
    overlapping or not.

    Args:
        x, residual, weight, eps, casting, offset: as for ``add_rms_norm``.

    Returns:
        (x, residual), the tensors given.

    Raises:
        TypeError: as for ``add_rms_norm``.
        ValueError: as for ``add_rms_norm``, and where a view overlaps itself or
            another argument, or where a gradient is wanted. Nothing has been
            written then.
        triton_kernel_lab.routing.FallbackError: strict mode, and Triton does
            not serve the call.
    """
    _checks.expect(
        not _checks.wants_grad(x, residual, weight),
        *(IN_PLACE, "x", "no gradient to be wanted: call add_rms_norm, or this under torch.no_grad()"),
        "one that is",
    )
    if not torch.compiler.is_compiling() and (x.is_neg() or residual.is_neg()):
        # The dispatcher does not write through a lazy negation.
        _check_in_place(x, residual, weight, eps, casting)
        _expect_apart(x, residual, weight)
        return _written(x, residual, add_rms_norm(x, residual, weight, eps, casting=casting, offset=offset))
    if _checks.dispatched(x, residual, weight):
        _add_rms_norm_in_place_op(x, residual, weight, eps, casting, offset)
        return x, residual
    return _forward(x, residual, weight, eps, casting, offset, True)
