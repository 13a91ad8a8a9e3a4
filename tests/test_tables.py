from __future__ import annotations

import ast
import copy
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline as stage
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project, kernel_names
from triton_kernel_lab.report import tables, units
from triton_kernel_lab.report.markdown import table

REPORT = Path(tables.__file__).parent
AWKWARD = ["0.10", "1E10", "1e10", "00123", "2.0", "2", "1234567.891", "123456.789", "1_000", "-", "inf", "0x10"]


def cells(text: str) -> list[list[str]]:
    """The body of every pipe table in a text, cell by cell."""
    rows = [[cell.strip() for cell in line[1:-1].split(" |")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set(":-|")]


Loaded = tuple[Artifact, Artifact, dict[str, Artifact]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("tables")
    shapes = ("128x1024", "2048x4096")
    found = synthetic.project(root, shapes=shapes, samples=20, factors={"swiglu/triton": 1.25}, gpu="NVIDIA H200")
    checked = {name: artifacts.read(found.artifacts / f"correctness/{name}.json") for name in kernel_names()}
    environment, roofline = (artifacts.read(found.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    return environment, roofline, checked


def render(loaded: Loaded, change: Callable[[Artifact], None] = lambda roofline: None) -> str:
    environment, roofline, checked = copy.deepcopy(loaded)
    change(roofline)
    return tables.render(environment, roofline, checked)


def section(text: str, title: str) -> str:
    return text.partition(f"### {title}\n")[2].partition("\n#")[0]


# Tables of preformatted text


def test_f84_cells_are_the_strings_they_were() -> None:
    """Numbers that look like numbers, exponents, ids and leading zeros survive digit by digit."""
    rows = [[str(index), text] for index, text in enumerate(AWKWARD)]
    assert cells(table(["n", "text"], rows))[1:] == rows


@given(st.lists(st.decimals(0, 10**9, places=3, allow_nan=False), min_size=1, max_size=8))
def test_f84_decimal_points_stand_under_each_other(values: list[Decimal]) -> None:
    """In a column of numbers every decimal point has the same place in the line."""
    lines = table(["time"], [[f"{value:f}"] for value in values]).splitlines()[2:]
    assert len({line.index(".") for line in lines}) == 1


def test_f84_whole_numbers_align_with_decimals() -> None:
    """A number without decimals ends where the others have their point."""
    lines = table(["x"], [["12"], ["1.25x"], ["-"]]).splitlines()[2:]
    assert lines[0].index("2") + 1 == lines[1].index(".")


def test_a_pipe_or_a_line_break_in_a_cell_stays_in_its_cell() -> None:
    """Text that Markdown would read as a border is escaped."""
    text = table(["a", "b"], [["x|y", "two\nlines"]])
    assert len(text.splitlines()) == 3
    assert "x\\|y" in text
    assert "two lines" in text


_IN_GERMAN = """
import locale, sys
try:
    locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
except locale.Error:
    locale._override_localeconv = {"decimal_point": ",", "thousands_sep": ".", "grouping": [3, 0]}
assert locale.localeconv()["decimal_point"] == ",", "not German"
from triton_kernel_lab import artifacts
from triton_kernel_lab.report import tables, units
print(units.microseconds(1234567891), units.ratio(2.5), units.error_size(1e-10), units.percent(0.5))
read = [artifacts.read(path) for path in sys.argv[1:]]
print(tables.render(read[0], read[1], {each["kernel"]: each for each in read[2:]}))
"""


def test_f84_a_german_locale_changes_nothing(tmp_path: Path, loaded: Loaded) -> None:
    """With a decimal comma in the locale every byte of the tables stays the same."""
    if shutil.which("localedef"):
        # Without the sources of the locales this fails, and the script pretends.
        subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], capture_output=True)
    environment, roofline, checked = loaded
    paths = [tmp_path / f"{index}.json" for index in range(2 + len(checked))]
    for path, artifact in zip(paths, (environment, roofline, *checked.values()), strict=True):
        artifacts.write(path, artifact)
    env = {**os.environ, "LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _IN_GERMAN, *map(str, paths)], env=env, check=True, capture_output=True, text=True
    )
    numbers, _, text = done.stdout.partition("\n")
    assert numbers == "1234567.891 2.500x 1.00e-10 50.0 %"
    assert text == tables.render(environment, roofline, checked) + "\n"


@pytest.mark.parametrize("path", sorted(REPORT.glob("*.py")), ids=lambda path: path.name)
def test_f77_only_units_turns_numbers_into_text(path: Path) -> None:
    """No module but units formats a number with a precision, or asks for the locale."""
    if path.name == "units.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.FormattedValue) and node.format_spec), f"line {node.lineno}"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        assert "locale" not in names


# Units


@given(st.integers(1, 10**15))
def test_whole_nanoseconds_print_exactly(ns: int) -> None:
    """Three decimals of a microsecond lose no nanosecond."""
    assert Decimal(units.microseconds(ns)) * 1000 == ns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.microseconds(1), "0.001"),
        (units.microseconds(4512.6667), "4.513"),
        (units.microseconds(1_000_000_000), "1000000.000"),
        (units.gigabytes_per_s(896_000_000_000), "896.00"),
        (units.teraflop_per_s(989_400_000_000_000), "989.4"),
        (units.mebibytes(262_144), "0.25"),
        (units.gibibytes(2**30), "1.0"),
        (units.watts(700_000), "700.0"),
        (units.ratio(2.2145), "2.215x"),
        (units.percent(0.931), "93.1 %"),
        (units.excess_percent(103, 100), "3.00 %"),
        (units.error_size(0.0), "0.00e+00"),
        (units.microseconds(None), "-"),
        (units.ratio(None), "-"),
        (units.percent(None), "-"),
        (units.error_size(None), "-"),
    ],
)
def test_f77_each_unit_has_its_own_factor(text: str, expected: str) -> None:
    """GB are 1e9 and MiB 2**20 bytes, a microsecond is 1000 ns, and nothing prints as missing but None."""
    assert text == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0, -1, True])
