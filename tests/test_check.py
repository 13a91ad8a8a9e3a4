"""The judge of outputs: what it measures, where its limits come from, and which impostors it rejects."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_checks import DEVICE, randn

from triton_kernel_lab.cases import PENDING
from triton_kernel_lab.cases import rms_norm as norm_case
from triton_kernel_lab.cases import swiglu as gate_case
from triton_kernel_lab.cases._base import Case, Tensors, Variant, load
from triton_kernel_lab.lab import check
from triton_kernel_lab.lab.correctness import check_cell
from triton_kernel_lab.project import kernel_names

ALL = [*kernel_names(), *PENDING]
Run = Callable[..., Any]


def first_output(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Variant], Run]:
    """The operator with its first output changed."""

    def impostor(variant: Variant) -> Run:
        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, *others = check.as_tuple(variant.run(*tensors))
            return change(first), *others

        return run

    return impostor


def shifted_eps(out: torch.Tensor) -> torch.Tensor:
    """The output with an eps of a hundredth, or what comes to the same for one without eps."""
    return (out.double() / math.sqrt(1 + 1e-2)).to(out.dtype)


def with_tail_left_out(right: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(right)
    out[..., :-1] = right[..., :-1]
    return out


def off_at_one_element(out: torch.Tensor) -> torch.Tensor:
    # Far enough for the limit of each dtype, near enough that no norm shows it.
    last = out.flatten()[-1:]
    last += out.double().abs().mean().to(out.dtype) * 0.05 + last * 0.05
    return out


def from_freed_memory(right: torch.Tensor) -> torch.Tensor:
    """What lies in memory when the right answer was freed before it was read."""
    shape, dtype = right.shape, right.dtype
    del right
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def zeroing_inputs(variant: Variant) -> Run:
    def run(*tensors: torch.Tensor) -> object:
        out = variant.run(*tensors)
        for tensor in tensors:
            tensor.zero_()
        return out

    return run


def raising(variant: Variant) -> Run:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resources")

    return run


IMPOSTORS: dict[str, tuple[Callable[[Variant], Run], str]] = {
    "zeros": (first_output(torch.zeros_like), "norm off by 1"),
    "nan": (first_output(lambda out: torch.full_like(out, math.nan)), "NaN or infinity"),
    "one_nan": (first_output(lambda out: out.index_fill_(-1, ones(), math.nan)), "NaN"),
    "one_element": (first_output(off_at_one_element), "worst element off"),
    "half_as_wide": (first_output(lambda out: out[..., ::2]), "output is ("),
    "wrong_dtype": (first_output(lambda out: out.double()), "torch.float64"),
    "wrong_eps": (first_output(shifted_eps), "off by"),
    "raises": (raising, "raised RuntimeError: out of resources"),
    "unwritten_tail": (first_output(with_tail_left_out), "NaN or infinity"),
    "freed_memory": (first_output(from_freed_memory), "NaN or infinity"),
    "zeroed_inputs": (zeroing_inputs, "input 0 was changed"),
    "one_output_more": (
        lambda variant: lambda *tensors: (*check.as_tuple(variant.run(*tensors)),) * 2,
        " outputs, expected ",
    ),
    "no_output": (lambda variant: lambda *tensors: (), "0 outputs, expected "),
    "negated": (first_output(torch.neg), "norm off by 2"),
    "shifted": (first_output(lambda out: out.flatten().roll(1).view_as(out)), "worst element off"),
}


def ones() -> torch.Tensor:
    return torch.ones(1, dtype=torch.int64, device=DEVICE)


def judged(case: Case, run: Run, dtype: torch.dtype) -> list[str]:
    """What the checker says of ``run`` where it stands for the operator of a case."""
    variant = case.variants[0]
    inputs: Tensors = variant.inputs(case.smoke[0], dtype, torch.Generator(DEVICE).manual_seed(3))
    return check.run_checked(run, inputs, check.expect(case, variant, inputs, dtype)).failures


def bounded(*references: torch.Tensor) -> list[check.Expected]:
    """What fp32 outputs must be whose float64 values are known."""
    limit = check.limit(torch.float32, None)
    return [check.Expected(reference.double(), torch.float32, limit) for reference in references]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", ALL)
def test_the_operator_itself_passes(kernel: str, dtype: torch.dtype) -> None:
    """What the impostors are made of is accepted, so nothing else is what rejects them."""
    case = load(kernel)
    assert judged(case, case.variants[0].run, dtype) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("impostor", IMPOSTORS)
def test_f86_impostors_are_rejected(impostor: str, kernel: str, dtype: torch.dtype) -> None:
    """Every fake of an operator is found out, for the reason that it is one."""
    make, reason = IMPOSTORS[impostor]
    case = load(kernel)
    failures = judged(case, make(case.variants[0]), dtype)
    assert any(reason in failure for failure in failures), failures


@pytest.mark.parametrize("kernel", ALL)
def test_f86_an_operator_that_returns_its_input_is_rejected(kernel: str) -> None:
    """Whether the input has the shape of the output or not."""
    case = load(kernel)
    assert judged(case, lambda *tensors: tensors[: len(case.output_dtypes)], torch.float16)


def test_what_works_in_place_may_change_its_inputs() -> None:
    """Only a candidate that says so."""
    x = randn(8)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    assert check.run_checked(run, [x.clone()], bounded(2 * x), in_place=True).failures == []
    assert check.run_checked(run, [x.clone()], bounded(2 * x)).failures == ["input 0 was changed"]


def test_integers_and_exact_cases_must_be_equal() -> None:
    """One unit off fails an index, and one bit fails an operator that only moves data."""
    (variant, *_) = load("swiglu").variants
    moved = Case(
        name="moved",
        cli_name="moved",
        axes=("M", "F"),
        variants=(Variant("default", variant.inputs, lambda x, y: (x, y), lambda x, y: (x, y), lambda x, y: (x, y)),),
        cost=load("swiglu").cost,
        timed=(),
        checked=(),
        smoke=((8, 128),),
        output_dtypes=(None, None),
        exact=True,
    )
    assert judged(moved, lambda x, y: (x.clone(), y.clone()), torch.float16) == []
    assert judged(moved, lambda x, y: (x * (1 + 2.0**-10), y.clone()), torch.float16)
    index = torch.arange(4)
    wanted = [check.Expected(index, torch.int64, check.Limit(0.0, 0.0))]
    assert check.run_checked(lambda i: i.clone(), [index], wanted).failures == []
    assert check.run_checked(lambda i: i.clone().index_fill_(0, torch.tensor(2), 3), [index], wanted).failures


def test_f86_a_fake_fails_its_cell_of_the_artifact() -> None:
    """The cell that is written says what was wrong, and null for an error that cannot be told."""
    case = load("rms_norm")
    (variant, *_) = case.variants
    fake = Variant("fake", variant.inputs, IMPOSTORS["nan"][0](variant), variant.eager, variant.oracle)
    cell = check_cell(case, fake, (8, 128), torch.float16, DEVICE, compile_baseline=False)
    assert cell["passed"] is False
    assert cell["failures"] == ["NaN or infinity at other places than the oracle"]
    assert cell["triton"] == {"max_error_ratio": None, "rel_norm": None, "max_abs": None}
    assert cell["torch_compile"] is None
    assert cell["torch_compile_passed"] is None


def test_the_same_cell_twice_is_the_same() -> None:
    """Inputs depend on the cell alone, so a check that is run again finds the same figures."""
    case = load("swiglu")
    first, second = (
        check_cell(case, case.variants[0], (3, 63), torch.float16, DEVICE, compile_baseline=False) for _ in range(2)
    )
    assert first == second


# The oracles.


def test_oracles_agree_with_closed_forms() -> None:
    """In float64: RMSNorm of (3, 4) is (3, 4)/sqrt(12.5), and swiglu(x, 1) + swiglu(-x, -1) is x."""
    y = norm_case.oracle(torch.tensor([[3.0, 4.0]]))
    assert y.dtype == torch.float64
    assert y.tolist() == [pytest.approx([3 / math.sqrt(12.5 + 1e-6), 4 / math.sqrt(12.5 + 1e-6)], rel=1e-15)]
    x = torch.linspace(-30, 30, 61)
    whole = gate_case.oracle(x, torch.ones_like(x)) + gate_case.oracle(-x, -torch.ones_like(x))
    assert torch.allclose(whole, x.double(), rtol=0, atol=1e-12)


# Errors.


def measured(output: list[float], reference: list[float]) -> check.Error:
    return check.measure(torch.tensor(output), torch.tensor(reference, dtype=torch.float64))


def test_an_error_is_relative_to_the_element_and_the_signal() -> None:
    """For references 3 and 4 the rms is sqrt(12.5), and an error of one tenth of 4 is 0.4 over 4 + rms."""
    error = check.measure(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert error.max_abs == 0.5
    assert error.max_error_ratio == pytest.approx(0.5 / (4 + math.sqrt(12.5)), rel=1e-12)
    assert error.rel_norm == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_f86_the_tolerance_scales_with_the_reference(scale: float) -> None:
    """Zeros are a whole norm off however small the reference is."""
    error = check.measure(torch.zeros(4), torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64) * scale)
    assert error.rel_norm == pytest.approx(1.0)
    assert check.verdict(error, check.limit(torch.float16, None))


@pytest.mark.parametrize(
    ("output", "reference", "same"),
    [
        ([1.0, math.nan], [1.0, math.nan], True),
        ([1.0, math.inf], [1.0, math.inf], True),
        ([1.0, -math.inf], [1.0, math.inf], False),
        ([1.0, math.nan], [1.0, math.inf], False),
        ([1.0, math.inf], [1.0, math.nan], False),
        ([math.nan, 1.0], [1.0, math.nan], False),
        ([1.0, 2.0], [1.0, math.nan], False),
        ([1.0, math.inf], [1.0, 2.0], False),
    ],
)
def test_what_is_not_finite_must_be_where_the_oracle_has_it(
    output: list[float], reference: list[float], same: bool
) -> None:
    """NaN matches NaN and infinity its own sign; anywhere else the error has no figure and never passes."""
    error = measured(output, reference)
    assert (error.rel_norm == 0.0) is same
    assert (check.verdict(error, check.Limit(9.0, 9.0)) == []) is same
    if not same:
        assert error == check.Error(None, None, None)


def test_a_reference_of_zeros_takes_nothing_but_zeros() -> None:
    """Without a signal the ratio has no scale: zeros are right, anything else is wrong."""
    assert measured([0.0, 0.0], [0.0, 0.0]) == check.Error(0.0, 0.0, 0.0)
    assert check.verdict(measured([0.0, 1e-30], [0.0, 0.0]), check.Limit(1e-3, 1e-3))


def test_an_empty_output_has_no_error() -> None:
    """There is nothing to be wrong about."""
    assert measured([], []) == check.Error(0.0, 0.0, 0.0)


def test_errors_and_limits_are_kept_with_three_digits() -> None:
    """Artifacts hold three significant digits, the same on every machine, and null where there is no figure."""
    assert check.Error(0.00123456, None, 12345.6).record() == {
        "max_error_ratio": 0.00123,
        "rel_norm": None,
        "max_abs": 12300.0,
    }
    assert check.Limit(0.0009765625, 0.00048828125).record() == {"max_error_ratio": 0.000977, "rel_norm": 0.000488}


# Limits.


@pytest.mark.parametrize(
    ("dtype", "floor", "norm"),
    [(torch.float16, 2**-10, 2**-11), (torch.bfloat16, 2**-7, 2**-8), (torch.float32, 1e-5, 1e-5)],
)
@pytest.mark.parametrize("eager", [None, check.Error(0.0, 0.0, 0.0), check.Error(None, None, None)])
def test_a_limit_has_a_floor(dtype: torch.dtype, floor: float, norm: float, eager: check.Error | None) -> None:
    """A correctly rounded result always passes, whatever eager gives; what eager cannot tell loosens nothing."""
    assert check.limit(dtype, eager) == check.Limit(floor, norm)


def test_a_limit_is_twice_the_error_of_eager() -> None:
    """Each of the two figures is judged by eager's own, where that is above the floor."""
    assert check.limit(torch.float16, check.Error(0.01, 1e-6, 1.0)) == check.Limit(0.02, 2**-11)
    assert check.limit(torch.bfloat16, check.Error(1e-6, 0.03, 1.0)) == check.Limit(2**-7, 0.06)


