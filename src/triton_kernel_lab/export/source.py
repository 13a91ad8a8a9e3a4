"""What an export is made from: the tracked artifacts of one runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from triton_kernel_lab import revisions
from triton_kernel_lab.analysis.inputs import kernel_path, read_each, read_one
from triton_kernel_lab.analysis.stats import pool
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project

__all__ = ["Source", "Timed", "load", "timed"]


class Source(NamedTuple):
    """Artifacts of one runner, and when each kernel's samples were committed.

    ``committed`` holds seconds since 1970 UTC by kernel; a kernel is missing
    where git cannot say.
    """

    environment: Artifact
    roofline: Artifact
    timings: Mapping[str, Artifact]
    committed: Mapping[str, int]

    @property
    def device(self) -> str | None:
        """The GPU's name; None without one."""
        found = self.environment["device"]
        return str(found["name"]) if found else None

    def commit(self, kernel: str) -> str | None:
        """The commit whose sources timed a kernel."""
        found: str | None = self.timings[kernel]["producer"]["git_commit"]
        return found


class Timed(NamedTuple):
    """A candidate of a cell that has a time, with its unflagged samples a call in ns, by process."""

    cell: Mapping[str, Any]
    candidate: Mapping[str, Any]
    processes: Sequence[Sequence[int]]


def load(project: Project) -> Source:
    """Read what is tracked; measures nothing.

    Raises:
        ArtifactError, InputError: an artifact is missing or not sound.
    """
    timings = read_each(project, "timing")
    committed = {kernel: at for kernel in timings if (at := _committed(project, kernel)) is not None}
    return Source(read_one(project, "environment"), read_one(project, "roofline"), timings, committed)


def _committed(project: Project, kernel: str) -> int | None:
    path = kernel_path(project, "timing", kernel).relative_to(project.root).as_posix()
    try:
        changes = revisions.changes(project.root, path)
    except revisions.RevisionError:
        return None
    return changes[-1][1] if changes else None


def timed(source: Source, regime: str | None = None) -> Iterator[Timed]:
    """The candidates with a time, of one regime or of all."""
    for cell in source.roofline["cells"]:
        if regime in (None, cell["regime"]):
            runs = _runs(source.timings[cell["kernel"]], cell)
            for candidate in cell["candidates"]:
                if candidate["stats"]:
                    yield Timed(cell, candidate, _by_process(runs[candidate["name"]], cell["regime"]))


def _runs(timing: Artifact, cell: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    raw = next(c for c in timing["cells"] if (c["shape"], c["dtype"]) == (cell["shape"], cell["dtype"]))
    return {candidate["name"]: candidate["runs"] for candidate in raw["candidates"]}


def _by_process(runs: Sequence[Mapping[str, Any]], regime: str) -> list[list[int]]:
    mine = sorted((run for run in runs if run["regime"] == regime), key=lambda run: run["process"])
    pooled = (pool(list(of))[0] for _, of in groupby(mine, key=lambda run: run["process"]))
    return [ordered for ordered in pooled if ordered]
