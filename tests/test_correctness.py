"""The stages correctness and timing on a host without a GPU: a wrong kernel is told and never timed."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import operator_checks as checks
import pytest
import synthetic
import torch
import triton
import triton.language as tl

from triton_kernel_lab import artifacts, cli
from triton_kernel_lab.cases._base import Case, load
from triton_kernel_lab.lab import correctness, timing
from triton_kernel_lab.lab.correctness import CorrectnessError
from triton_kernel_lab.lab.timing import MeasurementError
from triton_kernel_lab.project import Project, kernel_names

pytestmark = pytest.mark.skipif(not checks.INTERPRETED, reason="runner cpu checks kernels in Triton's interpreter")

ROOT = Path(__file__).parents[1]
norm_case = importlib.import_module("triton_kernel_lab.cases.rms_norm")
norm = norm_case.rms_norm
Run = Callable[..., torch.Tensor]


def small(case: Case) -> Case:
    """The case with one small shape a variant, all that a test waits for."""
    variants = tuple(dataclasses.replace(each, dims=each.dims and each.dims[-1:]) for each in case.variants)
    return dataclasses.replace(case, variants=variants, smoke=case.smoke[:1])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An unmeasured project of runner cpu whose cases are small; it is the working directory."""
    found = synthetic.project(tmp_path / "tree", derive=False, measured=False, runner="cpu")
    shutil.rmtree(found.artifacts / "timing")
    shutil.rmtree(found.artifacts / "correctness")
    monkeypatch.setattr(correctness, "load", lambda kernel: small(load(kernel)))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(found.root)
    return found


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


_checked: dict[str, bytes] = {}


def checked(project: Project, kernel: str) -> bytes:
    """What the stage writes of a kernel as it is; checked once in a process, the slowest part of these tests."""
    path = project.artifacts / "correctness" / f"{kernel}.json"
    if kernel not in _checked:
        correctness.run(project, kernel)
        _checked[kernel] = path.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_checked[kernel])
    return _checked[kernel]


def written(project: Project, stage: str, kernel: str) -> dict[str, Any]:
    return artifacts.read(project.artifacts / stage / f"{kernel}.json", stage)


# Sabotage: what stands in the case for the operator, by the kernel and one variant's own call.


def without_tail(variant: Any) -> Run:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        right = variant.run(*tensors)
        out = torch.empty_like(right)
        out[..., :-1] = right[..., :-1]
        return out

    return run


SABOTAGE: dict[str, tuple[str, Callable[[Any], Run]]] = {
    "zeros": ("rms_norm", lambda variant: lambda *tensors: torch.zeros_like(variant.run(*tensors))),
    "tail_unwritten": ("rms_norm", without_tail),
    "weight_left_out": ("rms_norm", lambda variant: lambda x, *weight: norm_case.rms_norm(x)),
    "swiglu_zeros": ("swiglu", lambda variant: lambda *tensors: torch.zeros_like(variant.run(*tensors))),
    "gate_and_up_swapped": ("swiglu", lambda variant: lambda *tensors: variant.run(*tensors[::-1]).flip(-1)),
}


