"""How much identical code differs from session to session, cell by cell.

A session is one run of all measuring processes. Each counts once, by the mean
over its processes of the log of tmean, as the gate takes them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.replicates import mean_and_sd, replicates
from triton_kernel_lab.analysis.sides import Key, differences, fingerprint
from triton_kernel_lab.artifacts import Artifact

__all__ = ["NoiseError", "Session", "cells", "digests", "require_alike"]


class NoiseError(ValueError):
    """The sessions are not of identical code on one machine; one sentence says why."""


class Session(NamedTuple):
    """One session's environment and the timing artifact of each of its kernels; ``name`` is for messages."""

    name: str
    environment: Artifact
    timings: Mapping[str, Artifact]


def require_alike(sessions: Sequence[Session]) -> None:
    """Refuse sessions whose difference would be more than noise.

    Raises:
        NoiseError: fewer than two, or other kernels, sources, protocol, machine or stack.
    """
    if len(sessions) < 2:
        raise NoiseError(f"noise: expected two sessions or more, found {len(sessions)}.")
    for one, other in itertools.pairwise(sessions):
        _require_same_place(one, other)
        if one.timings.keys() != other.timings.keys():
            raise NoiseError(
                f"{other.name}: expected the kernels of {one.name}, {', '.join(one.timings)}; "
                f"found {', '.join(other.timings)}."
            )
        for kernel in one.timings:
            _require_same_work(kernel, one, other)


def _require_same_place(one: Session, other: Session) -> None:
    places = (fingerprint(each.environment, each.environment, each.name) for each in (one, other))
    if unlike := differences(*places):
        raise NoiseError(f"{other.name}: expected the machine and stack of {one.name}, found {unlike[0]}.")


def _require_same_work(kernel: str, one: Session, other: Session) -> None:
    ours, theirs = one.timings[kernel], other.timings[kernel]
    if "not_measured" in (ours["status"], theirs["status"]):
        raise NoiseError(f"{other.name}: timing of {kernel}: expected measured samples in every session, found none.")
    if ours["producer"]["source_sha256"] != theirs["producer"]["source_sha256"]:
        raise NoiseError(
            f"{other.name}: timing of {kernel}: expected the sources of {one.name}, found others: not identical code."
        )
    if ours["protocol"] != theirs["protocol"]:
        raise NoiseError(f"{other.name}: timing of {kernel}: expected the protocol of {one.name}, found another.")


def cells(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """The ``cells`` of a noise_floor artifact: those with a sound time in every session.

    Raises:
        NoiseError: no cell has one.
    """
    found = [row for kernel in sessions[0].timings for row in _of_kernel(kernel, sessions)]
    if not found:
        raise NoiseError("noise: expected a cell with a sound time in every session, found none.")
    return found


def _of_kernel(kernel: str, sessions: Sequence[Session]) -> Iterator[dict[str, Any]]:
    by_session = [_means(session.timings[kernel]) for session in sessions]
    for key in by_session[0]:
        if all(key in means for means in by_session):
            yield _row(key, [means[key] for means in by_session])


def _means(timing: Artifact) -> dict[Key, float]:
    found = replicates(timing)
    return {key: math.fsum(each.logs) / len(each.logs) for key, each in found.items() if each.times_ns}


def _row(key: Key, means: Sequence[float]) -> dict[str, Any]:
    return {
        **dict(zip(("kernel", "shape", "dtype", "regime"), key, strict=True)),
        "sessions": len(means),
        "session_sd_log": round(mean_and_sd(means)[1], 6),
        "largest_aa_log": round(max(means) - min(means), 6),
    }


def digests(sessions: Sequence[Session]) -> list[dict[str, str]]:
    """For each session the SHA-256 of each kernel's timing, so that whoever kept the samples can show them."""
    return [
        {
            kernel: hashlib.sha256(artifacts.dumps(timing).encode()).hexdigest()
            for kernel, timing in each.timings.items()
        }
        for each in sessions
    ]
