"""Panels in rows and columns, placed by inches: as many rows as there are kernels, at the same size each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernel_lab.report.figures.palette import MUTED
from triton_kernel_lab.report.figures.svg import WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Spaces", "grid_of", "heading"]

_RIGHT = 0.06


class Spaces(NamedTuple):
    """In inches: above the first row, a panel's height, below each row, left of the first column, between columns."""

    head: float
    panel: float
    below: float
    left: float
    between: float


def grid_of(figure: Figure, rows: int, columns: int, spaces: Spaces) -> list[list[Axes]]:
    """Axes by row and column; the figure takes the height that they need."""
    figure.set_layout_engine("none")
    # Below the last row no title follows.
    height = spaces.head + rows * (spaces.panel + spaces.below) - 0.12
    figure.set_size_inches(WIDTH, height)
    width = (WIDTH - spaces.left - _RIGHT - (columns - 1) * spaces.between) / columns
    return [
        [
            figure.add_axes(
                (
                    (spaces.left + column * (width + spaces.between)) / WIDTH,
                    (height - spaces.head - row * (spaces.panel + spaces.below) - spaces.panel) / height,
                    width / WIDTH,
                    spaces.panel / height,
                )
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]


def heading(figure: Figure, title: str, note: str, handles: Sequence[Any]) -> None:
    """The title at the top left with a note below it, and the legend at the top right."""
    height = float(figure.get_size_inches()[1])
    left = 0.05 / WIDTH
    figure.text(left, 1 - 0.06 / height, title, fontsize=10.5, fontweight="bold", va="top")
    figure.text(left, 1 - 0.27 / height, note, fontsize=7.0, color=MUTED, va="top")
    options: dict[str, Any] = {"ncols": len(handles), "columnspacing": 1.2, "borderpad": 0.0, "handlelength": 1.6}
    figure.legend(
        handles=[*handles], loc="upper right", bbox_to_anchor=(1 - 0.06 / WIDTH, 1 - 0.08 / height), **options
    )
