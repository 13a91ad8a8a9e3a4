"""Finding the one raw sample that was edited.

A roofline keeps, for each file of raw samples, their count, their sum S0 and
the weighted sum S1 = sum of (position * sample), positions counted from one in
the order of the file. One sample changed by d moves S0 by d and S1 by
position * d: their quotient is the position, and the old value is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Edit", "find_edit", "locator", "samples"]


class Edit(NamedTuple):
    """A sample that is not what it was: its JSON path and both values, in ns."""

    path: str
    expected_ns: int
    found_ns: int


def samples(value: Any, path: str = "$") -> Iterator[tuple[str, int]]:
    """Each raw sample of an artifact with its JSON path, in the order of the file."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            if key.endswith("samples_ns"):
                yield from ((f"{path}.{key}[{i}]", sample) for i, sample in enumerate(value[key]))
            else:
                yield from samples(value[key], f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from samples(item, f"{path}[{index}]")


def locator(artifact: Mapping[str, Any]) -> dict[str, int]:
    """``{samples, sum_ns, weighted_sum_ns}`` of an artifact's raw samples."""
    values = [sample for _, sample in samples(artifact)]
    weighted = sum(position * sample for position, sample in enumerate(values, start=1))
    return {"samples": len(values), "sum_ns": sum(values), "weighted_sum_ns": weighted}


def find_edit(artifact: Mapping[str, Any], recorded: Mapping[str, int]) -> Edit | None:
    """The one sample whose change explains how ``recorded`` differs, or None."""
    now = locator(artifact)
    shift = now["sum_ns"] - recorded["sum_ns"]
    weighted = now["weighted_sum_ns"] - recorded["weighted_sum_ns"]
    if now["samples"] != recorded["samples"] or shift == 0 or weighted % shift:
        return None
    position = weighted // shift
    if not 1 <= position <= now["samples"]:
        return None
    path, found = list(samples(artifact))[position - 1]
    return Edit(path, found - shift, found) if found > shift else None
