"""What a case tells the lab about an operator."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypeAlias

import torch

from triton_kernel_lab import registry
from triton_kernel_lab.cases import KERNELS

__all__ = [
    "DTYPES",
    "Baseline",
    "Bucket",
    "Case",
    "Cost",
    "Dims",
    "Outputs",
    "Tensors",
    "Variant",
    "dtype_name",
    "find",
    "load",
    "parse_shape",
    "randn",
    "shape_name",
    "through_autograd",
]

Dims = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]
Outputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Cost:
    """The least work of one call: each input read once, each output written once.

    ``read`` and ``write`` are bytes by tensor; ``flop`` counts a fused
    multiply-add as two; ``unit`` is the arithmetic that does them.
    """

    read: Mapping[str, int]
    write: Mapping[str, int]
    flop: int
    unit: str


@dataclass(frozen=True)
class Variant:
    """One way of calling an operator: inputs, the call, its eager form, its oracle.

    ``inputs`` draws seeded random tensors; ``run``, ``eager`` and ``oracle``
    take them in order. ``oracle`` computes in float64 and returns float64.
    ``dims`` limits the variant to these shapes.
    """

    name: str
    inputs: Callable[[Dims, torch.dtype, torch.Generator], Tensors]
    run: Callable[..., Outputs]
    eager: Callable[..., Outputs]
    oracle: Callable[..., Outputs]
    dims: tuple[Dims, ...] | None = None


@dataclass(frozen=True)
class Baseline:
    """Another way of doing the job of a case, somebody else's or a companion of our own.

    ``prepare`` turns an input set into what ``call`` takes, such as weights in
    another layout; it is not timed. ``in_place`` says that ``call`` writes its
    results over its inputs.
    """

    call: Callable[..., Outputs]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs
    in_place: bool = False


def through_autograd(forward: Callable[..., Outputs], outputs: int = 1) -> Baseline:
    """The backward pass of ``forward`` alone: the graph is built untimed, and kept.

    The inputs are the incoming gradient of each of the ``outputs`` of ``forward``,
    then its tensors; the outputs are the gradients of all of these.
    """

    def prepare(*inputs: torch.Tensor) -> Tensors:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs[outputs:]]
            made = forward(*leaves)
        return *(made if isinstance(made, tuple) else (made,)), *inputs[:outputs], *leaves

    def call(*prepared: torch.Tensor) -> Tensors:
        made, incoming, leaves = prepared[:outputs], prepared[outputs : 2 * outputs], prepared[2 * outputs :]
        gradients: Tensors = torch.autograd.grad(made, leaves, incoming, retain_graph=True)
        return gradients

    return Baseline(call, prepare)


@dataclass(frozen=True)
class Bucket:
    """One line of a launch table to be tuned: what it covers, where it is timed, what is tried.

    The line covers elements of up to ``itemsize`` bytes and shapes of up to
    ``rows`` x ``columns`` (None: any); ``configs`` are timed at ``dims``.
    """

    itemsize: int
    rows: int | None
    columns: int | None
    dims: Dims
    configs: tuple[Mapping[str, int | str], ...]


@dataclass(frozen=True)
class Case:
    """The yardstick of one operator.

    ``variants[0]`` is the one that is timed; ``timed`` and ``checked`` are
    shapes for a GPU, ``smoke`` those for the interpreter. ``also`` holds cells
    that are timed beside every shape of ``timed`` in every one of ``timed_dtypes``. ``library`` holds
    torch's own operators for the same job by the name that tables print, and
    ``peers`` other people's: a function that imports one and returns it.
    ``companions`` are further ways into our own kernels, such as through
    autograd: timed and checked, and nobody's competitor.
    ``output_dtypes`` has an entry for each output, None where it is that of the
    cell; ``exact`` says that the outputs must equal the oracle. ``aliases`` are
    further names on the command line, and ``short`` makes dimensions of a
    shape with fewer numbers than ``axes``. ``table`` is the file of the launch
    table, where it is not this package's.
    """

    name: str
    cli_name: str
    axes: tuple[str, ...]
    variants: tuple[Variant, ...]
    cost: Callable[[Dims, torch.dtype], Cost]
    timed: tuple[Dims, ...]
    checked: tuple[Dims, ...]
    smoke: tuple[Dims, ...]
    timed_dtypes: tuple[str, ...] = ("float16", "bfloat16")
    also: tuple[tuple[Dims, str], ...] = ()
    checked_dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    library: Mapping[str, Callable[..., Outputs] | Baseline] = field(default_factory=dict)
    peers: Mapping[str, Callable[[], Callable[..., Outputs] | Baseline]] = field(default_factory=dict)
    companions: Mapping[str, Callable[..., Outputs] | Baseline] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    output_dtypes: tuple[torch.dtype | None, ...] = (None,)
    exact: bool = False
    aliases: tuple[str, ...] = ()
    short: tuple[tuple[str, ...], Callable[..., Dims]] | None = None
    table: Path | None = None

    @property
    def cells(self) -> tuple[tuple[Dims, str], ...]:
        """Every timed cell: a shape and a dtype."""
        return (*((dims, dtype) for dims in self.timed for dtype in self.timed_dtypes), *self.also)

    def parse_dims(self, text: str) -> Dims:
        """The dimensions that a shape such as ``128x1024`` names for this case."""
        dims = parse_shape(text)
        if self.short and len(dims) == len(self.short[0]):
            return self.short[1](*dims)
        if len(dims) != len(self.axes):
            spellings = [self.axes, *([self.short[0]] if self.short else [])]
            expected = " or ".join("x".join(axes) for axes in spellings)
            raise ValueError(f"{self.cli_name}: shape {text}: expected {expected}, found {len(dims)} numbers.")
        return dims


def load(kernel: str) -> Case:
    """The case of a kernel in the registry, or of one that another package provides.

    Raises:
        triton_kernel_lab.registry.RegistryError: several packages provide it, or
            what the entry point names is not its case.
    """
    entry = registry.provider(kernel)
    return _ours(kernel) if entry is None else _provided(entry)


def _ours(kernel: str) -> Case:
    case: Case = importlib.import_module(f"triton_kernel_lab.cases.{kernel}").CASE
    return case


def _provided(entry: EntryPoint) -> Case:
    try:
        case = entry.load()
    # Whatever another package's import raises, the message says whose it is.
    except Exception as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise registry.RegistryError(f"{registry.describe(entry)}: expected a Case, found {found}.") from error
    if not isinstance(case, Case):
        raise registry.RegistryError(f"{registry.describe(entry)}: expected a Case, found {type(case).__name__}.")
    if case.name != entry.name:
        raise registry.RegistryError(
            f"{registry.describe(entry)}: expected a case of the name {entry.name!r}, found {case.name!r}."
        )
    return case


def find(name: str) -> Case:
    """The case that a command line names, by registry name or command-line name.

    Raises:
        ValueError: no kernel has that name.
        triton_kernel_lab.registry.RegistryError: as of ``load``, or a kernel of
            another package answers to a name of ours.
    """
    ours = [_ours(kernel) for kernel in KERNELS]
    for case in ours:
        if name in _names(case):
            return load(case.name)
    others = registry.names()
    for kernel in [name] if name in others else others:
        # A broken one stands in nobody's way but of those who ask for it.
        with contextlib.suppress(*([] if kernel == name else [registry.RegistryError])):
            case = load(kernel)
            if name in _names(case):
                _expect_apart(case, ours)
                return case
    known = ", ".join([*(case.cli_name for case in ours), *others])
    raise ValueError(f"kernel {name}: expected one of {known}.")


def _names(case: Case) -> tuple[str, ...]:
    return (case.name, case.cli_name, *case.aliases)


def _expect_apart(case: Case, ours: list[Case]) -> None:
    """Raise unless a case of another package answers to no name of ours, which would hide it."""
    for other in ours:
        if taken := set(_names(case)) & set(_names(other)):
            entry = registry.provider(case.name)
            assert entry is not None
            raise registry.RegistryError(
                f"{registry.describe(entry)}: expected names of its own, found {sorted(taken)[0]!r}, "
                f"a name of the kernel {other.name} of triton-kernel-lab."
            )


def parse_shape(text: str) -> Dims:
    """The numbers of a shape such as ``128x1024``."""
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() for part in parts) or 0 in (dims := tuple(map(int, parts))):
        raise ValueError(f"shape {text}: expected positive whole numbers joined by x, such as 128x1024.")
    return dims


def shape_name(dims: Dims) -> str:
    """The text of dimensions, such as ``128x1024``."""
    return "x".join(map(str, dims))


def dtype_name(dtype: torch.dtype) -> str:
    """The text of a dtype, such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, mean: float = 0.0, scale: float = 1.0
) -> torch.Tensor:
    """Seeded normal numbers, drawn in fp32 on the generator's device and rounded to ``dtype``."""
    values = torch.empty(shape, dtype=torch.float32, device=generator.device)
    if math.prod(shape):
        values.normal_(mean, scale, generator=generator)
    return values.to(dtype)
