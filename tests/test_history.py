"""A kernel's times by commit: which commits count, what is marked, and how it is drawn."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from gate_data import RUNNER, environment, roofline
from git_repo import Repo, isolate

from triton_kernel_lab import artifacts, revisions
from triton_kernel_lab.analysis import history
from triton_kernel_lab.analysis.history import Figures, HistoryError, Point, Series
from triton_kernel_lab.project import MeasureParams, Project
from triton_kernel_lab.report.history import draw, render

CASE = ("rms_norm", "2048x4096", "bfloat16")
CELL = (*CASE[1:], "cold_clean")
FOLDER = f"artifacts/{RUNNER}"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    isolate(monkeypatch)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_DATE", "2026-03-01T23:30:00-05:00")
    return Repo(tmp_path / "repo")


def project(root: Path) -> Project:
    return Project(root, RUNNER, MeasureParams(1, {"cold_clean": 1}, 1, 1, 1))


def measured(repo: Repo, p50_ns: int | None, digest: str, regime: str = "cold_clean", **machine: str) -> str:
    """Commit what a measurement leaves: the roofline, made from raw samples of that digest, and the machine."""
    records = [{"path": f"{FOLDER}/timing/rms_norm.json", "sha256": digest * 64}]
    derived = roofline({CASE: p50_ns}, regime, inputs=records)
    files = {"roofline": artifacts.dumps(derived), "environment": artifacts.dumps(environment(**machine))}
    return repo.commit({f"{FOLDER}/{name}.json": text for name, text in files.items()})


def series(repo: Repo, cell: history.Cell | None = CELL) -> tuple[list[Series], list[str]]:
    return history.run(project(repo.root), "rms_norm", cell)


def test_each_measurement_is_a_point_with_its_date_commit_and_figures(repo: Repo) -> None:
    """The oldest comes first; the date is that of the commit, in UTC."""
    first, second = measured(repo, 12_000, "1"), measured(repo, 6_000, "2")
    ((found,), problems) = series(repo)
    assert found == Series(
        "rms_norm",
        CELL,
        (
            Point("2026-03-02", first, Figures(12_000, 12_000.0, None, None), ()),
            Point("2026-03-02", second, Figures(6_000, 6_000.0, None, None), ()),
        ),
    )
    assert problems == []


def test_a_roofline_that_was_derived_again_is_no_measurement(repo: Repo) -> None:
    """The same raw samples give no second point, whatever else changed; another commit does not either."""
    measured(repo, 12_000, "1")
    measured(repo, 12_001, "1")
    repo.commit({"README.md": "words"})
    ((found,), _) = series(repo)
    assert [point.figures.p50_ns for point in found.points] == [12_000]


def test_a_change_of_machine_or_stack_is_marked(repo: Repo) -> None:
    """The point after a change names the facts that differ."""
    measured(repo, 12_000, "1", driver="570.9", triton="3.6.0")
    measured(repo, 12_100, "2")
    measured(repo, 12_200, "3")
    ((found,), _) = series(repo)
    marks = [point.changed for point in found.points]
    expected = ("software.driver: base 570.9, current 580.1", "software.triton: base 3.6.0, current 3.7.1")
    assert marks == [(), expected, ()]
    assert f"changed: {expected[0]}; changed: {expected[1]}" in render([found], [])


def test_f83_a_merged_branch_is_one_step(repo: Repo) -> None:
    """Measurements inside a branch do not show; what the main line holds after the merge does."""
    measured(repo, 12_000, "1")
    repo.git("checkout", "--quiet", "-b", "side")
    measured(repo, 11_000, "2")
    measured(repo, 10_000, "3")
    repo.git("checkout", "--quiet", "main")
    repo.commit({"a": "1"})
    repo.git("merge", "--quiet", "--no-ff", "--message=merge", "side")
    ((found,), _) = series(repo)
    assert [point.figures.p50_ns for point in found.points] == [12_000, 10_000]


def test_a_cell_without_a_time_shows_its_reason(repo: Repo) -> None:
    """An invalid measurement is a row with the reason, never a small number."""
    measured(repo, 12_000, "1")
    measured(repo, None, "2")
    ((found,), _) = series(repo)
    assert found.points[1].figures == Figures(None, None, None, "12 % of the samples are flagged")
    assert "12 % of the samples are flagged" in render([found], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected a roofline of version 1"),
        ("[]", "expected a roofline of version 1"),
        (artifacts.dumps(environment()), "kind and version are"),
        (artifacts.dumps(roofline()).replace('"p50_ns": 12000', '"p50_ns": NaN'), "NaN is no number"),
        (artifacts.dumps(roofline()).replace('"p50_ns": 12000', '"p50_ns": 0'), "a time is not above 0"),
        (artifacts.dumps(roofline()).replace('"tmean_ns": 12000.0', '"tmean_ns": "fast"'), "expected a roofline"),
    ],
)
def test_f71_a_commit_that_cannot_be_read_is_named_and_skipped(repo: Repo, text: str, says: str) -> None:
    """A broken artifact of the past neither ends the view nor enters it."""
    measured(repo, 12_000, "1")
    broken = repo.commit({f"{FOLDER}/roofline.json": text})
    measured(repo, 11_000, "3")
    ((found,), problems) = series(repo)
    assert [point.figures.p50_ns for point in found.points] == [12_000, 11_000]
    (problem,) = problems
    assert problem.startswith(f"{broken[:12]}:roofline.json: ")
    assert says in problem
    assert f"- {problem}" in render([found], problems)


def test_f83_a_shallow_clone_says_that_more_lies_before(repo: Repo, tmp_path: Path) -> None:
    """History that was not fetched is not silently short."""
    measured(repo, 12_000, "1")
    measured(repo, 11_000, "2")
    clone = repo.clone(tmp_path / "clone", "--depth=1")
    (found,), problems = history.run(project(clone), "rms_norm", CELL)
    assert len(found.points) == 1
    assert problems == ["shallow: fetch more history (`git fetch --unshallow`) to see what lies before"]


def test_without_a_cell_the_cold_ones_are_shown_in_order(repo: Repo) -> None:
    """All shapes and dtypes of the primary regime, by the sizes of the shape."""
    times: dict[tuple[str, str, str], int | None] = {("rms_norm", f"{rows}x8", "float16"): 9000 for rows in (128, 8)}
    derived = roofline(times)
    derived["cells"] += roofline({CASE: 1000}, "warm")["cells"]
    text = {"roofline": artifacts.dumps(derived), "environment": artifacts.dumps(environment())}
    repo.commit({f"{FOLDER}/{name}.json": content for name, content in text.items()})
    found, _ = series(repo, None)
    assert [each.cell for each in found] == [("8x8", "float16", "cold_clean"), ("128x8", "float16", "cold_clean")]


def test_a_cell_or_a_history_that_is_not_there_is_one_sentence(repo: Repo) -> None:
    """The message holds what there is; without any measurement it is git's exit code 3."""
    repo.commit({"a": "1"})
    with pytest.raises(revisions.NoEarlierVersionError, match="roofline") as caught:
        series(repo)
    assert caught.value.exit_code == 3
    measured(repo, 12_000, "1")
    with pytest.raises(HistoryError, match="expected 8x8 int4 warm in the history, found 2048x4096 bfloat16 cold"):
        series(repo, ("8x8", "int4", "warm"))
    with pytest.raises(HistoryError, match="expected a shape, a dtype and a regime"):
        history.parse_cell("2048x4096 bfloat16")
    assert history.parse_cell(" 2048x4096  bfloat16 cold_clean") == CELL


