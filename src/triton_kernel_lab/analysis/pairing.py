"""Which cells of two sides face each other, and what stands in the way of comparing them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from triton_kernel_lab.analysis import verdicts
from triton_kernel_lab.analysis.evidence import Present, Side
from triton_kernel_lab.analysis.replicates import Replicates, replicates
from triton_kernel_lab.analysis.sides import Key, differences, fingerprint
from triton_kernel_lab.artifacts import Artifact

__all__ = ["LEAST_PROCESSES", "Obstacles", "Pair", "RenameError", "Settled", "pairs", "parse_renames"]

LEAST_PROCESSES = 2
"""A single process has no spread, and no test can be made of it."""

_PROTOCOL = ("sweep_bytes", "input_sets")
# Windows between two events; the margin of the gate knows nothing of a constant in each of them.
_BETWEEN_EVENTS = ("cold_clean", "cold_dirty", "warm")
_SAME_WINDOW_NS = 250


class RenameError(ValueError):
    """A rename that does not fit the two sides; one sentence says why."""


class Pair(NamedTuple):
    """A cell of the current side, or one of the base that has none; ``old`` is the base's name of the kernel."""

    key: Key
    old: str
    base: Replicates | None
    now: Replicates | None


class Settled(NamedTuple):
    """A verdict without a test; ``acceptable`` if a rebaseline may accept it."""

    verdict: str
    reason: str
    acceptable: bool = False


def parse_renames(given: Collection[str]) -> dict[str, str]:
    """The map from old to new names that ``old=new`` arguments give.

    Raises:
        RenameError: an argument has another form, or a name occurs twice.
    """
    parts = [text.partition("=") for text in given]
    if any(not (old and new) or "=" in new for old, _, new in parts):
        raise RenameError(f"--rename: expected old=new, found {' '.join(given)!r}.")
    renames = {old: new for old, _, new in parts}
    if len(renames) != len(parts) or len(set(renames.values())) != len(parts):
        raise RenameError(f"--rename: expected each kernel once, found {' '.join(given)!r}.")
    return renames


def pairs(
    base: Side | None, now: Present, renames: Mapping[str, str], regimes: Collection[str] | None = None
) -> list[Pair]:
    """Every cell of both sides once, in order; in ``regimes`` only, unless that is None.

    Raises:
        RenameError: an old name is not the base's alone, or a new one not the current side's alone.
    """
    earlier = base.timings if base else {}
    _check(renames, earlier, now.timings)
    before = _cells(earlier, regimes)
    moved = {(renames.get(key[0], key[0]), *key[1:]): (key[0], cell) for key, cell in before.items()}
    after = _cells(now.timings, regimes)
    olds = {new: old for old, new in renames.items()}
    found = []
    for key in sorted(moved | after, key=verdicts.order):
        old, cell = moved.get(key, (olds.get(key[0], key[0]), None))
        # A cell that only the base holds keeps the name that it had there.
        found.append(Pair(key if key in after else (old, *key[1:]), old, cell, after.get(key)))
    return found


def _check(renames: Mapping[str, str], base: Collection[str], now: Collection[str]) -> None:
    for old, new in renames.items():
        if old not in base or old in now:
            raise RenameError(f"--rename {old}={new}: expected {old} to be a kernel of the base only.")
        if new not in now or new in base:
            raise RenameError(f"--rename {old}={new}: expected {new} to be a kernel of the current side only.")


def _cells(timings: Mapping[str, Artifact], regimes: Collection[str] | None) -> dict[Key, Replicates]:
    found: dict[Key, Replicates] = {}
    for timing in timings.values():
        found |= {key: cell for key, cell in replicates(timing).items() if regimes is None or key[3] in regimes}
    return found


