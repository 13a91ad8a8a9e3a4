"""Compiling a launch for a target that is not there, and reading the binary.

Triton's own just-in-time path does it, so that each argument is specialised as on
a device; only the driver that it asks for the target is a stand-in.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from triton_kernel_lab.codegen import sass
from triton_kernel_lab.codegen.binaries import read_all
from triton_kernel_lab.codegen.launches import Launch
from triton_kernel_lab.codegen.occupancy import WARP, occupancy
from triton_kernel_lab.ops import _launch

__all__ = ["compile_launch", "describe", "reason"]


class _StandIn:
    """Answers what Triton asks a driver before it launches."""

    def __init__(self, target: str) -> None:
        self.number = int(target.removeprefix("sm_"))

    # Triton caches compiled kernels by device: each target is a device of its own.
    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.number, WARP)


def compile_launch(launch: Launch, target: str) -> Any:
    """Triton's compiled kernel of a launch for ``target``; raises whatever the compiler does.

    Triton's driver is another one after this: a process of its own calls it.
    """
    triton.runtime.driver.set_active(_StandIn(target))
    arguments = _launch.arguments(launch.tensors, launch.tiled)
    # A failing ptxas makes Triton print the whole of the PTX.
    with contextlib.redirect_stdout(io.StringIO()):
        return launch.kernel.warmup(*arguments, *launch.scalars, **launch.constants, **launch.options, grid=launch.grid)


def reason(error: Exception) -> str:
    """The compiler's message in one line, without the names of temporary files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if re.search(r"\b(error|fatal)\s*:", line)] or lines[-1:]
    text = re.sub(r"\S*\.ptx\b", "PTX", said[0]) if said else "no message"
    return f"{type(error).__name__}: {text}"


def describe(compiled: Sequence[tuple[Any, Launch]], target: str) -> list[dict[str, Any]]:
    """What an artifact says of compiled kernels and the launches that they were compiled for."""
    read = read_all([(kernel.metadata.name, kernel.asm["cubin"]) for kernel, _ in compiled], target)
    return [_describe(*each, *found, target) for each, found in zip(compiled, read, strict=True)]


def _describe(
    compiled: Any, launch: Launch, used: sass.Resources, instructions: sass.Instructions, target: str
) -> dict[str, Any]:
    """``elements_per_thread`` are results over threads launched.

    ``hot_loop`` counts a turn of the loop that moves most of the data, and its
    ``instructions_per_element`` by the elements, of the first argument's size, that
    its loads fetch; null where they fetch nothing that the code tells the size of.
    """
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    fit = occupancy(target, registers=used.registers, shared_bytes=shared, warps=warps)
    threads = warps * WARP * math.prod(launch.grid)
    counts = asdict(instructions)
    total, loop = counts.pop("total"), counts.pop("hot_loop")
    elements = loop["load_bytes"] / launch.tensors[0].element_size()
    loop["instructions_per_element"] = round(loop["instructions"] / elements, 4) if elements else None
    return {
        **asdict(used),
        **counts,
        "instructions": total,
        "elements_per_thread": round(launch.elements / threads, 4),
        "hot_loop": loop,
        "shared_bytes": shared,
        "occupancy": asdict(fit) | {"limited_by": list(fit.limited_by)},
        "ptx_sha256": hashlib.sha256(compiled.asm["ptx"].encode()).hexdigest(),
        "cubin_sha256": hashlib.sha256(compiled.asm["cubin"]).hexdigest(),
    }
