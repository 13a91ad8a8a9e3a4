"""The page in a real Chromium: opened from a file, sorted, filtered, driven by keys, printed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
import site_data
import synthetic
from chromium import Browser

from triton_kernel_lab.project import find_project, kernel_names
from triton_kernel_lab.report.figures.stage import DRAWINGS
from triton_kernel_lab.report.site import page

ROOT = Path(__file__).parents[1]
CASES = len(kernel_names()) * len(site_data.SHAPES) * 2
ROWS = "[...document.querySelectorAll('#table tbody tr:not(.details)')]"
# A column's figures as numbers, by its header.
COLUMN = """(title => {{
  const at = [...document.querySelectorAll('#table th')].findIndex((cell) => cell.textContent === title);
  return {rows}.map((row) => row.cells[at].textContent);
}})('{title}')"""
HEADER = "[...document.querySelectorAll('#table th button')].find((each) => each.textContent === '{title}')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium.find()
    if path is None:
        said = f"expected one of {', '.join(chromium.NAMES)} on the path or in CHROMIUM, found none"
        if os.environ.get("CI"):
            pytest.fail(f"{said}; CI must open the page.")
        pytest.skip(said)
    with Browser(path) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site_data.project(tmp_path_factory.mktemp("browser")).reports / "index.html"


@pytest.fixture
def opened(browser: Browser, made: Path) -> Browser:
    browser.view(1280)
    browser.open(made)
    return browser


def column(browser: Browser, title: str) -> list[str]:
    found: list[str] = browser.run(COLUMN.format(rows=ROWS, title=title))
    return found


def choose(browser: Browser, control: str, value: str) -> None:
    """Set a control as a reader does, with the event that follows."""
    browser.run(
        f"(() => {{ const each = document.getElementById('{control}'); each.value = '{value}'; "
        "each.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def test_chromium_is_found_where_ci_says_that_the_page_is_opened() -> None:
    """In CI the tests of this module cannot pass by being skipped."""
    assert chromium.find() or not os.environ.get("CI")


@pytest.mark.parametrize("whose", ["synthetic", "published"])
def test_the_page_opens_without_a_complaint_or_a_request(browser: Browser, made: Path, whose: str) -> None:
    """From a file, offline: no error, no warning, nothing asked for but the file, and the table is filled."""
    path = made if whose == "synthetic" else find_project(ROOT).reports / "index.html"
    browser.open(path)
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert browser.run(f"{ROWS}.length") > 0
    assert browser.run("document.querySelectorAll('figure svg').length") == len(DRAWINGS)


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(browser: Browser, made: Path, width: int) -> None:
    """On a phone and on a desk only tables scroll sideways, never the page, with a cell open or not."""
    browser.view(width)
    browser.open(made)
    browser.run("document.querySelector('.open').click()")
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_column_sorts_by_number_both_ways(opened: Browser) -> None:
    """A click on a header sorts ascending by value, another one descending, and says so to whoever listens."""
    before = column(opened, "Triton")
    assert len(before) == CASES
    button = HEADER.format(title="Triton")
    opened.run(f"{button}.click()")
    ascending = [float(text) for text in column(opened, "Triton")]
    assert ascending == sorted(map(float, before))
    assert opened.run(f"{button}.closest('th').getAttribute('aria-sort')") == "ascending"
    opened.run(f"{button}.click()")
    assert [float(text) for text in column(opened, "Triton")] == ascending[::-1]
    assert opened.run("document.querySelectorAll('#table th[aria-sort]:not([aria-sort=none])').length") == 1


def test_shapes_sort_by_their_numbers(opened: Browser) -> None:
    """512x4096 comes before 2048x4096, as no sort of text has it."""
    opened.run(f"{HEADER.format(title='Shape')}.click()")
    found = column(opened, "Shape")
    assert list(dict.fromkeys(found)) == ["128x1024", "512x4096", "2048x4096"]


def test_filters_narrow_and_count(opened: Browser) -> None:
    """Kernel, dtype, outcome and search narrow together, and the count follows."""
    choose(opened, "kernel", "swiglu")
    assert set(column(opened, "Kernel")) == {"swiglu"}
    choose(opened, "dtype", "bfloat16")
    assert set(column(opened, "Dtype")) == {"bfloat16"}
    assert opened.run("document.getElementById('count').textContent") == f"3 of {CASES} cells"
    choose(opened, "search", "2048 LOSES")
    assert column(opened, "Shape") == ["2048x4096"]
    choose(opened, "outcome", "fastest")
    assert column(opened, "Shape") == []
    for control in ("kernel", "dtype", "outcome", "search"):
        choose(opened, control, "")
    assert len(column(opened, "Shape")) == CASES


def test_another_time_shows_other_figures(opened: Browser) -> None:
    """Graph and call time are shown in place of device time, never beside it."""
    device = column(opened, "Triton")
    opened.run("document.querySelector('input[value=graph]').click()")
    assert column(opened, "Triton") != device
    assert set(column(opened, "of attainable")) == {"-"}


def test_keys_alone_reach_and_open_a_cell(opened: Browser) -> None:
    """The first tab stop skips to the cells, and Enter opens and closes a row."""
    opened.press("Tab", 9)
    assert opened.run("document.activeElement.className") == "skip"
    opened.press("Enter", 13, "\r")
    opened.run("document.querySelector('.open').focus()")
    assert opened.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for expanded, rows in (("true", 1), ("false", 0)):
        opened.press("Enter", 13, "\r")
        assert opened.run("document.activeElement.getAttribute('aria-expanded')") == expanded
        assert opened.run("document.querySelectorAll('tr.details').length") == rows
    assert opened.complaints() == []


def test_an_open_cell_draws_its_samples(opened: Browser) -> None:
    """Details hold a curve for each candidate near Triton, a key for all, every statistic and every regime."""
    opened.run("document.querySelector('.open').click()")
    names = opened.run("[...document.querySelectorAll('.key li')].map((each) => each.textContent)")
    beyond = [name for name in names if name.endswith("(beyond)")]
    assert opened.run("document.querySelectorAll('.ecdf path').length") == len(names) - len(beyond) > 0
    assert opened.run("document.querySelector('.ecdf path').getTotalLength()") > 100
    words = opened.run("document.querySelector('.inside').innerText")
    for word in ("tmean", "p50 of each process", "dirty caches", "Correctness", "Hardware counters", "Served by"):
        assert word in words


def test_a_link_to_a_cell_opens_it(browser: Browser, made: Path) -> None:
    """The address that an open cell leaves behind opens that cell again."""
    browser.open(made, "#cell=swiglu/512x4096/float16")
    cell = "document.querySelector('tr.details').previousElementSibling"
    assert (
        browser.run(f"[...{cell}.cells].slice(0, 3).map((each) => each.textContent).join('/')")
        == "swiglu/512x4096/float16"
    )
    assert browser.run(f"{cell}.getBoundingClientRect().top") < 900


def test_dark_mode_turns_page_and_pictures(browser: Browser, made: Path) -> None:
    """Where the reader's mode is dark, the ground of page and pictures is dark and text is light."""
    grounds = {}
    for scheme in ("light", "dark"):
        browser.view(1280, scheme=scheme)
        browser.open(made)
        grounds[scheme] = browser.run(
            "(() => { const page = getComputedStyle(document.body);"
            " const picture = getComputedStyle(document.querySelector('figure svg path'));"
            " return [page.backgroundColor, picture.fill, page.color]; })()"
        )
    assert grounds["light"] == ["rgb(255, 255, 255)", "rgb(255, 255, 255)", "rgb(31, 35, 40)"]
    assert grounds["dark"] == ["rgb(13, 17, 23)", "rgb(13, 17, 23)", "rgb(230, 237, 243)"]


