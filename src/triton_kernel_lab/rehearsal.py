"""What `make repro` does on a host without a GPU: the same pipeline, in a scratch copy, as runner ``cpu``.

The copy is the git-ignored folder ``.rehearsal``. It has a DVC state of its own, so
the tracked tree stays as it is, and a second rehearsal skips what has not changed.
Then the published runner's report is derived again from its raw samples.
"""

from __future__ import annotations

import dataclasses
import filecmp
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from triton_kernel_lab import artifacts
from triton_kernel_lab.project import Project

__all__ = ["RehearsalError", "run"]

_FOLDER = ".rehearsal"
_RUNNER = re.compile(r"^runner:.*$", re.MULTILINE)

_MEND = "run `dvc repro --force --downstream roofline` and read `git diff`."

# The copy's own: the results of the rehearsal, and what DVC remembers of them.
_OWN = (
    "dvc.lock",
    "artifacts/cpu/",
    "artifacts/codegen/",
    "artifacts/sources/",
    "reports/codegen/",
    "reports/cpu/",
    ".dvc/tmp/",
    ".dvc/cache/",
    ".dvc/config.local",
)

# Not of the tree where there is no git to ask, as in a source archive.
_IGNORED = frozenset(
    {".dvc/tmp", ".dvc/cache", ".git", ".hypothesis", ".mypy_cache", ".nox", ".pytest_cache", ".ruff_cache", ".venv"}
    | {_FOLDER, "__pycache__", "build", "dist", "dvc_plots", "wheelhouse"}
)


class RehearsalError(ValueError):
    """The rehearsal failed, or the published report is not what its samples give; one sentence says which."""


def run(project: Project) -> tuple[Path, Path]:
    """Rehearse the pipeline, then derive the published report again and compare.

    Returns:
        The rehearsal's results.md, and the published runner's. The second does
        not exist before the first measurement, which a printed line then says.

    Raises:
        RehearsalError: a stage failed, or a published file differs from what the
            tracked raw samples give.
    """
    copy = project.root / _FOLDER
    _sync(project.root, copy)
    _set_runner(copy / "params.yaml")
    _dvc_repro(copy)
    _check_published(project, copy)
    return copy / "reports" / "cpu" / "results.md", project.reports / "results.md"


def _sync(root: Path, copy: Path) -> None:
    """Make the copy equal to the tree, its own files apart, and touch only what differs."""
    wanted = {name for name in _files(root) if not name.startswith(_OWN)}
    for name in sorted(wanted):
        _copy_file(root / name, copy / name)
    for path in [path for path in copy.rglob("*") if path.is_file() or path.is_symlink()]:
        name = path.relative_to(copy).as_posix()
        if name not in wanted and not name.startswith(_OWN) and path.parent.name != "__pycache__":
            path.unlink()


def _copy_file(source: Path, target: Path) -> None:
    if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def _files(root: Path) -> Iterator[str]:
    """The tree's files, tracked or not yet, without those that git ignores."""
    names = _git_files(root) if (root / ".git").exists() else _walked_files(root)
    return (name for name in names if (root / name).is_file())


def _git_files(root: Path) -> list[str]:
    command = ["git", "-C", os.fspath(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True)
    except OSError as error:
        raise RehearsalError(f"{root}: expected git, to list the tree, found none; install git.") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        raise RehearsalError(f"{root}: git ls-files failed: {said}") from error
    return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]


def _walked_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not _IGNORED & {name, (here / name).as_posix()}]
        yield from ((here / name).as_posix() for name in files)


def _set_runner(params: Path) -> None:
    text = params.read_text(encoding="utf-8")
    changed, count = _RUNNER.subn("runner: cpu", text)
    if count != 1:
        raise RehearsalError(f"{params}: expected one line `runner: ...`, found {count}.")
    artifacts.write_text(params, changed)


def _dvc_repro(copy: Path) -> None:
    if importlib.util.find_spec("dvc") is None:
        raise RehearsalError("rehearsal: expected DVC, found none; run `make repro`, or install the extra `dev`.")
    # The copy is no repository of its own, and the one around it ignores it.
    artifacts.write_text(copy / ".dvc" / "config.local", "[core]\n    no_scm = true\n")
    # Stages run `python`, which must be this one, and import the copy's sources, which are what DVC hashes.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sources = os.pathsep.join([os.fspath(copy / "src"), *inherited])
    environment = os.environ | {"PATH": path, "PYTHONPATH": sources}
    done = subprocess.run([sys.executable, "-m", "dvc", "repro"], cwd=copy, env=environment, check=False)
    if done.returncode:
        raise RehearsalError(f"{copy}: `dvc repro` ended with {done.returncode}; what it printed above says why.")


def _check_published(project: Project, copy: Path) -> None:
    if project.runner == "cpu" or not (project.artifacts / "timing").is_dir():
        print(f"Runner {project.runner} has published no timings yet, so there is no report to derive again.")
        return
    # In the copy, whose raw samples are those of the tree; what is derived there is scratch.
    derived = dataclasses.replace(project, root=copy)
    for path in (derived.artifacts / "roofline.json", *_derived_reports(derived)):
        path.unlink(missing_ok=True)
    _derive(derived)
    for path in (derived.artifacts / "roofline.json", *_derived_reports(derived)):
        _compare(project, path.relative_to(copy).as_posix(), copy)
    _derive_page(project, derived)
    for path in _derived_reports(derived):
        _compare(project, path.relative_to(copy).as_posix(), copy)


def _derived_reports(project: Project) -> list[Path]:
    """A kept verdict is the gate's: no stage derives it."""
    return sorted(path for path in project.reports.glob("*") if path.name != "gate.json")


def _derive_page(project: Project, derived: Project) -> None:
    """The page shows the pictures as they were published, whichever matplotlib drew them."""
    from triton_kernel_lab.report.site import stage as site

    for picture in derived.reports.glob("*.svg"):
        shutil.copy(project.reports / picture.name, picture)
    site.run(derived)


def _derive(project: Project) -> None:
    from triton_kernel_lab.analysis import roofline
    from triton_kernel_lab.report import tables
    from triton_kernel_lab.report.figures import stage as figures

    roofline.run(project)
    figures.run(project)
    tables.run(project)


def _compare(project: Project, name: str, copy: Path) -> None:
    published = project.root / name
    if not published.is_file():
        raise RehearsalError(f"{name}: expected the file that the raw samples give, found none; {_MEND}")
    if _content(published) != _content(copy / name):
        raise RehearsalError(f"{name}: expected what the tracked raw samples give, found other bytes; {_MEND}")


def _content(path: Path) -> object:
    from triton_kernel_lab.report.figures.svg import recorded_digests

    if path.suffix != ".svg":
        return path.read_bytes()
    # Another version of matplotlib draws the same data with other bytes.
    digests = recorded_digests(path.read_text(encoding="utf-8"))
    return digests and digests[0]
