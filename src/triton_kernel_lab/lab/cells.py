"""Correctness, then time, of single cells in this process: what a quick look needs."""

from __future__ import annotations

from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import DTYPES, Case, Dims
from triton_kernel_lab.lab.correctness import check_cell
from triton_kernel_lab.lab.timing import cost_record
from triton_kernel_lab.lab.window import Bench
from triton_kernel_lab.lab.worker import measure_cell

__all__ = ["check", "time"]


def check(case: Case, dims: Dims, dtype: str) -> dict[str, Any]:
    """The cell of a correctness artifact for the timed variant, torch.compile included."""
    device = torch.device("cuda", torch.cuda.current_device())
    with routing.strict(), torch.no_grad():
        return check_cell(case, case.variants[0], dims, DTYPES[dtype], device, compile_baseline=True)


def time(case: Case, dims: Dims, dtype: str, bench: Bench, regime: str, samples: int, seed: int) -> dict[str, Any]:
    """The ``cost`` and the timed ``candidates`` of a cell in one regime."""
    with routing.strict(), torch.no_grad():
        candidates = measure_cell(case, dims, DTYPES[dtype], bench, {regime: samples}, seed)
    return {"cost": cost_record(case.cost(dims, DTYPES[dtype])), "candidates": candidates}
