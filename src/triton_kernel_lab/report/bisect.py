"""A bisection as lines for a terminal: one a commit, and the commit that it leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_kernel_lab.report import units

__all__ = ["conclusion", "line"]


def line(commit: str, subject: str, state: str, changes: Mapping[tuple[str, str], float], reason: str | None) -> str:
    """What a commit turned out to be, and how that shows."""
    shown = [f"{shape} {dtype} {units.signed_percent(change)}" for (shape, dtype), change in changes.items()]
    why = "; ".join([*([", ".join(shown)] if shown else []), *([reason] if reason else [])])
    return f"{state}: {commit[:12]} {subject}{f': {why}' if why else ''}"


def conclusion(commits: Sequence[tuple[str, str]]) -> str:
    """The first bad commit, given as (commit, subject); or those of which one is it."""
    (last, subject), *_ = reversed(commits)
    if len(commits) == 1:
        return f"first bad commit: {last} {subject}"
    lines = [f"  {commit} {said}" for commit, said in commits]
    return "\n".join([f"the first bad commit is one of {len(commits)}; all but the last could not be judged:", *lines])
