"""What git knows of a checkout: commits, the dirty flag, the files of a revision.

Plain git commands, and a leaf: this module imports nothing of the project. Each
state in which git cannot answer has its own error, whose message is one sentence
and names the way out.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

__all__ = [
    "FileNotInRevisionError",
    "GitMissingError",
    "NoCommitError",
    "NoEarlierVersionError",
    "NotARepositoryError",
    "RevisionError",
    "ShallowCloneError",
    "UnknownRevisionError",
    "UnsafeOwnershipError",
    "changes",
    "export",
    "first_parents",
    "head_commit",
    "is_ancestor",
    "is_shallow",
    "list_files",
    "previous_change",
    "producer_git",
    "read_file",
    "read_files",
    "resolve",
    "subject",
    "tree_dirty",
]

# What a run writes. Stages run while these are being rewritten, so they say nothing of the code that
# is measured: a run would call its own tree dirty as soon as its first stage had written.
_GENERATED = ("artifacts", "reports", "dvc.lock", "README.md", "docs/METHODOLOGY.md")

# A hook sets these for its own repository, which need not be the one that is asked about.
_FOREIGN = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")


class RevisionError(ValueError):
    """Git cannot answer; ``exit_code`` is what the command line ends with."""

    exit_code: ClassVar[int] = 3


class GitMissingError(RevisionError):
    """There is no git to ask."""


class NotARepositoryError(RevisionError):
    """The folder is no repository, as in a source tarball."""


class UnsafeOwnershipError(RevisionError):
    """Git refuses a repository that belongs to somebody else."""


class NoCommitError(RevisionError):
    """The repository has no commit yet."""


class ShallowCloneError(RevisionError):
    """The history that would answer was not fetched."""


class UnknownRevisionError(RevisionError):
    """No commit has this name."""


class NoEarlierVersionError(RevisionError):
    """The whole history holds no earlier version of a path."""


class FileNotInRevisionError(RevisionError):
    """The commit does not hold the file."""


def head_commit(root: Path) -> str:
    """The 40 hexadecimal digits of HEAD, on a branch or detached.

    Raises:
        NoCommitError: the repository has no commit yet.
        RevisionError: git cannot answer; see the classes of this module.
    """
    commit = _commit(root, "HEAD")
    if commit is None:
        raise NoCommitError(f"{root}: expected a commit at HEAD, found none; commit the tree first with `git commit`.")
    return commit


def resolve(root: Path, revision: str) -> str:
    """The 40 hexadecimal digits of the commit that ``revision`` names.

    Raises:
        UnknownRevisionError: no commit has that name.
        ShallowCloneError: none has, and part of the history is not here.
    """
    commit = _commit(root, revision)
    if commit is None and is_shallow(root):
        raise ShallowCloneError(f"shallow: fetch more history (`git fetch --unshallow`) to look for {revision!r}.")
    if commit is None:
        raise UnknownRevisionError(
            f"{root}: expected the name of a commit, found {revision!r}; see `git log`, or run `git fetch` first."
        )
    return commit


def tree_dirty(root: Path) -> bool:
    """Whether the code differs from HEAD: a tracked change, or a file neither tracked nor ignored.

    artifacts/, reports/, dvc.lock, README.md and docs/METHODOLOGY.md do not count,
    because a run itself writes them, and nothing measured depends on them.
    """
    outside = [f":(exclude){path}" for path in _GENERATED]
    return bool(_status(root, ".", *outside))


def previous_change(root: Path, path: str) -> str:
    """The commit that holds the version of ``path`` before the one in the tree.

    Follows first parents only, so a merge counts as one change, made when it landed.
    If ``path`` has uncommitted changes, this is the last commit that changed it, and
    otherwise the one before. In a shallow clone the oldest commit stands for the
    history behind it; it holds the same version of the file.

    Args:
        root: the top folder of the repository.
        path: a file or folder relative to it, with forward slashes.

    Raises:
        ShallowCloneError: the history that was fetched holds no earlier version.
        NoEarlierVersionError: the whole history holds none.
    """
    head_commit(root)
    found = _git(root, "rev-list", "--first-parent", "--max-count=2", "HEAD", "--", f":(literal){path}")
    commits = found.stdout.decode("ascii").split()
    skip = 0 if _status(root, f":(literal){path}") else 1
    if len(commits) > skip:
        return commits[skip]
    if is_shallow(root):
        raise ShallowCloneError(
            f"shallow: fetch more history (`git fetch --unshallow`) to find an earlier version of {path}."
        )
    raise NoEarlierVersionError(
        f"{path}: expected an earlier version in the history, found none; commit a second one, or name a base."
    )


def changes(root: Path, path: str) -> list[tuple[str, int]]:
    """Each commit on the line of first parents that changed ``path``, the oldest first.

    Returns:
        The commit's 40 digits and its committer's time, in seconds since 1970 UTC.
    """
    head_commit(root)
    found = _git(root, "rev-list", "--first-parent", "--reverse", "--timestamp", "HEAD", "--", f":(literal){path}")
    pairs = (line.split() for line in found.stdout.decode("ascii").splitlines())
    return [(commit, int(seconds)) for seconds, commit in pairs]


def list_files(root: Path, revision: str, folder: str) -> list[str]:
    """The files below ``folder`` in ``revision``, relative to ``root`` and sorted; empty without the folder."""
    found = _git(root, "ls-tree", "-r", "-z", "--name-only", resolve(root, revision), "--", f"{folder}/")
    return sorted(os.fsdecode(name) for name in found.stdout.split(b"\0") if name)


def read_file(root: Path, revision: str, path: str) -> bytes:
    """The bytes of ``path`` (relative, forward slashes) as ``revision`` holds it.

    Raises:
        FileNotInRevisionError: the commit holds no such file.
        UnknownRevisionError, ShallowCloneError: there is no such commit.
    """
    commit = resolve(root, revision)
    found = _git(root, "cat-file", "blob", f"{commit}:{path}", check=False)
    if found.returncode:
        raise FileNotInRevisionError(
            f"{path}: expected a file in commit {commit[:12]}, found none; name a commit that holds it."
        )
    return found.stdout


def read_files(root: Path, wanted: Sequence[tuple[str, str]]) -> list[bytes | None]:
    """The bytes of each (commit, path), in one process; None where the commit holds no such file."""
    names = "".join(f"{commit}:{path}\n" for commit, path in wanted)
    return list(_blobs(_git(root, "cat-file", "--batch", data=names.encode()).stdout))


def _blobs(output: bytes) -> Iterator[bytes | None]:
    """What ``git cat-file --batch`` printed: `<id> <type> <size>`, the bytes and a line end, or one line for none."""
    at = 0
    while at < len(output):
        head = output[at : output.index(b"\n", at)]
        at += len(head) + 1
        words = head.split()
        if len(words) != 3 or not words[2].isdigit():
            yield None
            continue
        size = int(words[2])
        yield output[at : at + size] if words[1] == b"blob" else None
        at += size + 1


def export(root: Path, revision: str, folder: str, target: Path) -> int:
    """Write what ``revision`` holds below ``folder`` to the same place below ``target``; returns how many files.

    Unlike a work tree of git's own this leaves no trace in the repository, runs no
    hook and applies no filter.
    """
    commit = resolve(root, revision)
    names = list_files(root, commit, folder)
    found = read_files(root, [(commit, name) for name in names])
    blobs = {name: data for name, data in zip(names, found, strict=True) if data is not None}
    for name, data in blobs.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
    return len(blobs)


def is_ancestor(root: Path, earlier: str, later: str) -> bool:
    """Whether commit ``earlier`` is ``later`` or lies behind it.

    Raises:
        ShallowCloneError: it is not, and part of the history is not here.
    """
    command = ("merge-base", "--is-ancestor", resolve(root, earlier), resolve(root, later))
    if _git(root, *command, check=False).returncode == 0:
        return True
    if is_shallow(root):
        raise ShallowCloneError(
            f"shallow: fetch more history (`git fetch --unshallow`) to see whether {earlier} lies behind {later}."
        )
    return False


def first_parents(root: Path, earlier: str, later: str, path: str) -> list[str]:
    """The commits after ``earlier`` up to ``later`` that changed ``path``, along first parents, the oldest first."""
    span = f"{resolve(root, earlier)}..{resolve(root, later)}"
    found = _git(root, "rev-list", "--first-parent", "--reverse", span, "--", f":(literal){path}")
    return found.stdout.decode("ascii").split()


def subject(root: Path, revision: str) -> str:
    """The first line of a commit's message."""
    found = _git(root, "log", "-1", "--no-show-signature", "--format=%s", resolve(root, revision))
    return found.stdout.decode("utf-8", "replace").strip()


