"""triton-kernel-nsight: one cell under Nsight Compute, and what is left where there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_ncu
import pytest

from triton_kernel_lab import artifacts, nsight
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.lab.nsight import SECTIONS


def call(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> int:
    """The exit code of the program."""
    given = ("--kernel", "rmsnorm", "--shape", "128x1024", "--output", str(output))
    monkeypatch.setattr(sys, "argv", ["triton-kernel-nsight", *given, *arguments])
    with pytest.raises(SystemExit) as caught:
        nsight.main()
    return int(caught.value.code or 0)


def record(output: Path) -> Artifact:
    return artifacts.read(output.with_name(output.name + ".json"), "nsight")


def test_a_profile_is_a_report_a_text_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three files lie beside each other, and the record holds the counts of the one call."""
    seen = fake_ncu.install(tmp_path, monkeypatch)
    output = tmp_path / "out" / "rms.v2"
    assert call(monkeypatch, output, "--dtype", "float16") == 0
    assert sorted(path.name for path in output.parent.iterdir()) == ["rms.v2.json", "rms.v2.ncu-rep", "rms.v2.txt"]
    made = record(output)
    assert (made["kernel"], made["shape"], made["dtype"]) == ("rms_norm", "128x1024", "float16")
    assert (made["counter_status"], made["reason"]) == ("ok", None)
    assert [launch["dram_read_bytes"] for launch in made["launches"]] == [1048576]
    assert "Section: GPU Speed Of Light Throughput" in output.with_name("rms.v2.txt").read_text()
    asked, *_ = map(json.loads, seen.read_text().splitlines())
    assert [asked[at + 1] for at, word in enumerate(asked) if word == "--section"] == list(SECTIONS)
    # The many replays of its sections would else find the data in the cache.
    assert asked[asked.index("--cache-control") + 1] == "all"
    assert asked[asked.index("--clock-control") + 1] == "none"


@pytest.mark.parametrize(
    ("mode", "status"),
    [("denied", "permission_denied"), ("library", "profiler_unavailable"), ("silent", "profiler_unavailable")],
)
def test_a_refused_profile_is_a_status_and_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, status: str
) -> None:
    """The record says why there is nothing, and an earlier run's report does not stand beside it."""
    output = tmp_path / "rms"
    fake_ncu.install(tmp_path, monkeypatch)
    assert call(monkeypatch, output) == 0
    fake_ncu.install(tmp_path, monkeypatch, mode)
    assert call(monkeypatch, output) == 0
    made = record(output)
    assert (made["counter_status"], made["launches"], made["files"]) == (status, [], ["rms.json"])
    assert made["reason"]
    assert not output.with_name("rms.ncu-rep").exists()
    assert not output.with_name("rms.txt").exists()
    assert f"{status}: " in capsys.readouterr().out


def test_a_profile_that_cannot_be_read_back_is_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonsense instead of a report, or in its table, ends as profiler_unavailable."""
    for mode in ("garbage", "words"):
        fake_ncu.install(tmp_path, monkeypatch, mode)
        assert call(monkeypatch, tmp_path / mode) == 0
        assert record(tmp_path / mode)["counter_status"] == "profiler_unavailable"


def test_without_ncu_the_record_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without Nsight Compute gets a status, not a crash."""
    fake_ncu.remove(monkeypatch, tmp_path)
    assert call(monkeypatch, tmp_path / "rms") == 0
    assert "no ncu on PATH" in record(tmp_path / "rms")["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kernel", "bogus"), "kernel bogus: expected one of rmsnorm"),
        (("--shape", "128"), "rmsnorm: shape 128: expected MxN"),
        (("--dtype", "float8"), "dtype float8: expected one of float16"),
        (("--bogus",), "No such option"),
    ],
)
def test_a_wrong_name_is_one_sentence_and_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    """What the command line does not know ends with 1 before anything is profiled."""
    assert call(monkeypatch, tmp_path / "rms", *arguments) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
