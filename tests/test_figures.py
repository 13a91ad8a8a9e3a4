from __future__ import annotations

import copy
import hashlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import synthetic

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import figures

SHOWN: dict[str, Any] = {
    "device": "NVIDIA H200",
    "reason": None,
    "panels": {
        "rms_norm": [
            {"shape": "128x1024", "p50_ns": {"triton": 4512, "torch_compile": 4864, "eager": 9600}},
            {"shape": "2048x65536", "p50_ns": {"triton": 132000, "torch_compile": 153000, "eager": None}},
        ],
        "swiglu": [{"shape": "128x1024", "p50_ns": {"triton": 4640, "torch_compile": 4800, "eager": 7040}}],
    },
}
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def svg() -> str:
    return figures.render(SHOWN)


def test_the_figure_has_the_same_bytes_in_every_process(svg: str, tmp_path: Path) -> None:
    """Hash seed, process and the reader's matplotlibrc change no byte of the SVG."""
    (tmp_path / "matplotlibrc").write_text("svg.fonttype: none\nfont.size: 30\naxes.facecolor: black\n")
    code = f"import sys; from triton_kernel_lab.report import figures; sys.stdout.write(figures.render({SHOWN!r}))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True)
    assert done.stdout.decode() == svg


def test_the_figure_carries_the_digests_of_data_and_body(svg: str) -> None:
    """The data's digest can be checked without matplotlib, and the body's against a stray edit."""
    body = hashlib.sha256(figures.strip_digests(svg).encode()).hexdigest()
    assert figures.recorded_digests(svg) == (figures.data_digest(SHOWN), body)
    assert figures.recorded_digests(figures.strip_digests(svg)) is None


def test_another_figure_has_another_digest(svg: str) -> None:
    """One nanosecond more changes the digest of the data."""
    changed = copy.deepcopy(SHOWN)
    changed["panels"]["rms_norm"][0]["p50_ns"]["triton"] += 1
    assert figures.data_digest(changed) != figures.data_digest(SHOWN)


def test_the_figure_is_sound_xml_on_an_opaque_ground_without_a_date(svg: str) -> None:
    """The picture reads alike in dark and in light mode, and says nothing of when it was made."""
    root = ElementTree.fromstring(svg)
    background = root.find(f".//{_SVG}g[@id='patch_1']/{_SVG}path")
    assert background is not None
    assert "fill: #ffffff" in background.attrib["style"]
    assert "opacity" not in background.attrib["style"]
    assert "dc:date" not in svg


def test_every_figure_has_a_bar_and_a_missing_one_has_none(svg: str) -> None:
    """A missing time is written as none, not drawn as a bar of height 0."""
    filled = copy.deepcopy(SHOWN)
    filled["panels"]["rms_norm"][1]["p50_ns"]["eager"] = 300000

    def bars(text: str) -> int:
        return sum(text.count(f"fill: {colour}") for colour in figures._COLOURS.values())

    assert bars(figures.render(filled)) - bars(svg) == 1
    assert "<!-- none -->" in svg
    assert "<!-- none -->" not in figures.render(filled)


def test_the_data_are_the_cold_half_precision_medians(tmp_path: Path) -> None:
    """Of all regimes and dtypes the figure shows cold_clean float16."""
    found = synthetic.project(
        tmp_path, derive=False, shapes=("128x1024",), regimes=("cold_clean", "warm"), samples=10, gpu="NVIDIA H200"
    )
    roofline.run(found)
    made = {kind: artifacts.read(found.artifacts / f"{kind}.json") for kind in ("environment", "roofline")}
    shown = figures.data(made["environment"], made["roofline"])
    for kernel, rows in shown["panels"].items():
        (cell,) = [
            c
            for c in made["roofline"]["cells"]
            if (c["kernel"], c["dtype"], c["regime"]) == (kernel, "float16", "cold_clean")
        ]
        p50 = {c["name"]: c["stats"]["p50_ns"] for c in cell["candidates"] if c["name"] in figures.CANDIDATES}
        assert rows == [{"shape": "128x1024", "p50_ns": p50}]
    assert shown["device"] == "NVIDIA H200"


def test_a_host_without_a_gpu_gets_a_figure_that_says_so(tmp_path: Path) -> None:
    """Without a measured cell the picture holds the reason."""
    found: Project = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    roofline.run(found)
    figures.run(found)
    text = (found.reports / "latency.svg").read_text()
    assert "Not measured: no CUDA device" in text
    assert figures.recorded_digests(text) is not None
