"""Where the checkout is, and what params.yaml says. A leaf, without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["MeasureParams", "Project", "ProjectError", "find_project", "kernel_names"]

_RUNNER = re.compile(r"[a-z0-9][a-z0-9-]*")
_KERNEL = re.compile(r"[a-z][a-z0-9_]*")


class ProjectError(ValueError):
    """The checkout or its parameters are not usable; one sentence says why."""


@dataclass(frozen=True)
class MeasureParams:
    """How much is measured.

    ``samples`` holds, for each regime, the samples a candidate gives in one
    process; ``sweep_bytes`` is what one flush of the L2 cache writes or reads.
    """

    processes: int
    samples: Mapping[str, int]
    warmup_ms: int
    sweep_bytes: int
    seed: int


@dataclass(frozen=True)
class Project:
    """A checkout, or a project of one's own: its root, its runner and its measuring parameters.

    ``listed`` holds the kernels that a project of one's own names in params.yaml;
    None in a checkout, whose kernels are its registry's.
    """

    root: Path
    runner: str
    measure: MeasureParams
    listed: tuple[str, ...] | None = None

    @property
    def kernels(self) -> list[str]:
        """The kernels that the pipeline runs, in the order of its reports."""
        if self.listed is not None:
            return list(self.listed)
        # Without sources of its own it answers to the running package's registry.
        return kernel_names(self.root if (self.root / "src/triton_kernel_lab").is_dir() else None)

    @property
    def artifacts(self) -> Path:
        """The folder of this runner's artifacts."""
        return self.root / "artifacts" / self.runner

    @property
    def audits(self) -> Path:
        """The folder of the codegen artifacts, in which no runner has part."""
        return self.root / "artifacts" / "codegen"

    @property
    def reports(self) -> Path:
        """The folder of this runner's reports."""
        return self.root / "reports" / self.runner


def kernel_names(root: Path | None = None) -> list[str]:
    """The registry of kernels, read without importing torch."""
    source = (root / "src/triton_kernel_lab" if root else Path(__file__).parent) / "cases/__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "KERNELS" and node.value:
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise ProjectError(f"{source}: expected the list KERNELS, found none.")


def find_project(start: Path | None = None) -> Project:
    """The checkout that holds ``start`` (default: the working directory)."""
    here = (start or Path.cwd()).resolve()
    for root in (here, *here.parents):
        if (root / "params.yaml").is_file() and (root / "dvc.yaml").is_file():
            return _load(root)
    raise ProjectError(f"{here} is not inside a checkout: no folder above it holds params.yaml and dvc.yaml.")


def _load(root: Path) -> Project:
    where = root / "params.yaml"
    try:
        data = yaml.safe_load(where.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ProjectError(f"{where}: not YAML: {' '.join(str(error).split())}.") from error
    runner = _get(data, "runner", str, where)
    if not _RUNNER.fullmatch(runner):
        raise ProjectError(f"{where}: runner: expected lower-case letters, digits and dashes, found {runner!r}.")
    measure = _get(data, "measure", dict, where)
    samples = _get(measure, "samples", dict, where)
    for regime in samples:
        _get(samples, regime, int, where)
    return Project(
        root,
        runner,
        MeasureParams(
            processes=_get(measure, "processes", int, where),
            samples=samples,
            warmup_ms=_get(measure, "warmup_ms", int, where),
            sweep_bytes=_get(measure, "sweep_mib", int, where) << 20,
            seed=_get(measure, "seed", int, where),
        ),
        _listed(data, where),
    )


def _listed(data: Any, where: Path) -> tuple[str, ...] | None:
    if "kernels" not in data:
        return None
    names = _get(data, "kernels", list, where)
    for name in names:
        if not isinstance(name, str) or not _KERNEL.fullmatch(name):
            raise ProjectError(
                f"{where}: kernels: expected names of lower-case letters, digits and underscores, found {name!r}."
            )
    if len(set(names)) != len(names) or not names:
        raise ProjectError(f"{where}: kernels: expected one or more names, each once, found {names!r}.")
    return tuple(names)


def _get(data: Any, key: str, kind: type, where: Path) -> Any:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ProjectError(f"{where}: {key}: expected {kind.__name__}, found {value!r}.")
    return value
