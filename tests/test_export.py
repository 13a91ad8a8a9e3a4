"""What leaves the project in other programs' forms is what the artifacts say, and nothing that they do not."""

from __future__ import annotations

import builtins
import csv
import importlib.util
import io
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import synthetic
from git_repo import Repo, isolate

from triton_kernel_lab import cli
from triton_kernel_lab.analysis.stats import tmean
from triton_kernel_lab.export import conbench, flat, nvbench, source, stage
from triton_kernel_lab.export.source import Source
from triton_kernel_lab.project import Project


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Project:
    options: dict[str, Any] = {"shapes": ("128x1024", "2048x4096"), "regimes": ("cold_clean", "call"), "samples": 12}
    made = synthetic.project(tmp_path_factory.mktemp("export"), derive=False, git_commit="ab" * 20, **options)
    synthetic.run_pure_stages(made, figure=False)
    return made


@pytest.fixture(scope="module")
def loaded(found: Project) -> Source:
    return source.load(found)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def samples_of(loaded: Source, kernel: str, shape: str, dtype: str, name: str, regime: str) -> list[list[int]]:
    """The samples of each process, as the raw artifact has them; synthetic ones hold one call in a cold regime."""
    cell = next(c for c in loaded.timings[kernel]["cells"] if (c["shape"], c["dtype"]) == (shape, dtype))
    candidate = next(c for c in cell["candidates"] if c["name"] == name)
    return [run["samples_ns"] for run in candidate["runs"] if run["regime"] == regime]


# CSV and Parquet


def test_csv_has_a_row_a_candidate_in_integers(loaded: Source) -> None:
    """Each candidate of each cell is a row; times are whole ns as the roofline has them."""
    rows = list(csv.DictReader(io.StringIO(flat.as_csv(loaded))))
    cells = loaded.roofline["cells"]
    assert len(rows) == sum(len(cell["candidates"]) for cell in cells)
    assert tuple(rows[0]) == flat.COLUMNS
    first, stats = rows[0], cells[0]["candidates"][0]["stats"]
    assert first["p50_ns"] == str(stats["p50_ns"])
    assert float(first["tmean_ns"]) == stats["tmean_ns"]
    assert (first["kernel"], first["shape"], first["git_commit"]) == (cells[0]["kernel"], cells[0]["shape"], "ab" * 20)


def test_csv_leaves_empty_what_does_not_exist(loaded: Source) -> None:
    """A candidate without a figure has its reason, and neither a 0 nor a word where a number belongs."""
    (cell, *_), roofline = loaded.roofline["cells"], loaded.roofline
    nothing = {"stats": None, "logical_bytes_per_s": None, "attainable_ratio": None}
    failed = {**cell["candidates"][0], **nothing, "status": "failed", "reason": 'said "no", twice'}
    text = flat.as_csv(loaded._replace(roofline={**roofline, "cells": [{**cell, "candidates": [failed]}]}))
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["status"], row["reason"]) == ("failed", 'said "no", twice')
    assert {row[name] for name in ("p50_ns", "samples", "attainable_ratio")} == {""}


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_has_the_rows_of_csv(found: Project, loaded: Source, tmp_path: Path) -> None:
    """Column by column Parquet holds what CSV holds, as numbers."""
    import pyarrow.parquet as parquet

    stage.write(found, stage.Form.parquet, tmp_path / "x.parquet")
    assert parquet.read_table(tmp_path / "x.parquet").to_pylist() == list(flat.rows(loaded))


