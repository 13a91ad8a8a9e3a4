"""The process that times cells twice: by our own windows, and by NVIDIA's NVBench on the same callables."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import DTYPES, Case, load, shape_name
from triton_kernel_lab.lab import nvml
from triton_kernel_lab.lab.window import Bench, Subject

__all__ = ["main"]

REGIMES = ("cold_clean", "cold_dirty")
_INPUT_SETS = 3
_WARM_UP = 3
# A call of a hundred microseconds, repeated, can take a card to its power limit; shorter ones leave it between sweeps.
_LONG_NS = 100_000
# Seconds.
_FIRST_REST, _LONGEST_REST = 0.02, 0.16


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _inputs(case: Case, cell: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(_device()).manual_seed(seed)
    return case.variants[0].inputs(tuple(cell["dims"]), DTYPES[cell["dtype"]], generator)


def ours(bench: Bench, cell: dict[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """Our windows of the cell's operator in each cold regime, as a timing artifact keeps runs."""
    case = load(cell["kernel"])
    sets = [_inputs(case, cell, seed + index) for index in range(_INPUT_SETS)]
    subject = Subject("triton", case.variants[0].run, sets)
    bench.warm_up([subject])
    return [
        {"regime": regime, "process": 0, **asdict(bench.time([subject], regime, samples)["triton"])}
        for regime in REGIMES
    ]


def _rest() -> None:
    """Let a card at its power limit get below it, as our windows do."""
    seconds = _FIRST_REST
    while seconds <= _LONGEST_REST and "power_cap" in nvml.read(torch.cuda.current_device()).reasons:
        sleep(seconds)
        seconds *= 2


def _register(nvbench: Any, name: str, cell: dict[str, Any], seed: int, long: bool) -> None:
    """A benchmark of the cell's operator on the stream that NVBench brings; of a ``long`` call, with rests."""

    def benchmark(state: Any) -> None:
        case = load(cell["kernel"])
        inputs, call = _inputs(case, cell, seed), case.variants[0].run
        stream = torch.cuda.ExternalStream(state.get_stream().addressof())

        def launch(_: Any) -> None:
            with torch.cuda.stream(stream):
                call(*inputs)

        torch.cuda.synchronize()
        for _ in range(_WARM_UP):
            launch(None)
        torch.cuda.synchronize()

        def launch_rested(launched: Any, timer: Any) -> None:
            _rest()
            timer.start()
            launch(launched)
            timer.stop()

        if long:
            state.exec(launch_rested, batched=False, timer=True)
        else:
            state.exec(launch, batched=False)

    nvbench.register(benchmark).set_name(name)


def theirs(cells: Sequence[dict[str, Any]], samples: int, seed: int, long: Sequence[bool]) -> list[list[int]]:
    """NVBench's cold samples of each cell in ns, empty where it took none; one run for all of them.

    Before a sample of a ``long`` one a card at its power limit rests.
    """
    import cuda.bench as nvbench
    from cuda.bench.results import BenchmarkResult

    for number, cell in enumerate(cells):
        _register(nvbench, f"cell{number}", cell, seed, long[number])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "nvbench.json")
        stop = ("--stopping-criterion", "sample-count", "--target-samples", str(samples))
        nvbench.run_all_benchmarks(["crosscheck", *stop, "--jsonbin", str(report)])
        found = BenchmarkResult.from_json(report)
        taken = [found[f"cell{number}"][0].samples for number in range(len(cells))]
    # NVBench counts in seconds.
    return [[max(round(seconds * 1e9), 1) for seconds in each or ()] for each in taken]


def _unavailable() -> str | None:
    """Why NVBench cannot be had here."""
    try:
        import cuda.bench

        cuda.bench.State  # noqa: B018  The native part is only loaded when it is asked for.
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _measured(plan: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    bench = Bench(plan["sweep_bytes"], plan["warmup_ms"], plan["seed"])
    cells = []
    with routing.strict(), torch.no_grad():
        for cell in plan["cells"]:
            name = {"kernel": cell["kernel"], "shape": shape_name(tuple(cell["dims"])), "dtype": cell["dtype"]}
            progress(" ".join(name.values()))
            cells.append(name | {"runs": ours(bench, cell, plan["samples"], plan["seed"])})
        progress("NVBench")
        long = [statistics.median(cell["runs"][0]["samples_ns"]) >= _LONG_NS for cell in cells]
        found = theirs(plan["cells"], plan["samples"], plan["seed"], long)
        for cell, samples in zip(cells, found, strict=True):
            cell["nvbench_samples_ns"] = samples
    return {"unavailable": None, "version": importlib.metadata.version("cuda-bench"), "cells": cells}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that the plan file names and write what came out to the output file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    reason = _unavailable()
    nothing: dict[str, Any] = {"unavailable": reason, "version": None, "cells": []}
    result = nothing if reason else _measured(plan, lambda line: print(line, flush=True))
    options.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
