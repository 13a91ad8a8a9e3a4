"""The cross-check with NVBench: what is asked of it, what follows from the samples, how it is reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate_data
import pytest
import synthetic
import torch
from operator_checks import DEVICE

from triton_kernel_lab import artifacts, crosscheck
from triton_kernel_lab.analysis import crosscheck as figures
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.crosscheck import CrosscheckError
from triton_kernel_lab.lab import nvbenched, nvml
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report import crosscheck as report
from triton_kernel_lab.sources import stage_digest


def cell(clean_ns: int = 5000, dirty_ns: int = 5200, nvbench: list[int] | None = None) -> dict[str, Any]:
    """A measured cell as the process hands it over."""
    runs = [*gate_data.runs([clean_ns]), *gate_data.runs([dirty_ns], "cold_dirty")]
    name = {"kernel": "rms_norm", "shape": "128x1024", "dtype": "float16"}
    return name | {"runs": runs, "nvbench_samples_ns": [4990, 5150, 5160] if nvbench is None else nvbench}


# What follows from the samples.


def test_the_figures_are_the_medians_and_their_ratios() -> None:
    """5150 ns against 5000 clean and 5200 dirty."""
    assert figures.derived(cell()) == {
        "cold_clean_p50_ns": 5000,
        "cold_dirty_p50_ns": 5200,
        "nvbench_p50_ns": 5150,
        "nvbench_over_cold_clean_ratio": 1.03,
        "nvbench_over_cold_dirty_ratio": 0.9904,
    }


def test_what_was_not_sampled_has_no_ratio() -> None:
    """Where NVBench gave up, or our windows are all flagged, a figure is null and never 0."""
    assert figures.derived(cell(nvbench=[]))["nvbench_over_cold_clean_ratio"] is None
    flagged = cell()
    flagged["runs"][0]["flags"]["launch_exposed"] = list(range(gate_data.SAMPLES))
    found = figures.derived(flagged)
    assert (found["cold_clean_p50_ns"], found["nvbench_over_cold_clean_ratio"]) == (None, None)
    assert found["nvbench_over_cold_dirty_ratio"] == 0.9904


def timed(kernel: str, dirty_ns: int | None, nvbench_ns: int | None, shape: str = "3x64") -> dict[str, Any]:
    """A cell by its figures alone."""
    over = round(nvbench_ns / dirty_ns, 4) if dirty_ns and nvbench_ns else None
    p50s = {"cold_clean_p50_ns": dirty_ns, "cold_dirty_p50_ns": dirty_ns, "nvbench_p50_ns": nvbench_ns}
    ratios = {"nvbench_over_cold_clean_ratio": over, "nvbench_over_cold_dirty_ratio": over}
    return {"kernel": kernel, "shape": shape, "dtype": "float16", **p50s, **ratios}


def test_long_cells_are_compared_by_their_share_and_short_ones_by_nanoseconds() -> None:
    """From 10 us on five per cent are agreement, exactly five too; below it, and without a time, no share is made."""
    pairs = [(10_000, 10_500), (10_000, 10_501), (20_000, 18_999), (9_999, 20_000), (5_000, 4_900)]
    found = figures.agreement([*(timed("k", *pair) for pair in pairs), timed("k", None, 5), timed("k", 5, None)])
    assert [each["nvbench_p50_ns"] for each in found.close] == [10_500]
    assert [each["nvbench_p50_ns"] for each in found.far] == [10_501, 18_999]
    assert (found.offsets_ns, found.untimed) == ([10_001, -100], 2)


# What is asked of NVBench.


class Nvbench(types.ModuleType):
    """Plays cuda.bench and its results: runs each registered benchmark, notes it, hands back made-up samples."""

    def __init__(self) -> None:
        super().__init__("cuda.bench")
        self.State = object
        self.registered: dict[str, Callable[[Any], None]] = {}
        self.argv: list[str] = []
        self.calls = 0
        self.log: list[Any] = []
        self.timer = types.SimpleNamespace(start=lambda: self.log.append("start"), stop=lambda: self.log.append("stop"))

    def register(self, benchmark: Callable[[Any], None]) -> Any:
        def set_name(name: str) -> None:
            self.registered[name] = benchmark

        return types.SimpleNamespace(set_name=set_name)

    def run_all_benchmarks(self, argv: list[str]) -> None:
        self.argv = argv
        for benchmark in self.registered.values():
            benchmark(self._state())

    def _state(self) -> Any:
        def execute(launch: Callable[..., None], batched: bool, timer: bool = False) -> None:
            assert batched is False
            launch(None, *([self.timer] if timer else []))
            self.calls += 1

        stream = types.SimpleNamespace(addressof=lambda: 4096)
        return types.SimpleNamespace(get_stream=lambda: stream, exec=execute)

    def from_json(self, path: Path) -> dict[str, Any]:
        assert self.argv[-1] == str(path)
        return {name: [types.SimpleNamespace(samples=[5.15e-6, 4.99e-6])] for name in self.registered}


@pytest.fixture
def nvbench(monkeypatch: pytest.MonkeyPatch) -> Nvbench:
    made = Nvbench()
    results = types.ModuleType("cuda.bench.results")
    results.BenchmarkResult = made  # type: ignore[attr-defined]  # Plays the class and what it makes.
    package = types.ModuleType("cuda")
    package.bench = made  # type: ignore[attr-defined]
    for name, module in {"cuda": package, "cuda.bench": made, "cuda.bench.results": results}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address: address)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvbenched, "_device", lambda: DEVICE)

    class On:
        def __init__(self, stream: int) -> None:
            assert stream == 4096

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "stream", On)
    return made


def test_nvbench_runs_every_cell_on_its_own_stream(nvbench: Nvbench) -> None:
    """Each cell is one benchmark of the operator itself; seconds come back as whole nanoseconds."""
    cells = [
        {"kernel": "rms_norm", "dims": [3, 63], "dtype": "float16"},
        {"kernel": "swiglu", "dims": [3, 63], "dtype": "float32"},
    ]
    assert nvbenched.theirs(cells, 60, seed=7, long=[False, False]) == [[5150, 4990], [5150, 4990]]
    assert nvbench.calls == 2
    assert nvbench.log == []
    assert nvbench.argv[1:5] == ["--stopping-criterion", "sample-count", "--target-samples", "60"]


@pytest.mark.parametrize(("capped", "rests"), [(0, []), (2, [0.02, 0.04]), (99, [0.02, 0.04, 0.08, 0.16])])
def test_nvbench_rests_where_our_windows_would(
    capped: int, rests: list[float], nvbench: Nvbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a long call, outside its timer, and until the driver names no limit or half a second is over."""
    readings = iter([("power_cap",)] * capped + [()] * 9)
    monkeypatch.setattr(nvml, "read", lambda index: types.SimpleNamespace(reasons=next(readings)))
    monkeypatch.setattr(nvbenched, "sleep", nvbench.log.append)
    cell = {"kernel": "rms_norm", "dims": [3, 63], "dtype": "float16"}
    nvbenched.theirs([cell], 60, seed=7, long=[True])
    assert nvbench.log == [*rests, "start", "stop"]


