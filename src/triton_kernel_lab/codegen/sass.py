"""What a disassembled kernel consists of: counts of the instructions that tell how it was compiled."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["HotLoop", "Instructions", "Resources", "count_each", "resources"]

# An address, a predicate where there is one, the opcode with its modifiers, the operands.
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?PT?\d*\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)([^;\n]*)", re.MULTILINE
)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_INSTRUCTION_BYTES = 16
_USAGE = re.compile(r"Function (\S+):\s+(.*)")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
# mma.sync is HMMA, IMMA, QMMA, OMMA; wgmma has a G in it; tcgen05 begins with UTC.
_TENSOR_CORE = re.compile(r"(?:UTC)?[BDHIOQ]G?MMA")
# cp.async; bulk copies; those of the tensor memory accelerator.
_ASYNC_COPIES = frozenset({"LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG", "UTMAREDG"})
_GLOBAL_MEMORY = _ASYNC_COPIES | {"LDG", "STG", "RED", "REDG", "ATOM", "ATOMG"}
# Of these the opcode says how much one thread fetches.
_FETCHING = ("LDG", "LDGSTS")
_LEAVING = frozenset({"EXIT", "RET", "BRX", "JMP"})
_ENDING = _LEAVING | {"BRA"}


class _Instruction(NamedTuple):
    """One line of a listing; ``target`` is where a branch leads."""

    address: int
    conditional: bool
    parts: list[str]
    target: int | None


Blocks = dict[int, list[_Instruction]]


@dataclass(frozen=True)
class HotLoop:
    """What one turn of the loop that moves most of the data executes; the whole kernel where it has no such loop.

    ``load_bytes`` is what the global loads of one thread fetch in a turn, bulk
    copies apart, of which the code does not say the size.
    """

    whole_kernel: bool
    instructions: int
    load_bytes: int


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
    hot_loop: HotLoop


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
    kernels: list[list[_Instruction]] = [[] for _ in sizes]
    instructions = [_instruction(*found) for found in _INSTRUCTION.findall(listing)]
    # Otherwise a new way of printing would read as kernels that became smaller.
    if len(instructions) * _INSTRUCTION_BYTES != sum(sizes):
        raise ValueError(f"nvdisasm: expected {sum(sizes)} bytes of code, found {len(instructions)} instructions.")
    for each in instructions:
        kernels[bisect.bisect_right(ends, each.address)].append(each)
    return [_count(each) for each in kernels]


def _instruction(address: str, predicate: str, opcode: str, operands: str) -> _Instruction:
    parts = opcode.split(".")
    found = _TARGET.search(operands) if parts[0] == "BRA" else None
    # A branch may name its condition as an operand, too.
    conditional = bool(predicate) or (parts[0] == "BRA" and "," in operands)
    return _Instruction(int(address, 16), conditional, parts, int(found[1], 16) if found else None)


def _count(instructions: Sequence[_Instruction]) -> Instructions:
    parts = [each.parts for each in instructions]
    names = Counter(name for name, *_ in parts)
    return Instructions(
        total=len(parts) - names["NOP"],
        global_loads=_widths(parts, "LDG"),
        global_stores=_widths(parts, "STG"),
        local_loads=names["LDL"],
        local_stores=names["STL"],
        tensor_core={name: names[name] for name in sorted(names) if _TENSOR_CORE.fullmatch(name)},
        async_copies={name: names[name] for name in sorted(names) if name in _ASYNC_COPIES},
        hot_loop=_hot_loop(instructions),
    )


def _hot_loop(instructions: Sequence[_Instruction]) -> HotLoop:
    """Of the innermost loops that touch global memory the one with most instructions that do, the first of equals."""
    blocks = _blocks(instructions)
    moving = [(body, many) for body in _loops(blocks) if (many := _moves(blocks, body))]
    innermost = [found for found in moving if not any(other < found[0] for other, _ in moving)]
    if not innermost:
        return _turn(instructions, whole_kernel=True)
    body = max(innermost, key=lambda found: found[1])[0]
    return _turn([each for start in sorted(body) for each in blocks[start]], whole_kernel=False)


def _moves(blocks: Blocks, body: Iterable[int]) -> int:
    """How many instructions of some blocks touch global memory."""
    return sum(each.parts[0] in _GLOBAL_MEMORY for start in body for each in blocks[start])


def _turn(instructions: Sequence[_Instruction], whole_kernel: bool) -> HotLoop:
    parts = [each.parts for each in instructions]
    fetched = (int(bits) * many for name in _FETCHING for bits, many in _widths(parts, name).items())
    return HotLoop(whole_kernel, sum(name != "NOP" for name, *_ in parts), sum(fetched) // 8)


def _blocks(instructions: Sequence[_Instruction]) -> Blocks:
    """The straight pieces of a kernel's code by the address at which each starts."""
    starts = {each.target for each in instructions}
    starts |= {each.address + _INSTRUCTION_BYTES for each in instructions if each.parts[0] in _ENDING}
    found: Blocks = {}
    for each in instructions:
        if each.address in starts or not found:
            found[each.address] = []
        found[next(reversed(found))].append(each)
    return found


def _successors(blocks: Blocks) -> dict[int, list[int]]:
    """Where each block may go on; a call comes back, and so goes on behind itself."""
    found = {}
    for start, block in blocks.items():
        last = block[-1]
        leads = [] if last.target is None else [last.target]
        if last.conditional or (last.target is None and last.parts[0] not in _LEAVING):
            leads.append(last.address + _INSTRUCTION_BYTES)
        found[start] = [each for each in leads if each in blocks]
    return found


def _loops(blocks: Blocks) -> list[frozenset[int]]:
    """The natural loops: for each branch back to a block that all ways to the branch pass, what lies between.

    A block that spins at the end of the code and then jumps back into the middle
    of a loop is part of that loop, and makes none of its own.
    """
    successors = _successors(blocks)
    before: dict[int, set[int]] = {start: set() for start in blocks}
    for start, leads in successors.items():
        for lead in leads:
            before[lead].add(start)
    passed = _dominators(blocks, before)
    bodies: dict[int, set[int]] = {}
    for start, leads in successors.items():
        for head in (lead for lead in leads if lead in passed[start]):
            body = bodies.setdefault(head, {head})
            queue = [start]
            while queue:
                if (found := queue.pop()) not in body:
                    body.add(found)
                    queue += before[found]
    return [frozenset(body) for body in bodies.values()]


def _dominators(blocks: Blocks, before: dict[int, set[int]]) -> dict[int, set[int]]:
    """For each block those that every way to it passes, itself among them; none for what is never reached."""
    entry = next(iter(blocks))
    found: dict[int, set[int]] = {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for start in blocks:
            known = [found[each] for each in before[start] if each in found]
            if start == entry or not known:
                continue
            now = set.intersection(*known) | {start}
            if found.get(start) != now:
                found[start], changed = now, True
    return {start: found.get(start, set()) for start in blocks}


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
