"""roofline.json: everything that is derived from the raw samples of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_kernel_lab import __version__, artifacts
from triton_kernel_lab.analysis.ceilings import summarise_ceilings
from triton_kernel_lab.analysis.cells import derive_cells
from triton_kernel_lab.analysis.counted import counted
from triton_kernel_lab.analysis.inputs import kernel_path, read_each, read_one
from triton_kernel_lab.analysis.locator import locator
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import stage_digest, stale_measurements

__all__ = ["RooflineError", "build", "derive", "run"]


class RooflineError(ValueError):
    """The inputs do not belong to one run; one sentence says why."""


def run(project: Project) -> None:
    """Write ``artifacts/<runner>/roofline.json`` from environment, ceilings, timings and counters.

    Raises:
        ArtifactError, InputError: for a missing, surplus or unsound file.
        RooflineError, CeilingsError, CountedError, StatsError: when they give no roofline.
    """
    environment, ceilings = read_one(project, "environment"), read_one(project, "ceilings")
    made = derive(project, environment, ceilings, read_each(project, "timing"), read_each(project, "counters"))
    artifacts.write(project.artifacts / "roofline.json", made)


def derive(
    project: Project,
    environment: Artifact,
    ceilings: Artifact,
    timings: Mapping[str, Artifact],
    counters: Mapping[str, Artifact],
) -> Artifact:
    """The roofline of artifacts that were read from the project, unwritten."""
    paths = [project.artifacts / "environment.json", project.artifacts / "ceilings.json"]
    paths += [kernel_path(project, "timing", kernel) for kernel in timings]
    paths += [kernel_path(project, "counters", kernel) for kernel in counters]
    return build(
        environment,
        ceilings,
        timings,
        counters,
        inputs=[artifacts.input_record(project.root, path) for path in paths],
        source_sha256=stage_digest(project.root, "roofline"),
        stale=stale_measurements(project),
    )


def build(
    environment: Artifact,
    ceilings: Artifact,
    timings: Mapping[str, Artifact],
    counters: Mapping[str, Artifact],
    *,
    inputs: Sequence[Mapping[str, str]],
    source_sha256: str,
    stale: Sequence[str] = (),
) -> Artifact:
    """Derive a roofline artifact; pure.

    Args:
        environment, ceilings: artifacts of one run.
        timings, counters: the timing and the counters artifact of each kernel.
        inputs: ``{path, sha256}`` of the environment, the ceilings, each timing
            and each of the counters, in this order.
        source_sha256: the digest of the sources that derive.
        stale: the measuring stages whose sources have changed since they ran.

    Raises:
        RooflineError: when measured and unmeasured inputs are mixed.
        CeilingsError, CountedError, StatsError: when a ceiling, a count or a flag is unusable.
    """
    _require_same_status(ceilings, timings)
    raw_inputs = [ceilings, *timings.values()]
    of_raw = inputs[1 : 1 + len(raw_inputs)]
    summary = summarise_ceilings(environment, ceilings) if ceilings["status"] == "measured" else None
    runs = {kernel: f"timing@{kernel}" not in stale or _of_one_run(ceilings, each) for kernel, each in timings.items()}
    cells = _cells(timings, summary, runs) if summary else []
    return {
        "artifact_kind": "roofline",
        "schema_version": 1,
        "claim_kind": _claim([environment, *raw_inputs, *_with_counts(counters)]),
        "producer": {"package": "triton-kernel-lab", "version": __version__, "source_sha256": source_sha256},
        "inputs": [dict(record) for record in inputs],
        "runner": environment["runner"],
        "status": ceilings["status"],
        "reason": ceilings["reason"],
        "raw": [{"path": of["path"], **locator(raw)} for of, raw in zip(of_raw, raw_inputs, strict=True)],
        "stale": list(stale),
        "ceilings": summary,
        "cells": cells,
        "counters": [counted(counters[kernel], timing) for kernel, timing in timings.items()],
    }


def _cells(timings: Mapping[str, Artifact], ceilings: Artifact, of_run: Mapping[str, bool]) -> list[Artifact]:
    return [
        cell for kernel, timing in timings.items() for cell in derive_cells(timing, ceilings, same_run=of_run[kernel])
    ]


def _of_one_run(ceilings: Artifact, timing: Artifact) -> bool:
    """Whether both name one clean commit and one record of the machine.

    Otherwise what is stale was left over from an earlier run, whose device and
    floors are not those of the ceilings.
    """
    machines = [
        {record["sha256"] for record in each["inputs"] if record["path"].endswith("/environment.json")}
        for each in (ceilings, timing)
    ]
    commits = [each["producer"]["git_commit"] for each in (ceilings, timing)]
    clean = ceilings["producer"]["git_tree_dirty"] is False is timing["producer"]["git_tree_dirty"]
    return clean and commits[0] == commits[1] and machines[0] == machines[1]


def _with_counts(counters: Mapping[str, Artifact]) -> list[Artifact]:
    # One that says why there is no count claims nothing.
    return [each for each in counters.values() if each["counter_status"] == "ok"]


def _require_same_status(ceilings: Artifact, timings: Mapping[str, Artifact]) -> None:
    for kernel, timing in timings.items():
        if timing["status"] != ceilings["status"]:
            raise RooflineError(
                f"timing of {kernel}: $.status: expected {ceilings['status']!r} as in ceilings, "
                f"found {timing['status']!r}; run `dvc repro timing@{kernel}`."
            )


def _claim(made_from: Sequence[Artifact]) -> str:
    # A derived claim is worth no more than the least of its inputs.
    kinds = {artifact["claim_kind"] for artifact in made_from}
    return next((kind for kind in ("synthetic", "exploratory") if kind in kinds), "derived")
