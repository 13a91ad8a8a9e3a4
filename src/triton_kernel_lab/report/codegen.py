"""The differences of codegen audits as one table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from triton_kernel_lab.analysis.codegen_diff import CHANGED, Finding

__all__ = ["render"]

_SHOWN = 40
_HEADERS = ("kernel", "target", "function", "call", "rule", "before", "after")


def render(kernels: Sequence[str], findings: Sequence[Finding]) -> str:
    """What the check of these kernels found: a row for each regression, a line for each kernel that changed."""
    if not findings:
        return f"codegen: {', '.join(kernels)}: every launch compiles to the tracked code."
    regressions = [finding for finding in findings if finding.rule != CHANGED]
    lines = [_table(regressions)] if regressions else []
    if len(regressions) > _SHOWN:
        lines.append(f"{len(regressions) - _SHOWN} more.")
    changed = sorted((finding for finding in findings if finding.rule == CHANGED), key=lambda each: each.kernel)
    lines += [_changed(kernel, list(group)) for kernel, group in groupby(changed, key=lambda each: each.kernel)]
    return "\n".join([*lines, "If that is meant: run `make codegen`, read the diff and commit the new artifact."])


def _table(findings: Sequence[Finding]) -> str:
    from tabulate import tabulate

    rows = [
        (each.kernel, each.target, each.function, each.call, each.rule, each.before, each.after)
        for each in findings[:_SHOWN]
    ]
    return tabulate(rows, _HEADERS, tablefmt="simple", disable_numparse=True)


def _changed(kernel: str, findings: Sequence[Finding]) -> str:
    calls = [finding for finding in findings if finding.call]
    if not calls:
        return f"{kernel}: changed: the sources or tools, and no launch."
    first = calls[0]
    where = f"{first.target} {first.function} {first.call}: {first.before} -> {first.after}"
    many = "1 launch compiles" if len(calls) == 1 else f"{len(calls)} launches compile"
    return f"{kernel}: changed: {many} to other code, first {where}."
