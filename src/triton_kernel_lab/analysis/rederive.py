"""Comparing what is derived on disk with what its raw artifacts give.

The end of the line, and so the one module of ``analysis`` that looks at reports.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from triton_kernel_lab import artifacts, source_lists
from triton_kernel_lab.analysis import plausibility, roofline
from triton_kernel_lab.analysis.differences import json_differences, text_difference
from triton_kernel_lab.analysis.inputs import kernel_path
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import audit, flowchart, readme, summary, tables
from triton_kernel_lab.report.figures import points, svg
from triton_kernel_lab.report.figures import stage as figures
from triton_kernel_lab.report.site import page
from triton_kernel_lab.report.site import stage as site
from triton_kernel_lab.sources import stale_tools

__all__ = ["Raw", "differing"]

_SHOWN = 5


class Raw(NamedTuple):
    """What a runner's derived files are made from; sound artifacts, by kernel where there are several."""

    environment: Artifact
    ceilings: Artifact
    correctness: Mapping[str, Artifact]
    timings: Mapping[str, Artifact]
    counters: Mapping[str, Artifact]
    extras: Mapping[str, Artifact]


def differing(project: Project, raw: Raw) -> Iterator[str]:
    """A sentence for each derived file that its raw artifacts do not give.

    Every file is compared with a derivation from the raw ones, never with what
    stands on disk between them, so that an edit shows up where it was made.
    """
    try:
        derived = roofline.derive(project, raw.environment, raw.ceilings, raw.timings, raw.counters)
    except ValueError as error:
        # Each error class of the project is a ValueError, and its message a sentence.
        yield str(error)
        return
    yield from _too_fast(project, raw, derived)
    yield from _json(project, project.artifacts / "roofline.json", derived, "roofline")
    text = tables.render(raw.environment, derived, raw.correctness, raw.extras, stale_tools(project), raw.timings)
    yield from _text(project, project.reports / "results.md", text)
    yield from _json(project, project.reports / "metrics.json", tables.metrics(derived), "tables")
    sources = svg.Sources(raw.environment, derived, raw.timings)
    for drawing in figures.DRAWINGS:
        yield from _figure(project, drawing.name, drawing.data(sources))
    yield from _text(project, project.reports / "points.csv", points.render(derived), "figures")
    yield from _site(project, raw, derived)
    # The pages of a project of one's own are its own.
    if project.listed is None:
        yield from _readme(project, raw, derived)
    yield from _audits(project)
    yield from _source_lists(project)


def _source_lists(project: Project) -> Iterator[str]:
    """The lists of what each stage of a kernel consists of, where the pipeline makes them."""
    # A dvc.yaml that cannot be read has been told with the README's block.
    with contextlib.suppress(flowchart.FlowchartError):
        if "sources" in flowchart.read(project.root):
            yield from source_lists.differing(project)


def _audits(project: Project) -> Iterator[str]:
    """The table of each codegen audit that the checkout holds."""
    for path in sorted(project.audits.glob("*.json")):
        try:
            found = artifacts.read(path, "codegen")
        except artifacts.ArtifactError as error:
            yield str(error)
        else:
            yield from _text(project, audit.path(project, path.stem), audit.render(found), f"codegen@{path.stem}")


def _too_fast(project: Project, raw: Raw, derived: Artifact) -> Iterator[str]:
    for kernel, timing in raw.timings.items():
        name = kernel_path(project, "timing", kernel).relative_to(project.root).as_posix()
        cells = [cell for cell in derived["cells"] if cell["kernel"] == kernel]
        for found in plausibility.too_fast(timing, cells):
            yield f"{name}: {found}; run `dvc repro timing@{kernel}`."


