"""What the gate judges: the raw artifacts of the tree, and those of an earlier commit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from triton_kernel_lab import artifacts, revisions, sources
from triton_kernel_lab.analysis.ceilings import empty_window_ns
from triton_kernel_lab.analysis.inputs import kernel_path, read_each, read_one
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.artifacts import Artifact, ArtifactError
from triton_kernel_lab.project import Project

__all__ = ["Present", "Side", "folder", "of_commit", "of_tree"]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its machine, and the timing artifact of each kernel with its bytes' SHA-256.

    ``empty_window_ns`` lies between two events with nothing between them, None where that is not known.
    """

    environment: Artifact
    timings: Mapping[str, Artifact]
    digests: Mapping[str, str]
    empty_window_ns: int | None


@dataclass(frozen=True)
class Present(Side):
    """The side that is judged, and what else speaks for or against it.

    ``stale`` are the kernels whose sources changed since they were timed, and
    ``noise_floor`` is None where none was measured.
    """

    correctness: Mapping[str, Artifact]
    stale: frozenset[str]
    quantum_ns: int
    noise_floor: Artifact | None


def folder(project: Project) -> str:
    """The folder of the runner's artifacts, relative to the root, with forward slashes."""
    return project.artifacts.relative_to(project.root).as_posix()


def of_tree(project: Project) -> Present:
    """The artifacts as they lie in the checkout.

    Raises:
        ArtifactError, InputError: one is missing, surplus or not sound.
    """
    timings = read_each(project, "timing")
    stale = {
        kernel
        for kernel, timing in timings.items()
        if timing["producer"]["source_sha256"] != sources.stage_digest(project.root, "timing", kernel)
    }
    floor, ceilings = project.artifacts / "noise_floor.json", read_one(project, "ceilings")
    return Present(
        environment=read_one(project, "environment"),
        timings=timings,
        digests={kernel: artifacts.sha256_file(kernel_path(project, "timing", kernel)) for kernel in timings},
        empty_window_ns=empty_window_ns(ceilings),
        correctness=read_each(project, "correctness"),
        stale=frozenset(stale),
        quantum_ns=ceilings["timer_quantum_ns"] or 0,
        noise_floor=artifacts.read(floor, "noise_floor") if floor.is_file() else None,
    )


def of_commit(project: Project, commit: str) -> Side:
    """The artifacts that a commit holds, read with git.

    Raises:
        NotComparableError: it holds no environment or no timing.
        ArtifactError: one is not sound.
        RevisionError: git cannot answer.
    """
    place, floors = f"{folder(project)}/environment.json", f"{folder(project)}/ceilings.json"
    names = revisions.list_files(project.root, commit, f"{folder(project)}/timing")
    names = [name for name in names if name.endswith(".json")]
    raw, ceilings, *rest = revisions.read_files(project.root, [(commit, name) for name in (place, floors, *names)])
    if raw is None or not names:
        raise NotComparableError(
            f"{folder(project)}: expected environment.json and timing/*.json in commit {commit[:12]}, found none; "
            "name a commit that holds them with --base."
        )
    found = {PurePosixPath(name).stem: (name, data or b"") for name, data in zip(names, rest, strict=True)}
    return Side(
        environment=_parse(raw, commit, place, "environment"),
        timings={kernel: _parse(data, commit, name, "timing") for kernel, (name, data) in found.items()},
        digests={kernel: hashlib.sha256(data).hexdigest() for kernel, (_, data) in found.items()},
        empty_window_ns=empty_window_ns(_parse(ceilings, commit, floors, "ceilings")) if ceilings else None,
    )


def _parse(data: bytes, commit: str, name: str, kind: str) -> Artifact:
    try:
        found = artifacts.parse(data, f"{commit[:12]}:{name}", kind)
    except ArtifactError as error:
        raise ArtifactError(f"{str(error).removesuffix('.')}; name another base with --base.") from error
    if found.get("kernel", stem := PurePosixPath(name).stem) != stem:
        raise ArtifactError(f"{commit[:12]}:{name}: $.kernel: expected {stem!r}, found {found['kernel']!r}.")
    return found
