"""Reading compiled binaries with the tools that come in Triton's wheel."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton

from triton_kernel_lab.codegen import sass

__all__ = ["read_all", "tool_versions"]

# How nvdisasm calls the instruction sets for which Triton assembles.
_INSTRUCTION_SETS = {"sm_80": "SM80", "sm_90": "SM90a", "sm_100": "SM100a", "sm_120": "SM120a"}


def read_all(cubins: Sequence[tuple[str, bytes]], target: str) -> list[tuple[sass.Resources, sass.Instructions]]:
    """What each kernel takes and consists of.

    Args:
        cubins: name and binary of each kernel, all for ``target``.
        target: such as ``sm_90``.
    """
    with tempfile.TemporaryDirectory() as folder:
        taken, codes = [], []
        for index, (name, cubin) in enumerate(cubins):
            where = Path(folder) / str(index)
            where.mkdir()
            (where / "kernel.cubin").write_bytes(cubin)
            taken.append(sass.resources(_tool("cuobjdump", "--dump-resource-usage", "kernel.cubin", cwd=where), name))
            _tool("cuobjdump", "--extract-text", "all", "kernel.cubin", cwd=where)
            codes.append(b"".join(path.read_bytes() for path in sorted(where.glob("*.bin"))))
        return list(zip(taken, _disassemble(codes, target, Path(folder)), strict=True))


def _disassemble(codes: Sequence[bytes], target: str, folder: Path) -> Iterable[sass.Instructions]:
    # All at once: starting nvdisasm takes longer than compiling a small kernel.
    (folder / "code.bin").write_bytes(b"".join(codes))
    listing = _tool("nvdisasm", "--binary", _INSTRUCTION_SETS[target], "code.bin", cwd=folder)
    return sass.count_each(listing, [len(code) for code in codes])


def _tool(name: str, *arguments: str, cwd: Path) -> str:
    """What a tool prints."""
    command = [getattr(triton.knobs.nvidia, name).path, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


@functools.cache
def tool_versions() -> dict[str, str]:
    """The release of each tool; sm_100 and later have an assembler of their own."""
    names = ("ptxas", "ptxas_blackwell", "nvdisasm")
    return {name: getattr(triton.knobs.nvidia, name).version for name in names}
