"""What past commits say of a kernel: its times by commit, and where the machine or the stack changed.

Follows first parents, so a merged branch is one step, and reads with git what
each commit holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from triton_kernel_lab import artifacts, revisions
from triton_kernel_lab.analysis.evidence import folder
from triton_kernel_lab.analysis.sides import differences, fingerprint
from triton_kernel_lab.artifacts import Artifact, ArtifactError
from triton_kernel_lab.project import Project

__all__ = ["Cell", "Figures", "HistoryError", "Point", "Series", "parse_cell", "run"]

Cell = tuple[str, str, str]
"""(shape, dtype, regime)."""


class HistoryError(ValueError):
    """The history holds no such kernel or cell; one sentence says what it holds."""


class Figures(NamedTuple):
    """The `triton` candidate's times in ns and its speedup over torch.compile; None with a ``reason``."""

    p50_ns: int | None
    tmean_ns: float | None
    speedup: float | None
    reason: str | None


@dataclass(frozen=True)
class Point:
    """One measurement of a cell; ``changed`` are the facts of machine and stack that differ from the one before."""

    date: str
    commit: str
    figures: Figures
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Series:
    """The measurements of one cell, the oldest first."""

    kernel: str
    cell: Cell
    points: tuple[Point, ...]


@dataclass(frozen=True)
class _Version:
    """What one commit holds: the kernel's cells, its raw samples' digest, the machine, and which kernels it timed."""

    date: str
    commit: str
    raw: str | None
    environment: Artifact
    cells: Mapping[Cell, Figures]
    kernels: tuple[str, ...]


def parse_cell(text: str) -> Cell:
    """The cell that `2048x4096 bfloat16 cold_clean` names.

    Raises:
        HistoryError: the text does not consist of three words.
    """
    words = text.split()
    if len(words) != 3:
        raise HistoryError(f"--cell: expected a shape, a dtype and a regime, found {text!r}.")
    return words[0], words[1], words[2]


def run(project: Project, kernel: str, cell: Cell | None = None) -> tuple[list[Series], list[str]]:
    """The series of a kernel's cells; of the regime `cold_clean` only, unless a cell is named.

    Returns:
        The series, and one line for each commit that could not be read and for a
        history that is not here.

    Raises:
        HistoryError: neither tree nor history has the kernel, or no commit holds such a cell of it.
        RevisionError: git cannot answer.
    """
    versions, problems = _versions(project, kernel)
    names = sorted({name for version in versions for name in version.cells}, key=_order)
    wanted = [name for name in names if name == cell or (cell is None and name[2] == "cold_clean")]
    if not names and kernel not in (known := list(dict.fromkeys([*project.kernels, *_held(versions)]))):
        raise HistoryError(f"kernel {kernel}: expected one of {', '.join(known)}.")
    if not wanted:
        held = ", ".join(" ".join(name) for name in names) or "; ".join(problems) or "none"
        asked = " ".join(cell) if cell else "regime cold_clean"
        raise HistoryError(f"{kernel}: expected {asked} in the history, found {held}.")
    if revisions.is_shallow(project.root):
        problems.append("shallow: fetch more history (`git fetch --unshallow`) to see what lies before")
    return [Series(kernel, name, tuple(_points(versions, name))) for name in wanted], problems


def _held(versions: Sequence[_Version]) -> list[str]:
    """The kernels that some commit timed: one of the past is known, too."""
    return sorted({name for version in versions for name in version.kernels})


def _order(cell: Cell) -> tuple[tuple[int, ...], str, str]:
    return tuple(int(size) for size in cell[0].split("x")), cell[1], cell[2]


def _versions(project: Project, kernel: str) -> tuple[list[_Version], list[str]]:
    place = folder(project)
    commits = revisions.changes(project.root, f"{place}/roofline.json")
    if not commits:
        raise revisions.NoEarlierVersionError(f"{place}/roofline.json: expected it in the history, found none.")
    names = [f"{place}/{kind}.json" for kind in ("environment", "roofline")]
    raw = revisions.read_files(project.root, [(commit, name) for commit, _ in commits for name in names])
    found, problems = [], []
    for (commit, seconds), pair in zip(commits, zip(raw[::2], raw[1::2], strict=True), strict=True):
        try:
            found.append(_version(commit, seconds, pair, kernel, f"{place}/timing/{kernel}.json"))
        except ArtifactError as error:
            problems.append(str(error).removesuffix("."))
    return found, problems


def _version(commit: str, seconds: int, pair: tuple[bytes | None, bytes | None], kernel: str, timing: str) -> _Version:
    where, (environment, roofline) = commit[:12], pair
    if environment is None or roofline is None:
        raise ArtifactError(f"{where}: expected environment.json and roofline.json, found one of them.")
    raw, cells, kernels = _figures(roofline, f"{where}:roofline.json", kernel, timing)
    return _Version(
        date=datetime.fromtimestamp(seconds, UTC).date().isoformat(),
        commit=commit,
        raw=raw,
        environment=artifacts.parse(environment, f"{where}:environment.json", "environment"),
        cells=cells,
        kernels=kernels,
    )


def _figures(
    data: bytes, where: str, kernel: str, timing: str
) -> tuple[str | None, dict[Cell, Figures], tuple[str, ...]]:
    """The digest of a kernel's raw samples, the figures of each of its cells, and the kernels that there are.

    Checked is what a series shows, not the whole schema: that takes a second a
    commit, and would refuse what an older version of the lab wrote.
    """
    try:
        whole = json.loads(data, parse_constant=_refuse)
        if (found := (whole["artifact_kind"], whole["schema_version"])) != ("roofline", 1):
            raise ValueError(f"kind and version are {found}")
        raw = {record["path"]: record["sha256"] for record in whole["inputs"]}
        cells = [cell for cell in whole["cells"] if cell["kernel"] == kernel]
        kernels = tuple(dict.fromkeys(cell["kernel"] for cell in whole["cells"]))
        figures = {(cell["shape"], cell["dtype"], cell["regime"]): _figure(cell) for cell in cells}
        return raw.get(timing), figures, kernels
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{where}: $: expected a roofline of version 1, found another thing ({error}).") from error


def _figure(cell: Mapping[str, Any]) -> Figures:
    ours = next((each for each in cell["candidates"] if each["name"] == "triton"), None)
    if ours is None or ours["stats"] is None:
        return Figures(None, None, None, (ours["reason"] or ours["status"]) if ours else "no triton candidate")
    p50_ns, tmean_ns = ours["stats"]["p50_ns"], ours["stats"]["tmean_ns"]
    if not (p50_ns > 0 and tmean_ns > 0):
        raise ValueError("a time is not above 0")
    return Figures(p50_ns, tmean_ns, cell["speedup_over_torch_compile"], None)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _points(versions: Sequence[_Version], cell: Cell) -> Iterator[Point]:
    before: _Version | None = None
    for version in versions:
        if cell not in version.cells:
            continue
        # A roofline that was derived again, or for another kernel's sake, is no new measurement.
        if before is None or version.raw is None or version.raw != before.raw:
            yield Point(version.date, version.commit, version.cells[cell], _changed(before, version))
            before = version


def _changed(before: _Version | None, version: _Version) -> tuple[str, ...]:
    if before is None:
        return ()
    sides = (fingerprint(each.environment, each.environment, each.commit) for each in (before, version))
    return tuple(differences(*sides))
