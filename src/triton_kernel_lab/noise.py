"""The command ``noise``: how much identical code differs between sessions on this machine.

The gate takes its margins from what this writes; without it they are wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.analysis import noise
from triton_kernel_lab.analysis.noise import NoiseError, Session
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import module_digest, stage_digest

__all__ = ["from_folders", "measure"]

Log = Callable[[str], None]


def measure(project: Project, sessions: int, kernels: Sequence[str] = (), progress: Log = lambda line: None) -> Path:
    """Time the same code in several sessions of fresh processes and write noise_floor.json.

    Sessions are the outer loop, so that each kernel's are as far apart in time as they can be.

    Raises:
        NoiseError: fewer than two sessions, or runner ``cpu``.
        MeasurementError: a measuring process failed.
    """
    if project.runner == "cpu":
        raise NoiseError("noise: runner cpu has no times to differ; set `runner` to a GPU's name.")
    if sessions < 2:
        raise NoiseError(f"noise: --sessions: expected 2 or more, found {sessions}.")
    git = revisions.producer_git(project.root)
    place = _probe(project)
    names = kernels or project.kernels
    made = [
        Session(f"session {index}", place, {name: _timed(project, name, index, progress) for name in names})
        for index in range(sessions)
    ]
    claim = "measured" if git["git_tree_dirty"] is False else "exploratory"
    return _write(project, made, claim, git)


def from_folders(project: Project, folders: Sequence[Path]) -> Path:
    """Write noise_floor.json from sessions that were already measured, without a device.

    Args:
        project: the checkout.
        folders: each with ``environment.json`` and ``timing/*.json``, as
            ``artifacts/<runner>`` was after one measurement.

    Raises:
        NoiseError: they are not of identical code on one machine.
        ArtifactError: a file is missing or unsound.
    """
    sessions = [_read(folder) for folder in folders]
    noise.require_alike(sessions)
    timings = [timing for session in sessions for timing in session.timings.values()]
    claims = {timing["claim_kind"] for timing in timings}
    claim = next((kind for kind in ("synthetic", "exploratory") if kind in claims), "measured")
    git = {name: timings[0]["producer"][name] for name in ("git_commit", "git_tree_dirty")}
    return _write(project, sessions, claim, git)


def _read(folder: Path) -> Session:
    files = sorted((folder / "timing").glob("*.json"))
    if not files:
        raise NoiseError(f"{folder}: expected environment.json and timing/*.json of one session, found no timing.")
    environment = artifacts.read(folder / "environment.json", "environment")
    return Session(str(folder), environment, {path.stem: artifacts.read(path, "timing") for path in files})


def _probe(project: Project) -> Artifact:
    """This machine, as an environment artifact tells it; it must be the runner's."""
    import torch

    from triton_kernel_lab.lab.environment import probe, runner_name

    device = torch.cuda.current_device()
    if (found := runner_name(torch.cuda.get_device_name(device))) != project.runner:
        raise NoiseError(f"noise: runner {project.runner} needs its GPU, found {found}.")
    return {"claim_kind": "measured", "artifact_kind": "environment", **probe(device=device)}


def _timed(project: Project, kernel: str, session: int, progress: Log) -> Artifact:
    from triton_kernel_lab.cases._base import load
    from triton_kernel_lab.lab import timing

    case = load(kernel)
    producer = {"source_sha256": stage_digest(project.root, "timing", kernel)}
    body = timing.measure(case, case.cells, project.measure, lambda line: progress(f"session {session}: {line}"))
    return {"kernel": kernel, "producer": producer, **body}


def _write(project: Project, sessions: Sequence[Session], claim: str, git: Mapping[str, Any]) -> Path:
    path = project.artifacts / "noise_floor.json"
    place = sessions[0].environment
    artifacts.write(
        path,
        {
            "artifact_kind": "noise_floor",
            "schema_version": 1,
            "claim_kind": claim,
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": module_digest(project.root, "noise.py"),
                **git,
            },
            # None of the tree: the floor stays true when the next measurement takes a session's place there.
            "inputs": [],
            "sessions": noise.digests(sessions),
            "runner": project.runner,
            "environment": {"device": place["device"], "software": place["software"]},
            "cells": noise.cells(sessions),
        },
    )
    return path
