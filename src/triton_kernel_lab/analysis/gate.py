"""The regression gate: is the p50 of a kernel worse than it was?

Compares the `triton` candidate cell by cell; a cell is a kernel, a shape, a dtype
and a regime, and a lower p50 is better. What cannot be compared never passes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions
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
from triton_kernel_lab.project import Project

__all__ = ["NotComparableError", "compare", "environment_beside", "exit_code", "load_baseline", "render", "run"]

_EXIT_CODES = {"pass": 0, "regressed": 2, "not_comparable": 3}
_JUDGED = ("REGRESSED", "IMPROVED", "WITHIN_LIMIT")


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
    make = f"make one with `triton-kernel-lab --output {path}`"
    if isinstance(error.__cause__, FileNotFoundError):
        return NotComparableError(f"{path}: expected a baseline, found no file; {make}.")
    if isinstance(error.__cause__, IsADirectoryError):
        make = "name a report or a roofline.json inside it"
    elif isinstance(error.__cause__, OSError):
        make = "make it readable or name another"
    return ArtifactError(f"{str(error).removesuffix('.')}; {make}.")


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
    git_commit: str | None = None,
    inputs: Sequence[Mapping[str, str]] = (),
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
        git_commit: its commit; default: the commit that ``base`` names, if any.
        inputs: what the verdict says of the files it was made from.
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
    rows = [_row(key, before.get(key), now.get(key), limit, differing) for key in sorted(before | now, key=_order)]
    return {
        "artifact_kind": "gate",
        "schema_version": 1,
        "claim_kind": current["claim_kind"] if current["claim_kind"] in ("synthetic", "exploratory") else "derived",
        "producer": _producer(),
        "inputs": [dict(record) for record in inputs],
        "runner": current["runner"],
        "base": {"origin": origin, "git_commit": git_commit or base["producer"].get("git_commit")},
        "max_regression_percent": max_regression_percent,
        "verdict": _overall(rows),
        "compared": len(_named(rows, *_JUDGED)),
        "reasons": [*differing, *_reasons(rows, current)],
        "cells": rows,
    }


def _limit(percent: float) -> Fraction:
    # Through its decimal form, so that a limit of 0.1 means a tenth and not the nearest binary fraction.
    if not 0 < percent < float("inf"):
        raise ValueError(f"--max-regression-percent: expected a positive number, found {percent}; 10 is usual.")
    return Fraction(repr(percent)) / 100


def _producer() -> dict[str, str]:
    # The gate is no stage of the pipeline, so it states the digest of its own two modules.
    source = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("gate.py", "sides.py"))
    digest = hashlib.sha256(source).hexdigest()
    return {"package": "triton-kernel-lab", "version": __version__, "source_sha256": digest}


def _order(key: Key) -> tuple[str, tuple[int, ...], str, str]:
    kernel, shape, dtype, regime = key
    return kernel, tuple(int(size) for size in shape.split("x")), dtype, regime


def _row(key: Key, base: Cell | None, now: Cell | None, limit: Fraction, differing: Sequence[str]) -> dict[str, Any]:
    verdict, reason = _judge(base, now, limit, differing)
    before, after = base.p50_ns if base else None, now.p50_ns if now else None
    change = None
    if verdict in _JUDGED and before and after:
        change = round((after - before) * 100 / before, 2) + 0.0  # + 0.0: no negative zero.
    facts = zip(("kernel", "shape", "dtype", "regime"), key, strict=True)
    return {
        **dict(facts),
        "verdict": verdict,
        "reason": reason,
        "base_p50_ns": before,
        "p50_ns": after,
        "change_percent": change,
    }


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


def _named(rows: Iterable[Mapping[str, Any]], *verdicts: str) -> list[str]:
    wanted = (row for row in rows if row["verdict"] in verdicts)
    return [" ".join((row["kernel"], row["shape"], row["dtype"], row["regime"])) for row in wanted]


def _overall(rows: Sequence[Mapping[str, Any]]) -> str:
    if _named(rows, "REGRESSED"):
        return "regressed"
    blocked = _named(rows, "MISSING", "NOT_COMPARABLE")
    return "not_comparable" if blocked or not _named(rows, *_JUDGED) else "pass"


def _reasons(rows: Sequence[Mapping[str, Any]], current: Artifact) -> list[str]:
    reasons = []
    if current.get("reason"):
        reasons.append(f"the current side holds no times: {current['reason']}")
    for verdict, text in (("MISSING", "missing"), ("NEW", "new"), ("NOT_COMPARABLE", "not comparable")):
        if names := _named(rows, verdict):
            reasons.append(f"{len(names)} {'cell' if len(names) == 1 else 'cells'} {text}: {', '.join(names)}")
    if not _named(rows, *_JUDGED):
        reasons.append("0 cells compared")
    return reasons


def exit_code(verdict: Artifact) -> int:
    """0 when a verdict passes, 2 for a regression, 3 when it could not compare."""
    return _EXIT_CODES[verdict["verdict"]]


def run(project: Project, base: str | None, max_regression_percent: float) -> tuple[Artifact, int]:
    """Judge the tree's roofline against an earlier one; returns the verdict and its exit code.

    Args:
        project: the checkout.
        base: a revision; None takes the commit before the last change of the roofline.
        max_regression_percent: how much larger a p50 may be.

    Raises:
        ArtifactError: an artifact, here or at the base, is not sound.
        NotComparableError: the base cannot serve as one.
        RevisionError: git cannot find or read the base.
    """
    root, folder = project.root, project.artifacts.relative_to(project.root).as_posix()
    paths = {kind: f"{folder}/{kind}.json" for kind in ("roofline", "environment")}
    current = {kind: artifacts.read(root / path, kind, mend="dvc repro") for kind, path in paths.items()}
    commit = revisions.resolve(root, base) if base else revisions.previous_change(root, paths["roofline"])
    raw = {kind: revisions.read_file(root, commit, path) for kind, path in paths.items()}
    if raw["roofline"] == (root / paths["roofline"]).read_bytes():
        raise NotComparableError(
            f"{paths['roofline']}: expected another version at {base or commit[:12]}, found the same bytes; "
            "name an earlier base with --base."
        )
    earlier = {kind: _parse_base(data, f"{commit[:12]}:{paths[kind]}", kind) for kind, data in raw.items()}
    verdict = compare(
        earlier["roofline"],
        current["roofline"],
        max_regression_percent,
        base_environment=earlier["environment"],
        environment=current["environment"],
        origin=f"{base or commit[:12]}:{paths['roofline']}",
        git_commit=commit,
        inputs=[artifacts.input_record(root, root / path) for path in paths.values()],
    )
    return verdict, exit_code(verdict)


def _parse_base(data: bytes, where: str, kind: str) -> Artifact:
    try:
        return artifacts.parse(data, where, kind)
    except ArtifactError as error:
        raise ArtifactError(f"{str(error).removesuffix('.')}; name another base with --base.") from error


def render(verdict: Artifact) -> str:
    """The verdict as text: a table of the cells, what stands in the way, and one line that sums up."""
    lines = [_table(verdict["cells"])] if verdict["cells"] else []
    lines += [f"- {reason}" for reason in verdict["reasons"]]
    base, commit = verdict["base"]["origin"], verdict["base"]["git_commit"]
    against = f"{base} (commit {commit[:12]})" if commit else base
    counts = ", ".join(
        f"{number} {word.lower()}" for word in _JUDGED if (number := len(_named(verdict["cells"], word)))
    )
    lines.append(
        f"{verdict['verdict']}: {verdict['compared']} cells compared with {against}"
        + (f": {counts}" if counts else "")
        + f"; the limit is {verdict['max_regression_percent']} %."
    )
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    from tabulate import tabulate

    headers = ("kernel", "shape", "dtype", "regime", "base p50 (ns)", "p50 (ns)", "change", "verdict", "reason")
    body = [
        (
            *(row[name] for name in headers[:4]),
            *("-" if row[name] is None else str(row[name]) for name in ("base_p50_ns", "p50_ns")),
            "-" if row["change_percent"] is None else f"{row['change_percent']:+.2f} %",
            row["verdict"],
            row["reason"] or "",
        )
        for row in rows
    ]
    # Number parsing off: tabulate would rewrite what is already text.
    align = ("left",) * 4 + ("right",) * 3 + ("left",) * 2
    return tabulate(body, headers, tablefmt="simple", disable_numparse=True, colalign=align)
