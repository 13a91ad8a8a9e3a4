"""`gate --confirm`: two commits timed in turns, on a made-up device whose truth the sources say."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from confirm_data import CELL, KERNEL, OP, Engine, operator, repository
from git_repo import Repo, isolate

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import confirm as judging
from triton_kernel_lab.analysis.pairing import RenameError
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.analysis.tests_of_means import ALPHA, Moments, decide_paired
from triton_kernel_lab.analysis.verdicts import exit_code
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.lab import confirm
from triton_kernel_lab.lab.confirm import Request
from triton_kernel_lab.lab.timing import MeasurementError
from triton_kernel_lab.project import find_project
from triton_kernel_lab.report.verdict import render

FAST, SLOW = operator(20_000), operator(40_000)
NAME = f"{KERNEL} {CELL[0]} {CELL[1]} cold_clean"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    # Compiled files of one version would be taken for the next one's: they differ by less than a time stamp tells.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def confirmed(repo: Repo, engine: Engine | None = None, base: str | None = "HEAD~1", **asked: Any) -> Artifact:
    """A verdict that has passed its own schema, and whose text could be printed."""
    request = Request(base, **{"cells": [CELL], **asked})
    verdict = confirm.run(find_project(repo.root), request, engine=engine or Engine())
    artifacts.validate(verdict, "confirm", "verdict")
    assert render(verdict).splitlines()[-1].startswith(f"{verdict['verdict']}: ")
    return verdict


def outcome(verdict: Artifact) -> tuple[str, int, list[str]]:
    return verdict["verdict"], exit_code(verdict), [row["verdict"] for row in verdict["cells"]]


def test_a_planted_slowdown_ends_with_two_and_names_the_cell(tmp_path: Path) -> None:
    """Twice the time is a regression, and the first line that wants attention names where."""
    verdict = confirmed(repository(tmp_path / "repo", FAST, SLOW))
    assert outcome(verdict) == ("regressed", 2, ["REGRESSED"])
    assert verdict["reasons"] == [f"1 cell regressed: {NAME}"]
    (row,) = verdict["cells"]
    assert row["change_percent"] == pytest.approx(100, abs=2)
    assert abs(row["control_percent"]) < 1
    assert (row["margin_percent"], row["margin_source"], row["pairs"]) == (3.0, "minimum", 5)
    assert verdict["timer_quantum_ns"] == 32


@pytest.mark.parametrize(
    ("now", "found"), [(FAST + "# the same\n", "EQUIVALENT"), (operator(10_000), "IMPROVED"), (SLOW, "REGRESSED")]
)
def test_only_slower_code_fails(tmp_path: Path, now: str, found: str) -> None:
    """Code that does the same passes as code that got faster does."""
    verdict = confirmed(repository(tmp_path / "repo", FAST, now))
    assert outcome(verdict)[2] == [found]
    assert exit_code(verdict) == (2 if found == "REGRESSED" else 0)


def test_noise_leaves_a_doubt_that_only_strict_fails(tmp_path: Path) -> None:
    """Versions that sit in memory by chance, far apart in each process: no verdict, and 4 if strict."""
    verdict = confirmed(repository(tmp_path / "repo", FAST, operator(20_600)), Engine(apart=0.08))
    assert outcome(verdict) == ("ambiguous", 0, ["AMBIGUOUS"])
    assert exit_code(verdict, strict=True) == 4
    assert "not beyond doubt with 5 pairs" in verdict["cells"][0]["reason"]


def test_what_a_process_does_to_both_versions_cancels(tmp_path: Path) -> None:
    """Processes differ by several per cent; a change of 5 % shows all the same, since both are in each."""
    verdict = confirmed(repository(tmp_path / "repo", FAST, operator(21_000)))
    times = [run["samples_ns"] for run in verdict["raw"][0]["versions"]["base"]["runs"]]
    means = sorted(sum(samples) / len(samples) for samples in times)
    assert means[-1] / means[0] > 1.02
    assert outcome(verdict)[2] == ["REGRESSED"]


@pytest.mark.parametrize(
    ("base", "now", "found", "code", "said"),
    [
        (FAST, operator(20_000, 1.5), "CORRECTNESS_FAIL", 2, "wrong before timing: worst element off"),
        (FAST, FAST.replace("return", "raise OSError('no') #"), "CORRECTNESS_FAIL", 2, "raised OSError: no"),
        (operator(20_000, 1.5), FAST, "NOT_COMPARABLE", 3, "the base wrong before timing: worst element off"),
        (FAST.replace("def", "import nowhere\ndef", 1), FAST, "NOT_COMPARABLE", 3, "raised ModuleNotFoundError"),
    ],
)
def test_a_version_that_is_wrong_is_not_timed(
    tmp_path: Path, base: str, now: str, found: str, code: int, said: str
) -> None:
    """A wrong tree is a failure whatever its time; a wrong base is nothing to compare with."""
    verdict = confirmed(repository(tmp_path / "repo", base, now))
    assert outcome(verdict)[1:] == (code, [found])
    assert said in verdict["cells"][0]["reason"]
    assert all(not version["runs"] for version in verdict["raw"][0]["versions"].values())


def test_a_version_that_leaves_triton_is_not_compared(tmp_path: Path) -> None:
    """A time of the PyTorch fallback is no time of the kernel."""
    leaving = "    from triton_kernel_lab import routing\n    raise routing.FallbackError('not served by Triton')\n"
    left = FAST.replace("    made_up_clock", f"{leaving}    made_up_clock")
    verdict = confirmed(repository(tmp_path / "repo", FAST, left))
    assert outcome(verdict)[1:] == (3, ["NOT_COMPARABLE"])
    assert "the current side: raised FallbackError: not served by Triton" in verdict["cells"][0]["reason"]


def test_uncommitted_changes_are_what_is_judged(tmp_path: Path) -> None:
    """The current side is the tree as it lies there, and the verdict says that it was dirty."""
    repo = repository(tmp_path / "repo", FAST)
    repo.write(OP, SLOW)
    verdict = confirmed(repo, base="HEAD")
    assert outcome(verdict)[1] == 2
    assert verdict["producer"]["git_tree_dirty"] is True


def test_kernels_of_the_same_sources_are_not_timed_unless_named(tmp_path: Path) -> None:
    """That equal sources compile to equal code needs no measurement; asked by name, it is measured."""
    repo = repository(tmp_path / "repo", FAST)
    repo.commit({"README.md": "text"})
    engine = Engine()
    verdict = confirmed(repo, engine)
    assert outcome(verdict) == ("pass", 0, ["EQUIVALENT"])
    assert (verdict["compared"], engine.plans, verdict["raw"]) == (0, [], [])
    assert verdict["reasons"] == [f"1 cell not timed, since nothing that {KERNEL} is compiled from changed"]
    assert confirmed(repo, engine, kernels=[KERNEL])["compared"] == 1


def test_a_changed_launch_table_or_shared_module_is_timed(tmp_path: Path) -> None:
    """What a kernel is compiled from is its operator, all that it imports and its launch table."""
    repo = repository(tmp_path / "repo", FAST)
    for name in ("ops/launch/swiglu.json", "ops/_launch.py", f"ops/{KERNEL}.py"):
        where = f"src/triton_kernel_lab/{name}"
        repo.commit({where: (repo.root / where).read_text(encoding="utf-8") + "\n"})
        assert confirmed(repo)["compared"] == 1
    repo.commit(
        {
            "src/triton_kernel_lab/cases/swiglu.py": (repo.root / "src/triton_kernel_lab/cases/swiglu.py").read_text()
            + "\n"
        }
    )
    assert confirmed(repo)["compared"] == 0


def test_a_case_without_an_operator_of_its_own_is_compiled_from_the_one_that_it_calls(tmp_path: Path) -> None:
    """A changed operator or launch table of another kernel is a change of the case that imports it."""
    repo = repository(tmp_path / "repo", FAST)
    package = repo.root / "src/triton_kernel_lab"
    (package / "cases/borrowing.py").write_text(
        f"from triton_kernel_lab.ops.{KERNEL} import swiglu\n", encoding="utf-8"
    )
    seen = {confirm.compiled_from(repo.root, "borrowing")}
    for name in (f"ops/{KERNEL}.py", f"ops/launch/{KERNEL}.json"):
        with (package / name).open("a", encoding="utf-8") as stream:
            stream.write("\n")
        seen.add(confirm.compiled_from(repo.root, "borrowing"))
    assert len(seen - {None}) == 3
    assert confirm.compiled_from(repo.root, "absent") is None


def test_a_kernel_that_the_base_does_not_have_is_new(tmp_path: Path) -> None:
    """It is listed and fails nothing, but where it is all there is nothing was compared."""
    repo = repository(tmp_path / "repo", FAST)
    repo.commit({"src/triton_kernel_lab/cases/__init__.py": "KERNELS: list[str] = []\n"})
    repo.commit({"src/triton_kernel_lab/cases/__init__.py": f'KERNELS: list[str] = ["{KERNEL}"]\n'})
    verdict = confirmed(repo)
    assert outcome(verdict) == ("not_comparable", 3, ["NEW"])
    assert f"1 cell new: {NAME}" in verdict["reasons"]


def test_f73_a_kernel_that_only_the_base_has_is_named_and_fails(tmp_path: Path) -> None:
    """A kernel does not leave the comparison by losing its name, unless the other name is told."""
    repo = repository(tmp_path / "repo", FAST)
    registry = "src/triton_kernel_lab/cases/__init__.py"
    repo.commit({registry: f'KERNELS: list[str] = ["{KERNEL}", "gone"]\n'})
    repo.commit({registry: f'KERNELS: list[str] = ["{KERNEL}"]\n'})
    verdict = confirmed(repo)
    assert (verdict["verdict"], exit_code(verdict), verdict["missing"]) == ("not_comparable", 3, ["gone"])
    assert any("only the base has gone" in reason for reason in verdict["reasons"])
    assert exit_code(confirmed(repo, kernels=[KERNEL])) == 0


def test_a_renamed_kernel_is_compared_with_its_old_self(tmp_path: Path) -> None:
    """With --rename the base is asked for the old name, and a rename that fits neither side is refused."""
    repo = repository(tmp_path / "repo", FAST)
    files = {
        name: (repo.root / f"src/triton_kernel_lab/{name}").read_text()
        for name in (f"ops/{KERNEL}.py", f"cases/{KERNEL}.py", "ops/launch/swiglu.json")
    }
    old = {name.replace(KERNEL, "old"): text.replace(f"ops.{KERNEL}", "ops.old") for name, text in files.items()}
    registry = "src/triton_kernel_lab/cases/__init__.py"
    repo.commit(
        {f"src/triton_kernel_lab/{name}": text for name, text in old.items()}
        | {registry: 'KERNELS: list[str] = ["old"]\n'}
    )
    repo.commit({registry: f'KERNELS: list[str] = ["{KERNEL}"]\n', OP: SLOW})
    verdict = confirmed(repo, renames={"old": KERNEL})
    assert outcome(verdict)[1:] == (2, ["REGRESSED"])
    assert verdict["cells"][0]["renamed_from"] == "old"
    with pytest.raises(RenameError, match="--rename a=b"):
        confirmed(repo, renames={"a": "b"})


# What is measured.


def test_each_of_at_least_five_processes_loads_the_versions_in_another_order(tmp_path: Path) -> None:
    """params.yaml may ask for more processes than five, never for fewer; seeds lie apart."""
    repo = repository(tmp_path / "repo", FAST, SLOW)
    project, engine = find_project(repo.root), Engine()
    few = dataclasses.replace(project, measure=dataclasses.replace(project.measure, processes=2))
    confirm.run(few, Request("HEAD~1", cells=[CELL]), engine=engine)
    assert [plan["index"] for plan in engine.plans] == list(range(confirm.LEAST_PROCESSES))
    assert len({plan["seed"] for plan in engine.plans}) == 5
    more = dataclasses.replace(project, measure=dataclasses.replace(project.measure, processes=7))
    assert len(confirm.run(more, Request("HEAD~1", cells=[CELL]), engine=engine)["processes"]) == 7


def test_what_fails_in_one_process_has_failed(tmp_path: Path) -> None:
    """An output that is wrong in the third process alone voids the cell."""

    class Flaky(Engine):
        def __call__(self, plan: Any) -> dict[str, Any]:
            found = super().__call__(plan)
            if plan["index"] == 2:
                found["cells"][0]["versions"]["now"] |= {"status": "wrong", "reason": "wrong after timing: once"}
            return found

    verdict = confirmed(repository(tmp_path / "repo", FAST, FAST + "#\n"), Flaky())
    assert outcome(verdict)[1:] == (2, ["CORRECTNESS_FAIL"])
    assert verdict["cells"][0]["reason"] == "wrong after timing: once"


def test_a_process_that_dies_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last line of its error stream is told, with its number."""

    def dies(command: list[str], **options: Any) -> Any:
        plan = json.loads(Path(command[3]).read_text())
        assert plan["cells"] == [{"kernel": KERNEL}]
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no memory\n")

    monkeypatch.setattr(subprocess, "run", dies)
    params = find_project(repository_root(tmp_path)).measure
    with pytest.raises(MeasurementError, match=r"^confirm: process 0 failed: RuntimeError: no memory\n"):
        confirm.measure({}, [{"kernel": KERNEL}], params, ["cold_clean"])


