"""Results in the JSON of NVBench, a benchmark a kernel and a state a candidate and cell.

NVBench knows cold and isolated GPU times only, which are those of ``cold_clean``;
its summaries are in seconds over all samples. The sweep differs: it clears
one L2 with a memset, where ours writes and then reads several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab import __version__
from triton_kernel_lab.analysis.stats import percentile
from triton_kernel_lab.export.source import Source, Timed, timed

__all__ = ["render"]

_VERSION = {"major": 1, "minor": 0, "patch": 0, "string": "1.0.0"}
_AXES = ("shape", "dtype", "candidate")
_TIME = "nv/cold/time/gpu"


def render(source: Source) -> dict[str, Any]:
    """The root object of a result file."""
    by_kernel: dict[str, list[Timed]] = {}
    for each in timed(source, "cold_clean"):
        by_kernel.setdefault(each.cell["kernel"], []).append(each)
    return {
        "meta": {"version": {"json": _VERSION}, "producer": f"triton-kernel-lab {__version__}"},
        "devices": [_device(source.environment["device"])] if source.environment["device"] else [],
        "benchmarks": [_benchmark(index, *item) for index, item in enumerate(by_kernel.items())],
    }


def _device(device: Mapping[str, Any]) -> dict[str, Any]:
    major, _, minor = device["compute_capability"].partition(".")
    return {
        "id": 0,
        "name": device["name"],
        "sm_version": 100 * int(major) + 10 * int(minor),
        "number_of_sms": device["sm_count"],
        "global_memory_size": device["memory_bytes"],
        "l2_cache_size": device["l2_bytes"],
        "ecc_state": bool(device["ecc_enabled"]),
    }


def _benchmark(index: int, kernel: str, found: Sequence[Timed]) -> dict[str, Any]:
    values = [_axis_values(each) for each in found]
    return {
        "index": index,
        "name": kernel,
        "devices": [0],
        "axes": [_axis(name, (value[name] for value in values)) for name in _AXES],
        "states": [_state(each, value) for each, value in zip(found, values, strict=True)],
    }


def _axis_values(each: Timed) -> dict[str, str]:
    return {"shape": each.cell["shape"], "dtype": each.cell["dtype"], "candidate": each.candidate["name"]}


def _axis(name: str, values: Iterable[str]) -> dict[str, Any]:
    shown = [{"input_string": value, "description": "", "value": value} for value in dict.fromkeys(values)]
    return {"name": name, "type": "string", "flags": "", "values": shown}


def _state(each: Timed, values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": "Device=0 " + " ".join(f"{name}={value}" for name, value in values.items()),
        "device": 0,
        "type_config_index": 0,
        "axis_values": [{"name": name, "type": "string", "value": value} for name, value in values.items()],
        "summaries": list(_summaries(each)),
        "is_skipped": False,
    }


def _summaries(each: Timed) -> Iterator[dict[str, Any]]:
    ordered = sorted(ns for process in each.processes for ns in process)
    mean = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((ns - mean) ** 2 for ns in ordered) / max(1, len(ordered) - 1))
    yield _summary("nv/cold/sample_size", "Samples", "sample_size", len(ordered))
    for tag, name, ns in (
        ("min", "Min", ordered[0]),
        ("q1", "Q1", percentile(ordered, 25)),
        ("median", "Median", percentile(ordered, 50)),
        ("q3", "Q3", percentile(ordered, 75)),
        ("max", "Max", ordered[-1]),
        ("mean", "GPU Time", mean),
        ("stdev/absolute", "Stdev", deviation),
    ):
        yield _summary(f"{_TIME}/{tag}", name, "duration", round(ns / 1e9, 12))
    yield _summary(f"{_TIME}/stdev/relative", "Noise", "percentage", round(deviation / mean, 9))
    if rate := each.candidate["logical_bytes_per_s"]:
        yield _summary("nv/cold/bw/global/bytes_per_second", "GlobalMem BW", "byte_rate", float(rate))


def _summary(tag: str, name: str, hint: str, value: int | float) -> dict[str, Any]:
    # As text: its writer spells 64-bit integers and floats so, which JSON itself may not hold.
    kind = "int64" if isinstance(value, int) else "float64"
    return {"tag": tag, "name": name, "hint": hint, "data": [{"name": "value", "type": kind, "value": repr(value)}]}
