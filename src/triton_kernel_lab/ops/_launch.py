"""Launching a kernel at the cost of one C call.

``kernel[grid](...)`` binds and hashes its arguments anew on each call, which
costs more than a small kernel runs. A plan does that once per signature; later
calls of the signature go straight to the compiled launcher. The signature that
a plan is stored under must therefore hold all that Triton specialises on:
dtypes, pointer alignment, and the value of each integer.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triton_kernel_lab.ops._triton import INTERPRET, triton

__all__ = [
    "PLAIN_TYPES",
    "Launch",
    "PlanCache",
    "Tiled",
    "architecture",
    "arguments",
    "bind",
    "choose",
    "forced",
    "forget_plans",
    "launches",
    "processors",
    "restore",
    "snapshot",
]

Config = Mapping[str, Any]
_PLAN_LIMIT = 4096
_caches: list[PlanCache] = []
_launches: deque[Launch] = deque(maxlen=256)
_forced: list[Config] = []
PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
"""Ordinary tensors: not fake, functional or otherwise wrapped."""


class PlanCache(dict[Any, Any]):
    """Plans by signature; emptied when full, so that no stream of shapes fills memory."""

    def __init__(self) -> None:
        super().__init__()
        _caches.append(self)

    def keep(self, key: Any, plan: Any) -> Any:
        """Store a plan and return it."""
        if len(self) >= _PLAN_LIMIT:
            self.clear()
        self[key] = plan
        return plan


@dataclass(frozen=True)
class Launch:
    """A compiled kernel with the configuration that it was bound with."""

    kernel: str
    config: Config
    registers: int
    spills: int
    shared_bytes: int
    cubin_sha256: str


@dataclass(frozen=True)
class Tiled:
    """How a kernel sees a tensor through a tensor memory descriptor: shape, strides, and the tile of one copy."""

    shape: Sequence[int]
    strides: Sequence[int]
    tile: Sequence[int]
    layout: Any


class _Described(NamedTuple):
    """What Triton's launcher reads of a descriptor, without the checks that its own class repeats at each call."""

    base: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"


def launches() -> list[Launch]:
    """The kernels bound since ``forget_plans``, oldest first."""
    return list(_launches)


def forget_plans() -> None:
    """Drop every plan, so that the next call of each operator binds again."""
    for cache in _caches:
        cache.clear()
    _launches.clear()


def snapshot() -> list[dict[Any, Any]]:
    """The plans of every operator, to put back with ``restore``."""
    return [dict(cache) for cache in _caches]


def restore(plans: list[dict[Any, Any]]) -> None:
    """Make the plans of a snapshot the current ones."""
    for cache, kept in zip(_caches, plans, strict=True):
        cache.clear()
        cache.update(kept)


@contextlib.contextmanager
def forced(config: Config) -> Iterator[None]:
    """Within the context, bind with ``config`` whatever the launch tables say."""
    forget_plans()
    _forced.append(config)
    try:
        yield
    finally:
        _forced.pop()
        forget_plans()


@functools.cache
def architecture(device: int) -> str:
    """The key of a launch table for a CUDA device, or for the interpreter."""
    if INTERPRET:
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def processors(device: int) -> int:
    """How many multiprocessors a CUDA device has; 4 stand for them where there is none."""
    if device < 0 or not torch.cuda.is_available():
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def _table(kernel: str | Path) -> dict[str, list[dict[str, Any]]]:
    path = Path(__file__).parent / "launch" / f"{kernel}.json" if isinstance(kernel, str) else kernel
    table: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))["architectures"]
    return table


def _nearest(table: Mapping[str, Any], arch: str) -> str:
    """An architecture without measured entries takes those of the closest older one."""
    if arch in table:
        return arch
    known = sorted((name for name in table if name != "interpreter"), key=lambda name: int(name[3:]))
    older = [name for name in known if int(name[3:]) <= int(arch[3:])]
    return older[-1] if older else known[0]


def choose(kernel: str | Path, arch: str, *, itemsize: int, rows: int, columns: int) -> Config:
    """The launch configuration of a shape: the first entry of the table that covers it.

    ``kernel`` names a table of this package, or is the file of another package's.
    """
    if _forced:
        return _forced[-1]
    table = _table(kernel)
    for entry in table[_nearest(table, arch)]:
        if (
            itemsize <= entry["max_itemsize"]
            and rows <= (entry["max_rows"] or rows)
            and columns <= (entry["max_columns"] or columns)
        ):
            config: Config = entry["config"]
            return config
    raise LookupError(f"launch table {kernel}: no entry for {arch} with {itemsize} bytes, {rows} x {columns}.")


