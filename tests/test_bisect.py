"""`bisect`: the commit that made a kernel slower or wrong, in a repository whose truth the sources say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from confirm_data import CELL, KERNEL, OP, Engine, files, operator, repository
from git_repo import Repo, isolate

from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.lab import bisect
from triton_kernel_lab.lab.bisect import BAD, GOOD, SKIPPED, Step
from triton_kernel_lab.project import find_project
from triton_kernel_lab.report import bisect as text

FAST, SLOW, WRONG = operator(20_000), operator(24_000), operator(20_000, 1.5)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def history(root: Path, *sources: str) -> tuple[Repo, list[str]]:
    """A repository with a commit for each source, a commit that changes nothing of the kernel after each."""
    repo = repository(root, sources[0])
    commits = [repo.git("rev-parse", "HEAD")]
    for index, source in enumerate(sources[1:]):
        repo.commit({"README.md": f"{index}", "src/triton_kernel_lab/cases/other.py": f"N = {index}\n"}, "no kernel")
        commits.append(repo.commit({OP: f"{source}# {index}\n"}, f"source {index + 1}"))
    return repo, commits


def searched(repo: Repo, good: str, bad: str = "HEAD", engine: Engine | None = None) -> tuple[list[str], list[Step]]:
    steps: list[Step] = []
    found = bisect.run(find_project(repo.root), KERNEL, good, bad, [CELL], engine=engine or Engine(), log=steps.append)
    return found, steps


@pytest.mark.parametrize("first", [1, 5])
def test_the_first_slow_commit_is_found_with_few_measurements(tmp_path: Path, first: int) -> None:
    """Of six changes of the kernel it names the one from which on it is slower, asking four of them at most."""
    repo, commits = history(tmp_path / "repo", *[FAST] * first, *[SLOW] * (7 - first))
    found, steps = searched(repo, commits[0])
    assert found == [commits[first]]
    assert len(steps) <= 4
    assert (steps[0].commit, steps[0].state) == (commits[-1], BAD)
    assert steps[0].changes[CELL] == pytest.approx(20, abs=2)
    assert all((step.state == BAD) == (commits.index(step.commit) >= first) for step in steps)


def test_a_kernel_that_became_wrong_is_found_though_its_time_did_not_change(tmp_path: Path) -> None:
    """The bad side fails its oracle, so the first commit that does is looked for."""
    repo, commits = history(tmp_path / "repo", FAST, FAST, WRONG, WRONG)
    found, steps = searched(repo, commits[0])
    assert found == [commits[2]]
    assert "wrong before timing" in str(steps[0].reason)


@pytest.mark.parametrize("broken", ["def swiglu(:\n", WRONG])
def test_a_commit_that_says_nothing_is_skipped_and_told(tmp_path: Path, broken: str) -> None:
    """One that does not import, does not compile or is wrong in another way is passed over for its neighbours."""
    repo, commits = history(tmp_path / "repo", FAST, FAST, broken, FAST, SLOW, SLOW)
    found, steps = searched(repo, commits[0])
    assert found == [commits[4]]
    skipped = [step for step in steps if step.state == SKIPPED]
    assert {step.commit for step in skipped} <= {commits[2]}
    assert all(step.reason for step in skipped)


def test_where_the_neighbours_cannot_be_judged_all_of_them_are_named(tmp_path: Path) -> None:
    """The first bad commit is one of the skipped ones or the one after; none is made up."""
    repo, commits = history(tmp_path / "repo", FAST, "import nowhere\n", "import nowhere\n", SLOW)
    found, steps = searched(repo, commits[0])
    assert found == commits[1:]
    assert [step.state for step in steps] == [BAD, SKIPPED, SKIPPED]


def test_a_merge_is_one_step(tmp_path: Path) -> None:
    """The commits of a merged branch are not asked; the merge that brought them is."""
    repo, commits = history(tmp_path / "repo", FAST, FAST)
    repo.git("checkout", "--quiet", "-b", "side", commits[0])
    repo.commit({OP: operator(22_000)}, "on the branch")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--strategy-option=theirs", "--message=merge", "side")
    merge = repo.git("rev-parse", "HEAD")
    repo.commit({OP: operator(22_000) + "# later\n"}, "later")
    found, _ = searched(repo, commits[0])
    assert found == [merge]


def test_a_doubt_is_settled_by_half_of_the_change(tmp_path: Path) -> None:
    """A commit that no test places is good below half of the way and bad above it, and the step says so."""
    repo, commits = history(tmp_path / "repo", FAST, operator(20_300), operator(40_000))

    class Doubtful(Engine):
        def __call__(self, plan):  # type: ignore[no-untyped-def]
            # Noisy but for the last commit, which has to be slower beyond doubt.
            self._apart = 0.002 if commits[-1] in plan["folders"]["now"] else 0.1
            return super().__call__(plan)

    found, steps = searched(repo, commits[0], engine=Doubtful())
    assert found == [commits[2]]
    assert steps[1].state == GOOD
    assert steps[1].reason == "ambiguous, and so judged by half of the whole change"


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("HEAD", "HEAD~2", r"^bisect: expected --good HEAD to be an ancestor of --bad HEAD~2, found it is not\.$"),
        ("HEAD~1", "HEAD", r"^bisect: expected swiglu to be slower or wrong at HEAD, found it is as at HEAD~1\.$"),
        ("HEAD~2", "HEAD~1", r"^bisect: nothing that swiglu is compiled from changed from HEAD~2 to HEAD~1\.$"),
        ("HEAD", "HEAD", r"^bisect: nothing that swiglu is compiled from changed from HEAD to HEAD\.$"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence_and_three(tmp_path: Path, good: str, bad: str, said: str) -> None:
    """No ancestor, no change, no difference: each has its sentence."""
    repo, _ = history(tmp_path / "repo", FAST, FAST)
    with pytest.raises(NotComparableError, match=said) as caught:
        searched(repo, good, bad)
    assert caught.value.exit_code == 3


def test_a_kernel_that_did_not_exist_at_the_good_commit_is_named(tmp_path: Path) -> None:
    """There is nothing to be slower than."""
    repo = Repo(tmp_path / "repo")
    repo.commit({"README.md": "before"})
    repo.commit(files(FAST))
    with pytest.raises(
        NotComparableError, match=r"^bisect: expected the kernel swiglu at [0-9a-f]{12}, found none there\.$"
    ):
        searched(repo, "HEAD~1")


def test_without_a_device_it_is_one_sentence_and_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is read first, so that a useless question is told on any host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    repo, commits = history(tmp_path / "repo", FAST, SLOW)
    with pytest.raises(NotComparableError, match="expected a CUDA device"):
        bisect.run(find_project(repo.root), KERNEL, commits[0], "HEAD")


def test_lines_name_commit_state_change_and_reason() -> None:
    """What is printed for a step, for the found commit, and for several that it may be."""
    commit = "a" * 40
    assert (
        text.line(commit, "a subject", GOOD, {CELL: 0.5}, None)
        == f"good: {commit[:12]} a subject: 8x64 float16 +0.50 %"
    )
    assert text.line(commit, "a subject", SKIPPED, {}, "raised") == f"skipped: {commit[:12]} a subject: raised"
    assert text.conclusion([(commit, "a subject")]) == f"first bad commit: {commit} a subject"
    several = text.conclusion([("b" * 40, "one"), (commit, "two")])
    assert several.splitlines()[0] == "the first bad commit is one of 2; all but the last could not be judged:"
