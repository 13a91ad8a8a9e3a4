"""The nox sessions: none is green unless what it stands for has run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import nox.project
import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Stands for python, git: writes down what it was asked, prints and ends as the test says.
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$STAND_IN_LOG"
case "$*" in *pytest*) echo "TKL_EXPECT_GPU=$TKL_EXPECT_GPU" >> "$STAND_IN_LOG";; esac
case "$*" in *device_count*) echo "${STAND_IN_GPUS:-0}";; *"status --porcelain"*) printf '%s' "$STAND_IN_STATUS";; esac
[ -n "$STAND_IN_FAILS" ] && case "$*" in *"$STAND_IN_FAILS"*) exit "${STAND_IN_CODE:-1}";; esac
exit 0
"""


@dataclass
class Bench:
    """A folder with the noxfile, where `python` and `git` are stand-ins."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def nox(self, *arguments: str, **stand_in: str) -> subprocess.CompletedProcess[str]:
        told = {f"STAND_IN_{name.upper()}": value for name, value in stand_in.items()}
        path = os.pathsep.join([os.fspath(self.root / "bin"), os.defpath])
        environment = os.environ | {"PATH": path, "STAND_IN_LOG": os.fspath(self.log)} | told | self.environment
        command = [sys.executable, "-m", "nox", *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def session(self, name: str, *arguments: str, **stand_in: str) -> subprocess.CompletedProcess[str]:
        """A session as on an offline runner: in the caller's environment, nothing installed."""
        return self.nox("-s", name, "--no-venv", "--no-install", *arguments, **stand_in)

    @property
    def log(self) -> Path:
        return self.root / "log.txt"

    def asked(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    for name in ("noxfile.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("python", "git"):
        stand_in = tmp_path / "bin" / name
        stand_in.write_text(STAND_IN, encoding="utf-8")
        stand_in.chmod(0o755)
    return Bench(tmp_path)


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each, maxsplit=1)[0].lower().replace("_", "-") for each in requirements}


def test_sessions_are_those_of_the_readme(bench: Bench) -> None:
    """The noxfile has these sessions, each with a description, and runs cpu when none is named."""
    found = re.findall(r"^([*-]) (\w+) -> \S", bench.nox("--list").stdout, re.MULTILINE)
    names = ["lint", "unit", "codegen", "drift", "cpu", "repro", "gate", "gpu", "wheelhouse"]
    assert [name for _, name in found] == names
    # The list marks what runs by default, the sessions that cpu requires included.
    assert [name for mark, name in found if mark == "*"] == ["lint", "unit", "drift", "cpu"]


def test_f89_cpu_runs_lint_unit_and_drift(bench: Bench) -> None:
    """A green cpu session has run ruff, mypy, pytest, the codegen audit, the pure stages and verify."""
    done = bench.nox("-s", "cpu", "--no-venv", "--no-install")
    assert done.returncode == 0, done.stderr
    asked = "\n".join(bench.asked())
    parts = ["ruff check", "ruff format --check", "-m mypy", "-m pytest", "codegen --check", "--downstream roofline"]
    parts += ["dvc repro sources", "readme", "verify"]
    assert [part for part in parts if part not in asked] == []


@pytest.mark.parametrize("part", ["ruff format", "mypy", "pytest", "codegen", "dvc repro", "lab readme", "lab verify"])
def test_f89_cpu_is_red_when_any_part_fails(bench: Bench, part: str) -> None:
    """No part of lint, unit or drift fails without failing cpu."""
    assert bench.session("cpu", fails=part).returncode != 0


def test_f89_no_test_ran_is_a_failure(bench: Bench) -> None:
    """Pytest's code 5, no test collected, fails the session."""
    assert bench.session("unit", fails="pytest", code="5").returncode != 0


@pytest.mark.parametrize("ci", ["true", ""])
def test_f89_absent_python_is_a_failure(bench: Bench, ci: str) -> None:
    """A session whose interpreter is missing is red in CI and out of it, not skipped."""
    bench.environment["CI"] = ci
    done = bench.nox("-s", "lint", "--force-python", "3.99")
    assert done.returncode != 0
    assert "3.99 not found" in done.stderr


def test_f89_gpu_session_without_a_gpu_is_an_error(bench: Bench) -> None:
    """Without a device the GPU session fails with one sentence, and runs no test."""
    done = bench.session("gpu")
    assert done.returncode != 0
    assert "expected a CUDA device, found none" in done.stderr
    assert "skipped" not in done.stderr
    assert not any("pytest" in line for line in bench.asked())


