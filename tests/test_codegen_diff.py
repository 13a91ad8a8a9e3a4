"""What counts as a regression of generated code, and how the check says so."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from codegen_data import launch, made, spoilt

from triton_kernel_lab import artifacts, cli
from triton_kernel_lab.analysis.codegen_diff import Finding, check, compare, exit_code
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.codegen import stage
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report.codegen import render

ROOT = Path(__file__).parents[1]


def recoded(audit: Artifact | None = None, **code: Any) -> Artifact:
    return spoilt(audit or made(), code)


def loop(instructions: int, load_bytes: int, whole_kernel: bool = False) -> dict[str, Any]:
    """A hot loop over elements of two bytes."""
    return {
        "whole_kernel": whole_kernel,
        "instructions": instructions,
        "load_bytes": load_bytes,
        "instructions_per_element": 2 * instructions / load_bytes if load_bytes else None,
    }


def test_a_loop_that_fetches_by_bulk_copies_is_held_to_the_instructions_of_a_turn() -> None:
    """Where the code does not say how much a turn fetches, more instructions a turn are a finding."""
    before = recoded(hot_loop=loop(40, 0))
    assert rules(before, recoded(hot_loop=loop(44, 0))) == ["changed"]
    assert rules(before, recoded(hot_loop=loop(45, 0))) == ["a longer hot loop"]


def rules(before: Artifact | None, after: Artifact) -> list[str]:
    return [finding.rule for finding in compare("one", before, after)]


def test_an_audit_equals_itself() -> None:
    """The same bytes are no finding, and end with 0."""
    assert compare("one", made(), made()) == []
    assert exit_code([]) == 0


def test_synthetic_audits_are_sound() -> None:
    """What these tests compare satisfies the schema."""
    artifacts.validate(made(), "codegen", "here")
    artifacts.validate(spoilt(made(), status="failed", reason="no", code=None), "codegen", "here")


OVER = {
    "shared_bytes": 200 << 10,
    "occupancy": {"blocks": 0, "warps": 0, "ratio": 0.0, "limited_by": ["shared_memory"]},
}


@pytest.mark.parametrize(
    ("code", "rule", "after"),
    [
        ({"stack_bytes": 16}, "spills", "16 bytes, 0 loads, 0 stores"),
        ({"local_loads": 2, "local_stores": 2}, "spills", "0 bytes, 2 loads, 2 stores"),
        ({"global_loads": {"32": 16}}, "narrower loads", "16 x 32 bit"),
        ({"global_loads": {"128": 3, "64": 2}}, "narrower loads", "3 x 128 bit, 2 x 64 bit"),
        ({"global_stores": {"64": 4}}, "narrower stores", "4 x 64 bit"),
        ({"instructions": 221}, "more instructions", "221 (+10 %)"),
        ({"hot_loop": loop(45, 64)}, "a longer hot loop", "45 instructions for 64 bytes"),
        ({"hot_loop": loop(40, 32)}, "a longer hot loop", "40 instructions for 32 bytes"),
        (OVER, "cannot be launched", "204800 bytes shared, 32 registers: over the target's shared memory"),
    ],
)
def test_each_regression_is_named(code: dict[str, Any], rule: str, after: str) -> None:
    """A change for the worse in one launch is one finding of its rule, with what stands there now."""
    (found,) = compare("one", made(), recoded(**code))
    assert (found.rule, found.after) == (rule, after)
    assert (found.target, found.function, found.call) == ("sm_80", "_kernel", "default 8x128 float16")
    assert exit_code([found]) == 2


def test_another_order_of_the_same_instructions_is_no_change() -> None:
    """From one PTX ptxas makes binaries that differ from run to run; what they consist of does not."""
    assert rules(made(), recoded(cubin_sha256="1" * 64)) == []


@pytest.mark.parametrize(
    "code",
    [
        {"instructions": 220},
        {"instructions": 100},
        {"registers": 64},
        {"global_loads": {"128": 2}},
        {"global_loads": {"128": 4, "32": 1}},
        {"global_loads": {"256": 2}},
        {"ptx_sha256": "1" * 64},
        {"tensor_core": {}},
        {"hot_loop": loop(44, 64)},
        {"hot_loop": loop(80, 128)},
        {"hot_loop": loop(400, 64, whole_kernel=True)},
    ],
)
def test_any_other_difference_is_a_change(code: dict[str, Any]) -> None:
    """Code that is different and breaks no rule still has to be committed."""
    findings = compare("one", made(), recoded(**code))
    assert [finding.rule for finding in findings] == ["changed"]
    assert exit_code(findings) == 2


@pytest.mark.parametrize(
    "code", [{"stack_bytes": 16}, {"local_loads": 2, "local_stores": 2}, OVER, {"global_loads": {"8": 9}}]
)
def test_what_is_tracked_is_accepted(code: dict[str, Any]) -> None:
    """A spill or a load that was committed is no finding again, and getting rid of it is only a change."""
    accepted = recoded(**code)
    assert compare("one", accepted, accepted) == []
    assert rules(accepted, made()) == ["changed"]


def test_less_spilling_is_a_change() -> None:
    """Fewer spilled bytes are no regression although some are left."""
    assert rules(recoded(stack_bytes=16), recoded(stack_bytes=8)) == ["changed"]


def test_a_launch_that_stops_compiling_is_named_with_its_cause() -> None:
    """The cause stands in the finding; a committed failure is accepted, with another cause it has changed."""
    failed = spoilt(made(), status="failed", reason="CompilationError: no such type", code=None)
    (found,) = compare("one", made(), failed)
    assert (found.rule, found.before, found.after) == ("does not compile", "ok", "CompilationError: no such type")
    assert compare("one", failed, failed) == []
    assert rules(failed, spoilt(failed, reason="another", code=None)) == ["changed"]
    assert rules(failed, made()) == ["changed"]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ({}, "changed"),
        ({"stack_bytes": 8}, "spills"),
        (OVER, "cannot be launched"),
        ({"global_loads": {"8": 9}}, "changed"),
    ],
)
def test_a_new_launch_is_held_to_what_needs_no_comparison(code: dict[str, Any], rule: str) -> None:
    """A new shape or target may not spill or exceed its target; otherwise it is a change."""
    new = recoded(made(launch("sm_120")), **code)["launches"]
    assert rules(made(), made(*made()["launches"], *new)) == [rule]


def test_a_new_launch_that_does_not_compile_is_named() -> None:
    """A kernel that never compiled for a target is red until that is committed."""
    failed = launch("sm_120", status="failed", reason="no", code=None)
    assert rules(made(), made(*made()["launches"], failed)) == ["does not compile"]


def test_a_launch_that_is_gone_is_named() -> None:
    """A shape, variant or target that is no longer compiled does not vanish in silence."""
    (found,) = compare("one", made(), made(launch("sm_80")))
    assert (found.rule, found.target) == ("no longer launched", "sm_90")


def test_launches_are_matched_by_call_and_not_by_configuration() -> None:
    """Another block size for the same call is compared with the old one's code."""
    other = spoilt(made(), {"global_loads": {"16": 32}}, constants={"BLOCK": 32}, options={"num_warps": 1})
    assert rules(made(), other) == ["narrower loads"]


