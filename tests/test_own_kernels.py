"""Kernels of one's own: what `new` writes, what other packages provide, and a report with theirs next to ours."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
import yaml
from operator_checks import DEVICE, INTERPRETED

from triton_kernel_lab import cli, registry, routing, scaffold
from triton_kernel_lab.analysis import roofline, verify
from triton_kernel_lab.cases._base import find, load
from triton_kernel_lab.lab import correctness, environment, tune
from triton_kernel_lab.project import ProjectError, find_project, kernel_names
from triton_kernel_lab.registry import RegistryError
from triton_kernel_lab.report import tables
from triton_kernel_lab.report.figures import stage as figures
from triton_kernel_lab.report.site import stage as site
from triton_kernel_lab.scaffold import ScaffoldError
from triton_kernel_lab.sources import stage_digest, stage_sources

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/own-kernels"
RENEW = "cd examples && rm -r own-kernels && python -m triton_kernel_lab new squared_relu --project own-kernels"
Provide = Callable[..., Path]
# Runner cpu interprets, which Triton decides once for a process.
interpreting = pytest.mark.skipif(not INTERPRETED, reason="this process compiles kernels")


def texts(folder: Path) -> dict[str, str]:
    """The files of a folder that a tool did not leave there."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    left = ("__pycache__", ".pytest_cache", ".ruff_cache", "tmp")
    return {name.as_posix(): path.read_text() for name, path in found.items() if not set(left) & set(name.parts)}