@pytest.mark.parametrize("unit", [units.microseconds, units.gigabytes_per_s, units.ratio, units.percent])
def test_f74_a_value_that_cannot_be_is_never_printed(unit: Callable[[Any], str], bad: float) -> None:
    """NaN, infinity, zero and less are refused where a measurement is due."""
    with pytest.raises(units.UnitError, match="finite number above 0"):
        unit(bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-9])
def test_an_error_that_cannot_be_is_never_printed(bad: float) -> None:
    """An error may be zero, but neither negative nor NaN."""
    with pytest.raises(units.UnitError, match="finite error"):
        units.error_size(bad)


# results.md


def test_every_kernel_has_its_tables(loaded: Loaded) -> None:
    """Each kernel of the registry has results, a spread and errors; the run has its conditions."""
    text = render(loaded)
    for kernel in kernel_names():
        for title in ("p50", "spread of Triton", "correctness"):
            assert section(text, f"{kernel}: {title}")
    for title in ("Environment", "Floors", "Memory ladders", "Matmul", "Made from"):
        assert section(text, title)
    assert "NVIDIA H200 Tensor Core GPU datasheet" in text


def test_a_row_holds_the_figures_of_its_cell(loaded: Loaded) -> None:
    """A results row prints p50s, the best baseline by name, speedups, bandwidth and class of its cell."""
    roofline = loaded[1]
    cell = next(c for c in roofline["cells"] if c["shape"] == "2048x4096" and c["kernel"] == "rms_norm")
    p50 = {c["name"]: c["stats"]["p50_ns"] for c in cell["candidates"]}
    rows = cells(section(render(loaded), "rms_norm: p50"))
    headers, row = rows[0], next(row for row in rows if row[:2] == ["2048x4096", cell["dtype"]])
    found = dict(zip(headers, row, strict=True))
    assert found["Triton p50 (us)"] == units.microseconds(p50["triton"])
    assert found["torch.compile p50 (us)"] == units.microseconds(p50["torch_compile"])
    assert (found["Best baseline"], found["its p50 (us)"]) == ("library_op", units.microseconds(p50["library_op"]))
    assert found["vs torch.compile"] == units.ratio(p50["torch_compile"] / p50["triton"])
    assert found["Logical GB/s"] == units.gigabytes_per_s(round(4 * 2048 * 4096 * 1e9 / p50["triton"]))
    assert (found["Class"], found["Verdict"]) == ("memory_bound", "fastest")


