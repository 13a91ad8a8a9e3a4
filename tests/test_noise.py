"""The noise floor: what identical code differs by, from sessions measured now or before."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gate_data
import pytest
import synthetic
import torch

from triton_kernel_lab import artifacts, noise
from triton_kernel_lab.analysis import noise as figures
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.analysis.margins import noise_of
from triton_kernel_lab.analysis.noise import NoiseError, Session
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.cases._base import Case
from triton_kernel_lab.lab import environment, timing
from triton_kernel_lab.project import MeasureParams, Project, find_project
from triton_kernel_lab.report import noise as report

CELL = ("128x1024", "float16")


def session(*times_ns: int, name: str = "a session", **changed: Any) -> Session:
    """A session of rms_norm whose processes take these times."""
    made = gate_data.timing("rms_norm", {CELL: times_ns}, **changed)
    return Session(name, gate_data.environment(), {"rms_norm": made})


# What follows from the samples.


def test_a_session_counts_once_by_the_mean_of_its_processes_logs() -> None:
    """Sessions of 1000, 1010 and 1030 ns: their sd and their largest difference, of logs."""
    (row,) = figures.cells([session(1000, 1000), session(1000, 1020), session(1030)])
    means = [math.log(1000), (math.log(1000) + math.log(1020)) / 2, math.log(1030)]
    mean = sum(means) / 3
    assert row == {
        **dict(zip(("kernel", "shape", "dtype", "regime"), ("rms_norm", *CELL, "cold_clean"), strict=True)),
        "sessions": 3,
        "session_sd_log": round(math.sqrt(sum((value - mean) ** 2 for value in means) / 2), 6),
        "largest_aa_log": round(means[2] - means[0], 6),
    }


def test_a_cell_without_a_sound_time_in_some_session_is_left_out() -> None:
    """Such a cell stays uncalibrated; if none is left there is no floor to write."""
    failed = session(1000)
    failed.timings["rms_norm"]["cells"][0]["candidates"][0].update(status="invalid", reason="wrong")
    with pytest.raises(NoiseError, match="expected a cell with a sound time in every session"):
        figures.cells([session(1000), failed])


CHANGES: Mapping[str, tuple[Callable[[Session], object], str]] = {
    "sources": (lambda s: s.timings["rms_norm"]["producer"].update(source_sha256="b" * 64), "not identical code"),
    "protocol": (lambda s: s.timings["rms_norm"]["protocol"].update(input_sets=1), "the protocol of first"),
    "driver": (lambda s: s.environment["software"].update(driver="1.0"), "software.driver: base 580.1, current 1.0"),
    "status": (lambda s: s.timings["rms_norm"].update(status="not_measured"), "expected measured samples"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_sessions_that_differ_in_more_than_time_are_refused(change: str) -> None:
    """Other code, another protocol, machine or stack: no difference of those is noise."""
    spoil, said = CHANGES[change]
    first, second = session(1000, name="first"), session(1000, name="second")
    figures.require_alike([first, second])
    spoil(second)
    with pytest.raises(NoiseError, match=said):
        figures.require_alike([first, second])


def test_one_session_or_other_kernels_make_no_floor() -> None:
    """A spread needs two sessions of the same kernels."""
    with pytest.raises(NoiseError, match="expected two sessions or more, found 1"):
        figures.require_alike([session(1000)])
    with pytest.raises(NoiseError, match="expected the kernels of a session, rms_norm; found "):
        figures.require_alike([session(1000), session(1000)._replace(timings={})])


# From sessions that were measured before.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "tree"
    regimes = ("cold_clean", "warm")
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), samples=20, regimes=regimes).root


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Project:
    """A copy of a sound synthetic project that a test may spoil."""
    return find_project(Path(shutil.copytree(original, tmp_path / "tree")))


def kept(project: Project, folder: Path, seed: int) -> Path:
    """The folder of another session of the same project, which had other noise."""
    made = synthetic.project(
        folder,
        derive=False,
        seed=seed,
        shapes=("128x1024",),
        dtypes=("float16",),
        samples=20,
        regimes=("cold_clean", "warm"),
    )
    return made.artifacts


def test_a_floor_is_made_of_kept_sessions_without_a_device(project: Project, tmp_path: Path) -> None:
    """Two folders of timings give a floor that the gate takes for that machine, and the report prints."""
    other = kept(project, tmp_path / "other", 5)
    path = noise.from_folders(project, [project.artifacts, other])
    floor = artifacts.read(path, "noise_floor")
    assert floor["claim_kind"] == "synthetic"
    assert {(cell["regime"], cell["sessions"]) for cell in floor["cells"]} == {("cold_clean", 2), ("warm", 2)}
    assert floor["sessions"][0]["rms_norm"] == artifacts.sha256_file(project.artifacts / "timing/rms_norm.json")
    place = artifacts.read(project.artifacts / "environment.json")
    found, why = noise_of(floor, place)
    assert (len(found), why) == (len(floor["cells"]), None)
    assert "results.md" in verify.run(project)[0]
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    text = (project.reports / "results.md").read_text()
    assert "## Noise of identical code (A/A)" in text
    # The floor outlives the measurement that it was made beside.
    synthetic.edit(project.artifacts / "timing/rms_norm.json", lambda made: made["processes"][0].update(seed=1))
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []


def noisy(kernel: str, regime: str, largest_aa: float) -> dict[str, Any]:
    """A cell of a floor, whose sessions lie so far apart by logs."""
    logs = {"session_sd_log": largest_aa / 2, "largest_aa_log": largest_aa}
    return {"kernel": kernel, "shape": "3x64", "dtype": "float16", "regime": regime, "sessions": 2, **logs}


def test_the_report_shows_the_noise_of_every_regime() -> None:
    """Each cell has a row a regime, and above them stand the largest difference of each and who has no floor yet."""
    logs = {"cold_clean": (0.01, 0.004), "call": (0.02, math.log(1.25))}
    floor = {"cells": [noisy("rms_norm", regime, log) for regime, pair in logs.items() for log in pair]}
    text = report.section(floor, ["rms_norm", "swiglu", "qk_scores"])
    rows = [[each.strip() for each in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("| rms_")]
    assert [row[3] for row in rows] == ["cold_clean", "cold_clean", "call", "call"]
    assert [row[-1] for row in rows] == ["1.01 %", "0.40 %", "2.02 %", "25.00 %"]
    assert "Two sessions of it differ by up to 1.01 % in `cold_clean`, 25.00 % in `call`." in text
    assert "Measured for `rms_norm`; `swiglu`, `qk_scores` have none yet." in text


def test_the_report_names_no_kernel_without_a_floor_where_each_has_one() -> None:
    """With a floor of every kernel nothing is missing, and without any there is no section."""
    floor = {"cells": [noisy("rms_norm", "warm", 0.0)]}
    assert "Measured for `rms_norm`.\n" in report.section(floor, ["rms_norm"])
    assert "`swiglu` has none yet." in report.section(floor, ["rms_norm", "swiglu"])
    assert report.section(None, ["rms_norm"]) == report.section({"cells": []}, ["rms_norm"]) == ""


def test_a_folder_without_timings_is_named(project: Project, tmp_path: Path) -> None:
    """A path that is no session is one sentence."""
    with pytest.raises(NoiseError, match=r"empty: expected environment\.json and timing/\*\.json of one session"):
        noise.from_folders(project, [project.artifacts, tmp_path / "empty"])


def test_a_session_from_a_dirty_tree_makes_the_floor_exploratory(project: Project, tmp_path: Path) -> None:
    """The gate then keeps its wide margins."""
    other = kept(project, tmp_path / "other", 5)
    for folder in (project.artifacts, other):
        for path in (folder / "timing").glob("*.json"):
            synthetic.edit(path, lambda made: made.update(claim_kind="measured"))
    synthetic.edit(other / "timing/swiglu.json", lambda made: made.update(claim_kind="exploratory"))
    floor = artifacts.read(noise.from_folders(project, [project.artifacts, other]))
    assert floor["claim_kind"] == "exploratory"


# From sessions that are measured now.


def played(monkeypatch: pytest.MonkeyPatch, times_ns: Sequence[int], gpu: str = "Synthetic GPU") -> list[str]:
    """Let each session of a kernel take the next of these times; returns the kernels in the order of measuring."""
    order: list[str] = []
    remaining = iter(times_ns)

    def measure(case: Case, cells: object, params: MeasureParams, progress: object) -> dict[str, Any]:
        order.append(case.name)
        made = gate_data.timing(case.name, {CELL: [next(remaining)] * params.processes})
        return {name: made[name] for name in ("protocol", "processes", "cells")}

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    place = gate_data.environment()
    monkeypatch.setattr(environment, "probe", lambda device: {name: place[name] for name in ("device", "software")})
    return order


def test_sessions_are_the_outer_loop_and_carry_their_own_fingerprint(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels alternate, so that a session of each is far from its next one; the machine is probed, not assumed."""
    order = played(monkeypatch, [1000, 2000, 1010, 2000])
    floor = artifacts.read(noise.measure(project, 2, ["rms_norm", "swiglu"]), "noise_floor")
    assert order == ["rms_norm", "swiglu", "rms_norm", "swiglu"]
    by_kernel: dict[str, Artifact] = {cell["kernel"]: cell for cell in floor["cells"]}
    assert by_kernel["rms_norm"]["largest_aa_log"] == round(math.log(1.01), 6)
    assert by_kernel["swiglu"]["session_sd_log"] == 0
    assert floor["environment"]["device"] == gate_data.DEVICE
    # Outside git nobody can tell what was timed.
    assert floor["claim_kind"] == "exploratory"


