"""`gate`, `rebaseline` and `history` on the command line: every exit code, in a repository of its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import synthetic
from git_repo import Repo, isolate

from triton_kernel_lab import artifacts, cli
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.project import Project, kernel_names

KERNEL = kernel_names()[-1]
SLOW = {f"{KERNEL}/triton": 2 * synthetic.FACTORS["triton"]}


class Lab:
    """A checkout with made-up measurements, and its command line."""

    def __init__(self, repo: Repo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.repo, self._monkeypatch, self._capsys = repo, monkeypatch, capsys

    def measure(self, seed: int, *, slow: bool = False, **facts: object) -> Project:
        plan: dict[str, object] = {"shapes": ["2048x4096"], "dtypes": ["bfloat16"], "processes": 3, "samples": 20}
        factors = SLOW if slow else {}
        found = synthetic.project(self.repo.root, derive=False, seed=seed, factors=factors, **{**plan, **facts})  # type: ignore[arg-type]
        roofline.run(found)
        self.repo.commit({})
        return found

    def __call__(self, line: str) -> tuple[int, str]:
        """The exit code of a command line, and what it printed."""
        self._monkeypatch.chdir(self.repo.root)
        self._monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *shlex.split(line)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(caught.value.code or 0), out + err


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lab:
    isolate(monkeypatch)
    return Lab(Repo(tmp_path / "repo"), monkeypatch, capsys)


def test_a_slowed_kernel_ends_with_two_and_its_restoration_with_zero(lab: Lab, tmp_path: Path) -> None:
    """The verdict names the kernel, and is written whichever way it goes."""
    lab.measure(1)
    lab.measure(2, slow=True)
    output = tmp_path / "verdict.json"
    code, said = lab(f"gate --output {shlex.quote(str(output))}")
    assert code == 2
    assert f"1 cell regressed: {KERNEL} 2048x4096 bfloat16 cold_clean" in said
    assert artifacts.read(output, "gate")["verdict"] == "regressed"
    lab.measure(3)
    code, said = lab(f"gate --output {shlex.quote(str(output))}")
    assert code == 0
    assert said.splitlines()[-1].startswith("pass: ")
    assert artifacts.read(output, "gate")["verdict"] == "pass"
    assert lab("gate --strict")[0] == 0
    assert lab("gate --base HEAD~2 --regime cold_clean")[0] == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("gate --rename nothing", "--rename: expected old=new"),
        ("gate --rename a=b", "--rename a=b: expected a to be a kernel of the base only"),
        ("gate --regime hot", "--regime: expected one of"),
        ("gate --max-regression-percent 5", "No such option"),
        ("rebaseline", "Missing option '--reason'"),
        ("rebaseline --reason ' '", "--reason: expected why the change is intended"),
        ("rebaseline --reason x", "expected cells that cannot be compared, found none"),
        ("history", "Missing option '--kernel'"),
        ("history --kernel nothing", "nothing: expected regime cold_clean in the history, found none"),
        (f"history --kernel {KERNEL} --cell 8x8", "--cell: expected a shape, a dtype and a regime"),
    ],
)
def test_a_wrong_line_is_one_sentence_and_one(lab: Lab, line: str, says: str) -> None:
    """What does not fit is named, with 1 and never with a regression's 2."""
    lab.measure(1)
    lab.measure(2)
    code, said = lab(line)
    assert code == 1
    assert says in said
    assert len(said.splitlines()) == 1


def test_what_cannot_be_compared_ends_with_three_until_it_is_accepted(lab: Lab) -> None:
    """No earlier measurement, an unknown revision, another GPU: 3; accepted with a reason: 0."""
    lab.measure(1, gpu="Other GPU")
    code, said = lab("gate")
    assert code == 3
    assert "expected an earlier version" in said
    assert lab("gate --base nothing")[0] == 3
    lab.measure(2)
    code, said = lab("gate")
    assert code == 3
    assert "- device.name: base Other GPU, current Synthetic GPU" in said
    code, said = lab("rebaseline --reason 'a new GPU'")
    assert (code, said) == (
        0,
        f"wrote artifacts/{synthetic.RUNNER}/rebaseline.json; commit it with the artifacts that it accepts\n",
    )
    code, said = lab("gate")
    assert code == 0
    assert "- rebaselined: a new GPU" in said
    assert said.splitlines()[-1].startswith("rebaselined: 0 cells compared")


def test_an_ambiguous_cell_ends_with_four_only_if_strict(lab: Lab) -> None:
    """Two processes whose times differ by a third leave everything open."""
    lab.measure(1, processes=2)
    found = lab.measure(2, processes=2)
    for kernel in kernel_names():
        synthetic.edit(found.artifacts / f"timing/{kernel}.json", _spread)
    code, said = lab("gate")
    assert code == 0
    assert said.splitlines()[-1].startswith("ambiguous: ")
    assert lab("gate --strict")[0] == 4


def _spread(artifact: artifacts.Artifact) -> None:
    for candidate in artifact["cells"][0]["candidates"]:
        candidate["runs"][0]["samples_ns"] = [ns * 4 // 3 for ns in candidate["runs"][0]["samples_ns"]]


def test_history_prints_the_series_and_draws_it(lab: Lab, tmp_path: Path) -> None:
    """One row a measurement, and the same picture each time."""
    lab.measure(1)
    lab.measure(2, slow=True)
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        line = f"history --kernel {KERNEL} --cell '2048x4096 bfloat16 cold_clean' --plot {shlex.quote(str(path))}"
        code, said = lab(line)
        assert code == 0
        assert said.startswith(f"{KERNEL} 2048x4096 bfloat16 cold_clean\ndate ")
        assert f"wrote {path}" in said
    assert first.read_bytes() == second.read_bytes()
