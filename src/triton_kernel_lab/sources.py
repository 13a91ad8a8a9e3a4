"""Which of the project's modules a stage's code consists of, and their digest.

An artifact carries the digest of the sources that made it, so that a number which
no longer describes the tree can be named without a GPU. The walk follows import
statements in the syntax tree and imports nothing. A leaf but for project.py.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from triton_kernel_lab.project import Project, kernel_names

__all__ = ["STAGES", "SourceError", "stage_digest", "stage_sources", "stale", "stale_measurements"]

_PACKAGE = "triton_kernel_lab"

# Where each stage's code is entered. A name in braces is filled with the kernel; what is not Python
# stands for itself: a launch table decides what runs as much as the code does.
STAGES: dict[str, tuple[str, ...]] = {
    "environment": ("lab/environment.py",),
    "ceilings": ("lab/ceilings.py",),
    "correctness": ("lab/correctness.py", "cases/{kernel}.py", "ops/launch/{kernel}.json"),
    "timing": ("lab/timing.py", "lab/worker.py", "cases/{kernel}.py", "ops/launch/{kernel}.json"),
    "counters": ("lab/counters.py", "lab/profiled.py", "cases/{kernel}.py", "ops/launch/{kernel}.json"),
    "roofline": ("analysis/roofline.py",),
    "figures": ("report/figures/stage.py",),
    "tables": ("report/tables.py",),
    "site": (
        "report/site/stage.py",
        *(f"report/site/{name}" for name in ("template.html", "style.css", "script.js")),
    ),
    "readme": ("report/readme.py",),
    "codegen": ("codegen/stage.py", "cases/{kernel}.py", "ops/launch/{kernel}.json"),
}

# What only the runner can make again.
_MEASURED = frozenset({"environment", "ceilings", "correctness", "timing", "counters"})

# These serialise artifacts and locate files; no edit of theirs can change a number, and with them in
# the digest a new schema check would ask for a new measurement. Nor does the walk ever reach an
# __init__.py, which holds names only: a package's name is no file's.
_NOT_SOURCES = frozenset({"artifacts.py", "project.py", "revisions.py", "sources.py"})


class SourceError(ValueError):
    """A stage's sources cannot be told; one sentence says why."""


def stage_sources(root: Path, stage: str, kernel: str | None = None) -> list[Path]:
    """The files that a stage's code consists of, sorted.

    Args:
        root: a checkout; without ``src/triton_kernel_lab`` in it, the sources are
            those of the package that is running.
        stage: a name of ``STAGES``.
        kernel: which kernel, for a stage that runs once for each.

    Raises:
        SourceError: for an unknown stage, a kernel too few or too many, or a
            file that is not there or is not Python.
    """
    package = _package(root)
    return [package / name for name in _closure(package, _entries(stage, kernel))]


def stage_digest(root: Path, stage: str, kernel: str | None = None) -> str:
    """The SHA-256 over name and content of each of ``stage_sources``, in hexadecimal.

    Names are relative to the package and line ends count as LF, so that a clone
    with other line ends, or an installed package, has the same digest.
    """
    return _digest(_package(root), stage_sources(root, stage, kernel))


def module_digest(root: Path, *names: str) -> str:
    """The same digest for what is no stage: of the named modules and all that they import.

    Args:
        root: as of ``stage_sources``.
        names: files relative to the package, such as ``analysis/gate.py``.
    """
    package = _package(root)
    return _digest(package, [package / name for name in _closure(package, list(names))])


def _digest(package: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def stale(project: Project) -> list[str]:
    """One sentence for each artifact of the runner or the codegen audit whose sources have changed since.

    An artifact that is missing or broken is not stale: ``verify`` names those.
    """
    sentences = []
    for stage, target, path in _stale(project):
        where, (_, _, kernel) = path.relative_to(project.root).as_posix(), target.partition("@")
        of_kernel = f" of kernel {kernel}" if kernel else ""
        sentences.append(f"{where}: stage {stage}{of_kernel}: its sources changed since; run `dvc repro {target}`.")
    return sentences


def _stale(project: Project, stages: Collection[str] = tuple(STAGES)) -> Iterator[tuple[str, str, Path]]:
    """Stage, DVC's name for it, and artifact of whatever other sources made."""
    for stage, kernel, path in _artifacts(project):
        if stage not in stages:
            continue
        recorded = _recorded_digest(path)
        if recorded is not None and recorded != stage_digest(project.root, stage, kernel):
            yield stage, f"{stage}@{kernel}" if kernel else stage, path


def stale_measurements(project: Project) -> list[str]:
    """The stages, as DVC names them, whose measured artifacts other sources made than the tree holds."""
    return [target for _, target, _ in _stale(project, _MEASURED)]


def _package(root: Path) -> Path:
    checkout = root / "src" / _PACKAGE
    return checkout if checkout.is_dir() else Path(__file__).parent


def _entries(stage: str, kernel: str | None) -> list[str]:
    if stage not in STAGES:
        raise SourceError(f"stage: expected one of {', '.join(STAGES)}, found {stage!r}.")
    per_kernel = any("{kernel}" in entry for entry in STAGES[stage])
    if per_kernel != (kernel is not None):
        expected = "the name of a kernel" if per_kernel else "no kernel"
        raise SourceError(f"stage {stage}: expected {expected}, found {kernel!r}.")
    return [entry.format(kernel=kernel) for entry in STAGES[stage]]


def _closure(package: Path, entries: list[str]) -> list[str]:
    """The entries and all that they import, at any depth; names relative to the package."""
    seen: set[str] = set()
    queue = list(entries)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += [found for found in _imports(package, name) if found not in _NOT_SOURCES]
    return sorted(seen)


def _imports(package: Path, name: str) -> list[str]:
    path = package / name
    try:
        text = path.read_text(encoding="utf-8")
        dotted = _dotted(text, name) if name.endswith(".py") else ()
    except OSError as error:
        raise SourceError(f"{path}: expected a source file, found none ({error.strerror}).") from error
    except SyntaxError as error:
        raise SourceError(f"{path}: expected Python, found {error.msg} at line {error.lineno}.") from error
    files = ["/".join(parts) + ".py" for parts in dotted if parts]
    # An operator's module reads the launch table of its own name.
    folder, _, stem = name.removesuffix(".py").rpartition("/")
    files += [f"ops/launch/{stem}.json"] if folder == "ops" else []
    return [file for file in files if (package / file).is_file()]


@functools.lru_cache(maxsize=512)
def _dotted(text: str, name: str) -> tuple[tuple[str, ...], ...]:
    """What a module may import of the package, as paths of names below it.

    ``from a import b`` may name the module a.b or an attribute of a: both are given.
    """
    found: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, name)
            found += [base, *((*base, alias.name) for alias in node.names)]
    return tuple(parts[1:] for parts in found if parts[:1] == (_PACKAGE,))


def _base(node: ast.ImportFrom, name: str) -> tuple[str, ...]:
    named = tuple(node.module.split(".")) if node.module else ()
    if not node.level:
        return named
    here = (_PACKAGE, *name.split("/")[:-1])
    return here[: len(here) - node.level + 1] + named


def _artifacts(project: Project) -> Iterator[tuple[str, str | None, Path]]:
    checkout = project.root if (project.root / "src" / _PACKAGE).is_dir() else None
    for stage, entries in STAGES.items():
        if any("{kernel}" in entry for entry in entries):
            for kernel in kernel_names(checkout):
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
