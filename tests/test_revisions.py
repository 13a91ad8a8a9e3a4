"""What git knows of a checkout, in each odd state that a clone can be in."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from git_repo import Repo, isolate

from triton_kernel_lab import revisions

PATH = "artifacts/nvidia-h200/roofline.json"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


def history(repo: Repo) -> list[str]:
    """Three commits: artifacts made, code changed, artifacts made again."""
    return [
        repo.commit({PATH: "1", "src/a.py": "1"}),
        repo.commit({"src/a.py": "2"}),
        repo.commit({PATH: "2"}),
    ]


def one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and ". " not in message


def test_the_head_commit_is_that_of_git(repo: Repo) -> None:
    """head_commit gives the 40 digits that git gives."""
    commit = repo.commit({"a": "1"})
    assert revisions.head_commit(repo.root) == commit
    assert len(commit) == 40


def test_f83_a_detached_head_is_a_commit_like_any_other(repo: Repo) -> None:
    """On a detached HEAD the commit, the flag and the earlier version are found."""
    first, _, last = history(repo)
    repo.git("checkout", "--quiet", "--detach")
    assert revisions.producer_git(repo.root) == {"git_commit": last, "git_tree_dirty": False}
    assert revisions.previous_change(repo.root, PATH) == first


def test_the_earlier_version_is_the_one_before_the_last_change(repo: Repo) -> None:
    """With a clean tree the base is the change before the last, however many commits lie between."""
    first, _, _ = history(repo)
    repo.commit({"README.md": "later"})
    assert revisions.previous_change(repo.root, PATH) == first
    assert revisions.read_file(repo.root, first, PATH) == b"1"


@pytest.mark.parametrize("name", [PATH, "artifacts/nvidia-h200"])
def test_an_uncommitted_version_is_compared_with_the_last_committed_one(repo: Repo, name: str) -> None:
    """When the tree holds a new version that is not committed, the base is the last change."""
    *_, last = history(repo)
    repo.write(PATH, "3")
    assert revisions.previous_change(repo.root, name) == last


def test_f83_a_first_version_that_is_not_committed_has_none_before_it(repo: Repo) -> None:
    """Untracked artifacts in a history without any have nothing to be compared with."""
    repo.commit({"src/a.py": "1"})
    repo.write(PATH, "1")
    with pytest.raises(revisions.NoEarlierVersionError, match=PATH):
        revisions.previous_change(repo.root, PATH)


def test_f83_a_root_commit_has_no_earlier_version(repo: Repo) -> None:
    """The first commit of a repository has nothing to be compared with, and the message says so."""
    repo.commit({PATH: "1"})
    with pytest.raises(revisions.NoEarlierVersionError, match="no") as caught:
        revisions.previous_change(repo.root, PATH)
    assert one_sentence(str(caught.value))


@pytest.fixture
def merged(repo: Repo) -> tuple[Repo, dict[str, str]]:
    """Artifacts remade twice on a side branch, while the main line changed code; then merged."""
    commits = {"base": repo.commit({PATH: "1", "src/a.py": "1"})}
    repo.git("checkout", "--quiet", "-b", "side")
    commits["side 1"] = repo.commit({PATH: "2"})
    commits["side 2"] = repo.commit({PATH: "3"})
    repo.git("checkout", "--quiet", "main")
    commits["main"] = repo.commit({"src/a.py": "2"})
    repo.git("merge", "--quiet", "--no-ff", "--message=merge", "side")
    commits["merge"] = repo.git("rev-parse", "HEAD")
    return repo, commits


def test_f83_a_merge_commit_is_one_change_on_the_first_parent_line(merged: tuple[Repo, dict[str, str]]) -> None:
    """The steps of a merged branch are no bases: what the main line held before the merge is."""
    repo, commits = merged
    assert revisions.previous_change(repo.root, PATH) == commits["base"]
    repo.write(PATH, "4")
    assert revisions.previous_change(repo.root, PATH) == commits["merge"]


def test_f83_a_merge_that_keeps_the_main_lines_artifacts_is_no_change(repo: Repo) -> None:
    """A merge that brings no other artifacts to the main line does not count."""
    first = repo.commit({PATH: "1"})
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit({PATH: "side"})
    repo.git("checkout", "--quiet", "main")
    repo.commit({PATH: "2"})
    repo.git("merge", "--quiet", "--no-ff", "--strategy=ours", "--message=merge", "side")
    assert revisions.previous_change(repo.root, PATH) == first


def test_f83_a_depth_1_clone_says_shallow(repo: Repo, tmp_path: Path) -> None:
    """A clone without the history that is asked for says how to fetch it."""
    first, *_ = history(repo)
    clone = repo.clone(tmp_path / "clone", "--depth=1")
    asked: list[Callable[[], object]] = [
        lambda: revisions.previous_change(clone, PATH),
        lambda: revisions.resolve(clone, "HEAD~1"),
        lambda: revisions.read_file(clone, first, PATH),
    ]
    for ask in asked:
        with pytest.raises(revisions.ShallowCloneError, match=r"^shallow: fetch more history") as caught:
            ask()
        assert one_sentence(str(caught.value))


def test_f83_a_shallow_clone_that_holds_the_earlier_version_is_enough(repo: Repo, tmp_path: Path) -> None:
    """The oldest commit of a shallow clone stands for what lies behind it: it holds the same bytes."""
    history(repo)
    clone = repo.clone(tmp_path / "clone", "--depth=2")
    base = revisions.previous_change(clone, PATH)
    assert revisions.read_file(clone, base, PATH) == b"1"


@pytest.mark.parametrize("name", ["nothing", "0" * 40, "HEAD~9", "--all", "--default=HEAD", "", "main:src/a.py", "a b"])
def test_f83_an_unknown_revision_is_named(repo: Repo, name: str) -> None:
    """What names no commit is refused in one sentence that quotes it."""
    history(repo)
    with pytest.raises(revisions.UnknownRevisionError) as caught:
        revisions.resolve(repo.root, name)
    assert repr(name) in str(caught.value)
    assert one_sentence(str(caught.value).replace(str(repo.root), ""))
    assert caught.value.exit_code == 3


def test_a_file_that_a_revision_lacks_is_named(repo: Repo) -> None:
    """A file or folder that is no file of the commit is refused with its path."""
    history(repo)
    for path in ("artifacts/none.json", "artifacts"):
        with pytest.raises(revisions.FileNotInRevisionError, match=path):
            revisions.read_file(repo.root, "HEAD", path)


def test_a_file_of_a_revision_comes_byte_for_byte(repo: Repo) -> None:
    """No line ending, encoding or text filter touches what a revision holds."""
    data = b"\xef\xbb\xbf\r\n\x00\xff"
    (repo.root / "raw").write_bytes(data)
    repo.commit({".gitattributes": "raw text eol=crlf diff=x\n"})
    repo.git("config", "diff.x.textconv", "tr a-z A-Z")
    stored = repo.git("rev-parse", "HEAD:raw")
    raw = subprocess.run(["git", "-C", repo.root, "cat-file", "blob", stored], capture_output=True, check=True).stdout
    assert revisions.read_file(repo.root, "HEAD", "raw") == raw


def test_many_files_of_many_revisions_come_in_one_go(repo: Repo) -> None:
    """Each comes byte for byte in the order asked, an empty one too, and None stands for what is no file."""
    first, _, last = history(repo)
    (repo.root / "raw").write_bytes(b"\x00\n12 blob 3\n\xff")
    newest = repo.commit({"empty": "", "a name": "spaced"})
    wanted = [(last, PATH), (newest, "raw"), (first, "raw"), (first, PATH), (newest, "empty"), (newest, "src")]
    wanted += [("0" * 40, PATH), (newest, "a name"), (newest, "no such name")]
    found = revisions.read_files(repo.root, wanted)
    assert found == [b"2", b"\x00\n12 blob 3\n\xff", None, b"1", b"", None, None, b"spaced", None]
    assert revisions.read_files(repo.root, []) == []


def test_the_files_below_a_folder_are_those_of_the_revision(repo: Repo) -> None:
    """What lies in the tree does not count, and a folder that is not there is empty."""
    repo.commit({PATH: "1", "artifacts/nvidia-h200/timing/b.json": "1", "artifacts/nvidia-h200/timing/a.json": "1"})
    repo.write("artifacts/nvidia-h200/timing/c.json", "1")
    folder = "artifacts/nvidia-h200/timing"
    assert revisions.list_files(repo.root, "HEAD", folder) == [f"{folder}/a.json", f"{folder}/b.json"]
    assert revisions.list_files(repo.root, "HEAD", "nothing") == []
    with pytest.raises(revisions.UnknownRevisionError):
        revisions.list_files(repo.root, "nothing", folder)


def test_changes_are_those_of_the_first_parents_oldest_first(merged: tuple[Repo, dict[str, str]]) -> None:
    """The commits of a merged branch are no changes of their own; the merge is."""
    repo, commits = merged
    found = revisions.changes(repo.root, PATH)
    assert [commit for commit, _ in found] == [commits["base"], commits["merge"]]
    assert all(str(seconds) == repo.git("log", "-1", "--format=%ct", commit) for commit, seconds in found)
    assert revisions.changes(repo.root, "nothing") == []


def test_an_exported_folder_is_that_of_the_revision_and_leaves_no_trace(repo: Repo, tmp_path: Path) -> None:
    """Every file below the folder comes byte for byte, and the repository stays as it was."""
    commit = repo.commit({"src/a.py": "1", "src/deep/b.json": "{}\r\n", "other": "1", ".gitattributes": "* text\n"})
    repo.commit({"src/a.py": "2"})
    before = sorted(path for path in (repo.root / ".git").rglob("*"))
    assert revisions.export(repo.root, commit, "src", tmp_path / "out") == 2
    found = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")
    }
    stored = revisions.read_file(repo.root, commit, "src/deep/b.json")
    assert found == {"src/a.py": b"1", "src/deep/b.json": stored}
    assert sorted(path for path in (repo.root / ".git").rglob("*")) == before
    assert revisions.export(repo.root, commit, "nothing", tmp_path / "none") == 0


def test_an_ancestor_is_told_from_what_lies_beside_or_behind(repo: Repo, tmp_path: Path) -> None:
    """A commit is its own ancestor; a later or a parallel one is none; a shallow clone cannot say no."""
    first, second, last = history(repo)
    repo.git("checkout", "--quiet", "-b", "side", first)
    beside = repo.commit({"b": "1"})
    assert revisions.is_ancestor(repo.root, first, last)
    assert revisions.is_ancestor(repo.root, last, last)
    assert not revisions.is_ancestor(repo.root, last, second)
    assert not revisions.is_ancestor(repo.root, beside, last)
    repo.git("checkout", "--quiet", "main")
    clone = repo.clone(tmp_path / "clone", "--depth=2")
    assert revisions.is_ancestor(clone, second, last)
    with pytest.raises(revisions.ShallowCloneError, match=r"^shallow: fetch more history"):
        revisions.is_ancestor(clone, last, second)


def test_first_parents_are_the_steps_of_the_main_line(merged: tuple[Repo, dict[str, str]]) -> None:
    """Between two commits only those that changed the path count, the oldest first; a merge is one."""
    repo, commits = merged
    assert revisions.first_parents(repo.root, commits["base"], "HEAD", PATH) == [commits["merge"]]
    assert revisions.first_parents(repo.root, commits["base"], "HEAD", "src") == [commits["main"]]
    assert revisions.first_parents(repo.root, "HEAD", "HEAD", PATH) == []
    assert revisions.subject(repo.root, commits["merge"]) == "merge"


def test_f83_a_changed_or_untracked_source_makes_the_tree_dirty(repo: Repo) -> None:
    """Tracked changes, staged changes, removals and new files count; ignored files do not."""
    repo.commit({"src/a.py": "1", ".gitignore": "*.log\n"})
    repo.write("build.log", "noise")
    assert not revisions.tree_dirty(repo.root)
    for spoil in (lambda: repo.write("src/a.py", "2"), lambda: repo.git("rm", "--quiet", "src/a.py")):
        spoil()
        assert revisions.tree_dirty(repo.root)
        repo.git("reset", "--quiet", "--hard")
        assert not revisions.tree_dirty(repo.root)
    repo.write("src/new.py", "1")
    assert revisions.producer_git(repo.root)["git_tree_dirty"] is True


def test_what_a_run_writes_does_not_make_the_tree_dirty(repo: Repo) -> None:
    """A stage sees its own outputs half rewritten; those say nothing of the code it measures."""
    written = [PATH, "reports/nvidia-h200/results.md", "dvc.lock", "README.md", "docs/METHODOLOGY.md"]
    repo.commit(dict.fromkeys([*written, "src/README.md"], "1"))
    for path in written:
        repo.write(path, "2")
    repo.write("artifacts/nvidia-h200/new.json", "{}")
    (repo.root / "dvc.lock").unlink()
    assert not revisions.tree_dirty(repo.root)
    repo.write("src/README.md", "2")
    assert revisions.tree_dirty(repo.root)


def test_hiding_untracked_files_in_the_settings_hides_no_dirt(repo: Repo) -> None:
    """status.showUntrackedFiles=no does not make a tree with a new source file clean."""
    repo.commit({"src/a.py": "1"})
    repo.git("config", "status.showUntrackedFiles", "no")
    repo.write("src/new.py", "1")
    assert revisions.tree_dirty(repo.root)


def test_f83_without_a_git_binary_the_fields_are_null(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No git on PATH gives nulls to an artifact and one sentence to whoever asks for history."""
    history(repo)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert revisions.producer_git(repo.root) == {"git_commit": None, "git_tree_dirty": None}
    with pytest.raises(revisions.GitMissingError, match="install git") as caught:
        revisions.previous_change(repo.root, PATH)
    assert one_sentence(str(caught.value))


