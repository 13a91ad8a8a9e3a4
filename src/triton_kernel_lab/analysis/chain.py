"""The chain of digests: what each artifact says of the files that it was made from.

A mismatch has two possible culprits. The digest of an edited file differs from
the old one in about 60 of its 64 digits; a digest that was itself edited still
resembles the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from triton_kernel_lab.artifacts import Artifact, sha256_file

__all__ = ["edited", "misrecorded", "missing"]

_RESEMBLING_DIGITS = 48


def edited(name: str, digest: str, consumers: Mapping[str, Artifact]) -> Iterator[str]:
    """A sentence for each consumer that was made from other bytes than the file ``name`` has.

    Args:
        name: the file's path relative to the root.
        digest: its SHA-256.
        consumers: artifacts by their path relative to the root.
    """
    for consumer, artifact in consumers.items():
        for index, record in enumerate(artifact["inputs"]):
            if record["path"] == name and not _resembles(record["sha256"], digest):
                recorded = f"{record['sha256']} as in {consumer}: $.inputs[{index}].sha256"
                yield f"{name}: expected sha256 {recorded}, found {digest}: the file was edited"


def missing(name: str, artifact: Artifact, required: Iterable[str]) -> Iterator[str]:
    """Files that an artifact has to be made from, but keeps no record of."""
    recorded = {record["path"] for record in artifact["inputs"]}
    for path in required:
        if path not in recorded:
            yield f"{name}: $.inputs: expected a record of {path}, found none"


def misrecorded(root: Path, name: str, artifact: Artifact, known: Mapping[str, str]) -> Iterator[str]:
    """Records of an artifact that were edited, or that name no file of the checkout.

    Args:
        root: the checkout.
        name: the artifact's path relative to it.
        known: the digests of the files that ``edited`` looks after, by path.
    """
    for index, record in enumerate(artifact["inputs"]):
        where, path = f"{name}: $.inputs[{index}]", root / record["path"]
        if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
            yield f"{where}.path: expected a file of this checkout, found {record['path']!r}"
            continue
        digest = known.get(record["path"]) or sha256_file(path)
        if digest == record["sha256"]:
            continue
        if record["path"] not in known or _resembles(record["sha256"], digest):
            yield f"{where}.sha256: expected {digest}, that of {record['path']}, found {record['sha256']}"


def _resembles(one: str, other: str) -> bool:
    return sum(a == b for a, b in zip(one, other, strict=True)) >= _RESEMBLING_DIGITS
