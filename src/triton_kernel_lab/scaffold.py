"""What ``triton-kernel-lab new`` writes: operator, launch table, case and test of a kernel, and a project round them.

The kernel works as written, so that its test passes before anything is changed.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import yaml

from triton_kernel_lab import artifacts, registry
from triton_kernel_lab.project import ProjectError, find_project

__all__ = ["ScaffoldError", "new", "pipeline"]

_OURS = "triton_kernel_lab"
_KERNEL = re.compile(r"[a-z][a-z0-9_]*")
_FOLDER = re.compile(r"[a-z][a-z0-9_-]*")
_TABLE = f'[project.entry-points."{registry.GROUP}"]'

_OWN_BLOCKS = {
    "op_imports": """from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton_kernel_lab.extend import checks, launching, routing""",
    "op_table": 'TABLE = Path(__file__).parent / "launch" / f"{NAME}.json"\n',
    "case_imports": """from triton_kernel_lab.extend import Bucket, Case, Cost, Dims, Tensors, Variant, randn

from $package.ops.$kernel import TABLE, $kernel""",
    "case_table": "\n    table=TABLE,",
    "test_imports": """
import pytest
import torch
from triton_kernel_lab.extend import Variant, routing
from triton_kernel_lab.lab.correctness import check_cell

from $package.cases.$kernel import CASE
from $package.ops.$kernel import $kernel""",
    "checks": "checks",
    "launching": "launching",
    "table": "TABLE",
}
_LAB_BLOCKS = {
    "op_imports": """from collections.abc import Callable

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops._triton import tl, triton""",
    "op_table": "",
    "case_imports": """
from triton_kernel_lab.cases._base import Bucket, Case, Cost, Dims, Tensors, Variant, randn
from triton_kernel_lab.ops.$kernel import $kernel""",
    "case_table": "",
    "test_imports": """
