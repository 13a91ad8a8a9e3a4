"""The whole page from artifacts and pictures. Pure, but for the template files of the package."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report.figures.stage import DRAWINGS
from triton_kernel_lab.report.labels import conditions
from triton_kernel_lab.report.site import cells, facts, provenance
from triton_kernel_lab.report.site.inline import colour_css, define_once, inline, share_styles
from triton_kernel_lab.report.site.markup import data_block, esc, fill, prose

__all__ = ["Sources", "render"]

_HERE = Path(__file__).parent


class Sources(NamedTuple):
    """What the page is made from: artifacts of one runner, its pictures as SVG by name, the last verdict if kept.

    ``decode`` is the artifact ``decode_e2e``, where a whole model was measured, and
    ``decode_is_stale`` where other sources made it than there are now.
    """

    environment: Artifact
    ceilings: Artifact
    roofline: Artifact
    correctness: Mapping[str, Artifact]
    timings: Mapping[str, Artifact]
    counters: Mapping[str, Artifact]
    pictures: Mapping[str, str]
    gate: Artifact | None
    decode: Artifact | None = None
    decode_is_stale: bool = False

    @property
    def runner(self) -> str:
        """Whose results these are."""
        return str(self.roofline["runner"])

    def by_path(self) -> dict[str, Artifact]:
        """The artifacts by path, the derived one first, then against the flow."""
        folder = f"artifacts/{self.runner}"
        found = {f"{folder}/roofline.json": self.roofline}
        found |= {f"{folder}/decode_e2e.json": self.decode} if self.decode else {}
        found |= {f"{folder}/timing/{kernel}.json": each for kernel, each in self.timings.items()}
        found |= {f"{folder}/counters/{kernel}.json": each for kernel, each in self.counters.items()}
        found |= {f"{folder}/correctness/{kernel}.json": each for kernel, each in self.correctness.items()}
        return found | {f"{folder}/ceilings.json": self.ceilings, f"{folder}/environment.json": self.environment}


def render(sources: Sources) -> str:
    """index.html: one file that needs no other and asks no network."""
    script, roofline = _read("script.js"), sources.roofline
    shas = provenance.digests(sources.by_path())
    device = sources.environment["device"]
    pictures, styles = share_styles(list(define_once(_picture(sources, index) for index in range(len(DRAWINGS)))))
    parts = {
        "title": esc(device["name"] if device else sources.runner),
        "runner": esc(sources.runner),
        "style": f"{colour_css()}\n{styles}\n{_read('style.css')}",
        "script": script,
        # The page runs this script and no other.
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "conditions": prose(conditions(sources.environment, roofline)),
        "tiles": facts.tiles(roofline, sources.correctness),
        "kernels": facts.kernels(roofline),
        "lost": facts.lost(roofline),
        "figures": "\n".join(pictures),
        "model": facts.model(sources.decode, stale=sources.decode_is_stale),
        "method": facts.method(roofline),
        "environment": facts.environment(sources.environment),
        "counters": facts.counters(roofline),
        "gate": facts.gate(sources.gate, shas),
        "chain": provenance.chain(sources.by_path(), shas),
        "data": data_block({"cases": cells.cases(roofline, sources.timings, sources.correctness)}),
    }
    return fill(_read("template.html"), parts)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").removesuffix("\n")


def _picture(sources: Sources, index: int) -> str:
    drawing = DRAWINGS[index]
    # One letter: it stands before each name.
    drawn = inline(sources.pictures[drawing.name], chr(ord("a") + index), esc(drawing.title))
    return f'<figure id="figure-{drawing.name}">\n{drawn}\n<figcaption>{esc(drawing.title)}.</figcaption>\n</figure>'
