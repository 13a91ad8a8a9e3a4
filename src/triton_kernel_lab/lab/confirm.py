"""`gate --confirm`: the kernels of an earlier commit and of the tree, timed in turns in the same processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from triton_kernel_lab import __version__, revisions
from triton_kernel_lab.analysis import confirm as judging
from triton_kernel_lab.analysis.evidence import folder as artifacts_folder
from triton_kernel_lab.analysis.pairing import RenameError
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import MeasureParams, Project, kernel_names
from triton_kernel_lab.sources import SourceError, module_digest, stale_measurements

__all__ = [
    "LEAST_PROCESSES",
    "PACKAGE",
    "Engine",
    "Request",
    "base_of",
    "compiled_from",
    "measure",
    "parse_cells",
    "require_device",
    "run",
    "wanted",
]

PACKAGE = "src/triton_kernel_lab"
LEAST_PROCESSES = 5
"""Each process gives one difference, and the spread of fewer than five says little."""

_SAMPLES = 200

Engine = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Measures the plan of one process; returns its ``process`` record and its ``cells``."""

Cell = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is asked for on the command line; empty means all.

    ``cells`` are (shape, dtype), ``renames`` new names by old ones.
    """

    base: str | None = None
    kernels: Sequence[str] = ()
    cells: Collection[tuple[str, str]] = ()
    regimes: Sequence[str] = ()
    renames: Mapping[str, str] = field(default_factory=dict)


def run(
    project: Project,
    request: Request,
    *,
    engine: Engine | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Judge the tree's kernels against an earlier commit's; returns a ``confirm`` artifact.

    Args:
        project: the checkout, with or without uncommitted changes.
        request: what is compared with what.
        engine: what measures a process; None takes this GPU.
        progress: told what is being done.

    Raises:
        NotComparableError: there is no CUDA device, or nothing of what was asked for.
        RevisionError: git cannot find or read the base.
        MeasurementError: a measuring process failed.
    """
    regimes = _regimes(request.regimes)
    commit = base_of(project, request.base)
    # Asked before measuring: the code that runs is the code that lies there now.
    git = revisions.producer_git(project.root)
    place = _place(engine)
    with tempfile.TemporaryDirectory() as scratch:
        revisions.export(project.root, commit, PACKAGE, Path(scratch))
        found = _sort(Path(scratch), project.root, request, regimes)
        folders = {"base": Path(scratch, "src"), "now": project.root / "src"}
        measured = measure(folders, found.timed, project.measure, regimes, engine, progress)
    rows = judging.ordered([*found.rows, *judging.judge(measured["cells"], regimes)])
    claim = "measured" if git["git_tree_dirty"] is False else "exploratory"
    return {
        "artifact_kind": "confirm",
        "schema_version": 1,
        "claim_kind": "synthetic" if engine else claim,
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": module_digest(project.root, "lab/confirm.py", "lab/confirm_worker.py"),
            **git,
        },
        "inputs": [],
        **place,
        "base": {"origin": request.base or "the last measurement", "git_commit": commit},
        "method": "paired",
        "timer_quantum_ns": judging.quantum_of(measured["cells"]) if found.timed else None,
        "renamed": [{"old": old, "new": new} for old, new in sorted(request.renames.items())],
        "missing": found.missing,
        "verdict": judging.overall(rows, found.missing),
        "compared": judging.compared(rows),
        "reasons": judging.reasons(rows, found.missing),
        "cells": rows,
        **{name: measured[name] for name in ("protocol", "processes")},
        "raw": measured["cells"],
    }


class _Sorted(NamedTuple):
    """What needs no measurement, what is timed, and the kernels that only the base has."""

    rows: list[judging.Row]
    timed: list[Cell]
    missing: list[str]