def inner(site: Path, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that finds the packages in ``site`` installed."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    seen = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([os.fspath(site), os.environ["PYTHONPATH"]])}
    line = [sys.executable, *shlex.split(command)]
    return subprocess.run(line, cwd=folder, env=seen, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the example project, and a folder that its wheel was installed to."""
    folder = tmp_path_factory.mktemp("example")
    project = Path(shutil.copytree(EXAMPLE, folder / "own-kernels"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", os.fspath(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    (project / ".dvc/config.local").write_text("[core]\n    no_scm = true\n", encoding="utf-8")
    return project, folder / "site"


@pytest.fixture
def provide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Install a package into this process: its name, entry points by kernel, and files by name."""
    before = set(sys.modules)

    def install(package: str, entries: Mapping[str, str], files: Mapping[str, str]) -> Path:
        site = tmp_path / f"site-{package}"
        info = site / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{registry.GROUP}]", *(f"{kernel} = {value}" for kernel, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, text in files.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        monkeypatch.syspath_prepend(site)
        return site

    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("own_kernels", "theirs"):
            del sys.modules[name]


def example_files() -> dict[str, str]:
    """The example's package, as an installation lays it out."""
    return {name.removeprefix("src/"): text for name, text in texts(EXAMPLE).items() if name.startswith("src/")}


@pytest.fixture
def example(provide: Provide) -> Path:
    """The example's package, installed into this process; returns where."""
    return provide("own-kernels", {"squared_relu": "own_kernels.cases.squared_relu:CASE"}, example_files())


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    """Exit code and standard error of one command line."""
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *shlex.split(line)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capsys.readouterr().err


# What `new` writes.


def test_the_example_is_what_new_writes(tmp_path: Path) -> None:
    """The worked example is, byte for byte, the new project that the walk-through makes."""
    scaffold.new("squared_relu", tmp_path, tmp_path / "own-kernels")
    assert texts(tmp_path / "own-kernels") == texts(EXAMPLE), f"to renew the example: {RENEW}"


def test_the_tests_of_a_new_project_pass_as_written(installed: tuple[Path, Path]) -> None:
    """Installed, the example's own tests pass in Triton's interpreter."""
    project, site = installed
    done = inner(site, "-m pytest -q -p no:cacheprovider", project)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^9 passed", done.stdout, re.MULTILINE)


def test_a_new_kernel_of_the_lab_passes_its_test_as_written(tmp_path: Path) -> None:
    """In a checkout the files land where the lab's kernels have them, the test passes, and PENDING comes first."""
    root = tmp_path / "lab"
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "schemas", root / "schemas")
    for name in ("params.yaml", "dvc.yaml", "tests/conftest.py"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    written, following = scaffold.new("my_kernel", root)
    package = root / "src/triton_kernel_lab"
    names = ("ops/my_kernel.py", "ops/launch/my_kernel.json", "cases/my_kernel.py")
    assert written == [*(package / name for name in names), root / "tests/test_my_kernel.py"]
    assert following == (
        "a line for my_kernel in PENDING of src/triton_kernel_lab/cases/__init__.py, "
        "which moves to KERNELS together with its artifacts"
    )
    done = inner(root / "src", "-m pytest -q -p no:cacheprovider tests/test_my_kernel.py", root)
    assert done.returncode == 0, done.stdout


def test_a_second_kernel_joins_the_project(tmp_path: Path) -> None:
    """`new` inside a project adds the kernel's files, its entry point and its line in params.yaml."""
    root = Path(shutil.copytree(EXAMPLE, tmp_path / "own-kernels"))
    written, following = scaffold.new("cubed", root / "src")
    assert find_project(root).kernels == ["cubed", "squared_relu", "swiglu"]
    assert 'cubed = "own_kernels.cases.cubed:CASE"' in (root / "pyproject.toml").read_text()
    assert {path.relative_to(root).as_posix() for path in written} == {
        *(f"src/own_kernels/{name}" for name in ("ops/cubed.py", "ops/launch/cubed.json", "cases/cubed.py")),
        *("tests/test_cubed.py", "pyproject.toml", "params.yaml"),
    }
    assert "pip install -e" in following


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("My-Kernel", "expected a name of lower-case letters, .*, got 'My-Kernel'"),
        ("2fast", "expected a name of lower-case letters, .*, got '2fast'"),
        ("lambda", "expected a name of lower-case letters, .*, got 'lambda'"),
        ("swiglu", "expected a new name, got 'swiglu', a name of triton-kernel-lab's swiglu"),
        ("rmsnorm", "expected a new name, got 'rmsnorm', a name of triton-kernel-lab's rms_norm"),
    ],
)
def test_a_name_that_is_taken_or_none_writes_nothing(tmp_path: Path, kernel: str, message: str) -> None:
    """Each refused name has its sentence, and no file is made."""
    with pytest.raises(ScaffoldError, match=message):
        scaffold.new(kernel, tmp_path, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("example")
def test_a_name_that_an_installed_package_provides_is_refused(tmp_path: Path) -> None:
    """A second kernel of the name would be found nowhere."""
    with pytest.raises(ScaffoldError, match="got 'squared_relu', which an installed package provides"):
        scaffold.new("squared_relu", tmp_path, tmp_path / "new")


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """One file in the way stops all of them, and stays as it was."""
    root = Path(shutil.copytree(EXAMPLE, tmp_path / "own-kernels"))
    (root / "tests/test_cubed.py").write_text("mine\n")
    before = texts(root)
    with pytest.raises(ScaffoldError, match=r"test_cubed\.py: expected no such file, found one; nothing was written"):
        scaffold.new("cubed", root)
    assert texts(root) == before


@pytest.mark.parametrize("name", ["My Kernels", "1st", "triton-kernel-lab"])
def test_a_folder_that_cannot_name_a_package_is_refused(tmp_path: Path, name: str) -> None:
    """The folder's name becomes the package's."""
    with pytest.raises(ScaffoldError, match="--project: expected a folder whose name can be a package's"):
        scaffold.new("cubed", tmp_path, tmp_path / name)


def test_new_outside_a_project_says_how_to_make_one(tmp_path: Path) -> None:
    """Without a project round it the sentence names the option."""
    with pytest.raises(ScaffoldError, match="`--project FOLDER` makes a new project"):
        scaffold.new("cubed", tmp_path)


# What other packages provide.


@pytest.mark.usefixtures("example")
def test_a_provided_kernel_is_found_by_each_of_its_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Registry name and command-line name lead to the other package's case, on the command line too."""
    assert find("squared_relu") is find("squared-relu") is load("squared_relu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in ("squared_relu", "squared-relu"):
        assert "No CUDA device is present" in call(monkeypatch, capsys, f"--kernel {name}")[1]
    code, said = call(monkeypatch, capsys, "--kernel squared")
    assert code == 1
    assert said.endswith(", squared_relu.\n")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example project as the working directory, on a host without a GPU, its environment probed."""
    root = Path(shutil.copytree(EXAMPLE, tmp_path / "own-kernels"))
    monkeypatch.chdir(root)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment.run(find_project(root))
    return root


@interpreting
@pytest.mark.usefixtures("example")
def test_a_right_kernel_passes_the_stage(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`correctness` checks a kernel of another package like one of ours, and records that package's sources."""
    assert call(monkeypatch, capsys, "correctness squared_relu") == (0, "")
    assert (project / "artifacts/cpu/correctness/squared_relu.json").is_file()


@interpreting
def test_a_wrong_kernel_fails_the_stage(
    project: Path, provide: Provide, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted mistake ends the stage with 2 and a sentence that names the kernel."""
    files = example_files()
    right = "(positive * positive)"
    assert right in files["own_kernels/ops/squared_relu.py"]
    files["own_kernels/ops/squared_relu.py"] = files["own_kernels/ops/squared_relu.py"].replace(right, "(positive)")
    provide("own-kernels", {"squared_relu": "own_kernels.cases.squared_relu:CASE"}, files)
    code, said = call(monkeypatch, capsys, "correctness squared_relu")
    assert code == 2
    assert re.match(r"error: correctness of squared_relu: \d+ of 10 cells failed", said)


def test_a_listed_kernel_that_no_package_provides_is_one_sentence(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A project that was not installed says so, and with what command it is."""
    code, said = call(monkeypatch, capsys, "correctness squared_relu")
    assert code == 1
    assert "kernel squared_relu: expected an installed package with this name among its entry points" in said
    assert call(monkeypatch, capsys, "correctness rms_norm")[1] == (
        "error: kernel rms_norm: expected one of squared_relu, swiglu.\n"
    )


def test_two_packages_with_one_kernel_are_both_named(provide: Provide) -> None:
    """A name of ours that another package claims is refused with both packages; our other kernels work on."""
    provide("theirs", {"swiglu": "theirs:CASE"}, {"theirs.py": ""})
    for ask in (find, load):
        with pytest.raises(RegistryError, match=r"kernel swiglu: .* found triton-kernel-lab and theirs; rename"):
            ask("swiglu")
    assert find("rmsnorm").name == "rms_norm"
    provide("own-kernels", {"cubed": "own_kernels:CASE"}, {"own_kernels/__init__.py": ""})
    provide("thirds", {"cubed": "theirs:CASE"}, {})
    with pytest.raises(RegistryError, match=r"kernel cubed: .* found (thirds and own-kernels|own-kernels and thirds);"):
        find("cubed")


PLAIN = """
import torch, triton, triton.language as tl
from triton_kernel_lab.extend import Case, Cost, Variant, randn

@triton.jit
def _negate(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(y_ptr + offsets, -tl.load(x_ptr + offsets, mask=mask), mask=mask)

def negate(x):
    y = torch.empty_like(x)
    _negate[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y

CASE = Case(
    name="negate", cli_name="{cli_name}", axes=("M", "N"),
    variants=(Variant(
        "default", lambda dims, dtype, generator: (randn(dims, dtype, generator),), negate, torch.neg,
        lambda x: -x.double(),
    ),),
    cost=lambda dims, dtype: Cost({{"x": 1}}, {{"y": 1}}, 1, "float32"), timed=((4, 4),), checked=(), smoke=((3, 63),),
)
"""


def test_a_plain_triton_kernel_needs_no_launcher_of_ours(provide: Provide) -> None:
    """An operator that launches with `kernel[grid](...)` is checked as it is."""
    provide("theirs", {"negate": "theirs:CASE"}, {"theirs.py": PLAIN.format(cli_name="negate")})
    case = find("negate")
    with routing.strict():
        cell = correctness.check_cell(case, case.variants[0], (3, 63), torch.float32, DEVICE, compile_baseline=False)
    assert cell["failures"] == []


def test_a_command_line_name_of_ours_is_refused(provide: Provide) -> None:
    """A kernel that answers to one of our names is refused with both packages' names, and ours is still found."""
    provide("theirs", {"negate": "theirs:CASE"}, {"theirs.py": PLAIN.format(cli_name="rmsnorm")})
    with pytest.raises(RegistryError, match=r"of package theirs: .*'rmsnorm', .* rms_norm of triton-kernel-lab"):
        find("negate")
    assert find("rmsnorm").name == "rms_norm"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("theirs.absent:CASE", "ModuleNotFoundError: No module named 'theirs.absent'"),
        ("theirs:ABSENT", "AttributeError: module 'theirs' has no attribute 'ABSENT'"),
        ("theirs.raising:CASE", "RuntimeError: no luck"),
        ("theirs:NUMBER", "int"),
        ("theirs:OTHER", "a case of the name 'broken', found 'swiglu'"),
    ],
)
def test_a_broken_entry_point_is_named_and_breaks_nobody_else(provide: Provide, value: str, found: str) -> None:
    """The sentence names kernel, entry point and package; our kernels and other packages' are found as before."""
    ours = "NUMBER = 1\nfrom triton_kernel_lab.cases.swiglu import CASE as OTHER\n"
    files = {"theirs/__init__.py": ours, "theirs/raising.py": "raise RuntimeError('no luck')\n"}
    provide("theirs", {"broken": value}, files)
    with pytest.raises(RegistryError) as caught:
        find("broken")
    assert f"kernel broken: entry point `broken = {value}` of package theirs: expected a" in str(caught.value)
    assert found in str(caught.value)
    assert find("swiglu").name == "swiglu"
    provide("own-kernels", {"squared_relu": "own_kernels.cases.squared_relu:CASE"}, example_files())
    assert find("squared-relu").name == "squared_relu"


# What a stage of such a kernel consists of.


def test_sources_of_a_provided_kernel_are_of_both_packages(example: Path) -> None:
    """Its case, operator, launch table and package files count, and of the lab what its stage imports."""
    found = set(stage_sources(ROOT, "timing", "squared_relu"))
    package = example / "own_kernels"
    names = ("cases/squared_relu.py", "ops/squared_relu.py", "ops/launch/squared_relu.json", "ops/__init__.py")
    assert {package / name for name in names} <= found
    assert {ROOT / "src/triton_kernel_lab" / name for name in ("lab/worker.py", "ops/_launch.py")} <= found
    assert not any("swiglu" in path.name for path in found)


@pytest.mark.parametrize("name", ["ops/squared_relu.py", "ops/launch/squared_relu.json", "cases/__init__.py"])
def test_an_edit_of_a_provided_kernel_makes_its_numbers_stale(example: Path, name: str) -> None:
    """One byte more in a file of the other package is another digest; ours stay as they were."""
    before, ours = stage_digest(ROOT, "timing", "squared_relu"), stage_digest(ROOT, "timing", "swiglu")
    with (example / "own_kernels" / name).open("a") as stream:
        stream.write("\n")
    assert stage_digest(ROOT, "timing", "squared_relu") != before
    assert stage_digest(ROOT, "timing", "swiglu") == ours


def test_tuning_writes_the_table_of_the_case(example: Path) -> None:
    """A kernel of another package has its launch table beside its operator, one of ours in the checkout."""
    assert tune.table_path(ROOT, load("squared_relu")) == example / "own_kernels/ops/launch/squared_relu.json"
    assert tune.table_path(ROOT, load("swiglu")) == ROOT / "src/triton_kernel_lab/ops/launch/swiglu.json"


# A project of one's own.


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("swiglu", "kernels: expected list, found 'swiglu'"),
        ("[]", "kernels: expected one or more names, each once, found \\[\\]"),
        ("[swiglu, swiglu]", "kernels: expected one or more names, each once"),
        ("[Swiglu]", "kernels: expected names of lower-case letters, digits and underscores, found 'Swiglu'"),
        ("[1]", "kernels: expected names of lower-case letters, digits and underscores, found 1"),
    ],
)
def test_a_list_of_kernels_that_is_none_is_refused(tmp_path: Path, listed: str, message: str) -> None:
    """What params.yaml lists must be names, each once."""
    shutil.copy(EXAMPLE / "dvc.yaml", tmp_path)
    head = (EXAMPLE / "params.yaml").read_text().replace("kernels:\n  - squared_relu\n  - swiglu\n", "")
    (tmp_path / "params.yaml").write_text(f"{head}\nkernels: {listed}\n")
    with pytest.raises(ProjectError, match=message):
        find_project(tmp_path)