def test_a_row_that_loses_says_by_how_much(loaded: Loaded) -> None:
    """A row slower than torch.compile and than the best baseline names both and the excess of each."""
    roofline = loaded[1]
    losing = [cell for cell in roofline["cells"] if cell["kernel"] == "swiglu"]
    rows = cells(section(render(loaded), "swiglu: p50"))[1:]
    assert len(rows) == len(losing) == 4
    for cell, row in zip(losing, rows, strict=True):
        p50 = {c["name"]: c["stats"]["p50_ns"] for c in cell["candidates"]}
        by = {name: units.excess_percent(p50["triton"], p50[name]) for name in ("torch_compile", "library_op")}
        assert row[-1] == f"loses to torch.compile by {by['torch_compile']}, to library_op by {by['library_op']}"


def test_an_equal_time_is_a_tie(loaded: Loaded) -> None:
    """The same p50 as the best baseline is called a tie, neither won nor lost."""

    def change(roofline: Artifact) -> None:
        for candidate in roofline["cells"][0]["candidates"]:
            candidate["stats"]["p50_ns"] = 5000

    assert cells(section(render(loaded, change), "rms_norm: p50"))[1][-1] == "ties"


def test_a_failed_candidate_shows_its_status_and_its_reason(loaded: Loaded) -> None:
    """In place of a figure stands the status, and a table says why."""

    def change(roofline: Artifact) -> None:
        cell = roofline["cells"][0]
        failed = {"status": "failed", "reason": "wrong | result", "stats": None}
        cell["candidates"][0] |= {**failed, "logical_bytes_per_s": None, "attainable_ratio": None}
        cell |= dict.fromkeys(("speedup_over_torch_compile", "speedup_over_eager", "speedup_over_best"))

    text = render(loaded, change)
    row = cells(section(text, "rms_norm: p50"))[1]
    assert (row[2], row[-1]) == ("failed", "no Triton figure")
    assert "wrong \\| result" in section(text, "Without a figure")
    assert "Without a figure" not in render(loaded)


def timed_in(folder: Path, *regimes: str) -> Project:
    """A project of one cell that was timed in these regimes, with its roofline."""
    found = synthetic.project(
        folder, regimes=regimes, shapes=("128x1024",), dtypes=("float16",), samples=10, derive=False
    )
    stage.run(found)
    return found


def test_other_regimes_get_a_table_when_they_were_timed(tmp_path: Path, loaded: Loaded) -> None:
    """With graph and call samples each candidate has a row with a column for every regime."""
    assert "by regime" not in render(loaded)
    regimes = ("cold_clean", "graph", "call")
    found = timed_in(tmp_path, *regimes)
    tables.run(found)
    rows = cells(section((found.reports / "results.md").read_text(), "rms_norm: by regime"))
    assert rows[0] == ["Shape", "Dtype", "Candidate", *(f"{regime} p50 (us)" for regime in regimes)]
    assert len(rows) == 1 + len(synthetic.FACTORS)
    made = artifacts.read(found.artifacts / "roofline.json")
    timed = [c["candidates"][0]["stats"]["p50_ns"] for c in made["cells"] if c["kernel"] == "rms_norm"]
    assert rows[1] == ["128x1024", "float16", "Triton", *map(units.microseconds, timed)]


def test_three_times_stand_beside_each_other(tmp_path: Path, loaded: Loaded) -> None:
    """Device, graph and call time of a cell are one row, each with its own best baseline; a missing one is a dash."""
    assert "three times" not in render(loaded)
    made = artifacts.read(timed_in(tmp_path, "cold_clean", "graph", "call").artifacts / "roofline.json")
    of_kernel = {cell["regime"]: cell for cell in made["cells"] if cell["kernel"] == "rms_norm"}
    of_kernel["call"]["best_baseline"] = "eager"
    made["cells"] = [cell for cell in made["cells"] if cell is not of_kernel["graph"]]
    text = tables.render(loaded[0], made, loaded[2])
    headers, row = cells(section(text, "rms_norm: three times"))
    assert headers[2::4] == [f"Triton, {time} (us)" for time in ("device", "graph", "call")]
    p50 = {regime: {c["name"]: c["stats"]["p50_ns"] for c in cell["candidates"]} for regime, cell in of_kernel.items()}
    device, call = p50["cold_clean"], p50["call"]
    us = units.microseconds
    assert row[2:6] == [us(device["triton"]), us(device["torch_compile"]), "library_op", us(device["library_op"])]
    assert row[6:10] == [units.MISSING] * 4
    assert row[10:] == [us(call["triton"]), us(call["torch_compile"]), "PyTorch eager", us(call["eager"])]
    assert text.index("rms_norm: p50") < text.index("rms_norm: three times") < text.index("rms_norm: spread")


