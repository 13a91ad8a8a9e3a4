#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["nox"]
# ///
"""The checks and the main job: `nox -s cpu`, `nox -s repro`; `make SESSION` brings nox along.

On an offline GPU runner that has torch: `python -m nox -s gpu --no-venv --no-install`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["cpu"]
nox.options.reuse_venv = "yes"
# A session that could not run is never green, in CI or out of it.
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
# What the pure stages write, and so what they must give again byte for byte.
DERIVED = ("artifacts", "reports", "README.md", "docs/METHODOLOGY.md", "dvc.lock")
# The ends of the pipeline that a measurement leads to. The codegen audit is none: it needs the pinned Triton.
REPORT = ("figures", "tables", "site", "readme")


def _requirements(*groups: str, extras: tuple[str, ...] = ()) -> list[str]:
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *nox.project.dependency_groups(PYPROJECT, *groups)]
    return wanted + [each for extra in extras for each in project["optional-dependencies"][extra]]


def _install_once(session: nox.Session, wanted: list[str]) -> None:
    """Asking pip costs seconds a session, so an environment remembers what was installed into it."""
    asked = "\n".join([*wanted, Path("constraints.txt").read_text(encoding="utf-8")])
    mark = Path(session.virtualenv.location, "installed.txt")
    if not mark.is_file() or mark.read_text(encoding="utf-8") != asked:
        session.install("-c", "constraints.txt", *wanted)
        mark.write_text(asked, encoding="utf-8")


def _prepare(session: nox.Session, *groups: str, extras: tuple[str, ...] = ()) -> None:
    """Install the groups, and let every process of the session import src/ as it lies there."""
    wanted = _requirements(*groups, extras=extras)
    if session.virtualenv.is_sandboxed:
        _install_once(session, wanted)
    else:
        session.install("-c", "constraints.txt", *wanted)
    # Without a virtual environment the caller's path may be what holds the installed packages.
    inherited = "" if session.virtualenv.is_sandboxed else os.environ.get("PYTHONPATH", "")
    # Hundreds of processes import src/: Python compiles it once, even where a caller wants no bytecode written.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.abspath("src"), inherited]))


def _lab(session: nox.Session, *arguments: str) -> None:
    session.run("python", "-m", "triton_kernel_lab", *arguments)


def _dvc_repro(session: nox.Session, *arguments: str) -> None:
    if not Path(".git").exists():  # A source archive: without this DVC refuses.
        session.run("python", "-m", "dvc", "config", "--local", "core.no_scm", "true")
    session.run("python", "-m", "dvc", "repro", *arguments)


def _gpus(session: nox.Session) -> int:
    # is_available() is also true of a driver without a device.
    said = session.run("python", "-c", "import torch; print(torch.cuda.device_count())", silent=True, log=False)
    return int(str(said).split()[-1])


def _measure(session: nox.Session) -> None:
    _dvc_repro(session, *(session.posargs or REPORT))
    _lab(session, "readme")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types; needs neither torch nor a GPU."""
    _prepare(session, "lint")
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "mypy")


@nox.session
def unit(session: nox.Session) -> None:
    """The codegen audit, and the tests, kernels through Triton's interpreter where there is no GPU."""
    _prepare(session, "test", extras=("gpu",))
    if not session.posargs:  # Whoever chose tests wants those alone.
        # First: a spill is told in a minute, and not after the tests.
        _lab(session, "codegen", "--check")
    # Pytest ends with 5, so this session with an error, when no test ran.
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "2", "--dist", "worksteal"]))


@nox.session
def codegen(session: nox.Session) -> None:
    """Write what the kernels compile to for every target, to accept a change that `unit` named."""
    _prepare(session, "pipeline", extras=("gpu",))
    # Forced: DVC does not see another pin of Triton.
    _dvc_repro(session, "--force", "codegen")


