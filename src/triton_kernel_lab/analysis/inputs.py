"""Which artifacts a join stage reads: one a kernel of the registry, no more and no less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project

__all__ = ["EXTRAS", "InputError", "kernel_path", "read_each", "read_extras", "read_one"]

EXTRAS = ("crosscheck", "decode_e2e", "noise_floor")
"""What a command makes when it is asked to, and no stage of the pipeline."""


class InputError(ValueError):
    """A stage's input is missing, surplus or of another run; one sentence says which."""


def kernel_path(project: Project, kind: str, kernel: str) -> Path:
    """Where a kernel's artifact of a kind lies."""
    return project.artifacts / kind / f"{kernel}.json"


def read_one(project: Project, kind: str) -> Artifact:
    """Read the runner's only artifact of a kind, and check whose it is."""
    where = project.artifacts / f"{kind}.json"
    return _own(project, artifacts.read(where, kind, mend=f"dvc repro {kind}"), where)


def read_extras(project: Project, kinds: Sequence[str] = EXTRAS) -> dict[str, Artifact]:
    """Read those of ``EXTRAS`` that were made for the runner, by kind."""
    return {kind: read_one(project, kind) for kind in kinds if (project.artifacts / f"{kind}.json").is_file()}


def read_each(project: Project, kind: str) -> dict[str, Artifact]:
    """Read a kind's artifact of each kernel, in the order of the registry.

    Raises:
        InputError: for a file that no kernel of the registry owns, or one that
            holds another kernel or runner than its place says.
        ArtifactError: for a missing or unsound file.
    """
    names = project.kernels
    surplus = sorted({path.stem for path in (project.artifacts / kind).glob("*.json")} - set(names))
    if surplus:
        where = kernel_path(project, kind, surplus[0])
        raise InputError(f"{where}: expected one file for each of {names}, found a surplus one; remove it.")
    return {name: _read_kernel(project, kind, name) for name in names}


def _read_kernel(project: Project, kind: str, kernel: str) -> Artifact:
    where = kernel_path(project, kind, kernel)
    found = _own(project, artifacts.read(where, kind, mend=f"dvc repro {kind}@{kernel}"), where)
    if found["kernel"] != kernel:
        raise InputError(f"{where}: $.kernel: expected {kernel!r}, found {found['kernel']!r}.")
    return found


def _own(project: Project, found: Artifact, where: Path) -> Artifact:
    if found["runner"] != project.runner:
        raise InputError(f"{where}: $.runner: expected {project.runner!r}, found {found['runner']!r}.")
    return found
