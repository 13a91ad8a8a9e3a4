"""The gate over raw samples: its verdicts, what it refuses to compare, and the two commits it reads."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import synthetic
from gate_data import COPY_NS, environment, noise_floor, side, timing
from git_repo import Repo, isolate

from triton_kernel_lab import artifacts, revisions
from triton_kernel_lab.analysis import gate, verify
from triton_kernel_lab.analysis.evidence import Present
from triton_kernel_lab.analysis.gate import Base
from triton_kernel_lab.analysis.pairing import RenameError
from triton_kernel_lab.analysis.rebaseline import RebaselineError
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.analysis.verdicts import exit_code, named
from triton_kernel_lab.artifacts import Artifact, ArtifactError
from triton_kernel_lab.project import Project, find_project, kernel_names
from triton_kernel_lab.report.verdict import render

ROOT = Path(__file__).parents[1]
COMMIT = "c" * 40
CELL = ("2048x4096", "bfloat16")
KEY = ("rms_norm", *CELL, "cold_clean")
STEADY = (12_000, 12_010, 11_990, 12_005, 11_995)
NOISY = (12_000, 13_500, 10_600, 12_900, 11_200)
STALE = "rms_norm 2048x4096 bfloat16 cold_clean"


def scaled(times: Sequence[int], factor: float) -> tuple[int, ...]:
    return tuple(round(ns * factor) for ns in times)


def one(times: Sequence[int] = STEADY, copies: Sequence[int] | None = COPY_NS, **changed: Any) -> Artifact:
    """The timing of one kernel in one cell."""
    return timing("rms_norm", {CELL: times}, copies, **changed)


def judged(base: Present | None, now: Present, commit: str | None = COMMIT, **options: Any) -> Artifact:
    """A verdict that has passed its own schema, and whose text could be printed."""
    verdict = gate.compare(Base(base, commit, "base"), now, root=ROOT, **options)
    artifacts.validate(verdict, "gate", "verdict")
    assert render(verdict).splitlines()[-1].startswith(f"{verdict['verdict']}: ")
    return verdict


def only(base: Artifact, now: Artifact, **changed: Any) -> dict[str, Any]:
    """The one row of a comparison of two timings; keywords are facts of the current side."""
    (row,) = judged(side(base), side(now, **changed))["cells"]
    return dict(row)


def outcome(verdict: Artifact) -> tuple[str, int, int]:
    return verdict["verdict"], exit_code(verdict), verdict["compared"]


# What a test decides.


@pytest.mark.parametrize(
    ("factor", "verdict", "overall", "code"),
    [
        (1.0005, "EQUIVALENT", "pass", 0),
        (1.05, "EQUIVALENT", "pass", 0),
        (1.15, "REGRESSED", "regressed", 2),
        (2.0, "REGRESSED", "regressed", 2),
        (0.5, "IMPROVED", "pass", 0),
    ],
)
def test_f76_slower_beyond_the_margin_fails_and_faster_does_not(
    factor: float, verdict: str, overall: str, code: int
) -> None:
    """Five steady processes tell a change beyond 10 % from one within it, in the right direction."""
    found = judged(side(one()), side(one(scaled(STEADY, factor))))
    assert outcome(found) == (overall, code, 1)
    (row,) = found["cells"]
    assert row["verdict"] == verdict
    assert row["change_percent"] == pytest.approx(100 * (factor - 1), abs=0.02)
    assert row["anchored_change_percent"] == row["change_percent"]
    assert (row["base_processes"], row["processes"]) == (5, 5)


@pytest.mark.parametrize("factor", [1.0005, 1.12, 0.88])
def test_noisy_processes_give_no_verdict_and_only_strict_fails(factor: float) -> None:
    """What the spread of the processes leaves open is ambiguous: exit code 0, and 4 if strict."""
    verdict = judged(side(one(NOISY)), side(one(scaled(NOISY, factor))))
    assert outcome(verdict) == ("ambiguous", 0, 1)
    assert exit_code(verdict, strict=True) == 4
    assert "not beyond doubt with 5 and 5 processes" in verdict["cells"][0]["reason"]


def test_strict_changes_nothing_else() -> None:
    """A pass stays 0, and a regression or a failure to compare keeps its own code."""
    for factor, code in ((1.0005, 0), (2.0, 2)):
        assert exit_code(judged(side(one()), side(one(scaled(STEADY, factor)))), strict=True) == code
    assert exit_code(judged(side(one(NOISY)), side(one(NOISY[:1]))), strict=True) == 3


def test_f75_more_samples_of_the_same_processes_give_no_more_certainty() -> None:
    """Samples are never pooled: a hundred times as many change no p value."""
    base, now = one(NOISY), one(scaled(NOISY, 1.12))
    few = only(base, now)
    for artifact in (base, now):
        for candidate in artifact["cells"][0]["candidates"]:
            for run in candidate["runs"]:
                run["samples_ns"] *= 100
    assert only(base, now) == few


def test_a_shift_that_the_copy_shares_is_no_regression() -> None:
    """If the copy in the same processes slowed as much, it was the machine."""
    row = only(one(), one(scaled(STEADY, 1.3), copies=scaled(COPY_NS, 1.3)))
    assert (row["verdict"], row["reason"]) == ("AMBIGUOUS", "the copy in the same processes changed with it")


def test_a_faster_copy_alone_is_no_regression() -> None:
    """A ratio that moved because the copy moved says nothing of the kernel."""
    row = only(one(), one(scaled(STEADY, 1.0005), copies=scaled(COPY_NS, 0.7)))
    assert (row["verdict"], row["reason"]) == ("AMBIGUOUS", "only its ratio to the copy changed")
    assert row["anchored_change_percent"] == pytest.approx(42.9, abs=0.1)


def test_a_shift_of_the_machine_within_the_margin_hides_no_regression() -> None:
    """A kernel that slowed by 30 % in a session that is 5 % faster is still found."""
    row = only(one(), one(scaled(STEADY, 1.3 * 0.95), copies=scaled(COPY_NS, 0.95)))
    assert row["verdict"] == "REGRESSED"


@pytest.mark.parametrize("copies", [None, COPY_NS[:4]])
def test_without_a_sound_copy_the_time_itself_decides_and_the_row_says_so(copies: Sequence[int] | None) -> None:
    """A missing copy, or one that lacks a process, anchors nothing."""
    row = only(one(copies=copies), one(scaled(STEADY, 1.3)))
    assert (row["verdict"], row["anchored_change_percent"]) == ("REGRESSED", None)
    assert row["reason"] == "without a sound copy in the same processes"


def test_processes_that_agree_to_the_nanosecond_are_still_compared() -> None:
    """No spread at all is a spread below the timer's step, not a division by zero."""
    flat = (12_000,) * 5
    assert only(one(flat, flat), one(scaled(flat, 1.2), flat))["verdict"] == "REGRESSED"
    assert only(one(flat, flat), one(scaled(flat, 1.001), flat))["verdict"] == "EQUIVALENT"


