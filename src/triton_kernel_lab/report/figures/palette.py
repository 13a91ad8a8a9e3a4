"""The colours of the pictures, on light ground and on dark; apart in lightness too, for the colour-blind."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["DARK", "GRID", "GROUND", "INK", "MUTED", "candidate", "dark_css", "kernel_marks", "regime"]

GROUND, INK, MUTED, GRID = "#ffffff", "#1f2328", "#59636e", "#d8dee4"

_CANDIDATES = {"triton": "#0b3c8c", "torch_compile": "#e08a1e", "eager": "#a9b4c2", "other": "#2b9a8b"}

# Twelve kernels have colours and markers of their own; a thirteenth starts again.
_KERNELS = (
    ("#0072b2", "o"),
    ("#d55e00", "s"),
    ("#009e73", "^"),
    ("#b0559a", "D"),
    ("#a87908", "v"),
    ("#56a8d8", "P"),
    ("#6f3f8f", "X"),
    ("#6b8e23", "<"),
    ("#8c564b", ">"),
    ("#444c56", "h"),
    ("#c2185b", "*"),
    ("#00838f", "p"),
)

# From the emptiest caches to the warmest, then a captured call and the host's.
_REGIMES = {
    "cold_clean": ("#0b3c8c", "o"),
    "cold_dirty": ("#56a8d8", "s"),
    "warm": ("#d55e00", "^"),
    "graph": ("#009e73", "D"),
    "call": ("#b0559a", "v"),
}

DARK = {
    GROUND: "#0d1117",
    INK: "#e6edf3",
    MUTED: "#9198a1",
    GRID: "#30363d",
    "#0b3c8c": "#79b8ff",
    "#e08a1e": "#f0a44b",
    "#a9b4c2": "#768390",
    "#2b9a8b": "#4fc9b8",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#ff8a4c",
    "#009e73": "#3ecf9f",
    "#b0559a": "#e08fcb",
    "#a87908": "#dcb13c",
    "#56a8d8": "#8ccdf2",
    "#6f3f8f": "#c293dd",
    "#6b8e23": "#a6c957",
    "#8c564b": "#cfa096",
    "#444c56": "#c0c8d0",
    "#c2185b": "#ff7fab",
    "#00838f": "#5fd0dc",
}
"""Each colour on light ground, and what stands for it on dark."""


def candidate(name: str) -> str:
    """The colour of a candidate."""
    return _CANDIDATES[name]


def kernel_marks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each kernel, by the order of the names."""
    return {name: _KERNELS[index % len(_KERNELS)] for index, name in enumerate(names)}


def regime(name: str) -> tuple[str, str]:
    """Colour and marker of a regime."""
    return _REGIMES[name]


def dark_css() -> str:
    """Style rules that give a picture its dark colours where the reader's mode is dark."""
    rules = (
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
