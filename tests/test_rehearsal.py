"""What `make repro` does without a GPU: the pipeline in a scratch copy, the published report derived again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import synthetic
from git_repo import Repo, isolate

from triton_kernel_lab import rehearsal
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.rehearsal import RehearsalError

PARAMS = (Path(__file__).parents[1] / "params.yaml").read_text(encoding="utf-8")

# One stage for a whole pipeline: it notes each run beside the tree, and fails when it is told to.
STAGE = """
import pathlib, sys
runner, message = sys.argv[1], pathlib.Path("message.txt").read_text()
with open("../runs.log", "a") as log:
    log.write(runner + "\\n")
if message.startswith("fail"):
    sys.exit("stage: told to fail")
report = pathlib.Path("reports", runner, "results.md")
report.parent.mkdir(parents=True, exist_ok=True)
report.write_text(message)
"""
PIPELINE = """
stages:
  tables:
    cmd: python stage.py ${runner}
    deps:
      - message.txt
      - stage.py
    outs:
      - reports/${runner}/results.md:
          cache: false
          persist: true
"""


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    """A clean checkout with one trivial stage."""
    isolate(monkeypatch)
    found = Repo(tmp_path / "tree")
    found.commit(
        {
            ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n",
            ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
            ".dvcignore": ".rehearsal\n",
            ".gitignore": "/.rehearsal/\n/runs.log\n/secret.txt\n",
            "dvc.yaml": PIPELINE,
            "message.txt": "first\n",
            "params.yaml": PARAMS,
            "stage.py": STAGE,
        }
    )
    return found


@pytest.fixture
def no_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_dvc_repro", lambda copy: None)


def runs(repo: Repo) -> list[str]:
    return (repo.root / "runs.log").read_text(encoding="utf-8").splitlines()


def test_second_rehearsal_skips_what_has_not_changed(repo: Repo) -> None:
    """A stage runs as runner cpu once, is skipped next time and runs again after an edit; the tree stays clean."""
    project = find_project(repo.root)
    rehearsed, published = rehearsal.run(project)
    rehearsal.run(project)
    assert runs(repo) == ["cpu"]
    assert rehearsed == repo.root / ".rehearsal/reports/cpu/results.md"
    assert rehearsed.read_text(encoding="utf-8") == "first\n"
    assert published == repo.root / "reports/nvidia-h200/results.md"
    assert repo.git("status", "--porcelain") == ""
    repo.write("message.txt", "second\n")
    rehearsal.run(project)
    assert runs(repo) == ["cpu", "cpu"]
    assert rehearsed.read_text(encoding="utf-8") == "second\n"


def test_failing_stage_fails_the_rehearsal(repo: Repo, capfd: pytest.CaptureFixture[str]) -> None:
    """A stage that fails ends the rehearsal with one sentence, and leaves the tree as it was."""
    repo.commit({"message.txt": "fail\n"})
    with pytest.raises(RehearsalError, match=r"`dvc repro` ended with 255; what it printed above says why\.$"):
        rehearsal.run(find_project(repo.root))
    assert "told to fail" in capfd.readouterr().err
    assert repo.git("status", "--porcelain") == ""


def test_missing_dvc_is_one_sentence(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DVC the rehearsal says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RehearsalError, match=r"expected DVC, found none; run `make repro`"):
        rehearsal.run(find_project(repo.root))


@pytest.mark.usefixtures("no_dvc")
def test_copy_holds_tracked_and_untracked_files_but_no_ignored_ones(repo: Repo) -> None:
    """The copy is the tree as git sees it: edits and new files included, ignored and deleted files not."""
    repo.write("new.txt", "new\n")
    repo.write("secret.txt", "secret\n")
    (repo.root / "stage.py").write_text("edited\n", encoding="utf-8")
    (repo.root / "message.txt").unlink()
    rehearsal.run(find_project(repo.root))
    copy = repo.root / ".rehearsal"
    assert (copy / "stage.py").read_text(encoding="utf-8") == "edited\n"
    assert (copy / "new.txt").is_file()
    assert not (copy / "message.txt").exists()
    assert not (copy / "secret.txt").exists()


@pytest.mark.usefixtures("no_dvc")
def test_sync_touches_only_what_differs(repo: Repo) -> None:
    """A second rehearsal rewrites the file that changed, drops the one that went, and lets the others lie."""
    project, copy = find_project(repo.root), repo.root / ".rehearsal"
    repo.write("gone.txt", "soon\n")
    rehearsal.run(project)
    stamp = (copy / "stage.py").stat().st_mtime_ns
    repo.write("message.txt", "second\n")
    (repo.root / "gone.txt").unlink()
    rehearsal.run(project)
    assert (copy / "message.txt").read_text(encoding="utf-8") == "second\n"
    assert (copy / "stage.py").stat().st_mtime_ns == stamp
    assert not (copy / "gone.txt").exists()


@pytest.mark.usefixtures("no_dvc")
def test_copy_keeps_its_own_lock_and_results(repo: Repo) -> None:
    """The tree's dvc.lock and cpu results never replace the copy's, which its DVC compares with."""
    results = ("artifacts/cpu/environment.json", "artifacts/codegen/swiglu.json", "reports/cpu/results.md")
    own = ("dvc.lock", ".dvc/tmp/lock", *results)
    for name in own:
        repo.write(f".rehearsal/{name}", "the copy's\n")
        if not name.startswith(".dvc"):
            repo.write(name, "the tree's\n")
    rehearsal.run(find_project(repo.root))
    assert {(repo.root / ".rehearsal" / name).read_text(encoding="utf-8") for name in own} == {"the copy's\n"}


@pytest.mark.usefixtures("no_dvc")
def test_only_the_runner_differs_in_the_copy(repo: Repo) -> None:
    """params.yaml of the copy says runner cpu and is otherwise the tree's."""
    rehearsal.run(find_project(repo.root))
    copied = (repo.root / ".rehearsal/params.yaml").read_text(encoding="utf-8")
    assert re.sub("^runner: .*$", "runner: cpu", PARAMS, flags=re.MULTILINE) == copied
    assert find_project(repo.root / ".rehearsal").runner == "cpu"