class Obstacles:
    """What is known of the two sides beyond their times."""

    def __init__(self, base: Side | None, now: Present) -> None:
        self._base, self._now = base, now
        self.differences = [] if base is None else _differences(base.environment, now.environment)
        """The facts of machine and stack in which the sides differ, one line each."""

    def settle(self, pair: Pair) -> Settled | None:
        """The verdict on a pair that no test decides, or None.

        What is wrong comes before what is out of date, and both before what cannot be compared.
        """
        kernel = pair.key[0]
        if pair.now is None:
            return Settled("MISSING", "only the base holds it", acceptable=True)
        if pair.now.wrong:
            return Settled("CORRECTNESS_FAIL", f"its output {pair.now.reason}")
        if failure := _failure(self._now.correctness[kernel]):
            return Settled("CORRECTNESS_FAIL", failure)
        if kernel in self._now.stale:
            return Settled("STALE", f"the sources changed since it was timed; run `dvc repro timing@{kernel}`")
        if pair.base is None:
            return Settled("NEW", "only the current side holds it")
        return self._unlike(pair) or _unsound(pair.base, pair.now) or self._unchanged(pair)

    def _unlike(self, pair: Pair) -> Settled | None:
        assert self._base is not None
        there, here = self._base.timings[pair.old], self._now.timings[pair.key[0]]
        if there["claim_kind"] == "exploratory" or there["producer"]["git_tree_dirty"]:
            reason = "the base was measured from a dirty tree (exploratory)"
            return Settled("NOT_COMPARABLE", reason, acceptable=True)
        lines = ["another machine or stack"] if self.differences else []
        if (there["claim_kind"] == "synthetic") != (here["claim_kind"] == "synthetic"):
            lines.append(f"claim: base {there['claim_kind']}, current {here['claim_kind']}")
        for fact in _PROTOCOL:
            if there["protocol"][fact] != here["protocol"][fact]:
                lines.append(f"protocol.{fact}: base {there['protocol'][fact]}, current {here['protocol'][fact]}")
        if pair.key[3] in _BETWEEN_EVENTS:
            lines += self._other_window()
        return Settled("NOT_COMPARABLE", "; ".join(lines), acceptable=True) if lines else None

    def _other_window(self) -> list[str]:
        """A line where the two hosts read other times between the events of an empty window."""
        assert self._base is not None
        there, here = self._base.empty_window_ns, self._now.empty_window_ns
        if there is None or here is None or abs(there - here) <= _SAME_WINDOW_NS:
            return []
        return [f"an empty event window: base {there} ns, current {here} ns"]

    def _unchanged(self, pair: Pair) -> Settled | None:
        assert self._base is not None
        if self._base.digests[pair.old] == self._now.digests[pair.key[0]]:
            return Settled("EQUIVALENT", "the same artifact as the base's: not measured again")
        return None


def _differences(base: Artifact, now: Artifact) -> list[str]:
    return differences(fingerprint(base, base, "base"), fingerprint(now, now, "current"))


def _failure(correctness: Artifact) -> str | None:
    if correctness["passed"]:
        return None
    failed: dict[str, Any] = next((cell for cell in correctness["cells"] if not cell["passed"]), {})
    where = " ".join(str(failed[name]) for name in ("shape", "dtype", "variant") if name in failed)
    return ": ".join(["failed correctness", *filter(None, [where]), *failed.get("failures", [])[:1]])


def _unsound(base: Replicates, now: Replicates) -> Settled | None:
    """Times that are not there, too few, or of something else."""
    for side, cell in (("current", now), ("base", base)):
        acceptable = side == "base"
        if not cell.times_ns:
            return Settled("NOT_COMPARABLE", f"the {side} {cell.reason}", acceptable)
        if len(cell.times_ns) < LEAST_PROCESSES:
            reason = f"the {side} has one process, and no test can be made of one"
            return Settled("NOT_COMPARABLE", reason, acceptable)
    if base.work != now.work:
        reason = f"(bytes read, bytes written, flop): base {base.work}, current {now.work}"
        return Settled("NOT_COMPARABLE", reason, acceptable=True)
    return None
