"""Which files a stage's code consists of, and when an artifact no longer describes them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from triton_kernel_lab import sources
from triton_kernel_lab.project import MeasureParams, Project
from triton_kernel_lab.sources import (
    STAGES,
    SourceError,
    module_digest,
    stage_digest,
    stage_files,
    stage_sources,
    stale,
    stale_measurements,
    stale_tools,
    tool_digest,
)

PACKAGE = "src/triton_kernel_lab"


def write(root: Path, name: str, text: str) -> Path:
    path = root / PACKAGE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose roofline imports in every way there is."""
    write(tmp_path, "__init__.py", "from triton_kernel_lab.loud import noise\n")
    write(tmp_path, "cases/__init__.py", 'KERNELS: list[str] = ["one", "two"]\n')
    write(tmp_path, "analysis/__init__.py", "from . import unreached\n")
    write(
        tmp_path,
        "analysis/roofline.py",
        "import json\nimport triton_kernel_lab.plain\n"
        "from triton_kernel_lab import artifacts, __version__, whole\n"
        "from triton_kernel_lab.analysis.absolute import thing\nfrom . import sibling\nfrom .. import upstairs\n"
        "from ..other.named import attribute\n"
        "def late():\n    from .deferred import value\n    return value\n",
    )
    names = (
        "plain artifacts whole analysis/absolute analysis/sibling upstairs other/named analysis/deferred "
        "analysis/unreached loud"
    )
    for name in names.split():
        write(tmp_path, f"{name}.py", "")
    write(tmp_path, "analysis/deferred.py", "import triton_kernel_lab.analysis.second\n")
    write(tmp_path, "analysis/second.py", "from .roofline import late\n")
    return tmp_path


def kernel_stage(root: Path) -> None:
    """Add what stage timing consists of, for two kernels."""
    for name in ("lab/timing.py", "lab/prepare.py", "lab/worker.py", "cases/one.py", "cases/two.py"):
        write(root, name, "")
    for kernel in ("one", "two"):
        write(root, f"ops/launch/{kernel}.json", "{}\n")


def names(root: Path, stage: str, kernel: str | None = None) -> list[str]:
    return [path.relative_to(root / PACKAGE).as_posix() for path in stage_sources(root, stage, kernel)]


def project(root: Path) -> Project:
    return Project(root, "nvidia-h200", MeasureParams(1, {}, 1, 1, 1))


def record(path: Path, digest: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"producer": {"source_sha256": digest}}), encoding="utf-8")


def test_closure_follows_every_form_of_import(root: Path) -> None:
    """Absolute, relative, deferred and indirect imports are all followed, in sorted order, cycles included."""
    assert names(root, "roofline") == [
        "analysis/absolute.py",
        "analysis/deferred.py",
        "analysis/roofline.py",
        "analysis/second.py",
        "analysis/sibling.py",
        "other/named.py",
        "plain.py",
        "upstairs.py",
        "whole.py",
    ]


def test_serialising_modules_and_package_inits_are_no_sources(root: Path) -> None:
    """Neither an __init__ nor a module that only serialises counts, nor what only an __init__ imports."""
    left_out = {"artifacts.py", "__init__.py", "analysis/__init__.py", "analysis/unreached.py", "loud.py"}
    assert left_out.isdisjoint(names(root, "roofline"))


def test_launch_table_is_a_source_of_its_kernel_only(root: Path) -> None:
    """A kernel's stage consists of its case and table and of no other kernel's."""
    kernel_stage(root)
    shared = ["lab/prepare.py", "lab/timing.py", "lab/worker.py"]
    assert names(root, "timing", "one") == ["cases/one.py", *shared, "ops/launch/one.json"]


def test_a_case_without_a_table_has_that_of_the_operator_it_calls(root: Path) -> None:
    """What another kernel's operator is launched by is a source of whichever case imports that operator."""
    kernel_stage(root)
    write(root, "ops/one.py", "")
    write(root, "cases/three.py", "from triton_kernel_lab.ops import one\n")
    shared = ["lab/prepare.py", "lab/timing.py", "lab/worker.py"]
    assert names(root, "timing", "three") == ["cases/three.py", *shared, "ops/launch/one.json", "ops/one.py"]


@pytest.mark.parametrize("name", ["analysis/roofline.py", "analysis/second.py", "whole.py"])
def test_digest_follows_each_source(root: Path, name: str) -> None:
    """One byte more in any source, however far, is another digest."""
    before = stage_digest(root, "roofline")
    with (root / PACKAGE / name).open("a") as stream:
        stream.write("#")
    assert stage_digest(root, "roofline") != before


