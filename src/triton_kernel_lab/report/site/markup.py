"""Text into HTML: escaping, tables, the template's places. A leaf."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TemplateError", "code", "data_block", "esc", "fill", "lines", "prose", "table"]

_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")
_NUMBER = re.compile(r"[-+]?[0-9][0-9.]*(x| %| us)?|-")


class TemplateError(ValueError):
    """The template and what is to be filled in do not fit; one sentence says where."""


def esc(text: object) -> str:
    """Text as it may stand between tags or in a quoted attribute."""
    return html.escape(str(text))


def code(text: object) -> str:
    """A name or a digest in the type of a program; a line may break after its slashes."""
    return f"<code>{esc(text).replace('/', '/<wbr>')}</code>"


def prose(text: str) -> str:
    """A sentence of Markdown with backticks and bold into HTML."""
    marked = esc(text).split("`")
    spelt = "".join(part if at % 2 == 0 else f"<code>{part}</code>" for at, part in enumerate(marked))
    bold = spelt.split("**")
    return "".join(part if at % 2 == 0 else f"<strong>{part}</strong>" for at, part in enumerate(bold))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table of cells that are HTML already; columns of numbers are set right.

    Args:
        headers: text.
        rows: HTML, as many cells as headers.
        caption: text; read out first, and shown above.
    """
    right = [all(_NUMBER.fullmatch(row[at]) for row in rows) and bool(rows) for at in range(len(headers))]
    classes = [' class="n"' if each else "" for each in right]
    head = "".join(f'<th scope="col"{of}>{esc(name)}</th>' for name, of in zip(headers, classes, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{of}>{cell}</td>" for cell, of in zip(row, classes, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(caption)}"><table>\n'
        f"<caption>{esc(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def lines(values: Sequence[Any]) -> str:
    """A JSON list with a line for each item, so that a diff shows what changed."""
    return "[" + ",\n".join(_json(value) for value in values) + "]"


def data_block(parts: Mapping[str, Any]) -> str:
    """A JSON object for a script element: nothing in it can end the element or start a comment.

    A list of the first level takes a line for each of its items.
    """
    fields = (
        f"{_json(key)}:{lines(value) if isinstance(value, list) else _json(value)}" for key, value in parts.items()
    )
    return "{" + ",\n".join(fields) + "}"


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def fill(template: str, parts: Mapping[str, str]) -> str:
    """The template with each ``{{name}}`` replaced, in one pass: what is filled in is not looked at again.

    Raises:
        TemplateError: a place has no part, or a part no place.
    """
    named = set(_PLACE.findall(template))
    if named != set(parts):
        raise TemplateError(f"template.html: expected the places {sorted(parts)}, found {sorted(named)}.")
    return _PLACE.sub(lambda found: parts[found[1]], template)