def test_a_checkout_of_the_lab_lists_its_registry() -> None:
    """Without a list the kernels are those of the registry."""
    assert find_project(ROOT).kernels == kernel_names(ROOT)


def test_a_project_has_our_stages_and_measures_as_much() -> None:
    """Its pipeline is ours but for the README, over its own kernels and without our files; so are its parameters."""
    ours, theirs = (yaml.safe_load((root / "dvc.yaml").read_text())["stages"] for root in (ROOT, EXAMPLE))
    assert list(theirs) == [stage for stage in ours if stage != "readme"]
    for name, stage in theirs.items():
        assert stage["cmd"] == ours[name]["cmd"]
        assert [stage.get(kind) for kind in ("outs", "metrics", "plots")] == [
            ours[name].get(kind) for kind in ("outs", "metrics", "plots")
        ]
        assert ("matrix" in stage) == ("matrix" in ours[name])
    text = (EXAMPLE / "dvc.yaml").read_text()
    assert "src/" not in text
    assert "KERNELS" not in text
    measure: list[Any] = [yaml.safe_load((root / "params.yaml").read_text())["measure"] for root in (ROOT, EXAMPLE)]
    assert measure[0] == measure[1]


@pytest.mark.usefixtures("example")
def test_measured_times_of_both_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times the tables, the figures' points and the page hold both kernels, and all of it verifies."""
    names, frame = ["squared_relu", "swiglu"], synthetic._write_frame

    def listing(root: Path, *facts: Any) -> None:
        frame(root, *facts)
        with (root / "params.yaml").open("a") as stream:
            stream.write(f"kernels: [{', '.join(names)}]\n")
        # A project of one's own has no pages with places for results.
        shutil.rmtree(root / "docs")
        (root / "README.md").unlink()

    monkeypatch.setattr(synthetic, "_write_frame", listing)
    monkeypatch.setattr(synthetic, "kernel_names", lambda: names)
    made = synthetic.project(
        tmp_path / "tree", shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20, derive=False
    )
    for stage in (roofline, figures, tables, site):
        stage.run(made)
    for name in ("results.md", "points.csv", "index.html"):
        report = (made.reports / name).read_text()
        assert all(kernel in report for kernel in names), name
    assert verify.run(made) == []


