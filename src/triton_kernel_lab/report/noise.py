"""The section of results.md on identical code: how far its sessions lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table

__all__ = ["section"]

_HEADERS = ("Kernel", "Shape", "Dtype", "Regime", "Sessions", "sd between sessions", "Largest A/A difference")
_NOTE = (
    "The same code timed in several sessions of fresh processes, by the `tmean` of Triton; from `noise_floor.json` the "
    "gate takes its margins."
)


def section(floor: Artifact | None, kernels: Sequence[str] = ()) -> str:
    """A row for each cell of each regime, below what they come to; empty where no noise was measured.

    Args:
        floor: the artifact ``noise_floor`` of the runner, if there is one.
        kernels: those of the report, of which some may have no floor yet.
    """
    if not floor or not floor["cells"]:
        return ""
    said = f"{_NOTE} {_largest(floor['cells'])} {_calibrated(floor['cells'], kernels)}"
    rows = [_row(cell) for cell in floor["cells"]]
    return "\n\n".join(["## Noise of identical code (A/A)", said, table(_HEADERS, rows)])


def _largest(cells: Sequence[Mapping[str, Any]]) -> str:
    """The largest difference in each regime, since that of a call is of another order than that of a kernel."""
    largest: dict[str, float] = {}
    for cell in cells:
        largest[cell["regime"]] = max(largest.get(cell["regime"], 0.0), cell["largest_aa_log"])
    said = ", ".join(f"{_share(log)} in `{regime}`" for regime, log in largest.items())
    return f"Two sessions of it differ by up to {said}."


def _calibrated(cells: Sequence[Mapping[str, Any]], kernels: Sequence[str]) -> str:
    measured = dict.fromkeys(cell["kernel"] for cell in cells)
    absent = [kernel for kernel in kernels if kernel not in measured]
    said = f"Measured for {_names(measured)}"
    return f"{said}; {_names(absent)} {'has' if len(absent) == 1 else 'have'} none yet." if absent else f"{said}."


def _names(kernels: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"`{kernel}`" for kernel in kernels)


def _row(cell: Mapping[str, Any]) -> list[str]:
    spread = [_share(cell[f"{name}_log"]) for name in ("session_sd", "largest_aa")]
    return [cell["kernel"], cell["shape"], cell["dtype"], cell["regime"], str(cell["sessions"]), *spread]


def _share(log: float) -> str:
    """A difference of logs as a share of the smaller time."""
    return units.fine_share(math.expm1(log))
