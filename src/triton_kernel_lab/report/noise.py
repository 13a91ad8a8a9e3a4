"""The section of results.md on identical code: how far its sessions lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table

__all__ = ["section"]

_HEADERS = ("Kernel", "Shape", "Dtype", "Sessions", "sd between sessions", "Largest A/A difference")
_NOTE = (
    "The same code timed in several sessions of fresh processes, by the `tmean` of Triton in `cold_clean`; the other "
    "regimes are in `noise_floor.json`, from which the gate takes its margins."
)


def section(floor: Artifact | None) -> str:
    """A row for each cell of the primary regime; empty where no noise was measured."""
    rows = [_row(cell) for cell in floor["cells"] if cell["regime"] == "cold_clean"] if floor else []
    return "\n\n".join(["## Noise of identical code (A/A)", _NOTE, table(_HEADERS, rows)]) if rows else ""


def _row(cell: Mapping[str, Any]) -> list[str]:
    spread = [units.fine_share(math.expm1(cell[f"{name}_log"])) for name in ("session_sd", "largest_aa")]
    return [cell["kernel"], cell["shape"], cell["dtype"], str(cell["sessions"]), *spread]