def test_f83_a_source_tarball_has_null_fields(repo: Repo, tmp_path: Path) -> None:
    """A tree without .git gives nulls, and its error says to use a clone."""
    history(repo)
    tree = tmp_path / "tarball"
    shutil.copytree(repo.root, tree, ignore=shutil.ignore_patterns(".git"))
    assert revisions.producer_git(tree) == {"git_commit": None, "git_tree_dirty": None}
    with pytest.raises(revisions.NotARepositoryError, match="use a clone"):
        revisions.previous_change(tree, PATH)


def test_f83_a_tarball_inside_another_repository_is_not_part_of_it(repo: Repo) -> None:
    """The commit of the repository around a copied tree is not the copy's commit."""
    repo.commit({".gitignore": "copy/\n"})
    repo.write("copy/src/a.py", "1")
    assert revisions.producer_git(repo.root / "copy") == {"git_commit": None, "git_tree_dirty": None}


def test_f83_a_repository_of_somebody_else_names_the_way_out(repo: Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsafe ownership is an error with its command, not a null that would lose the commit unseen."""
    history(repo)
    # Git's own switch: every folder counts as another user's.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    for ask in (revisions.producer_git, revisions.head_commit, revisions.tree_dirty):
        with pytest.raises(
            revisions.UnsafeOwnershipError, match=r"git config --global --add safe\.directory"
        ) as caught:
            ask(repo.root)
        assert "\n" not in str(caught.value)


def test_f83_a_repository_without_a_commit_is_dirty_and_has_no_commit(repo: Repo) -> None:
    """Before the first commit there is no commit to name, and everything is uncommitted."""
    assert revisions.producer_git(repo.root) == {"git_commit": None, "git_tree_dirty": True}
    with pytest.raises(revisions.NoCommitError, match="git commit"):
        revisions.previous_change(repo.root, PATH)


def test_the_variables_of_a_git_hook_do_not_redirect_the_question(
    repo: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside another repository's hook the answer is still about the folder that was asked for."""
    commit = repo.commit({"a": "1"})
    other = Repo(tmp_path / "other")
    other.commit({"b": "2"}, "another")
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.root / ".git" / "index"))
    assert revisions.producer_git(repo.root) == {"git_commit": commit, "git_tree_dirty": False}


def test_asking_for_the_dirty_flag_writes_nothing(repo: Repo) -> None:
    """The index keeps its bytes, so that a stage may ask while git works beside it."""
    repo.commit({"src/a.py": "1"})
    # A time stamp other than the index holds, which git would gladly write down.
    os.utime(repo.root / "src/a.py", (1, 1))
    before = (repo.root / ".git/index").read_bytes()
    revisions.tree_dirty(repo.root)
    assert (repo.root / ".git/index").read_bytes() == before


def test_a_bare_repository_is_one_sentence(repo: Repo, tmp_path: Path) -> None:
    """A state that has no class of its own still ends in one sentence with what git said."""
    history(repo)
    bare = repo.clone(tmp_path / "bare.git", "--bare")
    with pytest.raises(revisions.RevisionError, match="must be run in a work tree") as caught:
        revisions.tree_dirty(bare)
    assert caught.value.exit_code == 3
