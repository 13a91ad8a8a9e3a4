"""Which cells a picture shows: one dtype a kernel, so that shapes alone differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report.figures.svg import Sources
from triton_kernel_lab.report.labels import find, of_regime, p50_ns

__all__ = ["dtype_of", "head", "kernels", "of_kernel", "other", "ratio_of", "shown_p50", "tick_labels"]

PREFERRED = "float16"


def head(sources: Sources, empty: str | None = None) -> dict[str, Any]:
    """``device`` and ``reason`` of a picture's data; ``empty`` says why a measured runner has nothing to show."""
    roofline = sources.roofline
    unmeasured = None if roofline["status"] == "measured" else roofline["reason"] or "no reason given"
    return {"device": sources.device, "reason": unmeasured or empty}


def kernels(roofline: Artifact) -> list[str]:
    """The kernels with cells, in the registry's order."""
    return list(dict.fromkeys(cell["kernel"] for cell in roofline["cells"]))


def dtype_of(roofline: Artifact, kernel: str) -> str:
    """float16 where a kernel has it, else its first dtype."""
    found = dict.fromkeys(cell["dtype"] for cell in roofline["cells"] if cell["kernel"] == kernel)
    return PREFERRED if PREFERRED in found else next(iter(found))


def of_kernel(roofline: Artifact, kernel: str, regime: str = "cold_clean") -> list[Mapping[str, Any]]:
    """A kernel's cells of a regime, in its one dtype."""
    dtype = dtype_of(roofline, kernel)
    return [cell for cell in of_regime(roofline, regime, kernel) if cell["dtype"] == dtype]


def other(cell: Mapping[str, Any]) -> str | None:
    """The fastest baseline that is neither torch.compile in its default mode nor eager; None without one."""
    timed = [c["name"] for c in cell["candidates"] if c["role"] == "baseline" and c["stats"]]
    rivals = [name for name in timed if name not in ("torch_compile", "eager")]
    return min(rivals, key=lambda name: p50_ns(cell, name) or 0, default=None)


def shown_p50(cell: Mapping[str, Any]) -> dict[str, int | None]:
    """The p50 in ns of what pictures compare."""
    return {
        **{name: p50_ns(cell, name) for name in ("triton", "torch_compile", "eager")},
        "other": p50_ns(cell, other(cell)),
    }


def ratio_of(cell: Mapping[str, Any], name: str | None) -> float | None:
    """A candidate's share of attainable; None where no share is claimed."""
    found = find(cell, name)
    return found["attainable_ratio"] if found else None


def tick_labels(shapes: Sequence[str]) -> list[str]:
    """Shapes on several lines where one would run into its neighbour."""
    width = 7 if len(shapes) <= 5 else 5
    return ["\n".join(_wrapped(shape, width)) for shape in shapes]


def _wrapped(shape: str, width: int) -> list[str]:
    lines = [""]
    for number in shape.split("x"):
        joined = f"{lines[-1]}x{number}" if lines[-1] else number
        lines[-1:] = [joined] if len(joined) <= width or not lines[-1] else [f"{lines[-1]}x", number]
    return lines
