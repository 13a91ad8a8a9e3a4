"""One cell: every opponent on the same prompt, checked, timed in turns, and checked again."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.endtoend.model import Models
from triton_kernel_lab.endtoend.opponents import OPPONENTS, Opponent, Setting
from triton_kernel_lab.endtoend.reference import Reference
from triton_kernel_lab.endtoend.sessions import Session
from triton_kernel_lab.endtoend.watch import Laps, Watch, watch_for
from triton_kernel_lab.lab import check

__all__ = ["Log", "Protocol", "cell", "forced_setting", "sentence"]

Log = Callable[[str], None]

# A repetition of a slow opponent holds fewer tokens, so that it does not set the pace.
_SLOW_NS = 400_000_000
_FEWEST = 4
# What a decoder may be off beside eager, and at most: a tenth in norm, as an operator may. What bfloat16 rounds in
# many layers adds up to more than that at the worst of so many logits, for eager itself. Zeros are off by a whole norm.
_EAGER_FACTOR = 2.0
_MOST = check.Limit(max_error_ratio=0.5, rel_norm=0.1)


@dataclass(frozen=True)
class Protocol:
    """How much is done in a cell, in steps, and the seed of its tokens."""

    checked_rows: int = 2
    checked_steps: int = 4
    warmup_steps: int = 4
    repetitions: int = 5
    tokens: int = 16
    seed: int = 20260
    profiled_steps: int = 3

    @property
    def steps(self) -> int:
        """The most steps that an opponent makes: one more is made to read its memory."""
        return self.checked_steps + self.warmup_steps + 1 + self.repetitions * self.tokens


@dataclass
class _Entrant:
    """An opponent in a cell: its session, all that it was fed, what it made of that, and its record so far.

    ``tokens`` is how many steps a repetition of its holds.
    """

    opponent: Opponent
    record: dict[str, Any]
    session: Session | None = None
    fed: list[torch.Tensor] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    greedy: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    tokens: int = 0

    @property
    def ready(self) -> bool:
        return self.session is not None and self.record["status"] == "ok"

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step; its logits, in memory that the next may overwrite."""
        assert self.session is not None
        self.fed.append(tokens)
        self.logits = self.session.step(tokens)
        self.greedy = self.logits.argmax(-1)
        return self.logits

    def follow(self) -> None:
        """One step with the likeliest tokens."""
        self.feed(self.greedy)

    def drop(self, status: str, reason: str) -> None:
        """Let go of the session: what it holds is large, and nobody times it."""
        self.record |= {"status": status, "reason": reason, "runs": []}
        self.session = None


