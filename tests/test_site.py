"""The page as text: what is in it, what cannot get out of its place, and that it asks for nothing."""

from __future__ import annotations

import base64
import copy
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import site_data
import synthetic

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.stats import percentile, pool
from triton_kernel_lab.project import Project, find_project, kernel_names
from triton_kernel_lab.report import summary
from triton_kernel_lab.report.figures.stage import DRAWINGS
from triton_kernel_lab.report.site import inline, markup, page, stage
from triton_kernel_lab.report.site.markup import TemplateError

ROOT = Path(__file__).parents[1]
_LIMIT_BYTES = 1_500_000
HOSTILE = "</script><script>document.title = 'taken'</script><!--<img src=x onerror=alert(1)> & \u2028"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return site_data.project(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def sources(found: Project) -> page.Sources:
    return site_data.sources(found)


@pytest.fixture(scope="module")
def text(sources: page.Sources) -> str:
    return page.render(sources)


class Outline(html.parser.HTMLParser):
    """Ids, addresses, scripts and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.words = ""
        self._script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [value for value in (given.get("id"),) if value]
        self.addresses += [value for name in ("src", "href") if (value := given.get(name))]
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
        else:
            self.words += data


def data_of(text: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(Outline(text).scripts[0])["cases"]
    return cases


def test_the_stage_writes_the_page_and_its_numbers(found: Project, text: str) -> None:
    """index.html has the same bytes whenever it is rendered, and summary.json a handful of numbers."""
    assert (found.reports / "index.html").read_text(encoding="utf-8") == text
    numbers = json.loads((found.reports / "summary.json").read_text())
    assert set(numbers) == {"cells", "fastest", "median_speedup_over_torch_compile"}
    assert set(numbers["fastest"]) == set(kernel_names())
    assert set(numbers["median_speedup_over_torch_compile"]) == set(summary.TIMES)


def test_the_page_asks_for_nothing(text: str) -> None:
    """Every address is a place in the page, an inert data URL or the report beside it; the policy forbids the rest."""
    assert {each for each in Outline(text).addresses if not each.startswith("#")} == {"data:,", "results.md"}
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none'; img-src data:;")
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", text)


def test_the_policy_lets_this_script_run_and_no_other(text: str) -> None:
    """The digest in the policy is that of the one script that is code."""
    data, script = Outline(text).scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert json.loads(data)


def test_no_two_elements_share_an_id_and_no_link_leads_nowhere(text: str) -> None:
    """Pictures keep their glyphs and clips apart, and each link inside the page has an end."""
    outline = Outline(text)
    assert len(outline.ids) == len(set(outline.ids))
    inside = {address[1:] for address in outline.addresses if address.startswith("#")}
    inside |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert inside <= set(outline.ids)


def test_every_picture_is_in_the_page_in_the_colours_of_the_page(text: str) -> None:
    """Each figure of the report is drawn inline, and no colour in it is fixed."""
    drawn = re.findall(r'<figure id="figure-(\w+)">(.*?)</figure>', text, re.DOTALL)
    assert [name for name, _ in drawn] == [drawing.name for drawing in DRAWINGS]
    assert all("<svg role=" in body and not re.search(r"(fill|stroke): #", body) for _, body in drawn)


@pytest.mark.parametrize("value", [HOSTILE, "{{title}}", "${x}", "'\""])
def test_text_of_an_artifact_stays_text(sources: page.Sources, value: str) -> None:
    """Whatever a reason says, the page has the same scripts and elements as with any other."""
    changed, plain = copy.deepcopy(sources.roofline), copy.deepcopy(sources.roofline)
    for roofline, reason in ((changed, value), (plain, "x")):
        roofline["cells"][0]["candidates"][0].update(stats=None, status="failed", reason=reason)
        roofline["stale"] = []
    spoilt, sound = (Outline(page.render(sources._replace(roofline=each))) for each in (changed, plain))
    assert spoilt.ids == sound.ids
    assert len(spoilt.scripts) == 2
    assert spoilt.scripts[1] == sound.scripts[1]
    timed = json.loads(spoilt.scripts[0])["cases"][0]["regimes"]["cold_clean"]["timed"]
    assert timed[0] == ["failed", value]


def test_a_cell_holds_what_the_roofline_says_of_it(sources: page.Sources, text: str) -> None:
    """Each kernel, shape and dtype is there once, with its regimes, and the row's figures are those of results.md."""
    cases = data_of(text)
    cells = {(c["kernel"], c["shape"], c["dtype"], c["regime"]): c for c in sources.roofline["cells"]}
    assert len(cases) == len({key[:3] for key in cells})
    seen = 0
    for case in cases:
        for regime, shown in case["regimes"].items():
            cell = cells[case["kernel"], case["shape"], case["dtype"], regime]
            p50 = next(c["stats"]["p50_ns"] for c in cell["candidates"] if c["name"] == "triton")
            assert shown["row"][0] == f"{p50 / 1000:.3f}"
            assert shown["outcome"] in ("fastest", "loses")
            seen += 1
    assert seen == len(cells)


def test_quantiles_are_samples_and_end_with_the_largest(sources: page.Sources, text: str) -> None:
    """What the page draws as a distribution are observed values: the least, the median and the largest among them."""
    case = data_of(text)[0]
    raw = sources.timings[case["kernel"]]["cells"][0]["candidates"][0]
    ordered = pool([run for run in raw["runs"] if run["regime"] == "cold_clean"])[0]
    steps = [int(step) for step in case["regimes"]["cold_clean"]["timed"][0][3].split()]
    values = [sum(steps[: at + 1]) for at in range(len(steps))]
    assert (values[0], values[-1]) == (ordered[0], ordered[-1])
    assert values[len(values) // 2] == percentile(ordered, 50)
    assert set(values) <= set(ordered)


def test_details_tell_launch_checks_counters_and_work(sources: page.Sources) -> None:
    """A cell's facts hold launch configuration, registers and spills, correctness, DRAM traffic and itemised bytes."""
    timings = copy.deepcopy(sources.timings)
    launch = {"kernel": "_k", "config": {"block": 512}, "registers": 26, "spills": 0, "shared_bytes": 64}
    name = sources.roofline["cells"][0]["kernel"]
    timings[name]["cells"][0]["candidates"][0]["launch"] = {**launch, "cubin_sha256": "ab" * 32}
    facts = dict(data_of(page.render(sources._replace(timings=timings)))[0]["facts"])
    assert facts["Launch"] == "_k: block 512"
    assert (facts["Registers a thread"], facts["Spills"], facts["Shared memory"]) == ("26", "0", "64 bytes")
    assert facts["Binary (sha256)"] == "ab" * 32
    assert facts["Correctness"].startswith("error ratio 4.20e-04, limit 1.00e-03; ")
    assert facts["Hardware counters"].startswith("DRAM read ")
    assert facts["Logical bytes read"].startswith("x ")


def test_provenance_leads_from_the_roofline_to_the_machine(found: Project, text: str) -> None:
    """Every artifact's digest stands in the page as sha256sum gives it."""
    for path in found.artifacts.rglob("*.json"):
        assert artifacts.sha256_file(path) in text, path


def test_the_method_is_told_in_the_runs_own_figures(sources: page.Sources, text: str) -> None:
    """Floors, the timer's tick and what a dirty flush costs are those of the ceilings."""
    words = Outline(text).words
    ceilings = sources.roofline["ceilings"]
    for ns in (ceilings["timer_quantum_ns"], *(floor["p50_ns"] for floor in ceilings["floors"])):
        assert f"{ns / 1000:.3f}" in words
    flush = ceilings["dirty_flush"][0]
    assert f"{100 * (flush['dirty_p50_ns'] / flush['clean_p50_ns'] - 1):+.2f} %" in words


def test_a_kept_verdict_is_shown_and_an_old_one_is_called_old(sources: page.Sources, found: Project) -> None:
    """The last verdict of the gate says what it judged: these samples, or earlier ones."""
    path = f"artifacts/{found.runner}/timing/rms_norm.json"
    verdict = {
        "verdict": "regressed",
        "base": {"origin": "abc:timing"},
        "compared": 3,
        "reasons": ["1 cell regressed: <rms_norm>"],
        "inputs": [{"path": path, "sha256": artifacts.sha256_file(found.root / path)}],
        "cells": [{"verdict": "REGRESSED"}, {"verdict": "EQUIVALENT"}, {"verdict": "EQUIVALENT"}],
    }
    shown = Outline(page.render(sources._replace(gate=verdict))).words
    assert "regressed on the samples of this page, against abc:timing, 3 cells compared" in shown
    assert "1 cell regressed: <rms_norm>" in shown
    verdict["inputs"] = [{"path": path, "sha256": "0" * 64}]
    assert "regressed on earlier samples" in Outline(page.render(sources._replace(gate=verdict))).words
    assert "No verdict was kept" in Outline(page.render(sources)).words


def test_a_runner_without_a_gpu_has_a_page_that_says_so(tmp_path: Path) -> None:
    """Nothing measured is a page with the reason, the environment and no cell."""
    found = synthetic.project(tmp_path, measured=False, runner="cpu")
    text = (found.reports / "index.html").read_text(encoding="utf-8")
    assert "Not measured: no CUDA device." in Outline(text).words
    assert data_of(text) == []


def test_a_missing_picture_is_one_sentence(tmp_path: Path, found: Project) -> None:
    """Without its pictures the page cannot be made, and the error names the stage that draws them."""
    with pytest.raises(stage.SiteError, match=r"latency\.svg: cannot be read: .*; run `dvc repro figures`\.$"):
        stage.pictures(Project(tmp_path, found.runner, found.measure))


def test_the_published_page_stays_small() -> None:
    """The tracked page is one file of at most 1.5 MB."""
    published = find_project(ROOT).reports / "index.html"
    assert published.stat().st_size <= _LIMIT_BYTES


# The parts


def test_a_template_and_its_parts_fit_exactly() -> None:
    """A place without a part and a part without a place are refused; what is filled in is not filled again."""
    assert markup.fill("<{{a}}{{b}}>", {"a": "{{b}}", "b": "2"}) == "<{{b}}2>"
    for parts in ({"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
        with pytest.raises(TemplateError, match=r"^template\.html: expected the places "):
            markup.fill("{{a}}{{b}}", parts)


def test_data_cannot_end_their_script() -> None:
    """No character that HTML knows is left in the data, and they read back as they were."""
    block = markup.data_block({"a": [HOSTILE, {"b": HOSTILE}], "c": HOSTILE})
    assert not set("<>&\u2028") & set(block)
    assert json.loads(block) == {"a": [HOSTILE, {"b": HOSTILE}], "c": HOSTILE}
    assert len(block.splitlines()) == 3


def test_pictures_of_one_page_share_their_glyphs(found: Project) -> None:
    """Each name that a picture uses is defined in it or in one before it, and no name twice."""
    text = (found.reports / "index.html").read_text(encoding="utf-8")
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    for used in re.finditer(r'<use [^>]*href="#([^"]+)"', text):
        assert 0 <= text.find(f' id="{used[1]}"') < used.start()
    glyph = '<path id="gBold-4a" d="M 0 0"/>'
    assert list(inline.define_once([f"<a>{glyph}</a>", f"<b>{glyph}<path/></b>"])) == [
        f"<a>{glyph}</a>",
        "<b><path/></b>",
    ]


def test_pictures_of_one_page_share_their_styles() -> None:
    """Equal styles become one class, whichever picture they stand in, and its rule says what they said."""
    pictures = ['<a style="fill: red"/><b style="fill: none; stroke: red"/>', '<c style="fill: red" x="1"/>']
    assert inline.share_styles(pictures) == (
        ['<a class="s0"/><b class="s1"/>', '<c class="s0" x="1"/>'],
        ".s0{fill: red}\n.s1{fill: none; stroke: red}",
    )


def test_a_picture_becomes_part_of_the_page() -> None:
    """Declaration, comments, metadata, sheet and size go; ids and colours become the page's."""
    svg = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<!-- data -->\n<svg height="1pt" viewBox="0 0 1 1" width="2pt">'
        '<title>t</title><metadata>m</metadata><defs><style type="text/css">s</style></defs>\n<!-- c -->\n'
        '<path id="p1" style="fill: #ffffff" clip-path="url(#p1)"/><use href="#p1"/></svg>\n'
    )
    assert inline.inline(svg, "b", "What it shows") == (
        '<svg role="img" aria-label="What it shows" class="picture" viewBox="0 0 1 1"><defs></defs>\n'
        '<path id="b-p1" style="fill: var(--ffffff)" clip-path="url(#b-p1)"/><use href="#b-p1"/></svg>'.replace(
            "b-", "b"
        )
    )
