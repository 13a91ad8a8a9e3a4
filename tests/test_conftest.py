"""The rules of the test run itself: what may skip, and that something has run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
CONFIG = "[pytest]\nmarkers =\n    gpu: needs a device\n"


def run(folder: Path, tests: str, *, devices: int, expect_gpu: bool = False) -> tuple[int, str]:
    """Run ``tests`` under this conftest on a host with that many devices; exit code and output."""
    probe = "DEVICES = _device_count()"
    assert probe in CONFTEST
    (folder / "conftest.py").write_text(CONFTEST.replace(probe, f"DEVICES = {devices}"), encoding="utf-8")
    (folder / "pytest.ini").write_text(CONFIG, encoding="utf-8")
    (folder / "test_it.py").write_text(f"import pytest\n{tests}", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TKL_EXPECT_GPU": "1" if expect_gpu else "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", os.fspath(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


GPU_TEST = "@pytest.mark.gpu\ndef test_gpu(): pass\n"
CPU_TEST = "def test_cpu(): pass\n"
SKIPPING = "@pytest.mark.gpu\ndef test_gpu(): pytest.skip('not today')\n"
XFAILING = "@pytest.mark.gpu\n@pytest.mark.xfail(reason='known')\ndef test_gpu(): assert False\n"
MODES = "import os\ndef test_mode(): assert os.environ.get('TRITON_INTERPRET') == {}\n"


def test_gpu_tests_skip_without_a_device(tmp_path: Path) -> None:
    """Beside tests that run, a GPU test without a device is reported as skipped."""
    code, said = run(tmp_path, GPU_TEST + CPU_TEST, devices=0)
    assert code == 0
    assert "1 passed, 1 skipped" in said


def test_f89_a_run_in_which_everything_skipped_is_no_success(tmp_path: Path) -> None:
    """If every test skipped, no test ran, and that is pytest's code for it: 5."""
    code, said = run(tmp_path, GPU_TEST, devices=0)
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 skipped" in said


@pytest.mark.parametrize("expect_gpu", [False, True])
def test_gpu_tests_run_on_a_device(tmp_path: Path, expect_gpu: bool) -> None:
    """With a device the GPU test runs."""
    code, said = run(tmp_path, GPU_TEST, devices=1, expect_gpu=expect_gpu)
    assert code == 0
    assert "1 passed" in said


def test_f89_a_promised_gpu_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Where a GPU is promised and none is there, nothing runs and the run fails."""
    code, said = run(tmp_path, GPU_TEST + CPU_TEST, devices=0, expect_gpu=True)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "expected a CUDA device, found none" in said


@pytest.mark.parametrize(("expect_gpu", "code"), [(True, 1), (False, 5)])
def test_f89_a_gpu_test_may_not_skip_where_a_gpu_is_promised(tmp_path: Path, expect_gpu: bool, code: int) -> None:
    """A GPU test that skips itself fails on the GPU runner, with the reason that it gave."""
    found, said = run(tmp_path, SKIPPING, devices=1, expect_gpu=expect_gpu)
    assert found == code
    assert "not today" in said


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    """An xfail with its reason is still an xfail on the GPU runner."""
    assert run(tmp_path, XFAILING, devices=1, expect_gpu=True)[0] == 0


@pytest.mark.parametrize(("devices", "mode"), [(0, "'1'"), (1, "None")])
def test_interpreter_stands_in_for_a_missing_gpu(tmp_path: Path, devices: int, mode: str) -> None:
    """Triton interprets kernels exactly where there is no device to run them."""
    assert run(tmp_path, MODES.format(mode), devices=devices)[0] == 0
