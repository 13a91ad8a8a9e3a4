"""Nsight Compute run on one command: what it counted of each launch, or why it counted nothing.

Without torch. A profiler that is not there, is refused or prints nonsense is a
status with a reason: a count that was not made is never a zero.
"""

from __future__ import annotations

import csv
import functools
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["DENIED", "GROUPS", "METRICS", "Group", "Launch", "Outcome", "export", "load", "profile"]

METRICS: Mapping[str, str] = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_hit_ratio": "lts__t_sector_hit_rate.pct",
    "occupancy_ratio": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_pipe_ratio": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
}
"""Nsight Compute's metric for each quantity of a launch that is kept."""

DENIED = (
    "the driver keeps GPU performance counters for administrators (ERR_NVGPUCTRPERM); load the nvidia module with "
    "NVreg_RestrictProfilingToAdminUsers=0 (modprobe), or run with the capability CAP_SYS_ADMIN"
)


@dataclass(frozen=True)
class Group:
    """What is counted in one run of ncu.

    With ``caches`` "none" they stay as the command left them, which holds for the
    first pass over a launch alone. What takes several passes has "all": ncu itself
    then empties the caches ahead of each.
    """

    names: Sequence[str]
    caches: str


GROUPS: Sequence[Group] = (
    Group(("dram_read_bytes", "dram_write_bytes", "occupancy_ratio", "tensor_pipe_ratio"), "none"),
    # Three passes on an H200.
    Group(("l2_hit_ratio",), "all"),
)
"""All of ``METRICS`` in as few runs as leave each count that of a cold call."""

_ABSENT = "no ncu on PATH; Nsight Compute comes with the CUDA toolkit"
# In every raw page, asked for or not.
_REPLAYS = "profiler__replayer_passes"
# Ours is the sweep before the call, and clocks stay as they are while timing.
_CONDITIONS = ("--clock-control", "none", "--profile-from-start", "off")
_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_ERROR = re.compile(r"^==ERROR==\s*(.*)$", re.MULTILINE)


class _UnreadableError(ValueError):
    """The table is not one; one clause says why."""


@dataclass(frozen=True)
class Launch:
    """One profiled kernel launch: the ``METRICS``, None where ncu gave none, and in how many passes it counted them."""

    kernel: str
    counts: Mapping[str, int | float | None]
    passes: int | None = None

    def record(self) -> dict[str, str | int | float | None]:
        """The launch as an artifact keeps it."""
        return {"kernel": self.kernel, "passes": self.passes, **self.counts}


@dataclass(frozen=True)
class Outcome:
    """What came of a run: ``status`` as in an artifact's ``counter_status``, and ``reason`` where it is not ok.

    ``text`` is what ncu printed, ``errors`` the standard error of the command that it ran.
    """

    status: str
    reason: str | None
    version: str | None = None
    launches: Sequence[Launch] = field(default=())
    text: str = ""
    errors: str = ""


def profile(command: Sequence[str]) -> Outcome:
    """Count what ``command`` launches between cudaProfilerStart and cudaProfilerStop, with the caches as it left them.

    The command runs once for each of ``GROUPS``. A count that was made in a
    replay, which finds in the cache what the first pass brought, is not kept.
    """
    outcomes = []
    for group in GROUPS:
        asked = ("--cache-control", group.caches, "--metrics", ",".join(METRICS[name] for name in group.names))
        outcomes.append(_run(command, (*_CONDITIONS, *asked), table=True))
        if outcomes[-1].status != "ok":
            return outcomes[-1]
    launches = [outcome.launches for outcome in outcomes]
    if len({tuple(launch.kernel for launch in each) for each in launches}) != 1:
        reason = "ncu found other launches in each run of the same calls"
        return replace(outcomes[-1], status="profiler_unavailable", reason=reason, launches=())
    return replace(outcomes[-1], launches=[_merged(runs) for runs in zip(*launches, strict=True)])


def _merged(runs: Sequence[Launch]) -> Launch:
    """One launch out of its runs, each of which counted one of ``GROUPS``; ``passes`` are those of the first."""
    counts: dict[str, int | float | None] = {}
    for group, run in zip(GROUPS, runs, strict=True):
        cold = group.caches == "all" or run.passes == 1
        counts |= {name: run.counts[name] if cold else None for name in group.names}
    return Launch(runs[0].kernel, counts, runs[0].passes)


def export(command: Sequence[str], report: Path, *options: str) -> Outcome:
    """Profile the same launches with further options, and keep all that ncu finds in ``report``; ``load`` reads it."""
    asked = (*options, "--metrics", ",".join(METRICS.values()), "--force-overwrite", "--export", os.fspath(report))
    outcome = _run(command, (*_CONDITIONS, *asked), table=False)
    if outcome.status == "ok" and not report.is_file():
        return Outcome("profiler_unavailable", "ncu wrote no report: no kernel was profiled", outcome.version)
    return outcome


