"""One fresh process of a confirmation: the versions of each kernel, timed in turns on one bench."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.analysis.confirm import VERSIONS
from triton_kernel_lab.cases._base import DTYPES, Tensors, load, shape_name
from triton_kernel_lab.lab import check, worker
from triton_kernel_lab.lab.versions import Version
from triton_kernel_lab.lab.window import Bench, Subject, Window

__all__ = ["main", "measure"]

_ATTEMPTS = 3

Record = dict[str, Any]
Versions = Mapping[str, Version]


def measure(plan: Mapping[str, Any], bench: Bench, device: torch.device) -> list[Record]:
    """Check and time every cell of a plan.

    Args:
        plan: ``folders`` of the base and of the current side, the ``cells``, what
            to take of ``samples`` in which regime, ``seed`` and process ``index``.
        bench: where it is timed.
        device: where the tensors lie.
    """
    with _loaded(plan["folders"], plan["index"]) as versions, torch.no_grad():
        return [_measure_cell(cell, versions, plan, bench, device) for cell in plan["cells"]]


@contextlib.contextmanager
def _loaded(folders: Mapping[str, str], index: int) -> Iterator[Versions]:
    """The versions, none of which may leave Triton; which is loaded first changes from process to process."""
    turn = index % len(VERSIONS)
    found: dict[str, Version] = {}
    with contextlib.ExitStack() as stack:
        for name in VERSIONS[turn:] + VERSIONS[:turn]:
            folder = folders["now" if name == "now" else "base"]
            found[name] = Version(f"triton_kernel_lab_{name}", Path(folder))
            stack.callback(found[name].forget)
            stack.enter_context(found[name].module("routing").strict())
        stack.enter_context(routing.strict())
        yield found


def _measure_cell(
    cell: Mapping[str, Any], versions: Versions, plan: Mapping[str, Any], bench: Bench, device: torch.device
) -> Record:
    case, dims, dtype = load(cell["kernel"]), tuple(cell["dims"]), DTYPES[cell["dtype"]]
    drawn = [worker.draw(case, dims, dtype, plan["seed"] + index, device) for index in range(worker.INPUT_SETS + 1)]
    (*sets, fresh), records, calls = drawn, {}, {}
    expected = check.expect(case, case.variants[0], sets[0], dtype)
    for name, version in versions.items():
        kernel = cell["kernel" if name == "now" else "base_kernel"]
        records[name], call = _prepare(version, kernel, sets[0], expected)
        if call:
            calls[name] = call
    if len(calls) == len(VERSIONS):
        read_bytes = sum(case.cost(dims, dtype).read.values())
        subjects = [Subject(name, call, sets, read_bytes) for name, call in calls.items()]
        bench.warm_up(subjects)
        for regime, count in plan["samples"].items():
            for name, window in _undisturbed(bench, subjects, versions, regime, count).items():
                records[name]["runs"].append({"regime": regime, **asdict(window)})
        expected = check.expect(case, case.variants[0], fresh, dtype)
        for name, call in calls.items():
            if failures := check.run_checked(call, fresh, expected).failures:
                records[name] |= {"status": "wrong", "reason": f"wrong after timing: {failures[0]}"}
    where = {"kernel": cell["kernel"], "base_kernel": cell["base_kernel"]}
    return where | {"shape": shape_name(dims), "dtype": cell["dtype"], "versions": records}


def _prepare(
    version: Version, kernel: str, inputs: Tensors, expected: Sequence[check.Expected]
) -> tuple[Record, Callable[..., Any] | None]:
    """The record of a version before it is timed, and its call if that may be timed."""
    record: Record = {"status": "ok", "reason": None, "launch": None, "runs": []}
    try:
        call: Callable[..., Any] = version.module(f"cases.{kernel}").CASE.variants[0].run
        record["launch"] = _launch(version, call, inputs)
    # Whatever somebody's commit raises: a syntax error, a compiler's, an argument that it does not know.
    except Exception as error:
        # By name, because each version has a class of its own.
        left = type(error).__name__ == "FallbackError"
        reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return record | {"status": "unavailable" if left else "failed", "reason": reason}, None
    if failures := check.run_checked(call, inputs, expected).failures:
        return record | {"status": "wrong", "reason": f"wrong before timing: {failures[0]}"}, None
    return record, call


def _launch(version: Version, call: Callable[..., Any], inputs: Tensors) -> Record | None:
    """What the version binds for this call, so that a verdict says which binaries it is about."""
    launching = version.module("ops._launch")
    launching.forget_plans()
    call(*inputs)
    bound = launching.launches()
    return {"kernel": bound[-1].kernel, "cubin_sha256": bound[-1].cubin_sha256} if bound else None


def _disturbances(versions: Versions) -> tuple[int, int]:
    """Memory taken from the device, and kernels bound: what must not happen inside a window."""
    bound = sum(len(version.module("ops._launch").launches()) for version in versions.values())
    return torch.cuda.memory_stats().get("num_device_alloc", 0), bound


def _undisturbed(
    bench: Bench, subjects: list[Subject], versions: Versions, regime: str, count: int
) -> dict[str, Window]:
    """Time until nothing was compiled or allocated meanwhile; a disturbed attempt is thrown away."""
    for _ in range(_ATTEMPTS):
        bench.settle(subjects)
        before = _disturbances(versions)
        windows = bench.time(subjects, regime, count)
        after = _disturbances(versions)
        # A graph takes memory of its own when it is captured, before its first sample.
        if after == before or (regime == "graph" and after[1] == before[1]):
            return windows
    raise RuntimeError(f"every one of {_ATTEMPTS} attempts at regime {regime} was disturbed: {before} -> {after}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the plan file names and write it to the output file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    plan = json.loads(options.plan.read_text(encoding="utf-8"))
    bench = Bench(plan["sweep_bytes"], plan["warmup_ms"], plan["seed"])
    cells = measure(plan, bench, torch.device("cuda", bench.device))
    result = {"process": worker._process_record(bench, plan["index"], plan["seed"]), "cells": cells}
    options.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