def arguments(tensors: Sequence[torch.Tensor], tiled: Sequence[Tiled]) -> tuple[Any, ...]:
    """What a kernel is compiled for: descriptors of the first tensors, one for each of ``tiled``, and the others."""
    if not tiled:
        return tuple(tensors)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    described = [
        TensorDescriptor(x, list(each.shape), list(each.strides), list(each.tile), each.layout)
        for x, each in zip(tensors, tiled, strict=False)
    ]
    return (*described, *tensors[len(tiled) :])


def bind(
    kernel: Any,
    grid: Sequence[int],
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[int | float],
    constants: Mapping[str, Any],
    *,
    config: Config,
    num_warps: int,
    num_stages: int | None = None,
    maxnreg: int | None = None,
    tiled: Sequence[Tiled] = (),
) -> Callable[..., None]:
    """Compile ``kernel`` for a signature and return its launcher.

    Args:
        kernel: a ``triton.jit`` function whose parameters are the tensors, then
            the scalars, then the constexprs, in this order.
        grid: programs along up to three axes.
        tensors: representative tensors; later ones must agree in dtype,
            device and 16-byte alignment.
        scalars: the integers and floats of every later call.
        constants: the constexprs by name.
        config: what the launch table chose, kept for the record.
        num_warps: warps a program.
        num_stages: loads of a loop in flight; None leaves it to Triton.
        maxnreg: registers a thread at most; None for no limit.
        tiled: how the first tensors are described, where the kernel takes
            descriptors instead of pointers.

    Returns:
        A function that takes the tensors and launches on the current stream, in any thread.

    Raises:
        RuntimeError: the current stream of the tensors' device is being captured.
    """
    if INTERPRET:
        return lambda *tensors: kernel[tuple(grid)](*tensors, *scalars, **constants)
    names = kernel.arg_names[len(tensors) + len(scalars) :]
    assert set(names) == set(constants), (names, constants)
    device = tensors[0].get_device()
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    given = {name: value for name, value in options.items() if value is not None}
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel.fn.__module__}.{kernel.fn.__name__}: a CUDA graph is being captured, and this call would have"
                " to compile and load a kernel; warm up first: call the operator once with these shapes, strides and"
                " dtypes, best with these very tensors, before capturing."
            )
        compiled = kernel.warmup(*arguments(tensors, tiled), *scalars, **constants, grid=tuple(grid), **given)
        # Loads the binary and makes the launcher, on this device.
        _ = compiled.run
    _launches.append(_describe(kernel, compiled, config))
    stream = triton.runtime.driver.active.get_current_stream
    start, fixed = _entry(compiled)
    x, y, z = (*grid, 1, 1)[:3]
    tail = (*scalars, *(constants[name] for name in names))
    current_device, data_ptr = torch.cuda.current_device, torch.Tensor.data_ptr

    def launch(*tensors: torch.Tensor) -> None:
        if current_device() == device:
            start(x, y, z, stream(device), *fixed, *map(data_ptr, tensors), *tail)
            return
        with torch.cuda.device(device):
            start(x, y, z, stream(device), *fixed, *map(data_ptr, tensors), *tail)

    def launch_described(*tensors: torch.Tensor) -> None:
        described = [_Described(x, each.shape, each.strides) for x, each in zip(tensors, tiled, strict=False)]
        with contextlib.nullcontext() if current_device() == device else torch.cuda.device(device):
            start(x, y, z, stream(device), *fixed, *described, *map(data_ptr, tensors[len(tiled) :]), *tail)

    return launch_described if tiled else launch


def _entry(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What starts a compiled kernel, and its arguments between the stream and the pointers.

    Triton's launcher is a Python object round a C function. Calling the C
    function saves almost a microsecond, but its signature changes between
    releases: only the one known is called, and only where no scratch memory
    has to be allocated.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    no_hooks = (None, None, None)
    scratch = (getattr(run, name, 1) for name in ("global_scratch_size", "profile_scratch_size"))
    if triton.__version__.startswith("3.6.") and not any(scratch):
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, *no_hooks)
    start = functools.partial(_with_scratch, run) if getattr(run, "global_scratch_size", 0) else run
    return start, (function, packed, *no_hooks)


def _with_scratch(run: Callable[..., None], *arguments: Any) -> None:
    """Launch what makes tensor descriptors, in memory that Triton asks an allocator for each time.

    Triton keeps the allocator for each thread, and one that did not plan, such
    as autograd's, has none. In a copy of the context the caller's own stays.
    """
    context = contextvars.copy_context()
    context.run(triton.set_allocator, _scratch)
    context.run(run, *arguments)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for one launch, from PyTorch's allocator, which keeps it until the stream has used it."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _describe(kernel: Any, compiled: Any, config: Config) -> Launch:
    return Launch(
        kernel=kernel.fn.__name__,
        config=dict(config),
        registers=compiled.n_regs,
        spills=compiled.n_spills,
        shared_bytes=compiled.metadata.shared,
        cubin_sha256=hashlib.sha256(compiled.asm["cubin"]).hexdigest(),
    )
