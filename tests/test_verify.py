from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import locator, verify
from triton_kernel_lab.analysis.differences import json_differences, text_difference
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report import tables
from triton_kernel_lab.report.figures import latency, svg
from triton_kernel_lab.report.site import stage as site

TIMING = "artifacts/synthetic-gpu/timing/rms_norm.json"
CEILINGS = "artifacts/synthetic-gpu/ceilings.json"
ROOFLINE = "artifacts/synthetic-gpu/roofline.json"
RESULTS = "reports/synthetic-gpu/results.md"
METRICS = "reports/synthetic-gpu/metrics.json"
FIGURE = "reports/synthetic-gpu/latency.svg"
PAGE = "reports/synthetic-gpu/index.html"
TRACKED = [
    "artifacts/synthetic-gpu/environment.json",
    CEILINGS,
    "artifacts/synthetic-gpu/correctness/swiglu.json",
    TIMING,
    ROOFLINE,
    RESULTS,
    METRICS,
    FIGURE,
    PAGE,
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    regimes = ("cold_clean", "call")
    synthetic.project(root, shapes=("128x1024", "2048x4096"), dtypes=("float16",), samples=55, regimes=regimes)
    return root


@pytest.fixture
def sound(original: Path, tmp_path: Path) -> Project:
    shutil.copytree(original, tmp_path / "copy")
    return find_project(tmp_path / "copy")


def first_problem(project: Project) -> str:
    problems = verify.run(project)
    assert problems
    for problem in problems:
        assert "\n" not in problem
        assert problem.endswith(".")
    return problems[0]


def test_a_sound_project_has_nothing_broken(sound: Project) -> None:
    """What the stages wrote verifies, and verifying writes nothing."""
    before = {path: path.read_bytes() for path in sound.root.rglob("*") if path.is_file()}
    assert verify.run(sound) == []
    assert {path: path.read_bytes() for path in sound.root.rglob("*") if path.is_file()} == before


def _of_an_earlier_environment(project: Project, kernel: str, *, stale: bool) -> None:
    """Let a kernel's artifacts say that they were made beside other bytes of environment.json."""
    digests: dict[str, str] = {"environment.json": "0" * 64}
    for kind in ("correctness", "timing", "counters"):
        path = project.artifacts / kind / f"{kernel}.json"
        artifact = json.loads(path.read_bytes())
        for record in artifact["inputs"]:
            record["sha256"] = digests.get(record["path"].partition("synthetic-gpu/")[2], record["sha256"])
        if stale:
            artifact["producer"]["source_sha256"] = "0" * 64
        artifacts.write(path, artifact)
        digests[f"{kind}/{kernel}.json"] = artifacts.sha256_file(path)


@pytest.mark.parametrize("stale", [True, False])
def test_only_a_stale_artifact_may_be_of_an_earlier_environment(sound: Project, stale: bool) -> None:
    """Where fresh ones vouch for environment.json, one that the report calls stale does not make it an edited file."""
    _of_an_earlier_environment(sound, "swiglu", stale=stale)
    synthetic.run_pure_stages(sound)
    problems = verify.run(sound)
    assert bool(problems) != stale
    assert all("environment.json: expected sha256 0000" in problem for problem in problems)


def test_an_edited_environment_is_named_however_much_is_stale(sound: Project) -> None:
    """With nothing fresh left the stale artifacts vouch for the file as ever."""
    for kernel in sound.kernels:
        _of_an_earlier_environment(sound, kernel, stale=True)
    path = sound.artifacts / "ceilings.json"
    ceilings = json.loads(path.read_bytes())
    ceilings["producer"]["source_sha256"] = "0" * 64
    artifacts.write(path, ceilings)
    synthetic.run_pure_stages(sound)
    assert "environment.json: expected sha256" in first_problem(sound)


def test_a_host_without_a_gpu_verifies_too(tmp_path: Path) -> None:
    """Artifacts that say not_measured, and reports that print it, are sound."""
    assert verify.run(synthetic.project(tmp_path, measured=False, runner="cpu")) == []


def test_verifying_loads_neither_torch_nor_matplotlib() -> None:
    """Verification starts without the libraries that measure and draw."""
    heavy = "{'torch', 'triton', 'matplotlib', 'scipy', 'numpy'}"
    code = f"import sys; import triton_kernel_lab.analysis.verify; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


# One byte


def _another(digit: str) -> str:
    return "7" if digit != "7" else "4"


@pytest.mark.parametrize("name", [TIMING, CEILINGS])
def test_an_edited_digit_of_any_raw_sample_is_named_with_its_old_value(sound: Project, name: str) -> None:
    """Whichever digit of whichever sample changes, the sample is named with what it was and is."""
    where, drawn = sound.root / name, random.Random(name)
    text = where.read_text()
    before = dict(locator.samples(artifacts.read(where)))
    vectors = [match.span(1) for match in re.finditer(r'samples_ns": \[([^]]*)\]', text)]
    for _ in range(6):
        start, end = drawn.choice(vectors)
        at = drawn.choice([at for at in range(start, end) if text[at].isdigit()])
        where.write_text(text[:at] + _another(text[at]) + text[at + 1 :])
        after = dict(locator.samples(artifacts.read(where)))
        ((path, value),) = after.items() - before.items()
        expected = f"{name}: {path}: expected {before[path]}, found {value}; restore it from git, or run `dvc repro"
        assert first_problem(sound).startswith(expected)
    where.write_text(text)
    assert verify.run(sound) == []


@pytest.mark.parametrize("name", TRACKED)
def test_an_edited_byte_anywhere_is_found_in_its_own_file(sound: Project, name: str) -> None:
    """Whatever byte of a tracked file changes, the first thing broken is that file."""
    where, drawn = sound.root / name, random.Random(name)
    data = where.read_bytes()
    for _ in range(6):
        at = drawn.randrange(len(data))
        byte = drawn.choice([byte for byte in b" 0123456789aef,x|" if byte != data[at]])
        where.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        assert first_problem(sound).startswith(f"{name}: "), (at, data[at : at + 1], byte)
    where.write_bytes(data)


def test_an_edited_figure_of_the_roofline_is_named_by_path(sound: Project) -> None:
    """A derived number is named with its JSON path, what it should be and what it is."""

    def forge(roofline: Artifact) -> None:
        roofline["cells"][1]["candidates"][0]["stats"]["p50_ns"] += 1

    p50 = artifacts.read(sound.root / ROOFLINE)["cells"][1]["candidates"][0]["stats"]["p50_ns"]
    synthetic.edit(sound.root / ROOFLINE, forge)
    where = f"{ROOFLINE}: $.cells[1].candidates[0].stats.p50_ns"
    assert verify.run(sound) == [f"{where}: expected {p50}, found {p50 + 1}; run `dvc repro -f -s roofline`."]


def test_an_edited_table_cell_is_named_by_row_and_column(sound: Project) -> None:
    """A cell of results.md is named by its table, row and column."""
    text = (sound.root / RESULTS).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| 2048x4096"))
    cells = row.split("|")
    faster = cells[3].replace("1", "0", 1)
    (sound.root / RESULTS).write_text(text.replace(row, "|".join([*cells[:3], faster, *cells[4:]]), 1))
    (problem,) = verify.run(sound)
    named = "table 'rms_norm: p50', row '2048x4096 float16', column 'Triton p50 (us)'"
    assert f"{named}: expected {cells[3].strip()!r}, found {faster.strip()!r}" in problem
    assert problem.startswith(f"{RESULTS}: line ")


def test_an_edited_cell_of_the_readme_is_named(sound: Project) -> None:
    """The README's block is compared cell by cell, and what stands around it is free."""
    where = sound.root / "README.md"
    where.write_text(where.read_text().replace("# Synthetic", "# Anything"))
    assert verify.run(sound) == []
    where.write_text(where.read_text().replace("fastest", "fostest", 1))
    (problem,) = verify.run(sound)
    assert problem.startswith("README.md: results block, line ")
    assert "row 'rms_norm 128x1024 float16', column 'Verdict': expected 'fastest', found 'fostest'" in problem
    assert problem.endswith("run `triton-kernel-lab readme`.")


def test_a_readme_without_markers_is_named(sound: Project) -> None:
    """Lost markers are a broken README, not a crash."""
    (sound.root / "README.md").write_text("# Nothing\n")
    (problem,) = verify.run(sound)
    assert problem.startswith("README.md: expected the marker <!-- results:begin --> once, found it 0 times")


def test_an_edited_metric_is_named_by_path(sound: Project) -> None:
    """metrics.json is compared key by key."""
    metrics = json.loads((sound.root / METRICS).read_text())
    p50 = metrics["rms_norm"]["128x1024 float16 cold_clean"]["p50_ns"]
    metrics["rms_norm"]["128x1024 float16 cold_clean"]["p50_ns"] += 32
    (sound.root / METRICS).write_text(artifacts.dumps(metrics))
    (problem,) = verify.run(sound)
    path = "$.rms_norm.128x1024 float16 cold_clean.p50_ns"
    assert problem.startswith(f"{METRICS}: {path}: expected {p50}, found {p50 + 32}")


def latency_data(sound: Project) -> dict[str, Any]:
    """What the latency figure of a sound project shows."""
    environment, roofline = (artifacts.read(sound.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    return latency.DRAWING.data(svg.Sources(environment, roofline, {}))


def test_a_figure_of_other_data_is_named(sound: Project) -> None:
    """A picture drawn from other numbers carries another digest, whatever drew it."""
    shown = latency_data(sound)
    shown["panels"][0]["p50_ns"]["cold_clean"]["128x1024"]["triton"] //= 2
    artifacts.write_text(sound.root / FIGURE, svg.render(latency.DRAWING, shown))
    assert first_problem(sound).startswith(f"{FIGURE}: data-sha256: expected ")


def test_a_figure_of_another_matplotlib_is_sound(sound: Project) -> None:
    """Another drawing of the same data passes: the digest of the data is what counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(svg.STYLE, "font.size", 12.0)
        artifacts.write_text(sound.root / FIGURE, svg.render(latency.DRAWING, latency_data(sound)))
    site.run(sound)  # The page shows the pictures as they lie there.
    assert verify.run(sound) == []


def test_a_digit_of_the_page_is_named(sound: Project) -> None:
    """The page is derived again with the pictures as they lie there; another figure in it is a broken line."""
    p50 = artifacts.read(sound.root / ROOFLINE)["cells"][0]["candidates"][0]["stats"]["p50_ns"]
    synthetic.edit_byte(sound.root / PAGE, f"{p50 / 1000:.3f}", f"{p50 / 1000 - 1:.3f}")
    (problem,) = verify.run(sound)
    assert problem.startswith(f"{PAGE}: line ")
    assert problem.endswith("run `dvc repro -f -s site`.")


def test_an_edited_block_of_the_readme_is_named(sound: Project) -> None:
    """Each generated block is compared, the pipeline's too."""
    synthetic.edit_byte(sound.root / "README.md", "flowchart LR", "flowchart TB")
    (problem,) = verify.run(sound)
    assert problem.startswith("README.md: pipeline block, line 2: ")


# The chain


def test_a_digest_mismatch_alone_names_the_edited_file(sound: Project) -> None:
    """A change that no sample and no figure shows is found by the digest, with who recorded it."""
    synthetic.edit(sound.root / TIMING, lambda timing: timing["processes"][0].update(temperature_c_max=99))
    problem = first_problem(sound)
    assert problem.startswith(f"{TIMING}: expected sha256 ")
    assert f"{ROOFLINE}: $.inputs[2].sha256" in problem


def test_several_edited_samples_name_the_file(sound: Project) -> None:
    """Two samples that changed at once are no single edit, and still name their file."""

    def forge(timing: Artifact) -> None:
        samples = timing["cells"][0]["candidates"][0]["runs"][0]["samples_ns"]
        samples[0] += 32
        samples[7] += 64

    synthetic.edit(sound.root / TIMING, forge)
    assert first_problem(sound).startswith(f"{TIMING}: expected sha256 ")


def test_an_edited_digest_names_the_artifact_that_records_it(sound: Project) -> None:
    """One digit of a recorded sha256 is the record's fault, not that of the file it names."""
    record = artifacts.read(sound.root / TIMING)["inputs"][0]
    digest = record["sha256"]
    edited = digest[:20] + ("0" if digest[20] != "0" else "1") + digest[21:]
    synthetic.edit_byte(sound.root / TIMING, digest, edited)
    problems = verify.run(sound)
    assert any(p.startswith(f"{TIMING}: $.inputs[0].sha256: expected {digest}") for p in problems)
    assert all(problem.startswith(TIMING) for problem in problems)


def test_an_edit_upstream_comes_first(sound: Project) -> None:
    """Of several broken files the most upstream one is named first."""
    synthetic.edit_byte(sound.root / RESULTS, "fastest", "slowest")
    synthetic.edit(sound.root / ROOFLINE, lambda roofline: roofline["cells"][0].update(flop=1))
    assert [problem.partition(":")[0] for problem in verify.run(sound)] == [ROOFLINE, RESULTS]
    synthetic.edit(sound.artifacts / "environment.json", lambda e: e["device"].update(sm_count=1))
    assert first_problem(sound).startswith("artifacts/synthetic-gpu/environment.json: expected sha256")


def test_a_forged_roofline_does_not_carry_its_tables_along(sound: Project) -> None:
    """Tables made anew from a forged roofline are compared with the raw samples, not with the forgery."""

    def forge(roofline: Artifact) -> None:
        roofline["cells"][0]["candidates"][0]["stats"]["p50_ns"] -= 32

    synthetic.edit(sound.root / ROOFLINE, forge)
    tables.run(sound)
    names = [problem.partition(":")[0] for problem in verify.run(sound)]
    assert list(dict.fromkeys(names)) == [ROOFLINE, RESULTS, METRICS]


def test_an_artifact_that_drops_its_inputs_is_named(sound: Project) -> None:
    """A timing without a record of its correctness artifact does not pass, though its own digest is recorded."""
    synthetic.edit(sound.root / TIMING, lambda timing: timing.update(inputs=[]))
    synthetic.run_pure_stages(sound, figure=False)
    assert f"{TIMING}: $.inputs: expected a record of artifacts/synthetic-gpu/correctness/rms_norm.json" in (
        first_problem(sound)
    )


@pytest.mark.parametrize("path", ["../secret.json", "artifacts/nowhere.json"])
def test_a_record_of_a_file_elsewhere_is_named(sound: Project, path: str) -> None:
    """Inputs have to lie in the checkout."""
    (sound.root.parent / "secret.json").write_text("{}")
    record = {"path": path, "sha256": "0" * 64}
    synthetic.edit(sound.root / TIMING, lambda timing: timing["inputs"].append(record))
    synthetic.run_pure_stages(sound, figure=False)
    assert first_problem(sound).startswith(f"{TIMING}: $.inputs[2].path: expected a file of this checkout, found")


# Files that are not what they should be


@pytest.mark.parametrize("name", [*TRACKED, "README.md"])
def test_a_missing_file_is_named(sound: Project, name: str) -> None:
    """Each file is expected to be there, and the sentence says what makes it."""
    (sound.root / name).unlink()
    assert re.match(rf"{re.escape(name)}: cannot be read: No such file.*`dvc repro ", first_problem(sound))


@pytest.mark.parametrize("name", [TIMING, ROOFLINE])
@pytest.mark.parametrize(
    ("old", "new"), [('"schema_version": 1', '"schema_version": 9'), ('"reason"', '"reasom"'), ("{", "[")]
)
def test_an_artifact_that_breaks_its_schema_is_named(sound: Project, name: str, old: str, new: str) -> None:
    """An unknown version, a misspelt key or broken JSON is a problem of its own file."""
    synthetic.edit_byte(sound.root / name, old, new)
    assert first_problem(sound).startswith(f"{name}: ")


def test_a_truncated_artifact_is_named(sound: Project) -> None:
    """Half a file is not an artifact."""
    where = sound.root / TIMING
    where.write_bytes(where.read_bytes()[:1000])
    assert first_problem(sound).startswith(f"{TIMING}: ")


def test_f69_nan_among_samples_is_named(sound: Project) -> None:
    """NaN satisfies every bound of a schema, and is refused all the same."""
    where = sound.root / TIMING
    where.write_text(re.sub(r'(?<="samples_ns": \[)[0-9]+', "NaN", where.read_text(), count=1))
    assert first_problem(sound).startswith(f"{TIMING}: ")


def test_a_surplus_file_is_named(sound: Project) -> None:
    """An artifact of a kernel that the registry does not hold is not overlooked."""
    shutil.copy(sound.root / TIMING, sound.artifacts / "timing/gone.json")
    assert first_problem(sound).startswith("artifacts/synthetic-gpu/timing/gone.json: expected one file for each of")


def test_an_artifact_of_another_runner_is_named(sound: Project) -> None:
    """Another GPU's timing under this runner's name is refused."""
    synthetic.edit(sound.root / TIMING, lambda timing: timing.update(runner="other-gpu"))
    problems = verify.run(sound)
    assert any(p.startswith(f"{TIMING}: $.runner: expected 'synthetic-gpu', found 'other-gpu'") for p in problems)


# Plausibility: the artifacts are sound and consistent, but cannot be honest


def implausible(project: Project, name: str, change: Callable[[Artifact], None], *, figure: bool = False) -> str:
    """The first problem after a change that everything downstream follows, digests included."""
    where = project.root / name
    synthetic.edit(where, change)
    for consumer in sorted(project.artifacts.rglob("*.json")):
        if consumer.name != "roofline.json":
            synthetic.edit(consumer, lambda artifact: _record_anew(project.root, artifact))
    # What figures and page would show stays the same, or comes after the first problem.
    synthetic.run_pure_stages(project, figure=figure)
    return first_problem(project)


def _record_anew(root: Path, artifact: Artifact) -> None:
    artifact["inputs"] = [artifacts.input_record(root, root / record["path"]) for record in artifact["inputs"]]


def run_of(timing: Artifact, candidate: int = 0, run: int = 0) -> Any:
    return timing["cells"][1]["candidates"][candidate]["runs"][run]


def test_a_sample_off_the_timers_lattice_is_named(sound: Project) -> None:
    """An event-timed sample that is no multiple of the quantum was not read from the timer."""

    def change(timing: Artifact) -> None:
        run_of(timing)["samples_ns"][3] += 9

    assert f"{TIMING}: $.cells[1].candidates[0].runs[0].samples_ns[3]: expected a multiple of the timer's 32 ns" in (
        implausible(sound, TIMING, change)
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_rounding_to_whole_nanoseconds_is_no_lattice_error(sound: Project, shift: int) -> None:
    """One nanosecond beside the lattice is rounding."""

    def change(timing: Artifact) -> None:
        run_of(timing)["samples_ns"][3] += shift

    with pytest.raises(AssertionError):
        implausible(sound, TIMING, change, figure=True)


def test_the_call_regime_has_no_lattice(sound: Project) -> None:
    """Host times are whole nanoseconds off the lattice, and sound."""
    samples = run_of(artifacts.read(sound.root / TIMING), run=2)["samples_ns"]
    assert run_of(artifacts.read(sound.root / TIMING), run=2)["regime"] == "call"
    assert any(sample % 32 > 1 for sample in samples)
    assert verify.run(sound) == []


@pytest.mark.parametrize(
    "path", ["$.floors[0].samples_ns[0]", "$.ladders[2].samples_ns[0]", "$.matmul[0].samples_ns[0]"]
)
def test_a_ceiling_off_the_lattice_is_named(sound: Project, path: str) -> None:
    """Ceilings are read from the same timer."""
    kind, index = re.findall(r"\w+", path)[:2]

    def change(ceilings: Artifact) -> None:
        ceilings[kind][int(index)]["samples_ns"][0] += 5

    assert implausible(sound, CEILINGS, change).startswith(f"{CEILINGS}: {path}: expected a multiple")


def test_a_copied_process_is_named(sound: Project) -> None:
    """Two processes with the same samples are one process twice."""

    def change(timing: Artifact) -> None:
        run_of(timing, run=1)["samples_ns"] = list(run_of(timing)["samples_ns"])

    assert (
        f"{TIMING}: $.cells[1].candidates[0].runs[1].samples_ns: expected its own samples, found those of runs[0]"
        in (implausible(sound, TIMING, change))
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: run_of(t, run=1).update(process=0), "runs[1]: expected one run of process 0 in cold_clean"),
        (lambda t: run_of(t, run=1).update(process=9), "runs[1].process: expected one of [0, 1], found 9"),
        (lambda t: t["processes"][1].update(index=0), "$.processes: expected distinct indices, found [0, 0]"),
    ],
)
def test_processes_have_to_be_distinct(sound: Project, change: Callable[[Artifact], None], named: str) -> None:
    """Each run is that of a declared process, once."""
    assert named in implausible(sound, TIMING, change)


def test_f68_a_triton_row_served_by_the_fallback_is_named(sound: Project) -> None:
    """A Triton row that PyTorch served is an error."""

    def change(timing: Artifact) -> None:
        timing["cells"][1]["candidates"][0]["served_by"] = "torch"

    path = "$.cells[1].candidates[0].served_by"
    assert f"{TIMING}: {path}: expected 'triton' for a Triton row, found 'torch'" in implausible(sound, TIMING, change)


def test_f77_a_cell_faster_than_the_ceilings_is_named(sound: Project) -> None:
    """No candidate moves its bytes faster than the measured ceiling of their size."""

    def change(timing: Artifact) -> None:
        for run in timing["cells"][1]["candidates"][3]["runs"]:
            run["samples_ns"] = [32 * (sample // 64) for sample in run["samples_ns"]]

    problem = implausible(sound, TIMING, change)
    where = f"{TIMING}: $.cells[1].candidates[3]: 2048x4096 float16 cold_clean: library_op"
    assert problem.startswith(f"{where}: implausible: p50 ")


def test_a_timing_of_a_wrong_kernel_is_named(sound: Project) -> None:
    """A kernel that fails correctness has no business in the tables."""

    def change(correctness: Artifact) -> None:
        correctness["passed"] = False
        correctness["cells"][0] |= {"passed": False, "failures": ["norm off by 2"]}

    name = TIMING.replace("timing", "correctness")
    assert implausible(sound, name, change).startswith(f"{TIMING}: $.status: expected no timing of a kernel that fails")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda c: c["cells"][0]["triton"].update(rel_norm=0.5), "$.cells[0].triton.rel_norm"),
        (lambda c: c["cells"][0]["triton"].update(max_error_ratio=None), "$.cells[0].triton.max_error_ratio"),
        (lambda c: c["cells"][0].update(failures=["off"]), "$.cells[0].passed"),
        (lambda c: c["cells"][0].update(passed=False, failures=["off"]), "$.passed"),
    ],
)
def test_a_verdict_follows_from_its_errors(sound: Project, change: Callable[[Artifact], None], path: str) -> None:
    """A verdict that the errors and limits beside it do not support is named."""
    name = TIMING.replace("timing", "correctness")
    assert implausible(sound, name, change).startswith(f"{name}: {path}: expected ")


def test_a_flag_outside_its_run_is_named(sound: Project) -> None:
    """A flag that points at no sample is a problem of its run."""
    synthetic.edit(sound.root / TIMING, lambda t: run_of(t)["flags"]["thermal"].append(55))
    problems = verify.run(sound)
    assert any(
        "$.cells[1].candidates[0].runs[0].flags.thermal: expected indices below 55, found 55" in p for p in problems
    )


def test_many_findings_are_counted_not_listed(sound: Project) -> None:
    """A file in which everything is off the lattice does not fill the screen."""

    def change(timing: Artifact) -> None:
        run_of(timing)["samples_ns"] = [sample + 7 for sample in run_of(timing)["samples_ns"]]

    implausible(sound, TIMING, change)
    problems = [problem for problem in verify.run(sound) if problem.startswith(TIMING)]
    assert len(problems) == 6
    assert problems[-1] == f"{TIMING}: 50 more findings of this kind."


# Naming differences


@pytest.mark.parametrize(
    ("expected", "found", "named"),
    [
        ({"a": 1}, {"a": 1.0}, "$.a: expected 1, found 1.0"),
        ({"a": 1}, {}, "$.a: expected 1, found nothing"),
        ({}, {"b": None}, "$.b: expected nothing, found null"),
        ([1, 2], [1], "$: expected 2 items, found 1"),
        ({"a": [{"b": True}]}, {"a": [{"b": 1}]}, "$.a[0].b: expected true, found 1"),
    ],
)
def test_json_differences_name_the_leaf(expected: Any, found: Any, named: str) -> None:
    """The path, the expected and the found value of each differing leaf."""
    assert list(json_differences(expected, found)) == [named]


def test_text_differences_name_the_line() -> None:
    """Outside a table the line is named, and a text that goes on or ends early is told apart."""
    assert text_difference("a\nb", "a\nb") is None
    assert text_difference("a\nb", "a\nc") == "line 2: expected 'b', found 'c'"
    assert text_difference("a\nb", "a") == "line 2: expected 'b', found the end of the text"
    assert text_difference("a", "a\nb") == "line 2: expected the end of the text, found more"
