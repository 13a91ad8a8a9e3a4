"""The pipeline of dvc.yaml as a Mermaid flowchart: a stage points to whatever reads what it writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["FlowchartError", "edges", "read", "render"]

_FIRST_DERIVED = "roofline"
_OUTPUTS = ("outs", "metrics", "plots")
_RUNNER = "${runner}"
# A kernel, a runner: a place that DVC fills in.
_PLACE = re.compile(r"\$\{[^}]*\}")


class FlowchartError(ValueError):
    """dvc.yaml cannot be read as a pipeline; one sentence says why."""


def read(root: Path) -> dict[str, Any]:
    """The stages of the checkout's dvc.yaml, by name in their order."""
    where = root / "dvc.yaml"
    try:
        found = yaml.safe_load(where.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise FlowchartError(f"{where}: not YAML: {' '.join(str(error).split())}.") from error
    stages = found.get("stages") if isinstance(found, dict) else None
    if not isinstance(stages, dict):
        raise FlowchartError(f"{where}: stages: expected a mapping, found {stages!r}.")
    return stages


def edges(stages: Mapping[str, Any]) -> list[tuple[str, str]]:
    """From writer to reader, without those that a longer way replaces."""
    direct = {
        (writer, reader)
        for reader, stage in stages.items()
        for dependency in stage.get("deps", [])
        for writer, other in stages.items()
        if writer != reader and any(_feeds(output, dependency) for output in _outputs(other))
    }
    further = {(a, d) for a, b in direct for c, d in _closure(direct) if b == c}
    order = list(stages)
    return sorted(direct - further, key=lambda edge: (order.index(edge[0]), order.index(edge[1])))


def _outputs(stage: Mapping[str, Any]) -> Iterator[str]:
    for kind in _OUTPUTS:
        for output in stage.get(kind, []):
            yield output if isinstance(output, str) else next(iter(output))


def _feeds(output: str, dependency: str) -> bool:
    written, wanted = _PLACE.sub("*", output), _PLACE.sub("*", dependency)
    return written == wanted or written.startswith(f"{wanted}/")


def _closure(direct: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Every pair with a way from the first to the second."""
    found = set(direct)
    while more := {(a, d) for a, b in found for c, d in direct if b == c} - found:
        found |= more
    return found


def render(stages: Mapping[str, Any]) -> str:
    """The flowchart as a fenced block: what needs the device above, what any machine derives below.

    A measurement leads to the roofline, and is written for a runner.
    """
    ways = _closure(set(edges(stages)))
    of_runner = [name for name in stages if any(_RUNNER in output for output in _outputs(stages[name]))]
    measured = [name for name in of_runner if (name, _FIRST_DERIVED) in ways]
    derived = [name for name in stages if name not in measured]
    lines = ["```mermaid", "flowchart LR"]
    for group, title, names in (("gpu", "on the GPU", measured), ("anywhere", "on any machine", derived)):
        if names:
            lines += [f'  subgraph {group}["{title}"]', *(_node(name, stages) for name in names), "  end"]
    lines += [f"  {writer} --> {reader}" for writer, reader in edges(stages)]
    return "\n".join([*lines, "```"])


def _node(name: str, stages: Mapping[str, Any]) -> str:
    return f'    {name}["{name}@kernel"]' if "matrix" in stages[name] else f"    {name}"