def test_noise_needs_a_gpu_that_is_the_runners_and_two_sessions(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU, runner cpu or a single session: each has its sentence, and nothing is written."""
    played(monkeypatch, [], gpu="NVIDIA GeForce RTX 5070 Ti")
    with pytest.raises(NoiseError, match="runner synthetic-gpu needs its GPU, found nvidia-geforce-rtx-5070-ti"):
        noise.measure(project, 2)
    with pytest.raises(NoiseError, match="--sessions: expected 2 or more, found 1"):
        noise.measure(project, 1)
    host = synthetic.project(tmp_path / "host", derive=False, measured=False, runner="cpu")
    with pytest.raises(NoiseError, match="runner cpu has no times to differ"):
        noise.measure(host, 2)
    assert not (project.artifacts / "noise_floor.json").exists()


def test_the_section_shows_logs_in_per_cent() -> None:
    """A log sd of 0.005 is 0.50 %, and none at all is 0.00 %."""
    cells = {("rms_norm", *CELL, "warm"): (0.005, 0.01), ("swiglu", *CELL, "cold_clean"): (0.0, 0.0)}
    text = report.section(gate_data.noise_floor(cells))
    (row,) = [line for line in text.splitlines() if line.startswith("| r")]
    assert [part.strip() for part in row.strip("|").split("|")] == ["rms_norm", *CELL, "warm", "3", "0.50 %", "1.01 %"]
    assert "0.00 %" in text
    assert report.section(None) == ""