def repository_root(folder: Path) -> Path:
    (folder / "params.yaml").write_text(Path(__file__).parents[1].joinpath("params.yaml").read_text())
    (folder / "dvc.yaml").write_text("stages: {}\n")
    return folder


def test_the_base_is_the_last_measurement_that_the_tree_is_not(tmp_path: Path) -> None:
    """With sources that changed since, that of the published times; where they did not, the one before."""
    repo = repository(tmp_path / "repo", FAST)
    project = find_project(repo.root)
    timing = f"artifacts/{project.runner}/timing/{KERNEL}.json"

    def published() -> str:
        from triton_kernel_lab.sources import stage_digest

        return json.dumps({"producer": {"source_sha256": stage_digest(repo.root, "timing", KERNEL)}})

    first = repo.commit({timing: published()})
    repo.commit({"README.md": "later"})
    repo.commit({OP: SLOW})
    assert confirm.base_of(project, None) == first
    repo.commit({timing: published()})
    assert confirm.base_of(project, None) == first
    assert confirm.base_of(project, "HEAD") == repo.git("rev-parse", "HEAD")


# Judging.


def cell(base: list[int], now: list[int], control: list[int] | None = None, **changed: Any) -> dict[str, Any]:
    """A cell in which every sample of a process takes the same time."""

    def version(times: list[int]) -> dict[str, Any]:
        flags: dict[str, list[int]] = {name: [] for name in ("launch_exposed", "clock_low", "power_cap", "thermal")}
        runs = [
            {"regime": "cold_clean", "process": index, "calls_per_sample": 1, "samples_ns": [ns] * 20, "flags": flags}
            for index, ns in enumerate(times)
        ]
        return {"status": "ok", "reason": None, "launch": None, "runs": runs}

    versions = {"base": version(base), "now": version(now), "control": version(control or base)}
    names = {"kernel": KERNEL, "base_kernel": KERNEL, "shape": CELL[0], "dtype": CELL[1]}
    return names | {"versions": versions} | changed


