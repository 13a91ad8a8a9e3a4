"""Finding the commit that made a kernel slower, or wrong, by timing commits against a good one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_kernel_lab import revisions
from triton_kernel_lab.analysis import confirm as judging
from triton_kernel_lab.analysis.confirm import Row
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.lab import confirm
from triton_kernel_lab.lab.confirm import Engine, Request, compiled_from, require_device
from triton_kernel_lab.lab.timing import MeasurementError
from triton_kernel_lab.project import Project

__all__ = ["BAD", "GOOD", "SKIPPED", "Step", "run"]

GOOD, BAD, SKIPPED = "good", "bad", "skipped"
_REGIME = REGIMES[0]
_WRONG = frozenset({"wrong", "failed"})

Key = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """What a commit turned out to be against the good one.

    ``changes`` holds the change in per cent of each cell, by shape and dtype, where
    it was timed; ``reason`` what is wrong with it, or how a doubt was settled.
    """

    commit: str
    state: str
    changes: Mapping[Key, float]
    reason: str | None


Log = Callable[[Step], None]


class _Search:
    """Good against candidate, again and again, by the same measurement."""

    def __init__(self, project: Project, folders: Mapping[str, Path], good: str, engine: Engine | None) -> None:
        self._project, self._folders, self._good, self._engine = project, folders, good, engine
        self._sought: frozenset[str] = frozenset()
        self._slow: dict[Key, float] = {}

    def aim(self, end: str, cells: list[dict[str, Any]]) -> Step:
        """Time the last commit, and look from now on for what is wrong with it."""
        self._cells = cells
        rows, statuses = self._measure(end)
        self._sought = statuses & _WRONG
        if self._sought:
            return _step(end, BAD, rows)
        self._slow = {_key(row): row["change_percent"] for row in rows if row["verdict"] == "REGRESSED"}
        self._cells = [cell for cell in cells if (cell["shape"], cell["dtype"]) in self._slow]
        return _step(end, BAD if self._slow else GOOD, rows)

    def ask(self, commit: str) -> Step:
        """What a commit between the two is; skipped where it says nothing of what is looked for."""
        try:
            rows, statuses = self._measure(commit)
        except MeasurementError as error:
            return Step(commit, SKIPPED, {}, str(error).splitlines()[0])
        if self._sought and statuses & self._sought:
            return _step(commit, BAD, rows)
        if any(row["change_percent"] is None for row in rows):
            return _step(commit, SKIPPED, rows)
        verdicts = {row["verdict"] for row in rows}
        if self._sought or not verdicts & {"REGRESSED", "AMBIGUOUS"}:
            return _step(commit, GOOD, rows)
        return _step(commit, BAD, rows) if "REGRESSED" in verdicts else self._nearer(commit, rows)

    def _nearer(self, commit: str, rows: Sequence[Row]) -> Step:
        """No verdict, but a search has to go on: to the side that the commit is nearer to."""
        shares = [math.log1p(row["change_percent"] / 100) / math.log1p(self._slow[_key(row)] / 100) for row in rows]
        found = _step(commit, BAD if max(shares) > 0.5 else GOOD, rows)
        return Step(commit, found.state, found.changes, "ambiguous, and so judged by half of the whole change")

    def _measure(self, commit: str) -> tuple[list[Row], frozenset[str]]:
        """The rows of a commit against the good one, and what its kernel ended with."""
        folders = {"base": self._folders[self._good], "now": self._folders[commit]}
        found = confirm.measure(folders, self._cells, self._project.measure, [_REGIME], self._engine)
        statuses = frozenset(cell["versions"]["now"]["status"] for cell in found["cells"])
        return judging.judge(found["cells"], [_REGIME]), statuses


def _key(row: Row) -> Key:
    return row["shape"], row["dtype"]


def _step(commit: str, state: str, rows: Sequence[Row]) -> Step:
    changes = {_key(row): row["change_percent"] for row in rows if row["change_percent"] is not None}
    return Step(commit, state, changes, next((row["reason"] for row in rows if row["change_percent"] is None), None))


def run(
    project: Project,
    kernel: str,
    good: str,
    bad: str,
    cells: Sequence[tuple[str, str]] = (),
    *,
    engine: Engine | None = None,
    log: Log = lambda step: None,
) -> list[str]:
    """The first commit from which on a kernel is slower than at ``good``, or wrong.

    Asked are the commits along first parents that change what the kernel is
    compiled from. Inputs, oracle and shapes are those of the tree, for all of them.

    Args:
        project: the checkout.
        kernel: a kernel of the tree.
        good: a revision at which it was fast and right; an ancestor of ``bad``.
        bad: a revision at which it is not.
        cells: (shape, dtype) to time; empty for all that the case times.
        engine: as of ``confirm.run``.
        log: told of each commit that was asked, the last one first.

    Returns:
        That commit; several, if it is one of them and those before the last could
        not be judged.

    Raises:
        NotComparableError: ``good`` is no ancestor, nothing changed, the two do
            not differ, or there is no CUDA device.
        RevisionError: git cannot find or read a revision.
    """
    start, end = (revisions.resolve(project.root, revision) for revision in (good, bad))
    if not revisions.is_ancestor(project.root, start, end):
        raise NotComparableError(f"bisect: expected --good {good} to be an ancestor of --bad {bad}, found it is not.")
    wanted = confirm.wanted((), Request(kernels=[kernel], cells=cells))
    name = wanted[0]["kernel"]
    with tempfile.TemporaryDirectory() as scratch:
        folders = _exported(
            project, [start, *revisions.first_parents(project.root, start, end, confirm.PACKAGE)], scratch
        )
        suspects = _suspects(folders, name)
        if not suspects:
            raise NotComparableError(f"bisect: nothing that {name} is compiled from changed from {good} to {bad}.")
        require_device(engine)
        search = _Search(project, {commit: root / "src" for commit, root in folders.items()}, start, engine)
        last = search.aim(suspects[-1], wanted)
        log(last)
        if last.state == GOOD:
            raise NotComparableError(
                f"bisect: expected {name} to be slower or wrong at {bad}, found it is as at {good}."
            )
        return _between(suspects, search.ask, log)


def _exported(project: Project, commits: Sequence[str], scratch: str) -> dict[str, Path]:
    """Where the sources of each commit lie, in the order of the commits."""
    folders = {commit: Path(scratch, commit) for commit in commits}
    for commit, folder in folders.items():
        revisions.export(project.root, commit, confirm.PACKAGE, folder)
    return folders


def _suspects(folders: Mapping[str, Path], kernel: str) -> list[str]:
    """The commits after the first that changed what a kernel is compiled from."""
    digests = {commit: compiled_from(folder, kernel) for commit, folder in folders.items()}
    start, *later = digests
    if digests[start] is None:
        raise NotComparableError(f"bisect: expected the kernel {kernel} at {start[:12]}, found none there.")
    return [commit for before, commit in zip(digests, later, strict=False) if digests[commit] != digests[before]]


def _between(suspects: Sequence[str], ask: Callable[[str], Step], log: Log) -> list[str]:
    """The first bad one of the suspects, of which the last is bad and what lies before the first is good."""
    low, high, skipped = -1, len(suspects) - 1, set[int]()
    while open_ones := [at for at in range(low + 1, high) if at not in skipped]:
        at = min(open_ones, key=lambda each: abs(2 * each - low - high))
        step = ask(suspects[at])
        log(step)
        if step.state == BAD:
            high = at
        elif step.state == GOOD:
            low = at
        else:
            skipped.add(at)
    return list(suspects[low + 1 : high + 1])