def test_gpu_session_promises_a_gpu_and_then_measures(bench: Bench) -> None:
    """With a device the GPU tests may not skip, and `dvc repro` and the README follow."""
    assert bench.session("gpu", gpus="1").returncode == 0
    asked = bench.asked()
    tests = asked.index("python -m pytest -m gpu")
    measured = ["python -m dvc repro figures tables site readme", "python -m triton_kernel_lab readme"]
    assert asked[tests + 1 :] == ["TKL_EXPECT_GPU=1", *measured]


def test_gpu_session_does_not_measure_after_a_failed_test(bench: Bench) -> None:
    """A kernel that fails its GPU tests is not timed."""
    assert bench.session("gpu", gpus="1", fails="pytest").returncode != 0
    assert not any("dvc" in line for line in bench.asked())


def test_repro_rehearses_without_a_gpu(bench: Bench) -> None:
    """The main job without a device is the rehearsal and touches no DVC state of the tree."""
    assert bench.session("repro").returncode == 0
    assert bench.asked()[1:] == ["python -m triton_kernel_lab rehearse"]


def test_repro_measures_on_a_gpu(bench: Bench) -> None:
    """The main job with a device is `dvc repro`, with the caller's targets, then the README."""
    assert bench.session("repro", "--", "timing@swiglu", gpus="1").returncode == 0
    assert bench.asked()[1:] == ["python -m dvc repro timing@swiglu", "python -m triton_kernel_lab readme"]


def test_codegen_session_writes_the_audit(bench: Bench) -> None:
    """To accept other code is one session, which runs the stage even where DVC sees no change."""
    assert bench.session("codegen").returncode == 0
    assert bench.asked() == ["python -m dvc repro --force codegen"]


def test_chosen_tests_run_alone(bench: Bench) -> None:
    """With arguments for pytest the unit session runs those tests and no audit."""
    assert bench.session("unit", "--", "tests/test_stats.py").returncode == 0
    assert not any("codegen" in line for line in bench.asked())


def test_f83_source_archive_gets_dvc_without_git(bench: Bench) -> None:
    """In a tree without .git DVC is told so before it runs."""
    (bench.root / ".git").rmdir()
    assert bench.session("repro", gpus="1").returncode == 0
    assert bench.asked()[1:3] == [
        "python -m dvc config --local core.no_scm true",
        "python -m dvc repro figures tables site readme",
    ]


@pytest.mark.parametrize(
    ("status", "green"),
    [
        ("", True),
        ("M  reports/x/results.md\n", True),
        (" M reports/x/results.md\n", False),
        ("MM README.md\n", False),
        ("?? artifacts/x/roofline.json\n", False),
        (" D dvc.lock\n", False),
    ],
)
def test_drift_names_what_differs_from_the_index(bench: Bench, status: str, green: bool) -> None:
    """A derived file that is changed, new or gone after re-deriving is drift; a staged one is not."""
    done = bench.session("drift", status=status)
    assert (done.returncode == 0) is green
    assert green or status.split()[1] in done.stderr


@pytest.mark.parametrize("groups", [["lint"], ["pipeline"]])
def test_only_unit_and_the_measuring_sessions_install_torch(groups: list[str]) -> None:
    """Neither lint nor drift asks for torch or triton."""
    asked = [*PYPROJECT["project"]["dependencies"], *nox.project.dependency_groups(PYPROJECT, *groups)]
    assert requirement_names(asked).isdisjoint({"torch", "triton"})


def test_extra_dev_is_the_union_of_the_groups() -> None:
    """`pip install -e '.[dev]'` brings what every session needs but torch, with the same version bounds."""
    dev = PYPROJECT["project"]["optional-dependencies"]["dev"]
    assert sorted(dev) == sorted(set(nox.project.dependency_groups(PYPROJECT, "lint", "test")))


def test_every_requirement_is_pinned() -> None:
    """constraints.txt pins each requirement of the extras gpu and dev, to one release without a local label."""
    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = requirement_names([*PYPROJECT["project"]["dependencies"], *extras["gpu"], *extras["dev"]])
    assert wanted - requirement_names(lines) == set()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_passes_any_session_through() -> None:
    """`make SESSION` keeps a pinned nox in .venv and runs that session, with ARGS as its arguments."""
    command = ["make", "--dry-run", "--always-make", "gate", "ARGS=--base main"]
    # A make that runs these tests must not pass its flags on.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert said[0] == "python3 -m venv .venv"
    assert "--constraint constraints.txt nox" in said[1]
    assert said[-1] == ".venv/bin/nox -s gate -- --base main"
