"""What a change of sources did to the compiled kernels: the tracked audit against a new one.

Launches are matched by target, function and call, so that a kernel that is now
compiled in another configuration is compared with what served the same call before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.project import Project

__all__ = ["CHANGED", "MISSING", "Finding", "check", "compare", "exit_code"]

OK, FAILED, NOT_COMPARABLE = 0, 2, 3
# By how much a kernel may grow before it counts as a regression.
_MAX_GROWTH_PERCENT = 10
MISSING, CHANGED = "no tracked audit", "changed"
# The gravest first.
_RULES = (
    MISSING,
    "does not compile",
    "cannot be launched",
    "spills",
    "narrower loads",
    "narrower stores",
    "more instructions",
    "a longer hot loop",
    "no longer launched",
    CHANGED,
)

Launch = Mapping[str, Any]
Key = tuple[str, str | None, str, int]


@dataclass(frozen=True)
class Finding:
    """One difference: the rule that it breaks, where, and what stood and stands there."""

    kernel: str
    rule: str
    target: str
    function: str
    call: str
    before: str
    after: str


def check(project: Project, derived: Mapping[str, Artifact]) -> list[Finding]:
    """The differences between the tracked audits and new ones by kernel.

    Raises:
        ArtifactError: a tracked audit cannot be read.
    """
    found = []
    for kernel, audit in derived.items():
        path = project.audits / f"{kernel}.json"
        found += compare(kernel, artifacts.read(path, "codegen") if path.is_file() else None, audit)
    return found


def compare(kernel: str, tracked: Artifact | None, derived: Artifact) -> list[Finding]:
    """The differences of one kernel's audits, the gravest first; empty if nothing but binaries' digests differs.

    Each launch that compiles to something else gives the rules that it breaks,
    or else ``CHANGED``; of calls that share it the first is named. A difference
    outside all launches, such as another digest of the sources, is ``CHANGED``
    once. Without a tracked audit there is nothing to compare with, which is a
    finding too.
    """
    if tracked is None:
        return [Finding(kernel, MISSING, "", "", "", "-", f"{len(derived['launches'])} launches")]
    before, after = _by_call(tracked), _by_call(derived)
    pairs: dict[tuple[int, int], tuple[Key, Launch | None, Launch | None]] = {}
    for key in [*after, *(key for key in before if key not in after)]:
        was, now = before.get(key), after.get(key)
        pairs.setdefault((id(was), id(now)), (key, was, now))
    found = [
        Finding(kernel, rule, target, function or kernel, call, old, new)
        for (target, function, call, _), was, now in pairs.values()
        for rule, old, new in _of_launch(was, now)
    ]
    if not found and _comparable(tracked) != _comparable(derived):
        found = [Finding(kernel, CHANGED, "", "", "", "", "not in the launches")]
    return sorted(found, key=lambda finding: _RULES.index(finding.rule))


def exit_code(findings: list[Finding]) -> int:
    """2 for any difference, 3 where all that was found is that there is nothing to compare with, else 0."""
    if not findings:
        return OK
    return NOT_COMPARABLE if all(finding.rule == MISSING for finding in findings) else FAILED


def _by_call(audit: Artifact) -> dict[Key, Launch]:
    """Each launch under each call that leads to it; a call may launch a function more than once."""
    seen: Counter[tuple[str, str | None, str]] = Counter()
    found: dict[Key, Launch] = {}
    for launch in audit["launches"]:
        for call in launch["calls"]:
            where = launch["target"], launch["function"], call
            found[*where, seen[where]] = launch
            seen[where] += 1
    return found


def _of_launch(before: Launch | None, after: Launch | None) -> Iterator[tuple[str, str, str]]:
    """Rule, value before and value after for each rule that a launch breaks."""
    if after is None:
        yield "no longer launched", _state(before), "-"
        return
    broken = list(_broken(before, after))
    yield from broken
    if not broken and (before is None or _content(before) != _content(after)):
        yield CHANGED, _state(before), _state(after)


def _content(launch: Launch) -> dict[str, Any]:
    """A launch apart from the calls that share it."""
    return {name: value for name, value in _reproducible(launch).items() if name != "calls"}


def _comparable(audit: Artifact) -> str:
    """The text of an audit that the same code has on every machine."""
    return artifacts.dumps(audit | {"launches": [_reproducible(launch) for launch in audit["launches"]]})


def _reproducible(launch: Launch) -> dict[str, Any]:
    """A launch without its binary's digest.

    ptxas may order the same instructions differently from run to run; the PTX, the counts and the tools' versions tell.
    """
    code = launch["code"] and {name: value for name, value in launch["code"].items() if name != "cubin_sha256"}
    return dict(launch) | {"code": code}


def _state(launch: Launch | None) -> str:
    if launch is None:
        return "-"
    code = launch["code"]
    return f"{code['registers']} registers, {code['instructions']} instructions" if code else launch["reason"]


def _broken(before: Launch | None, after: Launch) -> Iterator[tuple[str, str, str]]:
    """A launch that is new is held to what needs no comparison: it compiles, fits and does not spill."""
    was, now = before and before["code"], after["code"]
    if now is None:
        if before is None or was is not None:
            yield "does not compile", "ok" if was else "-", after["reason"]
        return
    if now["occupancy"]["blocks"] == 0 and not (was and was["occupancy"]["blocks"] == 0):
        yield "cannot be launched", _size(was), _size(now)
    if any(_spilled(now)[index] > _spilled(was)[index] for index in range(3)):
        yield "spills", _spills(was), _spills(now)
    if was:
        yield from _worse(was, now)


def _worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for kind in ("loads", "stores"):
        widths, narrower = was[f"global_{kind}"], now[f"global_{kind}"]
        if _scalarised(widths, narrower):
            yield f"narrower {kind}", _widths(widths), _widths(narrower)
    if now["instructions"] * 100 > was["instructions"] * (100 + _MAX_GROWTH_PERCENT):
        growth = f" (+{100 * now['instructions'] / was['instructions'] - 100:.0f} %)"
        yield "more instructions", str(was["instructions"]), str(now["instructions"]) + growth
    before, after = was["hot_loop"], now["hot_loop"]
    # Where either has no such loop, all its instructions are counted already.
    if not (before["whole_kernel"] or after["whole_kernel"]) and _longer(before, after):
        yield "a longer hot loop", _turn(before), _turn(after)


def _longer(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an element takes more instructions, or a turn where it is not told how much one fetches."""
    name = "instructions_per_element"
    if was[name] is None or now[name] is None:
        name = "instructions"
    return bool(now[name] * 100 > was[name] * (100 + _MAX_GROWTH_PERCENT))