def test_calls_that_share_a_launch_are_one_finding() -> None:
    """A binary that serves several calls is named once, by the first."""
    calls = ["default 8x128 float16", "packed 8x128 float16"]
    shared = spoilt(made(), {}, calls=calls)
    (found,) = compare("one", shared, recoded(shared, stack_bytes=8))
    assert found.call == calls[0]


def test_two_launches_of_a_function_in_one_call_are_told_apart() -> None:
    """The second launch of a split reduction is compared with the second one before."""
    twice = made(launch(), launch(constants={"BLOCK": 64}))
    changed = copy.deepcopy(twice)
    changed["launches"][1]["code"]["stack_bytes"] = 8
    assert rules(twice, changed) == ["spills"]


@pytest.mark.parametrize("field", ["producer", "triton", "tools"])
def test_a_difference_outside_the_launches_is_one_change(field: str) -> None:
    """Another digest of the sources or another tool chain with the same code is a change, once."""
    other = made()
    other[field] = {"producer": made()["producer"] | {"source_sha256": "1" * 64}, "triton": "3.8.0", "tools": {}}[field]
    assert rules(made(), other) == ["changed"]


def test_the_gravest_comes_first() -> None:
    """Findings stand in the order of their gravity, whatever the order of the launches."""
    worse = made(launch("sm_80"), launch("sm_90", status="failed", reason="no", code=None))
    worse["launches"][0]["code"] |= {"instructions": 400, "stack_bytes": 8}
    assert rules(made(), worse) == ["does not compile", "spills", "more instructions"]


