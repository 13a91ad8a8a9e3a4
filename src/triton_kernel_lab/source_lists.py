"""Stage ``sources``: for each stage of a kernel, the files that its code consists of, as one small file.

DVC cannot name other dependencies for each item of a matrix. It can compare such a
file, so that a stage runs again when a source of its own kernel changed, and then
only. No producer is recorded: another version of the package is no other source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import KERNEL_STAGES, stage_digest, stage_files

__all__ = ["differing", "path", "run"]

_SHOWN = 5


def path(project: Project, stage: str, kernel: str) -> Path:
    """Where the sources of a kernel's stage are listed: the same on every machine, so no runner has part in it."""
    return _folder(project) / kernel / f"{stage}.json"


def _folder(project: Project) -> Path:
    return project.root / "artifacts" / "sources"


def run(project: Project, kernel: str) -> None:
    """Write the list of each of ``KERNEL_STAGES``; the same tree gives the same bytes."""
    for stage in KERNEL_STAGES:
        artifacts.write(path(project, stage, kernel), _derive(project, stage, kernel))


def differing(project: Project) -> Iterator[str]:
    """A sentence for each list that does not describe the tree, is missing or belongs to no kernel.

    An artifact records the digest of its sources itself. Where the list describes
    the tree, an artifact with another digest than the list's is the one that
    ``sources.stale`` names; so the two are not compared here.
    """
    for kernel in project.kernels:
        for stage in KERNEL_STAGES:
            where = path(project, stage, kernel)
            name = where.relative_to(project.root).as_posix()
            if problem := _problem(where, name, _derive(project, stage, kernel)):
                yield f"{name}: {problem}; run `dvc repro sources@{kernel}`."
    expected = {path(project, stage, kernel) for stage in KERNEL_STAGES for kernel in project.kernels}
    for surplus in sorted(set(_folder(project).rglob("*.json")) - expected):
        yield f"{surplus.relative_to(project.root).as_posix()}: belongs to no stage of a kernel; remove it."


def _derive(project: Project, stage: str, kernel: str) -> Artifact:
    files = stage_files(project.root, stage, kernel)
    return {
        "artifact_kind": "sources",
        "schema_version": 1,
        "claim_kind": "derived",
        "kernel": kernel,
        "stage": stage,
        "source_sha256": stage_digest(project.root, stage, kernel),
        "files": [{"path": file, "sha256": digest} for file, digest in files.items()],
    }


def _problem(where: Path, name: str, expected: Artifact) -> str | None:
    try:
        data = where.read_bytes()
    except OSError as error:
        return f"expected the sources of stage {expected['stage']}, found none ({error.strerror})"
    if data == artifacts.dumps(expected).encode():
        return None
    try:
        found = artifacts.parse(data, name, "sources")
    except artifacts.ArtifactError as error:
        return f"expected the sources of stage {expected['stage']}, found another file ({error})"
    changed = sorted({file for file, _ in _records(expected) ^ _records(found)})
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    files = ", ".join(changed[:_SHOWN]) + more if changed else "another kernel, stage or form"
    return f"expected the sources as they are in the tree, found other ones: {files}"


def _records(listed: Artifact) -> set[tuple[str, str]]:
    return {(record["path"], record["sha256"]) for record in listed["files"]}
