"""The simple gate: is a p50 more than a given per cent above that of a baseline file?

Compares the `triton` candidate cell by cell; a cell is a kernel, a shape, a dtype
and a regime, and a lower p50 is better. What cannot be compared never passes. It
asks for one file and no replicates, and so knows nothing of noise: the gate over
tracked artifacts is ``analysis.gate``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import verdicts
from triton_kernel_lab.analysis.sides import (
    Cell,
    Key,
    NotComparableError,
    cells,
    check_baseline,
    differences,
    fingerprint,
    regime_of,
)
from triton_kernel_lab.artifacts import Artifact, ArtifactError

__all__ = ["compare", "environment_beside", "load_baseline"]

# The checkout, if the package runs in one: a verdict states the digest of the code that decides.
_ROOT = Path(__file__).parents[3]


def load_baseline(path: Path | str) -> Artifact:
    """Read a ``report`` or ``roofline`` to compare with, before anything is measured.

    Raises:
        ArtifactError: the file is no sound artifact of these kinds, or cannot be read.
        NotComparableError: there is no such file, or it cannot serve as a baseline.
    """
    try:
        artifact = artifacts.read(path)
    except ArtifactError as error:
        raise _with_fix(path, error) from error
    if artifact["artifact_kind"] not in ("report", "roofline"):
        found = artifact["artifact_kind"]
        raise ArtifactError(f"{path}: $.artifact_kind: expected a report or a roofline, found {found!r}; name one.")
    check_baseline(artifact, str(path))
    return artifact


def _with_fix(path: Path | str, error: ArtifactError) -> ValueError:
    if isinstance(error.__cause__, FileNotFoundError):
        make = f"make one with `triton-kernel-lab --output {path}`"
        return NotComparableError(f"{path}: expected a baseline, found no file; {make}.")
    # Never to write over what is there: it may be anything.
    way_out = "name a report or a roofline.json"
    if isinstance(error.__cause__, IsADirectoryError):
        way_out += " inside it"
    elif isinstance(error.__cause__, OSError):
        way_out = "make it readable or name another"
    return ArtifactError(f"{str(error).removesuffix('.')}; {way_out}.")


def environment_beside(path: Path | str, baseline: Artifact) -> Artifact | None:
    """The environment of a baseline file: None for a report, which carries its own."""
    if baseline["artifact_kind"] == "report":
        return None
    return artifacts.read(Path(path).with_name("environment.json"), "environment")


def compare(
    base: Artifact,
    current: Artifact,
    max_regression_percent: float,
    *,
    base_environment: Artifact | None = None,
    environment: Artifact | None = None,
    origin: str = "baseline",
    asked: Collection[tuple[str, str, str]] | None = None,
) -> Artifact:
    """The verdict on two sides, each a ``report`` or a ``roofline``.

    Two rooflines are compared in every regime, anything else in the report's own.

    Args:
        base: what to compare with.
        current: what is judged.
        max_regression_percent: how much larger a p50 may be; above 0.
        base_environment: the ``environment`` of ``base``, needed for a roofline.
        environment: the same of ``current``.
        origin: where ``base`` comes from, in words.
        asked: the (kernel, shape, dtype) that a partial run was asked for: a baseline
            case outside it is left out and not missing. Default: all.

    Raises:
        NotComparableError: ``base`` cannot serve as a baseline, an environment is
            not given, or a case occurs twice.
        ValueError: the limit is not a positive number.
    """
    limit = _limit(max_regression_percent)
    check_baseline(base, origin)
    regime = regime_of(current) or regime_of(base)
    differing = differences(
        fingerprint(base, base_environment, origin), fingerprint(current, environment, "the current side")
    )
    before, now = cells(base, regime, origin), cells(current, regime, "the current side")
    if asked is not None:
        before = {key: cell for key, cell in before.items() if key[:3] in asked}
    keys = sorted(before | now, key=verdicts.order)
    rows = [_row(key, before.get(key), now.get(key), limit, differing) for key in keys]
    compared = len(verdicts.named(rows, *verdicts.JUDGED))
    lost = [f"the current side holds no times: {current['reason']}"] if current.get("reason") else []
    return {
        **verdicts.head(_ROOT, [current], "analysis/flat.py"),
        "inputs": [],
        "runner": current["runner"],
        "base": {"origin": origin, "git_commit": base["producer"].get("git_commit")},
        "method": "flat",
        "max_regression_percent": max_regression_percent,
        "calibration": None,
        "renamed": [],
        "regimes": [regime] if regime else None,
        "rebaseline": None,
        "verdict": verdicts.overall(rows, compared),
        "compared": compared,
        "reasons": [*differing, *lost, *verdicts.reasons(rows, compared)],
        "cells": rows,
    }


def _limit(percent: float) -> Fraction:
    # Through its decimal form, so that a limit of 0.1 means a tenth and not the nearest binary fraction.
    if not 0 < percent < float("inf"):
        raise ValueError(f"--max-regression-percent: expected a positive number, found {percent}; 10 is usual.")
    return Fraction(repr(percent)) / 100


def _row(key: Key, base: Cell | None, now: Cell | None, limit: Fraction, differing: Sequence[str]) -> dict[str, Any]:
    verdict, reason = _judge(base, now, limit, differing)
    before, after = base.p50_ns if base else None, now.p50_ns if now else None
    change = None
    if verdict in verdicts.JUDGED and before and after:
        change = round((after - before) * 100 / before, 2) + 0.0  # + 0.0: no negative zero.
    return verdicts.row(key, verdict, reason, base_p50_ns=before, p50_ns=after, change_percent=change)


def _judge(base: Cell | None, now: Cell | None, limit: Fraction, differing: Sequence[str]) -> tuple[str, str | None]:
    if now is None:
        return "MISSING", "only the base holds it"
    if base is None:
        return "NEW", "only the current side holds it"
    obstacle = _obstacle(base, now, differing)
    if obstacle is not None or base.p50_ns is None or now.p50_ns is None:
        return "NOT_COMPARABLE", obstacle
    change = Fraction(now.p50_ns - base.p50_ns, base.p50_ns)
    if change > limit:
        return "REGRESSED", None
    return ("IMPROVED" if change < -limit else "WITHIN_LIMIT"), None


def _obstacle(base: Cell, now: Cell, differing: Sequence[str]) -> str | None:
    if differing:
        return "environment, protocol or claim differs"
    for side, cell in (("base", base), ("current", now)):
        if cell.p50_ns is None:
            return f"the {side} {cell.reason}"
    if base.served_by != now.served_by:
        return f"served_by: base {base.served_by}, current {now.served_by}"
    if base.work != now.work:
        return f"(bytes read, bytes written, flop): base {base.work}, current {now.work}"
    return None