def test_no_tracked_audit_cannot_be_compared() -> None:
    """Without a tracked audit the code is 3, unless another kernel has a regression."""
    missing = compare("one", None, made())
    assert [finding.rule for finding in missing] == ["no tracked audit"]
    assert exit_code(missing) == 3
    assert exit_code([*missing, *compare("two", made(), recoded(stack_bytes=8))]) == 2


# What is said, and how it ends.


def test_the_table_holds_each_regression_and_counts_changes() -> None:
    """Regressions are rows; a kernel's changes are one line; the last line says how to accept."""
    worse = made(launch("sm_80"), launch("sm_90"))
    worse["launches"][0]["code"] |= {"stack_bytes": 8}
    worse["launches"][1]["code"] |= {"registers": 40}
    said = render(["one"], compare("one", made(), worse)).splitlines()
    assert said[2].split("  ")[0] == "one"
    assert "spills" in said[2]
    assert said[3].startswith("one: changed: 1 launch compiles to other code, first sm_90 _kernel")
    assert said[4] == "If that is meant: run `make codegen`, read the diff and commit the new artifact."


def test_a_long_table_says_how_much_it_leaves_out() -> None:
    """Forty rows are shown, and the others are counted."""
    many = [Finding("one", "spills", "sm_80", "_kernel", f"call {index}", "0", "8") for index in range(50)]
    said = render(["one"], many).splitlines()
    assert said[-2] == "10 more."
    assert len(said) == 2 + 40 + 2


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A checkout that tracks one audit, in which deriving gives what the test says."""
    for name in ("params.yaml", "dvc.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    found = find_project(tmp_path)
    artifacts.write(found.audits / "rms_norm.json", made())
    return found


def ends_with(monkeypatch: pytest.MonkeyPatch, derived: dict[str, Artifact], *arguments: str) -> int:
    monkeypatch.setattr(stage, "derive", lambda project, kernels: derived)
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", "codegen", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("name", "derived", "code", "said"),
    [
        ("rms_norm", made(), 0, "every launch compiles to the tracked code"),
        ("rms_norm", recoded(stack_bytes=8), 2, "spills"),
        ("rms_norm", recoded(registers=33), 2, "changed: 1 launch compiles"),
        ("swiglu", made(), 3, "no tracked audit"),
    ],
)
def test_the_check_ends_with_its_finding(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    derived: Artifact,
    code: int,
    said: str,
) -> None:
    """0 for equal bytes, 2 for any difference, 3 without a tracked audit; nothing is written."""
    before = {path: path.read_bytes() for path in project.audits.iterdir()}
    assert ends_with(monkeypatch, {name: derived}, name, "--check") == code
    assert said in capsys.readouterr().out
    assert {path: path.read_bytes() for path in project.audits.iterdir()} == before


def test_writing_accepts_a_change(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the new audit is written the check is content."""
    derived = {"rms_norm": recoded(stack_bytes=8)}
    assert ends_with(monkeypatch, derived, "rms_norm", "--check") == 2
    assert ends_with(monkeypatch, derived, "rms_norm") == 0
    assert ends_with(monkeypatch, derived, "rms_norm", "--check") == 0


def test_a_tracked_audit_that_cannot_be_read_is_an_error(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A truncated audit ends with 1 and its path, not as a change."""
    (project.audits / "rms_norm.json").write_text('{"artifact_kind": "codegen",', encoding="utf-8")
    assert ends_with(monkeypatch, {"rms_norm": made()}, "--check") == 1
    assert "rms_norm.json: $: expected JSON" in capsys.readouterr().err


def test_each_kernel_is_compared_with_its_own_audit(project: Project) -> None:
    """Findings of several kernels carry the kernel's name."""
    artifacts.write(project.audits / "swiglu.json", recoded(stack_bytes=8))
    found = check(project, {"rms_norm": recoded(stack_bytes=8), "swiglu": recoded(stack_bytes=8)})
    assert [(finding.kernel, finding.rule) for finding in found] == [("rms_norm", "spills")]
