"""What the gate reads of one side of a comparison: its cells and its fingerprint.

A side is a ``roofline`` with the ``environment`` it was measured in, or a
``report``, which carries its own. Without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from triton_kernel_lab.artifacts import Artifact

__all__ = ["Cell", "Key", "NotComparableError", "cells", "check_baseline", "differences", "fingerprint", "regime_of"]

Key = tuple[str, str, str, str]
"""(kernel, shape, dtype, regime)."""

Fingerprint = Mapping[str, Mapping[str, Any] | None]

_CANDIDATE = "triton"
# What two reports must share so that their samples mean the same; the counts may differ.
_PROTOCOL = ("regime", "sweep_bytes", "timing_method")


class NotComparableError(ValueError):
    """There is nothing sound to compare with; one sentence says why."""

    exit_code: ClassVar[int] = 3


@dataclass(frozen=True)
class Cell:
    """The `triton` candidate in one cell.

    ``p50_ns`` is None when it has no believable time, and ``reason`` says why.
    ``work`` is (bytes read, bytes written, flop): what the case asks for.
    """

    p50_ns: int | None
    reason: str | None
    served_by: str | None
    work: tuple[int, int, int]


def regime_of(artifact: Artifact) -> str | None:
    """The one regime of a report; None for a roofline, which holds several."""
    return artifact["protocol"]["regime"] if artifact["artifact_kind"] == "report" else None


def cells(artifact: Artifact, regime: str | None, where: str) -> dict[Key, Cell]:
    """The cells of a side, in ``regime`` only unless that is None.

    A report's cases take ``regime`` whatever its own is: ``differences`` is what
    tells two regimes apart.

    Raises:
        NotComparableError: a cell occurs twice.
    """
    found: dict[Key, Cell] = {}
    entries = _report_cells(artifact, regime) if regime_of(artifact) else _roofline_cells(artifact, regime)
    for key, cell in entries:
        if key in found:
            raise NotComparableError(
                f"{where}: expected each case once, found {' '.join(key)} twice; measure it again."
            )
        found[key] = cell
    return found


def _roofline_cells(artifact: Artifact, regime: str | None) -> Iterator[tuple[Key, Cell]]:
    for entry in artifact["cells"]:
        if regime in (None, entry["regime"]):
            work = (entry["logical_read_bytes"], entry["logical_write_bytes"], entry["flop"])
            yield (entry["kernel"], entry["shape"], entry["dtype"], entry["regime"]), _cell(entry, work)


def _report_cells(artifact: Artifact, regime: str | None) -> Iterator[tuple[Key, Cell]]:
    for entry in artifact["cases"]:
        cost = entry["cost"]
        read, write = (sum(item["bytes"] for item in cost[way]) for way in ("read", "write"))
        key = (entry["kernel"], entry["shape"], entry["dtype"], regime or artifact["protocol"]["regime"])
        yield key, _cell(entry, (read, write, cost["flop"]), entry["correctness"]["passed"])


def _cell(entry: Mapping[str, Any], work: tuple[int, int, int], passed: bool = True) -> Cell:
    ours = next((item for item in entry["candidates"] if item["name"] == _CANDIDATE), None)
    if ours is None:
        return Cell(None, f"holds no {_CANDIDATE} candidate", None, work)
    if not passed:
        return Cell(None, "failed correctness", ours["served_by"], work)
    if ours["status"] != "ok" or ours["stats"] is None:
        why = ours["reason"] or "no reason is given"
        return Cell(None, f"has status {ours['status']} ({why})", ours["served_by"], work)
    return Cell(ours["stats"]["p50_ns"], None, ours["served_by"], work)


def fingerprint(artifact: Artifact, environment: Artifact | None, where: str) -> Fingerprint:
    """The facts whose change makes two times incomparable, by section.

    Raises:
        NotComparableError: the artifact is a roofline, and its environment is not given.
    """
    claim = {"synthetic": artifact["claim_kind"] == "synthetic"}
    if artifact["artifact_kind"] == "report":
        protocol = {name: artifact["protocol"][name] for name in _PROTOCOL}
        return {**artifact["environment"], "claim": claim, "protocol": protocol}
    if environment is None:
        raise NotComparableError(f"{where}: expected the environment.json that it was measured in, found none.")
    return {"device": environment["device"], "software": environment["software"], "claim": claim}


def differences(base: Fingerprint, current: Fingerprint) -> list[str]:
    """What differs, one line a fact; a section that only one kind of artifact has is no difference."""
    return [
        line for section in base if section in current for line in _unlike(section, base[section], current[section])
    ]


def _unlike(section: str, base: Mapping[str, Any] | None, current: Mapping[str, Any] | None) -> Iterator[str]:
    if base is None or current is None:
        if base is not current:
            yield f"{section}: base {_name(base)}, current {_name(current)}"
        return
    for fact in base:
        if base[fact] != current[fact]:
            yield f"{section}.{fact}: base {base[fact]}, current {current[fact]}"


def _name(section: Mapping[str, Any] | None) -> str:
    return "none" if section is None else str(section.get("name", "present"))


def check_baseline(artifact: Artifact, where: str) -> None:
    """Refuse an artifact that cannot serve as a baseline.

    Raises:
        NotComparableError: it was made from uncommitted code, or holds no time.
    """
    if artifact["claim_kind"] == "exploratory" or artifact["producer"].get("git_tree_dirty"):
        raise NotComparableError(
            f"{where}: expected a baseline measured at a commit, found one from a dirty tree (exploratory); "
            "commit the code and measure it again."
        )
    if not artifact.get("cases", artifact.get("cells")):
        why = artifact.get("reason") or "no case was measured"
        raise NotComparableError(f"{where}: expected a measured baseline, found no case ({why}); measure one on a GPU.")
