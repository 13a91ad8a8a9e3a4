"""What is timed side by side: our operator, its baselines and companions, and a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triton_kernel_lab.cases._base import Baseline, Case, Dims, Outputs, Tensors, dtype_name
from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops._triton import INTERPRET

__all__ = ["Candidate", "build", "compiled"]

MODES = {"torch_compile": None, "torch_compile_max_autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Candidate:
    """A callable to time; ``role`` is triton, companion, baseline or anchor, ``served_by`` the code that runs.

    ``call`` takes what ``prepare`` makes of an input set, once and untimed;
    ``in_place`` as in ``Baseline``. ``unavailable`` says why there is nothing
    to call, where that is so.
    """

    name: str
    role: str
    served_by: str
    call: Callable[..., Any]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs
    in_place: bool = False
    unavailable: str | None = None


def compiled(case: Case, mode: str | None) -> Callable[..., Any]:
    """The eager form of a case under torch.compile, one graph, static shapes."""
    call: Callable[..., Any] = torch.compile(case.variants[0].eager, fullgraph=True, dynamic=False, mode=mode)
    return call


def _copy(case: Case, dims: Dims, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """A copy that moves the logical bytes of the case: half read, half written."""
    cost = case.cost(dims, dtype)
    half = max((sum(cost.read.values()) + sum(cost.write.values())) // 2, 1)
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda *inputs: target.copy_(source)


def _given(name: str, role: str, served_by: str, call: Callable[..., Outputs] | Baseline) -> Candidate:
    given = call if isinstance(call, Baseline) else Baseline(call)

    def prepare(*inputs: torch.Tensor) -> Tensors:
        prepared = given.prepare(*inputs)
        # The others are given the same inputs.
        return tuple(tensor.clone() for tensor in prepared) if given.in_place else prepared

    return Candidate(name, role, served_by, given.call, prepare, given.in_place)


def _peer(name: str, load: Callable[[], Callable[..., Outputs] | Baseline]) -> Candidate:
    """Other people's kernel, or the reason why it cannot be had here."""
    try:
        return _given(name, "baseline", name, load())
    except Exception as error:
        # Whatever a package's import raises here, the others are still to be timed.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

        def missing(*inputs: torch.Tensor) -> Any:
            raise RuntimeError(reason)

        return Candidate(name, "baseline", name, missing, unavailable=reason)


def build(case: Case, dims: Dims, dtype: torch.dtype, device: torch.device) -> list[Candidate]:
    """The candidates of one cell; every torch.compile starts afresh for its shape."""
    # Without a reset the ninth shape meets Dynamo's recompile limit and runs eagerly.
    torch._dynamo.reset()
    variant = case.variants[0]
    # Cells that serve one table are not worth the minutes that max-autotune takes for some of them.
    modes = list(MODES)[:1] if (dims, dtype_name(dtype)) in case.also else list(MODES)
    ours = "interpreter" if INTERPRET else "triton"
    return [
        Candidate("triton", "triton", ours, variant.run),
        Candidate("eager", "baseline", "torch", variant.eager),
        *(Candidate(name, "baseline", "inductor", compiled(case, MODES[name])) for name in modes),
        *(_given(name, "baseline", "torch", call) for name, call in case.library.items()),
        *(_peer(name, load) for name, load in case.peers.items()),
        *(_given(name, "companion", ours, call) for name, call in case.companions.items()),
        Candidate("copy", "anchor", "torch", _copy(case, dims, dtype, device)),
    ]


def launch_record(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> dict[str, Any] | None:
    """The kernel that a call of ours launches: configuration, registers, cubin."""
    _launch.forget_plans()
    call(*inputs)
    bound = _launch.launches()
    if not bound:
        return None
    last = bound[-1]
    return {
        "kernel": last.kernel,
        "config": dict(last.config),
        "registers": last.registers,
        "spills": last.spills,
        "shared_bytes": last.shared_bytes,
        "cubin_sha256": last.cubin_sha256,
    }
