"""The sections of the page that need no script: what was measured, where, from what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import decode_e2e, summary, units
from triton_kernel_lab.report.labels import label
from triton_kernel_lab.report.losses import losses
from triton_kernel_lab.report.site.markup import code, esc, prose, table

__all__ = ["counters", "environment", "gate", "kernels", "lost", "method", "model", "tiles"]

_FLOORS = {
    "empty_event": "an event pair with nothing between",
    "null_kernel_clean": "an empty kernel, caches swept clean",
    "null_kernel_dirty": "an empty kernel, caches full of dirty lines",
    "null_kernel_warm": "an empty kernel, caches warm",
    "null_kernel_graph": "an empty kernel inside a CUDA graph",
    "null_kernel_call": "the host's time to launch an empty kernel",
}


def tiles(roofline: Artifact, correctness: Mapping[str, Artifact]) -> str:
    """The few figures that sum the report up."""
    found = summary.metrics(roofline)
    checks = [cell["passed"] for checked in correctness.values() for cell in checked["cells"]]
    shown = [("Right", f"{sum(checks)} of {len(checks)}", "checks against a float64 oracle passed")]
    if found["cells"]:
        won = sum(found["fastest"].values())
        shown.append(
            ("Fastest on the device", f"{won} of {found['cells']}", "cells, against the best of all baselines")
        )
    for time, median in found["median_speedup_over_torch_compile"].items():
        shown.append((f"{time.capitalize()} time", units.ratio(median), "median over torch.compile"))
    body = "".join(f"<div><dt>{esc(t)}</dt><dd>{esc(v)}</dd><dd class=note>{esc(n)}</dd></div>" for t, v, n in shown)
    return f'<dl class="tiles">{body}</dl>'


def kernels(roofline: Artifact) -> str:
    """One row a kernel: speedups over torch.compile by time, and where it is fastest."""
    rows = [
        [
            code(row.kernel),
            *(esc(summary.span(row.speedups[time])) for time in summary.TIMES),
            *(f"{row.fastest[time]} of {row.raced[time]}" if row.raced[time] else "-" for time in summary.TIMES),
        ]
        for row in summary.rows(roofline)
    ]
    headers = ["Kernel", *(f"{time}, over torch.compile" for time in summary.TIMES)]
    headers += [f"fastest, {time}" for time in summary.TIMES]
    caption = "Median speedup (least to largest), and cells in which no baseline is faster"
    return table(headers, rows, f"{caption}; {summary.MEDIAN_NOTE}")


def lost(roofline: Artifact) -> str:
    """Every lost cell, by time."""
    rows = [
        [
            esc(loss.time),
            code(loss.cell["kernel"]),
            esc(loss.cell["shape"]),
            esc(loss.cell["dtype"]),
            units.microseconds(loss.ours_ns),
            esc(label(loss.rival)),
            units.microseconds(loss.theirs_ns),
            loss.excess,
            esc(loss.why),
        ]
        for time in summary.TIMES
        for loss in losses(roofline, time)
    ]
    headers = ["Time", "Kernel", "Shape", "Dtype", "Triton p50 (us)", "Loses to", "its p50 (us)", "by", "What is known"]
    return table(headers, rows, "Cells in which a baseline is faster") if rows else "<p>No cell is lost.</p>"


def model(found: Artifact | None, *, stale: bool = False) -> str:
    """Every decoder of the whole model: its times, the floor beside them, and who has none.

    Args:
        found: the artifact ``decode_e2e``, if there is one.
        stale: its sources have changed since.
    """
    if found is None or found["status"] != "measured":
        reason = found["reason"] if found else "python benchmarks/decode_e2e.py was not run"
        return f"<p>Not measured: {esc(reason)}.</p>"
    rows = [[esc(part) for part in row] for row in decode_e2e.rows(found)]
    said = filter(None, [decode_e2e.conditions(found, stale=stale), decode_e2e.missed(found)])
    parts = [f'<div class="reading">{"".join(f"<p>{prose(each)}</p>" for each in said)}</div>']
    parts.append(table(decode_e2e.HEADERS, rows, "Each decoder of each batch and context"))
    if absent := [[esc(part) for part in row] for row in decode_e2e.missing(found)]:
        parts.append(table(decode_e2e.MISSING_HEADERS, absent, "Decoders without a time"))
    if steps := [[esc(part) for part in row] for row in decode_e2e.part_rows(found)]:
        parts.append(table(decode_e2e.PART_HEADERS, steps, "Where a step goes, in cells that miss an aim"))
        parts.append(f'<div class="reading"><p>{prose(decode_e2e.traced(found))}</p></div>')
        kernels = [[esc(part) for part in row] for row in decode_e2e.kernel_rows(found)]
        parts.append(table(decode_e2e.KERNEL_HEADERS, kernels, "Kernels of such a step"))
    return "\n".join(parts)


def method(roofline: Artifact) -> str:
    """Floors, the timer's tick, what a dirty flush costs, and the ceilings, as measured in the run."""
    found = roofline["ceilings"]
    if found is None:
        return "<p>No ceilings were measured.</p>"
    us = units.microseconds
    floors = [[esc(_FLOORS.get(each["name"], each["name"])), us(each["p50_ns"])] for each in found["floors"]]
    floors.append(["one tick of the device's timer", us(found["timer_quantum_ns"])])
    flush = [
        [
            units.mebibytes(each["bytes"]),
            *(us(each[f"{state}_p50_ns"]) for state in ("clean", "dirty", "warm")),
            _excess(each),
        ]
        for each in found["dirty_flush"]
    ]
    parts = [table(["What takes so long", "p50 (us)"], floors, "Floors: what is in every figure")]
    if flush:
        headers = ["Copied (MiB)", "clean (us)", "dirty (us)", "warm (us)", "dirty over clean"]
        parts.append(table(headers, flush, "The same copy after a clean sweep, after a dirty flush, and warm"))
    return "\n".join([*parts, _ladders(found), _rates(found)])


