"""The generated blocks of docs/METHODOLOGY.md."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline, verify
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project, kernel_names
from triton_kernel_lab.report import crosscheck, methodology, readme, units

ROOT = Path(__file__).parents[1]
PAGE = "docs/METHODOLOGY.md"
OPTIONS: dict[str, Any] = {"shapes": ("128x1024", "2048x4096"), "dtypes": ("float16",), "samples": 12}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("methodology")
    found = synthetic.project(root, regimes=("cold_clean", "cold_dirty", "graph", "call"), derive=False, **OPTIONS)
    roofline.run(found)
    return found


@pytest.fixture(scope="module")
def loaded(made: Project) -> tuple[Artifact, Artifact]:
    environment, derived = (artifacts.read(made.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    return environment, derived


def lines(text: str, start: str) -> list[list[str]]:
    """The cells of each table row that begins with a word."""
    found = [line for line in text.splitlines() if line.startswith(f"| {start} ")]
    return [[each.strip() for each in line[1:-1].split("|")] for line in found]


def p50(derived: Artifact, name: str, shape: str, regime: str) -> int:
    cell = next(c for c in derived["cells"] if (c["kernel"], c["shape"], c["regime"]) == ("rms_norm", shape, regime))
    return int(next(c["stats"]["p50_ns"] for c in cell["candidates"] if c["name"] == name))


def test_floors_are_those_of_the_run(loaded: tuple[Artifact, Artifact]) -> None:
    """Empty event, null kernel and the timer's tick are printed as the ceilings have them, with the picture's place."""
    text = methodology.blocks(*loaded)["floors"]
    floors = {floor["name"]: floor["p50_ns"] for floor in loaded[1]["ceilings"]["floors"]}
    assert f"| an empty event pair                         | {units.microseconds(floors['empty_event'])} |" in text
    assert units.microseconds(floors["null_kernel_clean"]) in text
    assert re.search(r"\| one tick of the device's timer +\| 0\.032 \|", text)
    assert f"](../reports/{synthetic.RUNNER}/regimes.svg)" in text


def test_dirty_lines_have_their_price_in_two_cells_a_kernel(loaded: tuple[Artifact, Artifact]) -> None:
    """The smallest and the largest case of each kernel stand in both cold regimes, with the difference."""
    rows = lines(methodology.blocks(*loaded)["dirty"], "rms_norm")
    assert [row[1] for row in rows] == ["128x1024", "2048x4096"]
    for row in rows:
        clean, dirty = (p50(loaded[1], "triton", row[1], regime) for regime in ("cold_clean", "cold_dirty"))
        assert row[3:5] == [units.microseconds(clean), units.microseconds(dirty)]
        assert row[5] == units.signed_percent(100 * (dirty / clean - 1))


def test_a_call_has_three_times_of_three_candidates(loaded: tuple[Artifact, Artifact]) -> None:
    """The smallest case of each kernel has a row of device, graph and call times, in the registry's order."""
    text = methodology.blocks(*loaded)["call"]
    (row,) = lines(text, "rms_norm")
    times = [
        units.microseconds(p50(loaded[1], name, "128x1024", regime))
        for name in ("triton", "torch_compile", "eager")
        for regime in ("cold_clean", "graph", "call")
    ]
    assert row == ["rms_norm", "128x1024", "float16", *times]
    assert [line.split()[1] for line in text.splitlines() if line.startswith("| ")][1:] == kernel_names()


def test_p50_is_blind_within_a_tick(loaded: tuple[Artifact, Artifact]) -> None:
    """Pairs of equal p50 are counted, with how far their tmeans lie apart; a pair two ticks apart is not one."""
    environment, derived = copy.deepcopy(loaded)
    derived["cells"] = [
        cell for cell in derived["cells"] if (cell["kernel"], cell["regime"]) == ("rms_norm", "cold_clean")
    ]
    for cell in derived["cells"]:
        for candidate, p50_ns in zip(cell["candidates"], (4000, 4032, 4064, 4000, 4000), strict=True):
            candidate["stats"] |= {"p50_ns": p50_ns, "tmean_ns": 4000.0 + (10 if p50_ns == 4032 else 0)}
    text = methodology.blocks(environment, derived)["blind"]
    # The fourth is a baseline, the fifth the copy, which is none.
    said = "In 4 of 6 comparisons of Triton with a baseline the two p50 lie within one tick of each other"
    assert f"The timer's tick is 32 ns. {said}, and in these the two tmeans up to 0.25 % apart." in text
    (row, _) = lines(text, "rms_norm")
    assert row[3:5] == ["4.000", "4.000"]
    assert row[6] == "0.80 %"


def test_a_stale_time_is_not_divided_by_the_floor_of_another_run(loaded: tuple[Artifact, Artifact]) -> None:
    """Where a timing is of an earlier run the share of an empty kernel is a dash, and of the others it stays."""
    environment, derived = copy.deepcopy(loaded)
    derived["stale"] = ["timing@swiglu", "correctness@rms_norm"]
    before, after = (methodology.blocks(environment, each)["blind"] for each in (loaded[1], derived))
    assert [row[-1] for row in lines(after, "swiglu")] == [units.MISSING] * 2
    assert lines(after, "rms_norm") == lines(before, "rms_norm")
    assert units.MISSING not in [row[-1] for row in lines(before, "swiglu")]


def test_the_agreement_with_nvbench_is_that_of_the_report(loaded: tuple[Artifact, Artifact]) -> None:
    """The block counts the cells of the kernels that were timed here, and says so where there is no cross-check."""
    facts = {"shape": "3x64", "dtype": "float16", "cold_dirty_p50_ns": 20_000, "nvbench_p50_ns": 20_100}
    made = {"status": "measured", "cells": [{"kernel": kernel, **facts} for kernel in ("rms_norm", "of_nobody")]}
    assert methodology.blocks(*loaded, made)["crosscheck"] == crosscheck.sentence(made, ["rms_norm"])
    assert methodology.blocks(*loaded)["crosscheck"].startswith("Not measured yet: ")


def test_without_a_measurement_every_block_says_why(tmp_path: Path) -> None:
    """A runner without a GPU has the reason in place of each figure."""
    found = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    roofline.run(found)
    pair = [artifacts.read(found.artifacts / f"{kind}.json") for kind in ("environment", "roofline")]
    assert set(methodology.blocks(*pair).values()) == {"Not measured: no CUDA device."}


def test_the_page_of_this_repository_has_each_block_once() -> None:
    """No figure stands on the page outside what is generated: each block has its place."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert readme.PAGES[PAGE] == methodology.NAMES
    for name in methodology.NAMES:
        assert readme.extract(text, PAGE, name)


def test_an_edited_figure_of_the_page_is_found(tmp_path: Path) -> None:
    """The stage fills the page, and verify names the block and the cell of a number that does not follow."""
    found = synthetic.project(tmp_path, **OPTIONS)
    assert verify.run(found) == []
    where = found.root / PAGE
    text = where.read_text(encoding="utf-8")
    assert text.startswith("# Synthetic\n")
    where.write_text(text.replace(" 0.032 |", " 0.001 |", 1), encoding="utf-8")
    (problem,) = verify.run(found)
    assert problem.startswith(f"{PAGE}: floors block, line ")
    assert problem.endswith("run `triton-kernel-lab readme`.")
    where.unlink()
    (problem,) = verify.run(found)
    assert problem.startswith(f"{PAGE}: cannot be read: No such file")