class _Judge:
    """The float32 references of a cell, by what the weights are, and the limit that eager's own error sets."""

    def __init__(self, models: Models, prompt: torch.Tensor, forced: torch.Tensor, rows: int) -> None:
        self._models, self._prompt, self._forced = models, prompt[:rows], forced[:rows]
        self._references: dict[str, Reference] = {}
        self._expected: dict[str, torch.Tensor] = {}
        self.bound = check.limit(models.dtype, None)

    def settle(self, eager: Sequence[torch.Tensor]) -> None:
        """Take the limit from the eager model's logits [B, V] after each forced token."""
        self.bound = _limit(self._models.dtype, check.measure(self._stack(eager), self.expected("bfloat16")))

    def expected(self, weights: str) -> torch.Tensor:
        """The reference's logits after each forced token, float32 [rows, steps, V]."""
        if weights not in self._expected:
            self._references[weights] = Reference(self._models, weights, self._prompt)
            self._expected[weights] = self._references[weights].logits(self._forced, self._forced.shape[1])
        return self._expected[weights]

    def _stack(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([each[: self._forced.shape[0]] for each in logits], 1)

    def before(self, weights: str, logits: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
        """The record of a check on the forced tokens, and what is wrong."""
        found, wanted = self._stack(logits), self.expected(weights)
        error = check.measure(found, wanted)
        agreeing = found.argmax(-1) == wanted.argmax(-1)
        record = {
            **{name: value for name, value in error.record().items() if name != "max_abs"},
            **{f"limit_{name}": value for name, value in self.bound.record().items()},
            "greedy_agreeing": int(agreeing.sum()),
            "greedy_checked": agreeing.numel(),
        }
        return record, check.verdict(error, self.bound)

    def after(self, weights: str, fed: Sequence[torch.Tensor], logits: torch.Tensor) -> list[str]:
        """What is wrong with the last logits, given all that was fed."""
        rows = self._forced.shape[0]
        wanted = self._references[weights].logits(torch.stack(list(fed), 1)[:rows], 1)
        return check.verdict(check.measure(logits[:rows, None], wanted), self.bound)


def _limit(dtype: torch.dtype, eager: check.Error) -> check.Limit:
    """Twice the error of the eager model, from the floor of the dtype up to ``_MOST``."""
    floor = check.limit(dtype, None)
    if eager.max_error_ratio is None or eager.rel_norm is None:
        return floor
    return check.Limit(
        max(min(_EAGER_FACTOR * eager.max_error_ratio, _MOST.max_error_ratio), floor.max_error_ratio),
        max(min(_EAGER_FACTOR * eager.rel_norm, _MOST.rel_norm), floor.rel_norm),
    )


def forced_setting(models: Models, batch: int, context: int, protocol: Protocol) -> tuple[Setting, list[torch.Tensor]]:
    """What a cell gives each opponent, and the tokens int64 [B] that each is fed first; drawn by the seed."""
    generator = torch.Generator(models.device).manual_seed(protocol.seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(models.sizes.vocab, shape, generator=generator, device=models.device)

    # Rows have the strides of the likeliest tokens; for others a compiled step would be compiled once more.
    prompt, forced = drawn(batch, context), list(drawn(protocol.checked_steps, batch))
    return Setting(models, prompt, models.prefill(models.base, prompt), context + protocol.steps), forced


def cell(
    models: Models,
    batch: int,
    context: int,
    names: Sequence[str],
    protocol: Protocol,
    log: Log = lambda line: None,
    opponents: Mapping[str, Opponent] = OPPONENTS,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Measure one batch at one context length.

    Args:
        models: the model and its relatives.
        batch, context: sequences, and tokens of the prompt of each.
        names: of ``opponents``, in any order.
        protocol: how much is done.
        log: is told each step of it.
        opponents: who can be named.
        watch: takes the times; default: the device's own.

    Returns:
        ``{batch, context, opponents}`` as the artifact keeps it, without what is derived.
        An opponent that is wrong, cannot be had or fails has a status and a reason, and no times.
    """
    watch = watch or watch_for(models.device)
    log("prefill")
    setting, forced = forced_setting(models, batch, context, protocol)
    judge = _Judge(models, setting.prompt, torch.stack(forced, 1), protocol.checked_rows)
    with routing.strict(), torch.no_grad():
        eager = OPPONENTS["eager_dynamic"].open(setting)
        judge.settle([eager.step(tokens).clone() for tokens in forced])
        del eager
        entrants = [
            _enter(name, opponents[name], setting, judge, forced, protocol, log) for name in opponents if name in names
        ]
        _time(entrants, protocol, watch, models.device, log)
        _check_again(entrants, judge, models.device)
    return {"batch": batch, "context": context, "opponents": [entrant.record for entrant in entrants]}


def _enter(
    name: str,
    opponent: Opponent,
    setting: Setting,
    judge: _Judge,
    forced: Sequence[torch.Tensor],
    protocol: Protocol,
    log: Log,
) -> _Entrant:
    """Set an opponent up, check it, warm it up; what goes wrong with it is its record's affair."""
    log(name)
    facts = {key: getattr(opponent, key) for key in ("role", "served_by", "weights", "cache")}
    record = {"name": name, **facts, "status": "ok", "reason": None}
    record |= {"prepare_ns": None, "peak_bytes": None, "check": None, "runs": []}
    entrant = _Entrant(opponent, record)
    try:
        _prepare(entrant, setting, judge, forced, protocol)
    except ImportError as error:
        entrant.drop("unavailable", sentence(error))
    except Exception as error:
        # Whatever a library raises is why it has no figure here, and the others still have theirs.
        entrant.drop("failed", sentence(error))
    if not entrant.ready:
        _release(setting.models.device)
    return entrant


def _prepare(
    entrant: _Entrant, setting: Setting, judge: _Judge, forced: Sequence[torch.Tensor], protocol: Protocol
) -> None:
    started = time.perf_counter_ns()
    entrant.session = entrant.opponent.open(setting)
    logits = [entrant.feed(tokens).clone() for tokens in forced]
    _wait(setting.models.device)
    entrant.record |= {"prepare_ns": time.perf_counter_ns() - started, "reason": entrant.session.note}
    entrant.record["check"], wrong = judge.before(entrant.opponent.weights, logits)
    if wrong:
        entrant.drop("invalid", "; ".join(wrong))
        return
    _warm_up(entrant, setting.models.device, protocol)
    entrant.record["peak_bytes"] = _peak_bytes(entrant, setting.models.device)


def _warm_up(entrant: _Entrant, device: torch.device, protocol: Protocol) -> None:
    """Decode until all is compiled and captured, and see how many tokens a repetition may hold."""
    elapsed_ns = 1
    for _ in range(protocol.warmup_steps):
        _wait(device)
        started = time.perf_counter_ns()
        entrant.follow()
        _wait(device)
        elapsed_ns = max(time.perf_counter_ns() - started, 1)
    entrant.tokens = max(min(protocol.tokens, _SLOW_NS // elapsed_ns), min(_FEWEST, protocol.tokens))


def _peak_bytes(entrant: _Entrant, device: torch.device) -> int | None:
    """The most memory that a step needs beyond what was allocated before it."""
    if device.type != "cuda":
        entrant.follow()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    entrant.follow()
    _wait(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(before)


def _time(entrants: Sequence[_Entrant], protocol: Protocol, watch: Watch, device: torch.device, log: Log) -> None:
    """Repetitions in turns, in the other order every second time."""
    gc.collect()
    for repetition in range(protocol.repetitions):
        log(f"repetition {repetition + 1} of {protocol.repetitions}")
        for entrant in entrants if repetition % 2 == 0 else reversed(entrants):
            if entrant.ready:
                try:
                    laps = _decode(entrant, watch)
                except Exception as error:  # As when it is set up.
                    entrant.drop("failed", sentence(error))
                else:
                    run = {"repetition": repetition, "tokens": entrant.tokens, **asdict(laps)}
                    entrant.record["runs"].append(run)
                if not entrant.ready:
                    _release(device)


def _decode(entrant: _Entrant, watch: Watch) -> Laps:
    watch.start()
    for _ in range(entrant.tokens):
        entrant.follow()
        watch.mark()
    laps = watch.stop()
    # The check at the end looks at them, and whatever owns their memory may use it until then.
    entrant.logits = entrant.logits.clone()
    return laps


def _check_again(entrants: Sequence[_Entrant], judge: _Judge, device: torch.device) -> None:
    for entrant in entrants:
        if not entrant.ready:
            continue
        try:
            wrong = judge.after(entrant.opponent.weights, entrant.fed, entrant.logits)
        except Exception as error:  # Unchecked times are none.
            entrant.drop("failed", sentence(error))
        else:
            # All was timed: what the session holds is room for the other references.
            entrant.session = None
            if wrong:
                entrant.drop("invalid", f"after {len(entrant.fed)} steps: {'; '.join(wrong)}")
        _release(device)


def _release(device: torch.device) -> None:
    """Give the device back what was let go of: after a lack of memory the next one needs it in one piece."""
    gc.collect()
    if device.type == "cuda":
        # A device that failed for good says so again; each record has its reason by then.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sentence(error: Exception) -> str:
    """What went wrong, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
