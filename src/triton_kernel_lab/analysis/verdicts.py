"""The vocabulary of a gate: the verdict on a cell, on the whole, and the exit code that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__
from triton_kernel_lab.analysis.sides import Key
from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.sources import module_digest

__all__ = ["JUDGED", "count", "exit_code", "head", "named", "order", "overall", "reasons", "row"]

JUDGED = ("REGRESSED", "IMPROVED", "WITHIN_LIMIT", "EQUIVALENT", "AMBIGUOUS")
"""The verdicts on two times that could be compared."""

_BLOCKING = ("MISSING", "NOT_COMPARABLE", "STALE")
_EXIT_CODES = {"correctness_fail": 2, "regressed": 2, "not_comparable": 3}
_AMBIGUOUS = 4
_LISTED = {
    "CORRECTNESS_FAIL": "wrong",
    "REGRESSED": "regressed",
    "MISSING": "missing",
    "RENAMED": "renamed",
    "NEW": "new",
    "STALE": "stale",
    "NOT_COMPARABLE": "not comparable",
}
_NAMED = 10
_NOTHING: dict[str, Any] = {
    "renamed_from": None,
    "accepted": False,
    "base_p50_ns": None,
    "p50_ns": None,
    "base_tmean_ns": None,
    "tmean_ns": None,
    "base_processes": None,
    "processes": None,
    "change_percent": None,
    "anchored_change_percent": None,
    "margin_percent": None,
    "margin_source": None,
    "p_regressed": None,
    "p_improved": None,
    "p_equivalent": None,
}


def head(root: Path, current: Sequence[Artifact], module: str) -> Artifact:
    """What every verdict begins with; worth no more than what was judged.

    Args:
        root: the checkout.
        current: the artifacts of the side that is judged.
        module: the file that decides, relative to the package.
    """
    claims = {artifact["claim_kind"] for artifact in current}
    producer = {
        "package": "triton-kernel-lab",
        "version": __version__,
        "source_sha256": module_digest(root, module),
    }
    return {
        "artifact_kind": "gate",
        "schema_version": 1,
        "claim_kind": next((kind for kind in ("synthetic", "exploratory") if kind in claims), "derived"),
        "producer": producer,
    }


def row(key: Key, verdict: str, reason: str | None, **facts: Any) -> dict[str, Any]:
    """One cell of a verdict; a fact that is not given is null."""
    names = dict(zip(("kernel", "shape", "dtype", "regime"), key, strict=True))
    return {**names, "verdict": verdict, "reason": reason, **_NOTHING, **facts}


def order(key: Key) -> tuple[str, tuple[int, ...], str, int]:
    """By kernel, then by the sizes of the shape; the primary regime first."""
    kernel, shape, dtype, regime = key
    return kernel, tuple(int(size) for size in shape.split("x")), dtype, REGIMES.index(regime)


def named(rows: Iterable[Mapping[str, Any]], *verdicts: str) -> list[str]:
    """The names of the cells with one of these verdicts."""
    wanted = (row for row in rows if row["verdict"] in verdicts)
    return [" ".join((row["kernel"], row["shape"], row["dtype"], row["regime"])) for row in wanted]


def count(number: int) -> str:
    """A number of cells in words."""
    return f"{number} {'cell' if number == 1 else 'cells'}"


def overall(rows: Sequence[Mapping[str, Any]], compared: int, rebaselined: bool = False) -> str:
    """The verdict on the whole: the worst of the cells, and a failure if no two times were compared.

    Args:
        rows: the cells.
        compared: how many of them have two times that were compared.
        rebaselined: whether an intended change was accepted for this comparison.
    """
    for verdict in ("CORRECTNESS_FAIL", "REGRESSED"):
        if named(rows, verdict):
            return verdict.lower()
    blocked = [row for row in rows if row["verdict"] in _BLOCKING and not row["accepted"]]
    if blocked or not (compared or rebaselined):
        return "not_comparable"
    if rebaselined:
        return "rebaselined"
    return "ambiguous" if named(rows, "AMBIGUOUS") else "pass"


def reasons(rows: Sequence[Mapping[str, Any]], compared: int) -> list[str]:
    """One line for each verdict that wants attention, with its cells."""
    found = []
    for verdict, text in _LISTED.items():
        if names := named(rows, verdict):
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            found.append(f"{count(len(names))} {text}: {', '.join(names[:_NAMED])}{more}")
    if not compared:
        found.append("0 cells compared")
    return found


def exit_code(verdict: Artifact, strict: bool = False) -> int:
    """0 fine, 2 slower or wrong, 3 cannot compare; 4 ambiguous, only if ``strict``."""
    code = _EXIT_CODES.get(verdict["verdict"], 0)
    return _AMBIGUOUS if not code and strict and named(verdict["cells"], "AMBIGUOUS") else code
