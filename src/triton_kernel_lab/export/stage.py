"""Writing an export: which form goes through which module."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.export import conbench, flat, nvbench
from triton_kernel_lab.export.source import Source, load
from triton_kernel_lab.project import Project

__all__ = ["ExportError", "Form", "write"]


class ExportError(ValueError):
    """There is nothing to write, or nothing to write it with; one sentence says which."""


class Form(StrEnum):
    """The forms that an export can have."""

    conbench = "conbench"
    nvbench = "nvbench"
    csv = "csv"
    parquet = "parquet"


def write(project: Project, form: Form, output: Path) -> int:
    """Write the runner's tracked results; returns how many cells they have.

    Raises:
        ArtifactError, InputError: an artifact is missing or not sound.
        ExportError: nothing was measured, Parquet is wanted without pyarrow, or ``output`` cannot be written.
    """
    source = load(project)
    cells = len(source.roofline["cells"])
    if not cells:
        raise ExportError(f"runner {project.runner}: expected timed cells, found none: {source.roofline['reason']}.")
    try:
        if form is Form.parquet:
            _parquet(source, output)
        else:
            artifacts.write_text(output, _text(source, form))
    except OSError as error:
        raise ExportError(f"{output}: cannot be written: {error.strerror}.") from error
    return cells


def _text(source: Source, form: Form) -> str:
    if form is Form.csv:
        return flat.as_csv(source)
    return _json(conbench.render(source) if form is Form.conbench else nvbench.render(source))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _parquet(source: Source, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        flat.write_parquet(source, str(output))
    except ModuleNotFoundError as error:
        raise ExportError(
            "parquet: expected the module pyarrow, found none; install the extra `parquet`, or take --format csv."
        ) from error
