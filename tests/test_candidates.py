"""What is timed side by side, and what is not to be had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_kernel_lab.analysis.cells import derive_cells
from triton_kernel_lab.cases._base import Baseline, Outputs, load, through_autograd
from triton_kernel_lab.lab import candidates
from triton_kernel_lab.project import kernel_names


def build(kernel: str, **changes: object) -> dict[str, candidates.Candidate]:
    case = dataclasses.replace(load(kernel), **changes)  # type: ignore[arg-type]  # Of fields by name.
    made = candidates.build(case, case.smoke[0], torch.float16, torch.device("cpu"))
    assert len({candidate.name for candidate in made}) == len(made)
    return {candidate.name: candidate for candidate in made}


@pytest.mark.parametrize("kernel", kernel_names())
def test_every_kernel_meets_eager_both_compilers_and_a_copy(kernel: str) -> None:
    """Ours comes first, and the anchor that the others are compared with last."""
    made = build(kernel)
    assert list(made)[:4] == ["triton", "eager", "torch_compile", "torch_compile_max_autotune"]
    assert [candidate.name for candidate in made.values() if candidate.role == "triton"] == ["triton"]
    assert list(made)[-1] == "copy"
    assert made["copy"].role == "anchor"


def test_a_peer_that_cannot_be_imported_is_unavailable_with_its_reason() -> None:
    """A missing package costs its own row and no other."""

    def missing() -> Callable[..., Outputs]:
        raise ModuleNotFoundError("No module named 'peer'")

    made = build("rms_norm", peers={"peer": missing, "other": lambda: torch.nn.functional.silu})
    assert made["peer"].unavailable == "ModuleNotFoundError: No module named 'peer'"
    with pytest.raises(RuntimeError, match="No module named 'peer'"):
        made["peer"].call()
    assert made["other"].unavailable is None
    assert made["other"].call is torch.nn.functional.silu
    assert (made["other"].role, made["other"].served_by) == ("baseline", "other")


def test_a_companion_is_ours_and_stands_before_the_anchor() -> None:
    """A further way into our kernels has a role of its own, our kernels' name, and its own preparation."""
    doubled = Baseline(lambda x: x + 1, lambda x, weight: (2 * x,))
    made = build("rms_norm", companions={"plain": torch.nn.functional.silu, "prepared": doubled})
    assert list(made)[-3:] == ["plain", "prepared", "copy"]
    for name in ("plain", "prepared"):
        assert (made[name].role, made[name].served_by) == ("companion", made["triton"].served_by)
    x, weight = torch.ones(2, 3), torch.ones(3)
    assert made["plain"].prepare(x, weight) == (x, weight)
    assert made["prepared"].call(*made["prepared"].prepare(x, weight)).tolist() == [[3.0] * 3] * 2


def test_a_companion_is_no_baseline_however_fast() -> None:
    """It is summarised like any other candidate, and the fastest baseline is the one that is somebody else's."""

    def candidate(name: str, role: str, p50: int, served_by: str = "triton") -> dict[str, object]:
        flags: dict[str, list[int]] = {flag: [] for flag in ("launch_exposed", "clock_low", "power_cap", "thermal")}
        run = {"regime": "warm", "process": 0, "calls_per_sample": 1, "samples_ns": [p50] * 9, "flags": flags}
        about = {"name": name, "role": role, "served_by": served_by}
        return {**about, "status": "ok", "reason": None, "launch": None, "runs": [run]}

    def derived(*others: dict[str, object]) -> dict[str, Any]:
        cost = {"read": [{"name": "x", "bytes": 4}], "write": [], "flop": 1, "unit": "float32"}
        timed = [candidate("triton", "triton", 300), *others, candidate("eager", "baseline", 600, "torch")]
        cell = {"shape": "1x1", "dtype": "float16", "cost": cost, "candidates": timed}
        (found,) = derive_cells({"kernel": "rms_norm", "processes": [], "cells": [cell]}, {})
        return found

    found = derived(candidate("through", "companion", 100))
    assert found["candidates"][1]["stats"]["p50_ns"] == 100
    assert (found["best_baseline"], found["speedup_over_best"]) == ("eager", 2.0)
    # What PyTorch served is no time of our kernels.
    assert derived(candidate("through", "companion", 100, "torch"))["candidates"][1]["status"] == "invalid"


def test_the_backward_pass_is_timed_without_the_forward_pass() -> None:
    """Where gradients are off the graph is built in the preparation, once, and a call can be repeated."""
    forwards = []

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        forwards.append(x.shape)
        return x * weight

    backward = through_autograd(forward)
    dy, x, weight = (torch.full((2, 3), value) for value in (2.0, 3.0, 5.0))
    with torch.no_grad():
        prepared = backward.prepare(dy, x, weight)
        for _ in range(2):
            dx, dweight = backward.call(*prepared)
            assert torch.equal(dx, dy * weight)
            assert torch.equal(dweight, dy * x)
    assert forwards == [(2, 3)]
    assert not x.requires_grad


@pytest.mark.parametrize("kernel", kernel_names())
def test_the_copy_moves_the_logical_bytes(kernel: str) -> None:
    """Half of the bytes of the cost model are read and half are written."""
    case = load(kernel)
    cost = case.cost(case.smoke[0], torch.float16)
    written = build(kernel)["copy"].call()
    assert written.numel() * written.element_size() == (sum(cost.read.values()) + sum(cost.write.values())) // 2