def test_fp32_promises_ieee_whatever_eager_does() -> None:
    """An eager form that computes in TF32 does not loosen the limit of fp32."""
    assert check.limit(torch.float32, check.Error(0.1, 0.1, 1.0)) == check.Limit(1e-5, 1e-5)


def test_f86_zeros_never_pass_however_wrong_eager_is() -> None:
    """A baseline that is badly off must not open the door to an output without a signal."""
    bound = check.limit(torch.float16, check.Error(3.0, 3.0, 1.0))
    assert check.verdict(measured([0.0, 0.0], [1.0, -2.0]), bound)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (check.Error(0.5, 0.5, 9.0), []),
        (check.Error(0.6, 0.5, 0.0), ["worst element off by 0.6, limit 0.5"]),
        (check.Error(0.5, 0.6, 0.0), ["norm off by 0.6, limit 0.5"]),
        (check.Error(math.nan, 0.0, 0.0), ["worst element off by nan, limit 0.5"]),
    ],
)
def test_a_verdict_is_inclusive_and_in_words(error: check.Error, said: list[str]) -> None:
    """The limit itself passes; NaN, which no comparison catches, does not."""
    assert check.verdict(error, check.Limit(0.5, 0.5)) == said


# Poison.


def test_poison_fills_new_memory_and_only_within_its_context() -> None:
    """Uninitialised tensors of every kind are NaN; the setting is put back also after an error."""
    before = torch.are_deterministic_algorithms_enabled()
    x = randn(4)
    with check.poisoned():
        for tensor in (torch.empty(3), torch.empty_like(x), x.new_empty(5), torch.empty(2, dtype=torch.float16)):
            assert tensor.isnan().all()
        assert not torch.zeros(3).isnan().any()
    assert torch.are_deterministic_algorithms_enabled() == before
    with pytest.raises(KeyError), check.poisoned():
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before


def test_the_worst_of_several_outputs_is_what_is_reported() -> None:
    """Every output is judged, and the error is that of the worst."""
    x = randn(8)
    for wrong in (0, 1):

        def run(tensor: torch.Tensor, wrong: int = wrong) -> list[torch.Tensor]:
            return [tensor.clone() * (2 if index == wrong else 1) for index in range(2)]

        checked = check.run_checked(run, [x], bounded(x, x))
        assert checked.error.rel_norm == pytest.approx(1.0)
        assert len(checked.failures) == 2


@pytest.mark.gpu
def test_f86_an_answer_that_comes_later_from_another_stream_is_rejected() -> None:
    """An output that is still being computed on a stream nobody waits for is judged as it stands."""
    x = randn(1 << 20)
    side = torch.cuda.Stream()

    def run(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensor)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)
            out.copy_(tensor)
        return out

    checked = check.run_checked(run, [x], bounded(x))
    torch.cuda.synchronize()
    assert checked.failures
