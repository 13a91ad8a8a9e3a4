"""Markdown tables of text that is final before it gets here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tabulate import tabulate

__all__ = ["table"]

_NUMBER = re.compile(r"[-+]?[0-9]+(?P<tail>(\.[0-9]+)?(x| %)?)")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table whose cells are exactly the given strings.

    Number parsing is off, so that "0.10", "1E10" and "00123" stay as they are.
    A column of numbers is set right, with its decimal points under each other.
    """
    columns = [[_escape(row[i]) for row in rows] for i in range(len(headers))]
    return tabulate(
        list(zip(*map(_align, columns), strict=True)),
        headers=[_escape(header) for header in headers],
        tablefmt="pipe",
        disable_numparse=True,
        preserve_whitespace=True,
        colalign=["right" if _is_numeric(column) else "left" for column in columns] if rows else None,
    )


def _escape(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether a column holds numbers, but for dashes and words such as a status in their place."""
    others = [cell for cell in column if not _NUMBER.fullmatch(cell)]
    return len(others) < len(column) and all(cell == "-" or cell.isalpha() for cell in others)


def _align(column: Sequence[str]) -> list[str]:
    if not _is_numeric(column):
        return list(column)
    tails = [len(found["tail"]) if (found := _NUMBER.fullmatch(cell)) else None for cell in column]
    widest = max(tail for tail in tails if tail is not None)
    return [cell if tail is None else cell + " " * (widest - tail) for cell, tail in zip(column, tails, strict=True)]