def is_shallow(root: Path) -> bool:
    """Whether part of the history was not fetched."""
    return _git(root, "rev-parse", "--is-shallow-repository").stdout.strip() == b"true"


def producer_git(root: Path) -> dict[str, str | bool | None]:
    """What an artifact says of the commit that it was measured at.

    ``git_commit`` and ``git_tree_dirty`` are None without git or outside a repository,
    as in a source tarball. Ask before measuring: the code that runs is the code that
    was imported, whatever is edited meanwhile.

    Raises:
        UnsafeOwnershipError: git is there but refuses, which one command mends.
    """
    try:
        return {"git_commit": head_commit(root), "git_tree_dirty": tree_dirty(root)}
    except NoCommitError:
        return {"git_commit": None, "git_tree_dirty": True}
    except (GitMissingError, NotARepositoryError):
        return {"git_commit": None, "git_tree_dirty": None}


def _commit(root: Path, revision: str) -> str | None:
    found = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False)
    return None if found.returncode else found.stdout.decode("ascii").strip()


def _status(root: Path, *paths: str) -> bytes:
    return _git(root, "status", "--porcelain", "-z", "--untracked-files=normal", "--", *paths).stdout


def _environment(root: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    # The ceiling: a tarball unpacked inside some other repository is not part of it.
    # No optional locks: asking must not rewrite the index beside a running stage.
    ceiling = os.fspath(root.resolve().parent)
    return kept | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_CEILING_DIRECTORIES": ceiling}


def _git(root: Path, *arguments: str, check: bool = True, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", os.fspath(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=_environment(root), input=data)
    except (FileNotFoundError, PermissionError) as error:
        raise GitMissingError(
            "git: expected the program on PATH, found none; install git to compare revisions."
        ) from error
    if done.returncode:
        _explain(root, arguments, done, check)
    return done


def _explain(root: Path, arguments: tuple[str, ...], done: subprocess.CompletedProcess[bytes], check: bool) -> None:
    said = done.stderr.decode("utf-8", "replace")
    if "not a git repository" in said or "cannot change to" in said:
        raise NotARepositoryError(f"{root}: expected a git repository, found none; use a clone, not a source archive.")
    if "dubious ownership" in said or "unsafe repository" in said:
        raise UnsafeOwnershipError(
            f"{root}: belongs to another user, so git refuses it; "
            f"trust it with `git config --global --add safe.directory {root.resolve()}`."
        )
    if check:
        first = next(iter(said.splitlines()), f"exit status {done.returncode}")
        raise RevisionError(f"{root}: git {arguments[0]} failed: {first.removesuffix('.')}.")
