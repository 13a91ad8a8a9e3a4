"""The generated blocks of README.md and of docs/METHODOLOGY.md, each between two markers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_extras, read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import crossover, decode_e2e, flowchart, methodology, selection, summary, units
from triton_kernel_lab.report.labels import conditions, label, of_regime, p50_text, verdict
from triton_kernel_lab.report.losses import Loss, losses
from triton_kernel_lab.report.markdown import table
from triton_kernel_lab.sources import stale_tools

__all__ = ["BEGIN", "END", "NAMES", "PAGES", "ReadmeError", "block", "blocks", "extract", "inject", "run"]

NAMES = ("results", "summary", "losses", "decode", "pipeline")
"""The blocks. A README holds each of them once, in any order."""

PAGES = {"README.md": NAMES, "docs/METHODOLOGY.md": methodology.NAMES}
"""The pages that hold blocks, and which."""

_RESULTS = "results"
BEGIN = f"<!-- {_RESULTS}:begin -->"
END = f"<!-- {_RESULTS}:end -->"

_DTYPES = ("float16", "bfloat16", "float32")


class ReadmeError(ValueError):
    """README.md has no place for a block; one sentence says what is wrong."""


def run(project: Project) -> None:
    """Replace the blocks of each page with the runner's results and the pipeline of dvc.yaml."""
    texts = {page: _read(project.root / page, names[0]) for page, names in PAGES.items()}
    environment, roofline = read_one(project, "environment"), read_one(project, "roofline")
    extras = read_extras(project, ("crosscheck", "decode_e2e"))
    made = blocks(environment, roofline, flowchart.read(project.root), extras, stale_tools(project))
    for page, text in texts.items():
        for name in PAGES[page]:
            text = inject(text, made[name], str(project.root / page), name)
        artifacts.write_text(project.root / page, text)


def _read(where: Path, name: str) -> str:
    try:
        return where.read_bytes().decode("utf-8")
    except OSError as error:
        begin, end = _markers(name)
        raise ReadmeError(
            f"{where}: cannot be read: {error.strerror}; write it with {begin} and {end} in it."
        ) from error


def inject(text: str, made: str, where: str = "README.md", name: str = _RESULTS) -> str:
    """``text`` with everything between the markers of a block replaced by ``made``."""
    before, _, after = _parts(text, where, name)
    begin, end = _markers(name)
    return f"{before}{begin}\n{made}\n{end}{after}"


def extract(text: str, where: str = "README.md", name: str = _RESULTS) -> str:
    """What stands between the markers of a block, without the line breaks beside them."""
    return _parts(text, where, name)[1].removeprefix("\n").removesuffix("\n")


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def _parts(text: str, where: str, name: str) -> tuple[str, str, str]:
    begin, end = _markers(name)
    for marker in (begin, end):
        if (found := text.count(marker)) != 1:
            raise ReadmeError(
                f"{where}: expected the marker {marker} once, found it {found} times; put it on one line."
            )
    before, _, rest = text.partition(begin)
    inside, closed, after = rest.partition(end)
    if not closed:
        raise ReadmeError(f"{where}: expected {begin} above {end}, found them the other way round; swap them.")
    return before, inside, after


def blocks(
    environment: Artifact,
    roofline: Artifact,
    stages: Mapping[str, Any],
    extras: Mapping[str, Artifact] | None = None,
    stale: Collection[str] = (),
) -> dict[str, str]:
    """What belongs between the markers, by the names of ``PAGES``. Pure.

    Args:
        environment, roofline: the runner's artifacts.
        stages: the stages of dvc.yaml.
        extras: holds the artifacts ``crosscheck`` and ``decode_e2e``, if there are such.
        stale: names those of them that other sources made than there are now.
    """
    return {
        "results": block(environment, roofline),
        "summary": _summary(environment, roofline),
        "losses": _losses(roofline),
        "decode": decode_e2e.block((extras or {}).get("decode_e2e"), stale="decode_e2e" in stale),
        "pipeline": flowchart.render(stages),
        **methodology.blocks(environment, roofline, (extras or {}).get("crosscheck")),
    }


def _summary(environment: Artifact, roofline: Artifact) -> str:
    """The conditions, and a row a kernel."""
    said = conditions(environment, roofline)
    found = summary.rows(roofline)
    if not found:
        return said
    headers = ["Kernel", *(f"{time} time" for time in summary.TIMES), "Fastest on the device"]
    rows = [
        [row.kernel, *(summary.span(row.speedups[time]) for time in summary.TIMES), _won(row, "device")]
        for row in found
    ]
    note = (
        f"Speedup over torch.compile, median of a kernel's cells (least to largest); {summary.MEDIAN_NOTE}. "
        "Fastest: no baseline is faster."
    )
    said_of = [*crossover.sentences(roofline), *selection.paged(roofline)]
    crossed = "\n".join(f"- {sentence}" for sentence in said_of)
    return "\n\n".join(filter(None, [note, table(headers, rows), crossed, said]))


def _won(row: summary.Row, time: str) -> str:
    return f"{row.fastest[time]} of {row.raced[time]}" if row.raced[time] else units.MISSING


def _losses(roofline: Artifact) -> str:
    """Every lost cell: those of the device in sight, those of graph and call folded away."""
    found = {time: losses(roofline, time) for time in summary.TIMES}
    raced = {time: sum(row.raced[time] for row in summary.rows(roofline)) for time in summary.TIMES}
    if not any(raced.values()):
        return "Nothing was timed, so nothing is lost."
    parts = [f"On the device {_count(found['device'], raced['device'])}."]
    if found["device"]:
        parts.append(_lost(found["device"]))
    rest = [loss for time in ("graph", "call") for loss in found[time]]
    said = f"In a graph {_count(found['graph'], raced['graph'])}; of the calls {_count(found['call'], raced['call'])}."
    return "\n\n".join([*parts, _folded(said, _lost(rest)) if rest else said])


def _count(found: list[Loss], raced: int) -> str:
    return f"a baseline is faster in {len(found)} of {raced} cells"


def _folded(said: str, body: str) -> str:
    return f"<details><summary>{said}</summary>\n\n{body}\n\n</details>"


def _lost(found: list[Loss]) -> str:
    headers = ["Time", "Kernel", "Shape", "Dtype", "Triton p50 (us)", "Loses to", "by", "What the artifacts say"]
    return table(
        headers,
        [
            [
                *(loss.time, loss.cell["kernel"], loss.cell["shape"], loss.cell["dtype"]),
                *(units.microseconds(loss.ours_ns), label(loss.rival), loss.excess, loss.why),
            ]
            for loss in found
        ],
    )


def block(environment: Artifact, roofline: Artifact) -> str:
    """The short version of the results: fp16 rows, then bf16, then fp32, with their conditions. Pure."""
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
