"""What ``benchmarks/decode_e2e.py`` runs: a Llama-style model decoded token by token, ours beside the others.

Each opponent decodes the same random-weight model from the same prompts; the
artifact keeps the raw times of its steps, and the floor is the time in which the
measured read ceiling delivers the weights and the cache once. Where a step goes,
kernel by kernel, is traced once all is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_kernel_lab import __version__, artifacts, revisions
from triton_kernel_lab.analysis import decode_e2e as figures
from triton_kernel_lab.analysis.inputs import read_one
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.console import device_project
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import tool_digest

if TYPE_CHECKING:
    from triton_kernel_lab.endtoend.measure import Protocol
    from triton_kernel_lab.endtoend.model import Models, Sizes

__all__ = ["DecodeError", "Request", "main", "run"]

Log = Callable[[str], None]

_BATCHES, _CONTEXTS = (1, 8), (1024, 8192)
_SECONDS = 240
_WEIGHTS_SEED = 0


class DecodeError(ValueError):
    """What was asked for cannot be measured; one sentence says why."""


@dataclass(frozen=True)
class Request:
    """What to measure.

    Args:
        batches, contexts: each pair of them is a cell, in this order.
        opponents: by name; none for all.
        seconds: no cell is begun after so long.
        ahead: compile for all cells at once before the first is measured.
        sizes, protocol: the model and how much is done; default: the published ones.
    """

    batches: Sequence[int] = _BATCHES
    contexts: Sequence[int] = _CONTEXTS
    opponents: Sequence[str] = ()
    seconds: float = _SECONDS
    ahead: bool = False
    sizes: Sizes | None = None
    protocol: Protocol | None = None

    def cells(self) -> list[tuple[int, int]]:
        """Batch and context of each cell, the shortest context first."""
        return [(batch, context) for context in self.contexts for batch in self.batches]


def run(project: Project, request: Request, log: Log = lambda line: None) -> Path:
    """Measure and write ``artifacts/<runner>/decode_e2e.json``, anew after each cell.

    Cells that the same sources measured before, in the same environment, stay.

    Args:
        project: the checkout; on runner ``cpu`` nothing is measured.
        request: what to measure.
        log: is told what is being done.

    Raises:
        DecodeError: an unknown opponent, or no measured ceilings.
    """
    head = _head(project)
    path = project.artifacts / "decode_e2e.json"
    if project.runner == "cpu":
        artifacts.write(path, head | _nothing("runner cpu has no GPU"))
        return path
    ceiling = figures.read_ceiling(read_one(project, "ceilings"))
    if ceiling is None:
        raise DecodeError("decode_e2e: expected a measured read ladder in ceilings.json; run `dvc repro ceilings`.")
    _measure(path, head, ceiling, request, log)
    return path


def _head(project: Project) -> Artifact:
    """All that does not depend on what comes out."""
    git = revisions.producer_git(project.root)
    measured = project.runner != "cpu" and git["git_tree_dirty"] is False
    return {
        "artifact_kind": "decode_e2e",
        "schema_version": 1,
        "claim_kind": "measured" if measured else "exploratory",
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": tool_digest(project.root, "decode_e2e"),
            **git,
        },
        "inputs": [
            artifacts.input_record(project.root, project.artifacts / f"{name}.json")
            for name in ("environment", "ceilings")
        ],
        "runner": project.runner,
    }


def _nothing(reason: str) -> Artifact:
    empty = {"status": "not_measured", "reason": reason, "model": None, "protocol": None, "read_ceiling": None}
    return {**empty, "software": _software(), "cells": []}


def _software() -> dict[str, str | None]:
    return {name: _version(name.replace("_", "-")) for name in ("transformers", "liger_kernel")}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _measure(path: Path, head: Artifact, ceiling: dict[str, int], request: Request, log: Log) -> None:
    import torch

    from triton_kernel_lab.endtoend import measure
    from triton_kernel_lab.endtoend.model import INT4_GROUP, LLAMA, Models
    from triton_kernel_lab.endtoend.opponents import OPPONENTS

    sizes, protocol = request.sizes or LLAMA, request.protocol or measure.Protocol()
    names = _known(request.opponents or list(OPPONENTS), list(OPPONENTS))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.device_count() else torch.device("cpu")
    models = Models(sizes, device, max(request.contexts) + protocol.steps, _WEIGHTS_SEED)
    body: Artifact = {
        "status": "measured",
        "reason": None,
        "model": sizes.record() | {"int4_group": INT4_GROUP, "seed": _WEIGHTS_SEED},
        "software": _software(),
        "protocol": asdict(protocol),
        "read_ceiling": ceiling,
    }
    cells = _kept(path, head | body)
    began = time.monotonic()
    if request.ahead:
        from triton_kernel_lab.endtoend.prime import prime

        prime(sizes, protocol, request.cells(), names, request.seconds / 2, log)
    for batch, context in request.cells():
        if time.monotonic() - began > request.seconds:
            log(f"batch {batch}, context {context}: not begun after {request.seconds} s")
            continue
        try:
            made = _cell(models, batch, context, names, protocol, log)
        except RuntimeError as error:  # As where the prompt itself needs more memory than there is.
            log(f"batch {batch}, context {context}: failed, {type(error).__name__}: {error}")
            continue
        finally:
            _release()
        cells[batch, context] = figures.complete(made, body["model"], ceiling)
        _write(path, head | body, cells)
    for asked in request.cells():
        # Not before all are timed: CUPTI stays in a process once it was called.
        if asked in cells and _profile(models, cells[asked], protocol, log):
            _write(path, head | body, cells)


def _write(path: Path, made: Artifact, cells: Mapping[tuple[int, int], Artifact]) -> None:
    ordered = sorted(cells.items(), key=lambda item: (item[0][1], item[0][0]))
    artifacts.write(path, made | {"cells": [each for _, each in ordered]})


def _profile(models: Models, cell: Artifact, protocol: Protocol, log: Log) -> bool:
    """Add to a cell where the steps of its opponents go; whether anybody's were still to be told."""
    from triton_kernel_lab.endtoend import profile

    batch, context = cell["batch"], cell["context"]
    lacking = {each["name"]: each for each in cell["opponents"] if each["derived"] and "profile" not in each}
    names = [name for name in profile.PROFILED if name in lacking]
    if names:
        where = f"batch {batch}, context {context}"
        told = profile.profiles(models, batch, context, names, protocol, lambda line: log(f"{where}: {line}"))
        for name, found in told.items():
            lacking[name].update(found)
        _release()
    return bool(names)


