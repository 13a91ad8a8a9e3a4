"""Squared relu: every variant against its oracle, closed forms, the gradient, refusals."""

from __future__ import annotations

import pytest
import torch
from triton_kernel_lab.extend import Variant, routing
from triton_kernel_lab.lab.correctness import check_cell

from own_kernels.cases.squared_relu import CASE
from own_kernels.ops.squared_relu import squared_relu

DEVICE = torch.device("cuda" if torch.cuda.device_count() else "cpu")
# Triton's interpreter truncates bfloat16 stores, so its bfloat16 says nothing of the kernel.
DTYPES = [torch.float16, torch.float32] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", CASE.variants, ids=lambda variant: variant.name)
def test_every_variant_is_right(variant: Variant, dtype: torch.dtype) -> None:
    """Triton serves each call, within the limit that the pipeline sets."""
    for dims in variant.dims or CASE.smoke:
        with routing.strict(), torch.no_grad():
            cell = check_cell(CASE, variant, dims, dtype, DEVICE, compile_baseline=False)
        assert cell["failures"] == [], dims


@pytest.mark.parametrize("dtype", DTYPES)
def test_closed_forms(dtype: torch.dtype) -> None:
    """What is not positive gives exactly 0, a small whole number its square, and NaN stays."""
    x = torch.tensor([-3.0, -0.5, 0.0, 1.0, 3.0, float("nan")], dtype=dtype, device=DEVICE)
    y = torch.tensor([0.0, 0.0, 0.0, 1.0, 9.0, float("nan")], dtype=dtype, device=DEVICE)
    with routing.strict():
        torch.testing.assert_close(squared_relu(x), y, rtol=0, atol=0, equal_nan=True)


def test_gradient_is_that_of_the_formula() -> None:
    """The derivative is 2 max(x, 0)."""
    x = torch.tensor([-2.0, 0.5, 3.0], device=DEVICE, requires_grad=True)
    squared_relu(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 1.0, 6.0], device=DEVICE))


def test_an_empty_tensor_stays_empty() -> None:
    """No element in, no element out."""
    assert squared_relu(torch.empty(0, 5, device=DEVICE)).shape == (0, 5)


def test_integers_are_refused() -> None:
    """The message names operator, argument, what is expected and what came."""
    with pytest.raises(TypeError, match=r"squared_relu: x: expected a floating-point tensor, got torch\.int32"):
        squared_relu(torch.ones(3, dtype=torch.int32, device=DEVICE))
