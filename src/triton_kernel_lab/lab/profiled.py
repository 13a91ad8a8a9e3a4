"""The process that Nsight Compute watches: every cell's call once, cold, between two profiler marks.

An empty kernel is profiled ahead of each call, so that the profiler's rows tell
where one cell ends and the next begins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import DTYPES, Case, Dims, load
from triton_kernel_lab.lab import sweep
from triton_kernel_lab.lab.candidates import compiled

__all__ = ["MARKER", "main"]

MARKER = "_null_kernel"
"""The name under which ``sweep.null`` appears among profiled launches."""

_WARM_UP = 3


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _profiled() -> Iterator[None]:
    """Launches that are made within are counted, and no others."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def _call(case: Case, name: str) -> Callable[..., Any]:
    """The candidate of this name: ours, or the eager form under torch.compile."""
    if name == "triton":
        return case.variants[0].run
    # Without a reset the ninth shape meets Dynamo's recompile limit and runs eagerly.
    torch._dynamo.reset()
    return compiled(case, None)


def profile_cell(
    case: Case, dims: Dims, dtype: torch.dtype, candidates: Sequence[str], flush: Callable[[], None], seed: int
) -> None:
    """Call each candidate of a cell once under the profiler, warmed up and with caches that ``flush`` has left cold."""
    device = _device()
    inputs = case.variants[0].inputs(dims, dtype, torch.Generator(device).manual_seed(seed))
    mark = torch.zeros(1, dtype=torch.int32, device=device)
    sweep.null(mark)
    for name in candidates:
        call = _call(case, name)
        for _ in range(_WARM_UP):
            call(*inputs)
        with _profiled():
            sweep.null(mark)
        flush()
        with _profiled():
            call(*inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Call what the plan file names, and write ``done`` when all has been called."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("done", type=Path)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    case = load(plan["kernel"])
    swept = sweep.Sweep(plan["sweep_bytes"], _device())
    swept.clean()
    with routing.strict(), torch.no_grad():
        for cell in plan["cells"]:
            dims, dtype = tuple(cell["dims"]), DTYPES[cell["dtype"]]
            profile_cell(case, dims, dtype, plan["candidates"], swept.clean, plan["seed"])
    options.done.write_text("done\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
