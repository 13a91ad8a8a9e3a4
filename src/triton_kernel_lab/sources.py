"""Which of the project's modules a stage's code consists of, and their digest.

An artifact carries the digest of the sources that made it, so that a number which
no longer describes the tree can be named without a GPU. The walk follows import
statements in the syntax tree and imports nothing. A leaf but for project.py and
registry.py.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from triton_kernel_lab import registry
from triton_kernel_lab.project import Project

__all__ = [
    "KERNEL_STAGES",
    "STAGES",
    "SourceError",
    "stage_digest",
    "stage_files",
    "stage_sources",
    "stale",
    "stale_measurements",
    "stale_tools",
    "tool_digest",
]

_PACKAGE = "triton_kernel_lab"
_CASE, _TABLE = "cases/{kernel}.py", "ops/launch/{kernel}.json"

# Where each stage's code is entered. A name in braces is filled with the kernel; what is not Python
# stands for itself: a launch table decides what runs as much as the code does.
STAGES: dict[str, tuple[str, ...]] = {
    "environment": ("lab/environment.py",),
    "ceilings": ("lab/ceilings.py",),
    "correctness": ("lab/correctness.py", _CASE, _TABLE),
    "timing": ("lab/timing.py", "lab/prepare.py", "lab/worker.py", _CASE, _TABLE),
    "counters": ("lab/counters.py", "lab/profiled.py", _CASE, _TABLE),
    "roofline": ("analysis/roofline.py",),
    "figures": ("report/figures/stage.py",),
    "tables": ("report/tables.py",),
    "site": (
        "report/site/stage.py",
        *(f"report/site/{name}" for name in ("template.html", "style.css", "script.js")),
    ),
    "readme": ("report/readme.py",),
    "codegen": ("codegen/stage.py", _CASE, _TABLE),
}

KERNEL_STAGES = tuple(stage for stage, entries in STAGES.items() if _CASE in entries)
"""The stages that run once for each kernel."""

# What only the runner can make again.
_MEASURED = frozenset({"environment", "ceilings", "correctness", "timing", "counters"})

# What no stage but a command of its own measures, by the name of its artifact: where its code is
# entered, a star for each module of a folder, and the command. The walk ends at a package's
# __init__.py, so the modules behind one are entries themselves.
_TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "decode_e2e": (
        ("decode_e2e.py", "endtoend/measure.py", "integrations/transformers/*.py"),
        "python benchmarks/decode_e2e.py",
    ),
}

# These print, serialise artifacts and locate files; no edit of theirs can change a number, and with
# them in the digest a new schema check would ask for a new measurement. Nor does the walk ever reach
# an __init__.py, which holds names only: a package's name is no file's.
_NOT_SOURCES = frozenset({"artifacts.py", "console.py", "project.py", "registry.py", "revisions.py", "sources.py"})

# Sets the files of another package, named from the folder that holds it, apart from ours.
_OTHER = ":"


class SourceError(ValueError):
    """A stage's sources cannot be told; one sentence says why."""


class _Code(NamedTuple):
    """Where source files lie: this package's, and those of the package that provides the kernel."""

    package: Path
    folder: Path | None = None
    top: str | None = None

    def path(self, name: str) -> Path:
        if name.startswith(_OTHER) and self.folder:
            return self.folder / name.removeprefix(_OTHER)
        return self.package / name


# What each module imports, for as long as the tree is taken not to change.
_Known = dict[tuple[_Code, str], list[str]]


def stage_sources(root: Path, stage: str, kernel: str | None = None) -> list[Path]:
    """The files that a stage's code consists of, sorted.

    Args:
        root: a checkout; without ``src/triton_kernel_lab`` in it, the sources are
            those of the package that is running.
        stage: a name of ``STAGES``.
        kernel: which kernel, for a stage that runs once for each. Of one that
            another package provides, that package's files are sources, too.

    Raises:
        SourceError: for an unknown stage, a kernel too few or too many, or a
            file that is not there or is not Python.
        triton_kernel_lab.registry.RegistryError: several packages provide the
            kernel, or the one that does lacks its module.
    """
    code, names = _stage(root, stage, kernel)
    return [code.path(name) for name in names]


