"""A picture's SVG as part of the page: themed by the page, its names its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from triton_kernel_lab.report.figures import palette

__all__ = ["colour_css", "define_once", "inline", "share_styles"]

_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_DROPPED = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|<title>.*?</title>|<style[^>]*>.*?</style>", re.DOTALL)
_SIZE = re.compile(
    r'(<svg[^>]*?) width="[^"]*"([^>]*?) height="[^"]*"|(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"'
)
# The glyph of a character is the same in each picture, and so is its name.
_GLYPH_NAME = r"g(?:[A-Z]\w*-)?[0-9a-f]+"
_ID = re.compile(rf'(?:(?<= id=")|(?<=href="#)|(?<=url\(#))(?!{_GLYPH_NAME}")')
_GLYPH = re.compile(rf'<path id="{_GLYPH_NAME}" [^>]*/>\n?')
_STYLE = re.compile(r' style="([^"]*)"')
_COLOUR = re.compile("|".join(map(re.escape, palette.DARK)))


def inline(svg: str, name: str, title: str) -> str:
    """The ``svg`` element of a picture's file.

    What depends on the reader's mode and on the page stays out: comments,
    metadata and style. Colours become the page's variables, ids begin with
    ``name`` so that pictures do not take each other's; those of glyphs are shared.
    """
    body = _DROPPED.sub("", _HEAD.sub("", svg, count=1))
    body = _ID.sub(name, _COLOUR.sub(lambda found: f"var(--{found[0][1:]})", body))
    body = _SIZE.sub(r"\1\2\3\4", body, count=1)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    return body.replace("<svg", f'<svg role="img" aria-label="{title}" class="picture"', 1)


def define_once(pictures: Iterable[str]) -> Iterator[str]:
    """The pictures of one page without the glyphs that an earlier one defines."""
    defined: set[str] = set()

    def first(found: re.Match[str]) -> str:
        again = found[0] in defined
        defined.add(found[0])
        return "" if again else found[0]

    for picture in pictures:
        yield _GLYPH.sub(first, picture)


def share_styles(pictures: Sequence[str]) -> tuple[list[str], str]:
    """The pictures of one page with a class in place of each style, and the rules of those classes."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return f' class="{names.setdefault(found[1], f"s{len(names)}")}"'

    shared = [_STYLE.sub(named, picture) for picture in pictures]
    return shared, "\n".join(f".{name}{{{style}}}" for style, name in names.items())


def colour_css() -> str:
    """The page's variables for the colours of pictures: light, and dark where the reader's mode is dark."""
    light = "".join(f"--{colour[1:]}:{colour};" for colour in palette.DARK)
    dark = "".join(f"--{colour[1:]}:{other};" for colour, other in palette.DARK.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