def _known(names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise DecodeError(f"decode_e2e: --opponents: expected some of {', '.join(known)}, found {name!r}.")
    return names


def _kept(path: Path, made: Artifact) -> dict[tuple[int, int], Artifact]:
    """The cells of an earlier run that differs in nothing but its cells."""
    if not path.is_file():
        return {}
    with contextlib.suppress(artifacts.ArtifactError):
        before = artifacts.read(path, "decode_e2e")
        if {**before, "cells": []} == {**made, "cells": []}:
            return {(cell["batch"], cell["context"]): cell for cell in before["cells"]}
    return {}


def _cell(
    models: Models, batch: int, context: int, names: Sequence[str], protocol: Protocol, log: Log
) -> dict[str, Any]:
    from triton_kernel_lab.endtoend import measure

    where = f"batch {batch}, context {context}"
    made: dict[str, Any] = measure.cell(models, batch, context, names, protocol, lambda line: log(f"{where}: {line}"))
    return made


def _release() -> None:
    """Let go of what was compiled for a cell, which fits no other, and of its caches, which are large."""
    import gc

    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.device_count():
        with contextlib.suppress(RuntimeError):  # A device that failed for good, which has been told.
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of ``benchmarks/decode_e2e.py``; an error of the input is one sentence and exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=_BATCHES, help="sequences in a batch")
    parser.add_argument("--context", type=int, nargs="+", default=_CONTEXTS, help="tokens of each prompt")
    parser.add_argument("--opponents", nargs="+", default=(), help="by name; default: all")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="no cell is begun after so long")
    parser.add_argument("--ahead", action="store_true", help="compile for all cells at once, before any is measured")
    given = parser.parse_args(arguments)
    try:
        request = Request(given.batch, given.context, given.opponents, given.seconds, given.ahead)
        project = device_project()
        written = run(project, request, lambda line: print(line, file=sys.stderr, flush=True))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {written.relative_to(project.root)}; `dvc repro -f -s tables site readme` prints it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
