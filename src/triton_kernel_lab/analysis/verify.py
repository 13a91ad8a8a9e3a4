"""Whether a runner's published numbers follow from its raw samples.

Raw artifacts come first: schema, chain of digests, plausibility. When they
hold, all that is derived from them is derived again in memory and compared
with what is on disk. DVC notices accidents; this also notices an edit that
took dvc.lock along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import PurePosixPath
from typing import NamedTuple

import yaml

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import chain, plausibility, rederive
from triton_kernel_lab.analysis import crosscheck as crosschecked
from triton_kernel_lab.analysis import decode_e2e as decoded
from triton_kernel_lab.analysis.inputs import EXTRAS
from triton_kernel_lab.analysis.locator import find_edit
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project
from triton_kernel_lab.sources import stale_measurements, stale_tools

__all__ = ["run"]

_PER_KERNEL = ("correctness", "timing", "counters")

_SHOWN = 5
"""How many findings of one check in one file are spelt out."""


class _Tree(NamedTuple):
    """The artifacts of a runner by their path relative to the root."""

    project: Project
    found: dict[str, Artifact]
    unreadable: dict[str, str]

    def name(self, stem: str) -> str:
        return f"artifacts/{self.project.runner}/{stem}.json"

    def raw_names(self) -> list[str]:
        names = self.project.kernels
        per_kernel = [f"{kind}/{name}" for kind in _PER_KERNEL for name in names]
        return [self.name(stem) for stem in ("environment", "ceilings", *per_kernel)]


def run(project: Project) -> list[str]:
    """Check every artifact, table and figure of the project's runner.

    Returns:
        One sentence for each broken thing, the most upstream first, with its
        file and JSON path, table cell or line; empty when all is sound.
    """
    tree = _read(project)
    raw, digests = tree.raw_names(), _digests(tree)
    broken = [problem for name in raw for problem in _file_problems(tree, name, digests)]
    implausible = [problem for name in raw for problem in _implausible(tree, name)]
    strays = [problem for name, problem in tree.unreadable.items() if name not in [*raw, tree.name("roofline")]]
    if broken:
        # What is derived from broken samples differs from what is published, and says nothing new.
        return [*broken, *implausible, *_surplus(tree), *strays]
    return [
        *implausible,
        *_crosscheck(tree),
        *_decode_e2e(tree),
        *_surplus(tree),
        *strays,
        *rederive.differing(project, _raw(tree)),
    ]


def _raw(tree: _Tree) -> rederive.Raw:
    by_kind = {
        kind: {kernel: tree.found[tree.name(f"{kind}/{kernel}")] for kernel in tree.project.kernels}
        for kind in _PER_KERNEL
    }
    environment, ceilings = (tree.found[tree.name(kind)] for kind in ("environment", "ceilings"))
    extras = {kind: tree.found[tree.name(kind)] for kind in EXTRAS if tree.name(kind) in tree.found}
    checked, timings, counters = (by_kind[kind] for kind in _PER_KERNEL)
    return rederive.Raw(environment, ceilings, checked, timings, counters, extras)


def _read(project: Project) -> _Tree:
    tree = _Tree(project, {}, {})
    present = {path.relative_to(project.root).as_posix() for path in project.artifacts.rglob("*.json")}
    for name in dict.fromkeys([*tree.raw_names(), tree.name("roofline"), *sorted(present)]):
        try:
            tree.found[name] = artifacts.parse((project.root / name).read_bytes(), name, _kind(name))
        except OSError as error:
            tree.unreadable[name] = f"{name}: cannot be read: {error.strerror}; run `dvc repro {_target(name)}`."
        except artifacts.ArtifactError as error:
            tree.unreadable[name] = str(error)
    return tree


def _kind(name: str) -> str | None:
    stem = PurePosixPath(name).with_suffix("").parts[2]
    return stem if stem in {"environment", "ceilings", "roofline", *_PER_KERNEL} else None


def _target(name: str) -> str:
    return "@".join(PurePosixPath(name).with_suffix("").parts[2:])


def _surplus(tree: _Tree) -> Iterator[str]:
    raw = set(tree.raw_names())
    for name in sorted({*tree.found, *tree.unreadable} - raw):
        if PurePosixPath(name).parts[2] in _PER_KERNEL:
            yield f"{name}: expected one file for each of {tree.project.kernels}, found a surplus one; remove it."


def _file_problems(tree: _Tree, name: str, digests: Mapping[str, str]) -> Iterator[str]:
    """What makes a raw artifact another one than its consumers were made from."""
    if name in tree.unreadable:
        yield tree.unreadable[name]
        return
    edits = list(_edited_samples(tree, name))
    links = list(_links(tree, name, digests))
    mend = f"; restore it from git, or run `dvc repro {_target(name)}`."
    yield from _few(name, [*edits, *links], mend)
    yield from _few(name, _misplaced(tree, name), mend)


def _misplaced(tree: _Tree, name: str) -> Iterator[str]:
    artifact, stem = tree.found[name], PurePosixPath(name).stem
    if artifact["runner"] != tree.project.runner:
        yield f"{name}: $.runner: expected {tree.project.runner!r}, found {artifact['runner']!r}"
    if artifact.get("kernel", stem) != stem:
        yield f"{name}: $.kernel: expected {stem!r}, found {artifact['kernel']!r}"


def _edited_samples(tree: _Tree, name: str) -> Iterator[str]:
    """The one raw sample that explains why the roofline's record of the file fails."""
    derived = tree.found.get(tree.name("roofline"), {"raw": [], "inputs": []})
    digest = artifacts.sha256_file(tree.project.root / name)
    if any(record == {"path": name, "sha256": digest} for record in derived["inputs"]):
        return
    for record in derived["raw"]:
        edit = find_edit(tree.found[name], record) if record["path"] == name else None
        if edit:
            yield f"{name}: {edit.path}: expected {edit.expected_ns}, found {edit.found_ns}"