def load(report: Path) -> Outcome:
    """The launches of an exported report, and in ``text`` its details page."""
    read = ("--import", os.fspath(report), "--print-units", "base")
    counted = _run((), read, table=True)
    if counted.status != "ok":
        return counted
    details = _run((), (*read, "--page", "details"), table=False)
    return Outcome(details.status, details.reason, counted.version, counted.launches, details.text)


def _run(command: Sequence[str], options: Sequence[str], *, table: bool) -> Outcome:
    program = shutil.which("ncu")
    if program is None:
        return Outcome("profiler_unavailable", _ABSENT)
    form = ("--csv", "--page", "raw", "--print-units", "base") if table else ()
    # C: another locale prints its own decimal mark.
    environment = os.environ | {"LC_ALL": "C"}
    with tempfile.TemporaryDirectory() as folder:
        # A file of its own: on standard output the command would print between the rows.
        log = Path(folder, "ncu.log")
        line = [program, *options, *form, "--log-file", os.fspath(log), *command]
        try:
            done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            return Outcome("profiler_unavailable", f"{program} does not start: {error.strerror}")
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    made = _outcome(said or done.stdout, done, table=table)
    return replace(made, version=_version(program), errors=done.stderr)


def _outcome(text: str, done: subprocess.CompletedProcess[str], *, table: bool) -> Outcome:
    """What a run that ended says of itself."""
    if problem := _refusal(text + done.stdout + done.stderr):
        return Outcome(*problem, text=text)
    try:
        launches = _parse(text) if table else []
    except _UnreadableError as error:
        reason = f"ncu ended with {done.returncode} and printed no table of counters: {error}"
        return Outcome("profiler_unavailable", reason, text=text)
    if done.returncode and not table:
        reason = f"ncu ended with {done.returncode}: {_last_line(done.stderr or text)}"
        return Outcome("profiler_unavailable", reason, text=text)
    return Outcome("ok", None, launches=launches, text=text)


def _refusal(said: str) -> tuple[str, str] | None:
    """Status and reason of what ncu calls an error."""
    if "ERR_NVGPUCTRPERM" in said:
        return "permission_denied", DENIED
    errors = [" ".join(found.split()) for found in _ERROR.findall(said)]
    return ("profiler_unavailable", f"ncu: {errors[0][:240]}") if errors else None


@functools.cache
def _version(program: str) -> str | None:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^Version (\S+)", said, re.MULTILINE)
    return found.group(1) if found else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:240] if lines else "it printed nothing"


def _parse(text: str) -> list[Launch]:
    """The launches of a raw page in CSV: a row of names, a row of units, a row a launch.

    Raises:
        _UnreadableError: there is no such table, a unit is not known or a value is no number.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise _UnreadableError(_last_line(text))
    names, *rest = csv.reader(line for line in lines[start:] if line.startswith('"'))
    if "Kernel Name" not in names or len(rest) < 2 or any(len(row) != len(names) for row in rest):
        raise _UnreadableError("its rows are not those of a raw page")
    units, *rows = (dict(zip(names, row, strict=True)) for row in rest)
    return [Launch(row["Kernel Name"], _counts(row, units), _passes(row)) for row in rows]


def _passes(row: Mapping[str, str]) -> int | None:
    replays = row.get(_REPLAYS, "").replace(",", "")
    return max(int(replays), 1) if replays.isdigit() else None


def _counts(row: Mapping[str, str], units: Mapping[str, str]) -> dict[str, int | float | None]:
    return {name: _count(name, row.get(metric, ""), units.get(metric, "")) for name, metric in METRICS.items()}


def _count(name: str, value: str, unit: str) -> int | float | None:
    """A value in bytes or as a ratio, None where ncu has none."""
    try:
        number = float(value.replace(",", "")) if value not in ("", "n/a", "N/A") else None
    except ValueError as error:
        raise _UnreadableError(f"{name} is {value[:40]!r}, which is no number") from error
    # ncu says nan for what it could not work out.
    if number is None or not math.isfinite(number) or number < 0:
        return None
    if name.endswith("_bytes"):
        scale = re.fullmatch(r"([KMGT]?)bytes?", unit, re.IGNORECASE)
        if scale is None:
            raise _UnreadableError(f"{name} is in {unit!r}, expected bytes")
        return round(number * _SCALES[scale.group(1).upper()])
    if unit != "%":
        raise _UnreadableError(f"{name} is in {unit!r}, expected %")
    # Parts of a ratio are counted in passes of their own. Of a launch too short for them to agree the
    # quotient is no share of anything, as NVIDIA says of hit rates beyond 100 %.
    return round(number / 100, 4) if number <= 100 else None
