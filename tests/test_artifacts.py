"""The only reader and writer of artifacts: what it refuses, how it says so, and what it writes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gate_data import environment, report, roofline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact, ArtifactError

HERE = "here.json"
ROOT = Path(__file__).parents[1]


def refusal(text: str | bytes, kind: str | None = None) -> str:
    """The one sentence with which the reader refuses ``text``; names the file."""
    with pytest.raises(ArtifactError) as caught:
        artifacts.parse(text.encode() if isinstance(text, str) else text, HERE, kind)
    message = str(caught.value)
    assert message.startswith(f"{HERE}: $")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def spoilt(spoil: Callable[[Artifact], object], made: Callable[[], Artifact] = report) -> Artifact:
    artifact: Artifact = json.loads(json.dumps(made()))
    spoil(artifact)
    return artifact


def stats_of(artifact: Artifact) -> dict[str, Any]:
    stats: dict[str, Any] = artifact["cases"][0]["candidates"][0]["stats"]
    return stats


def set_max_abs(value: object) -> Artifact:
    return spoilt(lambda artifact: artifact["cases"][0]["correctness"]["triton"].update(max_abs=value))


def test_sound_artifacts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    """What write takes, read gives back, whether or not the kind is asked for."""
    for number, artifact in enumerate((report(), roofline(), environment())):
        path = tmp_path / f"{number}.json"
        artifacts.write(path, artifact)
        assert artifacts.read(path) == artifacts.read(path, artifact["artifact_kind"]) == artifact


# F69: numbers that are none.

MAX_ABS = "$.cases[0].correctness.triton.max_abs: "


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_f69_a_number_that_is_not_finite_is_refused_with_its_path(token: str) -> None:
    """NaN satisfies every bound and JSON's 1e999 becomes infinity, so the reader refuses both itself."""
    text = artifacts.dumps(set_max_abs("HERE")).replace('"HERE"', token)
    assert f"{MAX_ABS}expected a finite number" in refusal(text)


@pytest.mark.parametrize("token", ["-0.0", "-0e0", "-1e-400"])
def test_f69_negative_zero_is_refused_with_its_path(token: str) -> None:
    """Equal artifacts have equal bytes, so zero has one spelling; what underflows to it has none."""
    text = artifacts.dumps(set_max_abs("HERE")).replace('"HERE"', token)
    assert f"{MAX_ABS}expected 0.0, found -0.0" in refusal(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0])
