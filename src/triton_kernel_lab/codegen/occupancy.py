"""How many blocks of a kernel one multiprocessor can hold, by the documented limits of each target.

An upper bound from registers, shared memory and block size, as NVIDIA's occupancy
calculator has it; nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "TARGETS", "Limits", "Occupancy", "occupancy"]

WARP = 32
_REGISTERS_PER_SM = 65536
# Registers are given to a warp in units of 256, so to a thread in eights; warps sit on four partitions. Alike
# for all of these targets (cuda_occupancy.h).
_REGISTER_UNIT, _PARTITIONS = 256, 4
# Each block pays 1 KiB to the system, and shared memory is given in units of 128 bytes.
_RESERVED_BYTES, _SHARED_UNIT = 1024, 128


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor holds, and the shared memory that one block may ask for."""

    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int


# CUDA Programming Guide 13, "Compute Capabilities", the table of technical specifications. NVIDIA's own
# calculator, the cuda_occupancy.h that comes in Triton's wheel, has the same blocks and units. For 12.0 the
# Blackwell Tuning Guide has 32 blocks and 128 KiB: those are older than the guide's 24 and the whole cache's.
LIMITS = {
    "sm_80": Limits(64, 32, 164 << 10, 163 << 10),
    "sm_90": Limits(64, 32, 228 << 10, 227 << 10),
    "sm_100": Limits(64, 32, 228 << 10, 227 << 10),
    "sm_120": Limits(48, 24, 100 << 10, 99 << 10),
}
TARGETS = tuple(LIMITS)


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps that one multiprocessor holds at once, and what keeps out one more."""

    blocks: int
    warps: int
    ratio: float
    limited_by: tuple[str, ...]


def occupancy(target: str, *, registers: int, shared_bytes: int, warps: int) -> Occupancy:
    """The theoretical occupancy of a kernel.

    Args:
        target: a key of ``LIMITS``.
        registers: of a thread.
        shared_bytes: of a block.
        warps: of a block.

    Returns:
        ``blocks`` 0 where a block cannot be launched at all.
    """
    limits = LIMITS[target]
    fit = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": _by_registers(registers, warps),
        "shared_memory": _by_shared_memory(limits, shared_bytes),
    }
    blocks = min(fit.values())
    held = blocks * warps
    return Occupancy(blocks, held, round(held / limits.warps, 4), tuple(name for name in fit if fit[name] == blocks))


def _by_registers(registers: int, warps: int) -> int:
    of_warp = _up(max(registers, 1) * WARP, _REGISTER_UNIT)
    of_partition = _REGISTERS_PER_SM // _PARTITIONS // of_warp
    return of_partition * _PARTITIONS // warps


def _by_shared_memory(limits: Limits, shared_bytes: int) -> int:
    if shared_bytes > limits.block_shared_bytes:
        return 0
    return limits.shared_bytes // _up(shared_bytes + _RESERVED_BYTES, _SHARED_UNIT)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
