"""`gate`, `bisect`, `rebaseline` and `history` on the command line: every exit code, in a repository of its own."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import confirm_data
import pytest
import synthetic
import torch
import typer
from git_repo import Repo, isolate

from triton_kernel_lab import artifacts, cli
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.lab import bisect, confirm
from triton_kernel_lab.project import Project, find_project, kernel_names

ROOT = Path(__file__).parents[1]

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
        ("gate --kernel rms_norm", "--kernel and --cell narrow what is timed, expected --confirm"),
        ("gate --confirm --cell 8x8", "--cell: expected a shape and a dtype, found '8x8'"),
        ("gate --confirm --base HEAD --regime hot", "--regime: expected one of"),
        ("bisect --kernel rms_norm --good HEAD", "Missing option '--bad'"),
        ("bisect --kernel nothing --good HEAD~1 --bad HEAD", "kernel nothing: expected one of"),
        ("rebaseline", "Missing option '--reason'"),
        ("rebaseline --reason ' '", "--reason: expected why the change is intended"),
        ("rebaseline --reason x", "expected cells that cannot be compared, found none"),
        ("history", "Missing option '--kernel'"),
        ("history --kernel nothing", "kernel nothing: expected one of "),
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


# With a device, which here is a made-up one.


def timed(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *sources: str) -> Lab:
    """A checkout with a commit for each source of its kernel, and an engine that reads the truth from the source."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for module in (confirm, bisect):
        monkeypatch.setattr(module, "run", functools.partial(module.run, engine=confirm_data.Engine()))
    return Lab(confirm_data.repository(root / "timed", *sources), monkeypatch, capsys)


FAST, SLOWER = confirm_data.operator(20_000), confirm_data.operator(30_000)
CELL = " ".join(confirm_data.CELL)


@pytest.mark.parametrize(
    ("now", "code", "said"),
    [
        (FAST + "# the same\n", 0, "pass: 1 cell compared with HEAD~1"),
        (SLOWER, 2, f"- 1 cell regressed: {confirm_data.KERNEL} {CELL} cold_clean"),
        (confirm_data.operator(20_000, 1.5), 2, f"- 1 cell wrong: {confirm_data.KERNEL} {CELL} cold_clean"),
    ],
    ids=["the same", "slower", "wrong"],
)
def test_confirm_ends_with_the_code_of_its_verdict(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    now: str,
    code: int,
    said: str,
) -> None:
    """The verdict is printed and written like that of the other gate, with the samples in it."""
    where, output = timed(tmp_path, monkeypatch, capsys, FAST, now), tmp_path / "confirm.json"
    line = f"gate --confirm --base HEAD~1 --kernel {confirm_data.KERNEL} --cell '{CELL}'"
    line += f" --output {shlex.quote(str(output))}"
    assert where(line)[0] == code
    assert said in where(line)[1]
    assert len(artifacts.read(output, "confirm")["processes"]) == 5


def test_confirm_leaves_an_ambiguous_cell_to_strict(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a verdict on a cell it ends with 0, and with 4 if strict."""
    where = timed(tmp_path, monkeypatch, capsys, FAST, confirm_data.operator(20_600))
    noisy = confirm_data.Engine(apart=0.08)
    monkeypatch.setattr(confirm, "run", functools.partial(confirm.run.func, engine=noisy))  # type: ignore[attr-defined]
    assert where(f"gate --confirm --base HEAD~1 --cell '{CELL}'")[0] == 0
    assert where(f"gate --confirm --base HEAD~1 --cell '{CELL}' --strict")[0] == 4


@pytest.mark.parametrize(
    "line", ["gate --confirm --base HEAD~1", f"bisect --kernel {confirm_data.KERNEL} --good HEAD~1 --bad HEAD"]
)
def test_without_a_device_both_end_with_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Nothing was compared, and one sentence says what is missing."""
    isolate(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    where = Lab(confirm_data.repository(tmp_path / "repo", FAST, SLOWER), monkeypatch, capsys)
    code, said = where(line)
    assert code == 3
    assert said.startswith("error: confirm: expected a CUDA device, found none")
    assert len(said.splitlines()) == 1


def test_bisect_names_the_commit_and_ends_with_zero_or_with_three_if_it_cannot_tell(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each commit that was asked, and the commit that it led to; several are no answer."""
    broken = "import nowhere\n"
    where = timed(tmp_path, monkeypatch, capsys, FAST, FAST + "#\n", SLOWER, broken, SLOWER + "#\n")
    asked = f"bisect --kernel {confirm_data.KERNEL} --cell '{CELL}'"
    code, said = where(f"{asked} --good HEAD~4 --bad HEAD~2")
    assert code == 0
    assert re.search(rf"^bad: [0-9a-f]{{12}} source 2: {CELL} \+\d+\.\d\d %$", said, re.MULTILINE)
    assert said.splitlines()[-1] == f"first bad commit: {where.repo.git('rev-parse', 'HEAD~2')} source 2"
    where.repo.git("checkout", "--quiet", "--detach", "HEAD~3")
    where.repo.commit({confirm_data.OP: broken})
    where.repo.commit({confirm_data.OP: SLOWER})
    code, said = where(f"{asked} --good HEAD~2 --bad HEAD")
    assert code == 3
    assert "the first bad commit is one of 2; all but the last could not be judged:" in said


# What the documents promise.


def test_the_exit_codes_of_every_command_are_documented() -> None:
    """METHODOLOGY has a row for each code, and names each command that ends with more than 0 or 1."""
    text = (ROOT / "docs/METHODOLOGY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([0-4]) \| (.*) \|$", text[text.index("## Exit codes") :], re.MULTILINE))
    assert list(rows) == ["0", "1", "2", "3", "4"]
    for code, commands in {
        "2": ("gate", "codegen", "correctness"),
        "3": ("gate", "bisect", "codegen"),
        "4": ("gate",),
    }.items():
        assert all(f"`{command}" in rows[code] for command in commands)
    named = set(re.findall(r"`([a-z]+)[ `]", " ".join(rows.values())))
    assert named <= set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


def test_f76_a_pipe_does_not_eat_the_code(lab: Lab) -> None:
    """Piped into tee under pipefail, as CI runs it, a regression still ends with 2."""
    assert "set -euo pipefail" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    lab.measure(1)
    lab.measure(2, slow=True)
    line = f"set -euo pipefail; {shlex.quote(sys.executable)} -m triton_kernel_lab gate | tee gate.txt"
    done = subprocess.run(["bash", "-c", line], cwd=lab.repo.root, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "1 cell regressed" in (lab.repo.root / "gate.txt").read_text(encoding="utf-8")


def test_f82_of_two_unlike_gpus_in_a_host_the_one_that_measures_counts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name and the facts are those of the current device, not of the first."""
    from triton_kernel_lab.lab import environment, nvml

    project = lab.measure(1)
    names = ["Other GPU", "Synthetic GPU"]
    device: dict[str, object] = synthetic.environment("Synthetic GPU")["device"]
    asked: list[int] = []

    def facts(index: int) -> dict[str, object]:
        asked.append(index)
        return {**device, "name": names[index]}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(environment, "_device", facts)
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    environment.run(find_project(project.root))
    assert asked == [1]
    written = artifacts.read(project.artifacts / "environment.json", "environment")
    assert written["device"]["name"] == "Synthetic GPU"
