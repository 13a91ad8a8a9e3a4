"""Stage timing: fresh processes that are started together and measure one after the other."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from triton_kernel_lab.cases._base import load
from triton_kernel_lab.lab import timing
from triton_kernel_lab.project import MeasureParams

CASE = load("swiglu")
CELLS = [((128, 1024), "float16")]


@pytest.fixture(autouse=True)
def measuring_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of these tests are fakes."""
    monkeypatch.setattr(timing, "_WORKER", "fake_worker")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


def test_processes_measure_one_after_the_other() -> None:
    """None is let go before the one before it has ended, each has its own seed, and the runs are told apart."""
    said: list[str] = []
    measured = timing.measure(CASE, CELLS, MeasureParams(3, {"call": 1}, 1, 1 << 20, 7), said.append)
    processes = measured["processes"]
    assert [process["seed"] for process in processes] == [7, 1007, 2007]
    for earlier, later in itertools.pairwise(processes):
        assert earlier["ended"] < later["begun"]
    assert said == [f"cell of process {index}" for index in range(3)]
    ((candidate,),) = (cell["candidates"] for cell in measured["cells"])
    assert candidate["runs"] == [{"process": index} for index in range(3)]


def test_a_process_that_fails_fails_the_stage_with_its_last_words() -> None:
    """The sentence names kernel, process and cause; those that still wait are ended."""
    with pytest.raises(timing.MeasurementError, match=r"^timing of swiglu: process 1 failed: no such kernel"):
        timing.measure(CASE, CELLS, MeasureParams(3, {"failing": 1}, 1, 1 << 20, 7))