def test_parquet_without_pyarrow_is_one_sentence(
    found: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where pyarrow is missing the command says what brings it, ends with 1 and writes nothing."""
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name="pyarrow")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(found.root)
    assert call(monkeypatch, "export", "--format", "parquet", "--output", str(tmp_path / "x.parquet")) == 1
    said = capsys.readouterr().err
    assert said == (
        "error: parquet: expected the module pyarrow, found none; install the extra `parquet`, or take --format csv.\n"
    )
    assert list(tmp_path.iterdir()) == []


# Conbench


def test_conbench_repetitions_are_processes(loaded: Source) -> None:
    """A result's data are the trimmed mean of each process in seconds, for every candidate with a time."""
    results = conbench.render(loaded)
    timed = [c for cell in loaded.roofline["cells"] for c in cell["candidates"] if c["stats"]]
    assert len(results) == len(timed)
    for result in results:
        tags, stats = result["tags"], result["stats"]
        if tags["regime"] == "cold_clean":
            where = (tags["name"], tags["shape"], tags["dtype"], tags["candidate"], tags["regime"])
            expected = [tmean(sorted(samples)) / 1e9 for samples in samples_of(loaded, *where)]
            assert stats["data"] == pytest.approx(expected, rel=1e-6)
        assert (stats["unit"], stats["iterations"]) == ("s", len(stats["data"]))


def test_conbench_results_have_what_its_server_asks_for(loaded: Source) -> None:
    """Each result names its run, its case and one of machine and cluster; tags tell every case apart."""
    results = conbench.render(loaded)
    for result in results:
        assert {"run_id", "batch_id", "tags", "context", "info", "stats", "cluster_info"} <= set(result)
        assert "machine_info" not in result
        assert result["context"]["benchmark_language"] == "Python"
        assert all(isinstance(value, str) for value in (*result["tags"].values(), *result["info"].values()))
    assert len({json.dumps(result["tags"], sort_keys=True) for result in results}) == len(results)
    assert len({result["run_id"] for result in results}) == 1


def test_conbench_takes_its_moment_from_git_or_has_none(
    found: Project, loaded: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Artifacts know no time: a result's is that of the commit that holds the samples, or it has none."""
    assert loaded.committed == {}
    assert "timestamp" not in conbench.render(loaded)[0]
    isolate(monkeypatch)
    repo = Repo(tmp_path / "tree")
    files = [path for path in found.root.rglob("*") if path.is_file()]
    repo.commit({path.relative_to(found.root).as_posix(): path.read_text(encoding="utf-8") for path in files})
    tracked = source.load(Project(repo.root, found.runner, found.measure))
    seconds = int(repo.git("log", "-1", "--format=%ct"))
    assert set(tracked.committed.values()) == {seconds}
    assert conbench.render(tracked)[0]["timestamp"].endswith("Z")


# NVBench


def read_nvbench(root: dict[str, Any]) -> dict[tuple[str, ...], dict[str, float]]:
    """What a reader of NVBench's files takes from one: summaries by benchmark and axis values."""
    found = {}
    for benchmark in root["benchmarks"]:
        for state in benchmark["states"]:
            axes = tuple(value["value"] for value in state["axis_values"])
            summaries = {
                each["tag"]: float(next(item["value"] for item in each["data"] if item["name"] == "value"))
                for each in state["summaries"]
            }
            found[benchmark["name"], *axes] = summaries
    return found


def test_nvbench_summaries_are_those_of_the_cold_samples(loaded: Source) -> None:
    """Count, mean, spread and median follow from the raw samples of the primary regime, in seconds."""
    read = read_nvbench(nvbench.render(loaded))
    cold = [cell for cell in loaded.roofline["cells"] if cell["regime"] == "cold_clean"]
    assert len(read) == sum(len(cell["candidates"]) for cell in cold)
    for (kernel, shape, dtype, name), summaries in read.items():
        values = [ns for run in samples_of(loaded, kernel, shape, dtype, name, "cold_clean") for ns in run]
        assert summaries["nv/cold/sample_size"] == len(values)
        assert summaries["nv/cold/time/gpu/mean"] == pytest.approx(math.fsum(values) / len(values) / 1e9)
        assert summaries["nv/cold/time/gpu/stdev/absolute"] == pytest.approx(statistics.stdev(values) / 1e9, rel=1e-5)
        assert summaries["nv/cold/time/gpu/min"] == pytest.approx(min(values) / 1e9)
        assert summaries["nv/cold/time/gpu/median"] in [pytest.approx(value / 1e9) for value in values]


def test_nvbench_files_name_their_version_and_device(loaded: Source) -> None:
    """The file's version is one that NVBench's own reader takes, each state's device and axis values exist."""
    root = nvbench.render(loaded)
    assert root["meta"]["version"]["json"]["string"] == "1.0.0"
    assert {device["id"] for device in root["devices"]} == {0}
    for benchmark in root["benchmarks"]:
        values = {axis["name"]: {value["value"] for value in axis["values"]} for axis in benchmark["axes"]}
        for state in benchmark["states"]:
            assert state["device"] in benchmark["devices"]
            assert all(each["value"] in values[each["name"]] for each in state["axis_values"])


# The command


@pytest.mark.parametrize("form", ["csv", "conbench", "nvbench"])
def test_the_command_writes_the_same_bytes_each_time(
    found: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    """An export is a function of the tracked artifacts, and its file is made with its folder."""
    monkeypatch.chdir(found.root)
    paths = [tmp_path / "a" / form, tmp_path / "b" / form]
    for path in paths:
        assert call(monkeypatch, "export", "--format", form, "--output", str(path)) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    if form != "csv":
        json.loads(paths[0].read_text())


def test_a_place_that_cannot_be_written_is_one_sentence(
    found: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file where a folder should be is named with the output, and ends with 1."""
    monkeypatch.chdir(found.root)
    (tmp_path / "file").write_text("", encoding="utf-8")
    output = tmp_path / "file/x.csv"
    assert call(monkeypatch, "export", "--format", "csv", "--output", str(output)) == 1
    assert capsys.readouterr().err.startswith(f"error: {output}: cannot be written: ")


def test_an_unknown_form_is_one_sentence(
    found: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error names the forms there are, and ends with 1."""
    monkeypatch.chdir(found.root)
    assert call(monkeypatch, "export", "--format", "xml", "--output", str(tmp_path / "x")) == 1
    assert capsys.readouterr().err == "error: --format: expected one of conbench, nvbench, csv, parquet, found 'xml'.\n"


def test_a_runner_without_timings_has_nothing_to_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing was measured the command says so and ends with 1."""
    made = synthetic.project(tmp_path, measured=False, runner="cpu", derive=False)
    synthetic.run_pure_stages(made, figure=False)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "export", "--format", "csv", "--output", str(tmp_path / "x.csv")) == 1
    assert capsys.readouterr().err == "error: runner cpu: expected timed cells, found none: no CUDA device.\n"
