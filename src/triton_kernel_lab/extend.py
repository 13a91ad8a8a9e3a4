"""What a package of one's own describes its kernels with; ``docs/OWN_KERNELS.md`` leads through it."""

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import Baseline, Bucket, Case, Cost, Dims, Outputs, Tensors, Variant, randn
from triton_kernel_lab.ops import _checks as checks
from triton_kernel_lab.ops import _launch as launching

__all__ = [
    "Baseline",
    "Bucket",
    "Case",
    "Cost",
    "Dims",
    "Outputs",
    "Tensors",
    "Variant",
    "checks",
    "launching",
    "randn",
    "routing",
]
