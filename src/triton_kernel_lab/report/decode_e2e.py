"""Decoding a whole model: the section of results.md, and the block of the README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.stats import per_call_ns
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.report import units
from triton_kernel_lab.report.markdown import table

__all__ = [
    "HEADERS",
    "KERNEL_HEADERS",
    "MISSING_HEADERS",
    "PART_HEADERS",
    "block",
    "conditions",
    "kernel_rows",
    "missed",
    "missing",
    "part_of",
    "part_rows",
    "parts",
    "rows",
    "section",
    "traced",
]

_TITLE = "## Decoding a whole model"
_NAME = ("Batch", "Context", "Decoder", "Cache", "Weights")
HEADERS = (
    *(*_NAME, "Tokens/s", "per token (ms)", "device step (ms)"),
    *("Floor (ms)", "over floor", "vs torch.compile", "Greedy tokens", "Step memory (MiB)"),
)
MISSING_HEADERS = (*_NAME, "Status", "Reason")
_LABELS = {
    "triton": "Triton",
    "eager": "PyTorch eager",
    "liger": "Liger's patch",
    "torch_compile": "torch.compile",
    "torch_compile_reduce_overhead": "torch.compile reduce-overhead",
}
_MAKE = "`python benchmarks/decode_e2e.py`"
_STALE = f" **Stale:** the sources of `decode_e2e` have changed since; {_MAKE} on this GPU measures it again."
# The columns of the short table: a header, and whose times count; the best of them is shown.
_GROUPS = {
    "Triton": ("triton_static", "triton_paged"),
    "Triton INT4": ("triton_int4_static", "triton_int4_paged"),
    "torch.compile": ("torch_compile", "torch_compile_reduce_overhead"),
    "Liger": ("liger",),
    "eager": ("eager_dynamic", "eager_static"),
}
_COLUMNS = (
    "Times are a token's: Triton, Triton INT4 and eager with the faster of their two caches, torch.compile in the "
    "faster of its two modes. The floor is that of bfloat16 weights."
)
# What this project set itself for decoding in bfloat16: torch.compile's tokens a second times this at least, and a
# time a token of the floor times that at most. They stand here so that a figure that falls short is told beside it.
_TOKENS_AIM = 1.5
_FLOOR_AIM = 1.35

# What part of a step a kernel is, by its name: the first that fits. Some of this project's have the names of others
# that decode nothing; a norm whose row is not held at once would be told as a product, so tables and rules are tested
# together. Inductor names a kernel after all that it computes; its pointwise ones that name a product only add a bias.
# cuDNN's lean reduction joins the parts of keys that were cut for attention.
_PARTS = {
    "Attention": r"^_attend_kernel$|^_attention_kernel$|flash|fmha|sdpa|dot_product|softmax|lean_reduction",
    "Matrix products": (
        r"^_(row|vector|streamed|tiled|described|stream|tile|dense)_kernel$"
        r"|gem[mv]|nvjet|cutlass|cublas|splitk|^triton_tem_|^triton_(?!poi_).*_(add)?mm_"
    ),
    "Norms": r"^_rows_kernel$|rms_?norm|layer_?norm|^triton_.*_rsqrt(_|$)",
}
_REST, _GAPS = "Other kernels", "Gaps"
_ALL_PARTS = (*_PARTS, _REST, _GAPS)
_REDUCED = "torch_compile_reduce_overhead"
PART_HEADERS = (*_NAME[:-1], *(f"{part} (us)" for part in _ALL_PARTS), "Traced step (us)", "Step (us)")
KERNEL_HEADERS = (*_NAME[:-1], "Kernel", "Part", "Launches", "Time (us)", "of the step")
_NAMES = "Names are cut after 120 characters; kernels of the same name share a row."
# The artifact's name for all kernels of a step but the twenty longest.
_BEYOND = "other"


def section(found: Artifact | None, *, stale: bool = False) -> str:
    """Every decoder of every cell, and whether their sources are other ones now; empty where nothing was measured."""
    if found is None:
        return ""
    if found["status"] != "measured":
        return f"{_TITLE}\n\nNot measured: {found['reason']}."
    absent = missing(found)
    told = [_TITLE, conditions(found, stale=stale), *filter(None, [missed(found)]), table(HEADERS, rows(found))]
    told += [f"### Not timed\n\n{table(MISSING_HEADERS, absent)}"] if absent else []
    if steps := part_rows(found):
        told += ["### Where a step goes", table(PART_HEADERS, steps), traced(found)]
        told += ["### Kernels of a step", _NAMES, table(KERNEL_HEADERS, kernel_rows(found))]
    return "\n\n".join(told)


def rows(found: Artifact) -> list[list[str]]:
    """A row of text for each decoder that was timed, under ``HEADERS``."""
    return [_row(cell, each) for cell in found["cells"] for each in cell["opponents"] if each["derived"]]


def missing(found: Artifact) -> list[list[str]]:
    """A row for each of the others, under ``MISSING_HEADERS``."""
    return [
        [*_name(cell, each), each["status"], each["reason"] or units.MISSING]
        for cell in found["cells"]
        for each in cell["opponents"]
        if not each["derived"]
    ]


def _name(cell: Mapping[str, Any], opponent: Mapping[str, Any]) -> list[str]:
    name = opponent["name"]
    label = _LABELS.get(name) or _LABELS[name.partition("_")[0]]
    if opponent["derived"] and opponent["reason"]:
        label = f"{label}, {opponent['reason']}"
    return [str(cell["batch"]), str(cell["context"]), label, opponent["cache"], opponent["weights"]]


def _row(cell: Mapping[str, Any], opponent: Mapping[str, Any]) -> list[str]:
    derived, check = opponent["derived"], opponent["check"]
    return [
        *_name(cell, opponent),
        str(derived["tokens_per_s"]),
        *(units.milliseconds(derived[f"{name}_ns"]) for name in ("token_p50", "step_p50", "floor")),
        *(units.factor(derived["over_floor_ratio"]), units.ratio(derived["speedup_over_torch_compile"])),
        f"{check['greedy_agreeing']} of {check['greedy_checked']}",
        units.MISSING if opponent["peak_bytes"] is None else units.traffic(opponent["peak_bytes"]),
    ]


def conditions(found: Artifact, *, stale: bool = False, short: bool = False) -> str:
    """The model, the software beside the environment's, how the times were taken, and what they are worth.

    Args:
        found: a measured artifact ``decode_e2e``.
        stale: its sources have changed since.
        short: leave out what only the long table shows.
    """
    greedy = " Greedy tokens are those on which a decoder agrees with the float32 model; random weights make near ties."
    model, protocol, ceiling = found["model"], found["protocol"], found["read_ceiling"]
    caveat = " Exploratory: made from a tree with uncommitted changes." if found["claim_kind"] == "exploratory" else ""
    return (
        f"A Llama-style model of random weights ({model['layers']} layers, {model['hidden']} wide, "
        f"{model['intermediate']} in the MLP, {model['heads']} heads on {model['kv_heads']}, {model['vocab']} tokens), "
        f"decoded greedily after a real prefill; transformers {found['software']['transformers']}, Liger "
        f"{found['software']['liger_kernel'] or 'not installed'}. Per token is the host's time over a repetition of up "
        f"to {protocol['tokens']} steps and the wait for the last, median of {protocol['repetitions']} repetitions in "
        f"turns. The floor is the time in which the measured read ceiling, "
        f"{units.gigabytes_per_s(ceiling['bytes_per_s'])} GB/s, delivers weights and cache once. vs torch.compile is "
        f"against the faster of its default mode and reduce-overhead.{'' if short else greedy}{caveat}"
        f"{_STALE if stale else ''}"
    )


def block(found: Artifact | None, *, stale: bool = False) -> str:
    """The README's table: a row a cell, the time a token of the best of each kind, and the floor. Pure.

    Args:
        found: the artifact ``decode_e2e`` of the runner, if there is one.
        stale: its sources have changed since.
    """
    if found is None:
        return f"Not measured yet: {_MAKE} measures it on this runner."
    if found["status"] != "measured":
        return f"Not measured: {found['reason']}."
    headers = ["Batch", "Context", *(f"{name} (ms)" for name in _GROUPS), "Floor (ms)", "over floor"]
    headers += ["vs torch.compile", "INT4 vs torch.compile", "Triton tokens/s"]
    said = " ".join(filter(None, [_COLUMNS, missed(found)]))
    told = [
        table(headers, [list(_short(cell)) for cell in found["cells"]]),
        conditions(found, stale=stale, short=True),
        said,
    ]
    if steps := part_rows(found):
        told += ["Where a step goes in the cells that miss:", table(PART_HEADERS, steps), traced(found)]
    return "\n\n".join(told)


def missed(found: Artifact) -> str:
    """What was aimed at in bfloat16 and each cell that misses it, cache by cache; empty where none does."""
    cells: list[str] = []
    shares: list[float] = []
    for cell in found["cells"]:
        ours = [each for each in cell["opponents"] if each["name"] in _GROUPS["Triton"] and each["derived"]]
        if short := {each["cache"]: figures for each in ours if (figures := _falls_short(each["derived"]))}:
            told = ", ".join(f"{cache} {figures}" for cache, figures in short.items())
            cells.append(f"batch {cell['batch']}, context {cell['context']} ({told})")
            shares += [_step_share(each["derived"]) for each in ours if each["cache"] in short]
    if not cells:
        return ""
    return (
        f"Aimed at in bfloat16: {_TOKENS_AIM}x torch.compile's tokens a second, and no more than {_FLOOR_AIM}x the "
        f"floor. Missed: {'; '.join(cells)}. There the median device step is {_range(shares)} of the time a token. A "
        f"device step lasts from mark to mark on the device; where the device waits for the host, the wait is in it."
    )


def _falls_short(derived: Mapping[str, Any]) -> str:
    speedup, over = derived["speedup_over_torch_compile"], derived["over_floor_ratio"]
    said = [f"{units.ratio(speedup)} torch.compile"] if speedup is not None and speedup < _TOKENS_AIM else []
    said += [f"{units.factor(over)}x the floor"] if over > _FLOOR_AIM else []
    return " and ".join(said)


def part_of(kernel: str) -> str:
    """What a kernel of this name is for."""
    return next((part for part, rule in _PARTS.items() if re.search(rule, kernel, re.IGNORECASE)), _REST)


def parts(profile: Mapping[str, Any]) -> dict[str, int]:
    """The ns of a traced step by what they go to; with the gaps they are its whole span."""
    made = dict.fromkeys(_ALL_PARTS, 0)
    made[_GAPS] = profile["span_ns"]
    for kernel in profile["kernels"]:
        made[part_of(kernel["name"])] += kernel["ns"]
        made[_GAPS] -= kernel["ns"]
    return made


def part_rows(found: Artifact) -> list[list[str]]:
    """Of each traced cell that misses an aim: who misses it, torch.compile and the floor, under ``PART_HEADERS``."""
    made = []
    for cell, some in _traced(found):
        for each in some:
            profile, step_ns = each["profile"], each["derived"]["step_p50_ns"]
            told = (*parts(profile).values(), profile["span_ns"], step_ns)
            made.append([*_name(cell, each)[:-1], *(units.microseconds(ns or None, 1) for ns in told)])
        made.append(_floor_row(cell, some[0]["derived"], found["read_ceiling"]))
    return made


def kernel_rows(found: Artifact) -> list[list[str]]:
    """A row for each kernel of the same steps, under ``KERNEL_HEADERS``."""
    return [
        [
            *_name(cell, each)[:-1],
            *("all others" if kernel["name"] == _BEYOND else kernel["name"], part_of(kernel["name"])),
            str(kernel["launches"]),
            units.microseconds(kernel["ns"] or None, 1),
            units.share(kernel["ns"] / each["profile"]["span_ns"]),
        ]
        for cell, some in _traced(found)
        for each in some
        for kernel in each["profile"]["kernels"]
    ]


def traced(found: Artifact) -> str:
    """How the steps were traced, and what that does to them; empty where none was."""
    some = [each for _, some in _traced(found) for each in some]
    if not some:
        return ""
    steps = max(each["profile"]["steps"] for each in some)
    longer = _range(each["profile"]["span_ns"] / each["derived"]["step_p50_ns"] for each in some)
    return (
        f"A traced step is the one of median length of {steps} in a row, told kernel by kernel by CUPTI through "
        f"torch.profiler after all times were taken. Each kernel is in one part, by its name: copies of the cache made "
        f"for attention are in attention, a SwiGLU of the same launch is in the products, a residual sum before a norm "
        f"in the norms, and all but a step's twenty longest are in the others. Where kernels overlap, the time counts "
        f"once, for the first; in the gaps none runs. Step is the median device step without tracing, and the traced "
        f"ones are {longer} of it. The floor is that of the weights, which the products read, and of the cache, which "
        f"attention reads."
    )


def _traced(found: Artifact) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Each cell that misses an aim, with the traced ones of those that miss it and torch.compile's."""
    for cell in found["cells"]:
        some = [each for each in cell["opponents"] if each["derived"] and each.get("profile")]
        short = [each for each in some if each["name"] in _GROUPS["Triton"] and _falls_short(each["derived"])]
        if short:
            yield cell, [*short, *(each for each in some if each["name"] == _REDUCED)]


