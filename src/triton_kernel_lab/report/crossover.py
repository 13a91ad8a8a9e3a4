"""From which size on the dense form of a fused operator is faster: generated sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import of_regime, p50_ns

__all__ = ["DENSE", "section", "sentences"]

DENSE = {"int4_linear": "cuBLAS, 16-bit weights", "swiglu_linear": "cuBLAS packed + Triton swiglu"}
"""The dense form of each kernel whose shapes are M x N x K, by the name that tables print."""

_NOTE = "M is the number of rows of x; p50 in the `cold_clean` regime, at each M that was measured."

Weights = tuple[str, str]
Times = tuple[int, int]


def section(roofline: Artifact) -> str:
    """A sentence for each kernel and weight; empty where neither kernel was timed at several M."""
    lines = [f"- {sentence}" for sentence in sentences(roofline)]
    return "\n\n".join(["## Where the dense form is faster", _NOTE, "\n".join(lines)]) if lines else ""


def sentences(roofline: Artifact) -> list[str]:
    """The smallest measured M at which the dense form is faster, for each weight that was measured at several."""
    return [
        _sentence(kernel, weights, times)
        for kernel in DENSE
        for weights, times in _by_rows(roofline, kernel).items()
        if len(times) > 1
    ]


def _by_rows(roofline: Artifact, kernel: str) -> dict[Weights, dict[int, Times]]:
    """p50 in ns of ours and of the dense form, by N x K and dtype, then by ascending M."""
    found: dict[Weights, dict[int, Times]] = {}
    for cell in of_regime(roofline, "cold_clean", kernel):
        ours, theirs = p50_ns(cell, "triton"), p50_ns(cell, DENSE[kernel])
        if ours is not None and theirs is not None:
            rows, _, weights = cell["shape"].partition("x")
            found.setdefault((weights, cell["dtype"]), {})[int(rows)] = (ours, theirs)
    return {weights: dict(sorted(times.items())) for weights, times in found.items()}


def _sentence(kernel: str, weights: Weights, times: Mapping[int, Times]) -> str:
    measured = ", ".join(map(str, times))
    said = f"`{kernel}`, N x K = {weights[0]}, {weights[1]}: `{DENSE[kernel]}` is faster "
    lost = [rows for rows, (ours, theirs) in times.items() if theirs < ours]
    if not lost:
        return f"{said}at none of the measured M ({measured})."
    ours, theirs = map(units.microseconds, times[lost[0]])
    said += f"from M = {lost[0]} on, of the measured {measured} ({theirs} us against {ours} us)"
    return f"{said}{''.join(_regained(times, lost[0]))}."


def _regained(times: Mapping[int, Times], first: int) -> Iterator[str]:
    """The sizes beyond the first loss at which Triton is not slower."""
    won = [str(rows) for rows, (ours, theirs) in times.items() if rows > first and ours <= theirs]
    if won:
        yield f", but not at M = {', '.join(won)}"
