"""What every picture shares: its look, its bytes, and the digests that it carries.

An SVG is opaque and follows the reader's light or dark mode by itself: its
colours are those of ``palette``, and a style sheet inside it swaps them. Glyphs
are paths, so that no font of the reader's is needed.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report.figures import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["WIDTH", "Drawing", "Sources", "data_digest", "recorded_digests", "render", "strip_digests"]

WIDTH = 8.4
"""Inches; about what a README shows at full size."""

STYLE: dict[Any, Any] = {
    "figure.facecolor": palette.GROUND,
    "savefig.facecolor": palette.GROUND,
    "axes.facecolor": "none",
    "font.size": 8.0,
    "text.color": palette.INK,
    "axes.labelcolor": palette.INK,
    "axes.edgecolor": palette.MUTED,
    "axes.titlecolor": palette.INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": palette.GRID,
    "grid.linewidth": 0.6,
    "xtick.color": palette.MUTED,
    "ytick.color": palette.MUTED,
    "xtick.labelcolor": palette.INK,
    "ytick.labelcolor": palette.INK,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "triton-kernel-lab",
}

_STAMP = re.compile(r"<!-- data-sha256: ([0-9a-f]{64}); body-sha256: ([0-9a-f]{64}) -->\n")
_LONG = re.compile(r"-?\d+\.\d{3,}")
_PLACED = re.compile(r'(?<= d=")[^"]*|(?<=translate\()[^)]*|(?<= [xy]=")[^"]*')
_UNUSED = re.compile(r' id="(?!patch_1")(?:[a-z2]+|matplotlib\.axis)_\d+"')
_INDENT = re.compile(r"\n[ \n]+")
_PATH = re.compile(r'(?<= d=")[^"]*')
_COMMAND = re.compile(r"\s*([A-DF-Za-df-z])\s*")
_ALONE = re.compile(r"<g>\n(<(?:path|use)[^>]*/>)\n</g>")
_STILL = re.compile(r"translate\(([^ )]+) 0\)")


class Sources(NamedTuple):
    """What pictures are made from: artifacts of one runner, the timings by kernel."""

    environment: Artifact
    roofline: Artifact
    timings: Mapping[str, Artifact]

    @property
    def device(self) -> str:
        """The GPU's name."""
        found = self.environment["device"]
        return str(found["name"]) if found else "no device"


class Drawing(NamedTuple):
    """One picture: the stem of its file, what it shows, how it is drawn.

    ``data`` is pure and returns what JSON can hold. Its ``reason`` is None, or
    the sentence that stands in place of a picture.
    """

    name: str
    title: str
    data: Callable[[Sources], dict[str, Any]]
    draw: Callable[[Figure, Mapping[str, Any]], None]


def data_digest(shown: Mapping[str, Any]) -> str:
    """The SHA-256 of the plotted data, which no version of matplotlib changes."""
    return hashlib.sha256(artifacts.dumps(shown).encode()).hexdigest()


def recorded_digests(svg: str) -> tuple[str, str] | None:
    """The digests of data and body that an SVG carries; None without them."""
    found = _STAMP.findall(svg)
    return found[0] if len(found) == 1 else None


def strip_digests(svg: str) -> str:
    """The body of an SVG, of which its second digest is made."""
    return _STAMP.sub("", svg)


def render(drawing: Drawing, shown: Mapping[str, Any]) -> str:
    """The SVG of ``drawing.data``: the same bytes each time with one version of matplotlib."""
    body = _compact(_draw(drawing, shown))
    digest = hashlib.sha256(body.encode()).hexdigest()
    declaration, newline, rest = body.partition("\n")
    return f"{declaration}{newline}<!-- data-sha256: {data_digest(shown)}; body-sha256: {digest} -->\n{rest}"


def _draw(drawing: Drawing, shown: Mapping[str, Any]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context():
        # The reader's own matplotlibrc must not change the picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, 1.2), layout="constrained")
        if shown["reason"] is None:
            drawing.draw(figure, shown)
        else:
            figure.text(0.5, 0.5, f"Not measured: {shown['reason']}", ha="center", va="center")
        metadata = {"Date": None, "Creator": "triton-kernel-lab", "Title": drawing.title}
        figure.savefig(stream, format="svg", metadata=metadata)
    return stream.getvalue()


def _compact(svg: str) -> str:
    """The same picture in two fifths less: a hundredth of a point, short names, and both modes' colours."""
    svg = _PLACED.sub(lambda found: _LONG.sub(_hundredth, found[0]), svg)
    svg = _STILL.sub(r"translate(\1)", svg.replace("xlink:href", "href"))
    svg = _INDENT.sub("\n", svg)
    svg = _UNUSED.sub("", svg.replace("DejaVuSans-", "g"))
    svg = _PATH.sub(lambda found: _COMMAND.sub(r"\1", found[0]).strip(), svg)
    svg = _ALONE.sub(r"\1", svg)
    return svg.replace("</style>", f"{palette.dark_css()}</style>", 1)


def _hundredth(found: re.Match[str]) -> str:
    # Adding 0.0 makes zero of negative zero.
    return f"{round(float(found[0]), 2) + 0.0:.2f}".rstrip("0").rstrip(".")
