"""Hardware counters: what is asked of Nsight Compute, how its table is read, and each way of getting none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_ncu
import pytest
import synthetic
import torch

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.analysis.counted import CountedError, counted
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.cases._base import load
from triton_kernel_lab.lab import counters, ncu, profiled, sweep
from triton_kernel_lab.lab.counters import CounterError
from triton_kernel_lab.project import MeasureParams, Project
from triton_kernel_lab.report import counted as report

PARAMS = MeasureParams(processes=1, samples={}, warmup_ms=1, sweep_bytes=1 << 20, seed=7)
PARAMS_ON_GPU = dataclasses.replace(PARAMS, sweep_bytes=256 << 20)
CELLS = [((128, 1024), "float16"), ((512, 4096), "bfloat16")]


def count(candidates: tuple[str, ...] = ("triton",)) -> dict[str, Any]:
    return counters.count(load("rms_norm"), CELLS, candidates, PARAMS)


def launches(body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [candidate["launches"] for cell in body["cells"] for candidate in cell["candidates"]]


# What is asked.


def test_a_run_counts_every_cell_without_touching_clocks_or_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel costs one start of ncu a group, which counts between the profiler's marks and changes nothing else."""
    seen = fake_ncu.install(tmp_path, monkeypatch)
    body = count()
    runs = [json.loads(line) for line in seen.read_text().splitlines()]
    metrics = [asked[asked.index("--metrics") + 1].split(",") for asked in runs]
    assert metrics == [[ncu.METRICS[name] for name in group.names] for group in ncu.GROUPS]
    assert sorted(itertools.chain(*metrics)) == sorted(ncu.METRICS.values())
    for asked, group in zip(runs, ncu.GROUPS, strict=True):
        pairs = set(itertools.pairwise(asked))
        assert {("--clock-control", "none"), ("--profile-from-start", "off")} <= pairs
        # Bytes are those after our own sweep; what takes several passes is flushed by ncu ahead of each.
        assert ("--cache-control", "none" if "dram_read_bytes" in group.names else "all") in pairs
        assert {("--page", "raw"), ("--print-units", "base")} <= pairs
        assert "duration" not in " ".join(asked)
    assert [(cell["shape"], cell["dtype"]) for cell in body["cells"]] == [
        ("128x1024", "float16"),
        ("512x4096", "bfloat16"),
    ]


# How its table is read.


def test_counts_are_bytes_and_shares_of_the_launches_between_two_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands' commas, fractions and per cent become whole bytes and ratios; the mark itself is left out."""
    fake_ncu.install(tmp_path, monkeypatch)
    body = count()
    assert body["counter_status"] == "ok"
    assert body["protocol"]["profiler_version"] == "2025.3.1.0"
    expected = {
        "kernel": "_kernel",
        "passes": 1,
        "dram_read_bytes": 1048576,
        "dram_write_bytes": 1024,
        "l2_hit_ratio": 0.5025,
        "occupancy_ratio": 0.975,
        "tensor_pipe_ratio": 0.0,
    }
    assert launches(body) == [[expected], [expected]]


@pytest.mark.parametrize(("unit", "scale"), [("byte", 1), ("Kbyte", 1000), ("Mbyte", 10**6), ("Gbyte", 10**9)])
def test_any_spelling_of_bytes_is_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, scale: int) -> None:
    """A version that scales its units in spite of being told not to is read right."""
    fake_ncu.install(tmp_path, monkeypatch, unit=unit)
    ((first,), _) = launches(count())
    assert first["dram_read_bytes"] == 1048576 * scale


def test_a_call_of_several_launches_keeps_each_and_each_candidate_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between two marks belongs to one candidate of one cell."""
    fake_ncu.install(tmp_path, monkeypatch, "two")
    body = count(("triton", "torch_compile"))
    assert [[launch["kernel"] for launch in found] for found in launches(body)] == [
        ["_kernel", "void second<4, int>(int *)"]
    ] * 4
    assert [candidate["name"] for candidate in body["cells"][0]["candidates"]] == ["triton", "torch_compile"]


def test_what_took_a_replay_was_not_counted_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass finds in the cache what the first brought: its counts are dropped, unless ncu flushed between."""
    fake_ncu.install(tmp_path, monkeypatch, passes=3)
    ((first,), _) = launches(count())
    assert first == {"kernel": "_kernel", "passes": 3, **dict.fromkeys(ncu.METRICS), "l2_hit_ratio": 0.5025}


