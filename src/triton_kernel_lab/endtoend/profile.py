"""Where a step's time goes on the device: its kernels by name, as CUPTI tells them through torch.profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triton_kernel_lab import routing
from triton_kernel_lab.endtoend.measure import Log, Protocol, forced_setting, sentence
from triton_kernel_lab.endtoend.model import Models
from triton_kernel_lab.endtoend.opponents import OPPONENTS, Opponent

__all__ = ["PROFILED", "Activity", "ProfileError", "Trace", "facts", "profiles", "short"]

PROFILED = ("triton_static", "triton_paged", "torch_compile_reduce_overhead")
"""Who is profiled: what this project is judged by, and the fastest of the others."""

# The kernel of torch.cuda._sleep, which stands between one step and the next.
_MARK = "spin_kernel"
_MOST_ROWS = 20
_REST = "other"
_LONGEST = 120
# What a template function returns stands before its name.
_RESULT = re.compile(r"^(void|std::enable_if::type) ")


class ProfileError(ValueError):
    """Steps that cannot be told apart; one sentence says why."""


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill of the device, from its start to its end."""

    name: str
    start_ns: int
    end_ns: int


class Trace:
    """Runs work and tells what the device did meanwhile; ``mark`` sets one step apart from the next."""

    def refusal(self, device: torch.device) -> str | None:
        """Why nothing can be told of this device; None where it can."""
        if device.type != "cuda":
            return f"a device of type {device.type} has no CUPTI"
        if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
            return "this PyTorch was built without CUPTI"
        return None

    def mark(self) -> None:
        """Launch a kernel that no step launches."""
        torch.cuda._sleep(1)

    def of(self, work: Callable[[], None]) -> list[Activity]:
        """All that ran on the device while ``work`` did."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as made:
            work()
            torch.cuda.synchronize()
        profiler: Any = made.profiler
        return [
            Activity(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
            for event in profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
        ]


def profiles(
    models: Models,
    batch: int,
    context: int,
    names: Iterable[str],
    protocol: Protocol,
    log: Log = lambda line: None,
    opponents: Mapping[str, Opponent] = OPPONENTS,
    trace: Trace | None = None,
) -> dict[str, dict[str, Any]]:
    """Where a step of each opponent goes, in sessions of their own: what CUPTI does slows no timed step.

    Args:
        models: the model and its relatives.
        batch, context: as of ``measure.cell``, with the same prompt.
        names: of ``opponents``, such as were timed.
        protocol: how much is done.
        log: is told whose steps are traced.
        opponents: who can be named.
        trace: tells what the device did; default: torch.profiler.

    Returns:
        ``{profile, profile_reason}`` by name, as the artifact keeps them. What goes wrong is a reason, and no
        failure: the times stand without it.
    """
    trace = trace or Trace()
    if reason := trace.refusal(models.device):
        return {name: _none(reason) for name in names}
    try:
        with torch.no_grad():
            setting, forced = forced_setting(models, batch, context, protocol)
    except Exception as error:
        return {name: _none(sentence(error)) for name in names}
    made: dict[str, dict[str, Any]] = {}
    for name in names:
        log(f"{name}: where a step goes")
        try:
            with routing.strict(), torch.no_grad():
                session = opponents[name].open(setting)
                found = _steady(session.step, forced, protocol, trace)
        except Exception as error:
            made[name] = _none(sentence(error))
        else:
            made[name] = {"profile": found, "profile_reason": None}
    return made


def _none(reason: str) -> dict[str, Any]:
    return {"profile": None, "profile_reason": reason}


def _steady(
    step: Callable[[torch.Tensor], torch.Tensor], forced: Sequence[torch.Tensor], protocol: Protocol, trace: Trace
) -> dict[str, Any]:
    """Decode as far as a timed opponent has before its times are taken, then trace the steps that follow."""
    greedy = torch.empty(0)
    for tokens in forced:
        greedy = step(tokens).argmax(-1)

    def follow() -> None:
        nonlocal greedy
        greedy = step(greedy).argmax(-1)

    for _ in range(protocol.warmup_steps):
        follow()

    def work() -> None:
        # The first step waits for the tracer to wake up, and is left out.
        for _ in range(protocol.profiled_steps + 1):
            trace.mark()
            follow()
        trace.mark()

    return facts(trace.of(work), protocol.profiled_steps)


def facts(activities: Iterable[Activity], steps: int) -> dict[str, Any]:
    """The step of median span among ``steps``, as the artifact keeps it.

    A kernel's ``ns`` begin when all kernels that started before it have ended, so that their sum and the gaps between
    them are ``span_ns``, from the first start to the last end; ``kernel_ns`` is the sum of whole durations.

    Args:
        activities: of one step more, of which the first does not count, with a mark before each and after the last.
        steps: how many count, 1 or more.

    Raises:
        ProfileError: the marks do not set so many steps apart, or one of them is empty.
    """
    runs: list[list[Activity]] = []
    for each in sorted(activities, key=lambda activity: activity.start_ns):
        if _MARK in each.name:
            runs.append([])
        elif runs:
            runs[-1].append(each)
    counted = runs[1:-1]
    if len(counted) != steps or not all(counted):
        kernels = [len(run) for run in runs[:-1]]
        raise ProfileError(f"expected {steps + 1} steps set apart by marks, found kernels of each: {kernels}.")
    return {"steps": steps, **_told(sorted(counted, key=_span_ns)[(steps - 1) // 2])}


def _span_ns(run: Sequence[Activity]) -> int:
    return max(each.end_ns for each in run) - run[0].start_ns


def _told(run: Sequence[Activity]) -> dict[str, Any]:
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    busy_until = run[0].start_ns
    for each in run:
        name = short(each.name)
        launches[name] += 1
        times[name] += max(each.end_ns - max(each.start_ns, busy_until), 0)
        busy_until = max(busy_until, each.end_ns)
    ranked = sorted(times, key=lambda name: (-times[name], name))
    rows = [{"name": name, "launches": launches[name], "ns": times[name]} for name in ranked[:_MOST_ROWS]]
    if rest := ranked[_MOST_ROWS:]:
        counts = {"launches": sum(launches[name] for name in rest), "ns": sum(times[name] for name in rest)}
        rows.append({"name": _REST, **counts})
    durations = sum(each.end_ns - each.start_ns for each in run)
    return {"span_ns": _span_ns(run), "kernel_ns": durations, "kernels": rows}


def short(name: str) -> str:
    """A kernel's name without what it returns, its template arguments and its parameters."""
    kept, depth = [], 0
    for each in name.replace("(anonymous namespace)::", ""):
        if each == "(" and not depth:
            break
        if each == ">":
            depth = max(depth - 1, 0)
        elif each == "<":
            depth += 1
        elif not depth:
            kept.append(each)
    return _RESULT.sub("", "".join(kept).strip())[:_LONGEST] or name[:_LONGEST]
