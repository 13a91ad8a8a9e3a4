"""dvc.yaml says what the code does: stages, sources, artifacts read, outputs; DVC runs it so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import synthetic
import yaml

from triton_kernel_lab import artifacts, source_lists
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.cases import PENDING
from triton_kernel_lab.cases._base import load
from triton_kernel_lab.project import Project, find_project, kernel_names
from triton_kernel_lab.report import readme, tables
from triton_kernel_lab.report.figures import stage as figures
from triton_kernel_lab.report.site import stage as site
from triton_kernel_lab.sources import KERNEL_STAGES, STAGES, stage_sources

ROOT = Path(__file__).parents[1]
PIPELINE: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
KERNELS = kernel_names(ROOT)
REGISTRY = "src/triton_kernel_lab/cases/__init__.py"
MEASURING = ("correctness", "timing", "counters")
# What lists the sources of the others: not one of the stages that has sources of its own.
LISTING = "sources"
PURE: dict[str, Callable[[Project], None]] = {
    "roofline": roofline.run,
    "figures": figures.run,
    "tables": tables.run,
    "site": site.run,
    "readme": readme.run,
}
RUNS = [
    pytest.param(stage, kernel, id=f"{stage}@{kernel}" if kernel else stage)
    for stage in PIPELINE["stages"]
    for kernel in (KERNELS if stage in (LISTING, *KERNEL_STAGES) else [None])
]


def fill(text: str, kernel: str | None, runner: str = "RUNNER") -> str:
    return text.replace("${item.kernel}", str(kernel)).replace("${runner}", runner)


MEASURED_FROM = [f"src/triton_kernel_lab/{name}" for name in ("cases", "lab", "ops", "routing.py")]


def deps(stage: str, kernel: str | None, runner: str = "RUNNER") -> list[str]:
    return [fill(dep, kernel, runner) for dep in PIPELINE["stages"][stage].get("deps", [])]


def outputs(stage: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("outs", "metrics", "plots"):
        for output in PIPELINE["stages"][stage].get(kind, []):
            yield from output.items()


def own_files(kernel: str) -> set[str]:
    """A kernel's own three files; of a case that is tuned under another name there is no more than the case."""
    names = [f"cases/{kernel}.py"]
    if load(kernel).buckets:
        names += [f"ops/{kernel}.py", f"ops/launch/{kernel}.json"]
    return {f"src/triton_kernel_lab/{name}" for name in names}


def expected_sources(stage: str, kernel: str | None) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in stage_sources(ROOT, stage, kernel)]


def test_stages_are_those_whose_sources_are_known() -> None:
    """The pipeline and the source digests know the same stages, in the same order; the listing one comes on top."""
    assert [stage for stage in PIPELINE["stages"] if stage != LISTING] == list(STAGES)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in KERNEL_STAGES])
def test_sources_of_a_stage_are_all_that_its_code_imports(stage: str) -> None:
    """No first-party module that a stage imports is missing from its deps, and none is listed that it does not."""
    declared = [dep for dep in deps(stage, None) if dep.startswith("src/")]
    if stage == "roofline":
        assert set(MEASURED_FROM) <= set(declared)
        declared = [dep for dep in declared if dep not in MEASURED_FROM]
    assert sorted(declared) == sorted(expected_sources(stage, None))


@pytest.mark.parametrize("stage", KERNEL_STAGES)
def test_a_stage_of_a_kernel_depends_on_the_list_of_its_sources_alone(stage: str) -> None:
    """It names no source itself but its own list; the listing stage writes all of these, and reads nothing."""
    listed = f"artifacts/sources/${{item.kernel}}/{stage}.json"
    found = [dep for dep in PIPELINE["stages"][stage]["deps"] if dep.startswith(("src/", "artifacts/sources/"))]
    assert found == [listed]
    assert listed in [name for name, _ in outputs(LISTING)]
    assert len(list(outputs(LISTING))) == len(KERNEL_STAGES)
    assert deps(LISTING, None) == []


