"""Naming where two versions of a file differ: a JSON path, or a cell of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["json_differences", "text_difference"]

_RULE = re.compile(r"\|[-:| ]+\|")
_ABSENT = object()


def json_differences(expected: Any, found: Any, path: str = "$") -> Iterator[str]:
    """``path: expected ..., found ...`` for each leaf in which two JSON values differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            yield from json_differences(expected.get(key, _ABSENT), found.get(key, _ABSENT), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            yield f"{path}: expected {len(expected)} items, found {len(found)}"
        for index, pair in enumerate(zip(expected, found, strict=False)):
            yield from json_differences(*pair, f"{path}[{index}]")
    elif type(expected) is not type(found) or expected != found:
        yield f"{path}: expected {_show(expected)}, found {_show(found)}"


def _show(value: Any) -> str:
    return "nothing" if value is _ABSENT else _clip(json.dumps(value, ensure_ascii=False))


def _clip(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."


def text_difference(expected: str, found: str) -> str | None:
    """Where two texts first differ: the line and, inside a table, row and column."""
    lines, other = expected.split("\n"), found.split("\n")
    for index, line in enumerate(lines):
        if index >= len(other):
            return f"line {index + 1}: expected {_clip(repr(line))}, found the end of the text"
        if line != other[index]:
            return f"line {index + 1}{_difference(lines, index, other[index])}"
    return None if len(lines) == len(other) else f"line {len(lines) + 1}: expected the end of the text, found more"


def _difference(lines: Sequence[str], index: int, found: str) -> str:
    whole = f": expected {_clip(repr(lines[index]))}, found {_clip(repr(found))}"
    headers = _headers(lines, index)
    cells, other = _cells(lines[index]), _cells(found)
    if not headers or not len(headers) == len(cells) == len(other):
        return whole
    changed = [at for at, cell in enumerate(cells) if cell != other[at]]
    if not changed:
        return whole
    at = changed[0]
    row = " ".join(cells[: max(1, at)][:3])
    where = f", {_heading(lines, index)}row {row!r}, column {headers[at]!r}"
    return f"{where}: expected {cells[at]!r}, found {other[at]!r}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _headers(lines: Sequence[str], index: int) -> list[str]:
    """The headers of the table whose body holds line ``index``; empty outside a table."""
    start = index
    while start > 0 and lines[start - 1].startswith("|"):
        start -= 1
    in_body = index > start + 1 and _RULE.fullmatch(lines[start + 1])
    return _cells(lines[start]) if in_body else []


def _heading(lines: Sequence[str], index: int) -> str:
    heading = next((line for line in reversed(lines[:index]) if line.startswith("#")), "")
    return f"table {heading.lstrip('# ')!r}, " if heading else ""
