"""The names that reports print, and how they look a candidate up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units

__all__ = ["conditions", "find", "label", "of_regime", "p50_ns", "p50_text", "verdict"]

_LABELS = {
    "triton": "Triton",
    ".backward()": "Triton through autograd",
    "paged": "Triton from pages of 16",
    "eager": "PyTorch eager",
    "torch_compile": "torch.compile",
    "torch_compile_max_autotune": "torch.compile max-autotune",
}


def label(name: str | None) -> str:
    """A candidate's name in prose; a library's op keeps its own."""
    return units.MISSING if name is None else _LABELS.get(name, name)


def find(cell: Mapping[str, Any], name: str | None) -> Mapping[str, Any] | None:
    """The candidate of a roofline cell, or None."""
    return next((candidate for candidate in cell["candidates"] if candidate["name"] == name), None)


def p50_ns(cell: Mapping[str, Any], name: str | None) -> int | None:
    """A candidate's p50 in ns; None when it has none."""
    found = find(cell, name)
    return found["stats"]["p50_ns"] if found and found["stats"] else None


def p50_text(cell: Mapping[str, Any], name: str | None) -> str:
    """A candidate's p50 in us; its status where there is no figure."""
    found = find(cell, name)
    if found is not None and found["stats"] is None:
        return str(found["status"])
    return units.microseconds(p50_ns(cell, name))


def of_regime(roofline: Artifact, regime: str, kernel: str | None = None) -> list[Mapping[str, Any]]:
    """The roofline's cells of a regime, and of a kernel if one is named."""
    return [cell for cell in roofline["cells"] if cell["regime"] == regime and kernel in (None, cell["kernel"])]


def verdict(cell: Mapping[str, Any]) -> str:
    """Whether Triton is the fastest, or to whom it loses and by how much."""
    ours = p50_ns(cell, "triton")
    if ours is None:
        return "no Triton figure"
    rivals = dict.fromkeys(name for name in ("torch_compile", cell["best_baseline"]) if name)
    lost = [(name, theirs) for name in rivals if (theirs := p50_ns(cell, name)) is not None and theirs < ours]
    if lost:
        return "loses to " + ", to ".join(f"{label(name)} by {units.excess_percent(ours, p50)}" for name, p50 in lost)
    if not cell["best_baseline"]:
        return "no baseline"
    return "ties" if p50_ns(cell, cell["best_baseline"]) == ours else "fastest"


def conditions(environment: Artifact, roofline: Artifact) -> str:
    """One sentence: the GPU, the stack, the regime, processes and samples."""
    if roofline["status"] != "measured":
        return f"Not measured: {roofline['reason'] or 'no reason given'}."
    software, device = environment["software"], environment["device"]
    stack = f"driver {software['driver'] or 'unknown'}, CUDA {software['cuda_runtime'] or 'unknown'}, "
    stack += f"PyTorch {software['torch']}, Triton {software['triton']}, Python {software['python']}"
    regime = "the `cold_clean` regime (the L2 cache is swept by writes, then by reads, before each call)"
    return (
        f"Measured on {device['name'] if device else 'no device'} ({stack}) in {regime}, "
        f"with {_counts(of_regime(roofline, 'cold_clean'))}.{_CAVEATS.get(roofline['claim_kind'], '')}"
        f"{_stale(roofline['stale'])}"
    )


def _stale(stages: Sequence[str]) -> str:
    if not stages:
        return ""
    names = ", ".join(f"`{stage}`" for stage in stages)
    return f" **Stale:** the sources of {names} have changed since; `make repro` on this GPU measures them again."


_CAVEATS = {
    "exploratory": " Exploratory: made from a tree with uncommitted changes.",
    "synthetic": " Synthetic: these numbers were made up for a test.",
}


def _counts(cells: Iterable[Mapping[str, Any]]) -> str:
    stats = [candidate["stats"] for cell in cells for candidate in cell["candidates"] if candidate["stats"]]
    processes = _span(entry["processes"] for entry in stats)
    samples = _span(entry["samples"] + entry["flagged"] for entry in stats)
    return f"{processes} processes and {samples} samples a candidate"


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    if not found:
        return "0"
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