def test_two_processes_are_the_fewest_and_ask_for_a_large_change() -> None:
    """With two processes a side a doubling is seen; a fifth is not, unless they agree very well."""
    assert only(one(STEADY[:2]), one(scaled(STEADY[:2], 2)))["verdict"] == "REGRESSED"
    assert only(one(NOISY[:2]), one(scaled(NOISY[:2], 1.2)))["verdict"] == "AMBIGUOUS"


@pytest.mark.parametrize("short", ["base", "current"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_single_process_is_not_compared_and_never_green(short: str, factor: float) -> None:
    """One process has no spread: no test, no flat limit instead of one, and exit code 3."""
    base, now = one(STEADY), one(scaled(STEADY, factor)[:1])
    if short == "base":
        base, now = one(STEADY[:1]), one(scaled(STEADY, factor))
    verdict = judged(side(base), side(now))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert verdict["cells"][0]["reason"] == f"the {short} has one process, and no test can be made of one"


def test_the_verdict_does_not_depend_on_the_order_of_cells_or_processes() -> None:
    """Shuffled cells, candidates and runs give the same artifact, sorted by the sizes of the shape."""
    cells = {(f"{rows}x8", "float16"): scaled(NOISY, rows / 8) for rows in (2048, 8, 128)}
    now = timing("rms_norm", {cell: scaled(times, 1.1) for cell, times in cells.items()})
    verdict = judged(side(timing("rms_norm", cells)), side(now))
    shuffled, draw = copy.deepcopy(now), random.Random(3)
    draw.shuffle(shuffled["cells"])
    for cell in shuffled["cells"]:
        draw.shuffle(cell["candidates"])
        for candidate in cell["candidates"]:
            draw.shuffle(candidate["runs"])
    assert judged(side(timing("rms_norm", cells)), side(shuffled))["cells"] == verdict["cells"]
    assert [cell["shape"] for cell in verdict["cells"]] == ["8x8", "128x8", "2048x8"]


def test_many_cells_ask_more_of_each() -> None:
    """The p value of a cell grows with the number of cells that stayed as they were."""

    def p_value(others: int) -> float:
        steady = {(f"{rows}x8", "float16"): STEADY for rows in range(1, others + 1)}
        base = timing("rms_norm", {CELL: NOISY, **steady})
        now = timing("rms_norm", {CELL: scaled(NOISY, 1.6), **steady})
        verdict = judged(side(base), side(now))
        return float(next(row["p_regressed"] for row in verdict["cells"] if row["shape"] == CELL[0]))

    assert p_value(0) < p_value(3) < p_value(20)


# Flags.


def test_flagged_samples_do_not_count() -> None:
    """A sample that was launched too late is left out of its process's mean."""
    now = one(scaled(STEADY, 1.0005))
    for run in now["cells"][0]["candidates"][0]["runs"]:
        run["samples_ns"][:2] = [10**6, 10**6]
        run["flags"]["launch_exposed"] = [0, 1]
    assert only(one(), now)["verdict"] == "EQUIVALENT"


def test_above_a_tenth_flagged_the_cell_is_not_compared() -> None:
    """The same rule as the roofline's: such a cell has no believable time."""
    now = one()
    for run in now["cells"][0]["candidates"][0]["runs"]:
        run["flags"]["launch_exposed"] = [0, 1, 2]
    row = only(one(), now)
    assert row["verdict"] == "NOT_COMPARABLE"
    assert "15 of 100 samples are flagged, above 10 %" in row["reason"]


def test_a_cell_that_is_flagged_on_both_sides_is_never_green() -> None:
    """Nothing is known of it before or now, and other cells that are equivalent do not stand for it."""
    cells = {CELL: STEADY, ("8x8", "float16"): STEADY}
    base, now = timing("rms_norm", cells), timing("rms_norm", cells)
    for artifact in (base, now):
        for run in artifact["cells"][0]["candidates"][0]["runs"]:
            run["flags"]["launch_exposed"] = [0, 1, 2]
    verdict = judged(side(base), side(now, digests={"rms_norm": "f" * 64}))
    assert [row["verdict"] for row in verdict["cells"]] == ["EQUIVALENT", "NOT_COMPARABLE"]
    assert outcome(verdict) == ("not_comparable", 3, 1)


# Margins.


@pytest.mark.parametrize(
    ("time_ns", "noise", "percent", "source"),
    [
        (100_000, None, 10.0, "uncalibrated"),
        (2_000, None, 12.5, "absolute"),
        (100_000, (0.0, 0.0), 3.0, "minimum"),
        (100_000, (0.02, 0.0), 6.184, "session_sd"),
        (100_000, (0.0, 0.04), 6.184, "largest_aa"),
        (5_000, (0.0, 0.0), 5.0, "absolute"),
    ],
)
def test_the_margin_is_the_largest_of_what_is_asked(
    time_ns: int, noise: tuple[float, float] | None, percent: float, source: str
) -> None:
    """3 % or what the noise floor gives, 250 ns and two timer steps; 10 % where no noise was measured."""
    floor = noise_floor({KEY: noise}) if noise else None
    row = only(one((time_ns,) * 5), one((time_ns + 1,) * 5), noise_floor=floor)
    assert (row["margin_percent"], row["margin_source"]) == (percent, source)


def test_a_coarse_timer_sets_the_margin() -> None:
    """Two steps of the timer are no difference."""
    row = only(one(), one(scaled(STEADY, 1.0005)), quantum_ns=1000)
    assert (row["margin_percent"], row["margin_source"]) == (pytest.approx(16.667, abs=0.01), "quantum")


def test_steps_and_floor_are_those_of_a_sample_not_of_a_call() -> None:
    """A sample of 16 calls knows each of them 16 times better."""
    row = only(one((2_000,) * 5, calls=16), one((2_001,) * 5, calls=16))
    assert (row["margin_percent"], row["margin_source"]) == (10.0, "uncalibrated")


def test_a_calibrated_gate_finds_what_an_uncalibrated_one_cannot() -> None:
    """+5 % is within 10 %, and beyond a measured 3 %."""
    base, now = one(), one(scaled(STEADY, 1.05))
    assert only(base, now)["verdict"] == "EQUIVALENT"
    assert only(base, now, noise_floor=noise_floor({KEY: (0.001, 0.002)}))["verdict"] == "REGRESSED"


@pytest.mark.parametrize(
    ("floor", "calibration", "says"),
    [
        (None, "uncalibrated", "no noise floor was measured for this runner"),
        (noise_floor({KEY: (0.0, 0.0)}), "calibrated", None),
        (noise_floor({(*KEY[:3], "warm"): (0.0, 0.0)}), "uncalibrated", None),
        (noise_floor({KEY: (0.0, 0.0)}, driver="570.9"), "uncalibrated", "software.driver: base 570.9, current 580.1"),
        (noise_floor({KEY: (0.0, 0.0)}, claim="synthetic"), "uncalibrated", "claim.synthetic"),
        (noise_floor({KEY: (0.0, 0.0)}, claim="exploratory"), "uncalibrated", "from a dirty tree"),
    ],
)
def test_the_verdict_says_whether_it_is_calibrated(floor: Artifact | None, calibration: str, says: str | None) -> None:
    """Noise of another machine or stack, invented or of unknown code calibrates nothing, and the verdict says why."""
    verdict = judged(side(one()), side(one(scaled(STEADY, 1.0005)), noise_floor=floor))
    assert verdict["calibration"] == calibration
    assert f"margins are {calibration}" in render(verdict)
    spoken = [reason for reason in verdict["reasons"] if reason.startswith("uncalibrated: ")]
    assert len(spoken) == (says is not None)
    assert says is None or says in spoken[0]


def test_a_noise_floor_of_some_cells_calibrates_those() -> None:
    """Cells that the noise floor lacks keep the wide margin."""
    cells = {CELL: STEADY, ("8x8", "float16"): STEADY}
    later = {cell: scaled(times, 1.0005) for cell, times in cells.items()}
    floor = noise_floor({KEY: (0.0, 0.0)})
    verdict = judged(side(timing("rms_norm", cells)), side(timing("rms_norm", later), noise_floor=floor))
    assert verdict["calibration"] == "partly_calibrated"
    assert {row["shape"]: row["margin_percent"] for row in verdict["cells"]} == {"8x8": 10.0, CELL[0]: 3.0}


# What no test decides.


def spoilt(change: Callable[[dict[str, Any]], object], artifact: Artifact | None = None) -> Artifact:
    """A timing whose first candidate is changed."""
    artifact = artifact or one(scaled(STEADY, 1.0005))
    change(artifact["cells"][0]["candidates"][0])
    return artifact


@pytest.mark.parametrize("broken", ["base", "current"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ours: ours.update(served_by="eager"), "is served by eager, not by triton"),
        (lambda ours: ours.update(role="baseline"), "holds no triton candidate"),
        (lambda ours: ours.update(status="failed", reason="it crashed"), "has status failed (it crashed)"),
        (lambda ours: ours.update(runs=[]), "was not timed in regime cold_clean"),
    ],
)
def test_f68_f74_a_cell_without_a_sound_time_on_both_sides_is_not_compared(
    broken: str, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    """Served elsewhere, failed or not timed: the cell is named, and nothing passes."""
    sides = [one(), spoilt(change)] if broken == "current" else [spoilt(change), one()]
    verdict = judged(side(sides[0]), side(sides[1]))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert verdict["cells"][0]["reason"] == f"the {broken} {says}"


@pytest.mark.parametrize("when", ["wrong before timing", "wrong after timing"])
def test_f86_an_output_that_failed_beside_the_window_fails_the_gate(when: str) -> None:
    """A kernel that was wrong at the timed shape is a correctness failure, not a missing time."""
    now = spoilt(lambda ours: ours.update(status="invalid", reason=f"process 1: {when}: error ratio 3.0"))
    verdict = judged(side(one()), side(now))
    assert outcome(verdict) == ("correctness_fail", 2, 0)
    assert when in verdict["cells"][0]["reason"]


def test_f86_a_kernel_that_failed_correctness_fails_the_gate_whatever_its_times() -> None:
    """The times of a wrong kernel are worth nothing, even better ones; the failing cell is named."""
    failed = {"shape": "3x5", "dtype": "float16", "variant": "default", "passed": False, "failures": ["NaN at 2"]}
    wrong = {"rms_norm": {"passed": False, "cells": [failed]}}
    verdict = judged(side(one()), side(one(scaled(STEADY, 0.5)), correctness=wrong))
    assert outcome(verdict) == ("correctness_fail", 2, 0)
    assert verdict["cells"][0]["reason"] == "failed correctness: 3x5 float16 default: NaN at 2"


def test_a_kernel_whose_sources_changed_since_is_stale_and_never_green() -> None:
    """Times of other code than the tree's judge nothing."""
    verdict = judged(side(one()), side(one(scaled(STEADY, 1.0005)), stale=frozenset({"rms_norm"})))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert verdict["cells"][0]["verdict"] == "STALE"
    assert "dvc repro timing@rms_norm" in verdict["cells"][0]["reason"]
    assert f"1 cell stale: {STALE}" in verdict["reasons"]


def test_what_was_not_measured_again_is_the_same_and_does_not_count_as_compared() -> None:
    """An artifact with the base's bytes compares nothing; alone it is no pass."""
    other = timing("swiglu", {CELL: STEADY})
    verdict = judged(side(one(), other), side(one(), timing("swiglu", {CELL: scaled(STEADY, 1.0005)})))
    assert outcome(verdict) == ("pass", 0, 1)
    assert "not measured again" in verdict["cells"][0]["reason"]
    verdict = judged(side(one()), side(one()))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "0 cells compared" in verdict["reasons"]


def test_f73_missing_cells_are_named_and_fail() -> None:
    """A cell that only the base holds is never green; a regression beside it is still told."""
    base = timing("rms_norm", {CELL: STEADY, ("8x8", "float16"): STEADY})
    verdict = judged(side(base), side(one(scaled(STEADY, 1.0005))))
    assert outcome(verdict) == ("not_comparable", 3, 1)
    assert "1 cell missing: rms_norm 8x8 float16 cold_clean" in verdict["reasons"]
    assert outcome(judged(side(base), side(one(scaled(STEADY, 2))))) == ("regressed", 2, 1)


def test_new_cells_are_listed_and_pass() -> None:
    """An older base with fewer kernels stays valid."""
    now = side(one(scaled(STEADY, 1.0005)), timing("swiglu", {CELL: STEADY}))
    verdict = judged(side(one()), now)
    assert outcome(verdict) == ("pass", 0, 1)
    assert named(verdict["cells"], "NEW") == ["swiglu 2048x4096 bfloat16 cold_clean"]


@pytest.mark.parametrize("cell", [("2048x4096", "float16"), ("8x8", "bfloat16")])
def test_f73_zero_compared_cells_is_a_failure(cell: tuple[str, str]) -> None:
    """The same kernel with other shapes or dtypes only compares nothing."""
    verdict = judged(side(one()), side(timing("rms_norm", {cell: STEADY})))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "0 cells compared" in verdict["reasons"]


def test_f73_a_side_that_measured_nothing_is_a_failure_and_says_why() -> None:
    """Not measured on either side compares nothing; its reason is repeated."""
    nothing = timing("rms_norm", {}, status="not_measured", reason="no CUDA device")
    for base, now, where in ((one(), nothing, "current side"), (nothing, one(), "base")):
        verdict = judged(side(base), side(now))
        assert outcome(verdict) == ("not_comparable", 3, 0)
        assert f"the {where} holds no times: no CUDA device" in verdict["reasons"]


def test_only_the_regimes_that_are_asked_for_are_judged() -> None:
    """A selection leaves the other regimes out, and the verdict says which it took."""
    base, now = one(), one(scaled(STEADY, 1.0005))
    for artifact, factor in ((base, 1), (now, 2)):
        for candidate in artifact["cells"][0]["candidates"]:
            more = copy.deepcopy(candidate["runs"])
            for run in more:
                run |= {"regime": "warm", "samples_ns": [ns * factor for ns in run["samples_ns"]]}
            candidate["runs"] += more
    assert outcome(judged(side(base), side(now)))[0] == "ambiguous"
    verdict = judged(side(base), side(now), regimes=["cold_clean"])
    assert (outcome(verdict), verdict["regimes"]) == (("pass", 0, 1), ["cold_clean"])


# Renamed kernels.


def test_f73_a_regression_does_not_hide_behind_a_rename() -> None:
    """Without a map the old name is missing; with one, its times are compared under the new name."""
    base, now = side(one()), side(timing("rms_norm_v2", {CELL: scaled(STEADY, 2)}))
    assert outcome(judged(base, now)) == ("not_comparable", 3, 0)
    verdict = judged(base, now, renames={"rms_norm": "rms_norm_v2"})
    assert outcome(verdict) == ("regressed", 2, 1)
    assert {row["kernel"]: row["verdict"] for row in verdict["cells"]} == {
        "rms_norm": "RENAMED",
        "rms_norm_v2": "REGRESSED",
    }
    assert verdict["cells"][1]["renamed_from"] == "rms_norm"
    assert verdict["renamed"] == [{"old": "rms_norm", "new": "rms_norm_v2"}]


def test_f73_a_cell_that_a_rename_lost_is_missing_under_its_old_name() -> None:
    """A rename accounts for a kernel, not for the shapes that went with it."""
    base = timing("rms_norm", {CELL: STEADY, ("8x8", "float16"): STEADY})
    now = timing("rms_norm_v2", {CELL: scaled(STEADY, 1.0005)})
    verdict = judged(side(base), side(now), renames={"rms_norm": "rms_norm_v2"})
    assert outcome(verdict) == ("not_comparable", 3, 1)
    assert named(verdict["cells"], "MISSING") == ["rms_norm 8x8 float16 cold_clean"]


@pytest.mark.parametrize(
    ("renames", "says"),
    [
        ({"swiglu": "rms_norm"}, "expected swiglu to be a kernel of the base only"),
        ({"rms_norm": "swiglu"}, "expected rms_norm to be a kernel of the base only"),
        ({"old": "swiglu"}, "expected swiglu to be a kernel of the current side only"),
        ({"old": "nothing"}, "expected nothing to be a kernel of the current side only"),
    ],
)
def test_a_rename_that_fits_no_side_is_refused(renames: dict[str, str], says: str) -> None:
    """A misspelt or swapped name would compare nothing, unseen."""
    kernels = [timing(kernel, {CELL: STEADY}) for kernel in ("rms_norm", "swiglu")]
    with pytest.raises(RenameError, match=says):
        judged(side(*kernels, timing("old", {CELL: STEADY})), side(*kernels), renames=renames)


# Other hardware, software, protocol or claim.


@pytest.mark.parametrize(
    ("fact", "value", "line"),
    [
        ("name", "NVIDIA H100 80GB HBM3", "device.name: base NVIDIA H100 80GB HBM3, current NVIDIA H200"),
        ("name", "NVIDIA H200 MIG 1g.18gb", "device.name: base NVIDIA H200 MIG 1g.18gb, current NVIDIA H200"),
        ("triton", "3.6.0", "software.triton: base 3.6.0, current 3.7.1"),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 1.0005, 3])
def test_f82_another_machine_or_stack_is_not_comparable_and_names_what_differs(
    fact: str, value: str, line: str, factor: float
) -> None:
    """Faster or slower elsewhere is no verdict: exit code 3, with the facts that differ."""
    base = side(one(), environment=environment(**{fact: value}))
    verdict = judged(base, side(one(scaled(STEADY, factor))))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert line in verdict["reasons"]
    assert verdict["cells"][0]["reason"] == "another machine or stack"


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (1280, 2880, "NOT_COMPARABLE"),
        (2880, 1280, "NOT_COMPARABLE"),
        (1280, 1504, "EQUIVALENT"),
        (None, 2880, "EQUIVALENT"),
    ],
)
def test_f82_a_host_with_another_empty_window_is_not_comparable(before: int | None, now: int, verdict: str) -> None:
    """1.6 us more between any two events are no regression, and no equivalence; a rebaseline may accept them."""
    base, current = (
        side(one(scaled(STEADY, factor)), empty_window_ns=ns) for factor, ns in ((1, before), (1.0005, now))
    )
    (row,) = judged(base, current)["cells"]
    assert row["verdict"] == verdict
    if verdict == "NOT_COMPARABLE":
        assert row["reason"] == f"an empty event window: base {before} ns, current {now} ns"


