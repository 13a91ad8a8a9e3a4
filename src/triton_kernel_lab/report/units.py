"""The only place where nanoseconds, bytes and rates become text.

Plain decimal arithmetic on the value as stored: no binary rounding, no locale,
no thousands separator. A missing value (None) is a dash; a value that cannot
be (NaN, infinity, a duration of 0) is refused, never printed.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal

__all__ = [
    "MISSING",
    "UnitError",
    "error_size",
    "excess_percent",
    "factor",
    "fine_share",
    "gibibytes",
    "gigabytes_per_s",
    "mebibytes",
    "microseconds",
    "milliseconds",
    "percent",
    "plain",
    "ratio",
    "share",
    "signed_percent",
    "teraflop_per_s",
    "traffic",
    "watts",
]

MISSING = "-"


class UnitError(ValueError):
    """A value that no measurement can have; one sentence says which."""


def microseconds(ns: int | float | None, decimals: int = 3) -> str:
    """Nanoseconds as microseconds: with 3 decimals, exact for whole ns."""
    return _scaled(ns, 1000, decimals)


def milliseconds(ns: int | float | None) -> str:
    """Nanoseconds as milliseconds to 3 decimals."""
    return _scaled(ns, 10**6, 3)


def gigabytes_per_s(bytes_per_s: int | None) -> str:
    """Bytes a second as GB/s (1e9) to 2 decimals."""
    return _scaled(bytes_per_s, 10**9, 2)


def teraflop_per_s(flop_per_s: int | None) -> str:
    """FLOP/s as TFLOP/s (1e12) to 1 decimal."""
    return _scaled(flop_per_s, 10**12, 1)


def mebibytes(size: int | None) -> str:
    """Bytes as MiB (2**20) to 2 decimals."""
    return _scaled(size, 2**20, 2)


def gibibytes(size: int | None) -> str:
    """Bytes as GiB (2**30) to 1 decimal."""
    return _scaled(size, 2**30, 1)


def watts(milliwatts: int | None) -> str:
    """Milliwatts as watts to 1 decimal."""
    return _scaled(milliwatts, 1000, 1)


def ratio(value: float | None) -> str:
    """A speedup, to 3 decimals with its sign of multiplication."""
    return MISSING if value is None else f"{_scaled(value, 1, 3)}x"


def percent(value: float | None) -> str:
    """A ratio as a per cent to 1 decimal."""
    return MISSING if value is None else f"{_scaled(value, Decimal('0.01'), 1)} %"


def traffic(size: int | None) -> str:
    """Bytes as MiB to 2 decimals, where none at all is a count like any other."""
    return _counted(size, 2**20, 2)


def factor(value: float | None) -> str:
    """A ratio of two counts, to 2 decimals; 0 included."""
    return _counted(value, 1, 2)


def share(value: float | None) -> str:
    """A share as a per cent to 1 decimal, 0 included."""
    return MISSING if value is None else f"{_counted(value, Decimal('0.01'), 1)} %"


def fine_share(value: float | None) -> str:
    """A small share as a per cent to 2 decimals, 0 included."""
    return MISSING if value is None else f"{_counted(value, Decimal('0.01'), 2)} %"


def excess_percent(ours_ns: int, theirs_ns: int) -> str:
    """By how much our duration exceeds theirs, in per cent to 2 decimals."""
    _require_positive(ours_ns)
    _require_positive(theirs_ns)
    return f"{_fixed(Decimal(100 * (ours_ns - theirs_ns)) / theirs_ns, 2)} %"


def signed_percent(value: float | None) -> str:
    """A change that is in per cent already, with its sign, to 2 decimals."""
    if value is None:
        return MISSING
    return f"{'+' if value >= 0 else '-'}{_fixed(abs(Decimal(str(value))), 2)} %"


def plain(value: int | float | None) -> str:
    """A number as it is: a whole one in full, another to 1 decimal."""
    if value is None or isinstance(value, int):
        return MISSING if value is None else str(value)
    return _fixed(Decimal(str(value)), 1)


def error_size(value: float | None) -> str:
    """An error, 0 included, in scientific notation with 3 digits."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or value < 0:
        raise UnitError(f"expected a finite error of at least 0, found {value}.")
    return f"{value:.2e}"


def _scaled(value: int | float | None, unit: int | Decimal, decimals: int) -> str:
    if value is None:
        return MISSING
    _require_positive(value)
    return _fixed(Decimal(str(value)) / unit, decimals)


def _counted(value: int | float | None, unit: int | Decimal, decimals: int) -> str:
    """What may be 0 without being missing."""
    return _fixed(Decimal(0), decimals) if value == 0 else _scaled(value, unit, decimals)


def _fixed(value: Decimal, decimals: int) -> str:
    return f"{value.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):f}"


def _require_positive(value: int | float) -> None:
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise UnitError(f"expected a finite number above 0, found {value}.")