def test_runs_that_launch_differently_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of two runs belong to one launch only if both runs made the same launches."""
    fake_ncu.install(tmp_path, monkeypatch, "unsteady")
    body = count()
    assert (body["counter_status"], body["cells"]) == ("profiler_unavailable", [])
    assert body["reason"] == "ncu found other launches in each run of the same calls"


def test_a_metric_that_ncu_lacks_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n/a is not zero: an architecture without the metric says nothing of it."""
    fake_ncu.install(tmp_path, monkeypatch, "missing")
    assert [found[0]["tensor_pipe_ratio"] for found in launches(count())] == [None, None]


def test_a_share_above_the_whole_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launch too short for its passes to agree ncu gives hit rates above 100 %, which are none; bytes stay."""
    fake_ncu.install(tmp_path, monkeypatch, "beyond")
    ((first,), _) = launches(count())
    assert first["l2_hit_ratio"] is None
    assert first["dram_read_bytes"] == 1048576


# Each way of getting none.

REFUSED = {
    "denied": ("permission_denied", "NVreg_RestrictProfilingToAdminUsers=0"),
    "library": ("profiler_unavailable", "ncu: Failed to initialize the profiler: LibraryNotLoaded"),
    "garbage": ("profiler_unavailable", "ncu ended with 0 and printed no table of counters: this?"),
    "silent": ("profiler_unavailable", "ncu ended with 9 and printed no table of counters: it printed nothing"),
    "words": ("profiler_unavailable", "dram_read_bytes is 'plenty', which is no number"),
    "none": ("profiler_unavailable", "its rows are not those of a raw page"),
}


@pytest.mark.parametrize("mode", REFUSED)
def test_a_refused_counter_is_a_status_with_a_reason_and_never_a_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Denied, not loaded, nonsense, nothing: the stage says which, and holds no count."""
    fake_ncu.install(tmp_path, monkeypatch, mode)
    status, said = REFUSED[mode]
    body = count()
    assert body["counter_status"] == status
    assert said in body["reason"]
    assert body["cells"] == []


def test_a_host_without_the_profiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ncu on PATH is profiler_unavailable."""
    fake_ncu.remove(monkeypatch, tmp_path)
    body = count()
    assert (body["counter_status"], body["cells"]) == ("profiler_unavailable", [])
    assert "no ncu on PATH" in body["reason"]


def test_bytes_in_an_unknown_unit_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is not one of bytes makes no count."""
    fake_ncu.install(tmp_path, monkeypatch, unit="sector")
    body = count()
    assert body["counter_status"] == "profiler_unavailable"
    assert "dram_read_bytes is in 'sector', expected bytes" in body["reason"]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("crash", r"the profiled process failed: RuntimeError: CUDA error: an illegal access"),
        ("short", r"expected launches for 2 calls, found 0"),
    ],
)
def test_a_kernel_that_fails_under_the_profiler_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
) -> None:
    """A crash of the kernel, or a call that launches nothing, is no question of permission."""
    fake_ncu.install(tmp_path, monkeypatch, mode)
    with pytest.raises(CounterError, match=said):
        count()


# The process that is watched.


