"""What is timed side by side, and what is not to be had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from triton_kernel_lab.cases._base import Outputs, load
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


@pytest.mark.parametrize("kernel", kernel_names())
def test_the_copy_moves_the_logical_bytes(kernel: str) -> None:
    """Half of the bytes of the cost model are read and half are written."""
    case = load(kernel)
    cost = case.cost(case.smoke[0], torch.float16)
    written = build(kernel)["copy"].call()
    assert written.numel() * written.element_size() == (sum(cost.read.values()) + sum(cost.write.values())) // 2
