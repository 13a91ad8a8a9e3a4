"""How ``int4_linear`` stores its weights: signed 4-bit integers by tiles of 16 rows and 128 columns.

A tile is 1024 bytes, row by row, 64 bytes a row. Column ``32 j + h`` of a tile
lies in nibble j of the 16-bit little-endian word h of its row, counted from the
lowest bits: byte ``2 h`` holds columns h (low nibble) and 32 + h (high nibble),
byte ``2 h + 1`` columns 64 + h and 96 + h. A nibble is the integer plus 8
(offset binary). So byte 0x8F at place 6 of a row says: column 3 is 15 - 8 = 7,
column 35 is 8 - 8 = 0.

One thread's 16 bytes then unpack, two weights an instruction, into the registers
in which the tensor cores want them; a warp's load is 512 bytes side by side; and
a run of 32 columns, which no group of a multiple of 32 crosses, is one nibble of
a row.
"""

from __future__ import annotations

import torch

from triton_kernel_lab.ops import _checks

__all__ = [
    "TILE_K",
    "TILE_N",
    "check_packed",
    "load_integers",
    "pack_int4",
    "store_integers",
    "unpack_int4",
]

TILE_N, TILE_K = 16, 128
_NIBBLES, _RUN = 4, 32
_LEAST, _MOST = -8, 7


def _group_count(operator: str, k: int, group_size: int) -> int:
    """The groups that K columns form, the last perhaps short; raises ValueError where K or the size does not fit."""
    fits = group_size > 0 and group_size % 2 == 0
    _checks.expect(fits, operator, "group_size", f"a positive even number of the K = {k} columns", group_size)
    _checks.expect(k % 2 == 0, operator, "K", f"an even number of columns for groups of {group_size}", k)
    return -(-k // group_size)


def _packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """The shape in bytes of packed weights [N, K]: tiles down, tiles across, rows, bytes of a row."""
    return -(-n // TILE_N), -(-k // TILE_K), TILE_N, TILE_K // 2


def store_integers(integers: torch.Tensor) -> torch.Tensor:
    """Integers [N, K] from -8 to 7 in the storage layout, uint8; what fills up the last tiles is zero."""
    n, k = integers.shape
    down, across, *_ = _packed_shape(n, k)
    codes = torch.full((down * TILE_N, across * TILE_K), -_LEAST, dtype=torch.uint8, device=integers.device)
    codes[:n, :k] = (integers - _LEAST).to(torch.uint8)
    # Tiles down, rows, tiles across, nibbles, words.
    nibbles = codes.view(down, TILE_N, across, _NIBBLES, _RUN).permute(3, 0, 2, 1, 4)
    low, high = nibbles[0] | nibbles[1] << 4, nibbles[2] | nibbles[3] << 4
    return torch.stack((low, high), -1).reshape(_packed_shape(n, k))


def load_integers(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The integers [N, K] of packed weights, int8 from -8 to 7."""
    down, across, *_ = packed.shape
    pairs = packed.view(torch.uint8).reshape(down, across, TILE_N, _RUN, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    nibbles = torch.stack((low & 15, low >> 4, high & 15, high >> 4), -2)
    codes = nibbles.permute(0, 2, 1, 3, 4).reshape(down * TILE_N, across * TILE_K)
    return codes[:n, :k].to(torch.int8) + _LEAST


def pack_int4(w: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights to 4 bits and store them as ``int4_linear`` reads them.

    Each run of ``group_size`` columns of a row shares a scale, the smallest with
    which no weight of the group leaves the range -8..7: max(max(w) / 7, -min(w) / 8).
    A weight becomes round(w / scale), half to even; there is no zero point.

    Args:
        w: float16, bfloat16 or float32 [N, K], K even.
        group_size: columns a scale, positive and even; the last group of a row
            is short where K is no multiple of it. Multiples of 32 run fastest.

    Returns:
        packed, uint8 [ceil(N / 16), ceil(K / 128), 16, 64], laid out as the head
        of ops/_int4_pack.py says; and scales [N, ceil(K / group_size)] of w's
        dtype, stored column by column. ``w`` is about ``scales * integers``,
        each weight off by half its scale at most. A group with a NaN has a NaN scale.

    Raises:
        TypeError: w is not floating-point.
        ValueError: w is not two-dimensional, K is odd, or group_size is not
            positive and even.
    """
    _checks.expect_float("pack_int4", "w", w)
    _checks.expect(w.ndim == 2, "pack_int4", "w", "two dimensions [N, K]", tuple(w.shape))
    n, k = w.shape
    groups = _group_count("pack_int4", k, group_size)
    wide = torch.zeros(n, groups * group_size, dtype=torch.float32, device=w.device)
    wide[:, :k] = w
    members = wide.view(n, groups, group_size)
    scales = torch.maximum(members.amax(-1) / _MOST, members.amin(-1) / _LEAST).to(w.dtype)
    # By the rounded scale, which is the one that multiplies later. A group of zeros has scale 0.
    quotients = (members / scales.float().unsqueeze(-1)).nan_to_num_(0.0)
    integers = quotients.round_().clamp_(_LEAST, _MOST).to(torch.int8).view(wide.shape)[:, :k]
    return store_integers(integers), scales.t().contiguous().t()


def unpack_int4(packed: torch.Tensor, scales: torch.Tensor, group_size: int, k: int) -> torch.Tensor:
    """The weights [N, K] that packed integers stand for, in the dtype of the scales; differentiable in them.

    Args:
        packed: uint8 or int8 [ceil(N / 16), ceil(K / 128), 16, 64].
        scales: [N, ceil(K / group_size)].
        group_size: as it was packed with.
        k: the columns K, which the shapes alone do not tell.

    Raises:
        TypeError: packed is neither uint8 nor int8, or scales is not floating-point.
        ValueError: the shapes do not belong to each other, or group_size does not fit.
    """
    check_packed("unpack_int4", packed, scales, group_size, k)
    integers = load_integers(packed, scales.shape[0], k).to(scales.dtype)
    return integers * scales.repeat_interleave(group_size, -1)[:, :k]


def check_packed(operator: str, packed: torch.Tensor, scales: torch.Tensor, group_size: int, k: int) -> None:
    """Raise unless packed weights and scales are those of some [N, K]."""
    if packed.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{operator}: packed: expected uint8 or int8, got {packed.dtype}.")
    _checks.expect_float(operator, "scales", scales)
    groups = _group_count(operator, k, group_size)
    expected = f"[N, {groups}] for K = {k} in groups of {group_size}"
    _checks.expect(scales.ndim == 2 and scales.shape[1] == groups, operator, "scales", expected, tuple(scales.shape))
    shape = _packed_shape(scales.shape[0], k)
    expected = f"{shape} for N = {scales.shape[0]} and K = {k}"
    _checks.expect(packed.shape == shape, operator, "packed", expected, tuple(packed.shape))
    _checks.expect_alike(operator, "packed", packed, "scales", scales)
