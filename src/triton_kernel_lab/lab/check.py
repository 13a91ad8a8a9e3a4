"""Whether an output is right: judged against float64, beside 16-bit eager PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from triton_kernel_lab.routing import FallbackError

__all__ = ["Error", "Limit", "limit", "measure", "poisoned", "run_checked", "verdict"]

# The floor of a limit: one unit in the last place for the worst element, half
# of one in norm. A correctly rounded result meets both. fp32 promises IEEE
# arithmetic: 1e-5, whatever eager does.
_FLOOR = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
_EAGER_FACTOR = 2.0
# However wrong eager is: zeros, a whole norm off, never pass.
_CEILING = 0.1


@dataclass(frozen=True)
class Error:
    """The distance of an output from the float64 oracle.

    ``max_error_ratio`` is the largest |out - ref| / (|ref| + rms(ref)),
    ``rel_norm`` is ||out - ref|| / ||ref||, ``max_abs`` the largest |out - ref|;
    all None where the output has NaN or infinity at other places than the oracle.
    """

    max_error_ratio: float | None
    rel_norm: float | None
    max_abs: float | None

    def record(self) -> dict[str, float | None]:
        """The error with three significant digits, as an artifact keeps it."""
        return {key: value if value is None else float(f"{value:.3g}") for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Limit:
    """What an Error may be at most."""

    max_error_ratio: float
    rel_norm: float

    def record(self) -> dict[str, float]:
        """The limit with three significant digits, as an artifact keeps it."""
        return {key: float(f"{value:.3g}") for key, value in asdict(self).items()}


def as_tuple(outputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One or several outputs as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def measure(output: torch.Tensor, reference: torch.Tensor) -> Error:
    """The error of ``output`` against a float64 ``reference`` of the same shape."""
    finite = torch.isfinite(reference)
    same = torch.where(finite, torch.isfinite(output), output.double() == reference)
    same |= torch.isnan(reference) & torch.isnan(output)
    if not bool(same.all()):
        return Error(None, None, None)
    if not bool(finite.all()):
        output, reference = output[finite], reference[finite]
    if reference.numel() == 0:
        return Error(0.0, 0.0, 0.0)
    difference = (output.double() - reference).abs_()
    rms = reference.square().mean().sqrt()
    max_abs = difference.max().item()
    norm = difference.square().sum().sqrt().item()
    reference_norm = reference.square().sum().sqrt().item()
    ratio = difference.div_(reference.abs() + rms).nan_to_num_(0.0).max().item()
    return Error(ratio, norm / reference_norm if reference_norm else norm, max_abs)


def limit(dtype: torch.dtype, eager: Error | None) -> Limit:
    """Twice the error of the 16-bit eager operator, within the floor of the dtype and a tenth."""
    floor = _FLOOR[dtype]
    if dtype == torch.float32 or eager is None or eager.max_error_ratio is None or eager.rel_norm is None:
        return Limit(floor, floor if dtype == torch.float32 else floor / 2)
    ratio, norm = (min(_EAGER_FACTOR * value, _CEILING) for value in (eager.max_error_ratio, eager.rel_norm))
    return Limit(max(ratio, floor), max(norm, floor / 2))


def verdict(error: Error, bound: Limit) -> list[str]:
    """What is wrong with an output, in words; empty if nothing is."""
    if error.max_error_ratio is None or error.rel_norm is None:
        return ["NaN or infinity at other places than the oracle"]
    found = []
    if not error.max_error_ratio <= bound.max_error_ratio:
        found.append(f"worst element off by {error.max_error_ratio:.3g}, limit {bound.max_error_ratio:.3g}")
    if not error.rel_norm <= bound.rel_norm:
        found.append(f"norm off by {error.rel_norm:.3g}, limit {bound.rel_norm:.3g}")
    return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every new uninitialised tensor with NaN, so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run_checked(
    run: Callable[..., torch.Tensor | Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    dtype: torch.dtype,
    bound: Limit,
    *,
    poison: bool = True,
) -> tuple[Error, list[str]]:
    """Run an operator once and judge every output.

    ``references`` are float64 and must have been made from clones of the
    inputs. Without ``poison`` the memory is left as it is: poisoning makes
    torch.compile compile anew, and then other code than the timed one would be
    judged. Returns the worst error over the outputs and all that is wrong.
    """
    kept = [tensor.clone() for tensor in inputs]
    try:
        with poisoned() if poison else contextlib.nullcontext():
            outputs = as_tuple(run(*inputs))
    except FallbackError:
        raise  # Not this kernel's result, right or wrong.
    except Exception as raised:
        # A kernel that raises is as wrong as one that lies, and its artifact must say so.
        return Error(None, None, None), [f"raised {type(raised).__name__}: {' '.join(str(raised).split())[:200]}"]
    failures = [
        f"input {index} was changed"
        for index, (tensor, copy) in enumerate(zip(inputs, kept, strict=True))
        if not torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)
    ]
    if len(outputs) != len(references):
        return Error(None, None, None), [*failures, f"{len(outputs)} outputs, expected {len(references)}"]
    worst = Error(0.0, 0.0, 0.0)
    for output, reference in zip(outputs, references, strict=True):
        if output.shape != reference.shape or output.dtype != dtype or output.device != reference.device:
            found = f"{tuple(output.shape)} {output.dtype} on {output.device}"
            expected = f"{tuple(reference.shape)} {dtype} on {reference.device}"
            return Error(None, None, None), [*failures, f"output is {found}, expected {expected}"]
        error = measure(output, reference)
        failures += verdict(error, bound)
        if worst.max_error_ratio is not None:
            worse = error.max_error_ratio is None or error.max_error_ratio > worst.max_error_ratio
            worst = error if worse else worst
    return worst, failures
