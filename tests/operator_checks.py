"""What the tests of every operator share: where they run, poisoned memory, and when an output is right."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_kernel_lab.lab import check

DEVICE = torch.device("cuda" if torch.cuda.device_count() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
# The interpreter truncates bf16 stores, so no bf16 test of it could claim anything of the kernel.
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.float16, torch.bfloat16, torch.float32]
POISON = 1e4

# One unit in the last place of the dtype; fp32 promises IEEE arithmetic.
_LIMITS = {
    torch.float16: check.Limit(2.0**-10, 2.0**-10),
    torch.bfloat16: check.Limit(2.0**-7, 2.0**-7),
    torch.float32: check.Limit(2e-6, 2e-6),
}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Seeded normal numbers on the device under test."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Random numbers at any strides, in a buffer just long enough."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
    return randn(offset + last + 1, dtype=dtype).as_strided(tuple(shape), tuple(strides), offset)


def assert_right(output: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> None:
    """The output has the oracle's shape and values, its own dtype, and lies densely."""
    assert (output.shape, output.dtype, output.device) == (oracle.shape, dtype, oracle.device)
    assert output.is_contiguous()
    assert check.verdict(check.measure(output, oracle.double()), _LIMITS[dtype]) == []


def assert_same_bits(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Both tensors hold the same bits; -0 is not 0, and NaN is itself."""
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[output.element_size()]
    assert torch.equal(output.contiguous().view(bits), expected.contiguous().view(bits))


def amid_poison(x: torch.Tensor, margin: int = 5) -> tuple[torch.Tensor, Callable[[], bool]]:
    """The same values with large ones before and after each row; also whether all of that is untouched."""
    columns = x.shape[-1]
    wide = torch.full((*x.shape[:-1], columns + 2 * margin), POISON, dtype=x.dtype, device=x.device)
    inner = wide[..., margin : margin + columns]
    inner.copy_(x)
    before = wide.clone()
    return inner, lambda: torch.equal(wide, before)


def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the tensors that are made contiguous from now on."""
    shapes: list[torch.Size] = []
    contiguous = torch.Tensor.contiguous

    def recording(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return contiguous(x)

    monkeypatch.setattr(torch.Tensor, "contiguous", recording)
    return shapes


def gradients(
    function: Callable[..., torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor
) -> list[Any]:
    """The gradient of a scalar loss of the output with respect to each tensor; None for one that asks for none."""
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    loss(function(*leaves)).backward()
    return [leaf.grad for leaf in leaves]


# F08: what reaches a backward pass is stride 0, strided, transposed or one row for all.
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda y: y.sum(),
    "every_second": lambda y: y[..., ::2].sum(),
    "transposed": lambda y: y.transpose(0, 1).contiguous().pow(2).sum(),
    "one_row_expanded": lambda y: (y * torch.linspace(-1, 1, y.shape[-1]).to(y).expand_as(y)).sum(),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Within the context PyTorch refuses what has another result on each run."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def graphs_compiled(function: Callable[..., Any], calls: Iterable[tuple[torch.Tensor, ...]]) -> int:
    """F56: into how many graphs torch.compile makes these calls, each of which gives what the eager call gives."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for inputs in calls:
        found, expected = compiled(*inputs), function(*inputs)
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert torch.equal(found, expected)
    return len(graphs)


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter of the same Python, which imports this checkout and these tests."""
    path = os.pathsep.join([os.fspath(Path(__file__).parent), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-c", code, *arguments]
    inherited = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run(command, env=inherited, capture_output=True, text=True, check=False)


def far_apart(columns: int) -> torch.Tensor | None:
    """F01: three fp16 rows 2^30 + 16 elements apart, so that the last begins beyond 2^31; None without the memory.

    Only the touched pages of the buffer ever exist. The stride itself stays below 2^31:
    a larger one would be passed as 64 bits and hide a 32-bit product.
    """
    stride = 2**30 + 16
    try:
        buffer = torch.empty(2 * stride + columns, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        return None
    rows = buffer.as_strided((3, columns), (stride, 1))
    return rows.copy_(randn(3, columns, dtype=torch.float16))


def root_mean_square(row: Sequence[float]) -> float:
    """The root of the mean square of a row, summed exactly."""
    return math.sqrt(math.fsum(value * value for value in row) / len(row))
