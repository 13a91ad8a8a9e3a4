"""Routing: who serves a call, what is recorded of it, and what strict mode refuses."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import operator_checks as checks
import pytest
import torch
from operator_checks import DEVICE, assert_same_bits, randn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError, checkpoint

from triton_kernel_lab import (
    add_rms_norm,
    add_rms_norm_,
    flash_attention,
    qk_scores,
    rms_norm,
    routing,
    swiglu,
    swiglu_linear,
    swiglu_packed,
)
from triton_kernel_lab.ops import _checks, _launch
from triton_kernel_lab.ops.add_rms_norm import add_rms_norm_reference
from triton_kernel_lab.ops.rms_norm import rms_norm_reference
from triton_kernel_lab.ops.swiglu import swiglu_reference
from triton_kernel_lab.ops.swiglu_linear import swiglu_linear_reference
from triton_kernel_lab.routing import FallbackError, FallbackWarning, Route

WIDE = Route("rms_norm", "torch", "inputs", "the kernel takes float16, bfloat16 and float32, not torch.float64")


@pytest.fixture(autouse=True)
def nothing_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with an empty record, no plans, and without the strict mode of the environment."""
    monkeypatch.delenv("TRITON_KERNEL_LAB_STRICT", raising=False)
    for clear in (routing.forget, _launch.forget_plans):
        clear()
    yield
    for clear in (routing.forget, _launch.forget_plans):
        clear()


def wide(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (2, 8), dtype=torch.float64, device=DEVICE)


def heard(call: object, *arguments: object) -> list[str]:
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments)  # type: ignore[operator]
    return [str(warning.message) for warning in caught if warning.category is FallbackWarning]


def test_triton_serves_without_a_word() -> None:
    """A call that Triton takes leaves no route and no warning."""
    assert heard(rms_norm, randn(2, 8)) == []
    assert routing.report() == []


def test_what_serves_a_call_is_the_plan_itself() -> None:
    """Where Triton takes the inputs the route is what was built, so that a call passes through nothing more."""

    def plan() -> None:
        raise AssertionError("a route is not run when it is chosen")

    def reference() -> None:
        raise AssertionError("the reference does not serve")

    assert routing.triton_route("op", None, lambda: plan, reference) is plan
    assert routing.report() == []