def test_without_nvbench_the_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing or has no build for this CUDA is a reason, and nothing is timed."""
    monkeypatch.setitem(sys.modules, "cuda.bench", None)
    plan, output = tmp_path / "plan.json", tmp_path / "out.json"
    plan.write_text("{}")
    assert nvbenched.main([str(plan), str(output)]) == 0
    made = json.loads(output.read_text())
    assert made["cells"] == []
    assert made["unavailable"].startswith(("ModuleNotFoundError: ", "ImportError: "))


# The command.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "tree"
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20).root


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Project:
    """A copy of a sound synthetic project that a test may spoil."""
    return find_project(Path(shutil.copytree(original, tmp_path / "tree")))


def played(monkeypatch: pytest.MonkeyPatch, result: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Let the measuring process end with this result, or fail for None; returns the plans it is given."""
    plans: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "triton_kernel_lab.lab.nvbenched"]
        plans.append(json.loads(Path(command[3]).read_text()))
        if result is not None:
            Path(command[4]).write_text(json.dumps(result))
        return subprocess.CompletedProcess(
            command, 0 if result else 1, "", "" if result else "x\nRuntimeError: broken\n"
        )

    monkeypatch.setattr(crosscheck, "subprocess", types.SimpleNamespace(run=run))
    return plans