def verdict_of(*arguments: Any) -> dict[str, Any]:
    (row,) = judging.judge([cell(*arguments)], ["cold_clean"])
    return row


STEADY = [20_000, 20_800, 19_200, 20_064, 19_936]


def scaled(times: list[int], factor: float) -> list[int]:
    return [32 * round(ns * factor / 32) for ns in times]


def test_a_control_that_is_apart_from_the_base_widens_the_margin() -> None:
    """If the base seems 4 % slower than itself, 5 % say nothing of the tree."""
    control = scaled(STEADY, 1.04)
    row = verdict_of(STEADY, scaled(STEADY, 1.05), control)
    assert row["margin_source"] == "control"
    assert row["margin_percent"] == pytest.approx(6, abs=0.3)
    assert row["verdict"] != "REGRESSED"
    assert verdict_of(STEADY, scaled(STEADY, 1.15), control)["verdict"] == "REGRESSED"


def test_a_margin_is_no_finer_than_the_timer() -> None:
    """At 1 us two ticks of 32 ns are 6.4 %, which is what a change must pass."""
    short = [992, 1024, 960, 992, 1024]
    row = verdict_of(short, [ns + 64 for ns in short])
    assert (row["margin_source"], row["verdict"]) == ("quantum", "AMBIGUOUS")
    assert row["margin_percent"] == pytest.approx(6.4, abs=0.1)