def sabotage_case(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """Put a saboteur in the place of every variant's call; returns the kernel."""
    kernel, wrong = SABOTAGE[name]
    case = small(load(kernel))
    variants = tuple(dataclasses.replace(variant, run=wrong(variant)) for variant in case.variants)
    monkeypatch.setattr(correctness, "load", lambda kernel: dataclasses.replace(case, variants=variants))
    return kernel


@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_a_sabotaged_kernel_fails_and_is_not_timed(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sabotage: str
) -> None:
    """The command ends with 2 and one sentence, the artifact says where, and timing refuses it with 1."""
    kernel = sabotage_case(monkeypatch, sabotage)
    assert ended(monkeypatch, "correctness", kernel) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith(f"error: correctness of {kernel}: ")
    found = written(project, "correctness", kernel)
    failed = [cell for cell in found["cells"] if not cell["passed"]]
    assert found["passed"] is False
    assert failed
    assert all(cell["failures"] for cell in failed)

    assert ended(monkeypatch, "timing", kernel) == 1
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.endswith("$.passed is false, and a wrong kernel is not timed.")
    assert not (project.artifacts / "timing").exists()


@pytest.mark.parametrize("factor", [10.0, 2.0, 0.0])
def test_a_wrong_eps_fails(project: Project, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Some cell has values so small that eps decides: ten times eps, twice eps and no eps are all found out."""
    monkeypatch.setattr(norm_case, "rms_norm", lambda x, weight, eps, **how: norm(x, weight, factor * eps, **how))
    with pytest.raises(CorrectnessError):
        correctness.run(project, "rms_norm")


def test_a_failure_names_the_first_cell(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error counts the failed cells and says where the first is and what is wrong with it."""
    kernel = sabotage_case(monkeypatch, "zeros")
    with pytest.raises(CorrectnessError) as caught:
        correctness.run(project, kernel)
    cells = written(project, "correctness", kernel)["cells"]
    said = str(caught.value)
    assert said.startswith(f"correctness of rms_norm: {len(cells)} of {len(cells)} cells failed, first default 8x128 ")
    assert "off by" in said


@pytest.mark.parametrize("kernel", kernel_names())
def test_a_right_kernel_passes_in_every_variant(project: Project, kernel: str) -> None:
    """Each variant is checked in fp16 and fp32, and never in bf16, which the interpreter gets wrong."""
    checked(project, kernel)
    found = written(project, "correctness", kernel)
    assert found["passed"] is True
    assert found["served_by"] == "interpreter"
    assert found["runner"] == "cpu"
    cells = {(cell["variant"], cell["dtype"]) for cell in found["cells"]}
    assert cells == {(each.name, dtype) for each in load(kernel).variants for dtype in ("float16", "float32")}
    assert all(cell["torch_compile"] is None for cell in found["cells"])
    assert [record["path"] for record in found["inputs"]] == ["artifacts/cpu/environment.json"]


@pytest.mark.parametrize("kernel", kernel_names())
def test_the_same_check_gives_the_same_bytes(project: Project, kernel: str) -> None:
    """No commit, no clock and no chance is in the artifact, so DVC does not time again what it finds unchanged."""
    path = project.artifacts / "correctness" / f"{kernel}.json"
    first = checked(project, kernel)
    path.unlink()
    torch.manual_seed(99)
    correctness.run(project, kernel)
    assert path.read_bytes() == first


def test_strict_mode_keeps_pytorch_out_of_the_check(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that Triton does not serve is an error of the stage, not a pass of the reference."""
    monkeypatch.setattr(norm_case, "rms_norm", lambda x, *arguments, **options: norm(x.double()).to(x.dtype))
    with pytest.raises(RuntimeError, match="strict mode is on"):
        correctness.run(project, "rms_norm")
    assert not (project.artifacts / "correctness").exists()


# Timing without a device.


def test_f74_nothing_is_timed_without_a_device(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """On runner cpu the artifact says not_measured and why, and holds no cell and no number."""
    assert ended(monkeypatch, "correctness", "swiglu") == 0
    assert ended(monkeypatch, "timing", "swiglu") == 0
    found = written(project, "timing", "swiglu")
    assert (found["status"], found["reason"]) == ("not_measured", "no CUDA device")
    assert (found["cells"], found["processes"], found["claim_kind"]) == ([], [], "exploratory")
    assert [record["path"] for record in found["inputs"]] == [
        "artifacts/cpu/correctness/swiglu.json",
        "artifacts/cpu/environment.json",
    ]


def test_timing_needs_the_check_first(project: Project) -> None:
    """Without a correctness artifact the refusal names the command that makes it."""
    with pytest.raises(artifacts.ArtifactError, match=r"dvc repro correctness@swiglu"):
        timing.run(project, "swiglu")


def test_a_failed_timing_keeps_the_old_artifact(project: Project) -> None:
    """What was measured before stays when the kernel is found wrong later."""
    checked(project, "swiglu")
    timing.run(project, "swiglu")
    path = project.artifacts / "timing/swiglu.json"
    before = path.read_bytes()
    right = written(project, "correctness", "swiglu")
    artifacts.write(project.artifacts / "correctness/swiglu.json", right | {"passed": False})
    with pytest.raises(MeasurementError, match="a wrong kernel is not timed"):
        timing.run(project, "swiglu")
    assert path.read_bytes() == before


def test_a_kernel_edited_in_the_tree_is_the_one_that_is_checked(tmp_path: Path) -> None:
    """From the command line of a checkout, with its own sources: a tail mask that is one short ends with 2."""
    tree = synthetic.project(tmp_path / "tree", derive=False, measured=False, runner="cpu").root
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "schemas", tree / "schemas")
    edit(tree / "src/triton_kernel_lab/ops/swiglu.py", "mask = offsets < columns", "mask = offsets < columns - 1")
    case = tree / "src/triton_kernel_lab/cases/swiglu.py"
    edit(case, "smoke=((8, 128), (3, 63), (3, 5121))", "smoke=((3, 63),)")
    edit(case, "dims=((128, 1024), (17, 1000), (3, 5121))", "dims=((3, 63),)")
    edit(case, "dims=((64, 512), (3, 63))", "dims=((3, 63),)")
    edit(case, "dims=((16, 128), (3, 80))", "dims=((3, 80),)")
    environment = os.environ | {"PYTHONPATH": os.fspath(tree / "src"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "triton_kernel_lab", "correctness", "swiglu"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    (said,) = done.stderr.strip().splitlines()
    assert "NaN or infinity at other places than the oracle" in said
    found = artifacts.read(tree / "artifacts/cpu/correctness/swiglu.json", "correctness")
    assert found["passed"] is False
    assert found["served_by"] == "interpreter"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new), encoding="utf-8")


# The interpreter itself.


def _rounding(x: Any, y: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(tl.bfloat16))


def _product(a: Any, b: Any, c: Any, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_f64_the_interpreter_still_truncates_bf16() -> None:
    """When this fails the interpreter rounds bf16 stores: then its bf16 cells may be checked after all."""
    x = torch.full((16,), 1 + 3 * 2.0**-9)
    y = torch.empty(16, dtype=torch.bfloat16)
    triton.jit(_rounding)[(1,)](x, y, N=16)
    assert x.bfloat16().tolist() == [1 + 2.0**-7] * 16
    assert y.tolist() == [1.0] * 16


def test_f64_the_interpreter_still_multiplies_bf16_matrices_wrongly() -> None:
    """When this fails tl.dot works on bf16 in the interpreter, as it does on fp16 already."""
    left, right = torch.eye(16), torch.arange(256.0).view(16, 16)
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty(16, 16)
        triton.jit(_product)[(1,)](left.to(dtype), right.to(dtype), out, N=16)
        found[dtype] = torch.equal(out, right)
    assert found == {torch.float16: True, torch.bfloat16: False}


@pytest.mark.parametrize("kernel", kernel_names())
def test_f64_no_bf16_cell_is_checked_in_the_interpreter(kernel: str) -> None:
    """A host without a GPU claims nothing of bf16, for the real shapes too."""
    cells = list(correctness._cells(load(kernel), smoke=True))
    assert cells
    assert "bfloat16" not in {dtype for _, _, dtype in cells}
    assert "bfloat16" in {dtype for _, _, dtype in correctness._cells(load(kernel), smoke=False)}
