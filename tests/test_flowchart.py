"""The flowchart of the README is that of dvc.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from triton_kernel_lab.report import flowchart
from triton_kernel_lab.sources import STAGES

ROOT = Path(__file__).parents[1]
STAGES_OF_FIVE: dict[str, Any] = {
    "probe": {"outs": ["a/${runner}/probe.json"]},
    "list": {"outs": ["a/list.json"]},
    "time": {
        "matrix": {"kernel": "${KERNELS}"},
        "deps": ["a/${runner}/probe.json", "a/list.json", "src/x.py"],
        "outs": [{"a/${runner}/time/${item.kernel}.json": {"cache": False}}],
    },
    "roofline": {"deps": ["a/${runner}/probe.json", "a/${runner}/time"], "metrics": [{"a/${runner}/r.json": {}}]},
    "draw": {"deps": ["a/${runner}/r.json"], "plots": ["r/x.svg"]},
}


def test_a_stage_points_to_whoever_reads_what_it_writes() -> None:
    """A folder holds the files of every kernel, and a way that a longer one replaces is left out."""
    found = flowchart.edges(STAGES_OF_FIVE)
    assert found == [("probe", "time"), ("list", "time"), ("time", "roofline"), ("roofline", "draw")]


def test_the_chart_tells_what_needs_the_device() -> None:
    """A runner's artifacts upstream of the roofline need its GPU, all others none; a stage of each kernel says so."""
    assert flowchart.render(STAGES_OF_FIVE).splitlines() == [
        "```mermaid",
        "flowchart LR",
        '  subgraph gpu["on the GPU"]',
        "    probe",
        '    time["time@kernel"]',
        "  end",
        '  subgraph anywhere["on any machine"]',
        "    list",
        "    roofline",
        "    draw",
        "  end",
        "  probe --> time",
        "  list --> time",
        "  time --> roofline",
        "  roofline --> draw",
        "```",
    ]


def test_the_pipeline_of_the_checkout_is_drawn_whole() -> None:
    """Every stage of dvc.yaml is a node, and all hang together."""
    stages = flowchart.read(ROOT)
    text = flowchart.render(stages)
    assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in STAGES)
    joined = {name for edge in flowchart.edges(stages) for name in edge}
    assert joined == set(stages) >= set(STAGES)


@pytest.mark.parametrize(("text", "said"), [("a: [", "not YAML: "), ("stages: 3\n", "stages: expected a mapping")])
def test_what_is_no_pipeline_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    """A dvc.yaml that cannot be read is named with what is wrong."""
    (tmp_path / "dvc.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(flowchart.FlowchartError, match=re.escape(said)) as caught:
        flowchart.read(tmp_path)
    assert "\n" not in str(caught.value)