def test_the_page_prints_in_light_without_its_controls(opened: Browser) -> None:
    """On paper there is every cell and every figure, and nothing to click."""
    assert opened.paper().startswith(b"%PDF-")
    opened.ask(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    try:
        shown = {
            part: opened.run(f"getComputedStyle(document.querySelector('{part}')).display")
            for part in ("nav", ".controls", "#table", "figure")
        }
        assert (shown["nav"], shown[".controls"]) == ("none", "none")
        assert "none" not in (shown["#table"], shown["figure"])
        assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    finally:
        opened.ask("Emulation.setEmulatedMedia", media="")


def test_no_text_of_an_artifact_runs(browser: Browser, made: Path, tmp_path: Path) -> None:
    """A reason that is a script is shown, not run."""
    sources = site_data.sources(find_project(made.parent))
    roofline: dict[str, Any] = sources.roofline
    reason = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    roofline["cells"][0]["candidates"][1].update(stats=None, status="failed", reason=reason)
    path = tmp_path / "index.html"
    path.write_text(page.render(sources), encoding="utf-8")
    browser.open(path)
    browser.run("document.querySelector('.open').click()")
    assert reason in browser.run("document.querySelector('.inside').innerText")
    assert browser.run("document.title") == "Synthetic GPU · Triton Kernel Lab"
    assert browser.complaints() == []


def test_a_runner_without_a_gpu_has_a_page_that_opens(browser: Browser, tmp_path: Path) -> None:
    """Where nothing was measured the script has nothing to fill, and does not fail for it."""
    found = synthetic.project(tmp_path, measured=False, runner="cpu")
    browser.open(found.reports / "index.html")
    assert browser.complaints() == []
    assert browser.run("document.getElementById('count').textContent") == "no cell was timed"