def test_the_timer_is_no_source_of_certainty() -> None:
    """Pairs that agree to the nanosecond have the spread of the timer's step, not none."""
    row = verdict_of([1024] * 5, [1024 + 96] * 5)
    assert 0 < row["p_regressed"] < 0.05
    assert verdict_of([3200] * 5, [3200] * 5)["verdict"] == "EQUIVALENT"


@pytest.mark.parametrize(
    ("base", "now", "said"),
    [
        (STEADY[:2], STEADY[:2], "expected at least 3 processes with sound times, found 2"),
        (STEADY[:3], STEADY[3:], "expected at least 3 processes with sound times, found 2"),
        ([], STEADY, "the base was not timed in regime cold_clean"),
        (STEADY, [], "the current side was not timed in regime cold_clean"),
    ],
)
def test_too_few_pairs_are_not_compared(base: list[int], now: list[int], said: str) -> None:
    """Without at least three processes in which each version has a time there is no test."""
    row = verdict_of(base, now)
    assert (row["verdict"], row["reason"]) == ("NOT_COMPARABLE", said)


def test_flagged_samples_void_a_cell() -> None:
    """More than a tenth of samples taken on a slowed clock is no measurement."""
    found = cell(STEADY, STEADY)
    for run in found["versions"]["now"]["runs"]:
        run["flags"] = run["flags"] | {"clock_low": [0, 1, 2]}
    (row,) = judging.judge([found], ["cold_clean"])
    assert row["verdict"] == "NOT_COMPARABLE"
    assert "flagged" in row["reason"]