@nox.session
def drift(session: nox.Session) -> None:
    """What is tracked equals what the raw samples and the sources give, on any host, without torch."""
    _prepare(session, "pipeline")
    _dvc_repro(session, "sources", "-q")
    _dvc_repro(session, "-f", "--downstream", "roofline", "-q")
    _lab(session, "readme")
    said = session.run("git", "status", "--porcelain", "--", *DERIVED, silent=True, external=True)
    # The second letter tells what differs from the index: staged is as good as committed.
    if changed := [line for line in str(said).splitlines() if line[1:2] != " "]:
        session.run("git", "--no-pager", "diff", "--stat", "--", *DERIVED, external=True)
        names = ", ".join(line[3:] for line in changed)
        session.error(f"drift: {names}: not what samples and sources give; commit what the pure stages wrote just now.")
    _lab(session, "verify")


@nox.session(python=False, requires=["lint", "unit", "drift"])
def cpu(session: nox.Session) -> None:
    """All that a host without a GPU can check: lint, unit and drift."""
    session.log("lint, unit and drift passed; nothing was verified on a GPU.")


@nox.session
def repro(session: nox.Session) -> None:
    """The main job: measure on a GPU, or rehearse without one; ends with the reports' paths."""
    _prepare(session, "pipeline", extras=("gpu",))
    if _gpus(session):
        _measure(session)
    else:
        _lab(session, "rehearse")


@nox.session
def gate(session: nox.Session) -> None:
    """Compare the tracked numbers with the previous commit's; arguments go to `triton-kernel-lab gate`."""
    _prepare(session, "pipeline")
    _lab(session, "gate", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU, then the main job; an error where there is none."""
    _prepare(session, "test", extras=("gpu",))
    if not _gpus(session):
        session.error("gpu: expected a CUDA device, found none; a host without one runs `nox -s cpu`.")
    session.run("python", "-m", "pytest", "-m", "gpu", env={"TKL_EXPECT_GPU": "1"})
    _measure(session)


def _wheelhouse_options(session: nox.Session) -> argparse.Namespace:
    parser = argparse.ArgumentParser("nox -s wheelhouse --", description="Collect wheels for an offline GPU runner.")
    parser.add_argument("--python", default="3.12", help="the runner's Python (default: %(default)s)")
    parser.add_argument("--platform", action="append", help="a wheel platform that it takes; may be repeated")
    parser.add_argument("--without", action="append", default=["torch", "triton"], help="what it has; may be repeated")
    parser.add_argument("--dest", default="wheelhouse", help="where to put the wheels (default: %(default)s)")
    options = parser.parse_args(session.posargs)
    # Pip takes a manylinux tag for itself alone, so the older ones that such a runner also takes are named too.
    options.platform = options.platform or [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)]
    options.without = {_name(each) for each in options.without}
    return options


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def _resolve(session: nox.Session, without: set[str]) -> tuple[list[str], list[str]]:
    """All that `nox -s gpu` needs, pinned: what has a wheel, and what only has a source archive."""
    wanted = [each for each in _requirements("test", extras=("gpu",)) if _name(each) not in without]
    report = Path(session.create_tmp()) / "report.json"
    # Asked for this Python: pip evaluates markers for the interpreter that it runs on.
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-c", "constraints.txt")
    session.run("python", "-m", "pip", "install", *options, *wanted)
    ready: list[str] = []
    archives: list[str] = []
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        if _name(item["metadata"]["name"]) not in without:
            kind = ready if item["download_info"]["url"].endswith(".whl") else archives
            kind.append(f"{item['metadata']['name']}=={item['metadata']['version']}")
    return ready, archives


@nox.session
def wheelhouse(session: nox.Session) -> None:
    """Collect the wheels that `nox -s gpu --no-venv --no-install` needs on a runner without a network."""
    options = _wheelhouse_options(session)
    ready, archives = _resolve(session, options.without)
    download: tuple[str, ...] = ("python", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    download += ("--implementation", "cp", "--python-version", options.python)
    download += tuple(part for platform in options.platform for part in ("--platform", platform))
    session.run(*download, "--dest", options.dest, *ready)
    for requirement in archives:
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", options.dest, requirement)
    # Proof for the target: a wheel built here with compiled code in it would fit this machine only.
    offline = ("--no-index", "--find-links", options.dest, "--dest", session.create_tmp())
    session.run(*download, *offline, *ready, *archives)
    session.log(f"{len(ready) + len(archives)} wheels in {options.dest}/; install them on the runner with")
    session.log(f"  python -m pip install --no-index --no-deps {options.dest}/*.whl")


if __name__ == "__main__":
    nox.main()
