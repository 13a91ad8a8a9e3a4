"""results.md and metrics.json of a runner, from its roofline and correctness."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis.inputs import read_each, read_extras, read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import counted, crosscheck, crossover, decode_e2e, fused, memory, noise, sections
from triton_kernel_lab.report.labels import conditions, find
from triton_kernel_lab.sources import stale_tools

__all__ = ["metrics", "render", "run"]


def run(project: Project) -> None:
    """Write ``reports/<runner>/results.md`` and ``reports/<runner>/metrics.json``."""
    environment, roofline = read_one(project, "environment"), read_one(project, "roofline")
    checked, timings = read_each(project, "correctness"), read_each(project, "timing")
    text = render(environment, roofline, checked, read_extras(project), stale_tools(project), timings)
    artifacts.write_text(project.reports / "results.md", text)
    artifacts.write_text(project.reports / "metrics.json", artifacts.dumps(metrics(roofline)))


def render(
    environment: Artifact,
    roofline: Artifact,
    correctness: Mapping[str, Artifact],
    extras: Mapping[str, Artifact] | None = None,
    stale: Collection[str] = (),
    timings: Mapping[str, Artifact] | None = None,
) -> str:
    """The whole of results.md. Pure.

    Args:
        environment, roofline: the runner's artifacts.
        correctness: one artifact a kernel.
        extras: those of ``EXTRAS`` that there are.
        stale: which of them other sources made than there are now.
        timings: one artifact a kernel, for who else used the device meanwhile.
    """
    extras = extras or {}
    device = environment["device"]
    parts = [f"# Results: {device['name'] if device else environment['runner']}", conditions(environment, roofline)]
    for kernel, checked in correctness.items():
        parts += [f"## {kernel}", *_kernel(roofline, kernel), sections.correctness(checked)]
    parts += [memory.section(roofline), fused.section(roofline, correctness), crossover.section(roofline)]
    parts.append(decode_e2e.section(extras.get("decode_e2e"), stale="decode_e2e" in stale))
    parts.append(counted.section(roofline.get("counters", ())))
    parts.append(crosscheck.section(extras.get("crosscheck"), correctness, roofline["stale"]))
    parts.append(noise.section(extras.get("noise_floor"), list(correctness)))
    parts += ["## Conditions", sections.beside(timings or {}), sections.environment(environment)]
    if roofline["ceilings"]:
        parts.append(sections.ceilings(roofline["ceilings"]))
    parts += [sections.unpublished(roofline), _chain(environment, roofline, correctness, extras)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _kernel(roofline: Artifact, kernel: str) -> list[str]:
    if roofline["status"] != "measured":
        return [f"Timing not measured: {roofline['reason'] or 'no reason given'}."]
    shown = (sections.results, sections.times, sections.tails, sections.regimes)
    return [section(roofline, kernel) for section in shown]


def _chain(
    environment: Artifact, roofline: Artifact, correctness: Mapping[str, Artifact], extras: Mapping[str, Artifact]
) -> str:
    """The digests that tie the tables to the artifacts they were made from."""
    folder = f"artifacts/{roofline['runner']}"
    made_from = {f"{folder}/environment.json": environment, f"{folder}/roofline.json": roofline}
    made_from |= {f"{folder}/correctness/{kernel}.json": checked for kernel, checked in correctness.items()}
    made_from |= {f"{folder}/{name}.json": artifact for name, artifact in extras.items()}
    lines = [f"- `{path}` sha256 `{_digest(artifact)}`" for path, artifact in made_from.items()]
    return "\n".join(["### Made from", "", *lines])


def _digest(artifact: Artifact) -> str:
    return hashlib.sha256(artifacts.dumps(artifact).encode()).hexdigest()


def metrics(roofline: Artifact) -> dict[str, dict[str, dict[str, Any]]]:
    """``{kernel: {"shape dtype regime": {p50_ns, speedup_over_...}}}`` for `dvc metrics`.

    A figure that does not exist has no key: DVC compares numbers only.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for cell in roofline["cells"]:
        stats = (find(cell, "triton") or {}).get("stats")
        values = {"p50_ns": stats["p50_ns"] if stats else None}
        values |= {
            f"speedup_over_{rival}": cell[f"speedup_over_{rival}"] for rival in ("torch_compile", "eager", "best")
        }
        case = f"{cell['shape']} {cell['dtype']} {cell['regime']}"
        found.setdefault(cell["kernel"], {})[case] = {k: v for k, v in values.items() if v is not None}
    return found
