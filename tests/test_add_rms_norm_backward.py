"""The case of the gradients of ``add_rms_norm``: what it takes for right, and what it times beside the bare call."""

from __future__ import annotations

import pytest
import torch
from operator_checks import DEVICE, INTERPRETED, randn

from triton_kernel_lab.cases import add_rms_norm_backward as case
from triton_kernel_lab.cases._base import Baseline, Tensors, through_autograd
from triton_kernel_lab.lab import check
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm_reference

CASTINGS = pytest.mark.parametrize(("casting", "offset"), [("llama", 0.0), ("gemma", 1.0)])


def drawn(dtype: torch.dtype) -> Tensors:
    return case.inputs((5, 80), dtype, torch.Generator(DEVICE).manual_seed(1))


@pytest.mark.parametrize("eps", [case.EPS, 1.0])
@CASTINGS
def test_the_oracle_is_the_derivative_of_both_results(casting: str, offset: float, eps: float) -> None:
    """Autograd of the PyTorch form in float64 gives it, and x and the residual the same gradient."""
    dnormed, dsummed, summed, weight = (tensor.double() for tensor in drawn(torch.float16))
    residual = randn(5, 80, dtype=torch.float64)
    x, residual, weight = leaves = [each.requires_grad_() for each in (summed - residual, residual, weight)]
    both = add_rms_norm_reference(x, residual, weight, eps, casting=casting, offset=offset)
    dx, dresidual, dweight = torch.autograd.grad(both, leaves, (dnormed, dsummed))
    found = case.oracle(dnormed, dsummed, summed, weight.detach(), offset=offset, eps=eps)
    assert torch.equal(dx, dresidual)
    for output, expected in zip(found, (dx, dweight), strict=True):
        assert output.dtype == torch.float64
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_eager_rounds_the_gradient_of_the_norm_before_it_adds() -> None:
    """In 16 bits dx is the sum that autograd of two operators makes of what reaches the sum."""
    dnormed, dsummed, summed, weight = drawn(torch.float16)
    alone, dweight = case.eager(dnormed, torch.zeros_like(dsummed), summed, weight)
    dx, same = case.eager(dnormed, dsummed, summed, weight)
    assert torch.equal(dx, alone + dsummed)
    assert torch.equal(same, dweight)


def test_through_autograd_the_same_kernels_run() -> None:
    """The companion gives the bits of the bare call; on a GPU another alignment may give another plan."""
    inputs = drawn(torch.float16)
    companion = case.CASE.companions[".backward()"]
    assert isinstance(companion, Baseline)
    with torch.no_grad():
        found = check.as_tuple(companion.call(*companion.prepare(*inputs)))
    for output, expected in zip(found, check.as_tuple(case.CASE.variants[0].run(*inputs)), strict=True):
        assert torch.equal(output, expected) if INTERPRETED else torch.allclose(output, expected, rtol=2e-3, atol=2e-3)


def test_the_backward_pass_of_two_results_takes_a_gradient_for_each() -> None:
    """The graph is built in the preparation, once, a call can be repeated, and each gradient goes to its result."""
    forwards = []

    def forward(x: torch.Tensor, weight: torch.Tensor) -> Tensors:
        forwards.append(x.shape)
        return x * weight, 7 * x

    first, second, x, weight = (torch.full((2, 3), value) for value in (2.0, 3.0, 5.0, 11.0))
    backward = through_autograd(forward, outputs=2)
    with torch.no_grad():
        prepared = backward.prepare(first, second, x, weight)
        for _ in range(2):
            dx, dweight = check.as_tuple(backward.call(*prepared))
            assert torch.equal(dx, first * weight + 7 * second)
            assert torch.equal(dweight, first * x)
    assert forwards == [(2, 3)]
    assert not x.requires_grad
