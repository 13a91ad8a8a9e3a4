"""Whether an output is right: judged against float64, beside 16-bit eager PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from triton_kernel_lab.cases._base import Case, Variant
from triton_kernel_lab.routing import FallbackError

__all__ = [
    "Checked",
    "Error",
    "Expected",
    "Limit",
    "as_tuple",
    "by_norm",
    "eager_errors",
    "expect",
    "limit",
    "measure",
    "poisoned",
    "run_checked",
    "verdict",
    "worst",
]

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


@dataclass(frozen=True)
class Expected:
    """What one output must be: its float64 value, its dtype, and how far off it may be."""

    reference: torch.Tensor
    dtype: torch.dtype
    bound: Limit


@dataclass(frozen=True)
class Checked:
    """The worst error over the outputs of a call, its limit, and all that is wrong."""

    error: Error
    bound: Limit
    failures: list[str]


_EXACT = Limit(0.0, 0.0)


def as_tuple(outputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One or several outputs as a tuple."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def measure(output: torch.Tensor, reference: torch.Tensor) -> Error:
    """The error of ``output`` against a float64, or integer, ``reference`` of the same shape."""
    reference = reference.double()
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


def worst(errors: Sequence[Error]) -> Error:
    """The error with the worst element; misplaced NaN or infinity is worse than any."""
    return max(errors, key=lambda error: math.inf if error.max_error_ratio is None else error.max_error_ratio)


def expect(case: Case, variant: Variant, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Expected]:
    """What each output of a variant must be on these inputs.

    The limit of an output is twice the error of the eager form there, or a
    floor; integers, and the outputs of an exact case, must be equal. Neither
    the oracle nor the eager form sees the inputs themselves.
    """
    references = as_tuple(variant.oracle(*(tensor.clone() for tensor in inputs)))
    eager = eager_errors(variant, inputs, references)
    expected = []
    for reference, error, named in zip(references, eager, case.output_dtypes, strict=True):
        output = named or dtype
        exact = case.exact or not output.is_floating_point
        expected.append(Expected(reference, output, _EXACT if exact else limit(dtype, error)))
    return expected


def by_norm(expected: Expected) -> Expected:
    """The same output judged by its norm alone."""
    return replace(expected, bound=replace(expected.bound, max_error_ratio=math.inf))


def eager_errors(variant: Variant, inputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> list[Error]:
    """The error of the eager form at each output."""
    outputs = as_tuple(variant.eager(*(tensor.clone() for tensor in inputs)))
    return [measure(output, reference) for output, reference in zip(outputs, references, strict=True)]


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
    expected: Sequence[Expected],
    *,
    poison: bool = True,
    in_place: bool = False,
) -> Checked:
    """Run an operator once and judge every output.

    Without ``poison`` the memory is left as it is: poisoning makes
    torch.compile compile anew, and then other code than the timed one would be
    judged. Only what works ``in_place`` may change its inputs.
    """
    kept = [tensor.clone() for tensor in inputs]
    try:
        with poisoned() if poison else contextlib.nullcontext():
            # Copied as they stand: what another stream would still write is not there yet.
            outputs = tuple(output.clone() for output in as_tuple(run(*inputs)))
    except FallbackError:
        raise  # Not this kernel's result, right or wrong.
    except Exception as raised:
        # A kernel that raises is as wrong as one that lies, and its artifact must say so.
        reason = f"raised {type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
        return Checked(Error(None, None, None), expected[0].bound, [reason])
    changed = [
        f"input {index} was changed"
        for index, (tensor, copy) in enumerate(zip(inputs, kept, strict=True))
        if not in_place and not torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)
    ]
    if len(outputs) != len(expected):
        failures = [*changed, f"{len(outputs)} outputs, expected {len(expected)}"]
        return Checked(Error(None, None, None), expected[0].bound, failures)
    judged = [_judge(output, wanted) for output, wanted in zip(outputs, expected, strict=True)]
    foremost = max(judged, key=_share)
    return Checked(foremost.error, foremost.bound, [*changed, *(line for each in judged for line in each.failures)])


def _share(checked: Checked) -> float:
    """How much of its limit an error takes."""
    ratio, allowed = checked.error.max_error_ratio, checked.bound.max_error_ratio
    if ratio is None or not allowed:
        return 0.0 if ratio == 0.0 else math.inf
    return ratio / allowed


def _judge(output: torch.Tensor, wanted: Expected) -> Checked:
    """One output against what it must be."""
    reference = wanted.reference
    if output.shape != reference.shape or output.dtype != wanted.dtype or output.device != reference.device:
        found = f"{tuple(output.shape)} {output.dtype} on {output.device}"
        asked = f"{tuple(reference.shape)} {wanted.dtype} on {reference.device}"
        return Checked(Error(None, None, None), wanted.bound, [f"output is {found}, expected {asked}"])
    error = measure(output, reference)
    return Checked(error, wanted.bound, verdict(error, wanted.bound))
