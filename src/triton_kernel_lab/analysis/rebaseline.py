"""Accepting an intended change of machine or stack, once.

The record is tracked, names the base that it gives up and both fingerprints, and
fits no other comparison: when artifacts are next measured the base moves on, and
the record no longer applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts
from triton_kernel_lab.analysis.evidence import Present, Side
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import module_digest

__all__ = ["RebaselineError", "applies", "build", "path", "read"]


class RebaselineError(ValueError):
    """There is nothing that could be accepted; one sentence says why."""


def path(project: Project) -> Path:
    """Where the record lies."""
    return project.artifacts / "rebaseline.json"


def read(project: Project) -> Artifact | None:
    """The runner's record, or None.

    Raises:
        ArtifactError: it is not sound.
    """
    return artifacts.read(path(project), "rebaseline") if path(project).is_file() else None


def applies(record: Artifact | None, base_commit: str | None, base: Side | None, now: Side) -> bool:
    """Whether a record was made for this comparison: the same base commit and the same two fingerprints."""
    if record is None or record["base_commit"] != base_commit:
        return False
    return bool(record["before"] == _fingerprint(base) and record["after"] == _fingerprint(now))


def build(project: Project, base_commit: str | None, base: Side | None, now: Present, reason: str) -> Artifact:
    """The record that accepts ``now`` in spite of ``base``; None for both where there is no earlier version.

    Raises:
        RebaselineError: no reason is given, or ``now`` cannot be a baseline itself.
    """
    if not reason.strip():
        raise RebaselineError("--reason: expected why the change is intended, found nothing.")
    dirty = [kernel for kernel, timing in now.timings.items() if timing["claim_kind"] == "exploratory"]
    if dirty:
        raise RebaselineError(
            f"timing of {', '.join(dirty)}: expected times measured at a commit, found exploratory ones; "
            "commit the code and measure it again."
        )
    return {
        "artifact_kind": "rebaseline",
        "schema_version": 1,
        "claim_kind": "derived",
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": module_digest(project.root, "analysis/rebaseline.py"),
        },
        "inputs": [],
        "runner": project.runner,
        "reason": " ".join(reason.split()),
        "base_commit": base_commit,
        "before": _fingerprint(base),
        "after": _fingerprint(now),
    }


def _fingerprint(side: Side | None) -> Mapping[str, Any] | None:
    return None if side is None else {name: side.environment[name] for name in ("device", "software")}
