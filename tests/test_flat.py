"""The simple gate over one baseline file: what fails it, what it refuses to compare, and what it says."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_data import CASES, environment, header, report, roofline

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import flat
from triton_kernel_lab.analysis.sides import NotComparableError
from triton_kernel_lab.analysis.verdicts import exit_code
from triton_kernel_lab.artifacts import Artifact, ArtifactError
from triton_kernel_lab.report.verdict import render

Case = tuple[str, str, str]
FIRST, SECOND, THIRD = CASES


def scaled(factor: float, *cases: Case) -> dict[Case, int | None]:
    """The usual times, those of ``cases`` (default: all) multiplied."""
    return {case: round(ns * factor) if case in (cases or CASES) else ns for case, ns in CASES.items()}


def compared(base: Artifact, current: Artifact, percent: float = 10, **options: Any) -> Artifact:
    """A verdict that has passed its own schema; rooflines share one environment unless told otherwise."""
    place: dict[str, Any] = {"base_environment": environment(), "environment": environment(), **options}
    verdict = flat.compare(base, current, percent, **place)
    artifacts.validate(verdict, "gate", "verdict")
    return verdict


def outcome(verdict: Artifact) -> tuple[str, int, int]:
    return verdict["verdict"], exit_code(verdict), verdict["compared"]


def verdicts(verdict: Artifact) -> dict[Case, str]:
    return {(cell["kernel"], cell["shape"], cell["dtype"]): cell["verdict"] for cell in verdict["cells"]}


# Direction and exit codes.


@pytest.mark.parametrize("made", [report, roofline])
@pytest.mark.parametrize(
    ("times", "verdict", "code"),
    [
        (scaled(1), "pass", 0),
        (scaled(0.5), "pass", 0),
        (scaled(2), "regressed", 2),
        (scaled(2, SECOND), "regressed", 2),
    ],
)
def test_f76_lower_is_better_and_one_slower_cell_is_enough(
    made: Callable[..., Artifact], times: dict[Case, int | None], verdict: str, code: int
) -> None:
    """The same or faster passes; all slower or one slower is a regression with exit code 2."""
    assert outcome(compared(made(), made(times))) == (verdict, code, 3)


def test_f76_the_cells_say_which_way_each_went() -> None:
    """Slower, faster and unchanged cells get their own verdict and a signed change."""
    verdict = compared(report(), report({FIRST: 10000, SECOND: 6000, THIRD: 6100}))
    assert verdicts(verdict) == {FIRST: "REGRESSED", SECOND: "IMPROVED", THIRD: "WITHIN_LIMIT"}
    assert {cell["p50_ns"]: cell["change_percent"] for cell in verdict["cells"]} == {
        10000: 100.0,
        6000: -50.0,
        6100: 1.67,
    }


@pytest.mark.parametrize(("percent", "base", "limit"), [(10, 5000, 5500), (0.3, 100_000, 100_300), (2.5, 4000, 4100)])
def test_the_limit_itself_passes_and_one_nanosecond_more_does_not(percent: float, base: int, limit: int) -> None:
    """The threshold is exact in decimals: only a p50 above it is a regression."""
    assert outcome(compared(report({FIRST: base}), report({FIRST: limit}), percent)) == ("pass", 0, 1)
    assert outcome(compared(report({FIRST: base}), report({FIRST: limit + 1}), percent)) == ("regressed", 2, 1)


def test_a_change_too_small_to_print_is_no_negative_zero() -> None:
    """A p50 that is 1 ns better in a second rounds to 0.0, which the artifact can hold."""
    verdict = compared(report({FIRST: 10**9}), report({FIRST: 10**9 - 1}))
    assert math.copysign(1, verdict["cells"][0]["change_percent"]) == 1


@pytest.mark.parametrize("percent", [0, -1, math.nan, math.inf])
def test_a_limit_that_is_no_positive_number_is_refused(percent: float) -> None:
    """Zero, negative or non-finite limits compare nothing; the message names the option."""
    with pytest.raises(ValueError, match="--max-regression-percent: expected a positive number"):
        flat.compare(report(), report(), percent)


def test_the_verdict_does_not_depend_on_the_order_of_the_cells() -> None:
    """Shuffled cells give the same artifact, sorted by kernel and by the sizes of the shape."""
    times: dict[Case, int | None] = {("rms_norm", f"{rows}x8", "float16"): 5000 + rows for rows in (2048, 8, 128)}
    shuffled = list(times.items())
    random.Random(3).shuffle(shuffled)
    verdict = compared(report(times), report(times))
    assert verdict == compared(report(dict(shuffled)), report(dict(reversed(shuffled))))
    assert [cell["shape"] for cell in verdict["cells"]] == ["8x8", "128x8", "2048x8"]


# Cells that have no partner.


@pytest.mark.parametrize("made", [report, roofline])
def test_f73_a_renamed_kernel_is_missing_and_new_and_never_passes(made: Callable[..., Artifact]) -> None:
    """A regression cannot hide behind a rename: the old name is missing, named and fails."""
    current = {FIRST: 5000, ("rms_norm_v2", "2048x4096", "bfloat16"): 30000, THIRD: 6000}
    verdict = compared(made(), made(current))
    assert outcome(verdict) == ("not_comparable", 3, 2)
    assert verdicts(verdict)[SECOND] == "MISSING"
    assert verdicts(verdict)["rms_norm_v2", "2048x4096", "bfloat16"] == "NEW"
    assert "1 cell missing: rms_norm 2048x4096 bfloat16 cold_clean" in verdict["reasons"]
    assert "1 cell new: rms_norm_v2 2048x4096 bfloat16 cold_clean" in verdict["reasons"]


@pytest.mark.parametrize(
    "current",
    [{("rms_norm", "64x64", "float16"): 1}, {("rms_norm", "128x1024", "float32"): 1}, {("other", "1", "int4"): 1}],
)
def test_f73_zero_compared_cells_is_a_failure(current: dict[Case, int | None]) -> None:
    """The same names with other shapes or dtypes, or no overlap at all, is not comparable."""
    verdict = compared(report({FIRST: 5000}), report(current))
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "0 cells compared" in verdict["reasons"]


def test_f73_an_empty_current_side_is_a_failure() -> None:
    """A run that measured nothing compares nothing, whatever the baseline; its reason is repeated."""
    empty = roofline({}, status="not_measured", reason="no CUDA device")
    verdict = compared(roofline(), empty)
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert set(verdicts(verdict).values()) == {"MISSING"}
    assert "the current side holds no times: no CUDA device" in verdict["reasons"]


def test_f73_an_empty_baseline_is_refused() -> None:
    """A baseline without a case would let anything pass."""
    empty = roofline({}, status="not_measured", reason="no CUDA device")
    with pytest.raises(NotComparableError, match="no CUDA device"):
        compared(empty, roofline())


def test_f73_a_regression_is_told_even_when_other_cells_are_missing() -> None:
    """A missing cell does not turn a regression into a mere "cannot compare"."""
    assert outcome(compared(report(), report({FIRST: 50000}))) == ("regressed", 2, 1)


def test_new_cells_are_listed_and_pass() -> None:
    """An older baseline with fewer kernels stays valid."""
    verdict = compared(report({FIRST: 5000}), report())
    assert outcome(verdict) == ("pass", 0, 1)
    assert verdicts(verdict)[THIRD] == "NEW"


def test_a_partial_run_misses_only_what_it_was_asked_for() -> None:
    """With a selection, the baseline's other cases are no concern; a selected one that is absent still fails."""
    assert outcome(compared(report(), report({FIRST: 5000}), asked={FIRST})) == ("pass", 0, 1)
    assert outcome(compared(report(), report({FIRST: 5000}), asked={FIRST, THIRD})) == ("not_comparable", 3, 1)


