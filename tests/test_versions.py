"""Two versions of the package in one process: each runs its own code, and neither touches the other."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triton_kernel_lab.lab.versions import PACKAGE, Version
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops import swiglu as running

SOURCE = Path(__file__).parents[1] / "src"
OPS = f"{PACKAGE}/ops/swiglu.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the package whose kernel doubles its result."""
    shutil.copytree(SOURCE / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    where = tmp_path / OPS
    text = where.read_text(encoding="utf-8")
    kernel = text[text.index("def _swiglu_kernel") : text.index("def swiglu_reference")]
    assert "y.to(y_ptr.dtype.element_ty)" in kernel
    doubled = kernel.replace("y.to(y_ptr.dtype.element_ty)", "(2.0 * y).to(y_ptr.dtype.element_ty)")
    where.write_text(text.replace(kernel, doubled), encoding="utf-8")
    return tmp_path


@pytest.fixture
def version(folder: Path) -> Iterator[Version]:
    made = Version("tkl_test_base", folder)
    yield made
    made.forget()


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 48, generator=generator).half(), torch.randn(4, 48, generator=generator).half()


def test_both_versions_run_and_differ_where_the_kernel_differs(version: Version) -> None:
    """The same call gives twice the result in the version whose Triton kernel doubles it."""
    gate, up = tensors()
    theirs = version.module("cases.swiglu").CASE.variants[0].run(gate, up)
    assert torch.equal(theirs, 2 * running.swiglu(gate, up))


def test_a_version_imports_its_own_modules_and_reads_its_own_files(version: Version, folder: Path) -> None:
    """Whatever its modules ask for of the package comes from its folder, launch tables included."""
    operator = version.module("ops.swiglu")
    assert operator.__name__ == "tkl_test_base.ops.swiglu"
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tkl_test_base":
            assert Path(str(module.__file__)).is_relative_to(folder)
    table = folder / PACKAGE / "ops/launch/swiglu.json"
    table.write_text('{"architectures": {"sm_90": ["mine"]}}', encoding="utf-8")
    assert operator._launch._table("swiglu") == {"sm_90": ["mine"]}
    assert operator._launch is not _launch


def test_an_import_inside_a_function_finds_the_versions_own_module(folder: Path) -> None:
    """It does so when the function is called, long after the version was loaded."""
    (folder / PACKAGE / "late.py").write_text(
        "def late():\n    import triton_kernel_lab.cases as found\n    from triton_kernel_lab import routing\n"
        "    import triton_kernel_lab\n    return found, routing, triton_kernel_lab\n",
        encoding="utf-8",
    )
    made = Version("tkl_test_late", folder)
    try:
        names = [module.__name__ for module in made.module("late").late()]
    finally:
        made.forget()
    assert names == ["tkl_test_late.cases", "tkl_test_late.routing", "tkl_test_late"]


def test_registering_operators_again_leaves_the_running_ones_alone(version: Version) -> None:
    """torch.library lets a second definition replace the first, so each version registers under its own name."""
    gate, up = tensors()
    expected = running.swiglu(gate, up)
    version.module("ops.swiglu")
    assert torch.equal(torch.ops.triton_kernel_lab.swiglu(gate, up), expected)
    assert torch.equal(torch.ops.tkl_test_base.swiglu(gate, up), 2 * expected)
    assert torch.library.custom_op.__module__.startswith("torch.")


def test_two_copies_of_one_version_are_apart(folder: Path) -> None:
    """Loaded twice, the same folder gives two modules with plans of their own."""
    first, second = (Version(f"tkl_test_{name}", folder) for name in ("one", "two"))
    try:
        one, two = (each.module("ops.swiglu") for each in (first, second))
        assert one._swiglu_kernel is not two._swiglu_kernel
        assert one._plans is not two._plans
    finally:
        first.forget()
        second.forget()


def test_a_forgotten_version_leaves_nothing_behind(folder: Path) -> None:
    """Neither a module nor a finder stays, and the name is unknown again."""
    made, finders = Version("tkl_test_gone", folder), len(sys.meta_path)
    made.module("cases.swiglu")
    made.forget()
    assert len(sys.meta_path) == finders - 1
    assert not [name for name in sys.modules if name.startswith("tkl_test_gone")]
    with pytest.raises(ModuleNotFoundError):
        made.module("cases.swiglu")


def test_what_a_version_lacks_is_missing_there(version: Version, folder: Path) -> None:
    """A module that only the running package has is not found in a version that has none."""
    os.unlink(folder / PACKAGE / "ops/swiglu.py")
    with pytest.raises(ModuleNotFoundError, match=r"tkl_test_base\.ops\.swiglu"):
        version.module("cases.swiglu")