def test_f69_the_writer_refuses_what_the_reader_would(tmp_path: Path, value: float) -> None:
    """A metric that is NaN, infinite or negative zero is never written, and the old file stays."""
    path = tmp_path / "report.json"
    artifacts.write(path, report())
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match=re.escape(f"{path}: {MAX_ABS}")):
        artifacts.write(path, set_max_abs(value))
    assert path.read_bytes() == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_f69_the_text_form_itself_has_no_nan(value: float) -> None:
    """Text that is made without a schema cannot hold a number that JSON does not have."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifacts.dumps({"value": value})


def test_f69_null_stands_for_no_value_only_where_the_schema_says_so() -> None:
    """A null error is "not computed"; a null p50 is refused."""
    artifacts.validate(set_max_abs(None), "report", HERE)
    text = artifacts.dumps(spoilt(lambda artifact: stats_of(artifact).update(p50_ns=None)))
    assert "$.cases[0].candidates[0].stats.p50_ns: " in refusal(text)


# F70: schemas that only look strict.

SPOILT: dict[str, tuple[Callable[[Artifact], object], str]] = {
    "a misspelt key": (lambda a: stats_of(a).update(mediam_ns=5), "$.cases[0].candidates[0].stats: "),
    "another unit": (lambda a: stats_of(a).update(p50_us=5), "$.cases[0].candidates[0].stats: "),
    "a key renamed": (lambda a: a.update(runer=a.pop("runner")), "$: "),
    "a missing key": (lambda a: stats_of(a).pop("p50_ns"), "$.cases[0].candidates[0].stats: "),
    "an empty name": (lambda a: a["environment"]["device"].update(name=""), "$.environment.device.name: "),
    "an empty driver": (lambda a: a["environment"]["software"].update(driver=""), "$.environment.software.driver: "),
    "no time stamp": (lambda a: a.update(created_at="nope"), "$.created_at: "),
    "a final newline": (lambda a: a.update(created_at=a["created_at"] + "\n"), "$.created_at: "),
    "a count as 200.0": (lambda a: a["protocol"].update(samples=200.0), "$.protocol.samples: "),
    "a count as true": (lambda a: a["protocol"].update(samples=True), "$.protocol.samples: "),
    "a time as 5000.0": (lambda a: stats_of(a).update(p50_ns=5000.0), "$.cases[0].candidates[0].stats.p50_ns: "),
    "a negative time": (lambda a: stats_of(a).update(p50_ns=-1), "$.cases[0].candidates[0].stats.p50_ns: "),
    "a zero time": (lambda a: stats_of(a).update(p50_ns=0), "$.cases[0].candidates[0].stats.p50_ns: "),
    "a time in words": (lambda a: stats_of(a).update(p50_ns="failed"), "$.cases[0].candidates[0].stats.p50_ns: "),
    "an unknown regime": (lambda a: a["protocol"].update(regime="lukewarm"), "$.protocol.regime: "),
    "an unknown dtype": (lambda a: a["cases"][0].update(dtype="fp16"), "$.cases[0].dtype: "),
    "no case": (lambda a: a.update(cases=[]), "$.cases: "),
    "a digest too short": (lambda a: a["producer"].update(source_sha256="a" * 63), "$.producer.source_sha256: "),
    "a newer version": (lambda a: a.update(schema_version=2), "$.schema_version: expected 1, found 2"),
    "a version as true": (lambda a: a.update(schema_version=True), "$.schema_version: "),
    "a version as 1.0": (lambda a: a.update(schema_version=1.0), "$.schema_version: "),
    "no version": (lambda a: a.pop("schema_version"), "$: 'schema_version' is a required property"),
    "an unknown kind": (lambda a: a.update(artifact_kind="reprot"), "$.artifact_kind: expected one of "),
    "a kind that is a list": (lambda a: a.update(artifact_kind=["report"]), "$.artifact_kind: expected one of "),
    "no kind": (lambda a: a.pop("artifact_kind"), "$.artifact_kind: expected one of "),
}


@pytest.mark.parametrize("name", SPOILT)
def test_f70_what_the_schema_does_not_describe_is_refused_both_ways(tmp_path: Path, name: str) -> None:
    """A misspelt key, an empty name, a wrong unit, type or version: refused with file and path, read or written."""
    spoil, path = SPOILT[name]
    artifact = spoilt(spoil)
    assert path in refusal(artifacts.dumps(artifact))
    with pytest.raises(ArtifactError, match=re.escape(path)):
        artifacts.write(tmp_path / "report.json", artifact)
    assert not list(tmp_path.iterdir())


def test_f70_another_version_is_named_before_what_else_it_changes() -> None:
    """A newer file differs in many keys; the message names the version, which explains them."""
    newer = spoilt(lambda artifact: artifact.update(schema_version=2, extra=1, cases=[{"kind": "new"}], runner=5))
    assert "$.schema_version: expected 1, found 2" in refusal(artifacts.dumps(newer))


def test_f70_a_duplicate_key_is_refused_with_its_path() -> None:
    """The second of two equal keys would win unseen; wherever it stands, it is refused."""
    text = artifacts.dumps(report())
    twice = text.replace('"kernel": "swiglu"', '"kernel": "rms_norm", "kernel": "swiglu"')
    assert "$.cases[2]: expected each key once, found 'kernel' twice" in refusal(twice)
    assert "$: expected each key once, found 'runner' twice" in refusal('{"runner": "a",' + text[1:])


@pytest.mark.parametrize("bad", [0, -5, 7.0, True, None, "7", [7], -(10**40)])
def test_f74_one_bad_sample_among_many_is_refused_with_its_path(bad: object) -> None:
    """A vector of raw samples is as strict as each of its items: a failure is no number in it."""

    def spoil(artifact: Artifact) -> None:
        artifact["cases"][1]["candidates"][0]["samples_ns"] = [5000] * 300 + [bad] + [5000] * 300

    assert "$.cases[1].candidates[0].samples_ns[300]: " in refusal(artifacts.dumps(spoilt(spoil)))


def test_the_raw_samples_of_a_run_are_checked_in_a_moment() -> None:
    """Checking must stay cheap, or nobody verifies: 300,000 samples take well under the time of one import of torch."""
    many = spoilt(lambda artifact: artifact["cases"][0]["candidates"][0].update(samples_ns=[5000] * 300_000))
    data = artifacts.dumps(many).encode()
    start = time.process_time()
    artifacts.parse(data, HERE)
    assert time.process_time() - start < 4


def test_another_kind_than_asked_for_is_refused() -> None:
    """A sound artifact of another kind is no answer."""
    assert "$.artifact_kind: expected 'roofline', found 'report'" in refusal(artifacts.dumps(report()), "roofline")


# Bytes that are no artifact.

SOUND = artifacts.dumps(report()).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"", "expected JSON", id="empty"),
        pytest.param(b" \n", "expected JSON", id="blank"),
        pytest.param(SOUND[:-40], "expected JSON, found an error at line ", id="truncated"),
        pytest.param(SOUND * 2, "expected JSON", id="doubled"),
        pytest.param(b"\xef\xbb\xbf" + SOUND, "BOM", id="byte-order mark"),
        pytest.param(SOUND.decode().encode("utf-16"), "expected UTF-8", id="utf-16"),
        pytest.param(b"[]", "expected an object, found list", id="list"),
        pytest.param(b"null", "expected an object, found NoneType", id="null"),
        pytest.param(b"1", "expected an object, found int", id="number"),
        pytest.param(b"{}", "artifact_kind", id="empty object"),
        pytest.param(b'{"a":' * 100_000, "$", id="too deep to parse"),
        pytest.param(b'{"a":' * 40 + b"1" + b"}" * 40, "levels", id="too deep"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}", "out of bounds", id="too many digits"),
    ],
)
def test_bytes_that_are_no_artifact_end_in_one_sentence(data: bytes, says: str) -> None:
    """Empty, truncated, doubled, byte-marked, mis-encoded, too deep or too long: never a traceback."""
    assert says in refusal(data)


def test_a_file_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path) -> None:
    """A missing file, a folder and a loop of links are refused with path, cause and command."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, cause in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (loop, "symbolic links")):
        with pytest.raises(ArtifactError, match=rf"^{re.escape(str(path))}: cannot be read: .*{cause}.*`dvc repro`"):
            artifacts.read(path, mend="dvc repro")
    (tmp_path / "half").write_text("{")
    with pytest.raises(ArtifactError, match=r"half: \$: expected JSON.*`dvc repro`"):
        artifacts.read(tmp_path / "half", mend="dvc repro")