def stage_digest(root: Path, stage: str, kernel: str | None = None) -> str:
    """The SHA-256 over name and content of each of ``stage_sources``, in hexadecimal.

    Names are relative to the package and line ends count as LF, so that a clone
    with other line ends, or an installed package, has the same digest.
    """
    return _digest(*_stage(root, stage, kernel))


def stage_files(root: Path, stage: str, kernel: str | None = None) -> dict[str, str]:
    """The SHA-256 of each of ``stage_sources`` by its name, with names and line ends as of ``stage_digest``."""
    code, names = _stage(root, stage, kernel)
    return {name: hashlib.sha256(_content(code, name)).hexdigest() for name in names}


def module_digest(root: Path, *names: str) -> str:
    """The same digest for what is no stage: of the named modules and all that they import.

    Args:
        root: as of ``stage_sources``.
        names: files relative to the package, such as ``analysis/gate.py``.
    """
    code = _Code(_package(root))
    return _digest(code, _closure(code, list(names)))


def tool_digest(root: Path, kind: str) -> str:
    """The same digest of what a command measures that is no stage, such as ``decode_e2e``.

    Raises:
        SourceError: a module that the command is entered by is missing.
    """
    package, (entries, _) = _package(root), _TOOLS[kind]
    found = [path.relative_to(package).as_posix() for entry in entries if "*" in entry for path in package.glob(entry)]
    found = [name for name in found if not name.endswith("/__init__.py")]
    return module_digest(root, *(entry for entry in entries if "*" not in entry), *found)


def _stage(root: Path, stage: str, kernel: str | None, known: _Known | None = None) -> tuple[_Code, list[str]]:
    """Where a stage's sources lie, and their names; ``known`` spares the imports of modules seen before."""
    entries, package = _entries(stage, kernel), _package(root)
    entry = registry.provider(kernel) if kernel and not (package / _CASE.format(kernel=kernel)).is_file() else None
    if entry is None:
        code = _Code(package)
        # A case of further calls to another's kernels has no launch table of its own.
        found = [name for name in entries if name != _TABLE or (package / name.format(kernel=kernel)).is_file()]
        return code, _closure(code, [name.format(kernel=kernel) for name in found], known)
    folder, file = registry.source(entry)
    code = _Code(package, folder, entry.module.partition(".")[0])
    # Its launch table, if it has one, is that of its operator's module.
    lab = [name for name in entries if name not in (_CASE, _TABLE)]
    return code, _closure(code, [*lab, f"{_OTHER}{file}"], known)