def _excess(entry: Mapping[str, Any]) -> str:
    return units.signed_percent(100 * (entry["dirty_p50_ns"] / entry["clean_p50_ns"] - 1))


def _ladders(found: Mapping[str, Any]) -> str:
    by_size: dict[int, dict[str, int]] = {}
    for rung in found["ladders"]:
        by_size.setdefault(rung["bytes"], {})[rung["kind"]] = rung["bytes_per_s"]
    kinds = ("copy", "read", "write")
    rows = [
        [units.mebibytes(size), *(units.gigabytes_per_s(rates.get(kind)) for kind in kinds)]
        for size, rates in sorted(by_size.items())
    ]
    headers = ["Moved (MiB)", *(f"{kind} (GB/s)" for kind in kinds)]
    return table(headers, rows, "Memory ladders: what this GPU moves at each size, caches cold")


def _rates(found: Mapping[str, Any]) -> str:
    spec = found["vendor_spec"] or {"flop_per_s": {}, "memory_bytes_per_s": None, "source": "no datasheet is listed"}
    measured = {entry["dtype"]: entry["flop_per_s"] for entry in found["matmul"]}
    rows = [
        [esc(unit), units.teraflop_per_s(measured.get(unit)), units.teraflop_per_s(spec["flop_per_s"].get(unit))]
        for unit in dict.fromkeys([*measured, *spec["flop_per_s"]])
    ]
    memory = f"memory {units.gigabytes_per_s(spec['memory_bytes_per_s'])} GB/s by datasheet"
    headers = ["Unit", "measured matmul (TFLOP/s)", "datasheet (TFLOP/s)"]
    return table(headers, rows, f"Arithmetic; {memory} ({spec['source']})")


def environment(artifact: Artifact) -> str:
    """The facts whose change makes old numbers incomparable."""
    rows = [[esc(name), esc(value)] for name, value in _environment(artifact)]
    return table(["Fact", "Value"], rows, "Environment of the measurement")


def _environment(artifact: Artifact) -> Iterator[tuple[str, str]]:
    device, software = artifact["device"], artifact["software"]
    yield "GPU", device["name"] if device else "none"
    if device:
        yield "Compute capability", device["compute_capability"]
        yield "SMs", str(device["sm_count"])
        yield "Memory", f"{units.gibibytes(device['memory_bytes'])} GiB"
        yield "L2 cache", f"{units.mebibytes(device['l2_bytes'])} MiB"
        yield "Power limit", f"{units.watts(device['power_limit_mw'])} W"
        yield "Largest clocks", f"SM {_mhz(device['max_sm_clock_mhz'])}, memory {_mhz(device['max_memory_clock_mhz'])}"
        yield "Clock policy", device["clock_policy"]
        yield "ECC, MIG", f"{_yes_no(device['ecc_enabled'])}, {_yes_no(device['mig_enabled'])}"
    names = {"driver": "Driver", "cuda_runtime": "CUDA", "torch": "PyTorch", "triton": "Triton", "ptxas": "ptxas"}
    yield from ((name, software[key] or units.MISSING) for key, name in names.items())
    yield "Python", software["python"]
    yield "Triton interpreter", _yes_no(artifact["interpreter"])


def _mhz(value: int | None) -> str:
    return units.MISSING if value is None else f"{value} MHz"


def _yes_no(value: bool | None) -> str:
    return units.MISSING if value is None else "yes" if value else "no"


def counters(roofline: Artifact) -> str:
    """Which kernels the hardware's counters were read of, and why not the others."""
    rows = [
        [
            code(each["kernel"]),
            esc(each["counter_status"].replace("_", " ")),
            str(len(each["cells"])),
            esc(each["reason"] or "-"),
        ]
        for each in roofline["counters"]
    ]
    headers = ["Kernel", "Status", "Cells counted", "Reason"]
    return table(headers, rows, "Hardware counters; the counts stand in each cell's details") if rows else ""


def gate(verdict: Artifact | None, digests: Mapping[str, str]) -> str:
    """The last verdict of the gate, and whether it is on these very samples.

    Args:
        verdict: a ``gate`` artifact, if one was kept.
        digests: SHA-256 by path of the artifacts that this page shows.
    """
    if verdict is None:
        return (
            "<p>No verdict was kept. <code>triton-kernel-lab gate</code> judges these samples against those measured "
            "before; with <code>--output reports/RUNNER/gate.json</code> its verdict appears here.</p>"
        )
    fresh = all(digests.get(record["path"]) == record["sha256"] for record in verdict["inputs"])
    on = "on the samples of this page" if fresh else "on <strong>earlier</strong> samples than those of this page"
    word = verdict["verdict"].replace("_", " ")
    base = f"against {code(verdict['base']['origin'])}, {verdict['compared']} cells compared"
    lines = "".join(f"<li>{esc(reason)}</li>" for reason in verdict["reasons"])
    counted = _verdicts(verdict["cells"])
    return (
        f'<p class="verdict" data-verdict="{esc(verdict["verdict"])}"><strong>{esc(word)}</strong> {on}, {base}.</p>'
        f"<ul>{lines}</ul>{table(['Verdict', 'Cells'], counted, 'Verdicts by number of cells')}"
    )


def _verdicts(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    found: dict[str, int] = {}
    for cell in cells:
        found[cell["verdict"]] = found.get(cell["verdict"], 0) + 1
    return [[esc(name), str(number)] for name, number in sorted(found.items())]
