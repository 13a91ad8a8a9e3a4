"""Putting the L2 cache into a known state, and the plain kernels that ladders use."""

from __future__ import annotations

import torch

from triton_kernel_lab.ops._triton import tl, triton

__all__ = ["Sweep", "copy", "null", "read", "write"]

_BLOCK = 4096


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Read everything; store only on a sum that the contents never give."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0)
    total = tl.sum(x, 0)
    tl.store(out_ptr, total, mask=total == -1)


@triton.jit
def _write_kernel(x_ptr, n, value, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.zeros((BLOCK,), tl.int32) + value, mask=offsets < n)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@triton.jit
def _null_kernel(x_ptr):
    pass


def read(x: torch.Tensor, out: torch.Tensor) -> None:
    """Read all of int32 ``x`` and write nothing."""
    _read_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=8)


def write(x: torch.Tensor, value: int = 1) -> None:
    """Write all of int32 ``x`` and read nothing."""
    _write_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, x.numel(), value, BLOCK=_BLOCK, num_warps=8)


def copy(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copy int32 ``x`` into ``y``."""
    _copy_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, y, x.numel(), BLOCK=_BLOCK, num_warps=8)


def null(x: torch.Tensor) -> None:
    """Launch a kernel that does nothing."""
    _null_kernel[(1,)](x)


class Sweep:
    """Two buffers of ``sweep_bytes``, several times the L2: one to write, one to read.

    A write sweep alone leaves the cache full of dirty lines, whose write-back
    then falls into the timed window; the read sweep after it makes them clean.
    """

    def __init__(self, sweep_bytes: int, device: torch.device) -> None:
        count = sweep_bytes // 4
        self._written = torch.zeros(count, dtype=torch.int32, device=device)
        self._read = torch.ones(count, dtype=torch.int32, device=device)
        self._out = torch.zeros(1, dtype=torch.int32, device=device)

    def clean(self) -> None:
        """Evict everything and leave no dirty line."""
        write(self._written)
        read(self._read, self._out)

    def dirty(self) -> None:
        """Evict everything and leave dirty lines, as Triton's do_bench does."""
        write(self._written)