# What is written.


@pytest.mark.parametrize("broken", ["replace", "fdopen"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whether the disk fills up or the rename fails, the reader still finds the old bytes, and no litter."""
    path = tmp_path / "report.json"
    artifacts.write(path, report())
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(ArtifactError, match=r"report\.json: cannot be written: .*No space left"):
        artifacts.write(path, report({("rms_norm", "1x1", "float16"): 9}))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_utf_8_cannot_hold_leaves_the_old_file(tmp_path: Path) -> None:
    """Half a surrogate pair fails while the bytes are written; the old file stays."""
    path = tmp_path / "report.json"
    artifacts.write(path, report())
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match="cannot be written"):
        artifacts.write(path, spoilt(lambda a: a["environment"]["device"].update(name="\ud800")))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_artifact_replaces_a_file_and_makes_its_folders(tmp_path: Path) -> None:
    """Writing makes the folders, replaces what is there and leaves a file that everyone may read."""
    path = tmp_path / "a" / "b.json"
    artifacts.write(path, report())
    artifacts.write(path, roofline())
    assert artifacts.read(path)["artifact_kind"] == "roofline"
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_text_form_is_sorted_with_a_vector_or_an_object_of_scalars_a_line_and_line_feeds() -> None:
    """Keys sorted, LF, UTF-8 as it is, one line what holds only scalars or fits 120 columns, a final newline."""
    long = dict.fromkeys("hgfedc", 10**18)
    text = artifacts.dumps({"b": {"z": 1, "a": [1, 2.5, None, "µ"]}, "a": [], "d": [long, [1]], "e": {"f": [long]}})
    flat = ", ".join(f'"{name}": {10**18}' for name in "cdefgh")
    assert len(flat) > 120
    assert text == (
        f'{{\n "a": [],\n "b": {{"a": [1,2.5,null,"µ"], "z": 1}},\n "d": [\n  {{{flat}}},\n  [1]\n ],\n'
        f' "e": {{\n  "f": [\n   {{{flat}}}\n  ]\n }}\n}}\n'
    )


def test_files_have_line_feeds_wherever_they_are_written(tmp_path: Path) -> None:
    """The bytes on disk are the UTF-8 of the text form, without a carriage return."""
    path = tmp_path / "report.json"
    artifacts.write(path, report())
    assert path.read_bytes() == artifacts.dumps(report()).encode("utf-8")
    assert b"\r" not in path.read_bytes()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_the_text_form_round_trips_and_depends_on_the_value_alone(value: dict[str, Any]) -> None:
    """Any JSON object reads back equal, and the order of its keys leaves no trace."""
    text = artifacts.dumps(value)
    assert json.loads(text) == value
    assert artifacts.dumps(json.loads(text)) == text
    assert artifacts.dumps(dict(reversed(value.items()))) == text
    assert text.endswith("\n")


REASONS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
POSITIVE = st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SIGNED = st.none() | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: str(x) != "-0.0")
CELLS = st.fixed_dictionaries(
    {
        "kernel": st.just("rms_norm"),
        "shape": st.from_regex(r"\A[0-9]+(x[0-9]+)*\Z"),
        "dtype": st.sampled_from(["float16", "bfloat16", "float32"]),
        "regime": st.sampled_from(["cold_clean", "call"]),
        "renamed_from": st.none() | st.just("rms_norm_v1"),
        "verdict": st.sampled_from(["REGRESSED", "NEW", "WITHIN_LIMIT", "AMBIGUOUS"]),
        "accepted": st.booleans(),
        "reason": REASONS,
        "base_p50_ns": st.none() | st.integers(min_value=1),
        "p50_ns": st.none() | st.integers(min_value=1),
        **dict.fromkeys(("base_tmean_ns", "tmean_ns", "margin_percent"), POSITIVE),
        **dict.fromkeys(("base_processes", "processes"), st.none() | st.integers(min_value=0)),
        **dict.fromkeys(("change_percent", "anchored_change_percent"), SIGNED),
        "margin_source": st.sampled_from([None, "minimum", "session_sd"]),
        **dict.fromkeys(("p_regressed", "p_improved", "p_equivalent"), st.none() | st.floats(min_value=0, max_value=1)),
    }
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CELLS, max_size=3), st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_sound_artifact_round_trips_through_a_file(tmp_path: Path, cells: list[Artifact], percent: float) -> None:
    """Write, read, write again: the same value and the same bytes."""
    gate: Artifact = {name: roofline()[name] for name in ("schema_version", "claim_kind", "producer", "inputs")}
    gate |= {"artifact_kind": "gate", "runner": "cpu", "base": {"origin": "a", "git_commit": None}, "reasons": []}
    gate |= {"method": "flat", "max_regression_percent": percent, "calibration": None, "renamed": [], "regimes": None}
    gate |= {"rebaseline": None, "verdict": "pass", "compared": len(cells), "cells": cells}
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    artifacts.write(first, gate)
    artifacts.write(second, artifacts.read(first, "gate"))
    assert artifacts.read(second) == gate
    assert artifacts.sha256_file(first) == artifacts.sha256_file(second)


def test_an_input_record_is_relative_and_names_the_bytes(tmp_path: Path) -> None:
    """What an artifact says of its inputs holds no path of the machine."""
    artifacts.write_text(tmp_path / "a" / "b.json", "x")
    sha256 = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert artifacts.input_record(tmp_path, tmp_path / "a" / "b.json") == {"path": "a/b.json", "sha256": sha256}


# What is tracked.


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone: what is tracked is not known")
def test_tracked_artifacts_take_at_most_8_mb() -> None:
    """All artifacts that a clone downloads sum to no more than 8,000,000 bytes as they lie in the tree."""
    command = ["git", "ls-files", "-z", "artifacts/**/*.json"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert sizes
    assert sum(sizes.values()) <= 8_000_000