def test_the_artifact_holds_samples_and_figures(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed cell is asked for, and what comes back is written with its medians."""
    plans = played(monkeypatch, {"unavailable": None, "version": "0.3.0", "cells": [cell()]})
    made = artifacts.read(crosscheck.run(project, ["rms_norm"]), "crosscheck")
    assert made["status"] == "measured"
    assert made["protocol"]["nvbench_version"] == "0.3.0"
    assert made["cells"][0]["nvbench_over_cold_dirty_ratio"] == 0.9904
    assert {entry["kernel"] for entry in plans[0]["cells"]} == {"rms_norm"}
    # Outside git nobody can tell what was timed, but by the sources of each kernel.
    assert made["claim_kind"] == "exploratory"
    assert made["kernel_sources_sha256"] == {"rms_norm": stage_digest(project.root, "correctness", "rms_norm")}


def test_an_unavailable_nvbench_is_a_status(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact says why there is nothing to compare with, and the report prints it."""
    played(monkeypatch, {"unavailable": "ImportError: no build", "version": None, "cells": []})
    made = artifacts.read(crosscheck.run(project))
    assert (made["status"], made["cells"]) == ("unavailable", [])
    said = "Not measured (unavailable): NVBench does not import: ImportError: no build."
    assert report.section(made, {}).endswith(said)
    assert report.sentence(made, []) == said


def test_runner_cpu_is_not_asked(tmp_path: Path) -> None:
    """Without a GPU the artifact says not_requested."""
    found = synthetic.project(tmp_path, derive=False, measured=False, runner="cpu")
    assert artifacts.read(crosscheck.run(found))["status"] == "not_requested"


def test_a_failed_process_leaves_the_old_artifact(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash is one sentence with the process's last line, and nothing is overwritten."""
    played(monkeypatch, None)
    with pytest.raises(CrosscheckError, match="the measuring process failed: RuntimeError: broken"):
        crosscheck.run(project)
    assert not (project.artifacts / "crosscheck.json").exists()


# The report, and the chain behind it.


def crosschecked(*cells: dict[str, Any], **facts: Any) -> Artifact:
    """What a report reads of a measured cross-check."""
    protocol = {"sweep_bytes": 1, "samples": 100, "nvbench_version": "0.3.0"}
    return {
        "status": "measured",
        "reason": None,
        "producer": {"git_commit": None},
        "protocol": protocol,
        "cells": list(cells),
        **facts,
    }


def checked(**digests: str) -> dict[str, Artifact]:
    """The correctness artifact of each kernel, as far as a report looks: the digest of its sources."""
    return {kernel: {"producer": {"source_sha256": digest}} for kernel, digest in digests.items()}


def test_cells_of_a_kernel_that_is_not_published_are_left_out_and_named() -> None:
    """What waits for a measurement was timed as it was then: no row, no part in the agreement, and a sentence."""
    made = crosschecked(timed("rms_norm", 20_000, 20_100), *(timed("flash_attention", 20_000, n) for n in (1, 2)))
    text = report.section(made, checked(rms_norm="a"))
    assert "| flash_attention" not in text
    assert "In 1 of 1 cell that take" in text
    assert "Left out, because the registry does not publish them: `flash_attention` (2 cells)." in text
    assert "Left out" not in report.section(crosschecked(timed("rms_norm", 20_000, 20_100)), checked(rms_norm="a"))


def test_the_agreement_says_how_many_which_not_and_by_how_many_nanoseconds() -> None:
    """One sentence counts the long cells and names those that lie apart, one spans the offsets of the short ones."""
    long = [timed("rms_norm", 20_000, 20_100), timed("rms_norm", 20_000, 22_000, "9x9")]
    short = [timed("swiglu", 5_000, 4_900), timed("swiglu", 5_000, 5_400)]
    said = (
        "In 1 of 2 cells that take 10 us or more in `cold_dirty`, NVBench's median lies within 5 % of our p50 there; "
        "not in `rms_norm` 9x9 float16 (1.10). Below 10 us, in 2 cells, NVBench reads from 100 ns less to 400 ns more. "
        "Not counted: 1 cell without a sound time on one side or both."
    )
    made = crosschecked(*long, *short, timed("swiglu", None, 3))
    assert said in report.section(made, checked(rms_norm="a", swiglu="b"))
    assert report.sentence(made, ["rms_norm", "swiglu"]) == said
    assert report.sentence(crosschecked(short[0]), ["swiglu"]) == "Below 10 us, in 1 cell, NVBench reads 100 ns less."


def test_nothing_to_compare_claims_no_agreement() -> None:
    """Without a cell of a published kernel there is a sentence in place of figures, what was left out, and no table."""
    made = crosschecked(timed("flash_attention", 20_000, 20_000))
    assert report.sentence(made, ["rms_norm"]) == (
        "No cell of a published kernel was timed by both. "
        "Left out, because the registry does not publish them: `flash_attention` (1 cell)."
    )
    assert "|" not in report.section(made, checked(rms_norm="a"))
    assert report.sentence(None, []) == "Not measured yet: `triton-kernel-lab crosscheck` measures it on this runner."
    assert report.section(None, {}) == ""


@pytest.mark.parametrize(
    ("recorded", "stale", "named"),
    [
        ({"rms_norm": "a" * 64}, (), False),
        ({"rms_norm": "b" * 64}, (), True),
        ({"rms_norm": "a" * 64}, ("correctness@rms_norm",), True),
        ({"rms_norm": "a" * 64}, ("timing@rms_norm",), False),
        (None, ("correctness@rms_norm",), False),
    ],
    ids=["the same", "others", "others since both", "the lab's alone", "not recorded"],
)
def test_a_kernel_is_stale_where_its_recorded_sources_are_not_the_checked_ones(
    recorded: dict[str, str] | None, stale: tuple[str, ...], named: bool
) -> None:
    """The section says Stale of a kernel whose sources changed since the cross-check, if it recorded them at all."""
    facts = {} if recorded is None else {"kernel_sources_sha256": recorded}
    text = report.section(crosschecked(timed("rms_norm", 20_000, 20_000), **facts), checked(rms_norm="a" * 64), stale)
    assert ("**Stale:** the sources of `rms_norm` have changed since;" in text) is named
    assert ("Stale" in text) is named


def test_the_section_names_the_commit_where_one_was_recorded() -> None:
    """Whoever reads the figures can look up which code was timed."""
    made = crosschecked(timed("rms_norm", 20_000, 20_000), producer={"git_commit": "c" * 40})
    assert f"in one more session, at commit `{'c' * 40}`: 100 samples" in report.section(made, checked(rms_norm="a"))


def edited(made: Artifact) -> None:
    made["cells"][0]["nvbench_p50_ns"] -= 1


def test_the_section_is_printed_and_verified(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table appears once the artifact is there; verify recomputes its figures and its cells."""
    played(monkeypatch, {"unavailable": None, "version": "0.3.0", "cells": [cell()]})
    path = crosscheck.run(project, ["rms_norm"])
    assert "results.md" in verify.run(project)[0]
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    text = (project.reports / "results.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| rms_norm |") and "5.150" in line]
    assert [part.strip() for part in row.strip("|").split("|")][3:] == ["5.000", "5.200", "5.150", "1.03", "0.99"]
    assert f"`artifacts/{project.runner}/crosscheck.json` sha256" in text
    said = report.sentence(artifacts.read(path), project.kernels)
    assert said in text
    assert f"<!-- crosscheck:begin -->\n{said}\n" in (project.root / "docs/METHODOLOGY.md").read_text()
    synthetic.edit(path, edited)
    problem = verify.run(project)[0]
    assert problem.startswith(f"artifacts/{project.runner}/crosscheck.json: $.cells[0].nvbench_p50_ns: expected 5150")