def test_f82_a_graph_has_no_window_of_its_own_for_each_call() -> None:
    """The constant of a pair of events is no share of a call in a graph, and forbids no comparison there."""
    base, now = (one(scaled(STEADY, factor), regime="graph") for factor in (1, 1.0005))
    (row,) = judged(side(base, empty_window_ns=1280), side(now, empty_window_ns=2880))["cells"]
    assert row["verdict"] == "EQUIVALENT"


def test_a_kernel_measured_by_another_protocol_or_claim_or_of_other_work_is_not_comparable() -> None:
    """The row says in what the two measurements differ."""
    protocol = {"sweep_bytes": 1, "input_sets": 3, "samples": {"cold_clean": 20}}
    assert only(one(), one(protocol=protocol))["reason"] == "protocol.sweep_bytes: base 268435456, current 1"
    assert only(one(claim_kind="synthetic"), one())["reason"] == "claim: base synthetic, current measured"
    other = one()
    other["cells"][0]["cost"] = other["cells"][0]["cost"] | {"flop": 51}
    assert "base (1000, 900, 50), current (1000, 900, 51)" in only(one(), other)["reason"]


def test_other_sample_counts_are_comparable() -> None:
    """A shorter run is noisier, but it measures the same."""
    protocol = {"sweep_bytes": 1 << 28, "input_sets": 3, "samples": {"cold_clean": 7}}
    assert only(one(), one(scaled(STEADY, 1.0005), protocol=protocol))["verdict"] == "EQUIVALENT"


