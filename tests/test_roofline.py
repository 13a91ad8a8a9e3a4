from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import roofline, timemodel
from triton_kernel_lab.analysis.ceilings import CeilingsError
from triton_kernel_lab.analysis.inputs import InputError
from triton_kernel_lab.analysis.roofline import RooflineError
from triton_kernel_lab.analysis.vendor import vendor_spec
from triton_kernel_lab.artifacts import Artifact, ArtifactError
from triton_kernel_lab.project import Project, kernel_names

SMALL: dict[str, Any] = {"shapes": ("128x1024", "2048x4096"), "dtypes": ("float16",), "samples": 20}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    found = synthetic.project(tmp_path_factory.mktemp("raw"), derive=False, **SMALL)
    return {
        "environment": artifacts.read(found.artifacts / "environment.json"),
        "ceilings": artifacts.read(found.artifacts / "ceilings.json"),
        "timing": artifacts.read(found.artifacts / "timing/rms_norm.json"),
        "counters": artifacts.read(found.artifacts / "counters/rms_norm.json"),
    }


def build(raw: dict[str, Artifact], *stale: str, **changed: Callable[[Artifact], None]) -> Artifact:
    """The roofline of one kernel, after a change of copies of its inputs; ``stale`` names stages."""
    made = copy.deepcopy(raw)
    for kind, change in changed.items():
        change(made[kind])
    inputs = [{"path": f"{kind}.json", "sha256": "0" * 64} for kind in made]
    timings = {made["timing"]["kernel"]: made["timing"]}
    counters = {made["counters"]["kernel"]: made["counters"]}
    result = roofline.build(
        made["environment"], made["ceilings"], timings, counters, inputs=inputs, source_sha256="0" * 64, stale=stale
    )
    artifacts.parse(artifacts.dumps(result).encode(), "built", "roofline")
    return result


def cell(made: Artifact, shape: str = "2048x4096", regime: str = "cold_clean") -> Any:
    return next(found for found in made["cells"] if (found["shape"], found["regime"]) == (shape, regime))


def candidate(found: Any, name: str = "triton") -> Any:
    return next(entry for entry in found["candidates"] if entry["name"] == name)


def at(timing: Artifact, name: str = "triton", index: int = 1) -> Any:
    return candidate(timing["cells"][index], name)


def scale(name: str, factor: float) -> Callable[[Artifact], None]:
    def change(timing: Artifact) -> None:
        for run in at(timing, name)["runs"]:
            run["samples_ns"] = [32 * round(factor * sample / 32) for sample in run["samples_ns"]]

    return change


# Memory


def test_peak_memory_is_carried_where_it_was_measured(raw: dict[str, Artifact]) -> None:
    """A candidate's peak, null included, stands in each of its cells; an older timing without one stays readable."""

    def change(timing: Artifact) -> None:
        at(timing)["peak_bytes"] = 4096
        at(timing, "eager")["peak_bytes"] = None

    found = cell(build(raw, timing=change))
    assert candidate(found)["peak_bytes"] == 4096
    assert candidate(found, "eager")["peak_bytes"] is None
    assert "peak_bytes" not in candidate(found, "torch_compile")


def test_a_companion_is_no_baseline(raw: dict[str, Artifact]) -> None:
    """A further way into our own kernel is timed and told, but no speedup is counted over it however fast it is."""

    def change(timing: Artifact) -> None:
        faster = copy.deepcopy(at(timing))
        for run in faster["runs"]:
            run["samples_ns"] = [sample - 32 for sample in run["samples_ns"]]
        timing["cells"][1]["candidates"].append({**faster, "name": "by autograd", "role": "companion"})

    made, before = cell(build(raw, timing=change)), cell(build(raw))
    assert candidate(made, "by autograd")["stats"]["p50_ns"] < candidate(made)["stats"]["p50_ns"]
    for name in ("best_baseline", "speedup_over_best", "speedup_over_torch_compile", "speedup_over_eager"):
        assert made[name] == before[name]


# The time model


