"""What each kernel compiles to, as a table: a row for each function and target.

A report of its own, since no runner has part in it, and since results.md is
written where the pinned Triton that the audit is made with may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table
from triton_kernel_lab.report.units import MISSING

__all__ = ["path", "render", "section", "write"]

_HEADERS = (
    *("Target", "Function", "Launches", "Registers", "Spilled (bytes)", "Shared (bytes)", "Load widths (bits)"),
    *("Tensor core", "Warps held", "Instructions an element"),
)
_NOTE = (
    "Each launch that stands for the kernel was compiled with Triton {triton} and read from its binary; a range is "
    "over a function's launches. *Warps held* is the share of a multiprocessor's warps that registers, shared memory "
    "and block size allow by the documented limits. *Instructions an element* counts a turn of the loop that moves "
    "most of the data, or the whole kernel where there is none (marked `*`), by the elements that its loads fetch. "
    "Nothing here was timed."
)

Launch = Mapping[str, Any]


def path(project: Project, kernel: str) -> Path:
    """Where a kernel's table lies."""
    return project.root / "reports" / "codegen" / f"{kernel}.md"


def write(project: Project, audits: Mapping[str, Artifact]) -> None:
    """Write the table of each audit."""
    for kernel, audit in audits.items():
        artifacts.write_text(path(project, kernel), render(audit))


def render(audit: Artifact) -> str:
    """The whole of a kernel's report. Pure."""
    tools = ", ".join(f"{name} {version}" for name, version in sorted(audit["tools"].items()))
    return f"# Generated code: {audit['kernel']}\n\n{section(audit)}\n\nTools: {tools}.\n"


def section(audit: Artifact) -> str:
    """The table with what it says, and the launches that do not compile."""
    groups: dict[tuple[str, str], list[Launch]] = {}
    for launch in audit["launches"]:
        groups.setdefault((launch["target"], launch["function"] or audit["kernel"]), []).append(launch)
    rows = [[*where, *_row(launches)] for where, launches in groups.items()]
    parts = [_NOTE.format(triton=audit["triton"]), table(_HEADERS, rows), *_failures(audit)]
    return "\n\n".join(parts)


def _row(launches: Sequence[Launch]) -> list[str]:
    codes = [launch["code"] for launch in launches if launch["code"]]
    failed = len(launches) - len(codes)
    counted = f"{len(launches)}{f', {failed} failed' if failed else ''}"
    if not codes:
        return [counted, *[MISSING] * (len(_HEADERS) - 3)]
    cores = sorted({name for code in codes for name in code["tensor_core"]})
    return [
        counted,
        _span(codes, lambda code: code["registers"]),
        _span(codes, lambda code: code["stack_bytes"] + code["local_bytes"]),
        _span(codes, lambda code: code["shared_bytes"]),
        _widths(codes),
        ", ".join(cores) or MISSING,
        _span(codes, lambda code: code["occupancy"]["ratio"], _share),
        _instructions(codes),
    ]


def _span(
    codes: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], Any],
    text: Callable[[Any], str] = units.plain,
) -> str:
    found = [value(code) for code in codes]
    low, high = text(min(found)), text(max(found))
    return low if low == high else f"{low} to {high}"


def _share(ratio: float) -> str:
    return units.percent(ratio) if ratio else "none"


def _widths(codes: Sequence[Mapping[str, Any]]) -> str:
    """The widths of loads to registers and, apart from them, that there are copies to shared memory."""
    found = sorted({int(bits) for code in codes for bits in code["global_loads"]}, reverse=True)
    copies = sorted({name for code in codes for name in code["async_copies"]})
    return ", ".join([*map(str, found), *copies]) or MISSING


def _instructions(codes: Sequence[Mapping[str, Any]]) -> str:
    known = [code["hot_loop"] for code in codes if code["hot_loop"]["instructions_per_element"] is not None]
    if not known:
        return MISSING
    whole = all(loop["whole_kernel"] for loop in known)
    return _span(known, lambda loop: loop["instructions_per_element"]) + ("*" if whole else "")


def _failures(audit: Artifact) -> Iterator[str]:
    lines = [
        f"- {launch['target']} {launch['function'] or audit['kernel']}, {launch['calls'][0]}: {launch['reason']}"
        for launch in audit["launches"]
        if launch["status"] == "failed"
    ]
    if lines:
        yield "\n".join(["Not compiled:", "", *lines])