def test_f83_a_base_from_a_dirty_tree_is_not_comparable() -> None:
    """Nobody can check out the code that an exploratory base was measured from."""
    dirty = one(claim_kind="exploratory")
    verdict = judged(side(dirty), side(one(scaled(STEADY, 1.0005))))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "dirty tree" in verdict["cells"][0]["reason"]
    dirty = one()
    dirty["producer"]["git_tree_dirty"] = True
    assert only(dirty, one(scaled(STEADY, 1.0005)))["verdict"] == "NOT_COMPARABLE"


def test_a_dirty_current_side_is_compared_but_the_verdict_is_exploratory() -> None:
    """A developer may measure an edit; the verdict says what it is worth."""
    verdict = judged(side(one()), side(one(scaled(STEADY, 2), claim_kind="exploratory")))
    assert (verdict["claim_kind"], outcome(verdict)) == ("exploratory", ("regressed", 2, 1))


# An intended change, accepted.


def record(**changed: Any) -> Artifact:
    place = environment()
    here = {"device": place["device"], "software": place["software"]}
    return {"reason": "new driver", "base_commit": COMMIT, "before": here, "after": here, **changed}


OLD = environment(driver="570.9")
BEFORE = {"device": OLD["device"], "software": OLD["software"]}


def test_an_intended_change_of_the_stack_is_accepted_and_said() -> None:
    """The verdict passes, names the reason, and still lists what differs."""
    base, now = side(one(), environment=OLD), side(one(scaled(STEADY, 2)))
    verdict = judged(base, now, record=record(before=BEFORE))
    assert outcome(verdict) == ("rebaselined", 0, 0)
    assert verdict["rebaseline"] == {"reason": "new driver", "base_commit": COMMIT}
    assert "rebaselined: new driver" in verdict["reasons"]
    assert "software.driver: base 570.9, current 580.1" in verdict["reasons"]
    assert "NOT_COMPARABLE (accepted)" in render(verdict)