def test_the_kernel_stands_in_a_report_next_to_ours(installed: tuple[Path, Path]) -> None:
    """`dvc repro` in the installed example ends in a report of its kernel and of ours, and runs again for neither."""
    project, site = installed
    done = inner(site, "-m dvc repro tables", project)
    assert done.returncode == 0, done.stderr
    report = (project / "reports/cpu/results.md").read_text()
    assert re.findall(r"^### (\w+): correctness\n\nServed by interpreter; passed\.", report, re.MULTILINE) == [
        "squared_relu",
        "swiglu",
    ]
    again = inner(site, "-m dvc repro --dry correctness timing", project)
    assert set(re.findall("Running stage '(.*)'", again.stdout)) <= {
        "environment",
        "sources@squared_relu",
        "sources@swiglu",
    }


def test_the_walk_through_is_what_these_tests_run() -> None:
    """The documented commands are those whose results are checked above, the installation by the wheel it builds."""
    text = (ROOT / "docs/OWN_KERNELS.md").read_text(encoding="utf-8")
    block = re.search(r"```console\n(.*?)```", text, re.DOTALL)
    assert block
    assert block[1].splitlines() == [
        "triton-kernel-lab new squared_relu --project own-kernels",
        "cd own-kernels",
        "git init",
        "python -m pip install --editable '.[measure]'",
        "python -m pytest",
        "dvc repro",
    ]
    named = set(re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE))
    assert named <= set(texts(EXAMPLE))
    assert {name for name in texts(EXAMPLE) if "squared_relu" in name} <= named
