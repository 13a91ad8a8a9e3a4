"""Stage ``correctness``: every variant of a kernel against its float64 oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from triton_kernel_lab import __version__, artifacts, routing
from triton_kernel_lab.cases._base import DTYPES, Case, Dims, Variant, load, shape_name
from triton_kernel_lab.lab import check
from triton_kernel_lab.lab.candidates import compiled
from triton_kernel_lab.ops._triton import INTERPRET
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import stage_digest

__all__ = ["CorrectnessError", "check_cell", "run"]


class CorrectnessError(RuntimeError):
    """A kernel is wrong; its artifact says where."""


def _seed(*parts: object) -> int:
    """A seed that depends on the cell alone, so that a re-run draws the same inputs."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def check_cell(
    case: Case, variant: Variant, dims: Dims, dtype: torch.dtype, device: torch.device, *, compile_baseline: bool
) -> dict[str, Any]:
    """Judge one variant at one shape and dtype; returns a cell of a correctness artifact.

    With ``compile_baseline`` torch.compile's output is judged by the same limit.
    """
    generator = torch.Generator(device).manual_seed(_seed(case.name, variant.name, dims, dtype))
    inputs = variant.inputs(dims, dtype, generator)
    expected = check.expect(case, variant, inputs, dtype)
    references = [each.reference for each in expected]
    eager = check.worst(check.eager_errors(variant, inputs, references))
    checked = check.run_checked(variant.run, inputs, expected)
    inductor = None
    if compile_baseline:
        torch._dynamo.reset()
        inductor = check.run_checked(compiled(case, None), inputs, expected, poison=False)
    return {
        "shape": shape_name(dims),
        "dtype": str(dtype).removeprefix("torch."),
        "variant": variant.name,
        "passed": not checked.failures,
        "failures": checked.failures,
        "limit": checked.bound.record(),
        "triton": checked.error.record(),
        "eager": eager.record(),
        "torch_compile": None if inductor is None else inductor.error.record(),
        "torch_compile_passed": None if inductor is None else not inductor.failures,
    }


def _cells(case: Case, *, smoke: bool) -> Iterator[tuple[Variant, Dims, str]]:
    for variant in case.variants:
        for dims in variant.dims or (case.smoke if smoke else case.checked):
            for dtype in case.checked_dtypes:
                # The interpreter truncates bf16 stores, so its bf16 says nothing of the kernel.
                if not (smoke and dtype == "bfloat16"):
                    yield variant, dims, dtype
    if not smoke:
        for dims, dtype in case.also:
            if dims not in case.checked:
                yield case.variants[0], dims, dtype


def run(project: Project, kernel: str, progress: Callable[[str], None] = lambda line: None) -> None:
    """Check a kernel and write correctness/<kernel>.json, pass or fail.

    Raises:
        CorrectnessError: at least one cell failed; the artifact is written first.
    """
    # Read first, so that a missing environment is told before the work and not after it.
    inputs = [artifacts.input_record(project.root, project.artifacts / "environment.json")]
    case = load(kernel)
    smoke = project.runner == "cpu"
    device = torch.device("cpu") if smoke else torch.device("cuda", torch.cuda.current_device())
    cells = []
    with routing.strict(), torch.no_grad():
        for variant, dims, dtype in _cells(case, smoke=smoke):
            progress(f"{kernel} {variant.name} {shape_name(dims)} {dtype}")
            baseline = not smoke and variant is case.variants[0] and (dims, dtype) in case.cells
            cells.append(check_cell(case, variant, dims, DTYPES[dtype], device, compile_baseline=baseline))
    path = project.artifacts / "correctness" / f"{kernel}.json"
    failed = [cell for cell in cells if not cell["passed"]]
    artifacts.write(
        path,
        {
            "artifact_kind": "correctness",
            "schema_version": 1,
            "claim_kind": "measured",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "correctness", kernel),
            },
            "inputs": inputs,
            "runner": project.runner,
            "kernel": kernel,
            "served_by": "interpreter" if INTERPRET else "triton",
            "passed": not failed,
            "cells": cells,
        },
    )
    if failed:
        first = failed[0]
        where = f"{first['variant']} {first['shape']} {first['dtype']}"
        raise CorrectnessError(
            f"correctness of {kernel}: {len(failed)} of {len(cells)} cells failed, first {where}: "
            f"{first['failures'][0]} (see {path})."
        )
