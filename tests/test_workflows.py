"""The workflows run what the noxfile has, on the Pythons that the package claims."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github/workflows"
NAMES = sorted(path.name for path in FOLDER.glob("*.yml"))
SESSIONS = set(
    re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
)


def steps(name: str) -> list[dict[str, Any]]:
    workflow = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def commands(name: str) -> list[str]:
    return [line.strip() for step in steps(name) if "run" in step for line in step["run"].splitlines()]


def test_there_is_one_workflow_without_a_gpu_and_one_with() -> None:
    """These two, and no other."""
    assert NAMES == ["cpu.yml", "gpu.yml"]


@pytest.mark.parametrize("name", NAMES)
def test_every_session_that_a_workflow_runs_exists(name: str) -> None:
    """A session of `nox -s` or `make` is one of the noxfile's."""
    asked = {found for line in commands(name) for found in re.findall(r"(?:nox -s|^make) (\w+)", line)}
    assert asked
    assert asked <= SESSIONS


def test_the_cpu_workflow_runs_on_every_python_of_the_package() -> None:
    """The matrix is that of the classifiers, and an interpreter that fails hides no other."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    claimed = [found[1] for each in classifiers if (found := re.fullmatch(r".*Python :: (3\.\d+)", each))]
    strategy = yaml.safe_load((FOLDER / "cpu.yml").read_text(encoding="utf-8"))["jobs"]["cpu"]["strategy"]
    assert strategy == {"fail-fast": False, "matrix": {"python": claimed}}


def test_the_gpu_workflow_measures_judges_and_then_commits() -> None:
    """Nothing is committed that the gate has not judged, and no step goes on after one that failed."""
    said = "\n".join(commands("gpu.yml"))
    order = [said.index(part) for part in ("git status --porcelain", "make gpu", "make gate", "git add", "git push")]
    assert order == sorted(order)
    assert not any(step.get("continue-on-error") for step in steps("gpu.yml"))
    assert "|| true" not in said


def test_what_was_measured_is_kept_when_it_is_not_pushed() -> None:
    """After a gate that does not pass, or a run that is ended, the files that would be committed are uploaded."""
    *_, last = steps("gpu.yml")
    assert last["if"] == "failure() || cancelled()"
    assert last["uses"].startswith("actions/upload-artifact@")
    (added,) = (line for line in commands("gpu.yml") if line.startswith("git add "))
    assert last["with"]["path"].split() == added.split()[2:]


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_pasted_into_a_shell(name: str) -> None:
    """What a person types reaches a script as a variable, never as part of it."""
    assert not any("${{" in line for line in commands(name))