@pytest.mark.parametrize("name", ["artifacts.py", "analysis/__init__.py", "loud.py"])
def test_digest_ignores_what_is_no_source(root: Path, name: str) -> None:
    """An edit of a file that is no source leaves the digest as it was."""
    before = stage_digest(root, "roofline")
    write(root, name, "x = 1\n")
    assert stage_digest(root, "roofline") == before


def test_digest_of_a_table_counts(root: Path) -> None:
    """A retuned launch table makes its kernel's timing another one, and leaves the other kernel's alone."""
    kernel_stage(root)
    one, two = (stage_digest(root, "timing", kernel) for kernel in ("one", "two"))
    write(root, "ops/launch/one.json", '{"BLOCK": 2048}\n')
    assert stage_digest(root, "timing", "one") != one
    assert stage_digest(root, "timing", "two") == two


def test_files_of_a_stage_are_named_with_their_content(root: Path) -> None:
    """Each source has its name in the package and its own digest, whatever its line ends; an edit shows in its own."""
    kernel_stage(root)
    before = stage_files(root, "timing", "one")
    assert list(before) == names(root, "timing", "one")
    assert before["ops/launch/one.json"] == hashlib.sha256(b"{}\n").hexdigest()
    (root / PACKAGE / "ops/launch/one.json").write_bytes(b"{}\r\n")
    assert stage_files(root, "timing", "one") == before
    write(root, "lab/worker.py", "import time\n")
    after = stage_files(root, "timing", "one")
    assert {name for name in before if before[name] != after[name]} == {"lab/worker.py"}