import pytest
import torch

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import Variant
from triton_kernel_lab.cases.$kernel import CASE
from triton_kernel_lab.lab.correctness import check_cell
from triton_kernel_lab.ops.$kernel import $kernel""",
    "checks": "_checks",
    "launching": "_launch",
    "table": "NAME",
}


class ScaffoldError(ValueError):
    """Nothing was written; one sentence says why."""


def new(kernel: str, start: Path, folder: Path | None = None) -> tuple[list[Path], str]:
    """Write a kernel's files; returns them, those that were changed included, and what is to be done next.

    Args:
        kernel: its name, in lower-case letters, digits and underscores.
        start: inside the checkout or the project that gets the kernel.
        folder: where a new project with this one kernel is made instead.

    Raises:
        ScaffoldError: the name is taken or is none, a file is there already, or
            ``start`` is in no project.
    """
    _check_name(kernel)
    texts, following = _project(kernel, folder) if folder is not None else _into_a_project(kernel, start)
    for path, text in texts.items():
        artifacts.write_text(path, text)
    return list(texts), following


def pipeline() -> str:
    """dvc.yaml of a project: our stages over its own list of kernels.

    Our sources are no files of it. The stages of a kernel depend on the lists of
    sources that stage ``sources`` writes; the others follow the artifacts.
    """
    stages: dict[str, Any] = {}
    whole = yaml.safe_load(_ours().replace("${KERNELS}", "${kernels}"))
    for name, stage in whole["stages"].items():
        if name == "readme":  # Ours alone has places for results.
            continue
        if "deps" in stage:
            stage["deps"] = list(dict.fromkeys(_dependency(each) for each in stage["deps"] if _stays(each)))
        if "params" in stage:
            stage["params"] = ["kernels" if isinstance(each, dict) else each for each in stage["params"]]
        stages[name] = {key: value for key, value in stage.items() if value != []}
    head = "# The pipeline of triton-kernel-lab over `kernels` in params.yaml; `triton-kernel-lab new` wrote it.\n"
    body: str = yaml.safe_dump({"stages": stages, "plots": whole["plots"]}, sort_keys=False, width=120)
    return head + body


def _check_name(kernel: str) -> None:
    if not _KERNEL.fullmatch(kernel) or keyword.iskeyword(kernel):
        raise ScaffoldError(
            f"kernel: expected a name of lower-case letters, digits and underscores that starts with a letter and is "
            f"no word of Python, such as my_kernel, got {kernel!r}."
        )
    if kernel in registry.names():
        raise ScaffoldError(f"kernel: expected a new name, got {kernel!r}, which an installed package provides.")
    from triton_kernel_lab.cases._base import find

    try:
        found = find(kernel)
    except ValueError:
        return
    raise ScaffoldError(f"kernel: expected a new name, got {kernel!r}, a name of triton-kernel-lab's {found.name}.")


def _into_a_project(kernel: str, start: Path) -> tuple[dict[Path, str], str]:
    """The files of one kernel more, for the checkout or the project that holds ``start``, and what comes next."""
    try:
        found = find_project(start)
    except ProjectError as error:
        raise ScaffoldError(f"{error} `--project FOLDER` makes a new project.") from error
    if found.listed is None:
        registry_line = (
            f"a line for {kernel} in PENDING of src/{_OURS}/cases/__init__.py, "
            "which moves to KERNELS together with its artifacts"
        )
        return _absent(_kernel_files(kernel, found.root, _OURS, _LAB_BLOCKS)), registry_line
    where = found.root / "pyproject.toml"
    text = where.read_text(encoding="utf-8") if where.is_file() else ""
    package = re.search(r'^\w+ = "([a-z_0-9]+)\.cases\.', text.partition(_TABLE)[2], re.MULTILINE)
    if package is None:
        raise ScaffoldError(f'{where}: expected {_TABLE} with a line `name = "package.cases.name:CASE"`, found none.')
    texts = _absent(_kernel_files(kernel, found.root, package[1], _OWN_BLOCKS))
    texts[where] = text.replace(_TABLE, f'{_TABLE}\n{kernel} = "{package[1]}.cases.{kernel}:CASE"')
    params = found.root / "params.yaml"
    listed, count = re.subn(
        r"^kernels:[ ]*\n", f"kernels:\n  - {kernel}\n", params.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    if not count:
        raise ScaffoldError(f"{params}: expected `kernels:` with one name a line below it, found another form.")
    return texts | {params: listed}, _install(found.root)


def _install(folder: Path) -> str:
    # An installed package's entry points are read from its metadata, which only installing it writes.
    return f"`python -m pip install -e '{folder}[measure]'`, which makes the kernel known"


def _project(kernel: str, folder: Path) -> tuple[dict[Path, str], str]:
    """The files of a new project, a package with one kernel and the pipeline that measures it, and what comes next."""
    name = folder.resolve().name
    package = name.replace("-", "_")
    if not _FOLDER.fullmatch(name) or keyword.iskeyword(package) or package == _OURS:
        raise ScaffoldError(
            f"--project: expected a folder whose name can be a package's, such as my-kernels, got {name!r}."
        )
    names = {"kernel": kernel, "package": package, "project": name}
    texts = {
        **_kernel_files(kernel, folder, package, _OWN_BLOCKS),
        folder / "pyproject.toml": _filled("pyproject.toml", names),
        folder / "params.yaml": _filled("params.yaml", names),
        folder / "dvc.yaml": pipeline(),
        folder / ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n",
        folder / ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
        folder / ".dvcignore": "".join(f"{each}\n" for each in (".git", ".rehearsal", ".venv", "__pycache__")),
        folder / ".gitignore": "/.rehearsal/\n/.venv/\n__pycache__/\n/dist/\n",
        folder / "tests/conftest.py": _filled("conftest.py", names),
    }
    texts |= {folder / "src" / package / part / "__init__.py": "" for part in ("", "ops", "cases")}
    return _absent(texts), _install(folder)


def _kernel_files(kernel: str, root: Path, package: str, blocks: Mapping[str, str]) -> dict[Path, str]:
    """A kernel's own four files."""
    names = {"kernel": kernel, "package": package, "cli_name": kernel.replace("_", "-")}
    names["title"] = kernel.replace("_", " ").capitalize()
    names |= {block: Template(text).substitute(names) for block, text in blocks.items()}
    source = root / "src" / package
    return {
        source / "ops" / f"{kernel}.py": _filled("op.py", names),
        source / "ops/launch" / f"{kernel}.json": _filled("launch.json", names),
        source / "cases" / f"{kernel}.py": _filled("case.py", names),
        root / "tests" / f"test_{kernel}.py": _filled("test.py", names),
    }


def _filled(template: str, names: Mapping[str, str]) -> str:
    text = (Path(__file__).parent / "templates" / f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(names)


def _absent(texts: dict[Path, str]) -> dict[Path, str]:
    """The same, none of which may be there already."""
    if there := [path for path in texts if path.exists()]:
        raise ScaffoldError(f"{there[0]}: expected no such file, found one; nothing was written.")
    return texts


def _stays(dependency: str) -> bool:
    return not dependency.startswith("src/") or dependency == f"src/{_OURS}/cases"


def _dependency(name: str) -> str:
    # What the numbers were measured from: a change makes them stale, and the report says so.
    return "artifacts/sources" if name.startswith("src/") else name


def _ours() -> str:
    """The lab's own dvc.yaml, which an installed package brings along."""
    packaged = Path(__file__).parent / "pipeline.yaml"
    source = packaged if packaged.is_file() else Path(__file__).parents[2] / "dvc.yaml"
    return source.read_text(encoding="utf-8")
