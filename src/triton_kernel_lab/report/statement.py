"""What a signature stands under: a statement that names every published file and its digest.

It has the form of an in-toto statement. A signature of it says that whoever holds
the key vouches for these files as they are; what vouching is worth, the reader
decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton_kernel_lab import __version__, artifacts, revisions, signing
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.report import readme
from triton_kernel_lab.signing import SigningError
from triton_kernel_lab.sources import module_digest

__all__ = ["build", "differences", "path", "sign", "signed_by"]

_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "urn:triton-kernel-lab:results:1"
_README = "README.md#results"


def path(project: Project) -> Path:
    """Where the statement lies; its signature lies beside it."""
    return project.artifacts / "statement.json"


def _signature(project: Project) -> Path:
    return path(project).with_name("statement.json.sig")


def sign(project: Project, key: Path) -> tuple[Path, Path]:
    """Write the statement of what lies in the checkout, and its signature by ``key``; returns both paths.

    Raises:
        SigningError: ssh-keygen is missing or cannot sign with this key; nothing is written then.
        ReadmeError: README.md has no block of results.
    """
    made = build(project)
    signature = signing.sign(artifacts.dumps(made).encode(), key)
    artifacts.write(path(project), made)
    artifacts.write_text(_signature(project), signature)
    return path(project), _signature(project)


def build(project: Project) -> Artifact:
    """The statement of what lies in the checkout now."""
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(_subjects(project))]
    return {
        "artifact_kind": "statement",
        "schema_version": 1,
        "claim_kind": "derived",
        "producer": {
            "package": "triton-kernel-lab",
            "version": __version__,
            "source_sha256": module_digest(project.root, "report/statement.py"),
        },
        "inputs": [],
        "runner": project.runner,
        "_type": _TYPE,
        "subject": subjects,
        "predicateType": _PREDICATE,
        "predicate": {
            "runner": project.runner,
            "environment_sha256": artifacts.sha256_file(project.artifacts / "environment.json"),
            **revisions.producer_git(project.root),
        },
    }


def _subjects(project: Project) -> Iterator[tuple[str, str]]:
    """Name and digest of every artifact of the runner, every audit and report, and the README's block."""
    folders = (project.artifacts, project.audits, project.reports, project.root / "reports" / "codegen")
    own = {path(project), _signature(project)}
    for file in (each for folder in folders for each in folder.rglob("*") if each.is_file() and each not in own):
        yield file.relative_to(project.root).as_posix(), artifacts.sha256_file(file)
    text = (project.root / "README.md").read_text(encoding="utf-8")
    yield _README, hashlib.sha256(readme.extract(text).encode()).hexdigest()


def signed_by(project: Project, allowed: Path) -> str:
    """Who signed the statement that lies in the checkout.

    Raises:
        SigningError: there is no statement or signature, or nobody in ``allowed`` made it.
        ArtifactError: the statement is not one.
    """
    for file in (path(project), _signature(project)):
        if not file.is_file():
            name = file.relative_to(project.root).as_posix()
            raise SigningError(f"{name}: expected it, found none; `triton-kernel-lab verify --sign KEY` makes it.")
    artifacts.read(path(project), "statement")
    return signing.signer(path(project).read_bytes(), _signature(project), allowed)


def differences(project: Project) -> list[str]:
    """A sentence for each file that is not as the statement has it, is missing, or is not named in it."""
    statement: dict[str, Any] = artifacts.read(path(project), "statement")
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    found = dict(_subjects(project))
    sentences = []
    for name in sorted(named | found):
        if name not in found:
            sentences.append(f"{name}: expected the file that was signed, found none.")
        elif name not in named:
            sentences.append(f"{name}: expected it among the signed files, found that it is not.")
        elif named[name] != found[name]:
            sentences.append(f"{name}: expected sha256 {named[name]} as signed, found {found[name]}.")
    return sentences