def test_digest_does_not_see_line_ends_or_place(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same tree elsewhere and with CRLF has the same digest."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in (root / PACKAGE).rglob("*.py"):
        copy = elsewhere / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert stage_digest(elsewhere, "roofline") == stage_digest(root, "roofline")


def test_moving_bytes_between_files_changes_the_digest(root: Path) -> None:
    """Name and content are framed, so text moved from one file to the next is another digest."""
    write(root, "plain.py", "a = 1\nb = 2\n")
    before = stage_digest(root, "roofline")
    write(root, "plain.py", "a = 1\n")
    write(root, "upstairs.py", "b = 2\n")
    assert stage_digest(root, "roofline") != before


def test_a_root_without_the_package_falls_back_to_the_running_one(tmp_path: Path) -> None:
    """Outside a checkout the sources are those of the package that runs."""
    checkout = Path(sources.__file__).parents[2]
    assert stage_digest(tmp_path, "roofline") == stage_digest(checkout, "roofline")


@pytest.mark.parametrize(
    ("stage", "kernel", "message"),
    [
        ("timeing", None, "stage: expected one of environment, .*, found 'timeing'"),
        ("timing", None, "stage timing: expected the name of a kernel, found None"),
        ("roofline", "one", "stage roofline: expected no kernel, found 'one'"),
        ("timing", "three", "three.*: expected a source file, found none"),
    ],
)
def test_wrong_stage_or_kernel_is_refused(root: Path, stage: str, kernel: str | None, message: str) -> None:
    """An unknown stage, a kernel too few, too many or unknown: each has its sentence."""
    kernel_stage(root)
    with pytest.raises(SourceError, match=message):
        stage_sources(root, stage, kernel)


def test_a_source_that_is_not_python_is_refused(root: Path) -> None:
    """A syntax error in a source is named with its line, not passed over."""
    write(root, "whole.py", "x = 1\ndef\n")
    with pytest.raises(SourceError, match=r"whole\.py: expected Python, found .* at line 2"):
        stage_digest(root, "roofline")


def test_stale_names_stage_kernel_file_and_command(root: Path) -> None:
    """Of three artifacts exactly the one whose sources changed is named, with the way to mend it."""
    kernel_stage(root)
    found = project(root)
    record(found.artifacts / "roofline.json", stage_digest(root, "roofline"))
    for kernel in ("one", "two"):
        record(found.artifacts / "timing" / f"{kernel}.json", stage_digest(root, "timing", kernel))
    assert stale(found) == []
    write(root, "cases/two.py", "EPS = 1e-5\n")
    assert stale(found) == [
        "artifacts/nvidia-h200/timing/two.json: stage timing of kernel two: its sources changed since; "
        "run `dvc repro timing@two`."
    ]


def test_a_stale_codegen_audit_is_named(root: Path) -> None:
    """The audit lies beside the runners' artifacts, and is stale when what it compiled has changed."""
    kernel_stage(root)
    write(root, "codegen/stage.py", "")
    found = project(root)
    for kernel in ("one", "two"):
        record(root / "artifacts/codegen" / f"{kernel}.json", stage_digest(root, "codegen", kernel))
    assert stale(found) == []
    write(root, "ops/launch/two.json", '{"BLOCK": 2048}\n')
    assert stale(found) == [
        "artifacts/codegen/two.json: stage codegen of kernel two: its sources changed since; "
        "run `dvc repro codegen@two`."
    ]
    assert stale_measurements(found) == []


def test_a_shared_module_makes_every_kernel_stale(root: Path) -> None:
    """An edit of the measuring loop is named once for each kernel."""
    kernel_stage(root)
    found = project(root)
    for kernel in ("one", "two"):
        record(found.artifacts / "timing" / f"{kernel}.json", stage_digest(root, "timing", kernel))
    write(root, "lab/worker.py", "import time\n")
    assert [line.split(":")[0] for line in stale(found)] == [
        "artifacts/nvidia-h200/timing/one.json",
        "artifacts/nvidia-h200/timing/two.json",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"producer": null}', '{"producer": {"source_sha256": 1}}', "\xff"])
def test_a_broken_artifact_is_not_called_stale(root: Path, text: str) -> None:
    """What cannot be read has no recorded sources; naming it is the schema check's work."""
    found = dataclasses.replace(project(root), runner="cpu")
    found.artifacts.mkdir(parents=True)
    (found.artifacts / "roofline.json").write_bytes(text.encode("latin-1"))
    assert stale(found) == []


def test_the_sources_of_a_whole_model_are_driver_measurement_and_integration(root: Path) -> None:
    """An edit of any of them, or of what they import, makes another digest; one of what prints does not."""
    write(root, "decode_e2e.py", "from triton_kernel_lab.console import say\nfrom . import plain\n")
    for name in ("console", "endtoend/measure", "integrations/transformers/__init__", "integrations/transformers/_one"):
        write(root, f"{name}.py", "")
    seen = {tool_digest(root, "decode_e2e")}
    for name in ("console", "integrations/transformers/__init__"):
        write(root, f"{name}.py", "a = 1\n")
        assert tool_digest(root, "decode_e2e") in seen
    names = ("decode_e2e", "plain", "endtoend/measure", "integrations/transformers/_one")
    for count, name in enumerate((*names, "integrations/transformers/_two"), start=2):
        write(root, f"{name}.py", "import triton_kernel_lab.plain\n" if name != "plain" else "a = 1\n")
        seen.add(tool_digest(root, "decode_e2e"))
        assert len(seen) == count


def test_an_artifact_of_a_command_is_stale_by_its_own_sources(root: Path) -> None:
    """It is named with the command that makes it again, and is no stage that DVC could run."""
    for name in ("decode_e2e", "endtoend/measure"):
        write(root, f"{name}.py", "")
    found = project(root)
    record(found.artifacts / "decode_e2e.json", tool_digest(root, "decode_e2e"))
    assert stale_tools(found) == []
    write(root, "endtoend/measure.py", "import time\n")
    assert stale_tools(found) == ["decode_e2e"]
    assert stale_measurements(found) == []
    assert stale(found) == [
        "artifacts/nvidia-h200/decode_e2e.json: its sources changed since; run `python benchmarks/decode_e2e.py`."
    ]


def test_every_stage_of_the_checkout_has_its_entries() -> None:
    """Each entry that names no kernel is a file of this checkout."""
    package = Path(sources.__file__).parent
    plain = {entry for entries in STAGES.values() for entry in entries if "{" not in entry}
    assert {name for name in plain if not (package / name).is_file()} == set()


def test_telling_sources_imports_no_torch() -> None:
    """The walk reads syntax trees, so a host without torch can tell which kernels are stale."""
    code = (
        "import sys, pathlib, triton_kernel_lab.sources as s;"
        f"s.stage_digest(pathlib.Path({str(Path(sources.__file__).parents[2])!r}), 'roofline');"
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_digest_of_a_module_that_is_no_stage_covers_what_it_imports(root: Path) -> None:
    """Entered at the same file it is the stage's; another import changes it, an unreached file does not."""
    before = module_digest(root, "analysis/roofline.py")
    assert before == stage_digest(root, "roofline")
    write(root, "analysis/unreached.py", "changed = 1\n")
    assert module_digest(root, "analysis/roofline.py") == before
    write(root, "analysis/sibling.py", "changed = 1\n")
    assert module_digest(root, "analysis/roofline.py") != before
