"""A tensor as rows: how far two strides describe its leading dimensions."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

__all__ = ["RowLayout", "row_count", "row_layout"]


class RowLayout(NamedTuple):
    """Row r starts at (r // inner) * outer_stride + (r % inner) * inner_stride elements."""

    inner: int
    outer_stride: int
    inner_stride: int

    def split(self, inner: int) -> RowLayout:
        """The same rows, told with ``inner`` rows a step; only for a layout of one stride."""
        assert self.inner == 1, self
        return RowLayout(inner, self.outer_stride * inner, self.outer_stride)


def row_count(x: torch.Tensor) -> int:
    """The product of all dimensions but the last."""
    return math.prod(x.shape[:-1])


def row_layout(x: torch.Tensor) -> RowLayout | None:
    """The layout of the rows of ``x``, or None where only a copy helps.

    None means that the elements of a row do not lie side by side, or that the
    leading dimensions do not fold into two strides.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    dims: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if not dims:
        return RowLayout(1, 0, 0)
    if len(dims) == 1:
        return RowLayout(1, dims[0][1], 0)
    if len(dims) == 2:
        return RowLayout(dims[1][0], dims[0][1], dims[1][1])
    return None