def _sort(base: Path, now: Path, request: Request, regimes: Sequence[str]) -> _Sorted:
    """The cells of a request by what is to be done with them; the folders hold ``src``."""
    held, names = _held(base), kernel_names(now)
    _check_renames(request.renames, held, names)
    cells = wanted(names, request)
    rows: list[judging.Row] = []
    timed = []
    for cell in cells:
        if cell["base_kernel"] not in held:
            rows += [judging.row(cell, each, "NEW", "only the current side holds it") for each in regimes]
        elif not request.kernels and _same(base, now, cell):
            rows += [judging.unchanged(cell, each) for each in regimes]
        else:
            timed.append(cell)
    # Whoever names kernels asks about those alone.
    lost = [] if request.kernels else [each for each in held if each not in names and each not in request.renames]
    return _Sorted(rows, timed, lost)


def parse_cells(texts: Iterable[str]) -> list[tuple[str, str]]:
    """The shapes and dtypes that texts such as `2048x4096 bfloat16` name.

    Raises:
        ValueError: a text does not consist of two words.
    """
    found = [tuple(text.split()) for text in texts]
    for words in found:
        if len(words) != 2:
            raise ValueError(f"--cell: expected a shape and a dtype, found {' '.join(words)!r}.")
    return [(words[0], words[1]) for words in found]


def _regimes(asked: Sequence[str]) -> list[str]:
    unknown = [regime for regime in asked if regime not in REGIMES]
    if unknown:
        raise ValueError(f"--regime: expected one of {', '.join(REGIMES)}, found {unknown[0]!r}.")
    return [regime for regime in REGIMES if regime in (asked or REGIMES[:1])]


def base_of(project: Project, revision: str | None) -> str:
    """The commit that is compared with.

    Without a revision it is the one whose times are published: where the sources
    have changed since, the last that changed any times, and else the one before,
    since the last one's times are those of the tree.
    """
    if revision is not None:
        return revisions.resolve(project.root, revision)
    timing = f"{artifacts_folder(project)}/timing"
    stale = any(target.startswith("timing") for target in stale_measurements(project))
    if stale and (changed := revisions.changes(project.root, timing)):
        return changed[-1][0]
    return revisions.previous_change(project.root, timing)


def require_device(engine: Engine | None) -> None:
    """Refuse to go on where there is nothing to time with.

    Raises:
        NotComparableError: no engine is given and there is no CUDA device.
    """
    import torch

    if engine is None and torch.cuda.device_count() == 0:
        raise NotComparableError(
            "confirm: expected a CUDA device, found none, and nothing is timed without one; "
            "`triton-kernel-lab gate` compares what is tracked."
        )


def _place(engine: Engine | None) -> dict[str, Any]:
    """The runner and its environment, as an artifact states them; a made-up engine has none."""
    require_device(engine)
    if engine is not None:
        return {"runner": "synthetic", "environment": None}
    import torch

    from triton_kernel_lab.lab.environment import probe, runner_name

    device = torch.cuda.current_device()
    return {"runner": runner_name(torch.cuda.get_device_name(device)), "environment": probe(device=device)}


def _held(root: Path) -> list[str]:
    """The kernels that a commit has."""
    return kernel_names(root) if (root / PACKAGE / "cases/__init__.py").is_file() else []


def _check_renames(renames: Mapping[str, str], base: Collection[str], now: Collection[str]) -> None:
    for old, new in renames.items():
        if old not in base or old in now or new not in now or new in base:
            raise RenameError(f"--rename {old}={new}: expected a kernel of the base only and one of the tree only.")


def wanted(kernels: Iterable[str], request: Request) -> list[Cell]:
    """The cells of some kernels that a request names: shapes and dtypes of their own, or those of ``--cell``.

    Raises:
        ValueError: there is no such kernel, or a cell's shape or dtype does not fit it.
    """
    from triton_kernel_lab.cases._base import DTYPES, find, load, shape_name

    olds = {new: old for old, new in request.renames.items()}
    cases = [find(name) for name in request.kernels] if request.kernels else [load(name) for name in kernels]
    found = []
    for case in cases:
        cells = [(case.parse_dims(shape), dtype) for shape, dtype in request.cells]
        for dims, dtype in cells or case.cells:
            if dtype not in DTYPES:
                raise ValueError(f"--cell: dtype {dtype}: expected one of {', '.join(DTYPES)}.")
            names = {"kernel": case.name, "base_kernel": olds.get(case.name, case.name), "shape": shape_name(dims)}
            found.append({**names, "dtype": dtype, "dims": list(dims)})
    return found


