"""What no honest measurement contains, looked for in raw artifacts.

Every check yields ``JSON path: expected ..., found ...`` without the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.stats import OURS, REGIMES
from triton_kernel_lab.artifacts import Artifact

__all__ = ["ceilings", "correctness", "counters", "timing", "too_fast"]

# A call is timed by the host's clock, and a floor of graph or call is a sample divided by its calls.
_EVENT_TIMED = frozenset(REGIMES) - {"call"}
_EVENT_FLOORS = frozenset({"empty_event", "null_kernel_clean", "null_kernel_dirty", "null_kernel_warm"})

# Short vectors, or vectors of a few ticks, may agree by chance; other ones are one process copied.
_COPY_LENGTH = 50
_COPY_VALUES = 8


def ceilings(artifact: Artifact) -> Iterator[str]:
    """Samples off the lattice of the timer that the artifact itself names."""
    quantum = artifact["timer_quantum_ns"]
    for index, floor in enumerate(artifact["floors"]):
        if floor["name"] in _EVENT_FLOORS:
            yield from _off_lattice(floor["samples_ns"], quantum, f"$.floors[{index}].samples_ns")
    for kind in ("ladders", "matmul", "dirty_flush"):
        for index, entry in enumerate(artifact[kind]):
            for key in sorted(name for name in entry if name.endswith("samples_ns")):
                yield from _off_lattice(entry[key], quantum, f"$.{kind}[{index}].{key}")


def _off_lattice(samples: Sequence[int], quantum: int | None, path: str) -> Iterator[str]:
    if quantum is None:
        return
    for index, sample in enumerate(samples):
        # Whole ns by rounding, from an event that CUDA reports as a float32 of milliseconds.
        slack = 1 + (sample >> 24)
        if min(sample % quantum, -sample % quantum) > slack:
            yield f"{path}[{index}]: expected a multiple of the timer's {quantum} ns, found {sample}"


def timing(artifact: Artifact, quantum: int | None, checked: Artifact | None) -> Iterator[str]:
    """Off-lattice samples, processes not distinct, flags out of range, fallbacks, wrong kernels.

    Args:
        artifact: a timing artifact.
        quantum: the timer's, in ns; None checks no lattice.
        checked: the kernel's correctness artifact, if there is one.
    """
    if artifact["status"] == "measured" and checked and not checked["passed"]:
        yield "$.status: expected no timing of a kernel that fails correctness, found 'measured'"
    declared = [process["index"] for process in artifact["processes"]]
    if len(set(declared)) != len(declared):
        yield f"$.processes: expected distinct indices, found {declared}"
    for at, cell in enumerate(artifact["cells"]):
        for number, candidate in enumerate(cell["candidates"]):
            path = f"$.cells[{at}].candidates[{number}]"
            yield from _fallback(candidate, path)
            yield from _processes(candidate["runs"], declared, path)
            for index, run in enumerate(candidate["runs"]):
                yield from _run(run, quantum, f"{path}.runs[{index}]")


def _fallback(candidate: Mapping[str, Any], path: str) -> Iterator[str]:
    if candidate["role"] in OURS and candidate["status"] == "ok" and candidate["served_by"] != "triton":
        yield f"{path}.served_by: expected 'triton' for a Triton row, found {candidate['served_by']!r}"


def _processes(runs: Sequence[Mapping[str, Any]], declared: Sequence[int], path: str) -> Iterator[str]:
    pairs: set[tuple[str, int]] = set()
    vectors: dict[tuple[str, tuple[int, ...]], int] = {}
    for index, run in enumerate(runs):
        pair, vector = (run["regime"], run["process"]), (run["regime"], tuple(run["samples_ns"]))
        if run["process"] not in declared:
            yield f"{path}.runs[{index}].process: expected one of {list(declared)}, found {run['process']}"
        if pair in pairs:
            yield f"{path}.runs[{index}]: expected one run of process {pair[1]} in {pair[0]}, found a second"
        telling = len(vector[1]) >= _COPY_LENGTH and len(set(vector[1])) >= _COPY_VALUES
        if telling and vector in vectors:
            yield f"{path}.runs[{index}].samples_ns: expected its own samples, found those of runs[{vectors[vector]}]"
        pairs.add(pair)
        vectors.setdefault(vector, index)


def _run(run: Mapping[str, Any], quantum: int | None, path: str) -> Iterator[str]:
    count = len(run["samples_ns"])
    for name, indices in sorted(run["flags"].items()):
        if outside := [index for index in indices if index >= count]:
            yield f"{path}.flags.{name}: expected indices below {count}, found {outside[0]}"
    if run["regime"] in _EVENT_TIMED:
        yield from _off_lattice(run["samples_ns"], quantum, f"{path}.samples_ns")


def correctness(artifact: Artifact) -> Iterator[str]:
    """Verdicts that the errors beside them do not support."""
    for index, cell in enumerate(artifact["cells"]):
        path = f"$.cells[{index}]"
        if cell["passed"] != (not cell["failures"]):
            yield f"{path}.passed: expected {not cell['failures']} beside its failures, found {cell['passed']}"
        for name, limit in sorted(cell["limit"].items()):
            error = cell["triton"][name]
            if cell["passed"] and (error is None or error > limit):
                yield f"{path}.triton.{name}: expected at most {limit} in a cell that passed, found {error}"
    passed = all(cell["passed"] for cell in artifact["cells"])
    if artifact["passed"] != passed:
        yield f"$.passed: expected {passed} from its cells, found {artifact['passed']}"


def counters(artifact: Artifact) -> Iterator[str]:
    """Counts beside a status that says there are none, or the other way round, and shares above the whole."""
    ok = artifact["counter_status"] == "ok"
    if bool(artifact["cells"]) != ok:
        yield f"$.cells: expected {'some' if ok else 'none'} beside counter_status {artifact['counter_status']!r}"
    if (artifact["reason"] is None) != ok:
        yield f"$.reason: expected {'none' if ok else 'one'} beside counter_status {artifact['counter_status']!r}"
    for at, cell in enumerate(artifact["cells"]):
        for number, candidate in enumerate(cell["candidates"]):
            for index, launch in enumerate(candidate["launches"]):
                for name in ("l2_hit_ratio", "occupancy_ratio", "tensor_pipe_ratio"):
                    if (launch[name] or 0) > 1:
                        path = f"$.cells[{at}].candidates[{number}].launches[{index}].{name}"
                        yield f"{path}: expected at most 1, found {launch[name]}"


def too_fast(artifact: Artifact, cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Candidates of a timing that beat the ceilings, by the cells derived from it."""
    for cell in cells:
        for judged in cell["candidates"]:
            if str(judged["reason"]).startswith("implausible"):
                case = f"{cell['shape']} {cell['dtype']} {cell['regime']}"
                yield f"{_path_of(artifact, cell, judged['name'])}: {case}: {judged['name']}: {judged['reason']}"


def _path_of(artifact: Artifact, cell: Mapping[str, Any], name: str) -> str:
    for at, timed in enumerate(artifact["cells"]):
        if (timed["shape"], timed["dtype"]) == (cell["shape"], cell["dtype"]):
            names = [candidate["name"] for candidate in timed["candidates"]]
            return f"$.cells[{at}].candidates[{names.index(name)}]"
    return "$.cells"