def test_an_unknown_kernel_is_named_with_those_of_tree_and_history(repo: Repo) -> None:
    """A kernel that neither has gets the sentence of every command; one of the past is among the known."""
    measured(repo, 12_000, "1")
    derived = roofline({("gone", *CASE[1:]): 9_000})
    repo.commit({f"{FOLDER}/roofline.json": artifacts.dumps(derived)})
    (found,), _ = history.run(project(repo.root), "gone", CELL)
    assert len(found.points) == 1
    known = ", ".join([*project(repo.root).kernels, "gone"])
    with pytest.raises(HistoryError, match=rf"^kernel nope: expected one of {known}\.$"):
        history.run(project(repo.root), "nope")
    with pytest.raises(HistoryError, match=r"^swiglu: expected regime cold_clean in the history, found none\.$"):
        history.run(project(repo.root), "swiglu")


# The picture.

SHOWN = [
    Series(
        "rms_norm",
        CELL,
        (
            Point("2026-03-01", "a" * 40, Figures(12_000, 12_100.5, 1.1, None), ()),
            Point(
                "2026-03-02", "b" * 40, Figures(None, None, None, "invalid"), ("software.driver: base 1, current 2",)
            ),
            Point("2026-03-03", "c" * 40, Figures(11_000, 11_050.0, None, None), ()),
        ),
    )
]


def test_the_picture_has_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    """Hash seed, process and the reader's matplotlibrc change no byte of the SVG."""
    (tmp_path / "matplotlibrc").write_text("svg.fonttype: none\nfont.size: 30\naxes.facecolor: black\n")
    code = "import sys, test_history; from triton_kernel_lab.report.history import draw\n"
    code += "sys.stdout.write(draw(test_history.SHOWN))"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    env = {**os.environ, "PYTHONHASHSEED": "7", "MATPLOTLIBRC": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True)
    assert done.stdout.decode() == draw(SHOWN)


def test_the_picture_is_sound_xml_and_marks_the_change_of_the_machine() -> None:
    """A dashed line with the fact that changed."""
    text = draw(SHOWN)
    ElementTree.fromstring(text)
    assert "<!-- other driver -->" in text
    unmarked = [Series(*CASE[:1], CELL, tuple(Point(p.date, p.commit, p.figures, ()) for p in SHOWN[0].points))]
    assert draw(unmarked).count("stroke-dasharray") == text.count("stroke-dasharray") - 1


def test_a_missing_time_and_a_change_of_the_machine_break_the_line() -> None:
    """No line leads across what was not measured, or from one machine to another."""
    known, changed = Figures(1000, 1000.5, None, None), ("device.name: base a, current b",)

    def pieces(middle: Figures, facts: tuple[str, ...]) -> int:
        rows = ((known, ()), (known, ()), (middle, facts), (known, ()), (known, ()))
        points = tuple(Point("2026-03-01", "a" * 40, *row) for row in rows)
        found = ElementTree.fromstring(draw([Series("rms_norm", CELL, points)]))
        blue = (part.attrib for part in found.iter() if "fill: none; stroke: #0b3c8c" in part.attrib.get("style", ""))
        return next(part["d"].count("M") for part in blue)

    assert pieces(known, ()) == 1
    assert pieces(known, changed) == 2
    assert pieces(Figures(None, None, None, "invalid"), ()) == 2


def test_a_long_history_labels_some_of_its_commits() -> None:
    """A hundred points stay readable."""
    points = tuple(Point("2026-03-01", f"{at:040x}", Figures(1000 + at, 1000.5, None, None), ()) for at in range(100))
    text = draw([Series("rms_norm", CELL, points)])
    assert 10 <= text.count("2026-03-01") <= 12
