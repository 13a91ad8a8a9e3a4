"""The sections of results.md, each a heading and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.stats import REGIMES
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.labels import find, label, of_regime, p50_text, verdict
from triton_kernel_lab.report.markdown import table

__all__ = ["beside", "ceilings", "correctness", "environment", "regimes", "results", "tails", "times", "unpublished"]

Rows = list[list[str]]

# A regime, by the name of the time that it takes.
_TIMES = {"device": "cold_clean", "graph": "graph", "call": "call"}
_TIMES_NOTE = (
    "p50 of the device's time in `cold_clean`, of a call's share of a CUDA graph, and of the host's time for a call. "
    "The best baseline of one need not be that of another."
)


def results(roofline: Artifact, kernel: str) -> str:
    """The primary table of a kernel: p50, baselines, speedups, bandwidth, class."""
    headers = [
        *("Shape", "Dtype", "Triton p50 (us)", "torch.compile p50 (us)", "eager p50 (us)", "Best baseline"),
        *("its p50 (us)", "vs torch.compile", "vs eager", "vs best", "Logical GB/s", "Of attainable", "Class"),
        "Verdict",
    ]
    return _section(f"{kernel}: p50", headers, [_result(cell) for cell in of_regime(roofline, "cold_clean", kernel)])


def _result(cell: Mapping[str, Any]) -> list[str]:
    ours: Mapping[str, Any] = find(cell, "triton") or {}
    best = cell["best_baseline"]
    return [
        cell["shape"],
        cell["dtype"],
        *(p50_text(cell, name) for name in ("triton", "torch_compile", "eager")),
        label(best),
        p50_text(cell, best),
        *(units.ratio(cell[f"speedup_over_{rival}"]) for rival in ("torch_compile", "eager", "best")),
        units.gigabytes_per_s(ours.get("logical_bytes_per_s")),
        units.percent(ours.get("attainable_ratio")),
        cell["class"],
        verdict(cell),
    ]


def times(roofline: Artifact, kernel: str) -> str:
    """Device, graph and call time of Triton, torch.compile and the best baseline; empty without the last two times."""
    cells = [cell for cell in roofline["cells"] if cell["kernel"] == kernel]
    if {cell["regime"] for cell in cells}.isdisjoint({"graph", "call"}):
        return ""
    headers = ["Shape", "Dtype"]
    for time in _TIMES:
        headers += [f"Triton, {time} (us)", f"torch.compile, {time} (us)", f"Best baseline, {time}", "its p50 (us)"]
    rows = [[*case, *_times(found)] for case, found in _by_case(cells).items()]
    return f"### {kernel}: three times\n\n{_TIMES_NOTE}\n\n{table(headers, rows)}"


def _times(cells: Mapping[str, Mapping[str, Any]]) -> list[str]:
    absent = {"candidates": (), "best_baseline": None}
    texts = []
    for regime in _TIMES.values():
        cell = cells.get(regime, absent)
        best = cell["best_baseline"]
        texts += [p50_text(cell, "triton"), p50_text(cell, "torch_compile"), label(best), p50_text(cell, best)]
    return texts


def _by_case(cells: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """Cells by shape and dtype, then by regime."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["shape"], cell["dtype"]), {})[cell["regime"]] = cell
    return found


def tails(roofline: Artifact, kernel: str) -> str:
    """The spread of Triton's samples; p99 is a dash below 500 samples."""
    names = ("min", "p50", "p95", "p99", "max", "tmean")
    rows: Rows = []
    for cell in of_regime(roofline, "cold_clean", kernel):
        stats = (find(cell, "triton") or {}).get("stats")
        if stats:
            spread = [units.microseconds(stats[f"{name}_ns"]) for name in names]
            rows.append([cell["shape"], cell["dtype"], *spread, str(stats["samples"]), str(stats["flagged"])])
    headers = ["Shape", "Dtype", *(f"{name} (us)" for name in names), "Samples", "Flagged"]
    return _section(f"{kernel}: spread of Triton", headers, rows)


def regimes(roofline: Artifact, kernel: str) -> str:
    """Each candidate's p50 in every regime; empty when only the primary one was timed."""
    cells = [cell for cell in roofline["cells"] if cell["kernel"] == kernel]
    timed = [regime for regime in REGIMES if any(cell["regime"] == regime for cell in cells)]
    if timed in ([], [REGIMES[0]]):
        return ""
    rows = [[*case, *row] for case, found in _by_case(cells).items() for row in _regime_rows(found, timed)]
    headers = ["Shape", "Dtype", "Candidate", *(f"{regime} p50 (us)" for regime in timed)]
    return _section(f"{kernel}: by regime", headers, rows)


def _regime_rows(cells: Mapping[str, Mapping[str, Any]], timed: Sequence[str]) -> Rows:
    names = dict.fromkeys(candidate["name"] for cell in cells.values() for candidate in cell["candidates"])
    absent = {"candidates": ()}
    return [[label(name), *(p50_text(cells.get(regime, absent), name) for regime in timed)] for name in names]


def correctness(artifact: Artifact) -> str:
    """Errors against the float64 oracle, beside the limit they were judged by."""
    headers = ["Shape", "Dtype", "Variant", "Passed", "Error ratio", "its limit", "eager ratio", "torch.compile ratio"]
    headers += ["Relative norm", "limit of norm", "Largest error", "Failures"]
    rows = [_correctness(cell) for cell in artifact["cells"]]
    text = _section(f"{artifact['kernel']}: correctness", headers, rows)
    verdict_text = "passed" if artifact["passed"] else "FAILED"
    return text.replace("\n\n", f"\n\nServed by {artifact['served_by']}; {verdict_text}.\n\n", 1)