@pytest.mark.parametrize(
    "changed", [{"base_commit": "d" * 40}, {"before": record()["before"]}, {"after": BEFORE}, {"base_commit": None}]
)
def test_a_record_made_for_another_comparison_accepts_nothing(changed: dict[str, Any]) -> None:
    """Another base, another machine before or after: accepted once is not accepted for ever."""
    base, now = side(one(), environment=OLD), side(one(scaled(STEADY, 2)))
    verdict = judged(base, now, record=record(**{"before": BEFORE, **changed}))
    assert (outcome(verdict), verdict["rebaseline"]) == (("not_comparable", 3, 0), None)


def test_a_record_accepts_a_single_process_of_the_base_but_never_of_the_current_side() -> None:
    """What is accepted becomes the next base, so it must be one."""
    assert outcome(judged(side(one(STEADY[:1])), side(one()), record=record())) == ("rebaselined", 0, 0)
    assert outcome(judged(side(one()), side(one(STEADY[:1])), record=record())) == ("not_comparable", 3, 0)
    removed = timing("rms_norm", {CELL: STEADY, ("8x8", "float16"): STEADY})
    assert outcome(judged(side(removed), side(one(scaled(STEADY, 1.0005))), record=record()))[0] == "rebaselined"


def test_a_record_accepts_neither_slower_nor_wrong_nor_stale_kernels() -> None:
    """It speaks of machine and stack, not of the code."""
    assert outcome(judged(side(one()), side(one(scaled(STEADY, 2))), record=record()))[:2] == ("regressed", 2)
    wrong = {"rms_norm": {"passed": False, "cells": []}}
    assert outcome(judged(side(one()), side(one(), correctness=wrong), record=record()))[1] == 2
    stale = side(one(), stale=frozenset({"rms_norm"}))
    assert outcome(judged(side(one()), stale, record=record()))[1] == 3