def _turn(loop: Mapping[str, Any]) -> str:
    return f"{loop['instructions']} instructions for {loop['load_bytes']} bytes"


def _size(code: Mapping[str, Any] | None) -> str:
    """What a block takes of a multiprocessor; too much of what is named last."""
    if code is None:
        return "-"
    over = "" if code["occupancy"]["blocks"] else f": over the target's {' and '.join(code['occupancy']['limited_by'])}"
    return f"{code['shared_bytes']} bytes shared, {code['registers']} registers{over.replace('_', ' ')}"


def _spilled(code: Mapping[str, Any] | None) -> tuple[int, int, int]:
    """Bytes of stack and local memory, loads and stores of them."""
    if not code:
        return 0, 0, 0
    return code["stack_bytes"] + code["local_bytes"], code["local_loads"], code["local_stores"]


def _spills(code: Mapping[str, Any] | None) -> str:
    size, loads, stores = _spilled(code)
    return f"{size} bytes, {loads} loads, {stores} stores"


def _scalarised(was: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether accesses of some width became fewer while there are more of narrower ones."""
    return any(
        now.get(width, 0) < many and _narrower(now, int(width)) > _narrower(was, int(width))
        for width, many in was.items()
    )


def _narrower(widths: Mapping[str, int], than: int) -> int:
    return sum(many for width, many in widths.items() if int(width) < than)


def _widths(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{widths[bits]} x {bits} bit" for bits in sorted(widths, key=int, reverse=True)) or "none"
