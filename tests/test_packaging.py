"""The wheel holds what the installed package looks for, and nothing of the checkout besides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import triton_kernel_lab

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/triton_kernel_lab"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", os.fspath(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return zipfile.ZipFile(built)


def test_wheel_holds_the_package_its_schemas_and_its_launch_tables(wheel: zipfile.ZipFile) -> None:
    """Each module, schema and launch table of the checkout is in the wheel, with the pipeline, and no other file."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    expected |= {f"triton_kernel_lab/schemas/{path.name}" for path in (ROOT / "schemas").glob("*.json")}
    expected.add("triton_kernel_lab/pipeline.yaml")
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_wheel_says_version_command_and_licence(wheel: zipfile.ZipFile) -> None:
    """The wheel's version is the package's, its command is the command line, and the licence is in it."""
    info = f"triton_kernel_lab-{triton_kernel_lab.__version__}.dist-info"
    assert "triton-kernel-lab = triton_kernel_lab.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


def test_installed_package_finds_its_schemas(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Away from the checkout the package validates against the schemas that came with it."""
    wheel.extractall(tmp_path / "site")
    code = "from triton_kernel_lab import artifacts; print(artifacts.__file__, *sorted(artifacts.known_kinds()))"
    environment = os.environ | {"PYTHONPATH": os.fspath(tmp_path / "site")}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    file, *kinds = said.split()
    assert Path(file).is_relative_to(tmp_path)
    assert set(kinds) == {path.stem for path in (ROOT / "schemas").glob("*.json")} - {"common"}


def test_installed_package_makes_a_project_with_its_pipeline(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Away from the checkout `new` writes the same pipeline as in it."""
    wheel.extractall(tmp_path / "site")
    code = "from triton_kernel_lab import scaffold; print(scaffold.pipeline(), end='')"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.fspath(source)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for source in (tmp_path / "site", ROOT / "src")
    ]
    assert found[0] == found[1]
    assert found[0].startswith("# The pipeline of triton-kernel-lab")


def test_the_wheel_has_each_extra_that_is_named(wheel: zipfile.ZipFile) -> None:
    """Whatever extra a document or a message tells the reader to install exists, and parquet brings pyarrow."""
    info = f"triton_kernel_lab-{triton_kernel_lab.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    provided = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *PACKAGE.rglob("*.py")]
    named = {
        name
        for path in texts
        for name in re.findall(r"(?:extra\s+`|install the extra )`?([a-z]+)", path.read_text(encoding="utf-8"))
    }
    assert {"gpu", "parquet", "dev", "peers"} <= named <= provided
    assert "Requires-Dist: pyarrow>=17; extra == 'parquet'" in metadata


def test_an_operator_without_torch_names_the_extra() -> None:
    """Where torch is missing an operator is an ImportError in one sentence; any other error stays what it is."""
    code = (
        "import sys\n"
        "sys.modules[sys.argv[1]] = None\n"
        "import triton_kernel_lab\n"
        "try:\n"
        "    from triton_kernel_lab import rms_norm\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error.name, error)\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, missing],
            env=os.environ | {"PYTHONPATH": os.fspath(ROOT / "src")},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for missing in ("torch", "triton_kernel_lab.routing")
    ]
    assert said[0] == "ImportError torch triton_kernel_lab.rms_norm: expected torch, found none; install the extra gpu."
    assert said[1].startswith(
        "ModuleNotFoundError triton_kernel_lab.routing import of triton_kernel_lab.routing halted"
    )
