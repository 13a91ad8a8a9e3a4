"""Where the tests run: Triton's interpreter without a GPU, and no test skipped that a GPU was promised for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

# Forty drawn examples of each property keep the whole suite within what one waits for; a deadline would
# make a busy machine's tests fail.
hypothesis.settings.register_profile("suite", max_examples=40, deadline=None)
hypothesis.settings.load_profile("suite")

_SOURCE = Path(__file__).parents[1] / "src"
_EXPECT_GPU = os.environ.get("TKL_EXPECT_GPU") == "1"


def _device_count() -> int:
    try:
        ctypes.CDLL("libcuda.so.1")  # Without a driver there is nothing to ask torch, whose import takes seconds.
        import torch
    except (OSError, ImportError):
        return 0
    return int(torch.cuda.device_count())


DEVICES = _device_count()

# Triton looks at this when a kernel is decorated, so it must stand before any test imports one.
if DEVICES == 0:
    os.environ["TRITON_INTERPRET"] = "1"

# For tests that start the command line in a process of its own, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (os.fspath(_SOURCE), os.environ.get("PYTHONPATH", "")) if path
)


def pytest_configure() -> None:
    if _EXPECT_GPU and DEVICES == 0:
        raise pytest.UsageError("TKL_EXPECT_GPU=1: expected a CUDA device, found none.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICES == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    promised = _EXPECT_GPU and item.get_closest_marker("gpu") is not None
    if promised and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where TKL_EXPECT_GPU=1 promises a GPU: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Pytest itself calls a run in which every test was skipped a success.
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.getoption("collectonly"):
        return
    ran = any(reporter.stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    if not ran and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
