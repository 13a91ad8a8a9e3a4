"""The regression gate: did what was measured last get slower than what was measured before?

Compares the `triton` candidate of the tracked raw samples with those of an
earlier commit, by means over processes and never over pooled samples. What
cannot be compared never passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton_kernel_lab import artifacts, revisions
from triton_kernel_lab.analysis import evidence, judging, verdicts
from triton_kernel_lab.analysis import rebaseline as acceptance
from triton_kernel_lab.analysis.evidence import Present, Side
from triton_kernel_lab.analysis.inputs import kernel_path
from triton_kernel_lab.analysis.margins import Noise, noise_of
from triton_kernel_lab.analysis.pairing import Obstacles, pairs, parse_renames
from triton_kernel_lab.analysis.sides import Key
from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project

__all__ = ["Base", "compare", "rebaseline", "run"]


class Base(NamedTuple):
    """What to compare with; ``side`` and ``commit`` are None where there is no earlier version."""

    side: Side | None
    commit: str | None
    origin: str


def compare(
    base: Base,
    now: Present,
    *,
    root: Path,
    renames: Mapping[str, str] | None = None,
    regimes: Collection[str] | None = None,
    record: Artifact | None = None,
) -> Artifact:
    """The verdict on two sides, without the records of its inputs.

    Args:
        base: what to compare with.
        now: what is judged.
        root: the checkout, whose code decides.
        renames: new names of kernels by their old ones.
        regimes: judge these only. Default: all.
        record: the ``rebaseline`` of the current side, if there is one.

    Raises:
        RenameError: a rename does not fit the two sides.
        StatsError: a flag points outside the samples of its run.
    """
    accepted = record if acceptance.applies(record, base.commit, base.side, now) else None
    obstacles = Obstacles(base.side, now)
    noise, uncalibrated = noise_of(now.noise_floor, now.environment)
    faced = pairs(base.side, now, renames or {}, regimes)
    rows = judging.judge(faced, obstacles.settle, noise, now.quantum_ns, accepted is not None)
    tested = [row for row in rows if row["p_regressed"] is not None]
    return {
        **verdicts.head(root, [now.environment, *now.timings.values()], "analysis/gate.py"),
        "inputs": [],
        "runner": now.environment["runner"],
        "base": {"origin": base.origin, "git_commit": base.commit},
        "method": "welch",
        "max_regression_percent": None,
        "calibration": _calibration(tested, noise),
        "renamed": [{"old": old, "new": new} for old, new in sorted((renames or {}).items())],
        "regimes": sorted(regimes, key=REGIMES.index) if regimes else None,
        "rebaseline": {name: accepted[name] for name in ("reason", "base_commit")} if accepted else None,
        "verdict": verdicts.overall(rows, len(tested), accepted is not None),
        "compared": len(tested),
        "reasons": [
            *obstacles.differences,
            *_unmeasured(base.side, now),
            *([uncalibrated] if uncalibrated and tested else []),
            *([f"rebaselined: {accepted['reason']}"] if accepted else []),
            *verdicts.reasons(rows, len(tested)),
        ],
        "cells": rows,
    }


def _calibration(tested: Sequence[Mapping[str, Any]], noise: Mapping[Key, Noise]) -> str | None:
    if not tested:
        return None
    known = sum((row["kernel"], row["shape"], row["dtype"], row["regime"]) in noise for row in tested)
    return {0: "uncalibrated", len(tested): "calibrated"}.get(known, "partly_calibrated")


def _unmeasured(base: Side | None, now: Side) -> Iterator[str]:
    for name, side in (("base", base), ("current side", now)):
        why = {timing["reason"] for timing in side.timings.values() if timing["reason"]} if side else ()
        yield from (f"the {name} holds no times: {reason}" for reason in sorted(why))


def run(
    project: Project, base: str | None = None, renames: Collection[str] = (), regimes: Collection[str] = ()
) -> Artifact:
    """Judge the raw samples of the tree against those of an earlier commit.

    Args:
        project: the checkout.
        base: a revision; None takes the commit before the last change of raw samples.
        renames: ``old=new`` for each kernel that has another name now.
        regimes: judge these only; empty for all.

    Raises:
        ArtifactError, InputError: an artifact, here or at the base, is not sound.
        NotComparableError: the base cannot serve as one.
        RenameError: a rename does not fit.
        RevisionError: git cannot find or read the base.
    """
    unknown = [regime for regime in regimes if regime not in REGIMES]
    if unknown:
        raise ValueError(f"--regime: expected one of {', '.join(REGIMES)}, found {unknown[0]!r}.")
    now, record, renamed = evidence.of_tree(project), acceptance.read(project), parse_renames(renames)
    found = _base(project, base, first=record is not None and record["base_commit"] is None)
    verdict = compare(found, now, root=project.root, renames=renamed, regimes=regimes or None, record=record)
    paths = [
        project.artifacts / "environment.json",
        *(kernel_path(project, "timing", kernel) for kernel in now.timings),
    ]
    return verdict | {"inputs": [artifacts.input_record(project.root, path) for path in paths]}


def _base(project: Project, revision: str | None, *, first: bool) -> Base:
    """The base, or a nothing to compare with where ``first`` says that there need be none."""
    timing = f"{evidence.folder(project)}/timing"
    if revision is not None:
        commit = revisions.resolve(project.root, revision)
        return Base(evidence.of_commit(project, commit), commit, f"{revision}:{timing}")
    try:
        commit = revisions.previous_change(project.root, timing)
    except revisions.NoEarlierVersionError:
        if not first:
            raise
        return Base(None, None, "no earlier version")
    return Base(evidence.of_commit(project, commit), commit, f"{commit[:12]}:{timing}")


def rebaseline(project: Project, reason: str, base: str | None = None) -> Path:
    """Write the record that accepts what cannot be compared with the base; returns its path.

    Args:
        project: the checkout, with the new measurement in it.
        reason: why the change is intended.
        base: as of ``run``.

    Raises:
        RebaselineError: there is nothing to accept, no reason, or the tree's times cannot be a baseline.
    """
    now, found = evidence.of_tree(project), _base(project, base, first=True)
    record = acceptance.build(project, found.commit, found.side, now, reason)
    verdict = compare(found, now, root=project.root, record=record)
    if found.side and not any(row["accepted"] for row in verdict["cells"]):
        raise acceptance.RebaselineError(
            f"{found.origin}: expected cells that cannot be compared, found none; `triton-kernel-lab gate` judges them."
        )
    artifacts.write(acceptance.path(project), record)
    return acceptance.path(project)