# The tracked artifacts of two commits.

FOLDER = f"artifacts/{synthetic.RUNNER}"
KERNEL = kernel_names()[-1]


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    isolate(monkeypatch)
    return Repo(tmp_path / "repo")


def measure(repo: Repo, seed: int, slowdown: float = 1.0, **facts: Any) -> Project:
    """Measure every kernel anew on the made-up device, the last one slowed."""
    plan: dict[str, Any] = {"shapes": CELL[:1], "dtypes": CELL[1:], "processes": 3, "samples": 20, **facts}
    factors = {f"{KERNEL}/triton": synthetic.FACTORS["triton"] * slowdown}
    return synthetic.project(repo.root, derive=False, seed=seed, factors=factors, **plan)


def committed(repo: Repo, seed: int, slowdown: float = 1.0, **facts: Any) -> str:
    measure(repo, seed, slowdown, **facts)
    return repo.commit({})


def ran(root: Path, base: str | None = None, **options: Any) -> tuple[str, int, list[str]]:
    """The verdict of a checkout, its exit code and the regressed cells."""
    verdict = gate.run(find_project(root), base, **options)
    artifacts.validate(verdict, "gate", "verdict")
    return verdict["verdict"], exit_code(verdict), named(verdict["cells"], "REGRESSED")


def test_a_planted_slowdown_fails_and_its_removal_passes(repo: Repo) -> None:
    """Commit, slow one kernel twofold: exit code 2, naming it alone; restore it: exit code 0."""
    first = committed(repo, 1)
    committed(repo, 2, slowdown=2)
    repo.commit({"README.md": "words"})
    assert ran(repo.root) == ("regressed", 2, [f"{KERNEL} 2048x4096 bfloat16 cold_clean"])
    committed(repo, 3)
    assert ran(repo.root) == ("pass", 0, [])
    assert ran(repo.root, first) == ("pass", 0, [])
    verdict = gate.run(find_project(repo.root))
    assert named(verdict["cells"], "IMPROVED") == [f"{KERNEL} 2048x4096 bfloat16 cold_clean"]
    assert [record["path"] for record in verdict["inputs"]] == [
        f"{FOLDER}/environment.json",
        *(f"{FOLDER}/timing/{kernel}.json" for kernel in kernel_names()),
    ]


def test_an_uncommitted_measurement_is_compared_with_the_committed_one(repo: Repo) -> None:
    """Right after a run, before any commit, the gate already answers."""
    commit = committed(repo, 1)
    measure(repo, 2, slowdown=3)
    verdict = gate.run(find_project(repo.root))
    assert (exit_code(verdict), verdict["base"]["git_commit"]) == (2, commit)


def test_f83_a_merge_is_compared_with_the_first_parents_line(repo: Repo) -> None:
    """What a branch measured in between is no base: what the main line held before the merge is."""
    first = committed(repo, 1)
    repo.git("checkout", "--quiet", "-b", "side")
    committed(repo, 2, slowdown=2)
    committed(repo, 3, slowdown=2)
    repo.git("checkout", "--quiet", "main")
    repo.commit({"src/a.py": "1"})
    repo.git("merge", "--quiet", "--no-ff", "--message=merge", "side")
    assert gate.run(find_project(repo.root))["base"]["git_commit"] == first
    assert ran(repo.root)[:2] == ("regressed", 2)


def test_f82_the_environment_of_the_base_commit_counts(repo: Repo) -> None:
    """Each side is judged by the environment of its own revision."""
    committed(repo, 1, gpu="Other GPU")
    committed(repo, 2, slowdown=2)
    verdict = gate.run(find_project(repo.root))
    assert (verdict["verdict"], exit_code(verdict)) == ("not_comparable", 3)
    assert "device.name: base Other GPU, current Synthetic GPU" in verdict["reasons"]


