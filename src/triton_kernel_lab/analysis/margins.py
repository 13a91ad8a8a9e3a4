"""How large a change must be to count, and what has been measured of the noise.

A noise floor is measured on identical code in several sessions. Without one the
margin is wide and the verdict says `uncalibrated`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from triton_kernel_lab.analysis.sides import Key, differences, fingerprint
from triton_kernel_lab.artifacts import Artifact

__all__ = ["Margin", "Noise", "margin", "noise_of"]

UNCALIBRATED = 0.10
MINIMUM = 0.03
SESSION_SDS = 3.0
AA_FACTOR = 1.5
ABSOLUTE_NS = 250
QUANTA = 2


class Noise(NamedTuple):
    """Of one cell on identical code: the sd between sessions and the largest difference, of log tmean."""

    session_sd_log: float
    largest_aa_log: float


class Margin(NamedTuple):
    """A margin as a share of the base's time, and which rule set it (`margin_source` in the schema)."""

    ratio: float
    source: str

    @property
    def log(self) -> float:
        """The same as a difference of log times, up and down alike."""
        return math.log1p(self.ratio)


def margin(time_ns: float, calls: int, quantum_ns: int, noise: Noise | None) -> Margin:
    """The largest of what is asked of a change.

    Args:
        time_ns: the base's time a call.
        calls: how many calls a sample holds. The timer's step and the absolute floor
            are a sample's, and so are divided by it.
        quantum_ns: the timer's step.
        noise: None where it was not measured.
    """
    sample_ns = time_ns * calls
    rules = [Margin(QUANTA * quantum_ns / sample_ns, "quantum"), Margin(ABSOLUTE_NS / sample_ns, "absolute")]
    if noise is None:
        rules.append(Margin(UNCALIBRATED, "uncalibrated"))
    else:
        rules.append(Margin(MINIMUM, "minimum"))
        rules.append(Margin(math.expm1(SESSION_SDS * noise.session_sd_log), "session_sd"))
        rules.append(Margin(math.expm1(AA_FACTOR * noise.largest_aa_log), "largest_aa"))
    return max(rules, key=lambda rule: rule.ratio)


def noise_of(floor: Artifact | None, environment: Artifact) -> tuple[Mapping[Key, Noise], str | None]:
    """The noise of each cell, and why there is none.

    Args:
        floor: the runner's ``noise_floor`` artifact, or None.
        environment: that of the side that is judged; noise of another machine or
            stack, or from a dirty tree, says nothing of it.
    """
    if floor is None:
        return {}, "uncalibrated: no noise floor was measured for this runner"
    if floor["claim_kind"] == "exploratory":
        return {}, "uncalibrated: the noise floor was measured from a dirty tree"
    place = {**floor["environment"], "claim": {"synthetic": floor["claim_kind"] == "synthetic"}}
    if unlike := differences(place, fingerprint(environment, environment, "environment.json")):
        return {}, f"uncalibrated: the noise floor is of another environment than this one: {unlike[0]}"
    return {
        (cell["kernel"], cell["shape"], cell["dtype"], cell["regime"]): Noise(
            cell["session_sd_log"], cell["largest_aa_log"]
        )
        for cell in floor["cells"]
    }, None