def _floor_row(cell: Mapping[str, Any], derived: Mapping[str, Any], ceiling: Mapping[str, int]) -> list[str]:
    """What reading takes at the ceiling: the weights beside the products, the cache beside attention."""
    weights = derived["read_bytes"] - cell["cache_bytes"]
    weights_ns = per_call_ns(weights * 1_000_000_000, ceiling["bytes_per_s"])
    told = {"Matrix products": weights_ns, "Attention": derived["floor_ns"] - weights_ns}
    floors = [units.microseconds(told.get(part), 1) for part in _ALL_PARTS]
    whole = units.microseconds(derived["floor_ns"], 1)
    return [str(cell["batch"]), str(cell["context"]), "Floor", units.MISSING, *floors, whole, units.MISSING]


def _step_share(derived: Mapping[str, Any]) -> float:
    return float(derived["step_p50_ns"] / derived["token_p50_ns"])


def _range(shares: Iterable[float]) -> str:
    shares = list(shares)
    least, largest = (units.share(round(share, 4)) for share in (min(shares), max(shares)))
    return least if least == largest else f"{least} to {largest}"


def _short(cell: Mapping[str, Any]) -> Iterator[str]:
    yield from (str(cell["batch"]), str(cell["context"]))
    best = {name: _best(cell, names) for name, names in _GROUPS.items()}
    yield from (units.milliseconds(each.get("token_p50_ns")) for each in best.values())
    ours = best["Triton"]
    yield units.milliseconds(ours.get("floor_ns"))
    yield units.factor(ours.get("over_floor_ratio"))
    yield from (units.ratio(best[name].get("speedup_over_torch_compile")) for name in ("Triton", "Triton INT4"))
    yield units.plain(ours.get("tokens_per_s"))


def _best(cell: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """What is derived of the fastest of some opponents; nothing where none was timed."""
    timed = [each["derived"] for each in cell["opponents"] if each["name"] in names and each["derived"]]
    return min(timed, key=lambda derived: int(derived["token_p50_ns"]), default={})
