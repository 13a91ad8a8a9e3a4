"""The processes that compile what cells will run, so that what is compiled lies on disk before anything is timed.

Compiling a model takes most of a cell's time and one core of the host. Cells
compile side by side here; then the process that measures finds its kernels ready.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab.endtoend.measure import Protocol
from triton_kernel_lab.endtoend.model import Models, Sizes
from triton_kernel_lab.endtoend.opponents import OPPONENTS, Setting

__all__ = ["main", "prime"]

# The compiler's own workers, of which each process has as many.
_THREADS = "4"


def prime(
    sizes: Sizes,
    protocol: Protocol,
    cells: Sequence[tuple[int, int]],
    names: Sequence[str],
    seconds: float,
    log: Callable[[str], None],
) -> None:
    """Let a process for each cell open each opponent that compiles, and wait for ``seconds`` at most.

    What goes wrong in one of them goes wrong again where it is measured, and is told there.
    """
    asked = [name for name in names if OPPONENTS[name].served_by != "torch"]
    ends = time.monotonic() + seconds
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": _THREADS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = {}
        for batch, context in cells:
            plan = Path(folder, f"{batch}x{context}.json")
            body = {"sizes": asdict(sizes), "protocol": asdict(protocol), "batch": batch, "context": context}
            plan.write_text(json.dumps(body | {"names": asked}), encoding="utf-8")
            command = [sys.executable, "-m", "triton_kernel_lab.endtoend.prime", str(plan)]
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
            running[batch, context] = stack.enter_context(child)
        for (batch, context), child in running.items():
            code: int | str
            try:
                code = child.wait(max(ends - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                child.kill()
                code = "out of time"
            log(f"compiled ahead for batch {batch}, context {context}: {code or 'done'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Open each opponent that the plan file names in its cell, one after the other, and let it make a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    plan: dict[str, Any] = json.loads(parser.parse_args(arguments).plan.read_text(encoding="utf-8"))
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    protocol, batch, context = Protocol(**plan["protocol"]), plan["batch"], plan["context"]
    models = Models(Sizes(**plan["sizes"]), device, context + protocol.steps, seed=0)
    prompt = torch.zeros(batch, context, dtype=torch.int64, device=device)
    setting = Setting(models, prompt, models.prefill(models.base, prompt), context + protocol.steps)
    failed = False
    for name in plan["names"]:
        try:
            with torch.no_grad():
                OPPONENTS[name].open(setting).step(torch.zeros(batch, dtype=torch.int64, device=device))
        except Exception:
            failed = True
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