def _digest(code: _Code, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        content = _content(code, name)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _content(code: _Code, name: str) -> bytes:
    return code.path(name).read_bytes().replace(b"\r\n", b"\n")


def stale(project: Project) -> list[str]:
    """One sentence for each artifact of the runner or the codegen audit whose sources have changed since.

    An artifact that is missing or broken is not stale: ``verify`` names those.
    """
    sentences = []
    for stage, target, path in _stale(project):
        where, (_, _, kernel) = path.relative_to(project.root).as_posix(), target.partition("@")
        of_kernel = f" of kernel {kernel}" if kernel else ""
        sentences.append(f"{where}: stage {stage}{of_kernel}: its sources changed since; run `dvc repro {target}`.")
    for kind in stale_tools(project):
        where = _tool_path(project, kind).relative_to(project.root).as_posix()
        sentences.append(f"{where}: its sources changed since; run `{_TOOLS[kind][1]}`.")
    return sentences


def _stale(project: Project, stages: Collection[str] = tuple(STAGES)) -> Iterator[tuple[str, str, Path]]:
    """Stage, DVC's name for it, and artifact of whatever other sources made."""
    known: _Known = {}
    for stage, kernel, path in _artifacts(project):
        if stage not in stages:
            continue
        recorded = _recorded_digest(path)
        if recorded is not None and recorded != _digest(*_stage(project.root, stage, kernel, known)):
            yield stage, f"{stage}@{kernel}" if kernel else stage, path


def stale_measurements(project: Project) -> list[str]:
    """The stages, as DVC names them, whose measured artifacts other sources made than the tree holds."""
    return [target for _, target, _ in _stale(project, _MEASURED)]


def stale_tools(project: Project) -> list[str]:
    """The artifacts of the runner, by kind, that a command which is no stage made of other sources."""
    present = [kind for kind in _TOOLS if _tool_path(project, kind).is_file()]
    recorded = {kind: _recorded_digest(_tool_path(project, kind)) for kind in present}
    return [kind for kind, digest in recorded.items() if digest and digest != tool_digest(project.root, kind)]


def _tool_path(project: Project, kind: str) -> Path:
    return project.artifacts / f"{kind}.json"


def _package(root: Path) -> Path:
    checkout = root / "src" / _PACKAGE
    return checkout if checkout.is_dir() else Path(__file__).parent


def _entries(stage: str, kernel: str | None) -> tuple[str, ...]:
    if stage not in STAGES:
        raise SourceError(f"stage: expected one of {', '.join(STAGES)}, found {stage!r}.")
    per_kernel = stage in KERNEL_STAGES
    if per_kernel != (kernel is not None):
        expected = "the name of a kernel" if per_kernel else "no kernel"
        raise SourceError(f"stage {stage}: expected {expected}, found {kernel!r}.")
    return STAGES[stage]


def _closure(code: _Code, entries: list[str], known: _Known | None = None) -> list[str]:
    """The entries and all that they import, at any depth."""
    seen: set[str] = set()
    known = {} if known is None else known
    queue = list(entries)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            if (code, name) not in known:
                known[code, name] = _imports(code, name)
            queue += [found for found in known[code, name] if found not in _NOT_SOURCES]
    return sorted(seen)


def _imports(code: _Code, name: str) -> list[str]:
    path = code.path(name)
    try:
        text = path.read_text(encoding="utf-8")
        dotted = _dotted(text, name) if name.endswith(".py") else ()
    except OSError as error:
        raise SourceError(f"{path}: expected a source file, found none ({error.strerror}).") from error
    except SyntaxError as error:
        raise SourceError(f"{path}: expected Python, found {error.msg} at line {error.lineno}.") from error
    files = [file for top, *below in dotted for file in _files(code, top, below)]
    # An operator's module reads the launch table of its own name.
    folder, _, stem = name.removesuffix(".py").rpartition("/")
    files += [f"{folder}/launch/{stem}.json"] if folder else []
    if name.startswith(_OTHER):
        # Another package's __init__.py may hold code, and runs before its modules.
        parts = folder.split("/")
        files += [f"{'/'.join(parts[:count])}/__init__.py" for count in range(1, len(parts) + 1)]
    return [file for file in dict.fromkeys(files) if os.path.isfile(code.path(file))]


def _files(code: _Code, top: str, below: list[str]) -> list[str]:
    """What a dotted name may be a file of."""
    if top == _PACKAGE:
        return ["/".join(below) + ".py"] if below else []
    if top != code.top:
        return []
    module = _OTHER + "/".join([top, *below])
    return [f"{module}.py", f"{module}/__init__.py"]


@functools.lru_cache(maxsize=512)
def _dotted(text: str, name: str) -> tuple[tuple[str, ...], ...]:
    """What a module may import, as the parts of dotted names.

    ``from a import b`` may name the module a.b or an attribute of a: both are given.
    """
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, name)
            found += [base, *((*base, alias.name) for alias in node.names)]
    return tuple(parts for parts in found if parts)


def _base(node: ast.ImportFrom, name: str) -> tuple[str, ...]:
    named = tuple(node.module.split(".")) if node.module else ()
    if not node.level:
        return named
    folders = name.removeprefix(_OTHER).split("/")[:-1]
    here = tuple(folders) if name.startswith(_OTHER) else (_PACKAGE, *folders)
    return here[: len(here) - node.level + 1] + named


def _artifacts(project: Project) -> Iterator[tuple[str, str | None, Path]]:
    for stage in STAGES:
        if stage in KERNEL_STAGES:
            for kernel in project.kernels:
                folder = project.audits if stage == "codegen" else project.artifacts / stage
                yield stage, kernel, folder / f"{kernel}.json"
        else:
            yield stage, None, project.artifacts / f"{stage}.json"


def _recorded_digest(path: Path) -> str | None:
    # One field is asked for, and only to compare it: the schema check, slow on raw samples, is verify's.
    try:
        recorded = json.loads(path.read_bytes())["producer"]["source_sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return recorded if isinstance(recorded, str) else None