def test_f71_a_base_that_equals_the_tree_is_no_pass(repo: Repo) -> None:
    """base = HEAD would compare a measurement with itself; an empty difference is not "no regression"."""
    committed(repo, 1)
    for base in ("HEAD", "main", repo.git("rev-parse", "HEAD")):
        assert ran(repo.root, base)[:2] == ("not_comparable", 3)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda text: text[:200], "expected JSON", id="truncated"),
        pytest.param(lambda text: "", "expected JSON", id="empty"),
        pytest.param(lambda text: "\ufeff" + text, "BOM", id="byte-order mark"),
        pytest.param(lambda text: text.replace('"index": 0', '"index": NaN'), "finite", id="NaN"),
        pytest.param(lambda text: text.replace('"timing"', '"roofline"'), "expected 'timing'", id="other kind"),
        pytest.param(lambda text: text.replace(f'"{KERNEL}"', '"other"'), "expected", id="other kernel"),
    ],
)
@pytest.mark.parametrize("broken", ["base", "tree"])
def test_f71_broken_artifacts_on_either_side_are_an_error(
    repo: Repo, spoil: Callable[[str], str], says: str, broken: str
) -> None:
    """Truncated, empty, byte-marked, NaN or of another kind or kernel: an error that names the file, never a pass."""
    path = f"{FOLDER}/timing/{KERNEL}.json"
    committed(repo, 1)
    text = (repo.root / path).read_text(encoding="utf-8")
    if broken == "base":
        repo.commit({path: spoil(text)})
        measure(repo, 2)
    else:
        repo.write(path, spoil(text))
    with pytest.raises(ValueError, match=says) as caught:
        gate.run(find_project(repo.root))
    assert path in str(caught.value)
    assert type(caught.value).__name__ in ("ArtifactError", "InputError")


def test_f72_a_base_without_timings_is_refused(repo: Repo) -> None:
    """A revision from before the first measurement, or one that measured nothing, is no base."""
    repo.commit({"a": "1"})
    committed(repo, 1)
    with pytest.raises(NotComparableError, match=r"timing/\*\.json in commit .*found none.*--base") as caught:
        gate.run(find_project(repo.root), "HEAD~1")
    assert caught.value.exit_code == 3
    measure(repo, 2, measured=False)
    repo.commit({})
    measure(repo, 3)
    verdict = gate.run(find_project(repo.root))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "the base holds no times: no CUDA device" in verdict["reasons"]


def test_f71_a_tree_without_the_file_is_an_error(repo: Repo) -> None:
    """A timing that is gone names the command that makes it."""
    committed(repo, 1)
    (repo.root / f"{FOLDER}/timing/{KERNEL}.json").unlink()
    with pytest.raises(ArtifactError, match=f"`dvc repro timing@{KERNEL}`"):
        gate.run(find_project(repo.root))


def test_f83_without_an_earlier_measurement_there_is_no_verdict(repo: Repo, tmp_path: Path) -> None:
    """A root commit, a depth-1 clone and a tree without git each end in git's own sentence and exit code 3."""
    committed(repo, 1)
    with pytest.raises(revisions.NoEarlierVersionError, match="expected an earlier version") as first:
        gate.run(find_project(repo.root))
    committed(repo, 2)
    clone = repo.clone(tmp_path / "clone", "--depth=1")
    with pytest.raises(revisions.ShallowCloneError, match="fetch more history") as shallow:
        gate.run(find_project(clone))
    (clone / ".git").rename(tmp_path / "elsewhere")
    with pytest.raises(revisions.NotARepositoryError, match="use a clone") as tarball:
        gate.run(find_project(clone))
    assert first.value.exit_code == shallow.value.exit_code == tarball.value.exit_code == 3


