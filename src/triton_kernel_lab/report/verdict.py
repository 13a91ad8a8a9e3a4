"""A gate's verdict as text: a table of the cells, what wants attention, one line that sums up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.verdicts import JUDGED, count, named
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.units import MISSING

__all__ = ["render"]

_NAMES = ("kernel", "shape", "dtype", "regime")
# Header and field of what stands between a cell's name and its verdict; per cent by the field's name.
_COLUMNS: dict[str, dict[str, str]] = {
    "flat": {"base p50 (ns)": "base_p50_ns", "p50 (ns)": "p50_ns", "change": "change_percent"},
    "welch": {
        "base tmean (ns)": "base_tmean_ns",
        "tmean (ns)": "tmean_ns",
        "change": "change_percent",
        "over copy": "anchored_change_percent",
        "margin": "margin_percent",
    },
    "paired": {
        "base tmean (ns)": "base_tmean_ns",
        "tmean (ns)": "tmean_ns",
        "change": "change_percent",
        "base again": "control_percent",
        "margin": "margin_percent",
    },
}


def render(verdict: Artifact) -> str:
    """The whole verdict; the last line alone says how it ends."""
    lines = [_table(verdict["cells"], _COLUMNS[verdict["method"]])] if verdict["cells"] else []
    lines += [f"- {reason}" for reason in verdict["reasons"]]
    return "\n".join([*lines, _summary(verdict)])


def _summary(verdict: Artifact) -> str:
    base, commit = verdict["base"]["origin"], verdict["base"]["git_commit"]
    against = f"{base} (commit {commit[:12]})" if commit else base
    counts = ", ".join(f"{number} {word.lower()}" for word in JUDGED if (number := len(named(verdict["cells"], word))))
    said = f"{verdict['verdict']}: {count(verdict['compared'])} compared with {against}"
    return f"{said}{f': {counts}' if counts else ''}; {_rule(verdict)}."


def _rule(verdict: Artifact) -> str:
    if verdict["method"] == "flat":
        return f"the limit is {verdict['max_regression_percent']} %"
    if verdict["method"] == "paired":
        return f"both timed in turns by {verdict['protocol']['processes']} processes"
    return f"margins are {verdict['calibration'] or 'not asked for'}".replace("_", " ")


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    from tabulate import tabulate

    body = [
        (
            *(row[name] for name in _NAMES),
            *(_text(row, field) for field in columns.values()),
            row["verdict"] + (" (accepted)" if row.get("accepted") else ""),
            row["reason"] or "",
        )
        for row in rows
    ]
    # Number parsing off: tabulate would rewrite what is already text.
    align = ("left",) * 4 + ("right",) * len(columns) + ("left",) * 2
    headers = (*_NAMES, *columns, "verdict", "reason")
    return tabulate(body, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def _text(row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if field == "margin_percent":
        return MISSING if value is None else f"{units.plain(float(value))} %"
    return units.signed_percent(value) if field.endswith("_percent") else units.plain(value)