def test_each_call_is_warm_code_on_cold_data_between_two_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls that are not counted, a counted mark, our sweep, and the counted call alone."""
    log: list[str] = []

    class Sweep:
        def __init__(self, sweep_bytes: int, where: torch.device) -> None:
            self.clean = lambda: log.append("clean")

    case = load("rms_norm")
    variant = case.variants[0]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        log.append("call")
        return inputs[0]

    watched = dataclasses.replace(case, variants=(dataclasses.replace(variant, run=run),))
    monkeypatch.setattr(profiled, "load", lambda kernel: watched)
    monkeypatch.setattr(profiled, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(sweep, "Sweep", Sweep)
    monkeypatch.setattr(sweep, "null", lambda mark: log.append("mark"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("["))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("]"))
    plan, done = tmp_path / "plan.json", tmp_path / "done"
    cells = [{"dims": [3, 63], "dtype": "float16"}] * 2
    plan.write_text(json.dumps({"kernel": "x", "seed": 7, "sweep_bytes": 4, "candidates": ["triton"], "cells": cells}))
    assert profiled.main([str(plan), str(done)]) == 0
    once = ["mark", "call", "call", "call", "[", "mark", "]", "clean", "[", "call", "]"]
    assert log == ["clean", *once, *once]
    assert done.is_file()


@pytest.mark.gpu
def test_a_copy_on_a_gpu_moves_its_bytes_or_says_why_not() -> None:
    """Where the counters may be read, a cold RMSNorm reads its input from DRAM once, in a single pass."""
    body = counters.count(load("rms_norm"), [((2048, 4096), "bfloat16")], ("triton",), PARAMS_ON_GPU)
    if body["counter_status"] != "ok":
        assert body["reason"]
        return
    ((launch,),) = launches(body)
    assert launch["passes"] == 1
    assert 0.95 < launch["dram_read_bytes"] / (2 * 2048 * 4096) < 1.1
    assert 0 < launch["occupancy_ratio"] <= 1


# The stage.


def test_runner_cpu_is_not_asked_and_a_wrong_kernel_is_not_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the artifact says not_requested; after a failed correctness stage there is none."""
    seen = fake_ncu.install(tmp_path, monkeypatch)
    found = synthetic.project(tmp_path / "tree", derive=False, measured=False, runner="cpu")
    counters.run(found, "rms_norm")
    artifact = artifacts.read(found.artifacts / "counters/rms_norm.json", "counters")
    assert (artifact["counter_status"], artifact["cells"]) == ("not_requested", [])
    synthetic.edit(found.artifacts / "correctness/rms_norm.json", lambda made: made.update(passed=False))
    with pytest.raises(CounterError, match="a wrong kernel is not profiled"):
        counters.run(found, "rms_norm")
    assert not seen.exists()


def test_the_stage_writes_a_sound_artifact_of_every_timed_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU's runner the artifact has each timed shape and dtype, and names what it was made from."""
    fake_ncu.install(tmp_path, monkeypatch)
    found = synthetic.project(tmp_path / "tree", derive=False)
    counters.run(found, "swiglu")
    artifact = artifacts.read(found.artifacts / "counters/swiglu.json", "counters")
    case = load("swiglu")
    assert len(artifact["cells"]) == len(case.cells)
    assert [record["path"].rpartition("/")[2] for record in artifact["inputs"]] == ["swiglu.json", "environment.json"]
    # Outside git nobody can tell what was counted.
    assert artifact["claim_kind"] == "exploratory"


# What is derived from it.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    found = synthetic.project(tmp_path_factory.mktemp("made"), derive=False, shapes=("128x1024",), dtypes=("float16",))
    return {kind: artifacts.read(found.artifacts / f"{kind}/rms_norm.json") for kind in ("counters", "timing")}


def derived(made: dict[str, Artifact], change: Callable[[Artifact], object] = lambda counters: None) -> dict[str, Any]:
    changed = json.loads(json.dumps(made["counters"]))
    change(changed)
    return counted(changed, made["timing"])


def of_launch(counters: Artifact) -> dict[str, Any]:
    launch: dict[str, Any] = counters["cells"][0]["candidates"][0]["launches"][0]
    return launch


def test_amplification_is_counted_over_logical_bytes(made: dict[str, Artifact]) -> None:
    """256 KiB read and written: 4096 bytes too many read and half of the writes make 1.0156 and 0.7578."""
    (cell,) = derived(made)["cells"]
    assert (cell["logical_read_bytes"], cell["dram_read_bytes"]) == (262144, 266240)
    assert (cell["logical_write_bytes"], cell["dram_write_bytes"]) == (262144, 131072)
    assert cell["read_amplification_ratio"] == round(266240 / 262144, 4) == 1.0156
    assert cell["amplification_ratio"] == round((266240 + 131072) / 524288, 4) == 0.7578
    assert (cell["l2_hit_ratio"], cell["launches"], cell["passes"]) == (0.5, 1, 1)


def test_launches_of_a_call_add_up_in_bytes_and_have_no_common_share(made: dict[str, Artifact]) -> None:
    """Bytes of two launches are summed; their hit rates and occupancies are not one figure."""

    def twice(counters: Artifact) -> None:
        candidate = counters["cells"][0]["candidates"][0]
        candidate["launches"] = [candidate["launches"][0], {**candidate["launches"][0], "passes": 2}]

    (cell,) = derived(made, twice)["cells"]
    assert (cell["launches"], cell["passes"], cell["dram_read_bytes"]) == (2, 2, 2 * 266240)
    assert (cell["l2_hit_ratio"], cell["occupancy_ratio"], cell["tensor_pipe_ratio"]) == (None, None, None)


