"""A process that fills the compilers' caches with its share of a kernel's cells, before any of them is timed.

Several of these compile at once, which max-autotune is slow at. Where Inductor
compares configurations on the device they wait for each other: one that was
timed beside another would be chosen by chance.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab.cases._base import DTYPES, Case, Dims, load
from triton_kernel_lab.lab import candidates
from triton_kernel_lab.lab.worker import draw

__all__ = ["main", "one_at_a_time"]


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Within the context Inductor's benchmarks of all processes that name the same ``lock`` exclude each other."""
    from torch._inductor.runtime.benchmarking import benchmarker

    given = benchmarker.benchmark_gpu

    def alone(*args: Any, **kwargs: Any) -> Any:
        with open(lock, "a", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            return given(*args, **kwargs)

    benchmarker.benchmark_gpu = alone
    try:
        yield
    finally:
        benchmarker.benchmark_gpu = given


def prepare_cell(case: Case, dims: Dims, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Compile what a cell's candidates compile; what fails here fails, and is told, when it is measured."""
    inputs = draw(case, dims, dtype, seed, device)
    for candidate in candidates.build(case, dims, dtype, device):
        if candidate.role != "anchor":
            with contextlib.suppress(Exception):
                candidate.call(*candidate.prepare(*inputs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare every ``of``-th cell of the plan file, from the ``share``-th on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("share", type=int)
    parser.add_argument("of", type=int)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    device = torch.device("cuda", torch.cuda.current_device())
    case = load(plan["kernel"])
    with one_at_a_time(options.lock), torch.no_grad():
        for cell in plan["cells"][options.share :: options.of]:
            prepare_cell(case, tuple(cell["dims"]), DTYPES[cell["dtype"]], plan["seed"], device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
