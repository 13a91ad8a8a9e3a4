"""Where the tests run: Triton's interpreter without a GPU, and no test skipped that a GPU was promised for."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    # Tensors are small here, and the threads of two test processes would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Most of what tests make lives long; at the default the collector takes a twentieth of the time.
gc.set_threshold(50_000, 20, 50)

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


def pytest_collection_finish() -> None:
    # What was imported stays. Unfrozen, it is what the lab's own collections between two models go through.
    gc.collect()
    gc.freeze()


def _remember_builtins(interpreter: Any) -> None:
    """Let the interpreter look once for the functions that it replaces: it looks at each call, a fifth of its time."""
    names: dict[Any, list[str]] = {}

    def getmembers(of: Any) -> list[tuple[str, Any]]:
        if of not in names:
            names[of] = [name for name, member in inspect.getmembers(of) if interpreter.tl.core.is_builtin(member)]
        return [(name, getattr(of, name)) for name in names[of]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})


def pytest_runtest_setup() -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if DEVICES == 0 and interpreter is not None and getattr(interpreter, "inspect", None) is inspect:
        _remember_builtins(interpreter)


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