def test_an_unknown_count_has_no_ratio(made: dict[str, Artifact]) -> None:
    """Without the written bytes the read ratio stands and the amplification is null."""
    (cell,) = derived(made, lambda counters: of_launch(counters).update(dram_write_bytes=None))["cells"]
    assert (cell["read_amplification_ratio"], cell["amplification_ratio"]) == (1.0156, None)
    (cell,) = derived(made, lambda counters: of_launch(counters).update(dram_read_bytes=0))["cells"]
    assert (cell["dram_read_bytes"], cell["read_amplification_ratio"]) == (0, 0.0)


def test_a_counted_cell_that_is_not_timed_is_named(made: dict[str, Artifact]) -> None:
    """Counters of other shapes than the timing's are told with the way to mend it."""
    with pytest.raises(CountedError, match=r"found 3x5 float16; run `dvc repro counters@rms_norm`"):
        derived(made, lambda counters: counters["cells"][0].update(shape="3x5"))


# What the report says of it.


def test_the_section_sets_counted_beside_logical_bytes(made: dict[str, Artifact]) -> None:
    """One row a cell: MiB, ratios and shares, a counted zero printed as one."""
    text = report.section([derived(made)])
    (row,) = [line for line in text.splitlines() if line.startswith("| rms_norm")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    shown = ["rms_norm", "128x1024", "float16", "Triton", "1", "0.25", "0.25", "1.02", "0.25", "0.13", "0.76"]
    assert cells == [*shown, "50.0 %", "75.0 %", "0.0 %"]
    assert "Written bytes that still lie in the L2 when the kernel ends are not counted" in text


def test_kernels_without_counts_are_told_with_their_reason(made: dict[str, Artifact]) -> None:
    """Each status is one sentence that names its kernels; without any count there is no table."""
    refused = {"counter_status": "permission_denied", "reason": "not allowed", "cells": []}
    text = report.section([refused | {"kernel": "rms_norm"}, refused | {"kernel": "swiglu"}])
    assert text == "## Counted bytes\n\nNot counted (permission_denied): `rms_norm`, `swiglu`: not allowed."
    assert report.section([]) == ""


# Its place in the chain.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("sound") / "tree"
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20)


def problems(found: Project, path: str, change: Callable[[Artifact], object]) -> list[str]:
    """What verify says after a careful edit of one artifact, which is put back."""
    where = found.artifacts / path
    before = where.read_bytes()
    try:
        synthetic.edit(where, lambda artifact: (change(artifact), None)[1])
        return verify.run(found)
    finally:
        where.write_bytes(before)


def test_an_edited_count_is_named_by_its_file(original: Project) -> None:
    """A count that was changed after the roofline was derived breaks the chain in its own file."""
    assert verify.run(original) == []
    found = problems(original, "counters/rms_norm.json", lambda made: of_launch(made).update(dram_read_bytes=262144))
    assert found[0].startswith("artifacts/synthetic-gpu/counters/rms_norm.json: expected sha256 ")


def test_an_edited_amplification_is_recomputed(original: Project) -> None:
    """A ratio of the roofline that the counts do not give is named with both values."""

    def forge(roofline: Artifact) -> None:
        roofline["counters"][0]["cells"][0]["amplification_ratio"] = 1.0

    (found, *_) = problems(original, "roofline.json", forge)
    path = "artifacts/synthetic-gpu/roofline.json: $.counters[0].cells[0].amplification_ratio"
    assert found.startswith(f"{path}: expected 0.7578, found 1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: of_launch(made).update(occupancy_ratio=1.2), "occupancy_ratio: expected at most 1, found 1.2"),
        (lambda made: made.update(counter_status="permission_denied"), "$.cells: expected none"),
        (lambda made: made.update(reason="because"), "$.reason: expected none beside counter_status 'ok'"),
    ],
)
def test_counts_that_cannot_be_are_implausible(
    original: Project, change: Callable[[Artifact], object], said: str
) -> None:
    """More than the whole, or counts beside a status that says there are none."""
    assert any(said in found for found in problems(original, "counters/rms_norm.json", change))
