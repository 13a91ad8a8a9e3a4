"""Stage ``codegen``: what each kernel compiles to for each target, the same on every machine.

Processes without a device and without Triton's interpreter do the work; this
module imports neither torch nor Triton.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from typing import Any

from triton_kernel_lab import __version__, artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.codegen.occupancy import TARGETS
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import stage_digest

__all__ = ["CodegenError", "derive", "write"]

# What a compiling process may hold, torch and its tools included: 0.9 GB was seen.
_PROCESS_BYTES = 2 << 30
# Settings of Triton, LLVM and ptxas in the environment change what they make; where the cache lies does not.
_SETTINGS = re.compile(r"(TRITON|NVPTX|PTXAS|LLVM|MLIR|DISABLE|ALLOW|USE_IR)_")
_KEPT = frozenset({"TRITON_CACHE_DIR", "TRITON_HOME"})

Task = tuple[str, str]


class CodegenError(ValueError):
    """The audit cannot be made here; one sentence says why and where it can."""


def derive(project: Project, kernels: Sequence[str]) -> dict[str, Artifact]:
    """The audits of some kernels by name, each with the same bytes wherever it is made.

    Raises:
        CodegenError: another Triton than the pinned one is installed, or the
            compiler brought its process down.
    """
    version = _require_pinned(project)
    results = _run([(kernel, target) for kernel in kernels for target in TARGETS])
    return {
        kernel: {
            "artifact_kind": "codegen",
            "schema_version": 2,
            "claim_kind": "derived",
            "producer": {
                "package": "triton-kernel-lab",
                "version": __version__,
                "source_sha256": stage_digest(project.root, "codegen", kernel),
            },
            "inputs": [],
            "kernel": kernel,
            "triton": version,
            "tools": results[kernel, TARGETS[0]][0],
            "targets": list(TARGETS),
            "launches": [record for target in TARGETS for record in results[kernel, target][1]],
        }
        for kernel in kernels
    }


def write(project: Project, audits: Mapping[str, Artifact]) -> list[str]:
    """Write each audit where it is tracked; returns what to say of it, launches that failed by name."""
    said = []
    for kernel, audit in audits.items():
        path = project.audits / f"{kernel}.json"
        artifacts.write(path, audit)
        said.append(f"wrote {path}: {len(audit['launches'])} launches for {len(audit['targets'])} targets")
        said += [_failure(kernel, launch) for launch in audit["launches"] if launch["status"] == "failed"]
    return said


def _failure(kernel: str, launch: Mapping[str, Any]) -> str:
    function, call = launch["function"] or kernel, launch["calls"][0]
    return f"does not compile: {launch['target']} {function} {call}: {launch['reason']}"


def _require_pinned(project: Project) -> str:
    """The version of Triton that is both pinned and installed; a project of one's own pins none."""
    installed = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.version("triton")
    if project.listed is not None and installed is not None:
        return installed
    constraints = project.root / "constraints.txt"
    pins: list[str] = re.findall(r"^triton==(\S+)$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    if len(pins) != 1:
        raise CodegenError(f"{constraints}: expected one line `triton==...`, found {len(pins)}.")
    if installed != pins[0]:
        raise CodegenError(
            f"codegen: expected Triton {pins[0]} as in constraints.txt, found {installed or 'none'}; `make codegen` "
            "makes the audit on any host with a network, and `dvc repro figures tables readme` measures without it."
        )
    return pins[0]


def _run(tasks: list[Task]) -> dict[Task, Any]:
    """What each task gives; a task whose process dies is found by running what is left one by one."""
    pending: dict[Task, Future[Any]] = {}
    results: dict[Task, Any] = {}
    with _pool(_processes(len(tasks))) as pool:
        with contextlib.suppress(BrokenProcessPool):
            for task in tasks:
                pending[task] = pool.submit(_audit, task)
        for task, future in pending.items():
            with contextlib.suppress(BrokenProcessPool):
                results[task] = future.result()
    return results | {task: _alone(task) for task in tasks if task not in results}


def _processes(tasks: int) -> int:
    """One for each processor, as far as there are tasks and memory for them."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(tasks, os.cpu_count() or 1, memory // _PROCESS_BYTES))


def _alone(task: Task) -> Any:
    with _pool(1) as pool:
        try:
            return pool.submit(_audit, task).result()
        except BrokenProcessPool as error:
            kernel, target = task
            raise CodegenError(f"codegen of {kernel} for {target}: the compiler brought its process down.") from error


@contextlib.contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: Triton decides when it is imported whether it interprets.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_settle) as pool:
        yield pool


def _settle() -> None:
    """Make a fresh process compile, and compile alike wherever it is started."""
    for name in [name for name in os.environ if _SETTINGS.match(name) and name not in _KEPT]:
        del os.environ[name]
    # Line information would put the checkout's path, and each shifted line, into the binaries.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _audit(task: Task) -> Any:
    from triton_kernel_lab.codegen.audit import audit, tool_versions

    return tool_versions(), audit(*task)
