"""The chain of digests from the page's tables to the raw samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.site.markup import code, esc, table

__all__ = ["chain", "digests"]


def digests(found: Mapping[str, Artifact]) -> dict[str, str]:
    """The SHA-256 of each artifact's file, by path: an artifact has one text form."""
    return {path: hashlib.sha256(artifacts.dumps(each).encode()).hexdigest() for path, each in found.items()}


def chain(found: Mapping[str, Artifact], shas: Mapping[str, str]) -> str:
    """A table of the artifacts: digest, what each was made from, by which commit; derived first, then raw.

    Args:
        found: artifacts by path, the roofline among them.
        shas: what ``digests`` says of them.
    """
    counts = {raw["path"]: raw["samples"] for each in found.values() for raw in each.get("raw", ())}
    rows = [_row(path, each, shas, counts.get(path)) for path, each in found.items()]
    headers = ["File", "SHA-256", "Made from", "At commit", "Samples"]
    return table(headers, rows, "Each file names the digest of what it was made from")


def _row(path: str, artifact: Artifact, shas: Mapping[str, str], samples: int | None) -> list[str]:
    made_from = [_record(record, shas) for record in artifact["inputs"]]
    return [
        code(path),
        f'<code class="sha">{shas[path]}</code>',
        "<br>".join(made_from) or "the machine",
        _commit(artifact["producer"]),
        units.plain(samples),
    ]


def _record(record: Mapping[str, str], shas: Mapping[str, str]) -> str:
    name = code(record["path"].split("/", 2)[-1])
    known = shas.get(record["path"])
    if known is None:
        return f'{name} <code class="sha">{record["sha256"]}</code>'
    return name if known == record["sha256"] else f"{name} <strong>(another version of it)</strong>"


def _commit(producer: Mapping[str, Any]) -> str:
    if "git_commit" not in producer:
        # Derived; or measured and kept without a commit, so that finding the same again changes no byte.
        return "-"
    commit = producer["git_commit"]
    dirty = " <strong>with changes</strong>" if producer["git_tree_dirty"] else ""
    return f'<code title="{esc(commit)}">{esc(commit[:12])}</code>{dirty}' if commit else "unknown"