@given(st.integers(0, 10**5), st.fractions(Fraction(1, 10**4), 10), st.integers(1, 2**31))
def test_a_ladder_is_exact_for_a_launch_cost_plus_a_rate(launch: int, ns_per_kib: Fraction, size: int) -> None:
    """Between its rungs the ladder of a device with a fixed cost and a fixed rate gives that device's time."""

    def time_of(total: int) -> Fraction:
        return launch + ns_per_kib * total / 1024

    rungs = [(1 << power, time_of(1 << power)) for power in range(18, 31, 4)]
    smallest, largest = rungs[0], rungs[-1]
    found = timemodel.ladder_ns(rungs, size)
    if size <= smallest[0]:
        assert found == smallest[1]
    elif size >= largest[0]:
        assert found == largest[1] * size / largest[0]
    else:
        assert found == time_of(size)


def test_no_rung_is_slower_than_several_of_a_smaller_one() -> None:
    """Bytes that two launches of half the size move in 80 ns are not allowed 90; what is faster at once stays so."""
    ladders = [
        {"kind": kind, "bytes": size, "p50_ns": ns}
        for kind in ("write", "copy", "read")
        for size, ns in ((64, 30), (128, 40), (256, 90), (300, 100))
    ]
    assert [timemodel.mix_ns(ladders, size // 2, size // 2) for size in (64, 128, 256)] == [30, 40, 80]
    # Three launches of 128 bytes take 120 ns, but one of 300 takes 100.
    assert timemodel.mix_ns(ladders, 150, 150) == 100


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_mix_lies_between_the_ladders_beside_its_read_share(read: int, write: int) -> None:
    """A mix takes at least the faster and at most the slower of the two ladders that it lies between."""
    times = {"write": 100, "copy": 160, "read": 130}
    ladders = [{"kind": kind, "bytes": 10**7, "p50_ns": ns} for kind, ns in times.items()]
    found = timemodel.mix_ns(ladders, read, write)
    beside = ("write", "copy") if read <= write else ("copy", "read")
    assert min(times[kind] for kind in beside) <= found <= max(times[kind] for kind in beside)


@pytest.mark.parametrize(("read", "write", "kind"), [(0, 8, "write"), (4, 4, "copy"), (8, 0, "read")])
def test_a_pure_mix_is_its_own_ladder(read: int, write: int, kind: str) -> None:
    """Only writing, copying and only reading take the time of their own ladders."""
    times = {"write": 100, "copy": 160, "read": 130}
    ladders = [{"kind": name, "bytes": 64, "p50_ns": ns} for name, ns in times.items()]
    assert timemodel.mix_ns(ladders, read, write) == times[kind]


@pytest.mark.parametrize(("read", "write"), [(8, 0), (6, 2), (2, 6), (0, 8)])
def test_one_direction_is_no_slower_than_a_copy(read: int, write: int) -> None:
    """Where the ladders of reads and writes are above that of copies, any mix is held to the copy."""
    times = {"write": 140, "copy": 100, "read": 130}
    ladders = [{"kind": name, "bytes": 64, "p50_ns": ns} for name, ns in times.items()]
    assert timemodel.mix_ns(ladders, read, write) == 100


@pytest.mark.parametrize(
    ("memory", "compute", "p50", "expected"),
    [
        (1000, 100, 1100, "memory_bound"),
        (100, 1000, 1100, "compute_bound"),
        (1000, 900, 1100, "ridge"),
        (1000, 899, 1100, "memory_bound"),
        (1000, 100, 2000, "memory_bound"),
        (1000, 100, 2001, "latency_limited"),
    ],
)
def test_the_larger_term_names_the_bound(memory: int, compute: int, p50: int, expected: str) -> None:
    """Terms within 10 % are a ridge, and twice the attainable time is limited by latency."""
    assert timemodel.bound_class(timemodel.Bound(Fraction(memory), Fraction(compute)), p50) == expected


def test_f77_bytes_and_flop_give_the_times_of_the_datasheet() -> None:
    """An INT4 GEMV counts K N / 2 weight bytes plus scales, a matmul 2 M N K; each over its rate."""
    ceilings = {"vendor_spec": {"memory_bytes_per_s": 10**12, "flop_per_s": {"bfloat16": 10**14}}}
    k, n, group = 4096, 1024, 128
    read = k * n // 2 + 2 * k * n // group
    bound = timemodel.vendor_bound(ceilings, read, 0, 2 * k * n, "bfloat16")
    assert bound is not None
    assert bound.memory_ns == Fraction(2_097_152 + 65_536, 1000)
    assert bound.compute_ns == Fraction(8_388_608, 100_000)
    assert bound.attainable_ns == 2163


# Classes and plausibility


def test_a_kernel_at_the_memory_ceiling_is_memory_bound(raw: dict[str, Artifact]) -> None:
    """Near the ladder's time the cell is memory bound, with its share of the attainable time."""
    found = cell(build(raw))
    ours = candidate(found)
    assert found["class"] == "memory_bound"
    assert ours["attainable_ratio"] == round(found["attainable_ns"] / ours["stats"]["p50_ns"], 4)
    assert 0.9 < ours["attainable_ratio"] <= 1.02


def test_under_three_null_kernels_no_share_is_claimed(raw: dict[str, Artifact]) -> None:
    """A cell dominated by the launch floor has a class and no per cent."""
    found = cell(build(raw), "128x1024")
    assert found["class"] == "floor_dominated"
    assert candidate(found)["attainable_ratio"] is None


def test_a_slow_kernel_is_latency_limited(raw: dict[str, Artifact]) -> None:
    """More than twice the attainable time is limited by latency."""
    assert cell(build(raw, timing=scale("triton", 2.5)))["class"] == "latency_limited"


def test_arithmetic_above_the_memory_time_is_compute_bound(raw: dict[str, Artifact]) -> None:
    """Enough FLOP at the measured rate of their unit bind the cell."""

    def change(timing: Artifact) -> None:
        timing["cells"][1]["cost"] |= {"flop": 12 * 10**9, "unit": "float16"}
        scale("triton", 1.5)(timing)

    found = cell(build(raw, timing=change))
    assert found["class"] == "compute_bound"


def test_a_copy_of_the_bytes_is_not_held_to_the_arithmetic(raw: dict[str, Artifact]) -> None:
    """The anchor does no FLOP: beside a cell that is bound by them it is as fast as it is."""

    def change(timing: Artifact) -> None:
        timing["cells"][1]["cost"] |= {"flop": 12 * 10**9, "unit": "float16"}
        scale("triton", 1.5)(timing)

    anchor = candidate(cell(build(raw, timing=change)), "copy")
    assert (anchor["role"], anchor["status"]) == ("anchor", "ok")


def test_what_is_left_over_from_an_earlier_run_is_not_judged_by_these_ceilings(raw: dict[str, Artifact]) -> None:
    """Another device may have another floor: a stale timing keeps its times, and is held to the datasheet alone."""
    found = cell(build(raw, "timing@rms_norm", timing=scale("triton", 0.9)))
    ours = candidate(found)
    assert (found["attainable_ns"], found["class"]) == (None, "not_applicable")
    assert (ours["status"], ours["attainable_ratio"]) == ("ok", None)
    assert ours["stats"]["p50_ns"] > 0
    # What no such GPU can do is implausible whenever it was measured.
    listed: dict[str, Callable[[Artifact], None]] = {"environment": lambda e: e["device"].update(name="NVIDIA H200")}
    found = cell(build(raw, "timing@rms_norm", timing=scale("triton", 0.5), **listed))
    ours = candidate(found)
    assert (found["class"], ours["status"], ours["stats"]) == ("implausible", "invalid", None)
    assert f"under the {found['vendor_ns']} ns" in ours["reason"]


@pytest.mark.parametrize(
    ("commit", "dirty", "machine", "judged"),
    [
        ("a" * 40, False, "same", True),
        ("b" * 40, False, "same", False),
        ("a" * 40, True, "same", False),
        ("a" * 40, False, "other", False),
    ],
)
def test_what_is_stale_but_of_the_run_of_the_ceilings_is_judged_by_them(
    raw: dict[str, Artifact], commit: str, dirty: bool, machine: str, judged: bool
) -> None:
    """Sources that changed since do not change the run: one clean commit and one record of the machine make one."""

    def ceilings(artifact: Artifact) -> None:
        artifact["producer"].update(git_commit="a" * 40, git_tree_dirty=False)

    def timing(artifact: Artifact) -> None:
        artifact["producer"].update(git_commit=commit, git_tree_dirty=dirty)
        if machine == "other":
            artifact["inputs"][-1]["sha256"] = "0" * 64

    found = cell(build(raw, "timing@rms_norm", ceilings=ceilings, timing=timing))
    assert (found["attainable_ns"] is not None) == judged


def test_f77_a_value_above_the_ceilings_is_flagged(raw: dict[str, Artifact]) -> None:
    """Faster than 1.02 x the ceiling is implausible: a status and a reason beside nulls."""
    found = cell(build(raw, timing=scale("triton", 0.9)))
    ours = candidate(found)
    assert found["class"] == "implausible"
    assert (ours["status"], ours["stats"], ours["attainable_ratio"]) == ("invalid", None, None)
    assert f"under the {found['attainable_ns']} ns" in ours["reason"]
    assert found["speedup_over_eager"] is None


def test_the_copy_beside_a_cell_is_a_rung_at_its_own_size(raw: dict[str, Artifact]) -> None:
    """What the ladder, read between its rungs, calls implausible is judged by the copy of as many bytes."""
    before = cell(build(raw))

    def share(name: str, of_attainable: float) -> Callable[[Artifact], None]:
        return scale(name, of_attainable * before["attainable_ns"] / candidate(before, name)["stats"]["p50_ns"])

    assert cell(build(raw, timing=share("triton", 0.97)))["class"] == "implausible"

    def both(timing: Artifact) -> None:
        share("triton", 0.97)(timing)
        share("copy", 0.985)(timing)

    found = cell(build(raw, timing=both))
    assert (found["class"], candidate(found)["status"]) == ("memory_bound", "ok")
    assert found["attainable_ns"] == candidate(found, "copy")["stats"]["p50_ns"] < before["attainable_ns"]


def test_arithmetic_is_held_to_the_measured_rate(raw: dict[str, Artifact]) -> None:
    """A cell above the rate of products beside it is implausible, though its datasheet promises more."""
    listed: dict[str, Callable[[Artifact], None]] = {"environment": lambda e: e["device"].update(name="NVIDIA H200")}
    measured = max(entry["flop_per_s"] for entry in build(raw)["ceilings"]["matmul"] if entry["dtype"] == "float16")
    p50_ns = candidate(cell(build(raw)))["stats"]["p50_ns"]

    def working(share_of_measured: float) -> Callable[[Artifact], None]:
        flop = round(share_of_measured * measured * p50_ns / 1e9)
        return lambda timing: timing["cells"][1]["cost"].update(flop=flop, unit="float16")

    below, above = (cell(build(raw, timing=working(share), **listed)) for share in (0.9, 1.2))
    assert (below["class"] != "implausible", candidate(below)["status"]) == (True, "ok")
    assert above["vendor_ns"] < p50_ns
    assert above["class"] == "implausible"


def test_an_implausible_baseline_is_not_the_best(raw: dict[str, Artifact]) -> None:
    """A baseline that beats the ceilings is invalid and sets no mark."""
    found = cell(build(raw, timing=scale("library_op", 0.5)))
    assert candidate(found, "library_op")["status"] == "invalid"
    assert found["best_baseline"] == "torch_compile"
    assert found["class"] == "memory_bound"


def test_near_the_floor_the_null_kernel_is_the_limit(raw: dict[str, Artifact]) -> None:
    """A small cell may beat the ladder's noisy rung, but not an empty kernel."""

    def status(p50: int) -> str:
        def change(timing: Artifact) -> None:
            for run in at(timing, index=0)["runs"]:
                run["samples_ns"] = [p50] * len(run["samples_ns"])

        found = cell(build(raw, timing=change), "128x1024")
        assert found["attainable_ns"] > 1.02 * 3296
        return str(candidate(found)["status"])

    assert (status(3296), status(3072)) == ("ok", "invalid")


# Failures are statuses


@pytest.mark.parametrize("value", ["-1", "0", "null", '"failed"', "1e-12", "NaN", "-0.0", "1e999"])
def test_f74_a_failed_benchmark_is_not_a_number(tmp_path: Path, raw: dict[str, Artifact], value: str) -> None:
    """Whatever stands for a failure among samples is refused with its file and JSON path."""
    text = artifacts.dumps(raw["timing"])
    where = tmp_path / "timing.json"
    where.write_text(re.sub(r'(?<="samples_ns": \[)[0-9]+', value, text, count=1))
    with pytest.raises(ArtifactError) as caught:
        artifacts.read(where, "timing")
    assert str(where) in str(caught.value)
    if value in ("-1", "0", "null", '"failed"', "1e-12"):
        assert "$.cells[0].candidates[0].runs[0].samples_ns[0]" in str(caught.value)


@pytest.mark.parametrize("status", ["failed", "unavailable", "invalid"])
def test_f74_a_failed_candidate_has_a_status_beside_nulls(raw: dict[str, Artifact], status: str) -> None:
    """A failure keeps its reason, takes part in no speedup and is never the best."""

    def change(timing: Artifact) -> None:
        at(timing, "torch_compile").update(status=status, reason="inductor: out of resources", runs=[])

    found = cell(build(raw, timing=change))
    entry = candidate(found, "torch_compile")
    assert (entry["status"], entry["reason"], entry["stats"]) == (status, "inductor: out of resources", None)
    assert found["speedup_over_torch_compile"] is None
    assert found["best_baseline"] == "library_op"


def test_f74_a_failed_triton_row_is_never_fast(raw: dict[str, Artifact]) -> None:
    """Without a figure of ours there is no speedup, no bandwidth and no class."""
    found = cell(build(raw, timing=lambda t: at(t).update(status="failed", reason="wrong result")))
    assert found["class"] == "not_applicable"
    assert [found[f"speedup_over_{rival}"] for rival in ("torch_compile", "eager", "best")] == [None] * 3
    assert candidate(found)["logical_bytes_per_s"] is None


def test_a_cell_in_which_everything_failed_still_shows_up(raw: dict[str, Artifact]) -> None:
    """A cell without a single run is listed in the primary regime."""

    def change(timing: Artifact) -> None:
        for entry in timing["cells"][1]["candidates"]:
            entry.update(status="failed", reason="no memory", runs=[])

    found = cell(build(raw, timing=change))
    assert found["best_baseline"] is None
    assert {entry["status"] for entry in found["candidates"]} == {"failed"}


def test_a_candidate_that_says_ok_without_samples_is_invalid(raw: dict[str, Artifact]) -> None:
    """Status ok needs samples."""
    found = candidate(cell(build(raw, timing=lambda t: at(t).update(runs=[]))))
    assert (found["status"], found["stats"]) == ("invalid", None)


def test_a_triton_row_served_by_the_fallback_is_invalid(raw: dict[str, Artifact]) -> None:
    """The time of a fallback is not published as Triton's."""
    found = candidate(cell(build(raw, timing=lambda t: at(t).update(served_by="torch"))))
    assert (found["status"], found["reason"]) == ("invalid", "served by torch, not by triton")


# Derived figures


def test_speedups_are_ratios_of_medians(raw: dict[str, Artifact]) -> None:
    """A speedup is baseline p50 over Triton p50 to 4 decimals; the best is the fastest baseline, not the anchor."""
    found = cell(build(raw))
    p50 = {entry["name"]: entry["stats"]["p50_ns"] for entry in found["candidates"]}
    assert found["speedup_over_torch_compile"] == round(p50["torch_compile"] / p50["triton"], 4)
    assert found["speedup_over_eager"] == round(p50["eager"] / p50["triton"], 4)
    assert found["best_baseline"] == "library_op"
    assert found["speedup_over_best"] == round(p50["library_op"] / p50["triton"], 4)


def test_logical_bandwidth_counts_each_tensor_once(raw: dict[str, Artifact]) -> None:
    """Logical bytes over p50, rounded to whole bytes a second."""
    found = cell(build(raw))
    assert found["logical_read_bytes"] == found["logical_write_bytes"] == 2 * 2048 * 4096
    moved, p50 = 4 * 2048 * 4096, candidate(found)["stats"]["p50_ns"]
    assert candidate(found)["logical_bytes_per_s"] == round(Fraction(moved * 10**9, p50))


def test_a_sample_of_many_calls_is_divided(tmp_path: Path) -> None:
    """Graph and call regimes give the time of one call and no attainable time."""
    found = synthetic.project(tmp_path, regimes=("cold_clean", "graph", "call"), derive=False, **SMALL)
    roofline.run(found)
    made = artifacts.read(found.artifacts / "roofline.json")
    for regime, calls in (("graph", 16), ("call", 50)):
        timed = cell(made, regime=regime)
        runs = artifacts.read(found.artifacts / "timing/rms_norm.json")["cells"][1]["candidates"][0]["runs"]
        smallest = min(min(run["samples_ns"]) for run in runs if run["regime"] == regime)
        assert candidate(timed)["stats"]["min_ns"] == int(Fraction(smallest, calls) + Fraction(1, 2))
        assert (timed["attainable_ns"], timed["vendor_ns"], timed["class"]) == (None, None, "not_applicable")


def test_vendor_time_stands_beside_the_measured_one(raw: dict[str, Artifact]) -> None:
    """On a GPU with a datasheet each cold cell has both bounds, named by origin."""
    made = build(raw, environment=lambda e: e["device"].update(name="NVIDIA H200"))
    assert "datasheet" in made["ceilings"]["vendor_spec"]["source"]
    assert cell(made)["vendor_ns"] == round(4 * 2048 * 4096 / 4.8e12 * 1e9)
    assert cell(made)["vendor_ns"] < cell(made)["attainable_ns"]


@pytest.mark.parametrize(
    ("name", "memory", "bf16", "tf32", "fp32"),
    [
        ("NVIDIA H200", 4.8e12, 989.4e12, 494.7e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12, 989.4e12, 494.7e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, 156e12, 19.5e12),
        ("NVIDIA GeForce RTX 5070 Ti", 896e9, None, None, None),
    ],
)
def test_datasheet_ceilings(
    name: str, memory: float, bf16: float | None, tf32: float | None, fp32: float | None
) -> None:
    """Listed GPUs have the datasheet's figures, and what it does not say is absent."""
    spec = vendor_spec(name)
    assert spec is not None
    assert spec["memory_bytes_per_s"] == memory
    found = tuple(spec["flop_per_s"].get(unit) for unit in ("bfloat16", "float16", "tf32", "float32"))
    assert found == (bf16, bf16, tf32, fp32)


@pytest.mark.parametrize(
    "name", ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 5070 Ti Laptop GPU"]
)
def test_a_relative_of_a_listed_gpu_has_no_datasheet(name: str) -> None:
    """A slice or another board of a listed model is another device."""
    assert vendor_spec(name) is None


# Inputs


def test_the_weakest_input_sets_the_claim(raw: dict[str, Artifact]) -> None:
    """Derived from sound inputs is derived; one exploratory input makes it exploratory."""

    def sound(artifact: Artifact) -> None:
        artifact["claim_kind"] = "measured"

    def dirty(artifact: Artifact) -> None:
        artifact["claim_kind"] = "exploratory"

    assert build(raw)["claim_kind"] == "synthetic"
    kept = dict.fromkeys(("environment", "ceilings", "timing", "counters"), sound)
    assert build(raw, **kept)["claim_kind"] == "derived"
    assert build(raw, **kept | {"timing": dirty})["claim_kind"] == "exploratory"
    assert build(raw, **kept | {"counters": dirty})["claim_kind"] == "exploratory"


def test_counters_that_were_refused_weaken_no_claim(raw: dict[str, Artifact]) -> None:
    """What says only that there is no count claims nothing, and so takes nothing from the figures."""

    def sound(artifact: Artifact) -> None:
        artifact["claim_kind"] = "measured"

    def refused(counters: Artifact) -> None:
        counters.update(claim_kind="exploratory", counter_status="permission_denied", reason="not allowed", cells=[])

    made = build(raw, environment=sound, ceilings=sound, timing=sound, counters=refused)
    assert made["claim_kind"] == "derived"
    assert made["counters"] == [
        {"kernel": "rms_norm", "counter_status": "permission_denied", "reason": "not allowed", "cells": []}
    ]


def test_measured_and_unmeasured_inputs_do_not_mix(raw: dict[str, Artifact]) -> None:
    """A kernel that was not timed beside measured ceilings is an error that says what to run."""
    with pytest.raises(RooflineError, match=r"timing of rms_norm: \$\.status.*dvc repro timing@rms_norm"):
        build(raw, timing=lambda t: t.update(status="not_measured", reason="no CUDA device", cells=[]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(ladders=[rung for rung in c["ladders"] if rung["kind"] != "read"]), "read ladder"),
        (lambda c: c.update(floors=[]), "null_kernel_clean"),
        (lambda c: c.update(timer_quantum_ns=None), "quantum"),
    ],
)
def test_a_missing_ceiling_is_named(raw: dict[str, Artifact], change: Callable[[Artifact], None], named: str) -> None:
    """The model refuses to guess a ceiling that was not measured."""
    with pytest.raises(CeilingsError, match=f"{named}.*dvc repro ceilings"):
        build(raw, ceilings=change)


def test_a_host_without_a_gpu_gets_a_roofline_that_says_so(tmp_path: Path) -> None:
    """Unmeasured inputs give status, reason and nothing else."""
    found = synthetic.project(tmp_path, measured=False, derive=False)
    roofline.run(found)
    made = artifacts.read(found.artifacts / "roofline.json", "roofline")
    assert (made["status"], made["reason"]) == ("not_measured", "no CUDA device")
    assert (made["ceilings"], made["cells"]) == (None, [])


@pytest.fixture
def small(tmp_path: Path) -> Project:
    return synthetic.project(tmp_path, derive=False, shapes=("128x1024",), dtypes=("float16",), samples=5)


def test_a_missing_kernel_is_an_error(small: Project) -> None:
    """The roofline walks the registry and names the kernel without timings."""
    (small.artifacts / "timing/swiglu.json").unlink()
    with pytest.raises(ArtifactError, match=r"swiglu\.json: cannot be read.*dvc repro timing@swiglu"):
        roofline.run(small)


def test_a_surplus_kernel_is_an_error(small: Project) -> None:
    """A file that no kernel owns is not silently left out."""
    (small.artifacts / "timing/gone.json").write_text("{}")
    with pytest.raises(InputError, match=r"gone\.json: .*surplus"):
        roofline.run(small)


@pytest.mark.parametrize(("key", "value"), [("runner", "other-gpu"), ("kernel", "swiglu")])
def test_an_artifact_in_the_wrong_place_is_an_error(small: Project, key: str, value: str) -> None:
    """An artifact of another runner or kernel is refused with its path."""
    where = small.artifacts / "timing/rms_norm.json"
    synthetic.edit(where, lambda artifact: artifact.update({key: value}))
    with pytest.raises(InputError, match=rf"rms_norm\.json: \$\.{key}: expected .*, found '{value}'"):
        roofline.run(small)


def test_the_chain_names_every_input(small: Project) -> None:
    """The roofline records path and digest of the environment, the ceilings and each timing."""
    roofline.run(small)
    made = artifacts.read(small.artifacts / "roofline.json")
    folder = f"artifacts/{small.runner}"
    per_kernel = [f"{kind}/{kernel}" for kind in ("timing", "counters") for kernel in kernel_names()]
    assert [record["path"] for record in made["inputs"]] == [
        f"{folder}/{stem}.json" for stem in ("environment", "ceilings", *per_kernel)
    ]
    for record in made["inputs"]:
        assert record["sha256"] == artifacts.sha256_file(small.root / record["path"])


def test_every_process_derives_the_same_bytes(small: Project) -> None:
    """Neither hash seed nor locale nor another process changes a derived byte."""
    roofline.run(small)
    where = small.artifacts / "roofline.json"
    first = where.read_bytes()
    code = (
        "import sys, pathlib; from triton_kernel_lab import project; from triton_kernel_lab.analysis import roofline;"
        "roofline.run(project.find_project(pathlib.Path(sys.argv[1]))); assert 'torch' not in sys.modules"
    )
    for seed in ("1", "2"):
        where.unlink()
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"}
        subprocess.run([sys.executable, "-c", code, str(small.root)], check=True, env=env)
        assert where.read_bytes() == first