def test_f83_without_a_git_binary_there_is_no_verdict(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No git on PATH is one sentence that says to install it."""
    committed(repo, 1)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(revisions.GitMissingError, match="install git") as caught:
        gate.run(find_project(repo.root))
    assert caught.value.exit_code == 3


def test_a_source_edited_after_the_measurement_is_stale(repo: Repo) -> None:
    """The digest that the artifact carries is compared with that of the sources as they are now."""
    committed(repo, 1)
    measure(repo, 2)
    path = repo.root / f"{FOLDER}/timing/{KERNEL}.json"
    synthetic.edit(path, lambda artifact: artifact["producer"].update(source_sha256="0" * 64))
    verdict = gate.run(find_project(repo.root))
    assert outcome(verdict)[:2] == ("not_comparable", 3)
    assert named(verdict["cells"], "STALE") == [f"{KERNEL} 2048x4096 bfloat16 cold_clean"]


def test_a_renamed_kernel_is_found_under_its_old_name(repo: Repo) -> None:
    """`old=new` compares the two names across commits; other forms are refused."""
    committed(repo, 1)
    old, new = (repo.root / f"{FOLDER}/timing/{name}.json" for name in ("elder", KERNEL))
    new.rename(old)
    synthetic.edit(old, lambda artifact: artifact.update(kernel="elder"))
    repo.commit({})
    old.unlink()
    measure(repo, 2, slowdown=2)
    assert ran(repo.root)[:2] == ("not_comparable", 3)
    assert ran(repo.root, renames=[f"elder={KERNEL}"])[:2] == ("regressed", 2)
    for given in (["elder"], ["=x"], ["a=b=c"], ["a=b", "a=c"], ["a=c", "b=c"]):
        with pytest.raises(RenameError, match="--rename: expected"):
            ran(repo.root, renames=given)


def test_a_noise_floor_beside_the_artifacts_is_read(repo: Repo) -> None:
    """artifacts/<runner>/noise_floor.json calibrates the margins; a broken one is an error."""
    committed(repo, 1)
    found = measure(repo, 2)
    cells = {(kernel, *CELL, "cold_clean"): (0.0, 0.0) for kernel in kernel_names()}
    place = artifacts.read(found.artifacts / "environment.json")
    floor = noise_floor(cells, claim="synthetic") | {
        "environment": {"device": place["device"], "software": place["software"]},
        "runner": found.runner,
    }
    artifacts.write(found.artifacts / "noise_floor.json", floor)
    assert gate.run(found)["calibration"] == "calibrated"
    (found.artifacts / "noise_floor.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"noise_floor\.json"):
        gate.run(found)


def test_a_regime_that_does_not_exist_is_refused(repo: Repo) -> None:
    """A misspelt regime would judge nothing."""
    committed(repo, 1)
    with pytest.raises(ValueError, match=r"--regime: expected one of cold_clean, .*found 'cold'"):
        gate.run(find_project(repo.root), regimes=["cold"])


# Rebaselining a checkout.


def test_a_rebaseline_passes_this_comparison_and_not_the_next(repo: Repo) -> None:
    """Another GPU: 3, accepted with a reason: 0; the measurement after it is compared again."""
    committed(repo, 1, gpu="Other GPU")
    committed(repo, 2)
    assert ran(repo.root)[:2] == ("not_comparable", 3)
    found = find_project(repo.root)
    path = gate.rebaseline(found, "the lab has  a new\nGPU")
    assert artifacts.read(path, "rebaseline")["reason"] == "the lab has a new GPU"
    assert ran(repo.root)[:2] == ("rebaselined", 0)
    repo.commit({})
    assert ran(repo.root)[:2] == ("rebaselined", 0)
    committed(repo, 3, slowdown=2)
    assert ran(repo.root)[:2] == ("regressed", 2)
    committed(repo, 4, gpu="Third GPU")
    assert ran(repo.root)[:2] == ("not_comparable", 3)


def test_f72_a_first_measurement_can_be_made_the_baseline(repo: Repo) -> None:
    """With nothing before it, a record with a reason stands in; a second version ends that."""
    committed(repo, 1)
    found = find_project(repo.root)
    gate.rebaseline(found, "first measurement")
    verdict = gate.run(found)
    assert outcome(verdict) == ("rebaselined", 0, 0)
    assert (verdict["base"]["git_commit"], verdict["rebaseline"]["base_commit"]) == (None, None)
    repo.commit({})
    committed(repo, 2, slowdown=2)
    assert ran(repo.root)[:2] == ("regressed", 2)


def test_a_rebaseline_without_need_or_reason_or_from_a_dirty_tree_is_refused(repo: Repo) -> None:
    """What can be compared is judged; what is exploratory is no base; and someone must say why."""
    committed(repo, 1)
    found = measure(repo, 2)
    with pytest.raises(RebaselineError, match="expected cells that cannot be compared, found none"):
        gate.rebaseline(found, "why not")
    with pytest.raises(RebaselineError, match="--reason: expected why"):
        gate.rebaseline(found, " \n")
    measure(repo, 3, gpu="Other GPU", claim_kind="exploratory")
    with pytest.raises(RebaselineError, match="commit the code and measure it again"):
        gate.rebaseline(found, "a new GPU")
    assert not (found.artifacts / "rebaseline.json").exists()


def test_the_records_of_the_gate_leave_the_checkout_sound(repo: Repo) -> None:
    """verify takes a rebaseline and a noise floor beside the artifacts for what they are."""
    committed(repo, 1, gpu="Other GPU")
    found = measure(repo, 2)
    gate.rebaseline(found, "a new GPU")
    floor = noise_floor({KEY: (0.0, 0.0)}) | {"runner": found.runner}
    artifacts.write(found.artifacts / "noise_floor.json", floor)
    synthetic.run_pure_stages(found)
    assert verify.run(found) == []


# What it prints.


def test_the_table_shows_each_cell_and_the_last_line_sums_up() -> None:
    """Every cell is a row with both times, change and margin; the last line holds verdict and counts."""
    base = side(one(), timing("swiglu", {CELL: STEADY}))
    now = side(one(scaled(STEADY, 2)), timing("swiglu", {CELL: scaled(STEADY, 1.0005)}))
    lines = render(judged(base, now)).splitlines()
    columns = ["12000.0", "24000.0", "+100.00", "%", "+100.00", "%", "10.0", "%", "REGRESSED"]
    assert lines[2].split() == ["rms_norm", *CELL, "cold_clean", *columns]
    assert f"- 1 cell regressed: {STALE}" in lines
    assert lines[-1] == (
        "regressed: 2 cells compared with base (commit cccccccccccc): 1 regressed, 1 equivalent; "
        "margins are uncalibrated."
    )


def test_long_lists_of_cells_are_cut_short() -> None:
    """The artifact holds every row; the reasons name ten."""
    cells = {(f"{rows}x8", "float16"): STEADY for rows in range(1, 15)}
    verdict = judged(side(timing("rms_norm", cells)), side(one()))
    (line,) = [reason for reason in verdict["reasons"] if "missing" in reason]
    assert line.startswith("14 cells missing: rms_norm 1x8 float16 cold_clean, ")
    assert line.endswith("rms_norm 10x8 float16 cold_clean and 4 more")


def test_figures_of_a_verdict_are_rounded_and_have_no_negative_zero() -> None:
    """A change too small to print is 0.0, and p values have four digits."""
    row = only(one((10**9,) * 5, (10**9,) * 5), one((10**9 - 1,) * 5, (10**9,) * 5))
    assert math.copysign(1, row["change_percent"]) == 1
    row = only(one(NOISY), one(scaled(NOISY, 1.12)))
    assert all(float(f"{row[name]:.4g}") == row[name] for name in ("p_regressed", "p_improved", "p_equivalent"))
