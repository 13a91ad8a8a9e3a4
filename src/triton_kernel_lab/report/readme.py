"""The block of results between two markers of README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import conditions, label, of_regime, p50_text, verdict
from triton_kernel_lab.report.markdown import table

__all__ = ["BEGIN", "END", "ReadmeError", "block", "extract", "inject", "run"]

BEGIN = "<!-- results:begin -->"
END = "<!-- results:end -->"

_DTYPES = ("float16", "bfloat16")


class ReadmeError(ValueError):
    """README.md has no place for the block; one sentence says what is wrong."""


def run(project: Project) -> None:
    """Replace the block in README.md with the runner's results."""
    where = project.root / "README.md"
    try:
        text = where.read_bytes().decode("utf-8")
    except OSError as error:
        raise ReadmeError(
            f"{where}: cannot be read: {error.strerror}; write it with {BEGIN} and {END} in it."
        ) from error
    made = block(read_one(project, "environment"), read_one(project, "roofline"))
    artifacts.write_text(where, inject(text, made, str(where)))


def inject(text: str, made: str, where: str = "README.md") -> str:
    """``text`` with everything between the markers replaced by ``made``."""
    before, _, after = _parts(text, where)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def extract(text: str, where: str = "README.md") -> str:
    """What stands between the markers, without the line breaks beside them."""
    return _parts(text, where)[1].removeprefix("\n").removesuffix("\n")


def _parts(text: str, where: str) -> tuple[str, str, str]:
    for marker in (BEGIN, END):
        if (found := text.count(marker)) != 1:
            raise ReadmeError(
                f"{where}: expected the marker {marker} once, found it {found} times; put it on one line."
            )
    before, _, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not end:
        raise ReadmeError(f"{where}: expected {BEGIN} above {END}, found them the other way round; swap them.")
    return before, inside, after


def block(environment: Artifact, roofline: Artifact) -> str:
    """The short version of the results: fp16 rows, then bf16, with their conditions. Pure."""
    folder = f"reports/{roofline['runner']}"
    link = f"Every figure, the tails, the errors and the ceilings: [{folder}/results.md]({folder}/results.md)."
    parts = [conditions(environment, roofline)]
    if roofline["status"] == "measured":
        parts.append(_table(roofline))
    return "\n\n".join([*parts, link])


def _table(roofline: Artifact) -> str:
    headers = [
        "Kernel",
        "Shape",
        "Dtype",
        "Triton p50 (us)",
        "torch.compile p50 (us)",
        "vs torch.compile",
        "eager p50 (us)",
    ]
    headers += ["Best baseline", "its p50 (us)", "vs best", "Verdict"]
    cells = of_regime(roofline, "cold_clean")
    return table(headers, [_row(cell) for dtype in _DTYPES for cell in cells if cell["dtype"] == dtype])


def _row(cell: Mapping[str, Any]) -> list[str]:
    return [
        *(cell["kernel"], cell["shape"], cell["dtype"]),
        *(p50_text(cell, "triton"), p50_text(cell, "torch_compile"), units.ratio(cell["speedup_over_torch_compile"])),
        *(p50_text(cell, "eager"), label(cell["best_baseline"]), p50_text(cell, cell["best_baseline"])),
        *(units.ratio(cell["speedup_over_best"]), verdict(cell)),
    ]