@pytest.mark.parametrize(("operator", "tensors"), [(rms_norm, 1), (swiglu, 2), (add_rms_norm, 2)])
def test_an_operator_keeps_its_plan_unwrapped(
    operator: Callable[..., Any], tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an operator looks up on a later call is the function that its plan made."""
    module = importlib.import_module(f"triton_kernel_lab.ops.{operator.__name__}")
    planned, plan = [], module._plan

    def planning(*arguments: Any) -> Any:
        planned.append(plan(*arguments))
        return planned[-1]

    monkeypatch.setattr(module, "_plan", planning)
    for _ in range(2):
        operator(*(randn(2, 8, seed=seed) for seed in range(tensors)))
    (kept,) = module._plans.values()
    assert len(planned) == 1
    assert kept is planned[0]


def test_float64_is_served_by_pytorch_with_the_reason() -> None:
    """The kernel does not take float64: PyTorch computes it in float64, warns and records why."""
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64, device=DEVICE)
    with pytest.warns(FallbackWarning, match=r"^rms_norm is served by PyTorch \(inputs: .*not torch.float64\)\.$"):
        y = rms_norm(x, eps=0.0)
    assert y.dtype == torch.float64
    assert y.tolist() == [pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5], rel=1e-15)]
    assert routing.report() == [WIDE]


def test_a_warning_points_at_the_call() -> None:
    """The file of the warning is the caller's, so that a filter or a reader finds the call."""
    with pytest.warns(FallbackWarning) as caught:
        rms_norm(wide())
    assert caught[0].filename == __file__


def test_f18_a_float64_weight_falls_back_too() -> None:
    """One tensor that the kernel does not take is enough, and the output still has x's dtype."""
    with pytest.warns(FallbackWarning, match="not torch.float64"):
        y = rms_norm(randn(2, 8, dtype=torch.float16), wide(8))
    assert y.dtype == torch.float16


def test_a_route_warns_once_and_is_recorded_once() -> None:
    """Other shapes, and the same again, take the route in silence; another operator has its own."""
    said = [heard(rms_norm, wide(rows, 8)) for rows in (2, 2, 3)]
    assert [len(each) for each in said] == [1, 0, 0]
    assert len(heard(swiglu, wide(), wide())) == 1
    assert [route.operator for route in routing.report()] == ["rms_norm", "swiglu"]


def test_a_forgotten_route_warns_again() -> None:
    """After forget the next fallback is news, although the same call was served before."""
    assert len(heard(rms_norm, wide())) == 1
    routing.forget()
    assert routing.report() == []
    assert len(heard(rms_norm, wide())) == 1
    assert routing.report() == [WIDE]


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
@pytest.mark.parametrize("before", [False, True])
def test_strict_mode_refuses_what_triton_does_not_serve(before: bool) -> None:
    """Strict mode raises with the reason, also where the same call was served before it."""
    if before:
        rms_norm(wide())
        swiglu(wide(), wide())
    with routing.strict():
        with pytest.raises(FallbackError, match=r"^rms_norm: not served by Triton \(inputs: .*strict mode is on\.$"):
            rms_norm(wide())
        with pytest.raises(FallbackError, match=r"^swiglu: not served"):
            swiglu(wide(), wide())


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
def test_strict_mode_ends_with_its_context_and_nests() -> None:
    """The innermost context decides, and after the outermost the environment does."""
    with routing.strict():
        with routing.strict(False):
            rms_norm(wide())
        with pytest.raises(FallbackError):
            routing.fallback("rms_norm", "inputs", "a reason")
    rms_norm(wide())


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
@pytest.mark.parametrize(("value", "strict"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_can_ask_for_strict_mode(monkeypatch: pytest.MonkeyPatch, value: str, strict: bool) -> None:
    """TRITON_KERNEL_LAB_STRICT is strict unless it is empty or 0, and a context overrules it."""
    monkeypatch.setenv("TRITON_KERNEL_LAB_STRICT", value)
    if strict:
        with pytest.raises(FallbackError):
            rms_norm(wide())
    else:
        rms_norm(wide())
    with routing.strict(False):
        rms_norm(wide(3, 8))


def test_a_gradient_is_served_by_triton_where_the_call_is() -> None:
    """A wanted gradient neither warns nor stands in the record, and strict mode lets it pass."""
    x = randn(2, 8).requires_grad_()
    with routing.strict():
        assert heard(lambda: rms_norm(x).sum().backward()) == []
    assert routing.report() == []


def test_a_gradient_of_what_triton_does_not_take_leaves_for_that_reason() -> None:
    """The record names the inputs, not the gradient, and the gradient is there."""
    x = wide().requires_grad_()
    assert len(heard(lambda: rms_norm(x).sum().backward())) == 1
    assert x.grad is not None
    assert routing.report() == [WIDE]


# Torch itself scripts a decomposition when forward mode first meets an operator.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_is_recorded_without_a_warning() -> None:
    """Forward mode through the PyTorch form is the documented path: it stands in the record, and warns nobody."""
    with torch.autograd.forward_ad.dual_level():
        messages = heard(rms_norm, torch.autograd.forward_ad.make_dual(randn(2, 8), randn(2, 8)))
    assert [message for message in messages if "rms_norm" in message] == []
    assert [(route.layer, route.served_by) for route in routing.report()] == [("autograd", "torch")]


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_argument_is_no_fallback(strict: bool) -> None:
    """The operator's own errors propagate, whether or not Triton would have served the call."""
    sentence = r"^rms_norm: weight: expected shape \(8,\), got \(7,\)\.$"
    with routing.strict(strict), pytest.raises(ValueError, match=sentence):
        rms_norm(wide(), wide(7))
    assert routing.report() == []


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "sentence"),
    [
        ((torch.ones(2, 8, dtype=torch.int32),), {}, TypeError, "x: expected a floating-point tensor, got torch.int32"),
        ((torch.tensor(1.0),), {}, ValueError, "x: expected at least one dimension, got a scalar"),
        ((torch.ones(2, 8), torch.ones(1, 8)), {}, ValueError, "weight: expected shape (8,), got (1, 8)"),
        (
            (torch.ones(2, 8), torch.ones(8, dtype=torch.int64)),
            {},
            TypeError,
            "weight: expected a floating-point tensor, got torch.int64",
        ),
        (
            (torch.ones(2, 8), torch.ones(8, device="meta")),
            {},
            ValueError,
            "weight: expected the device of x, cpu, got meta",
        ),
        ((torch.ones(2, 8),), {"eps": -1e-6}, ValueError, "eps: expected a number that is not negative, got -1e-06"),
        (
            (torch.ones(2, 8),),
            {"eps": float("nan")},
            ValueError,
            "eps: expected a number that is not negative, got nan",
        ),
        (
            (torch.ones(2, 8),),
            {"casting": "bert"},
            ValueError,
            "casting: expected one of ('llama', 'gemma'), got 'bert'",
        ),
    ],
)
@pytest.mark.parametrize("wants_grad", [False, True])
def test_errors_name_argument_expected_and_found(
    arguments: tuple[torch.Tensor, ...],
    options: dict[str, Any],
    kind: type[Exception],
    sentence: str,
    wants_grad: bool,
) -> None:
    """Each wrong argument is one sentence, on the way to Triton and on the way to PyTorch."""
    x, *rest = arguments
    if wants_grad and x.is_floating_point():
        x = x.clone().requires_grad_()
    with pytest.raises(kind) as caught:
        rms_norm(x, *rest, **options)
    assert str(caught.value) == f"rms_norm: {sentence}."


MISSING = """
import sys
sys.modules["triton"] = None
import torch, warnings
warnings.simplefilter("ignore")
from triton_kernel_lab import rms_norm, routing, swiglu_packed
assert rms_norm(torch.ones(2, 8), eps=3.0).tolist() == [[0.5] * 8] * 2
assert swiglu_packed(torch.zeros(2, 8)).tolist() == [[0.0] * 4] * 2
for route in routing.report():
    print(route.operator, route.served_by, route.layer, route.reason, sep="|")
"""


def test_without_triton_pytorch_serves() -> None:
    """Where Triton is not installed the operators import, answer through PyTorch, and say so."""
    done = checks.run_python(MISSING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{operator}|torch|import|Triton is not installed" for operator in ("rms_norm", "swiglu")
    ]


ELSEWHERE = """
import torch, warnings
from triton_kernel_lab import rms_norm, routing
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert rms_norm(torch.ones(2, 8), eps=3.0).tolist() == [[0.5] * 8] * 2
print(*(warning.message for warning in caught))
"""


def test_tensors_that_are_not_on_a_gpu_are_served_by_pytorch() -> None:
    """Without the interpreter a CPU tensor goes to PyTorch with the device as the reason."""
    done = checks.run_python(ELSEWHERE, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    said = "rms_norm is served by PyTorch (device: tensors are on cpu, not on a CUDA device)."
    assert done.stdout.splitlines() == [said]


# F66: what may be answered by PyTorch, and what must not.


def compilation_error() -> Exception:
    from triton.compiler.errors import CompilationError

    error: Exception = CompilationError("kernel", None, "cannot make it")
    return error


def out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    error: Exception = OutOfResources(300_000, 232_448, "shared memory")
    return error


def assembler_error() -> Exception:
    from triton.runtime.errors import PTXASError

    error: Exception = PTXASError("ptxas is too old")
    return error


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let no kernel be compiled or loaded from now on."""

    def bind(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(_launch, "bind", bind)


@pytest.mark.parametrize("make", [compilation_error, out_of_resources, assembler_error])
def test_f66_a_kernel_that_cannot_be_compiled_or_loaded_is_answered_by_pytorch(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning, one route with the reason, the right answer, and no second attempt to compile."""
    failing(monkeypatch, make())
    x = randn(2, 8)
    assert len(heard(rms_norm, x)) == 1
    assert torch.allclose(rms_norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    (route,) = routing.report()
    assert (route.operator, route.layer) == ("rms_norm", "launch")
    assert route.reason.startswith(f"{type(make()).__name__}: ")
    monkeypatch.undo()
    assert heard(rms_norm, x) == []
    with routing.strict(), pytest.raises(FallbackError, match=r"\(launch: "):
        rms_norm(x)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shape"),
        TypeError("dtype"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_f66_everything_else_reaches_the_caller(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer would hide the error; nothing is recorded, and the next call tries again."""
    failing(monkeypatch, error)
    with pytest.raises(type(error)):
        swiglu(randn(2, 8), randn(2, 8))
    assert routing.report() == []
    monkeypatch.undo()
    assert heard(swiglu, randn(2, 8), randn(2, 8)) == []


def test_f66_a_driver_that_does_not_start_is_answered_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA tensor whose device Triton cannot drive leaves at the device layer, with the driver's own words."""

    class Broken:
        @property
        def runtime(self) -> object:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(_checks, "INTERPRET", False)
    monkeypatch.setattr(_checks, "triton", Broken())
    monkeypatch.setattr(_checks, "driver_failure", _checks.driver_failure.__wrapped__)
    tensor = SimpleNamespace(dtype=torch.float16, is_cuda=True, device=torch.device("cuda"))
    assert _checks.refusal(tensor) == (
        "device",
        "Triton's driver does not start: RuntimeError: Failed to find C compiler",
    )


@pytest.mark.parametrize(
    "make",
    [out_of_resources, lambda: RuntimeError("CUDA error: an illegal memory access was encountered")],
    ids=["out_of_resources", "runtime_error"],
)
def test_f66_what_fails_after_writing_is_not_run_again(
    make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An in-place kernel that has started is launched once and its error is the caller's: no form meets its writes."""
    error, launches = make(), []

    def bind(*arguments: object, **options: object) -> Callable[..., None]:
        def launch(x: torch.Tensor, residual: torch.Tensor, *rest: torch.Tensor) -> None:
            launches.append(x.data_ptr())
            x.fill_(5.0)
            residual.add_(1.0)
            raise error

        return launch

    monkeypatch.setattr(_launch, "bind", bind)
    x, residual = randn(2, 8), randn(2, 8, seed=1)
    written = residual + 1.0
    for times in (1, 2):
        with pytest.raises(type(error)) as caught:
            add_rms_norm_(x, residual)
        assert caught.value is error
        # Once for each call of the caller's, a second one included.
        assert launches == [x.data_ptr()] * times
        assert_same_bits(x, torch.full_like(x, 5.0))
        assert_same_bits(residual, written)
        written = written + 1.0
    assert routing.report() == []


# A route that changes between the forward pass and its recomputation.

CHECKPOINTED: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (rms_norm, [(3, 80), (80,)]),
    "swiglu": (swiglu, [(3, 80), (3, 80)]),
    "swiglu_packed": (swiglu_packed, [(3, 80)]),
    "swiglu_linear": (swiglu_linear, [(3, 16), (32, 16), (32, 16)]),
    "add_rms_norm": (lambda *tensors: add_rms_norm(*tensors)[0], [(3, 80), (3, 80), (80,)]),
    "add_rms_norm_sum": (lambda *tensors: sum(add_rms_norm(*tensors)), [(3, 80), (3, 80)]),
}


def asking(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """Tensors of these shapes, for each choice of those that ask for a gradient."""
    for asked in itertools.product([False, True], repeat=len(shapes)):
        if any(asked):
            yield [
                randn(*shape, dtype=dtype, seed=seed).requires_grad_(want)
                for seed, (shape, want) in enumerate(zip(shapes, asked, strict=True))
            ]


def checkpointed(
    name: str, dtype: torch.dtype, change: Callable[[pytest.MonkeyPatch], object], forget: bool = True
) -> list[bool]:
    """For every choice of gradients: whether they are those without a checkpoint, or else a clear error.

    The change is made after the forward pass and holds while it is computed anew.
    """
    function, shapes = CHECKPOINTED[name]
    outcomes = []
    for leaves in asking(shapes, dtype):
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        expected = torch.autograd.grad(function(*leaves).pow(2).sum(), wanted)
        output = checkpoint(function, *leaves, use_reentrant=False)
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            if forget:
                _launch.forget_plans()
            try:
                found = torch.autograd.grad(output.pow(2).sum(), wanted)
            except CheckpointError:
                found = None
        _launch.forget_plans()
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        for gradient, other in zip(found or expected, expected, strict=True):
            assert torch.allclose(gradient.double(), other.double(), rtol=limit, atol=limit)
        outcomes.append(found is not None)
    return outcomes


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_f54_a_recomputation_that_triton_refuses_gives_no_wrong_gradient(name: str, dtype: torch.dtype) -> None:
    """Where PyTorch computes anew what Triton computed, the gradients are the same or torch says what differs."""

    def refuse(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(_checks, "refusal", lambda *tensors: ("inputs", "a test says so"))

    assert checkpointed(name, dtype, refuse) != []
    assert {route.reason for route in routing.report()} == {"a test says so"}


@pytest.mark.filterwarnings("ignore::triton_kernel_lab.routing.FallbackWarning")
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_f54_a_kernel_that_no_longer_loads_changes_no_gradient(name: str, forget: bool) -> None:
    """A plan outlasts the forward pass; where it is lost, PyTorch computes anew with the same tensors saved."""
    outcomes = checkpointed(name, torch.float32, lambda patch: failing(patch, out_of_resources()), forget)
    assert all(outcomes)
    assert {route.layer for route in routing.report()} == ({"launch"} if forget else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("inside", ["forward", "backward"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_f54_a_level_of_forward_mode_open_in_one_pass_changes_no_gradient(
    name: str, inside: str, dtype: torch.dtype
) -> None:
    """Tensors without a tangent take the same path within a level as outside: Triton's, whichever ask for gradients."""

    def level(of: str) -> contextlib.AbstractContextManager[object]:
        return forward_ad.dual_level() if of == inside else contextlib.nullcontext()

    function, shapes = CHECKPOINTED[name]
    for leaves in asking(shapes, dtype):
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        expected = torch.autograd.grad(function(*leaves).pow(2).sum(), wanted)
        with level("forward"), routing.strict():
            output = checkpoint(function, *leaves, use_reentrant=False)
        with level("backward"), routing.strict():
            found = torch.autograd.grad(output.pow(2).sum(), wanted)
        for gradient, other in zip(found, expected, strict=True):
            assert_same_bits(gradient, other)
    assert routing.report() == []


# A CUDA graph that is captured before the first call.


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_f62_a_cold_call_under_capture_is_no_fallback(
    name: str, gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is told to warm up, in strict mode or not; nothing is recorded or kept, the next call is served."""
    function, shapes = CHECKPOINTED[name]
    tensors = [randn(*shape).requires_grad_(gradient) for shape in shapes]
    for strict in (False, True):
        with monkeypatch.context() as patch, routing.strict(strict):
            # As on a GPU, where binding compiles.
            patch.setattr(_launch, "INTERPRET", False)
            patch.setattr(_launch, "architecture", lambda device: "interpreter")
            patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="warm up first"):
                function(*tensors)
    assert not any(map(len, _launch.snapshot()))
    with routing.strict():
        assert heard(function, *tensors) == []
    assert routing.report() == []


# Forward mode.

REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm": rms_norm_reference,
    "swiglu": swiglu_reference,
    "swiglu_packed": lambda x: swiglu_reference(*x.chunk(2, -1)),
    "swiglu_linear": swiglu_linear_reference,
    "add_rms_norm": lambda *tensors: add_rms_norm_reference(*tensors)[0],
    "add_rms_norm_sum": lambda *tensors: sum(add_rms_norm_reference(*tensors)),
}


# Torch itself scripts a decomposition when forward mode first meets an operator.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_f49_any_input_with_a_tangent_gives_the_output_its_own(name: str, asks: bool) -> None:
    """The tangent is that of the PyTorch form in float64, also where all inputs without one ask for a gradient."""
    function, shapes = CHECKPOINTED[name]
    for leaves in asking(shapes, torch.float32):
        carry = [leaf.requires_grad for leaf in leaves]
        tensors = [leaf.detach() for leaf in leaves]
        tangents = [randn(*shape, seed=9) * has for shape, has in zip(shapes, carry, strict=True)]
        wide = [[tensor.double() for tensor in each] for each in (tensors, tangents)]
        _, expected = torch.func.jvp(REFERENCES[name], *map(tuple, wide))
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(tensor, tangent) if has else tensor.requires_grad_(asks)
                for tensor, tangent, has in zip(tensors, tangents, carry, strict=True)
            ]
            found = forward_ad.unpack_dual(function(*duals)).tangent
        # A few roundings of fp32, of the largest that is added up.
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert {route.layer for route in routing.report()} == {"autograd"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_f56_a_compiled_call_keeps_the_tangent(name: str) -> None:
    """The compiler does not show which input carries one, so that within a level it sees the PyTorch form."""
    torch._dynamo.reset()
    function, shapes = CHECKPOINTED[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with forward_ad.dual_level():
        tensors = [forward_ad.make_dual(randn(*shape), randn(*shape, seed=1)) for shape in shapes]
        found, expected = (forward_ad.unpack_dual(call(*tensors)).tangent for call in (compiled, function))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_open_level_alone_takes_no_operator_from_triton() -> None:
    """Without a tangent among its inputs each of them is served as outside, and one may even write in place."""
    q = randn(1, 5, 2, 16)
    with forward_ad.dual_level(), routing.strict():
        add_rms_norm_(randn(2, 8), randn(2, 8, seed=1))
        qk_scores(randn(1, 2, 16), randn(1, 5, 1, 16))
        flash_attention(q.requires_grad_(), q, q, causal=True).sum().backward()
    assert q.grad is not None
    assert routing.report() == []


def test_a_tangent_is_not_written_over() -> None:
    """The in-place form refuses tensors that carry one, as it refuses those that ask for a gradient."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(randn(2, 8), randn(2, 8, seed=1))
        for pair in ((x, randn(2, 8)), (randn(2, 8), x)):
            with pytest.raises(ValueError, match=r"^add_rms_norm_: x: expected no gradient to be wanted"):
                add_rms_norm_(*pair)