@pytest.mark.parametrize("stage", KERNEL_STAGES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_list_holds_all_that_the_code_imports(measured: Path, stage: str, kernel: str) -> None:
    """Name and content of each module of the closure, and of nothing else."""
    listed = artifacts.read(measured / f"artifacts/sources/{kernel}/{stage}.json", "sources")
    assert (listed["kernel"], listed["stage"]) == (kernel, stage)
    assert [f"src/triton_kernel_lab/{record['path']}" for record in listed["files"]] == expected_sources(stage, kernel)
    for record in listed["files"]:
        assert record["sha256"] == artifacts.sha256_file(measured / "src/triton_kernel_lab" / record["path"])


def test_roofline_depends_on_all_that_a_measurement_was_made_from() -> None:
    """No source of a measuring stage lies outside the folders whose change makes the report say stale."""
    measuring = [*expected_sources("ceilings", None)]
    measuring += [path for k in KERNELS for stage in MEASURING for path in expected_sources(stage, k)]
    assert all(any(Path(path).is_relative_to(folder) for folder in MEASURED_FROM) for path in measuring)


@pytest.mark.parametrize(("stage", "kernel"), RUNS)
def test_command_is_the_stage(stage: str, kernel: str | None) -> None:
    """Each stage is one plain command of the lab, named like the stage."""
    argument = f" {kernel}" if kernel else ""
    assert fill(PIPELINE["stages"][stage]["cmd"], kernel) == f"python -m triton_kernel_lab {stage}{argument}"


@pytest.mark.parametrize(("stage", "kernel"), RUNS)
def test_stage_of_a_kernel_runs_for_each_of_the_registry(stage: str, kernel: str | None) -> None:
    """Stages of a kernel are a matrix over KERNELS; the others are not."""
    matrix = PIPELINE["stages"][stage].get("matrix")
    assert matrix == ({"kernel": "${KERNELS}"} if kernel else None)
    assert PIPELINE["vars"] == [f"{REGISTRY}:KERNELS"]


@pytest.mark.parametrize("stage", PIPELINE["stages"])
def test_outputs_are_uncached_and_persistent(stage: str) -> None:
    """Git alone keeps an output, nothing is restored from a cache, and a failing stage deletes no evidence."""
    assert all(options == {"cache": False, "persist": True} for _, options in outputs(stage))


def test_no_output_outside_the_two_folders() -> None:
    """Outputs lie under artifacts/ and reports/ of the runner, with the audits or the lists; README.md is none."""
    names = [name for stage in PIPELINE["stages"] for name, _ in outputs(stage)]
    assert names
    assert all(name.startswith(("artifacts/", "reports/")) for name in names)
    lists = [f"artifacts/sources/${{item.kernel}}/{stage}.json" for stage in KERNEL_STAGES]
    audits = ["artifacts/codegen/${item.kernel}.json", "reports/codegen/${item.kernel}.md"]
    assert [name for name in names if name.split("/")[1] != "${runner}"] == lists + audits
    assert len(names) == len(set(names))


def test_only_the_environment_and_the_sources_are_looked_at_each_time() -> None:
    """A changed machine or source is noticed on every run; nothing else runs without a reason."""
    found = [stage for stage, said in PIPELINE["stages"].items() if said.get("always_changed")]
    assert found == ["environment", LISTING]


def test_parameters_of_the_stages() -> None:
    """Stages that measure depend on how much; those that join all kernels depend on the registry."""
    measuring, joining = ["measure"], [{REGISTRY: ["KERNELS"]}]
    found = {stage: PIPELINE["stages"][stage].get("params") for stage in STAGES}
    assert {stage: params for stage, params in found.items() if params} == {
        "ceilings": measuring,
        "timing": measuring,
        "counters": ["measure.seed", "measure.sweep_mib"],
        "roofline": joining,
        "tables": joining,
        "site": joining,
    }


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_op_case_table_and_test(kernel: str) -> None:
    """A line in the registry comes with files of the same stem."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", kernel)
    missing = [name for name in [*own_files(kernel), f"tests/test_{kernel}.py"] if not (ROOT / name).is_file()]
    assert missing == []


def test_no_kernel_outside_the_registry() -> None:
    """An op, a case or a launch table that no line of the registry, or of what waits for it, names is a leftover."""
    package = ROOT / "src/triton_kernel_lab"
    stems = {path.stem for folder in ("ops", "cases", "ops/launch") for path in (package / folder).glob("[!_]*.*")}
    assert stems == {*KERNELS, *PENDING}
    assert not set(KERNELS) & set(PENDING)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of this code with a synthetic runner's artifacts."""
    root = tmp_path_factory.mktemp("measured") / "tree"
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "schemas", root / "schemas")
    synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20)
    shutil.copy(ROOT / "dvc.yaml", root)
    readme.run(find_project(root))  # Once more: it shows the pipeline.
    for kernel in KERNELS:
        source_lists.run(find_project(root), kernel)
    shutil.copytree(ROOT / ".dvc", root / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    shutil.copy(ROOT / ".dvcignore", root)
    (root / ".dvc/config.local").write_text("[core]\n    no_scm = true\n", encoding="utf-8")
    return root


@pytest.fixture
def checkout(measured: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(measured, tmp_path / "tree"))


def dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"PATH": path, "PYTHONPATH": os.fspath(root / "src")}
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stage", PURE)
def test_pure_stage_reads_the_artifacts_that_it_declares(
    checkout: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every artifact that a pure stage opens is one of its deps, and it opens each of them."""
    opened: set[str] = set()
    read_bytes = Path.read_bytes

    def recording(path: Path) -> bytes:
        if path.is_relative_to(checkout / "artifacts"):
            opened.add(path.relative_to(checkout).as_posix())
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", recording)
    PURE[stage](find_project(checkout))
    declared = [dep for dep in deps(stage, None, synthetic.RUNNER) if dep.startswith("artifacts/")]
    files = {f"{dep}/{kernel}.json" for dep in declared if not dep.endswith(".json") for kernel in KERNELS}
    assert opened == files | {dep for dep in declared if dep.endswith(".json")}


def test_dvc_reads_the_stages_of_every_kernel(checkout: Path) -> None:
    """DVC itself makes one stage for each kernel out of the registry."""
    listed = dvc(checkout, "stage", "list", "--name-only")
    assert listed.returncode == 0, listed.stderr
    expected = {f"{stage}@{kernel}" if kernel else stage for stage, kernel in (run.values for run in RUNS)}
    assert set(listed.stdout.split()) == expected


def test_the_report_is_measured_without_the_codegen_audit(checkout: Path) -> None:
    """The targets that `nox -s gpu` names lead to every stage but the one that wants the pinned Triton."""
    report = re.search(r"^REPORT = \((.*)\)$", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert report
    planned = dvc(checkout, "repro", "--dry", "--force", *re.findall(r"\w+", report[1]))
    ran = {name.partition("@")[0] for name in re.findall("Running stage '(.*)'", planned.stdout)}
    assert set(STAGES) - ran == {"codegen"}


def test_a_changed_source_concerns_the_kernels_that_import_it(checkout: Path) -> None:
    """After an edit of one backward module DVC plans the stages of its importers, and none of another kernel."""
    recorded = dvc(checkout, "commit", "--force", LISTING, *MEASURING)
    assert recorded.returncode == 0, recorded.stderr
    assert changed(checkout) == set()
    with (checkout / "src/triton_kernel_lab/ops/swiglu_backward.py").open("a") as stream:
        stream.write("# as before\n")
    assert dvc(checkout, "repro", LISTING).returncode == 0
    importers = {"swiglu", "swiglu_backward", "swiglu_linear"} & set(KERNELS)
    assert changed(checkout) == {f"{stage}@{kernel}" for stage in MEASURING for kernel in importers}
    planned = dvc(checkout, "repro", "--dry", *MEASURING)
    ran = set(re.findall("Running stage '(.*)'", planned.stdout))
    assert {name for name in ran if name.startswith(MEASURING)} == changed(checkout)


def test_a_list_that_does_not_describe_the_tree_is_told(checkout: Path) -> None:
    """Verify names the list, the file that changed since and the command, and is sound again after that."""
    with (checkout / "src/triton_kernel_lab/lab/ncu.py").open("a") as stream:
        stream.write("# as before\n")
    found = [line for line in source_lists.differing(find_project(checkout)) if "/rms_norm/" in line]
    assert found == [
        "artifacts/sources/rms_norm/counters.json: expected the sources as they are in the tree, found other ones: "
        "lab/ncu.py; run `dvc repro sources@rms_norm`."
    ]
    assert found[0] in verify(checkout).stderr
    assert dvc(checkout, "repro", LISTING).returncode == 0
    assert list(source_lists.differing(find_project(checkout))) == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: path.unlink(), "expected the sources of stage timing, found none (No such file or directory)"),
        (lambda path: path.write_text("{}\n"), "expected the sources of stage timing, found another file ("),
        (lambda path: path.rename(path.with_name("timings.json")), "belongs to no stage of a kernel; remove it."),
        (
            lambda path: path.write_text(path.read_text().replace('"swiglu"', '"rms_norm"')),
            "found other ones: another kernel, stage or form",
        ),
    ],
    ids=["missing", "another file", "surplus", "another kernel"],
)
def test_a_spoilt_list_is_told(checkout: Path, spoil: Callable[[Path], object], sentence: str) -> None:
    """A list that is missing, is none, is another kernel's or is nobody's has its sentence."""
    spoil(checkout / "artifacts/sources/swiglu/timing.json")
    said = "\n".join(source_lists.differing(find_project(checkout)))
    assert sentence in said


def test_listing_sources_imports_no_torch(checkout: Path) -> None:
    """The stage runs for every kernel on every run, so it must be over at once; the same tree gives the same bytes."""
    paths = sorted((checkout / "artifacts/sources/swiglu").iterdir())
    before = [path.read_bytes() for path in paths]
    code = (
        "import sys; sys.argv = ['lab', 'sources', 'swiglu']\nfrom triton_kernel_lab import cli\n"
        "try:\n    cli.main()\nfinally:\n    print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": os.fspath(checkout / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
    assert [path.read_bytes() for path in paths] == before


def test_the_codegen_audit_comes_last(checkout: Path) -> None:
    """On a host with another Triton `dvc repro` has measured all there is before the audit refuses."""
    planned = re.findall("Running stage '(.*)'", dvc(checkout, "repro", "--dry", "--force").stdout)
    assert planned[-len(KERNELS) :] == [f"codegen@{kernel}" for kernel in KERNELS]


def test_a_kernel_without_timing_stops_the_join(checkout: Path) -> None:
    """A missing timing file fails the pipeline and leaves the report that was there."""
    before = {path: path.read_bytes() for path in derived(checkout)}
    (checkout / "artifacts" / synthetic.RUNNER / "timing" / f"{KERNELS[-1]}.json").unlink()
    done = dvc(checkout, "repro", "--force", "--downstream", "roofline")
    assert done.returncode != 0
    assert f"{KERNELS[-1]}.json" in done.stderr
    assert {path: path.read_bytes() for path in derived(checkout)} == before


def test_repro_refuses_a_host_that_is_not_the_runner(checkout: Path) -> None:
    """On another machine than the runner the pipeline stops at its first stage, and writes nothing."""
    before = {path: path.read_bytes() for path in [*checkout.joinpath("artifacts").rglob("*.json"), *derived(checkout)]}
    done = dvc(checkout, "repro")
    assert done.returncode == 255
    assert re.findall("Running stage '(.*)'", done.stdout) == ["environment"]
    sentences = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert f"runner {synthetic.RUNNER} needs its GPU" in sentences[0]
    assert "make repro" in sentences[0]
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_report_of_changed_sources_says_that_it_is_stale(checkout: Path) -> None:
    """An edited case makes verify fail until list and report are made again; then the report names it as stale."""
    assert verify(checkout).returncode == 0
    with (checkout / "src/triton_kernel_lab/cases" / f"{KERNELS[-1]}.py").open("a") as stream:
        stream.write("# another input\n")
    done = verify(checkout)
    assert done.returncode == 1
    assert "roofline.json: $.stale" in done.stderr
    named = re.findall(r"stage (\w+) of kernel (\w+): its sources changed since", done.stderr)
    assert named == [(stage, KERNELS[-1]) for stage in MEASURING]
    source_lists.run(find_project(checkout), KERNELS[-1])
    for stage in PURE.values():
        stage(find_project(checkout))
    assert verify(checkout).returncode == 0
    stages = ", ".join(f"`{stage}@{KERNELS[-1]}`" for stage in MEASURING)
    said = f"**Stale:** the sources of {stages} have changed since"
    assert said in (checkout / "README.md").read_text()
    assert said in (checkout / "reports" / synthetic.RUNNER / "results.md").read_text()


def changed(root: Path) -> set[str]:
    """The measuring stages that DVC would run again."""
    done = dvc(root, "status", "--json", *MEASURING)
    assert done.returncode == 0, done.stderr
    return {name for name in json.loads(done.stdout) if name.startswith(MEASURING)}


def verify(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triton_kernel_lab", "verify"]
    environment = os.environ | {"PYTHONPATH": os.fspath(root / "src")}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def derived(root: Path) -> list[Path]:
    artifact = root / "artifacts" / synthetic.RUNNER / "roofline.json"
    return [artifact, *sorted((root / "reports" / synthetic.RUNNER).iterdir()), root / "README.md"]
