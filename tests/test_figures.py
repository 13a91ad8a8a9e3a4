from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import synthetic
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.project import Project
from triton_kernel_lab.report.figures import cells, distribution, latency, palette, points, stage, svg
from triton_kernel_lab.report.figures import roofline as picture
from triton_kernel_lab.report.figures.svg import Drawing, Sources

_SVG = "{http://www.w3.org/2000/svg}"
_LIMIT_BYTES = 300_000
BY_NAME = {drawing.name: drawing for drawing in stage.DRAWINGS}
TWELVE = (
    *("rms_norm", "rms_norm_backward", "add_rms_norm", "add_rms_norm_backward", "swiglu", "swiglu_backward"),
    *("swiglu_linear", "qk_scores", "paged_kv_gather", "selected_attention", "int4_linear", "flash_attention"),
)
LENGTHS = (1024, 2048, 4096, 8192)
SIX = ("1x128", "1x32x8x512x128", "1x32x8x4096x128", "4x32x8x8192x128", "16x32x8x16384x128", "64x32x8x65536x128")


def sources_of(found: Project) -> Sources:
    environment, derived = (artifacts.read(found.artifacts / f"{kind}.json") for kind in ("environment", "roofline"))
    timings = {path.stem: artifacts.read(path) for path in sorted((found.artifacts / "timing").glob("*.json"))}
    return Sources(environment, derived, timings)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Two shapes of each kernel of the registry, in the regimes that pictures show and one that they do not."""
    options: dict[str, Any] = {"shapes": ("128x1024", "2048x4096"), "samples": 30, "gpu": "NVIDIA H200"}
    root = tmp_path_factory.mktemp("figures")
    found = synthetic.project(root, derive=False, regimes=("cold_clean", "warm", "graph", "call"), **options)
    roofline.run(found)
    return with_attention(sources_of(found))


def with_attention(sources: Sources) -> Sources:
    """The same with attention of four lengths beside it, which tells its memory: of eager by the square of N."""
    first = cells.of_kernel(sources.roofline, "rms_norm")[0]
    made = []
    for length in LENGTHS:
        shape = {"kernel": "flash_attention", "shape": f"2x{length}x{length}x32x8x128", "dtype": "bfloat16"}
        made.append({**copy.deepcopy(first), **shape})
        for candidate in made[-1]["candidates"]:
            candidate["peak_bytes"] = length**2 * 128 if candidate["name"] == "eager" else length * 16384
    others = [cell for cell in sources.roofline["cells"] if cell["kernel"] != "flash_attention"]
    timings = {**sources.timings, "flash_attention": sources.timings["rms_norm"]}
    return Sources(sources.environment, {**sources.roofline, "cells": [*others, *made]}, timings)


def of_other(sources: Sources, kernels: Sequence[str], shapes: Sequence[str]) -> Sources:
    """The same samples under other names: as many kernels and shapes as asked for."""
    name = sources.roofline["cells"][0]["kernel"]
    first = [
        c for c in sources.roofline["cells"] if (c["kernel"], c["dtype"], c["shape"]) == (name, "float16", "128x1024")
    ]
    raw = sources.timings[name]
    cell = next(c for c in raw["cells"] if (c["shape"], c["dtype"]) == ("128x1024", "float16"))
    made = [{**c, "kernel": kernel, "shape": shape} for kernel in kernels for shape in shapes for c in first]
    timings = {
        kernel: {**raw, "kernel": kernel, "cells": [{**cell, "shape": shape} for shape in shapes]} for kernel in kernels
    }
    return Sources(sources.environment, {**sources.roofline, "cells": made}, timings)


def drawn(drawing: Drawing, sources: Sources) -> str:
    return svg.render(drawing, drawing.data(sources))


@pytest.fixture(scope="module")
def pictures(measured: Sources) -> dict[str, str]:
    return {name: drawn(drawing, measured) for name, drawing in BY_NAME.items()}


def test_figures_have_the_same_bytes_in_every_process(
    measured: Sources, pictures: dict[str, str], tmp_path: Path
) -> None:
    """Hash seed, process and the reader's matplotlibrc change no byte of any SVG."""
    (tmp_path / "matplotlibrc").write_text("svg.fonttype: none\nfont.size: 30\naxes.facecolor: black\n")
    shown = {name: drawing.data(measured) for name, drawing in BY_NAME.items()}
    code = (
        "import json, sys; from triton_kernel_lab.report.figures import stage, svg\n"
        "shown = json.load(sys.stdin)\n"
        "json.dump({d.name: svg.render(d, shown[d.name]) for d in stage.DRAWINGS}, sys.stdout)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, env=env, input=json.dumps(shown).encode(), capture_output=True)
    assert json.loads(done.stdout) == pictures


@pytest.mark.parametrize("name", BY_NAME)
def test_a_figure_carries_the_digests_of_data_and_body(measured: Sources, pictures: dict[str, str], name: str) -> None:
    """The data's digest can be checked without matplotlib, and the body's against a stray edit."""
    text = pictures[name]
    body = hashlib.sha256(svg.strip_digests(text).encode()).hexdigest()
    assert svg.recorded_digests(text) == (svg.data_digest(BY_NAME[name].data(measured)), body)
    assert svg.recorded_digests(svg.strip_digests(text)) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_another_figure_has_another_digest(measured: Sources, name: str) -> None:
    """A Triton median that moves by one tick changes the digest of every picture's data."""
    changed = copy.deepcopy(measured)
    for cell in changed.roofline["cells"]:
        ours = cell["candidates"][0]
        ours["stats"]["p50_ns"] += 32
        ours["logical_bytes_per_s"] -= 1
        ours["attainable_ratio"] = (ours["attainable_ratio"] or 0.5) - 0.001
    for timing in changed.timings.values():
        for cell in timing["cells"]:
            cell["candidates"][0]["runs"][0]["samples_ns"][0] += 32
    assert svg.data_digest(BY_NAME[name].data(changed)) != svg.data_digest(BY_NAME[name].data(measured))


@pytest.mark.parametrize("name", BY_NAME)
def test_a_figure_is_sound_xml_on_an_opaque_ground_without_a_date(pictures: dict[str, str], name: str) -> None:
    """A picture has a ground of its own, says nothing of when it was made, and names itself."""
    root = ElementTree.fromstring(pictures[name])
    background = root.find(f".//{_SVG}g[@id='patch_1']/{_SVG}path")
    assert background is not None
    assert f"fill: {palette.GROUND}" in background.attrib["style"]
    assert "opacity" not in background.attrib["style"]
    assert "dc:date" not in pictures[name]
    assert BY_NAME[name].title in pictures[name]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_colour_has_one_for_dark_mode(pictures: dict[str, str], name: str) -> None:
    """No colour of a picture stays as it is where the reader's mode is dark."""
    light = {text.lower() for text in _colours(pictures[name].partition("</style>")[2])}
    assert light <= set(palette.DARK)
    assert all(f'"fill: {colour}"' in pictures[name] for colour in palette.DARK)


def _colours(text: str) -> set[str]:
    return set(re.findall(r"#[0-9a-fA-F]{6}\b", re.sub(r"(href|url\(|id=)\W*#?\w+", "", text)))


@pytest.mark.parametrize("kernels", [1, 12])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_figure_holds_one_to_twelve_kernels_of_six_shapes(measured: Sources, name: str, kernels: int) -> None:
    """With twelve kernels of six long shapes a picture still names each of its own, and stays under 300 kB."""
    text = drawn(BY_NAME[name], of_other(measured, TWELVE[:kernels], SIX if kernels > 1 else SIX[:1]))
    assert len(text.encode()) < _LIMIT_BYTES
    assert all(kernel in _texts(text) for kernel in _named_in(name) if kernel in TWELVE[:kernels])
    root = ElementTree.fromstring(text)
    assert root.attrib["width"] == f"{svg.WIDTH * 72:.2f}".rstrip("0").rstrip(".") + "pt"


def _texts(svg_text: str) -> set[str]:
    """The words of a picture, by which its glyphs are preceded."""
    return {word for said in re.findall("<!-- (.*?) -->", svg_text) for word in said.split()}


def _named_in(name: str) -> set[str]:
    """The kernels that a picture shows of those that there are."""
    shown = {"latency": {*latency.FIRST}, "latency_more": {*TWELVE} - {*latency.FIRST}}
    return set() if name in ("distribution", "memory") else shown.get(name, {*TWELVE})


def test_no_two_of_twelve_kernels_look_alike() -> None:
    """Colour and marker tell twelve kernels apart, in the light and in the dark."""
    marks = palette.kernel_marks(TWELVE).values()
    assert len({colour for colour, _ in marks}) == len({marker for _, marker in marks}) == len(TWELVE)
    assert len({palette.DARK[colour] for colour, _ in marks}) == len(TWELVE)


# Latency


def test_norm_and_activation_come_first_then_decode(measured: Sources) -> None:
    """The first picture has RMSNorm, SwiGLU and decode in this order whatever the registry's; the second the rest."""
    sources = of_other(measured, TWELVE[::-1], SIX)
    first, more = (drawing.data(sources)["panels"] for drawing in (latency.DRAWING, latency.MORE))
    assert [panel["kernel"] for panel in first] == [*latency.FIRST]
    assert [panel["kernel"] for panel in more] == [name for name in TWELVE[::-1] if name not in latency.FIRST]


def test_a_kernel_of_many_shapes_shows_some_from_end_to_end(measured: Sources) -> None:
    """Of more shapes than a panel has room for it shows evenly spread ones, the first and the last among them."""
    shapes = [f"{rows}x14336x4096" for rows in range(1, 21)]
    (panel,) = latency.MORE.data(of_other(measured, ["int4_linear"], shapes))["panels"]
    assert panel["shapes"] == [shapes[at] for at in (0, 3, 5, 8, 11, 14, 16, 19)]
    assert all(list(column) == panel["shapes"] for column in panel["p50_ns"].values())


def test_a_companion_is_no_baseline(measured: Sources) -> None:
    """Another way into our own kernel, however fast, is no rival in any picture."""
    derived = copy.deepcopy(measured.roofline)
    before = {name: drawing.data(measured) for name, drawing in BY_NAME.items()}
    for cell in derived["cells"]:
        ours = next(c for c in cell["candidates"] if c["name"] == "triton")
        stats = {**ours["stats"], "p50_ns": 1}
        cell["candidates"].append({**ours, "name": "by autograd", "role": "companion", "stats": stats})
    with_companion = measured._replace(roofline=derived)
    assert {name: drawing.data(with_companion) for name, drawing in BY_NAME.items()} == before


def test_every_time_has_a_bar_and_a_missing_one_has_a_word(measured: Sources) -> None:
    """A missing time is written as none, not drawn as a bar of height 0."""
    missing = latency.DRAWING.data(measured)
    missing["panels"][0]["p50_ns"]["graph"]["2048x4096"]["eager"] = None
    whole = drawn(latency.DRAWING, measured)
    text = svg.render(latency.DRAWING, missing)
    eager = f"fill: {palette.candidate('eager')}"
    assert whole.count(eager) - text.count(eager) == 1
    assert ("<!-- none -->" in text, "<!-- none -->" in whole) == (True, False)


def test_a_time_that_nobody_measured_leaves_its_column_out(measured: Sources) -> None:
    """Without a graph regime the picture has two columns; where one kernel alone lacks it, its panel says so."""
    kernels = cells.kernels(measured.roofline)
    without = [c for c in measured.roofline["cells"] if c["regime"] != "graph"]
    two = drawn(latency.DRAWING, measured._replace(roofline={**measured.roofline, "cells": without}))
    assert latency.COLUMNS["graph"] not in two
    assert latency.COLUMNS["call"] in two
    lone = [c for c in measured.roofline["cells"] if c["regime"] != "graph" or c["kernel"] != kernels[0]]
    text = drawn(latency.DRAWING, measured._replace(roofline={**measured.roofline, "cells": lone}))
    assert "<!-- not measured -->" in text


def test_the_bars_are_the_medians_of_three_times(measured: Sources) -> None:
    """Device, graph and call show the p50 that the roofline has, and the fourth bar is the fastest other baseline."""
    derived = copy.deepcopy(measured.roofline)
    for cell in derived["cells"]:
        rival = copy.deepcopy(next(c for c in cell["candidates"] if c["name"] == "eager"))
        rival["stats"]["p50_ns"] = 1234
        cell["candidates"].append({**rival, "name": "F.other"})
    (panel, *_) = latency.DRAWING.data(measured._replace(roofline=derived))["panels"]
    for cell in derived["cells"]:
        if (cell["kernel"], cell["dtype"]) == (panel["kernel"], "float16") and cell["regime"] in latency.COLUMNS:
            p50 = {c["name"]: c["stats"]["p50_ns"] for c in cell["candidates"]}
            named = {name: p50[name] for name in ("triton", "torch_compile", "eager")}
            assert panel["p50_ns"][cell["regime"]][cell["shape"]] == {**named, "other": 1234}
    assert set(panel["p50_ns"]) == {"cold_clean", "graph", "call"}


def test_a_kernel_without_float16_shows_its_own_dtype(measured: Sources) -> None:
    """Where a kernel was timed in bfloat16 alone, that is what its panels show and say."""
    derived = {**measured.roofline, "cells": [c for c in measured.roofline["cells"] if c["dtype"] == "bfloat16"]}
    panels = latency.DRAWING.data(measured._replace(roofline=derived))["panels"]
    assert {panel["dtype"] for panel in panels} == {"bfloat16"}
    assert all(panel["p50_ns"] for panel in panels)


# The other pictures


def test_memory_of_attention_is_drawn_over_its_length(measured: Sources) -> None:
    """Each line has a point a length with the bytes and the time of the roofline; lengths with the most points win."""
    shown = BY_NAME["memory"].data(measured)
    assert shown["sizes"] == {"batch": "2", "heads": "32", "kv_heads": "8", "width": "128", "dtype": "bfloat16"}
    assert list(shown["series"]) == ["triton", "torch_compile", "eager", "library_op"]
    eager = shown["series"]["eager"]
    assert [(point["length"], point["peak_bytes"]) for point in eager] == [(n, n * n * 128) for n in LENGTHS]
    lone = copy.deepcopy(measured.roofline["cells"][-1])
    lone["shape"] = "7x1024x1024x32x8x128"
    cells_ = [lone, *measured.roofline["cells"]]
    assert BY_NAME["memory"].data(measured._replace(roofline={**measured.roofline, "cells": cells_})) == shown


def test_attention_that_says_nothing_of_memory_is_not_drawn(measured: Sources) -> None:
    """Artifacts from before memory was measured give a picture that says so."""
    derived = copy.deepcopy(measured.roofline)
    for cell in derived["cells"]:
        for candidate in cell["candidates"]:
            candidate.pop("peak_bytes", None)
    shown = BY_NAME["memory"].data(measured._replace(roofline=derived))
    assert shown["reason"] == "no timing of flash_attention says how much memory it needs"
    assert f"Not measured: {shown['reason']}" in svg.render(BY_NAME["memory"], shown)


def test_regimes_show_the_smallest_and_the_largest_case(measured: Sources) -> None:
    """Two rows a kernel by logical bytes, each with the p50 of every regime, below those of an empty kernel."""
    floor, *rows = BY_NAME["regimes"].data(measured)["rows"]
    assert floor["p50_ns"]["cold_clean"] == measured.roofline["ceilings"]["floors"][1]["p50_ns"]
    assert [row["shape"] for row in rows if row["name"] == "swiglu"] == ["128x1024", "2048x4096"]
    assert set(rows[0]["p50_ns"]) == {"cold_clean", "warm", "graph", "call"}
    one = [c for c in measured.roofline["cells"] if c["shape"] == "128x1024" and c["kernel"] == "swiglu"]
    alone = BY_NAME["regimes"].data(measured._replace(roofline={**measured.roofline, "cells": one}))["rows"]
    assert [row["shape"] for row in alone[1:]] == ["128x1024"]


def test_work_without_arithmetic_is_named_beside_the_roofline(measured: Sources) -> None:
    """A kernel that only moves bytes has no place under a roof of FLOP/s, and the picture says which one that is."""
    first, *others = cells.kernels(measured.roofline)
    cells_ = [{**c, "flop": 0} if c["kernel"] == first else c for c in measured.roofline["cells"]]
    shown = BY_NAME["roofline"].data(measured._replace(roofline={**measured.roofline, "cells": cells_}))
    assert shown["without_arithmetic"] == [first]
    assert list(shown["points"]) == others
    text = svg.render(BY_NAME["roofline"], shown)
    assert f"<!-- without arithmetic, so not here: {first} -->" in text


def test_a_ceiling_that_no_kernel_uses_is_not_drawn(measured: Sources) -> None:
    """Of measured and datasheet rates the roofline shows those of units that some case names."""
    shown = BY_NAME["roofline"].data(measured)["ceilings"]
    assert set(shown["measured"]["flop_per_s"]) == {"float32"}
    assert set(shown["datasheet"]["flop_per_s"]) == {"float32"}


def test_ceilings_that_lie_close_share_a_label() -> None:
    """Two rates between which no label fits are told in one, in their order; one far below has its own."""
    close, far = [(743.4, "bfloat16"), (684.4, "float16")], (51.3, "float32")
    assert picture._near([*close, far]) == [close, [far]]


def test_no_share_is_shown_near_the_floor(measured: Sources) -> None:
    """A cell of which the roofline claims no share of attainable has the word floor in place of a mark."""
    shown = BY_NAME["attainable"].data(measured)
    ratios = [row["ratio"]["triton"] for rows in shown["panels"].values() for row in rows]
    assert None in ratios
    assert svg.render(BY_NAME["attainable"], shown).count("<!-- floor -->") == ratios.count(None)


def test_a_cell_without_a_sound_time_is_none_and_not_near_the_floor(measured: Sources) -> None:
    """Where the samples of ours are flagged the picture says none: nothing is known of how near to a launch it was."""
    shown = copy.deepcopy(BY_NAME["attainable"].data(measured))
    before = svg.render(BY_NAME["attainable"], shown)
    row = next(row for rows in shown["panels"].values() for row in rows if row["ratio"]["triton"] is None)
    row["timed"] = False
    after = svg.render(BY_NAME["attainable"], shown)
    assert after.count("<!-- none -->") == 1 + before.count("<!-- none -->")
    assert after.count("<!-- floor -->") == before.count("<!-- floor -->") - 1


def test_a_word_in_place_of_a_mark_overprints_no_other_mark(measured: Sources) -> None:
    """Where torch.compile has a share though ours has none, at any height, the word floor stands clear of its mark."""
    shown = copy.deepcopy(BY_NAME["attainable"].data(measured))
    for rows in shown["panels"].values():
        row, *_ = [row for row in rows if row["ratio"]["triton"] is None]
        rows[:] = [
            {**copy.deepcopy(row), "ratio": {"triton": None, "torch_compile": at / 50, "other": at / 50 + 0.15}}
            for at in range(8)
        ]
    figure = Figure()
    FigureCanvasAgg(figure)
    BY_NAME["attainable"].draw(figure, shown)
    figure.canvas.draw()
    words = [(axis, text) for axis in figure.axes for text in axis.texts if text.get_text() == "floor"]
    assert len(words) == 8 * len(shown["panels"])
    for axis, text in words:
        extent = text.get_window_extent()
        for line in axis.lines:
            # A mark reaches half its size beyond its middle.
            reach = line.get_markersize() / 2 * figure.dpi / 72 if line.get_marker() not in ("None", "") else None
            for x, y in axis.transData.transform(line.get_xydata()) if reach else ():
                assert not (extent.x0 - reach < x < extent.x1 + reach and extent.y0 - reach < y < extent.y1 + reach), (
                    f"{line.get_xydata()} under {text.get_position()}"
                )


def test_a_kernel_without_a_panel_because_it_is_stale_is_named(measured: Sources) -> None:
    """The note below the title names it, a stale one that has a panel is not left out, and else there is no word."""
    first, second, *_ = cells.kernels(measured.roofline)
    made = [{**c, "attainable_ns": None} if c["kernel"] == first else c for c in measured.roofline["cells"]]
    stale = [f"timing@{first}", f"timing@{second}", f"counters@{first}"]
    spoilt = measured._replace(roofline={**measured.roofline, "cells": made, "stale": stale})
    assert BY_NAME["attainable"].data(spoilt)["stale"] == [first]
    said = f"left out, because their sources have changed since they were timed: {first} -->"
    assert said in drawn(BY_NAME["attainable"], spoilt)
    assert "left out" not in drawn(BY_NAME["attainable"], measured)


def test_bandwidth_leaves_out_what_arithmetic_bounds(measured: Sources) -> None:
    """A cell whose attainable time is longer than that of its bytes is no point among the ladders."""
    first, *others = cells.kernels(measured.roofline)
    slow = [
        {**c, "attainable_ns": 10 * c["attainable_ns"]} if c["kernel"] == first and c["attainable_ns"] else c
        for c in measured.roofline["cells"]
    ]
    shown = BY_NAME["bandwidth"].data(measured._replace(roofline={**measured.roofline, "cells": slow}))
    assert list(shown["points"]) == others


def test_the_distribution_holds_every_unflagged_sample(measured: Sources) -> None:
    """Values and counts of each process sum to the samples that the statistics rest on."""
    chosen = distribution.choose(measured)
    for panel, cell in zip(distribution.DRAWING.data(measured)["panels"], chosen.values(), strict=True):
        for name, processes in panel["samples_ns"].items():
            stats = next(c["stats"] for c in cell["candidates"] if c["name"] == name)
            assert sum(count for process in processes for _, count in process) == stats["samples"]
            assert len(processes) == stats["processes"]
            assert min(value for process in processes for value, _ in process) == stats["min_ns"]


def test_the_chosen_cells_are_the_shortest_and_the_closest(measured: Sources) -> None:
    """The shortest cell has the least Triton p50; in the closest race above the floor no rival is nearer."""
    chosen = distribution.choose(measured)
    cold = [c for c in measured.roofline["cells"] if (c["regime"], c["dtype"]) == ("cold_clean", "float16")]
    assert chosen["the shortest cell"]["candidates"][0]["stats"]["p50_ns"] == min(
        cell["candidates"][0]["stats"]["p50_ns"] for cell in cold
    )
    gaps = [abs(cell["speedup_over_best"] - 1) for cell in cold if cell["class"] != "floor_dominated"]
    assert abs(chosen["the closest race"]["speedup_over_best"] - 1) == min(gaps)


def test_points_have_a_row_a_cell_and_nothing_for_what_is_missing(measured: Sources) -> None:
    """The file for `dvc plots` has each kernel, shape and dtype once; a missing time is empty, not 0."""
    derived = copy.deepcopy(measured.roofline)
    derived["cells"] = [c for c in derived["cells"] if c["regime"] != "graph"]
    head, *rows = [line.split(",") for line in points.render(derived).splitlines()]
    assert tuple(head) == points.COLUMNS
    cases = {(c["kernel"], c["shape"], c["dtype"]) for c in derived["cells"]}
    assert {tuple(row[1:4]) for row in rows} == cases
    assert len(rows) == len(cases)
    assert {row[head.index("graph_us")] for row in rows} == {""}
    assert all(float(row[head.index("device_us")]) > 0 for row in rows)


def test_a_host_without_a_gpu_gets_figures_that_say_so(tmp_path: Path) -> None:
    """Without a measured cell each picture holds the reason."""
    found: Project = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    roofline.run(found)
    stage.run(found)
    for name in BY_NAME:
        text = (found.reports / f"{name}.svg").read_text()
        assert "Not measured: no CUDA device" in text
        assert svg.recorded_digests(text) is not None
    assert (found.reports / "points.csv").read_text() == ",".join(points.COLUMNS) + "\n"
