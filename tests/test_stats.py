from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_kernel_lab.analysis.stats import (
    StatsError,
    per_call_ns,
    percentile,
    pool,
    rate_per_s,
    speedup,
    summarise,
    tmean,
)
from triton_kernel_lab.report import units

SAMPLES = st.lists(st.integers(1, 10**9), min_size=1, max_size=80)
PERCENTS = st.integers(1, 100)


def run(samples: list[int], *, process: int = 0, calls: int = 1, **flags: list[int]) -> dict[str, Any]:
    return {"process": process, "calls_per_sample": calls, "samples_ns": samples, "flags": flags}


@given(st.integers(1, 400), PERCENTS)
def test_percentile_of_a_count_is_its_rank(count: int, percent: int) -> None:
    """Of 1..n the p-th percentile is ceil(p n / 100)."""
    assert percentile(range(1, count + 1), percent) == -(-percent * count // 100)


@given(SAMPLES, PERCENTS)
def test_percentile_is_the_least_sample_that_covers_its_share(samples: list[int], percent: int) -> None:
    """At least p per cent of the samples are at or under it, and under any smaller sample fewer are."""
    found = percentile(sorted(samples), percent)
    assert found in samples
    assert 100 * sum(sample <= found for sample in samples) >= percent * len(samples)
    assert 100 * sum(sample < found for sample in samples) < percent * len(samples)


@given(SAMPLES)
def test_percentiles_rise_from_the_least_to_the_largest(samples: list[int]) -> None:
    """Percentiles never fall as the per cent rises, and the hundredth is the maximum."""
    ordered = sorted(samples)
    found = [percentile(ordered, percent) for percent in range(1, 101)]
    assert found == sorted(found)
    assert found[-1] == ordered[-1]


def test_percentile_ranks_without_binary_fractions() -> None:
    """The 7th percentile of 100 samples is the 7th, though 0.07 * 100 exceeds 7 in binary."""
    assert percentile(range(1, 101), 7) == 7


@pytest.mark.parametrize("percent", [0, 101, -5])
def test_percentile_outside_1_to_100_is_refused(percent: int) -> None:
    """A per cent outside 1 to 100 has no rank."""
    with pytest.raises(StatsError, match=f"from 1 to 100, found {percent}"):
        percentile([1, 2], percent)


def test_statistics_of_nothing_are_refused() -> None:
    """No samples have no percentile and no mean."""
    with pytest.raises(StatsError, match="found none"):
        percentile([], 50)
    with pytest.raises(StatsError, match="found none"):
        tmean([])


@given(st.integers(1, 1000))
def test_tmean_of_a_count_is_the_middle_of_what_is_kept(count: int) -> None:
    """Of 1..n the mean of the lowest k = ceil(0.95 n) is (k + 1) / 2."""
    kept = -(-95 * count // 100)
    assert tmean(range(1, count + 1)) == (kept + 1) / 2


@given(SAMPLES, st.integers(1, 10**6))
def test_tmean_moves_with_its_samples(samples: list[int], shift: int) -> None:
    """A shift of every sample shifts the mean by as much."""
    ordered = sorted(samples)
    assert tmean([sample + shift for sample in ordered]) == pytest.approx(tmean(ordered) + shift, abs=2e-3)


def test_tmean_ignores_the_slowest_twentieth() -> None:
    """One outlier among twenty samples does not move the mean."""
    assert tmean([1000] * 19 + [10**9]) == 1000.0


@pytest.mark.parametrize(("sample", "calls", "expected"), [(100, 1, 100), (5, 2, 3), (4, 3, 1), (5, 3, 2), (1, 3, 0)])
def test_a_call_is_its_share_rounded_half_up(sample: int, calls: int, expected: int) -> None:
    """A sample of many calls is divided, and halves are rounded up."""
    assert per_call_ns(sample, calls) == expected


def test_summary_pools_processes_and_leaves_flagged_samples_out() -> None:
    """Unflagged samples of all processes count together; a sample with two flags counts once."""
    runs = [
        run([10, 20, 9999] + [30] * 18, launch_exposed=[2], clock_low=[2]),
        run([40] * 19, process=1),
    ]
    status, reason, stats = summarise(runs)
    assert (status, reason) == ("ok", None)
    assert stats is not None
    assert (stats["samples"], stats["flagged"], stats["processes"]) == (39, 1, 2)
    assert (stats["min_ns"], stats["p50_ns"], stats["max_ns"]) == (10, 30, 40)


@given(st.permutations(list(range(1, 30))))
def test_summary_does_not_depend_on_the_order_of_samples(samples: list[int]) -> None:
    """Shuffled samples give the same statistics."""
    assert summarise([run(samples)]) == summarise([run(sorted(samples))])


@pytest.mark.parametrize(("count", "given"), [(499, False), (500, True)])
def test_p99_needs_500_samples(count: int, given: bool) -> None:
    """The 99th percentile is null under 500 samples."""
    stats = summarise([run(list(range(1, count + 1)))]).stats
    assert stats is not None
    assert (stats["p99_ns"] is not None) is given


@pytest.mark.parametrize(("flagged", "status"), [(10, "ok"), (11, "invalid"), (100, "invalid")])
def test_more_than_a_tenth_flagged_is_invalid(flagged: int, status: str) -> None:
    """Ten flagged samples of a hundred are allowed, eleven make the candidate invalid."""
    summary = summarise([run([1000] * 100, thermal=list(range(flagged)))])
    assert summary.status == status
    assert (summary.stats is None) is (status == "invalid")
    assert summary.reason is None or str(100 - flagged) in summary.reason or str(flagged) in summary.reason


def test_no_samples_are_a_status_not_a_number() -> None:
    """A candidate without runs is invalid, with a reason and no statistics."""
    assert summarise([]) == ("invalid", "no unflagged sample among 0", None)


def test_f74_a_call_that_rounds_to_nothing_is_invalid() -> None:
    """A duration that would become 0 ns is a status, never a 0."""
    status, reason, stats = summarise([run([1, 1], calls=50)])
    assert (status, stats) == ("invalid", None)
    assert reason == "a call takes less than half a nanosecond"


def test_a_flag_outside_its_run_is_refused() -> None:
    """A flag that points at no sample is an error that names the index."""
    with pytest.raises(StatsError, match="below 3, found 3"):
        pool([run([1, 2, 3], power_cap=[3])])


@pytest.mark.parametrize("bad", [0, -1])
def test_f74_a_time_of_zero_or_less_divides_nothing(bad: int) -> None:
    """Neither a rate nor a speedup is made of a duration of 0 or less."""
    with pytest.raises(StatsError, match=f"found {bad}"):
        rate_per_s(1, bad)
    with pytest.raises(StatsError, match="above 0 ns"):
        speedup(bad, 5)
    with pytest.raises(StatsError, match="above 0 ns"):
        speedup(5, bad)


def test_a_missing_time_gives_no_speedup() -> None:
    """A speedup over or of nothing is null."""
    assert speedup(None, 5) is None
    assert speedup(5, None) is None
    assert speedup(10, 3) == 3.3333


def test_f77_reading_and_writing_a_gibibyte_in_a_millisecond_is_2147_48_gb_a_second() -> None:
    """2^30 bytes copied in 1 ms move 2^31 bytes: 2147.48 GB/s, not 2000 and not 1073.74."""
    rate = rate_per_s(2 * 2**30, 1_000_000)
    assert rate == 2_147_483_648_000
    assert units.gigabytes_per_s(rate) == "2147.48"


@given(st.integers(1, 10**12), st.integers(1, 10**10))
def test_a_rate_is_rounded_to_the_nearest_whole(amount: int, duration: int) -> None:
    """The rate times the duration is the amount, to half a unit a second."""
    rate = rate_per_s(amount, duration)
    assert abs(rate * duration - amount * 10**9) * 2 <= duration