def _links(tree: _Tree, name: str, digests: Mapping[str, str]) -> Iterator[str]:
    digest = digests[name]
    yield from chain.edited(name, digest, _consumers(tree, name, digest))
    yield from chain.missing(name, tree.found[name], _required(tree, name))
    yield from chain.misrecorded(tree.project.root, name, tree.found[name], digests)


def _consumers(tree: _Tree, name: str, digest: str) -> Mapping[str, Artifact]:
    """The artifacts that vouch for a file.

    Of the environment and the ceilings one that is stale does not where something
    fresh does: it was measured beside an earlier file, and the report calls it stale.
    """
    if name not in (tree.name("environment"), tree.name("ceilings")):
        return tree.found
    targets = [*stale_measurements(tree.project), *stale_tools(tree.project)]
    old = {tree.name(target.replace("@", "/")) for target in targets}
    fresh = {consumer: artifact for consumer, artifact in tree.found.items() if consumer not in old}
    record = {"path": name, "sha256": digest}
    if name == tree.name("ceilings"):
        # Nothing else that is measured names them, and what is derived would vouch for any edit.
        return fresh if _in_lock(tree, name) else tree.found
    vouching = any(record in fresh[raw]["inputs"] for raw in tree.raw_names() if raw in fresh)
    return fresh if vouching else tree.found


def _in_lock(tree: _Tree, name: str) -> bool:
    """Whether DVC recorded the file as it is, which it does when the stage ran and not when what follows is derived."""
    try:
        lock = yaml.safe_load((tree.project.root / "dvc.lock").read_text(encoding="utf-8"))
        outs = lock["stages"][_target(name)]["outs"]
        digest = hashlib.md5((tree.project.root / name).read_bytes(), usedforsecurity=False).hexdigest()
        return any(out["path"] == name and out["md5"] == digest for out in outs)
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return False


def _digests(tree: _Tree) -> Mapping[str, str]:
    return {name: artifacts.sha256_file(tree.project.root / name) for name in tree.raw_names() if name in tree.found}


def _required(tree: _Tree, name: str) -> list[str]:
    kind, stem = PurePosixPath(name).with_suffix("").parts[2], PurePosixPath(name).stem
    needs = {"ceilings": "environment", "correctness": "environment"}
    needs |= dict.fromkeys(("timing", "counters"), f"correctness/{stem}")
    return [tree.name(needs[kind])] if kind in needs else []


def _implausible(tree: _Tree, name: str) -> Iterator[str]:
    artifact = tree.found.get(name)
    if artifact is None:
        return
    kind = artifact["artifact_kind"]
    findings: Iterable[str] = ()
    if kind == "ceilings":
        findings = plausibility.ceilings(artifact)
    elif kind == "correctness":
        findings = plausibility.correctness(artifact)
    elif kind == "timing":
        checked = tree.found.get(tree.name(f"correctness/{artifact['kernel']}"))
        quantum = tree.found.get(tree.name("ceilings"), {}).get("timer_quantum_ns")
        findings = plausibility.timing(artifact, quantum, checked)
    elif kind == "counters":
        findings = plausibility.counters(artifact)
    yield from _few(name, (f"{name}: {finding}" for finding in findings), f"; run `dvc repro {_target(name)}`.")


def _crosscheck(tree: _Tree) -> Iterator[str]:
    """Figures of the cross-check that its own samples do not give."""
    name = tree.name("crosscheck")
    findings = crosschecked.differing(tree.found[name]) if name in tree.found else []
    yield from _few(name, (f"{name}: {finding}" for finding in findings), "; run `triton-kernel-lab crosscheck`.")


def _decode_e2e(tree: _Tree) -> Iterator[str]:
    """Figures of the whole model that its own times and the ceilings do not give.

    One of earlier ceilings, which is sound where it is stale, goes by the rung that it kept.
    """
    name, ceilings = tree.name("decode_e2e"), tree.name("ceilings")
    artifact = tree.found.get(name)
    if artifact is None:
        return
    record = {"path": ceilings, "sha256": _digests(tree).get(ceilings)}
    rung = decoded.read_ceiling(tree.found[ceilings]) if record in artifact["inputs"] else artifact["read_ceiling"]
    findings = decoded.differing(artifact, rung)
    yield from _few(name, (f"{name}: {finding}" for finding in findings), "; run `python benchmarks/decode_e2e.py`.")


def _few(name: str, findings: Iterable[str], end: str) -> Iterator[str]:
    remaining = iter(findings)
    yield from (finding + end for finding in islice(remaining, _SHOWN))
    if more := sum(1 for _ in remaining):
        yield f"{name}: {more} more findings of this kind."