def test_many_cells_are_corrected_for_their_number() -> None:
    """A change that is shown when it is alone is not among sixty cells of which it is the only one."""
    slight = [round(ns * factor) for ns, factor in zip(STEADY, (1.05, 1.06, 1.08, 1.045, 1.07), strict=True)]
    alone = verdict_of(STEADY, slight)
    assert alone["verdict"] == "REGRESSED"
    noisy = [scaled(STEADY, 1.0) for _ in range(59)]
    cells = [cell(STEADY, slight)] + [cell(STEADY, each, shape=f"{n}x64") for n, each in enumerate(noisy, 9)]
    among = judging.judge(cells, ["cold_clean"])[0]
    assert among["p_regressed"] > alone["p_regressed"]
    assert among["verdict"] == "AMBIGUOUS"


def paired(change: float, spread: float, seed: int, pairs: int = 5, suites: int = 1000) -> Any:
    """The answers to suites of 60 cells whose differences from process to process spread by so much."""
    drawn = change + spread * np.random.default_rng(seed).standard_normal((suites, 60, pairs))
    moments = Moments(drawn.mean(axis=-1), drawn.std(axis=-1, ddof=1), np.full((suites, 60), float(pairs)))
    return decide_paired(moments, np.full(60, math.log1p(0.03)))


@pytest.mark.parametrize("spread", [0.001, 0.007, 0.025])
def test_f75_identical_code_fails_fewer_than_one_suite_in_a_hundred(spread: float) -> None:
    """Even where nothing cancels and two versions in a process spread like two processes."""
    answers = paired(0.0, spread, 1)
    for claimed in (answers.regressed, answers.improved):
        assert (claimed <= ALPHA).any(axis=-1).mean() < 0.01


def test_five_pairs_find_five_per_cent_where_a_process_holds_still() -> None:
    """Pairs that spread by half a per cent show 5 % in nearly every cell; identical cells are called the same."""
    slower = paired(math.log(1.05), 0.005, 2)
    assert (slower.regressed <= ALPHA).mean() > 0.95
    assert (paired(0.0, 0.005, 3).equivalent <= ALPHA).mean() > 0.95


# Where it cannot be had.


def test_without_a_device_it_is_one_sentence_and_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed without a GPU, and the error says what works without one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    repo = repository(tmp_path / "repo", FAST, SLOW)
    with pytest.raises(NotComparableError, match=r"^confirm: expected a CUDA device, found none") as caught:
        confirm.run(find_project(repo.root), Request("HEAD~1"))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kernels": ["nothing"]}, "kernel nothing: expected one of"),
        ({"cells": [("8", "float16")]}, "shape 8: expected MxF, found 1 numbers"),
        ({"cells": [("8x8", "float8")]}, "--cell: dtype float8: expected one of"),
        ({"regimes": ["hot"]}, "--regime: expected one of"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    """A kernel, shape, dtype or regime that does not exist is a sentence, before anything is timed."""
    repo, engine = repository(tmp_path / "repo", FAST, SLOW), Engine()
    with pytest.raises(ValueError, match=said):
        confirmed(repo, engine, **asked)
    assert engine.plans == []


def test_a_cell_is_a_shape_and_a_dtype() -> None:
    """Another number of words is refused with the text."""
    assert confirm.parse_cells(["8x8 float16"]) == [("8x8", "float16")]
    with pytest.raises(ValueError, match=r"--cell: expected a shape and a dtype, found '8x8'\.$"):
        confirm.parse_cells(["8x8"])
