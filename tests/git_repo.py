"""Real git repositories in a temporary folder, cut off from the user's own settings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no setting of the user or the machine decide a test."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")


class Repo:
    """A repository that a test fills commit by commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.root), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def commit(self, files: dict[str, str], message: str = "a change") -> str:
        """Commit these files on top of what is there; returns the commit."""
        for path, text in files.items():
            self.write(path, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", f"--message={message}")
        return self.git("rev-parse", "HEAD")

    def clone(self, root: Path, *options: str) -> Path:
        """A clone over the file protocol, which honours --depth."""
        self.git("clone", "--quiet", *options, self.root.as_uri(), str(root))
        return root