def _load(project: Project, path: Path, stage: str) -> tuple[str, str | None, str | None]:
    """The name of a file, its text, and why there is none."""
    name = path.relative_to(project.root).as_posix()
    try:
        return name, path.read_bytes().decode("utf-8"), None
    except OSError as error:
        return name, None, f"{name}: cannot be read: {error.strerror}; run `dvc repro {stage}`."
    except UnicodeDecodeError as error:
        return (
            name,
            None,
            f"{name}: expected UTF-8, found {error.reason} at byte {error.start}; run `dvc repro {stage}`.",
        )


def _json(project: Project, path: Path, expected: Mapping[str, Any], stage: str) -> Iterator[str]:
    name, text, problem = _load(project, path, stage)
    if text is None or text == artifacts.dumps(expected):
        yield from [problem] if problem else []
        return
    mend = f"; run `dvc repro -f -s {stage}`."
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        yield f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}{mend}"
        return
    differences = json_differences(json.loads(artifacts.dumps(expected)), found)
    shown = list(islice(differences, _SHOWN)) or [str(text_difference(artifacts.dumps(expected), text))]
    yield from (f"{name}: {difference}{mend}" for difference in shown)
    if more := sum(1 for _ in differences):
        yield f"{name}: {more} more differences."


def _text(project: Project, path: Path, expected: str, stage: str = "tables") -> Iterator[str]:
    name, text, problem = _load(project, path, stage)
    if problem:
        yield problem
    elif text is not None and (difference := text_difference(expected, text)):
        yield f"{name}: {difference}; run `dvc repro -f -s {stage}`."


def _figure(project: Project, stem: str, expected: Mapping[str, Any]) -> Iterator[str]:
    """An SVG by its digests: its bytes depend on the version of matplotlib."""
    name, text, problem = _load(project, project.reports / f"{stem}.svg", "figures")
    mend = "; run `dvc repro -f -s figures`."
    if text is None:
        yield from [problem] if problem else []
    elif (digests := svg.recorded_digests(text)) is None:
        yield f"{name}: expected one comment with the digests of data and body, found none{mend}"
    elif digests[0] != (digest := svg.data_digest(expected)):
        yield f"{name}: data-sha256: expected {digest}, found {digests[0]}{mend}"
    elif digests[1] != (digest := hashlib.sha256(svg.strip_digests(text).encode()).hexdigest()):
        yield f"{name}: body-sha256: expected {digest}, that of the picture, found {digests[1]}{mend}"


def _site(project: Project, raw: Raw, derived: Artifact) -> Iterator[str]:
    """The page, with the pictures as they lie there: those were compared already."""
    yield from _json(project, project.reports / "summary.json", summary.metrics(derived), "site")
    try:
        pictures, verdict = site.pictures(project), site.verdict(project)
    except (site.SiteError, artifacts.ArtifactError) as error:
        yield str(error)
        return
    made_from = (raw.environment, raw.ceilings, derived, raw.correctness, raw.timings, raw.counters)
    decoded, stale = raw.extras.get("decode_e2e"), "decode_e2e" in stale_tools(project)
    sources = page.Sources(*made_from, pictures, verdict, decoded, stale)
    yield from _text(project, project.reports / "index.html", page.render(sources), "site")


def _readme(project: Project, raw: Raw, derived: Artifact) -> Iterator[str]:
    """The generated blocks of each page that holds some."""
    try:
        made = readme.blocks(raw.environment, derived, flowchart.read(project.root), raw.extras, stale_tools(project))
    except flowchart.FlowchartError as error:
        yield str(error)
        return
    for name in readme.PAGES:
        yield from _blocks(project, name, made)


def _blocks(project: Project, path: str, made: Mapping[str, str]) -> Iterator[str]:
    name, text, problem = _load(project, project.root / path, "readme")
    if text is None:
        yield from [problem] if problem else []
        return
    try:
        for block in readme.PAGES[path]:
            if difference := text_difference(made[block], readme.extract(text, name, block)):
                yield f"{name}: {block} block, {difference}; run `triton-kernel-lab readme`."
    except readme.ReadmeError as error:
        yield str(error)
