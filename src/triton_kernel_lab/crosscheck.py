"""The command ``crosscheck``: every timed cell by our windows and by NVIDIA's NVBench, side by side.

Two clocks that agree are worth more than one. NVBench flushes by a memset of one
L2, which leaves dirty lines: ``cold_dirty`` is the regime to compare it with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.analysis import crosscheck as figures
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import module_digest, stage_digest

__all__ = ["CrosscheckError", "run"]

SAMPLES = 100


class CrosscheckError(RuntimeError):
    """The measuring process failed; the old artifact stays."""


def run(project: Project, kernels: Sequence[str] = (), progress: Callable[[str], None] = lambda line: None) -> Path:
    """Measure and write ``artifacts/<runner>/crosscheck.json``.

    Beside the figures it keeps the digest of each kernel's stage ``correctness``: that kernel's
    own sources, by which the report tells when they have changed since.

    Args:
        project: the checkout; on runner ``cpu`` nothing is asked for.
        kernels: of the registry. Default: all.
        progress: is told each cell.

    Raises:
        CrosscheckError: the measuring process failed.
    """
    # Asked first: what git refuses to tell must not cost a finished run.
    git = revisions.producer_git(project.root)
    body = _nothing("not_requested", "runner cpu has no GPU")
    if project.runner != "cpu":
        body = _measure(project, kernels or project.kernels, progress)
    measured = body["status"] == "measured" and git["git_tree_dirty"] is False
    path = project.artifacts / "crosscheck.json"
    artifacts.write(
        path,
        {
            "artifact_kind": "crosscheck",
            "schema_version": 1,
            "claim_kind": "measured" if measured else "exploratory",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": module_digest(project.root, "crosscheck.py", "lab/nvbenched.py"),
                **git,
            },
            "inputs": [artifacts.input_record(project.root, project.artifacts / "environment.json")],
            "runner": project.runner,
            **body,
        },
    )
    return path


def _nothing(status: str, reason: str) -> dict[str, Any]:
    protocol = {"sweep_bytes": 0, "samples": 0, "nvbench_version": None}
    return {"status": status, "reason": reason, "protocol": protocol, "cells": []}


def _measure(project: Project, kernels: Sequence[str], progress: Callable[[str], None]) -> dict[str, Any]:
    params = project.measure
    # Asked first, too: an edit while the cells are timed must not pass for what was timed.
    digests = {kernel: stage_digest(project.root, "correctness", kernel) for kernel in kernels}
    plan = {
        "cells": [cell for kernel in kernels for cell in _cells(kernel)],
        "sweep_bytes": params.sweep_bytes,
        "warmup_ms": params.warmup_ms,
        "seed": params.seed,
        "samples": SAMPLES,
    }
    made = _process(plan, progress)
    if made["unavailable"]:
        return _nothing("unavailable", f"NVBench does not import: {made['unavailable']}")
    return {
        "status": "measured",
        "reason": None,
        "protocol": {"sweep_bytes": params.sweep_bytes, "samples": SAMPLES, "nvbench_version": made["version"]},
        "kernel_sources_sha256": digests,
        "cells": [cell | figures.derived(cell) for cell in made["cells"]],
    }


def _cells(kernel: str) -> list[dict[str, Any]]:
    from triton_kernel_lab.cases._base import load

    return [{"kernel": kernel, "dims": list(dims), "dtype": dtype} for dims, dtype in load(kernel).cells]


def _process(plan: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan_path, output = Path(folder, "plan.json"), Path(folder, "raw.json")
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
        progress(f"{len(plan['cells'])} cells")
        command = [sys.executable, "-m", "triton_kernel_lab.lab.nvbenched", str(plan_path), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not output.is_file():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CrosscheckError(f"crosscheck: the measuring process failed: {last}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result