def compiled_from(root: Path, kernel: str) -> str | None:
    """The digest of all that a kernel is compiled and launched from; None where that is not there or is no Python."""
    # Asked first: for a root without the package the digest would be that of the running one. A case without an
    # operator of its own calls another's, and what it imports holds that one.
    names = (f"ops/{kernel}.py", f"cases/{kernel}.py")
    entry = next((name for name in names if (root / PACKAGE / name).is_file()), None)
    if entry is None:
        return None
    try:
        return module_digest(root, entry)
    except SourceError:
        return None


def _same(base: Path, now: Path, cell: Cell) -> bool:
    return cell["kernel"] == cell["base_kernel"] and compiled_from(base, cell["kernel"]) == compiled_from(
        now, cell["kernel"]
    )


def measure(
    folders: Mapping[str, Path],
    cells: Sequence[Cell],
    params: MeasureParams,
    regimes: Sequence[str],
    engine: Engine | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time cells of two versions in fresh processes, one after the other; returns protocol, processes and cells.

    Args:
        folders: where the packages of ``base`` and ``now`` lie.
        cells: as ``wanted`` gives them.
        params: how much is measured; at least ``LEAST_PROCESSES`` processes are.
        regimes: what is timed.
        engine: what measures a process; None takes this GPU.
        progress: told which process runs.

    Raises:
        MeasurementError: a process failed.
    """
    samples = {regime: params.samples.get(regime) or _SAMPLES for regime in regimes}
    merged: list[Cell] = []
    processes = []
    count = max(params.processes, LEAST_PROCESSES) if cells else 0
    for index in range(count):
        progress(f"process {index + 1} of {count}")
        plan = {
            "folders": {name: str(path) for name, path in folders.items()},
            "cells": [dict(cell) for cell in cells],
            "samples": samples,
            "sweep_bytes": params.sweep_bytes,
            "warmup_ms": params.warmup_ms,
            # Far apart: within a process the seed counts up over the input sets.
            "seed": params.seed + 1000 * index,
            "index": index,
        }
        result = (engine or _one_process)(plan)
        processes.append(result["process"])
        _merge(merged, result["cells"], index)
    protocol = {"sweep_bytes": params.sweep_bytes, "processes": count, "samples": samples}
    return {"protocol": protocol, "processes": processes, "cells": merged}


def _merge(cells: list[Cell], fresh: list[Cell], index: int) -> None:
    """Add one process's runs to the cells; what failed in any process has failed."""
    for cell in fresh:
        for version in cell["versions"].values():
            version["runs"] = [{"process": index, **run} for run in version["runs"]]
    if not cells:
        cells.extend(fresh)
        return
    for cell, more in zip(cells, fresh, strict=True):
        for name, version in cell["versions"].items():
            other = more["versions"][name]
            version["runs"] += other["runs"]
            if version["status"] == "ok" != other["status"]:
                version |= {"status": other["status"], "reason": other["reason"]}


def _one_process(plan: Mapping[str, Any]) -> dict[str, Any]:
    from triton_kernel_lab.lab.timing import MeasurementError

    with tempfile.TemporaryDirectory() as folder:
        plan_path, output = Path(folder, "plan.json"), Path(folder, "raw.json")
        plan_path.write_text(json.dumps(plan), encoding="utf-8")
        command = [sys.executable, "-m", "triton_kernel_lab.lab.confirm_worker", str(plan_path), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise MeasurementError(f"confirm: process {plan['index']} failed: {last}\n{done.stderr}")
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result