def test_a_case_that_occurs_twice_is_refused() -> None:
    """Two times for one case leave it open which is compared."""
    twice = report()
    twice["cases"].append(copy.deepcopy(twice["cases"][0]))
    with pytest.raises(NotComparableError, match="rms_norm 128x1024 float16 cold_clean twice"):
        compared(report(), twice)


# Cells that have a partner and still say nothing.


def spoil(artifact: Artifact, change: Callable[[dict[str, Any]], object]) -> Artifact:
    """Change the first cell or case of an artifact."""
    change(artifact["cases" if artifact["artifact_kind"] == "report" else "cells"][0])
    return artifact


@pytest.mark.parametrize("made", [report, roofline])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda cell: cell["candidates"][0].update(served_by="eager"), "served_by: "),
        (lambda cell: cell["candidates"][0].update(name="other"), "holds no triton candidate"),
        (lambda cell: cell["candidates"][0].update(status="failed", reason="it crashed"), "status failed (it crashed)"),
        (lambda cell: cell["candidates"][0].update(stats=None), "status ok (no reason is given)"),
    ],
)
def test_f68_f74_a_cell_without_a_sound_time_on_both_sides_is_not_compared(
    made: Callable[..., Artifact], side: int, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    """Another path served it, it failed, or it has no time: the cell is named and nothing passes."""
    sides: list[Artifact] = [made(), made()]
    spoil(sides[side], change)
    verdict = compared(sides[0], sides[1])
    assert outcome(verdict) == ("not_comparable", 3, 2)
    assert verdict["cells"][0]["verdict"] == "NOT_COMPARABLE"
    assert says in verdict["cells"][0]["reason"]
    assert verdict["cells"][0]["change_percent"] is None


def test_f74_an_invalid_cell_is_not_an_improvement() -> None:
    """A status beside a null never reads as a very small time."""
    verdict = compared(report(), report({**CASES, SECOND: None}))
    assert outcome(verdict) == ("not_comparable", 3, 2)
    assert "12 % of the samples are flagged" in verdict["cells"][1]["reason"]


def test_a_case_that_failed_correctness_is_not_compared() -> None:
    """The time of a wrong kernel is worth nothing."""
    wrong = spoil(report(), lambda case: case["correctness"].update(passed=False))
    assert compared(report(), wrong)["cells"][0]["reason"] == "the current failed correctness"


def test_a_case_whose_work_changed_is_not_compared() -> None:
    """The same name over other bytes is another case."""
    verdict = compared(roofline(), spoil(roofline(), lambda cell: cell.update(logical_read_bytes=999)))
    assert "base (1000, 900, 50), current (999, 900, 50)" in verdict["cells"][0]["reason"]


# Other hardware, software or protocol.


@pytest.mark.parametrize(
    ("fact", "value", "line"),
    [
        ("name", "NVIDIA H100 80GB HBM3", "device.name: base NVIDIA H100 80GB HBM3, current NVIDIA H200"),
        ("name", "NVIDIA H200 MIG 1g.18gb", "device.name: base NVIDIA H200 MIG 1g.18gb, current NVIDIA H200"),
        ("mig_enabled", True, "device.mig_enabled: base True, current False"),
        ("power_limit_mw", 350_000, "device.power_limit_mw: base 350000, current 700000"),
        ("driver", "570.9", "software.driver: base 570.9, current 580.1"),
        ("torch", "2.11.0", "software.torch: base 2.11.0, current 2.13.0"),
        ("triton", "3.6.0", "software.triton: base 3.6.0, current 3.7.1"),
        ("python", "3.12", "software.python: base 3.12, current 3.11"),
        ("driver", None, "software.driver: base None, current 580.1"),
    ],
)
@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_f82_another_machine_or_stack_is_not_comparable_and_names_what_differs(
    fact: str, value: object, line: str, factor: float
) -> None:
    """Faster or slower on other hardware or software is no verdict: exit code 3, with the facts that differ."""
    other, current = environment(**{fact: value}), roofline(scaled(factor))
    verdict = compared(roofline(), current, base_environment=other)
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert line in verdict["reasons"]
    assert set(verdicts(verdict).values()) == {"NOT_COMPARABLE"}
    elsewhere = report(environment={"device": other["device"], "software": other["software"]})
    assert line in compared(elsewhere, current)["reasons"]


def test_f82_every_fact_that_differs_is_listed() -> None:
    """Several differences are all named, and no other fact is."""
    other = environment(name="NVIDIA H100", torch="2.11.0", driver="570.9")
    reasons = compared(roofline(), roofline(), base_environment=other)["reasons"]
    assert {reason.split(":")[0] for reason in reasons if ": base " in reason} == {
        "device.name",
        "software.torch",
        "software.driver",
    }


def test_f82_a_host_without_a_gpu_is_another_machine() -> None:
    """No device against a device is one line."""
    bare = environment() | {"device": None}
    verdict = compared(roofline(), roofline(), environment=bare)
    assert "device: base NVIDIA H200, current none" in verdict["reasons"]


def test_a_roofline_needs_its_environment() -> None:
    """Without the environment nobody knows what was compared."""
    with pytest.raises(NotComparableError, match=r"environment\.json"):
        compared(roofline(), roofline(), environment=None)
    with pytest.raises(NotComparableError, match=r"environment\.json"):
        compared(roofline(), roofline(), base_environment=None)


@pytest.mark.parametrize(
    ("fact", "value"), [("regime", "warm"), ("sweep_bytes", 0), ("timing_method", "host wall clock")]
)
def test_reports_of_another_protocol_are_not_comparable(fact: str, value: object) -> None:
    """Hot against cold, another flush or another clock measures something else."""
    current = report()
    current["protocol"][fact] = value
    verdict = compared(report(), current)
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert any(reason.startswith(f"protocol.{fact}: base ") for reason in verdict["reasons"])


def test_reports_with_other_sample_counts_are_comparable() -> None:
    """A shorter run is noisier, but it measures the same."""
    current = report()
    current["protocol"] |= {"samples": 20, "seed": 8, "warmup_ms": 1}
    assert outcome(compared(report(), current)) == ("pass", 0, 3)


def test_synthetic_times_are_not_compared_with_real_ones() -> None:
    """Invented numbers are no baseline for measured ones."""
    verdict = compared(roofline(claim_kind="synthetic"), roofline())
    assert outcome(verdict) == ("not_comparable", 3, 0)
    assert "claim.synthetic: base True, current False" in verdict["reasons"]
    assert compared(roofline(claim_kind="synthetic"), roofline(claim_kind="synthetic"))["claim_kind"] == "synthetic"


# A report against a roofline.


def test_a_report_is_compared_with_a_roofline_in_its_own_regime() -> None:
    """The roofline's other regimes are neither compared nor missing."""
    base = roofline()
    base["cells"] += roofline(scaled(0.1), regime="warm")["cells"]
    verdict = compared(base, report())
    assert outcome(verdict) == ("pass", 0, 3)
    assert {cell["regime"] for cell in verdict["cells"]} == {"cold_clean"}
    assert outcome(compared(report(), base)) == ("pass", 0, 3)
    assert outcome(compared(base, base))[2] == 6


def test_a_report_in_a_regime_that_the_roofline_lacks_compares_nothing() -> None:
    """Hot times against a cold roofline is zero compared cells, not a pass."""
    hot = report()
    hot["protocol"]["regime"] = "warm"
    assert outcome(compared(roofline(), hot)) == ("not_comparable", 3, 0)


# Baselines that are refused.


@pytest.mark.parametrize(
    "base",
    [
        report(claim_kind="exploratory"),
        report(producer=header("", "", git_commit=None, git_tree_dirty=True)["producer"]),
        roofline(claim_kind="exploratory"),
    ],
)
def test_f83_a_baseline_from_a_dirty_tree_is_refused(tmp_path: Path, base: Artifact) -> None:
    """Nobody can check out the code that an exploratory baseline was measured from."""
    with pytest.raises(NotComparableError, match="dirty tree"):
        compared(base, report())
    artifacts.write(tmp_path / "base.json", base)
    with pytest.raises(NotComparableError, match=r"base\.json: .*dirty tree.*measure it again") as caught:
        flat.load_baseline(tmp_path / "base.json")
    assert caught.value.exit_code == 3


def test_a_dirty_current_side_is_compared_but_the_verdict_is_exploratory() -> None:
    """A developer may measure an edit; the verdict says what it is worth."""
    assert compared(report(), report(claim_kind="exploratory"))["claim_kind"] == "exploratory"


def test_f72_a_missing_baseline_is_one_line_with_the_way_to_make_one(tmp_path: Path) -> None:
    """No baseline yet is "cannot compare", and the message holds the command that makes the first."""
    path = tmp_path / "none.json"
    with pytest.raises(NotComparableError, match=r"none\.json: .*found no file.*--output .*none\.json") as caught:
        flat.load_baseline(path)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


SOUND = artifacts.dumps(report())
OLDER = SOUND.replace('"schema_version": 1', '"schema_version": 0')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "expected JSON", id="empty"),
        pytest.param(SOUND[:-100], "expected JSON", id="truncated"),
        pytest.param("[]", "found list", id="list"),
        pytest.param("null", "found NoneType", id="null"),
        pytest.param("\ufeff" + SOUND, "BOM", id="byte-order mark"),
        pytest.param(OLDER, "$.schema_version: expected 1, found 0", id="older version"),
        pytest.param(SOUND.replace('"max_abs": 0.01', '"max_abs": NaN'), "finite", id="NaN"),
        pytest.param(artifacts.dumps(environment()), "expected a report or a roofline, found", id="other kind"),
        *(
            pytest.param(SOUND.replace('"p50_ns": 5000', f'"p50_ns": {bad}'), "stats.p50_ns", id=f"p50 {bad}")
            for bad in ("-1", "0", "null", '"failed"', "1e-12", "NaN")
        ),
    ],
)
def test_f72_f74_a_baseline_that_is_no_sound_artifact_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    """Empty, truncated, not an object, byte-marked, of another version, or with a time that is none."""
    path = tmp_path / "base.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError) as caught:
        flat.load_baseline(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert says in message
    # Whoever follows the advice must not lose the file.
    assert message.endswith(("; name a report or a roofline.json.", "; name one."))
    assert "--output" not in message
    assert "\n" not in message


def test_f72_a_folder_or_an_unreadable_path_is_one_line(tmp_path: Path) -> None:
    """A folder and a path that cannot be opened are errors with their own way out."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, way_out in ((tmp_path, "inside it"), (loop, "name another")):
        with pytest.raises(ArtifactError, match=f"cannot be read: .*{way_out}") as caught:
            flat.load_baseline(path)
        assert "\n" not in str(caught.value)


def test_f72_an_empty_run_never_replaces_the_baseline(tmp_path: Path) -> None:
    """A report without a case cannot be written, so the file that is there stays."""
    path = tmp_path / "base.json"
    artifacts.write(path, report())
    with pytest.raises(ArtifactError):
        artifacts.write(path, report({}))
    assert flat.load_baseline(path) == report()


def test_a_roofline_baseline_brings_the_environment_beside_it(tmp_path: Path) -> None:
    """A roofline file is believed only with its environment.json; a report needs none."""
    path = tmp_path / "roofline.json"
    artifacts.write(path, roofline())
    base = flat.load_baseline(path)
    with pytest.raises(ArtifactError, match=r"environment\.json"):
        flat.environment_beside(path, base)
    artifacts.write(tmp_path / "environment.json", environment())
    assert flat.environment_beside(path, base) == environment()
    assert flat.environment_beside(path, report()) is None


# What it prints.


def test_the_table_shows_each_cell_and_the_last_line_sums_up() -> None:
    """Every cell is a row with its own text untouched, and the last line holds verdict, counts and limit."""
    current = report({FIRST: 12345678, SECOND: 12000, ("other", "8", "float32"): 7})
    base = report(producer=header("", "", git_commit="1e10" + "0" * 36, git_tree_dirty=False)["producer"])
    text = render(compared(base, current, origin="artifacts/base.json"))
    lines = text.splitlines()
    rows = {tuple(line.split()[:3]): line.split() for line in lines[2:6]}
    assert rows[FIRST][3:9] == ["cold_clean", "5000", "12345678", "+246813.56", "%", "REGRESSED"]
    assert rows[SECOND][3:9] == ["cold_clean", "12000", "12000", "+0.00", "%", "WITHIN_LIMIT"]
    assert rows["other", "8", "float32"][3:8] == ["cold_clean", "-", "7", "-", "NEW"]
    assert "- 1 cell missing: swiglu 128x1024 float16 cold_clean" in lines
    assert lines[-1] == (
        "regressed: 2 cells compared with artifacts/base.json (commit 1e1000000000): "
        "1 regressed, 1 within_limit; the limit is 10 %."
    )


def test_f84_text_that_looks_like_a_number_stays_as_it_is() -> None:
    """A reason or a shape that reads as a number is printed digit for digit."""
    verdict = compared(report({FIRST: 5000}), report({FIRST: 5000}))
    verdict["cells"][0] |= {"shape": "0010", "reason": "1e10"}
    row = render(verdict).splitlines()[2].split()
    assert (row[1], row[-1]) == ("0010", "1e10")


def test_the_table_names_what_stands_in_the_way() -> None:
    """A verdict that could not compare lists the facts that differ."""
    text = render(compared(roofline(), roofline(), base_environment=environment(triton="3.6.0")))
    assert "- software.triton: base 3.6.0, current 3.7.1" in text
    assert text.splitlines()[-1].startswith("not_comparable: 0 cells compared")