def test_other_processes_on_the_device_are_said_beside_the_conditions(loaded: Loaded) -> None:
    """A kernel whose measuring processes saw others is named with how many each saw, and a quiet run with nothing."""
    seen = {"rms_norm": (0, 0), "swiglu": (2, None, 0), "qk_scores": (None,)}
    timings = {name: {"processes": [{"other_processes": n} for n in counts]} for name, counts in seen.items()}
    text = tables.render(*loaded, timings=timings)
    said = "Measured beside other processes on the device: `swiglu` (2, -, 0)."
    assert f"## Conditions\n\n{said}\n\n" in text
    assert "beside other processes" not in tables.render(*loaded, timings={"rms_norm": timings["rms_norm"]})


def test_the_stage_tells_other_processes_and_verify_derives_the_same(tmp_path: Path) -> None:
    """What the timing artifacts say of others on the device stands in results.md, and belongs there to verify."""
    found = synthetic.project(tmp_path, shapes=("128x1024",), dtypes=("float16",), samples=10, derive=False)
    where = found.artifacts / "timing/swiglu.json"
    synthetic.edit(where, lambda made: made["processes"][1].update(other_processes=3))
    synthetic.run_pure_stages(found)
    said = "Measured beside other processes on the device: `swiglu` (0, 3)."
    assert said in (found.reports / "results.md").read_text()
    assert verify.run(found) == []


def test_a_host_without_a_gpu_prints_why_there_is_no_figure(tmp_path: Path) -> None:
    """An unmeasured runner's tables give the reason, the errors and no time."""
    found = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    stage.run(found)
    tables.run(found)
    text = (found.reports / "results.md").read_text()
    for kernel in kernel_names():
        assert f"## {kernel}\n\nTiming not measured: no CUDA device." in text
        assert section(text, f"{kernel}: correctness")
    assert "p50 (us)" not in text
    assert json.loads((found.reports / "metrics.json").read_text()) == {}


def test_the_tables_name_the_digests_of_what_they_were_made_from(loaded: Loaded) -> None:
    """The last section ties the tables to the bytes of roofline, environment and correctness."""
    environment, roofline, _ = loaded
    text = section(render(loaded), "Made from")
    for artifact in (environment, roofline):
        digest = hashlib.sha256(artifacts.dumps(artifact).encode()).hexdigest()
        assert f"{artifact['artifact_kind']}.json` sha256 `{digest}`" in text


@pytest.mark.parametrize("claim", ["exploratory", "synthetic"])
def test_a_weak_claim_is_said_in_words(loaded: Loaded, claim: str) -> None:
    """Numbers from a dirty tree or made up for a test say so beside their conditions."""
    assert f" {claim.capitalize()}: " in render(loaded, lambda roofline: roofline.update(claim_kind=claim))
    derived = render(loaded, lambda roofline: roofline.update(claim_kind="derived"))
    assert f" {claim.capitalize()}: " not in derived


# metrics.json


def test_metrics_are_numbers_by_kernel_and_case(loaded: Loaded) -> None:
    """Every figure of Triton is reachable as kernel, case, name; a missing one has no key."""
    roofline = copy.deepcopy(loaded[1])
    roofline["cells"][0]["speedup_over_best"] = None
    found = tables.metrics(roofline)
    assert set(found) == set(kernel_names())
    first = found["rms_norm"]["128x1024 float16 cold_clean"]
    assert set(first) == {"p50_ns", "speedup_over_torch_compile", "speedup_over_eager"}
    assert first["p50_ns"] == roofline["cells"][0]["candidates"][0]["stats"]["p50_ns"]
    assert all(
        isinstance(value, int | float) for cases in found.values() for c in cases.values() for value in c.values()
    )


def test_a_change_carries_its_sign_and_a_plain_number_its_digits() -> None:
    """What the gate prints: a sign on every change, whole numbers in full, others to a tenth."""
    assert units.signed_percent(1.005) == "+1.01 %"
    assert units.signed_percent(-12.0) == "-12.00 %"
    assert units.signed_percent(0.0) == "+0.00 %"
    assert (units.plain(3), units.plain(11727.667), units.plain(None)) == ("3", "11727.7", units.MISSING)