def _correctness(cell: Mapping[str, Any]) -> list[str]:
    compiled = cell["torch_compile"] or {}
    return [
        *(cell["shape"], cell["dtype"], cell["variant"], "yes" if cell["passed"] else "NO"),
        units.error_size(cell["triton"]["max_error_ratio"]),
        units.error_size(cell["limit"]["max_error_ratio"]),
        units.error_size(cell["eager"]["max_error_ratio"]),
        units.error_size(compiled.get("max_error_ratio")),
        units.error_size(cell["triton"]["rel_norm"]),
        units.error_size(cell["limit"]["rel_norm"]),
        units.error_size(cell["triton"]["max_abs"]),
        "; ".join(cell["failures"]) or units.MISSING,
    ]


def unpublished(roofline: Artifact) -> str:
    """Every candidate without a figure, and why; empty when all have one."""
    rows = [
        [
            cell["kernel"],
            cell["shape"],
            cell["dtype"],
            cell["regime"],
            label(c["name"]),
            c["status"],
            c["reason"] or "-",
        ]
        for cell in roofline["cells"]
        for c in cell["candidates"]
        if c["stats"] is None
    ]
    headers = ["Kernel", "Shape", "Dtype", "Regime", "Candidate", "Status", "Reason"]
    return _section("Without a figure", headers, rows) if rows else ""


def beside(timings: Mapping[str, Artifact]) -> str:
    """Which kernels were measured while others used the device, by measuring process; empty where none was."""
    seen = {kernel: [each["other_processes"] for each in timing["processes"]] for kernel, timing in timings.items()}
    named = [f"`{kernel}` ({', '.join(map(units.plain, counts))})" for kernel, counts in seen.items() if any(counts)]
    return f"Measured beside other processes on the device: {', '.join(named)}." if named else ""


def environment(artifact: Artifact) -> str:
    """The facts whose change makes old numbers incomparable."""
    device, software = artifact["device"], artifact["software"]
    rows: Rows = [["GPU", "none"]]
    if device:
        rows = [
            ["GPU", device["name"]],
            ["Compute capability", device["compute_capability"]],
            ["SMs", str(device["sm_count"])],
            ["Memory", f"{units.gibibytes(device['memory_bytes'])} GiB"],
            ["L2 cache", f"{units.mebibytes(device['l2_bytes'])} MiB"],
            ["Power limit", f"{units.watts(device['power_limit_mw'])} W"],
            ["Largest SM clock", f"{device['max_sm_clock_mhz'] or units.MISSING} MHz"],
            ["Largest memory clock", f"{device['max_memory_clock_mhz'] or units.MISSING} MHz"],
            ["Clock policy", device["clock_policy"]],
            ["ECC", _yes_no(device["ecc_enabled"])],
            ["MIG", _yes_no(device["mig_enabled"])],
        ]
    names = {"driver": "Driver", "cuda_runtime": "CUDA", "torch": "PyTorch", "triton": "Triton", "ptxas": "ptxas"}
    rows += [[name, software[key] or units.MISSING] for key, name in names.items()]
    rows += [["Python", software["python"]], ["Triton interpreter", _yes_no(artifact["interpreter"])]]
    return _section("Environment", ["Fact", "Value"], rows)


def _yes_no(value: bool | None) -> str:
    return units.MISSING if value is None else "yes" if value else "no"


def ceilings(summary: Mapping[str, Any]) -> str:
    """Floors, ladders, matmul rates and the price of a dirty flush, as measured."""
    us, p50 = units.microseconds, "p50 (us)"
    floors = [[floor["name"], us(floor["p50_ns"])] for floor in summary["floors"]]
    floors.append(["timer quantum", us(summary["timer_quantum_ns"])])
    ladder = [
        [rung["kind"], units.mebibytes(rung["bytes"]), us(rung["p50_ns"]), units.gigabytes_per_s(rung["bytes_per_s"])]
        for rung in summary["ladders"]
    ]
    matmul = [[e["dtype"], us(e["p50_ns"]), units.teraflop_per_s(e["flop_per_s"])] for e in summary["matmul"]]
    flush = [
        [units.mebibytes(entry["bytes"]), *(us(entry[f"{state}_p50_ns"]) for state in ("clean", "dirty", "warm"))]
        for entry in summary["dirty_flush"]
    ]
    parts = [
        _section("Floors", ["Floor", p50], floors),
        _section("Memory ladders", ["Kind", "Read + written (MiB)", p50, "GB/s"], ladder),
        _section("Matmul", ["Dtype", p50, "TFLOP/s"], matmul) if matmul else "",
        _section("Copy by cache state", ["Read + written (MiB)", "clean (us)", "dirty (us)", "warm (us)"], flush)
        if flush
        else "",
        _vendor(summary["vendor_spec"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _vendor(spec: Mapping[str, Any] | None) -> str:
    if spec is None:
        return "No datasheet ceilings are listed for this GPU."
    rows = [["memory", f"{units.gigabytes_per_s(spec['memory_bytes_per_s'])} GB/s"]]
    rows += [[unit, f"{units.teraflop_per_s(rate)} TFLOP/s"] for unit, rate in sorted(spec["flop_per_s"].items())]
    return _section(f"Datasheet: {spec['source']}", ["Ceiling", "Rate"], rows)


def _section(title: str, headers: Sequence[str], rows: Rows) -> str:
    body = table(headers, rows) if rows else "No rows."
    return f"### {title}\n\n{body}"
