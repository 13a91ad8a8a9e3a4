"""Stage ``environment``: the facts whose change makes old numbers incomparable."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

from triton_kernel_lab import __version__, artifacts
from triton_kernel_lab.lab import nvml
from triton_kernel_lab.ops._triton import INTERPRET
from triton_kernel_lab.project import Project, ProjectError
from triton_kernel_lab.sources import stage_digest

__all__ = ["probe", "run", "runner_name"]


def runner_name(device_name: str) -> str:
    """The runner that a GPU is: its name in lower case with dashes, ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def _ptxas_version() -> str | None:
    binary = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
        if found := re.search(r"V(\d+(?:\.\d+)+)", text):
            return found.group(1)
    return None


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        **nvml.policy(index),
    }


def probe(*, device: int | None) -> dict[str, Any]:
    """The device (None for a host without one) and the software that measures on it."""
    return {
        "device": None if device is None else _device(device),
        "software": {
            "driver": None if device is None else nvml.driver_version(),
            "cuda_runtime": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "ptxas": _ptxas_version(),
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
    }


def run(project: Project) -> None:
    """Probe the machine and write environment.json.

    Raises:
        ProjectError: there is no CUDA device, or another GPU than the runner in params.yaml.
    """
    device = None
    if project.runner != "cpu":
        ways = "Run `make repro` to rehearse without one, or set `runner` in params.yaml to the machine you have."
        if torch.cuda.device_count() == 0:
            raise ProjectError(f"environment: runner {project.runner} needs its GPU, found no CUDA device. {ways}")
        device = torch.cuda.current_device()
        found = runner_name(torch.cuda.get_device_name(device))
        if found != project.runner:
            raise ProjectError(f"environment: runner {project.runner} needs its GPU, found {found}. {ways}")
    artifacts.write(
        project.artifacts / "environment.json",
        {
            "artifact_kind": "environment",
            "schema_version": 1,
            "claim_kind": "measured",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "environment"),
            },
            "inputs": [],
            "runner": project.runner,
            "interpreter": INTERPRET,
            **probe(device=device),
        },
    )
