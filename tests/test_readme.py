from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.project import Project, kernel_names
from triton_kernel_lab.report import readme
from triton_kernel_lab.report.readme import BEGIN, END, ReadmeError

TEXT = st.text(st.characters(codec="utf-8"), max_size=60).filter(lambda text: BEGIN not in text and END not in text)
SMALL: dict[str, Any] = {"shapes": ("128x1024", "2048x4096"), "samples": 12, "gpu": "NVIDIA H200"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    found = synthetic.project(tmp_path_factory.mktemp("readme"), derive=False, **SMALL)
    roofline.run(found)
    return found


@given(TEXT, TEXT, TEXT, TEXT)
def test_only_what_stands_between_the_markers_changes(before: str, old: str, new: str, after: str) -> None:
    """Everything outside the markers keeps every character, and the new block can be read back."""
    text = readme.inject(f"{before}{BEGIN}{old}{END}{after}", new)
    assert text == f"{before}{BEGIN}\n{new}\n{END}{after}"
    assert readme.extract(text) == new
    assert readme.inject(text, new) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"README.md: expected the marker {BEGIN} once, found it 0 times"),
        (BEGIN, f"expected the marker {END} once, found it 0 times"),
        (f"{BEGIN}{BEGIN}{END}", f"expected the marker {BEGIN} once, found it 2 times"),
        (f"{END} {BEGIN}", "the other way round"),
    ],
)
def test_markers_that_are_missing_or_mixed_up_are_one_sentence(text: str, message: str) -> None:
    """A README without exactly one block is refused with the file and what to do."""
    with pytest.raises(ReadmeError) as caught:
        readme.inject(text, "new")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    with pytest.raises(ReadmeError, match=re.escape(str(caught.value))):
        readme.extract(text)


def test_a_missing_readme_is_one_sentence(made: Project, tmp_path: Path) -> None:
    """Without README.md the error names the file and both markers."""
    with pytest.raises(ReadmeError, match=r"README\.md: cannot be read: No such file.*results:begin"):
        readme.run(Project(tmp_path, made.runner, made.measure))


@pytest.mark.parametrize("name", readme.NAMES)
def test_each_block_has_its_own_markers(made: Project, name: str) -> None:
    """One block's text goes between its markers and leaves the others alone."""
    text = (made.root / "README.md").read_text(encoding="utf-8")
    changed = readme.inject(text, "new", name=name)
    for other in readme.NAMES:
        assert (readme.extract(changed, name=other) == "new") is (other == name)
    with pytest.raises(ReadmeError, match=f"expected the marker <!-- {name}:begin --> once, found it 0 times"):
        readme.extract(text.replace(f"<!-- {name}:begin -->", ""), name=name)


def test_the_summary_says_where_a_dense_form_takes_over(made: Project) -> None:
    """A kernel with a dense form that was timed at several M has its crossover below the table."""
    environment, derived = (artifacts.read(made.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    cell = next(cell for cell in derived["cells"] if cell["regime"] == "cold_clean")
    for rows in (1, 16):
        dense = {**cell["candidates"][1], "name": "cuBLAS, 16-bit weights"}
        mine = {"kernel": "int4_linear", "shape": f"{rows}x64x64", "dtype": "bfloat16"}
        derived["cells"].append({**cell, **mine, "candidates": [*cell["candidates"], dense]})
    text = readme.blocks(environment, derived, {"roofline": {}})["summary"]
    said = "- `int4_linear`, N x K = 64x64, bfloat16: `cuBLAS, 16-bit weights` is faster at none of the measured M"
    assert f"{said} (1, 16)." in text
    assert "faster at none" not in _blocks(made)["summary"]


def test_the_summary_says_what_pages_cost(made: Project) -> None:
    """Where selected attention was timed from pages, too, the ratio stands below the table; else nothing does."""
    environment, derived = (artifacts.read(made.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    for cell in derived["cells"]:
        if cell["kernel"] == "selected_attention":
            cell["candidates"].append({**cell["candidates"][0], "name": "paged", "role": "companion"})
    text = readme.blocks(environment, derived, {"roofline": {}})["summary"]
    assert "- `selected_attention`, straight from pages of 16: 1.000x to 1.000x the time" in text
    assert "pages of 16" not in _blocks(made)["summary"]


def _blocks(made: Project) -> dict[str, str]:
    environment, derived = (artifacts.read(made.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    return readme.blocks(environment, derived, {"roofline": {}})


def test_the_summary_has_a_row_a_kernel_and_the_conditions(made: Project) -> None:
    """Each kernel of the registry is one row; below stands where and how it was measured."""
    text = _blocks(made)["summary"]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == kernel_names()
    assert text.endswith(_block(made).split("\n\n")[0])


def test_every_lost_cell_is_listed(tmp_path: Path) -> None:
    """A kernel that loses everywhere has a line for each of its cells; the count is of all cells."""
    found = synthetic.project(tmp_path, derive=False, factors={"swiglu/triton": 1.5}, **SMALL)
    roofline.run(found)
    text = _blocks(found)["losses"]
    lost = [line for line in text.splitlines() if "| swiglu" in line]
    cells = len(SMALL["shapes"]) * len(synthetic.DTYPES)
    assert len(lost) == cells
    total = cells * len(kernel_names())
    assert re.search(rf"^On the device a baseline is faster in \d+ of {total} cells\.$", text, re.MULTILINE)


def test_the_block_goes_into_the_readme_and_stays(made: Project) -> None:
    """The stage writes the block in place, and a second run changes nothing."""
    where = made.root / "README.md"
    readme.run(made)
    first = where.read_bytes()
    assert first.startswith(b"# Synthetic\n")
    assert first.endswith(b"\n\nThe end.\n")
    readme.run(made)
    assert where.read_bytes() == first


def _block(made: Project) -> str:
    return readme.block(*(artifacts.read(made.artifacts / f"{kind}.json") for kind in ("environment", "roofline")))


def test_the_conditions_are_a_sentence(made: Project) -> None:
    """Above the table stand the GPU, the stack, the regime, processes and samples."""
    first = _block(made).split("\n\n")[0]
    for fact in ("NVIDIA H200", "PyTorch 2.13.0", "Triton 3.7.1", "CUDA 13.0", "driver 580.159", "`cold_clean`"):
        assert fact in first
    assert "2 processes and 24 samples a candidate" in first


def test_half_precision_rows_come_first_then_bfloat16(made: Project) -> None:
    """Every kernel and shape has a float16 row above all bfloat16 rows."""
    rows = [line.split("|") for line in _block(made).splitlines() if line.startswith("| ")][1:]
    dtypes = [row[3].strip() for row in rows]
    half = len(dtypes) // 2
    assert dtypes == ["float16"] * half + ["bfloat16"] * half
    cases = [(row[1].strip(), row[2].strip()) for row in rows]
    assert cases[:half] == cases[half:]
    assert len(set(cases)) == half


def test_the_block_links_to_the_whole_report(made: Project) -> None:
    """The full tables are reachable by a relative path that exists after a run."""
    assert f"](reports/{made.runner}/results.md)" in _block(made)


def test_a_host_without_a_gpu_says_so_in_the_block(tmp_path: Path) -> None:
    """An unmeasured runner's block gives the reason and no table."""
    found = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    roofline.run(found)
    text = _block(found)
    assert text.startswith("Not measured: no CUDA device.")
    assert "|" not in text
