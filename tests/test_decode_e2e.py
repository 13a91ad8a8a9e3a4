"""Decoding a whole model: what is checked, what is timed, what follows from the times, and how it is reported."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
import torch
from operator_checks import DEVICE

from triton_kernel_lab import artifacts, decode_e2e, sources
from triton_kernel_lab.analysis import decode_e2e as figures
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.decode_e2e import DecodeError, Request
from triton_kernel_lab.endtoend import measure, prime
from triton_kernel_lab.endtoend import profile as profiling
from triton_kernel_lab.endtoend.model import INT4_GROUP, Models, Sizes, quantised, sharing
from triton_kernel_lab.endtoend.opponents import OPPONENTS, Opponent, Setting
from triton_kernel_lab.endtoend.profile import Activity, ProfileError, Trace
from triton_kernel_lab.endtoend.sessions import Session
from triton_kernel_lab.endtoend.watch import Laps, Watch, watch_for
from triton_kernel_lab.lab.check import Error, Limit
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report import decode_e2e as report
from triton_kernel_lab.report import readme
from triton_kernel_lab.report.site import facts

SIZES = Sizes(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, vocab=97)
PROTOCOL = measure.Protocol(checked_rows=1, checked_steps=2, warmup_steps=1, repetitions=3, tokens=4)
CPU = torch.device("cpu")
CONTEXT = 12
MODEL = SIZES.record() | {"int4_group": INT4_GROUP, "seed": 0}
STEP_NS = 1000


class Clock:
    """Plays a watch: the first repetition takes 1000 ns a step, the second 2000, and so on."""

    def __init__(self) -> None:
        self.steps, self.begun = 0, 0

    def start(self) -> None:
        self.steps, self.begun = 0, self.begun + 1

    def mark(self) -> None:
        self.steps += 1

    def stop(self) -> Laps:
        return Laps(self.begun * STEP_NS * self.steps, [self.begun * STEP_NS] * self.steps)


@pytest.fixture(scope="module")
def models() -> Models:
    return Models(SIZES, CPU, 64, seed=0)


def decoded(
    models: Models,
    *names: str,
    also: dict[str, Opponent] | None = None,
    watch: Watch | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """The records of one small cell by name."""
    known = {**OPPONENTS, **(also or {})}
    made = measure.cell(
        models,
        2,
        CONTEXT,
        names,
        replace(PROTOCOL, **changed),
        opponents=known,
        watch=watch or watch_for(models.device),
    )
    return {record["name"]: record for record in made["opponents"]}


def like_eager(change: Callable[[Session], Session]) -> Opponent:
    """An opponent that decodes as the eager one, but for a change of its session."""
    eager = OPPONENTS["eager_static"]
    return replace(eager, role="triton", open=lambda setting: change(eager.open(setting)))


class Wrong:
    """Decodes rightly for some steps, and then adds to one logit."""

    note: str | None = None

    def __init__(self, session: Session, right: int) -> None:
        self._session, self._right = session, right

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._session.step(tokens).clone()
        self._right -= 1
        if self._right < 0:
            logits[:, 5] += 2.0
        return logits


class Forgetful:
    """Sees the prompt, and the same first token over and over."""

    note: str | None = None

    def __init__(self, session: Session) -> None:
        self._session = session
        self._logits: torch.Tensor | None = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._logits is None:
            self._logits = self._session.step(tokens)
        return self._logits


# What is checked and timed.


def test_the_library_with_both_caches_passes_and_is_timed(models: Models) -> None:
    """Eager decoding of either cache agrees with float32, and has a run a repetition with a time a step."""
    found = decoded(models, "eager_dynamic", "eager_static")
    for record in found.values():
        assert (record["status"], record["reason"]) == ("ok", None)
        assert [run["repetition"] for run in record["runs"]] == [0, 1, 2]
        assert all(len(run["step_ns"]) == run["tokens"] for run in record["runs"])
        assert all(sum(run["step_ns"]) <= run["wall_ns"] for run in record["runs"])
        assert 0 < record["check"]["rel_norm"] <= record["check"]["limit_rel_norm"]
        assert record["check"]["greedy_checked"] == PROTOCOL.checked_rows * PROTOCOL.checked_steps
        assert record["prepare_ns"] > 0


def test_a_model_that_is_no_one_graph_is_compiled_with_breaks(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler refuses one graph it may break it, and the record says so."""
    asked: list[bool] = []

    def compile(forward: Callable[..., Any], *, mode: str, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
        asked.append(fullgraph)

        def refused(**inputs: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("a graph break")

        return refused if fullgraph else forward

    monkeypatch.setattr(torch, "compile", compile)
    record = decoded(models, "torch_compile")["torch_compile"]
    assert (asked, record["status"], record["reason"]) == ([True, False], "ok", "with graph breaks")


def test_a_step_is_compiled_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that are forced and those that follow have one layout, and the cache's length is no constant."""
    original, graphs = torch.compile, []

    def traced(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    def compile(forward: Callable[..., Any], *, mode: str, fullgraph: bool, dynamic: bool) -> Callable[..., Any]:
        made: Callable[..., Any] = original(forward, backend=traced, fullgraph=fullgraph, dynamic=dynamic)
        return made

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile)
    record = decoded(models, "torch_compile")["torch_compile"]
    assert (record["status"], record["reason"], len(graphs)) == ("ok", None, 1)


@pytest.mark.parametrize(
    ("eager", "limit"),
    [
        (Error(0.15, 0.046, 0.3), Limit(0.3, 0.092)),  # What sixteen layers of bfloat16 add up to.
        (Error(0.0, 0.0, 0.0), Limit(2.0**-7, 2.0**-8)),
        (Error(1.0, 1.0, 1.0), Limit(0.5, 0.1)),
        (Error(None, None, None), Limit(2.0**-7, 2.0**-8)),
    ],
)
def test_the_limit_is_twice_what_the_eager_model_is_off(eager: Error, limit: Limit) -> None:
    """Between the floor of the dtype and less than zeros would be off, so that the eager model itself passes."""
    assert measure._limit(torch.bfloat16, eager) == limit


def test_a_check_that_cannot_be_made_is_no_pass(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reference of the last logits fails, the opponent has no times."""

    def out_of_memory(*anything: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(measure._Judge, "after", out_of_memory)
    record = decoded(models, "eager_dynamic")["eager_dynamic"]
    assert (record["status"], record["reason"], record["runs"]) == ("failed", "OutOfMemoryError: no room", [])


PLANTED: dict[str, tuple[Opponent, str]] = {
    "wrong at once": (like_eager(lambda session: Wrong(session, 0)), "worst element off by"),
    "wrong after the first check": (
        like_eager(lambda session: Wrong(session, PROTOCOL.checked_steps)),
        "after 16 steps: worst element off by",
    ),
    "the same answer for ever": (like_eager(Forgetful), "off by"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_decoder_has_no_times(models: Models, planted: str) -> None:
    """A decoder that is wrong, at once or only later, is invalid, says where, and keeps no run."""
    opponent, said = PLANTED[planted]
    found = decoded(models, "planted", "eager_static", also={"planted": opponent})
    assert found["planted"]["status"] == "invalid"
    assert said in found["planted"]["reason"]
    assert found["planted"]["runs"] == []
    assert found["eager_static"]["status"] == "ok"


def missing(setting: Setting) -> Session:
    raise ModuleNotFoundError("No module named 'a_peer'")


def broken(setting: Setting) -> Session:
    raise RuntimeError("no kernel\nfor this device")


@pytest.mark.parametrize(
    ("opened", "status", "reason"),
    [
        (missing, "unavailable", "ModuleNotFoundError: No module named 'a_peer'"),
        (broken, "failed", "RuntimeError: no kernel for this device"),
    ],
)
def test_who_cannot_take_part_says_why(
    models: Models, opened: Callable[[Setting], Session], status: str, reason: str
) -> None:
    """A missing package and a failing one are statuses with one line each; the others are timed."""
    peer = replace(OPPONENTS["liger"], open=opened)
    found = decoded(models, "peer", "eager_dynamic", also={"peer": peer})
    assert (found["peer"]["status"], found["peer"]["reason"], found["peer"]["runs"]) == (status, reason, [])
    assert found["eager_dynamic"]["status"] == "ok"


def test_a_patch_that_fails_halfway_is_undone(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Liger replaces in the library's module is put back, also when its patch then raises."""
    from transformers.models.llama import modeling_llama

    def halfway(**settings: Any) -> None:
        modeling_llama.LlamaRMSNorm = torch.nn.Identity
        raise RuntimeError("another version")

    patched = types.ModuleType("liger_kernel.transformers")
    patched.apply_liger_kernel_to_llama = halfway  # type: ignore[attr-defined]
    rope = types.ModuleType("liger_kernel.transformers.rope")
    rope.liger_rotary_pos_emb = None  # type: ignore[attr-defined]
    for module in (types.ModuleType("liger_kernel"), patched, rope):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    before = modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb
    record = decoded(models, "liger")["liger"]
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: another version")
    assert (modeling_llama.LlamaRMSNorm, modeling_llama.apply_rotary_pos_emb) == before


def test_repetitions_take_turns_in_changing_order(models: Models) -> None:
    """Each repetition goes through all opponents before the next begins, every second one backwards."""
    order: list[str] = []

    class Noting:
        note: str | None = None

        def __init__(self, session: Session, name: str) -> None:
            self._session, self._name = session, name

        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            order.append(self._name)
            return self._session.step(tokens)

    pair = {name: like_eager(lambda session, name=name: Noting(session, name)) for name in "ab"}  # type: ignore[misc]
    decoded(models, *pair, also=pair, tokens=1)
    before = PROTOCOL.checked_steps + PROTOCOL.warmup_steps + 1
    assert order == ["a"] * before + ["b"] * before + ["a", "b", "b", "a", "a", "b"]


def test_the_runs_are_what_the_watch_tells(models: Models) -> None:
    """Host's time and the steps of each repetition are kept as they were taken."""
    found = decoded(models, "eager_dynamic", watch=Clock())
    assert found["eager_dynamic"]["runs"] == [
        {"repetition": at, "tokens": 4, "wall_ns": 4 * (at + 1) * STEP_NS, "step_ns": [(at + 1) * STEP_NS] * 4}
        for at in range(3)
    ]


def test_a_slow_opponent_decodes_fewer_tokens(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a repetition would take too long it holds fewer steps, though never fewer than four."""
    monkeypatch.setattr(measure, "_SLOW_NS", 1)
    found = decoded(models, "eager_dynamic", tokens=9)
    assert {run["tokens"] for run in found["eager_dynamic"]["runs"]} == {4}


def test_int4_is_judged_by_its_own_weights(models: Models) -> None:
    """The float32 model of INT4 has the weights that the integers stand for in its layers, and only there."""
    exact, stored = models.exact("bfloat16"), models.exact("int4")
    for name, weight in stored.named_parameters():
        base = models.base.get_parameter(name)
        quantises = "_proj." in name
        assert torch.equal(weight, quantised(base) if quantises else base.float())
        assert torch.equal(exact.get_parameter(name), base.float())


def test_a_sharing_copy_takes_no_memory_for_weights(models: Models) -> None:
    """Its parameters are the model's own; its modules are not, so that they can be patched."""
    made = sharing(models.base)
    assert all(a is b for a, b in zip(made.parameters(), models.base.parameters(), strict=True))
    assert made.model.layers[0] is not models.base.model.layers[0]


def test_the_decoder_of_this_project_takes_part() -> None:
    """Patched models pass with either cache, dense or in INT4. In float16: the interpreter has no bfloat16 dot."""
    names = ["triton_static", "triton_int4_paged"]
    small = Models(
        replace(SIZES, layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1), DEVICE, 64, 0, torch.float16
    )
    found = decoded(small, *names, checked_rows=2, repetitions=1, tokens=1)
    assert {name: (record["status"], record["reason"]) for name, record in found.items()} == dict.fromkeys(
        names, ("ok", None)
    )


# Where a step goes.


def step_of(start_ns: int, *kernels: tuple[str, int, int]) -> list[Activity]:
    """A mark, and then kernels by name, begin and end after it."""
    mark = Activity("at::cuda::(anonymous namespace)::spin_kernel(long)", start_ns - 2, start_ns - 1)
    return [mark, *(Activity(name, start_ns + begin, start_ns + end) for name, begin, end in kernels)]


LAST_MARK = step_of(10**6)


def test_the_traced_step_is_the_median_one() -> None:
    """The first step does not count; of the others, in whatever order they are told, that of median span is kept."""
    steps = [step_of(at * 1000, ("a", 0, span)) for at, span in enumerate((900, 30, 10, 20), 1)]
    told = [each for step in reversed([*steps, LAST_MARK]) for each in step]
    found = profiling.facts([Activity("before all", 0, 1), *told], 3)
    assert found == {
        "steps": 3,
        "span_ns": 20,
        "kernel_ns": 20,
        "kernels": [{"name": "a", "launches": 1, "ns": 20}],
    }


def test_time_in_which_kernels_overlap_counts_once() -> None:
    """A kernel counts from when all before it have ended, so that kernels and gaps make up the span."""
    step = step_of(100, ("a", 0, 40), ("b", 30, 50), ("b", 35, 45), ("a", 60, 90))
    found = profiling.facts([*step_of(1, ("a", 0, 5)), *step, *LAST_MARK], 1)
    assert (found["span_ns"], found["kernel_ns"]) == (90, 40 + 20 + 10 + 30)
    assert found["kernels"] == [{"name": "a", "launches": 2, "ns": 70}, {"name": "b", "launches": 2, "ns": 10}]


def test_many_kernels_are_told_as_twenty_and_the_rest() -> None:
    """The twenty that take longest have a row each; the others share one, with all their launches and time."""
    kernels = [(f"k{at:02}", 1000 * at, 1000 * at + 100 - at) for at in range(23)]
    rows = profiling.facts([*step_of(1, ("a", 0, 5)), *step_of(100, *kernels), *LAST_MARK], 1)["kernels"]
    assert [row["name"] for row in rows] == [f"k{at:02}" for at in range(20)] + ["other"]
    assert rows[-1] == {"name": "other", "launches": 3, "ns": 80 + 79 + 78}


@pytest.mark.parametrize(
    "told",
    [
        [],
        [Activity("a", 0, 1)],
        [*step_of(10, ("a", 0, 1)), *LAST_MARK],
        [*step_of(10, ("a", 0, 1)), *step_of(20), *LAST_MARK],
    ],
)
def test_steps_that_are_not_told_are_no_zeros(told: list[Activity]) -> None:
    """Without a mark for each step, or with a step of no kernel, there is no profile."""
    with pytest.raises(ProfileError, match="expected 2 steps set apart by marks"):
        profiling.facts(told, 1)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_row_kernel", "_row_kernel"),
        ("void at::native::copy<128, at::f<int>(int)::{lambda()#1}>(int, at::x)", "at::native::copy"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 5>(float*)", "softmax_warp_forward"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(T<int>)", "internal::gemvx::kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("(", "("),
        ("k" * 200, "k" * 120),
    ],
)
def test_a_kernels_name_is_shortened(name: str, short: str) -> None:
    """What it returns, its template arguments and its parameters are cut; something is always left."""
    assert profiling.short(name) == short


class Played(Trace):
    """Runs the steps, and tells of each two kernels that last as long as its number."""

    def __init__(self) -> None:
        self.marks = 0

    def refusal(self, device: torch.device) -> str | None:
        return None

    def mark(self) -> None:
        self.marks += 1

    def of(self, work: Callable[[], None]) -> list[Activity]:
        work()
        steps = [step_of(at * 1000, ("a", 0, at), ("b", at, 2 * at)) for at in range(1, self.marks)]
        return [each for step in [*steps, LAST_MARK] for each in step]


def test_steps_are_traced_after_a_warm_up() -> None:
    """A session of its own goes as far as a timed one does before its times; then one step more than counts is made."""
    made: list[int] = []

    class Counting:
        note: str | None = None

        def __init__(self, session: Session) -> None:
            self._session = session

        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            made.append(len(tokens))
            return self._session.step(tokens)

    lines: list[str] = []
    trace, own = Played(), {"own": like_eager(Counting)}
    found = profiling.profiles(Models(SIZES, CPU, 64, seed=0), 2, CONTEXT, own, PROTOCOL, lines.append, own, trace)
    assert (len(made), trace.marks) == (PROTOCOL.checked_steps + PROTOCOL.warmup_steps + 4, 5)
    kernels = [{"name": "a", "launches": 1, "ns": 3}, {"name": "b", "launches": 1, "ns": 3}]
    profile = {"steps": 3, "span_ns": 6, "kernel_ns": 6, "kernels": kernels}
    assert found == {"own": {"profile": profile, "profile_reason": None}}
    assert lines == ["own: where a step goes"]


def test_what_cannot_be_traced_says_why(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUPTI, with a decoder that fails or with steps nobody tells, the profile is null with a reason."""

    class Blind(Played):
        def of(self, work: Callable[[], None]) -> list[Activity]:
            return []

    also = {"broken": replace(OPPONENTS["liger"], open=broken), "eager": OPPONENTS["eager_static"]}

    def reasons(trace: Trace | None) -> list[str]:
        found = profiling.profiles(models, 1, CONTEXT, also, PROTOCOL, opponents=also, trace=trace)
        assert all(each["profile"] is None for each in found.values())
        return [each["profile_reason"] for each in found.values()]

    assert reasons(None) == ["a device of type cpu has no CUPTI"] * 2
    assert reasons(Blind()) == [
        "RuntimeError: no kernel for this device",
        "ProfileError: expected 4 steps set apart by marks, found kernels of each: [].",
    ]
    monkeypatch.setattr(Models, "prefill", lambda *anything: broken(anything))
    assert reasons(Blind()) == ["RuntimeError: no kernel for this device"] * 2


@pytest.mark.gpu
def test_cupti_tells_the_kernels_of_a_graph() -> None:
    """On a GPU each launch of a replayed CUDA graph is told, and what tracing marks is left out."""
    x = torch.ones(1 << 20, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(4):
            x.add_(1)
    trace = Trace()

    def work() -> None:
        for _ in range(4):
            trace.mark()
            graph.replay()
        trace.mark()

    assert trace.refusal(DEVICE) is None
    found = profiling.facts(trace.of(work), 3)
    assert [row["launches"] for row in found["kernels"]] == [4]
    assert found["span_ns"] >= found["kernel_ns"] > 0


PARTS = {
    "_attend_kernel": "Attention",
    "pytorch_flash::flash_fwd_splitkv_kernel": "Attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "Attention",
    "triton_poi_fused__scaled_dot_product_efficient_attention_clone_3": "Attention",
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_35_16x128x128_1x4x1": "Attention",
    "cudnn::fusion::lean_reduction_kernel": "Attention",
    "triton_poi_fused__scaled_dot_product_cudnn_attention__unsafe_view_add_arange_clone_expand_le": "Attention",
    "_row_kernel": "Matrix products",
    "_vector_kernel": "Matrix products",
    "_streamed_kernel": "Matrix products",
    "_stream_kernel": "Matrix products",
    "nvjet_tst_64x8_64x16_2x1_v_bz_TNT": "Matrix products",
    "nvjet_sm90_tst_128x8_64x12_2x1_v_bz_splitK_TNT": "Matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64": "Matrix products",
    "internal::gemvx::kernel": "Matrix products",
    "gemv2T_kernel_val": "Matrix products",
    "cutlass::Kernel2": "Matrix products",
    "cublasLt::splitKreduce_kernel": "Matrix products",
    "triton_tem_fused_mm_t_7": "Matrix products",
    "triton_red_fused_mm_0": "Matrix products",
    "_rows_kernel": "Norms",
    "triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0": "Norms",
    "triton_red_fused__to_copy__unsafe_view_add_mean_mul_pow_rsqrt_14": "Norms",
    "_rotate_kernel": "Other kernels",
    "triton_poi_fused_bmm_cat_cos_mul_sin_1": "Other kernels",
    "triton_poi_fused_mul_silu_5": "Other kernels",
    "triton_poi_fused_addmm_view_3": "Other kernels",
    "triton_poi_fused__unsafe_view_mul_silu_7": "Other kernels",
    "triton_poi_fused_add_copy__16": "Other kernels",
    "triton_poi_fused__unsafe_view_add_arange_index_copy_transpose_view_3": "Other kernels",
    "at::native::reduce_kernel": "Other kernels",
    "Memcpy DtoD": "Other kernels",
    "other": "Other kernels",
    "never_heard_of": "Other kernels",
}


@pytest.mark.parametrize("kernel", PARTS)
def test_a_kernel_belongs_to_a_part_by_its_name(kernel: str) -> None:
    """Ours, the libraries' and Inductor's are told apart; what nobody knows is other."""
    assert report.part_of(kernel) == PARTS[kernel]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm"])
def test_no_norm_of_the_model_has_the_name_of_a_product(norm: str, rows: int) -> None:
    """At the published width a norm holds whole rows, so that ``_streamed_kernel`` is the gated projection's alone."""
    assert _launch.choose(norm, "sm_90", itemsize=2, rows=rows, columns=4096)["kernel"] == "rows"


def test_what_stands_for_the_rest_is_no_kernels_name() -> None:
    """The artifact's row of all but the twenty longest is told in words."""
    profile = {"steps": 3, "span_ns": 4, "kernels": [{"name": "other", "launches": 5, "ns": 1}]}
    known = {"reason": None, "weights": "bfloat16", "profile": profile}
    found = made_up(c64=({**ours("static", 1.4, 1.2), **known},))
    assert [row[4:] for row in report.kernel_rows(found)] == [["all others", "Other kernels", "5", "0.0", "25.0 %"]]


def test_the_parts_of_a_step_are_its_span() -> None:
    """Every kernel counts once, and what is left of the span are the gaps."""
    names = ("_attend_kernel", "_row_kernel", "_rows_kernel", "_rotate_kernel", "other")
    kernels = [{"name": name, "launches": 2, "ns": 10**at} for at, name in enumerate(names)]
    made = report.parts({"span_ns": 30_000, "kernels": kernels})
    assert made == {
        "Attention": 1,
        "Matrix products": 10,
        "Norms": 100,
        "Other kernels": 11_000,
        "Gaps": 30_000 - 11_111,
    }
    assert sum(made.values()) == 30_000


# Compiling ahead.


def plan(folder: Path, *names: str) -> str:
    path = folder / "plan.json"
    small = replace(SIZES, layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1)
    body = {"sizes": small.record(), "protocol": asdict(PROTOCOL), "batch": 1, "context": 8, "names": names}
    path.write_text(json.dumps(body), encoding="utf-8")
    return str(path)


def test_compiling_ahead_runs_each_opponent_once(tmp_path: Path) -> None:
    """A process of it ends with 0 when all made a step, and with 1 when one could not."""
    assert prime.main([plan(tmp_path, "eager_dynamic", "eager_static")]) == 0
    peer = replace(OPPONENTS["liger"], open=missing)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prime, "OPPONENTS", {**OPPONENTS, "liger": peer})
        assert prime.main([plan(tmp_path, "liger")]) == 1


def test_cells_compile_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are started before one is waited for; one that outlasts its time is ended, and told."""
    started: list[dict[str, Any]] = []

    class Child:
        def __init__(self, command: list[str], **options: Any) -> None:
            assert command[1:3] == ["-m", "triton_kernel_lab.endtoend.prime"]
            self.batch = json.loads(Path(command[3]).read_text())["batch"]
            started.append(json.loads(Path(command[3]).read_text()))
            self.killed = False

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *error: object) -> None:
            assert self.killed is (self.batch == 8)

        def wait(self, seconds: float) -> int:
            assert len(started) == 2
            if self.batch == 8:
                raise subprocess.TimeoutExpired("prime", seconds)
            return 0

        def kill(self) -> None:
            self.killed = True

    monkeypatch.setattr(subprocess, "Popen", Child)
    lines: list[str] = []
    prime.prime(
        SIZES, PROTOCOL, [(1, 64), (8, 64)], ["triton_static", "eager_dynamic", "torch_compile"], 9.0, lines.append
    )
    assert [each["names"] for each in started] == [["triton_static", "torch_compile"]] * 2
    assert lines == [
        "compiled ahead for batch 1, context 64: done",
        "compiled ahead for batch 8, context 64: out of time",
    ]


# What follows from the times.


def test_weights_and_cache_in_bytes() -> None:
    """By closed form for Llama-3-8B's layers: 218,103,808 weights each, and 4 KiB of cache a token."""
    model = {"layers": 16, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
    model |= {"vocab": 32000, "int4_group": 128}
    linears, rest = 218_103_808, 2 * (33 * 4096 + 32000 * 4096)
    assert figures.weight_bytes(model, "bfloat16") == 16 * 2 * linears + rest
    assert figures.weight_bytes(model, "int4") == 16 * (linears // 2 + linears // 128 * 2) + rest
    assert figures.cache_bytes(model, 8, 8192) == 8 * 8192 * 16 * 4096


def test_the_bytes_are_those_of_the_model(models: Models) -> None:
    """What is counted by formula is every parameter but the embedding table."""
    held = sum(each.nbytes for name, each in models.base.named_parameters() if "embed_tokens" not in name)
    assert figures.weight_bytes(MODEL, "bfloat16") == held


def opponent(name: str, *walls_ns: int, tokens: int = 4, **changed: Any) -> dict[str, Any]:
    """A record whose repetitions take these times."""
    known = OPPONENTS[name]
    runs = [
        {"repetition": at, "tokens": tokens, "wall_ns": wall, "step_ns": [wall // tokens] * tokens}
        for at, wall in enumerate(walls_ns)
    ]
    check = {"max_error_ratio": 0.02, "rel_norm": 0.01, "limit_max_error_ratio": 0.04, "limit_rel_norm": 0.02}
    check |= {"greedy_agreeing": 7, "greedy_checked": 8}
    facts = {key: getattr(known, key) for key in ("role", "served_by", "weights", "cache")}
    made = {"name": name, **facts, "status": "ok", "reason": None, "prepare_ns": 10**9, "peak_bytes": 1 << 20}
    return made | {"check": check, "runs": runs} | changed


CEILING = {"bytes": 1 << 30, "p50_ns": 1 << 20, "bytes_per_s": 1024 * 10**9}


def test_the_floor_is_the_bytes_at_the_ceiling() -> None:
    """Weights and cache over the read rate; throughput and ratios follow from the median repetition."""
    absent = opponent("liger", status="unavailable", reason="none", check=None)
    made = figures.complete(
        {
            "batch": 8,
            "context": 1024,
            "opponents": [
                opponent("triton_static", 4000, 4400, 9000),
                opponent("torch_compile", 8000),
                opponent("torch_compile_reduce_overhead", 6600),
                absent,
            ],
        },
        MODEL,
        CEILING,
    )
    read = figures.weight_bytes(MODEL, "bfloat16") + figures.cache_bytes(MODEL, 8, 1024)
    assert made["cache_bytes"] == 8 * 1024 * 2 * 2 * 64 * 2
    assert made["opponents"][0]["derived"] == {
        "token_p50_ns": 1100,
        "step_p50_ns": 1100,
        "tokens_per_s": round(8e9 / 1100),
        "read_bytes": read,
        "floor_ns": round(read / 1024),
        "over_floor_ratio": round(1100 / round(read / 1024), 4),
        "speedup_over_torch_compile": 1.5,
    }
    assert made["opponents"][3]["derived"] is None


# The artifact, and the chain behind it.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "tree"
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20).root


@pytest.fixture
def project(original: Path, tmp_path: Path) -> Project:
    """A copy of a sound synthetic project that a test may spoil."""
    return find_project(Path(shutil.copytree(original, tmp_path / "tree")))


NAMES = ("triton_static", "triton_int4_static", "eager_dynamic", "torch_compile")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let each cell come out as made up; returns what was asked for."""
    asked: list[tuple[int, int]] = []

    def cell(models: Models, batch: int, context: int, names: Any, *rest: Any) -> dict[str, Any]:
        asked.append((batch, context))
        times = {"triton_static": 8_000_000, "triton_int4_static": 4_000_000, "eager_dynamic": 320_000_000}
        records = [opponent(name, times.get(name, 20_000_000)) for name in NAMES]
        records.append(opponent("liger", status="unavailable", reason="ImportError: none", check=None))
        return {"batch": batch, "context": context, "opponents": records}

    monkeypatch.setattr(measure, "cell", cell)
    return asked


def request(**changed: Any) -> Request:
    return replace(Request(batches=(1, 8), contexts=(1024,), sizes=SIZES), **changed)


def test_the_artifact_keeps_cells_and_is_verified(project: Project, played: list[tuple[int, int]]) -> None:
    """Raw times, figures and digests are written; report and README print them; an edited figure is found."""
    path = decode_e2e.run(project, request())
    made = artifacts.read(path, "decode_e2e")
    assert played == [(1, 1024), (8, 1024)]
    assert [record["path"].rpartition("/")[2] for record in made["inputs"]] == ["environment.json", "ceilings.json"]
    # Outside git nobody can tell what was timed.
    assert (made["status"], made["claim_kind"]) == ("measured", "exploratory")
    assert any("README.md" in problem or "results.md" in problem for problem in verify.run(project))
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    page = (project.reports / "index.html").read_text(encoding="utf-8")
    assert "<td>Triton</td><td>static</td><td>int4</td>" in page
    assert f"{project.runner}/<wbr>decode_e2e.json" in page
    synthetic.edit(path, lambda artifact: artifact["cells"][1]["opponents"][0]["derived"].update(floor_ns=1))
    problem = verify.run(project)[0]
    assert problem.startswith(
        f"artifacts/{project.runner}/decode_e2e.json: $.cells[1].opponents[0].derived: expected {{"
    )


TRACED = {
    "steps": 3,
    "span_ns": 1_900_000,
    "kernel_ns": 1_700_000,
    "kernels": [
        {"name": "_row_kernel", "launches": 49, "ns": 1_500_000},
        {"name": "_attend_kernel", "launches": 16, "ns": 150_000},
        {"name": "_rows_kernel", "launches": 33, "ns": 50_000},
    ],
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, played: list[tuple[int, int]]) -> list[tuple[int, int, list[str]]]:
    """Let the steps of each cell be traced as made up, once all cells are timed; returns what was asked for."""
    asked: list[tuple[int, int, list[str]]] = []

    def profiles(models: Models, batch: int, context: int, names: list[str], *rest: Any) -> dict[str, Any]:
        assert len(played) == 2
        asked.append((batch, context, names))
        return {name: {"profile": TRACED, "profile_reason": None} for name in names}

    monkeypatch.setattr(profiling, "profiles", profiles)
    return asked


def test_steps_are_traced_once_when_all_is_timed(project: Project, traced: list[tuple[int, int, list[str]]]) -> None:
    """Each cell keeps where the steps of ours go; a later run asks no more, and the artifact is verified."""
    path = decode_e2e.run(project, request())
    cells = artifacts.read(path, "decode_e2e")["cells"]
    assert traced == [(1, 1024, ["triton_static"]), (8, 1024, ["triton_static"])]
    assert [[each.get("profile") for each in cell["opponents"]] for cell in cells] == [[TRACED, *[None] * 4]] * 2
    decode_e2e._profile(None, cells[0], PROTOCOL, print)  # type: ignore[arg-type]
    assert len(traced) == 2
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    synthetic.edit(path, lambda artifact: artifact["cells"][1]["opponents"][0]["profile"].update(kernel_ns=1_699_999))
    assert verify.run(project)[0] == (
        f"artifacts/{project.runner}/decode_e2e.json: $.cells[1].opponents[0].profile.kernels: "
        "expected at most 1699999 ns together, found 1700000; run `python benchmarks/decode_e2e.py`."
    )


def test_a_profile_that_is_none_prints_nothing(project: Project, played: list[tuple[int, int]]) -> None:
    """Without a GPU each of those to be traced has a reason, and neither zeros nor a table are printed."""
    found = artifacts.read(decode_e2e.run(project, request()), "decode_e2e")
    ours = found["cells"][0]["opponents"][0]
    assert (ours["profile"], ours["profile_reason"]) == (None, "a device of type cpu has no CUPTI")
    for text in (report.section(found), report.block(found), facts.model(found)):
        assert "Where a step goes" not in text


@pytest.mark.parametrize(("stale", "locked"), [(True, True), (True, False), (False, True)])
def test_only_a_stale_artifact_may_be_of_earlier_ceilings(
    project: Project, played: list[tuple[int, int]], stale: bool, locked: bool
) -> None:
    """Its floors then go by the rung that it kept; without DVC's record, or if fresh, it makes them an edited file."""
    path, ceilings = decode_e2e.run(project, request()), project.artifacts / "ceilings.json"

    def slower(artifact: dict[str, Any]) -> None:
        for rung in artifact["ladders"]:
            rung["samples_ns"] = [2 * ns for ns in rung["samples_ns"]]

    def lock() -> None:
        name, data = ceilings.relative_to(project.root).as_posix(), ceilings.read_bytes()
        out = {"path": name, "hash": "md5", "md5": hashlib.md5(data).hexdigest(), "size": len(data)}
        (project.root / "dvc.lock").write_text(json.dumps({"stages": {"ceilings": {"outs": [out]}}}), encoding="utf-8")

    lock()
    synthetic.edit(ceilings, slower)
    if locked:
        lock()
    if stale:
        synthetic.edit(path, lambda artifact: artifact["producer"].update(source_sha256="0" * 64))
    synthetic.run_pure_stages(project)
    problems = verify.run(project)
    assert bool(problems) != (stale and locked)
    assert all(f"artifacts/{project.runner}/ceilings.json: expected sha256" in problem for problem in problems)
    if stale and locked:
        synthetic.edit(path, lambda artifact: artifact["cells"][0]["opponents"][0]["derived"].update(floor_ns=1))
        synthetic.run_pure_stages(project)
        assert any(".opponents[0].derived: expected" in problem for problem in verify.run(project))


def test_an_artifact_of_other_sources_is_called_stale(project: Project, played: list[tuple[int, int]]) -> None:
    """With another digest of sources in it results.md, README, page and verify say so; the artifact stays sound."""
    path = decode_e2e.run(project, request())
    places = (project.reports / "results.md", project.reports / "index.html", project.root / "README.md")
    synthetic.run_pure_stages(project)
    assert sources.stale(project) == []
    assert not any("Stale:" in place.read_text(encoding="utf-8") for place in places)
    # A stale one may name the record of the machine before, too.
    planted = {"source_sha256": "0" * 64}
    synthetic.edit(path, lambda artifact: artifact["producer"].update(planted))
    synthetic.edit(path, lambda artifact: artifact["inputs"][0].update(sha256="0" * 64))
    assert sources.stale(project) == [
        f"artifacts/{project.runner}/decode_e2e.json: its sources changed since; run `python benchmarks/decode_e2e.py`."
    ]
    assert any("results.md" in problem for problem in verify.run(project))
    synthetic.run_pure_stages(project)
    assert verify.run(project) == []
    results, page, text = (place.read_text(encoding="utf-8") for place in places)
    said = "**Stale:** the sources of `decode_e2e` have changed since; `python benchmarks/decode_e2e.py` on this GPU"
    assert said in results
    assert said in readme.extract(text, name="decode")
    assert "<strong>Stale:</strong> the sources of <code>decode_e2e</code> have changed since" in page


def test_cells_of_the_same_code_stay_and_of_other_code_do_not(
    project: Project, played: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run adds cells to those of the same sources and environment; with other sources it begins anew."""
    path = decode_e2e.run(project, request(batches=(8,)))
    decode_e2e.run(project, request(batches=(1,), contexts=(1024, 8192)))
    cells = artifacts.read(path)["cells"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 1024), (8, 1024), (1, 8192)]
    monkeypatch.setattr(decode_e2e, "tool_digest", lambda *names: "0" * 64)
    decode_e2e.run(project, request(batches=(1,)))
    assert [(cell["batch"], cell["context"]) for cell in artifacts.read(path)["cells"]] == [(1, 1024)]


def test_no_cell_is_begun_when_the_time_is_up(project: Project, played: list[tuple[int, int]]) -> None:
    """The first cell is always begun and written; those that are left out are told."""
    lines: list[str] = []
    decode_e2e.run(project, request(seconds=-1.0), lines.append)
    assert played == []
    assert lines == [f"batch {batch}, context 1024: not begun after -1.0 s" for batch in (1, 8)]


def test_a_cell_that_fails_leaves_the_others(
    project: Project, played: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that does not fit the device is told, and the cells before and after it are written."""
    play = measure.cell

    def cell(models: Models, batch: int, *rest: Any) -> dict[str, Any]:
        if batch == 8:
            raise torch.OutOfMemoryError("no room")
        return play(models, batch, *rest)

    monkeypatch.setattr(measure, "cell", cell)
    lines: list[str] = []
    path = decode_e2e.run(project, request(batches=(1, 8, 2)), lines.append)
    assert [each["batch"] for each in artifacts.read(path)["cells"]] == [1, 2]
    assert lines == ["batch 8, context 1024: failed, OutOfMemoryError: no room"]


def test_an_unknown_opponent_is_one_sentence(project: Project) -> None:
    """The message names those that are known."""
    with pytest.raises(DecodeError, match=r"--opponents: expected some of triton_static, .*, found 'me'\."):
        decode_e2e.run(project, request(opponents=("me",)))


def test_runner_cpu_is_not_measured(tmp_path: Path) -> None:
    """Without a GPU the artifact says so, and so do report and README."""
    found = synthetic.project(tmp_path, derive=False, measured=False, runner="cpu")
    made = artifacts.read(decode_e2e.run(found, request()))
    assert (made["status"], made["cells"]) == ("not_measured", [])
    assert report.section(made) == "## Decoding a whole model\n\nNot measured: runner cpu has no GPU."
    assert report.block(made) == "Not measured: runner cpu has no GPU."


def test_the_command_line_tells_an_error_in_one_sentence(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the runner's GPU the script ends with 1 and says what is missing."""
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert decode_e2e.main(["--batch", "1", "--context", "64"]) == 1
    assert capsys.readouterr().err.startswith(f"error: runner {project.runner} needs its GPU")


# The report.


def artifact(project: Project) -> Artifact:
    return artifacts.read(decode_e2e.run(project, request()))


def test_the_section_has_a_row_a_decoder(project: Project, played: list[tuple[int, int]]) -> None:
    """Each timed decoder of each cell is a row; the others stand below with their reason."""
    text = report.section(artifact(project))
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if "Triton" in line]
    dense = [row for row in rows if row[2:5] == ["Triton", "static", "bfloat16"]]
    assert [row[:2] for row in dense] == [["1", "1024"], ["8", "1024"]]
    # 2 ms a token against 5 of torch.compile.
    assert dense[1][5:8] == ["4000", "2.000", "2.000"]
    assert dense[1][10] == "2.500x"
    assert "| unavailable | ImportError: none |" in text
    assert "2 layers, 128 wide" in text


def test_the_readme_shows_the_best_of_each_kind(project: Project, played: list[tuple[int, int]]) -> None:
    """A row a cell: ours, INT4, torch.compile, Liger and eager in ms, then floor, ratios and throughput."""
    text = report.block(artifact(project))
    row = [part.strip() for part in text.splitlines()[3].strip("|").split("|")]
    assert row[:7] == ["8", "1024", "2.000", "1.000", "5.000", "-", "80.000"]
    assert row[9:] == ["2.500x", "5.000x", "4000"]


def made_up(**cells: tuple[dict[str, Any], ...]) -> Artifact:
    """What the aims are judged by: cells of batch 1 by their context, each of some rows of our decoder."""
    return {"cells": [{"batch": 1, "context": int(name[1:]), "opponents": list(rows)} for name, rows in cells.items()]}


def ours(cache: str, speedup: float | None, over: float, step_ns: int = 990, weights: str = "") -> dict[str, Any]:
    derived = {"speedup_over_torch_compile": speedup, "over_floor_ratio": over}
    derived |= {"step_p50_ns": step_ns, "token_p50_ns": 1000}
    return {"name": f"triton_{weights}{cache}", "cache": cache, "derived": derived}


def test_what_misses_its_aim_is_told_with_its_figures() -> None:
    """Each cell with a bfloat16 row below 1.5x or above 1.35 floors is named, cache by cache, with its steps' share."""
    said = report.missed(
        made_up(
            c64=(ours("static", 1.408, 1.24), ours("paged", 1.6, 1.2, step_ns=10)),
            c128=(ours("static", 1.5, 1.35), ours("paged", 1.49, 1.42, step_ns=950)),
            c256=(ours("static", 1.7, 1.3), ours("static", 0.5, 9.0, weights="int4_")),
            c512=(ours("static", None, 1.4), {"name": "triton_paged", "cache": "paged", "derived": None}),
        )
    )
    assert said.startswith(
        "Aimed at in bfloat16: 1.5x torch.compile's tokens a second, and no more than 1.35x the floor. "
        "Missed: batch 1, context 64 (static 1.408x torch.compile); "
        "batch 1, context 128 (paged 1.490x torch.compile and 1.42x the floor); "
        "batch 1, context 512 (static 1.40x the floor). "
        "There the median device step is 95.0 % to 99.0 % of the time a token. "
    )


def test_where_no_aim_is_missed_nothing_is_told() -> None:
    """A row at both aims, or one without a torch.compile to compare with, is no miss, and no sentence is written."""
    assert report.missed(made_up(c64=(ours("static", 1.5, 1.35), ours("paged", None, 1.0)))) == ""


def test_section_readme_and_page_tell_what_is_missed(project: Project, played: list[tuple[int, int]]) -> None:
    """The same sentences stand below the conditions wherever a whole model is reported; the block names its columns."""
    found = artifact(project)
    assert (missed := report.missed(found)).count("x the floor)") == len(found["cells"])
    assert f"\n\n{missed}\n\n|" in report.section(found)
    block = report.block(found)
    assert block.endswith(f" The floor is that of bfloat16 weights. {missed}")
    assert "vs torch.compile is against the faster of its default mode and reduce-overhead." in block
    assert "<p>Aimed at in bfloat16: 1.5x" in facts.model(found)
    # What no column of the README's shows is told where there is one.
    told = [" Greedy tokens are those" in text for text in (report.section(found), facts.model(found), block)]
    assert told == [True, True, False]


def test_where_a_step_goes_stands_below_what_is_missed(
    project: Project, traced: list[tuple[int, int, list[str]]]
) -> None:
    """Part by part in us, beside the traced step and the step as timed; the floor by what is read."""
    found = artifact(project)
    made = report.part_rows(found)
    times = ["150.0", "1500.0", "50.0", "-", "200.0"]
    assert made[0] == ["1", "1024", "Triton", "static", *times, "1900.0", "2000.0"]
    ceiling = found["read_ceiling"]["bytes_per_s"]
    for row, cell in zip(made[1::2], found["cells"], strict=True):
        derived = cell["opponents"][0]["derived"]
        cached = round(cell["cache_bytes"] * 1e6 / ceiling, 1)
        assert row[:4] == [str(cell["batch"]), "1024", "Floor", "-"]
        assert float(row[4]) == pytest.approx(cached, abs=0.11)
        assert float(row[4]) + float(row[5]) == pytest.approx(derived["floor_ns"] / 1000, abs=0.11)
        assert row[6:] == ["-", "-", "-", row[9], "-"]
    kernel = ["Triton", "static", "_row_kernel", "Matrix products", "49", "1500.0", "78.9 %"]
    assert report.kernel_rows(found)[0] == ["1", "1024", *kernel]
    assert report.block(found).endswith(report.traced(found))
    assert "is the one of median length of 3 in a row" in report.traced(found)
    assert "without tracing, and the traced ones are 95.0 % of it." in report.traced(found)
    section, page = report.section(found), facts.model(found)
    assert section.index(report.missed(found)) < section.index("### Where a step goes")
    assert "| _row_kernel" in section
    assert "<td>_row_kernel</td>" in page
    assert '<td class="n">1500.0</td>' in page


def test_only_who_misses_an_aim_and_who_is_aimed_at_are_told() -> None:
    """A cell that reaches both is left out, a cache that reaches both too, and a profile that is none."""
    missing, reaching = ours("static", 1.4, 1.2), ours("paged", 1.6, 1.2)
    compiled = {"name": "torch_compile_reduce_overhead", "cache": "static", "derived": {"step_p50_ns": 3}}
    for each in (missing, reaching, compiled):
        each["profile"] = TRACED
    found = made_up(
        c64=(missing, reaching, compiled), c128=(reaching, compiled), c256=({**missing, "profile": None}, compiled)
    )
    told = [(cell["context"], [each["name"] for each in some]) for cell, some in report._traced(found)]
    assert told == [(64, ["triton_static", "torch_compile_reduce_overhead"])]
    assert report.traced(made_up(c128=(reaching, compiled))) == ""


def test_what_was_never_measured_is_told(project: Project) -> None:
    """Without the artifact README and page say how to make it, and results.md has no section."""
    assert report.section(None) == ""
    page = (project.reports / "index.html").read_text(encoding="utf-8")
    assert "<p>Not measured: python benchmarks/decode_e2e.py was not run.</p>" in page
    text = readme.extract((project.root / "README.md").read_text(encoding="utf-8"), name="decode")
    assert text == "Not measured yet: `python benchmarks/decode_e2e.py` measures it on this runner."
