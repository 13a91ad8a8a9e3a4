"""One fresh measuring process: every cell of one kernel, written as raw samples."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import DTYPES, Case, Dims, Tensors, load, shape_name
from triton_kernel_lab.lab import candidates, check, nvml
from triton_kernel_lab.lab.window import Bench, Subject, Window
from triton_kernel_lab.ops import _launch

__all__ = ["main", "measure_cell"]

INPUT_SETS = 3
_ATTEMPTS = 3
# Their import computes on the device: a process that had loaded one while it waits would be company to those that
# measure. What a peer's import costs then falls into the turn, before the first window.
_LATE_PEERS = frozenset({"gemlite"})


def draw(case: Case, dims: Dims, dtype: torch.dtype, seed: int, device: torch.device) -> Tensors:
    """One seeded input set of the timed variant."""
    return case.variants[0].inputs(dims, dtype, torch.Generator(device).manual_seed(seed))


def _failures(candidate: candidates.Candidate, inputs: Tensors, expected: Sequence[check.Expected]) -> list[str]:
    """What is wrong with a candidate's output on these inputs."""
    if candidate.role == "anchor":
        return []
    if candidate.name == "eager":
        # It sets the limit of a single element, and so cannot be held to it; that of the norm holds for all.
        expected = [check.by_norm(each) for each in expected]
    # What a peer's preparation cannot take, it cannot time either.
    try:
        prepared = candidate.prepare(*inputs)
    except Exception as raised:
        return [f"preparing its inputs raised {type(raised).__name__}: {' '.join(str(raised).split())[:200]}"]
    ours = candidate.role != "baseline"
    return check.run_checked(candidate.call, prepared, expected, poison=ours, in_place=candidate.in_place).failures


def _peak_bytes(subject: Subject) -> int:
    """Device memory that one call needs at most, results included, beside what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    subject.call(*subject.sets[0])
    torch.cuda.synchronize()
    peak: int = torch.cuda.max_memory_allocated() - before
    return peak


def _disturbances() -> dict[str, int]:
    """Counts of what must not happen inside a window."""
    return {
        "device allocations": torch.cuda.memory_stats()["num_device_alloc"],
        "kernels bound": len(_launch.launches()),
        "graphs compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def _undisturbed(bench: Bench, subjects: list[Subject], regime: str, count: int) -> dict[str, Window]:
    """Time until nothing was compiled or allocated meanwhile; a disturbed attempt is thrown away.

    Raises:
        RuntimeError: every attempt was disturbed.
    """
    changed: dict[str, int] = {}
    for _ in range(_ATTEMPTS):
        bench.settle(subjects)
        before = _disturbances()
        windows = bench.time(subjects, regime, count)
        # A graph takes memory of its own when it is captured, before its first sample.
        ignored = {"device allocations"} if regime == "graph" else set()
        changed = {
            name: n - before[name] for name, n in _disturbances().items() if name not in ignored and n != before[name]
        }
        if not changed:
            return windows
    raise RuntimeError(f"every one of {_ATTEMPTS} attempts at regime {regime} was disturbed: {changed}.")


def measure_cell(
    case: Case, dims: Dims, dtype: torch.dtype, bench: Bench, samples: dict[str, int], seed: int
) -> list[dict[str, Any]]:
    """Time every candidate of a cell in every regime; wrong ones are not timed.

    Raises:
        RuntimeError: the timed windows were disturbed by a compilation or a device allocation each time.
    """
    device = torch.device("cuda", bench.device)
    sets = [draw(case, dims, dtype, seed + index, device) for index in range(INPUT_SETS)]
    read_bytes = sum(case.cost(dims, dtype).read.values())
    expected = check.expect(case, case.variants[0], sets[0], dtype)
    records, subjects = [], []
    for candidate in candidates.build(case, dims, dtype, device):
        launch = candidates.launch_record(candidate.call, sets[0]) if candidate.role == "triton" else None
        record: dict[str, Any] = {
            "name": candidate.name,
            "role": candidate.role,
            "served_by": candidate.served_by,
            "status": "ok",
            "reason": None,
            "launch": launch,
            "peak_bytes": None,
            "runs": [],
        }
        if candidate.unavailable:
            record |= {"status": "unavailable", "reason": candidate.unavailable}
        elif failures := _failures(candidate, sets[0], expected):
            record |= {"status": "invalid", "reason": f"wrong before timing: {failures[0]}"}
        else:
            prepared = [candidate.prepare(*inputs) for inputs in sets]
            subject = Subject(candidate.name, candidate.call, prepared, read_bytes)
            record["peak_bytes"] = _peak_bytes(subject)
            subjects.append(subject)
        records.append((candidate, record))
    # Float64 results of a large cell are not to crowd the device while it is timed.
    del expected
    bench.warm_up(subjects)
    for regime, count in samples.items():
        if not count:
            continue
        windows = _undisturbed(bench, subjects, regime, count)
        for _, record in records:
            if window := windows.get(record["name"]):
                record["runs"].append({"regime": regime, **asdict(window)})
    # In the memory of a timed set: whoever keeps results by address gives an old one.
    for timed, fresh in zip(sets[0], draw(case, dims, dtype, seed + INPUT_SETS, device), strict=True):
        timed.copy_(fresh)
    expected = check.expect(case, case.variants[0], sets[0], dtype)
    for candidate, record in records:
        if record["status"] == "ok" and (failures := _failures(candidate, sets[0], expected)):
            record |= {"status": "invalid", "reason": f"wrong after timing: {failures[0]}"}
    return [record for _, record in records]


def _process_record(bench: Bench, index: int, seed: int) -> dict[str, Any]:
    def known(values: Sequence[int | None]) -> list[int]:
        return [value for value in values if value is not None]

    clocks = known([reading.sm_clock_mhz for reading in bench.readings])
    spread = {"min": min(clocks), "median": int(statistics.median_low(clocks)), "max": max(clocks)} if clocks else None
    return {
        "index": index,
        "seed": seed,
        "device": nvml.number(bench.device),
        "other_processes": nvml.other_processes(bench.device),
        "sm_clock_mhz": spread,
        "temperature_c_max": max(known([reading.temperature_c for reading in bench.readings]), default=None),
        "power_mw_max": max(known([reading.power_mw for reading in bench.readings]), default=None),
        "event_reasons": sorted({reason for reading in bench.readings for reason in reading.reasons}),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells that the plan file names and write them to the output file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    case = load(plan["kernel"])
    # Loaded before its turn; what is loaded later would be loaded while the device is held.
    import torch._inductor.compile_fx

    for load_peer in (each for name, each in case.peers.items() if name not in _LATE_PEERS):
        # Which of them cannot be had is told where they are timed.
        with contextlib.suppress(Exception):
            load_peer()
    if not sys.stdin.readline():
        # Whoever started this process is gone.
        return 1
    # A backward pass runs on a thread of PyTorch's, where the context below does not reach.
    os.environ["TRITON_KERNEL_LAB_STRICT"] = "1"
    bench = Bench(plan["sweep_bytes"], plan["warmup_ms"], plan["seed"])
    cells = []
    with routing.strict(), torch.no_grad():
        for cell in plan["cells"]:
            dims, dtype = tuple(cell["dims"]), DTYPES[cell["dtype"]]
            records = measure_cell(case, dims, dtype, bench, plan["samples"], plan["seed"])
            cells.append({"shape": shape_name(dims), "dtype": cell["dtype"], "candidates": records})
            print(f"{case.name} {shape_name(dims)} {cell['dtype']}", flush=True)
    result = {"process": _process_record(bench, plan["index"], plan["seed"]), "cells": cells}
    options.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