@pytest.mark.usefixtures("no_dvc")
def test_f83_source_archive_without_git_is_copied_too(repo: Repo) -> None:
    """Without git the tree is walked, and environments and caches stay out."""
    shutil.rmtree(repo.root / ".git")
    for name in (".venv/lib/x.py", ".nox/unit/x.py", "src/__pycache__/x.pyc", "src/x.py", ".dvc/tmp/lock"):
        repo.write(name, "")
    rehearsal.run(find_project(repo.root))
    copy = repo.root / ".rehearsal"
    found = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    expected = {".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "dvc.yaml", "message.txt", "params.yaml"}
    assert found == expected | {"stage.py", "src/x.py"}


@pytest.mark.usefixtures("no_dvc")
def test_no_published_timings_is_one_sentence(repo: Repo, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first measurement the rehearsal succeeds and says that nothing is published."""
    rehearsal.run(find_project(repo.root))
    assert "Runner nvidia-h200 has published no timings yet" in capsys.readouterr().out


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small measured project whose report is what its raw samples give."""
    shapes, dtypes = ("128x1024", "2048x4096"), ("float16",)
    root = tmp_path_factory.mktemp("measured") / "tree"
    return synthetic.project(root, shapes=shapes, dtypes=dtypes, processes=1, samples=20).root


@pytest.fixture
def published(measured: Path, tmp_path: Path, no_dvc: None) -> Project:
    """A copy of it that a test may spoil."""
    return find_project(shutil.copytree(measured, tmp_path / "published"))


def test_published_report_is_derived_again(published: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound report passes, and none of its files is touched."""
    before = {path: path.read_bytes() for path in published.reports.iterdir()}
    rehearsed, report = rehearsal.run(published)
    assert report == published.reports / "results.md"
    assert rehearsed == published.root / ".rehearsal/reports/cpu/results.md"
    assert {path: path.read_bytes() for path in published.reports.iterdir()} == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name",
    [
        "artifacts/synthetic-gpu/roofline.json",
        "reports/synthetic-gpu/results.md",
        "reports/synthetic-gpu/metrics.json",
    ],
)
def test_one_changed_digit_of_a_published_file_is_named(published: Project, name: str) -> None:
    """A derived file that differs in one digit from what the samples give fails the rehearsal."""
    path = published.root / name
    text = path.read_text(encoding="utf-8")
    at = max(match.start() for match in re.finditer(r"[1-8]", text))
    path.write_text(text[:at] + "9" + text[at + 1 :], encoding="utf-8")
    with pytest.raises(RehearsalError, match=f"^{name}: expected what the tracked raw samples give"):
        rehearsal.run(published)


def test_missing_published_file_is_named(published: Project) -> None:
    """A derived file that was never published fails the rehearsal."""
    (published.reports / "metrics.json").unlink()
    with pytest.raises(RehearsalError, match=r"metrics\.json: expected the file that the raw samples give, found none"):
        rehearsal.run(published)


def test_figure_is_compared_by_its_data(published: Project) -> None:
    """Another matplotlib's bytes pass as long as the data is the same; other data does not."""
    figure = published.reports / "latency.svg"
    text = figure.read_text(encoding="utf-8")
    figure.write_text(text.replace("</svg>", "<!-- another version -->\n</svg>"), encoding="utf-8")
    rehearsal.run(published)
    figure.write_text(re.sub("data-sha256: [0-9a-f]{64}", "data-sha256: " + "0" * 64, text), encoding="utf-8")
    with pytest.raises(RehearsalError, match=r"latency\.svg: expected what the tracked raw samples give"):
        rehearsal.run(published)
