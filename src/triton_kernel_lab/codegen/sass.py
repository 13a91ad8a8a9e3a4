"""What a disassembled kernel consists of: counts of the instructions that tell how it was compiled."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Instructions", "Resources", "count_each", "resources"]

# An address, a predicate where there is one, the opcode with its modifiers.
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?PT?\d*\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE)
_INSTRUCTION_BYTES = 16
_USAGE = re.compile(r"Function (\S+):\s+(.*)")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
# mma.sync is HMMA, IMMA, QMMA, OMMA; wgmma has a G in it; tcgen05 begins with UTC.
_TENSOR_CORE = re.compile(r"(?:UTC)?[BDHIOQ]G?MMA")
# cp.async; bulk copies; those of the tensor memory accelerator.
_ASYNC_COPIES = frozenset({"LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG", "UTMAREDG"})


@dataclass(frozen=True)
class Instructions:
    """Static counts over a kernel's code: an instruction in a loop counts once.

    ``total`` leaves out the NOPs that pad the code; ``global_loads`` and
    ``global_stores`` go by the bits that one instruction moves for one thread;
    ``local_loads`` and ``local_stores`` move spilled registers.
    """

    total: int
    global_loads: dict[str, int]
    global_stores: dict[str, int]
    local_loads: int
    local_stores: int
    tensor_core: dict[str, int]
    async_copies: dict[str, int]


@dataclass(frozen=True)
class Resources:
    """What a thread of a kernel takes, as the binary states it."""

    registers: int
    stack_bytes: int
    local_bytes: int


def count_each(listing: str, sizes: Sequence[int]) -> list[Instructions]:
    """The counts of kernels that ``nvdisasm`` printed one after the other.

    Args:
        listing: their disassembly, addresses counted from the first one's start.
        sizes: the bytes of code of each.

    Raises:
        ValueError: the listing does not hold each instruction of the code.
    """
    ends = list(itertools.accumulate(sizes))
    opcodes: list[list[str]] = [[] for _ in sizes]
    instructions = _INSTRUCTION.findall(listing)
    # Otherwise a new way of printing would read as kernels that became smaller.
    if len(instructions) * _INSTRUCTION_BYTES != sum(sizes):
        raise ValueError(f"nvdisasm: expected {sum(sizes)} bytes of code, found {len(instructions)} instructions.")
    for address, opcode in instructions:
        opcodes[bisect.bisect_right(ends, int(address, 16))].append(opcode)
    return [_count(each) for each in opcodes]


def _count(opcodes: Sequence[str]) -> Instructions:
    parts = [opcode.split(".") for opcode in opcodes]
    names = Counter(name for name, *_ in parts)
    return Instructions(
        total=len(parts) - names["NOP"],
        global_loads=_widths(parts, "LDG"),
        global_stores=_widths(parts, "STG"),
        local_loads=names["LDL"],
        local_stores=names["STL"],
        tensor_core={name: names[name] for name in sorted(names) if _TENSOR_CORE.fullmatch(name)},
        async_copies={name: names[name] for name in sorted(names) if name in _ASYNC_COPIES},
    )


def _widths(opcodes: Iterable[list[str]], name: str) -> dict[str, int]:
    """How many instructions of one name move how many bits; 32 is the width that is not written."""
    modifiers = (parts for first, *parts in opcodes if first == name)
    bits = (next((_WIDTHS[part] for part in parts if part in _WIDTHS), 32) for parts in modifiers)
    return {str(width): many for width, many in sorted(Counter(bits).items())}


def resources(listing: str, function: str) -> Resources:
    """What ``cuobjdump --dump-resource-usage`` says of one function.

    Raises:
        ValueError: the function is not in the listing.
    """
    for name, usage in _USAGE.findall(listing):
        if name == function:
            fields: dict[str, Any] = dict(field.split(":") for field in usage.split())
            return Resources(int(fields["REG"]), int(fields["STACK"]), int(fields["LOCAL"]))
    raise ValueError(f"cuobjdump: expected the resources of {function}, found none.")
