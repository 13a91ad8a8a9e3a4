"""Signed results: what a signature holds together, and each way in which it does not hold."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from git_repo import isolate

from triton_kernel_lab import artifacts, cli, signing
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.project import Project, find_project
from triton_kernel_lab.report import statement
from triton_kernel_lab.signing import SigningError

needs_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this host")
TIMING = "artifacts/synthetic-gpu/timing/rms_norm.json"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)
    # An agent of the user's must not answer for the keys of a test.
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "tree"
    return synthetic.project(root, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20).root


@pytest.fixture
def project(sound: Path, tmp_path: Path) -> Project:
    return find_project(Path(shutil.copytree(sound, tmp_path / "tree")))


def key(folder: Path, name: str = "key") -> Path:
    made = folder / name
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(made)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return made


def allowed(*keys: Path) -> Path:
    """A file in which each key belongs to somebody of the same name."""
    lines = [f"{each.name}@example.org {each.with_suffix('.pub').read_text()}" for each in keys]
    where = keys[0].with_name("allowed_signers")
    where.write_text("".join(lines), encoding="utf-8")
    return where


def command(monkeypatch: pytest.MonkeyPatch, project: Project, line: str) -> int:
    monkeypatch.chdir(project.root)
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *shlex.split(line)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_a_statement_names_every_published_file(project: Project) -> None:
    """Each artifact, audit and report has its digest in it, and so has the README's block of results."""
    artifacts.write_text(project.audits / "rms_norm.json", "{}\n")
    artifacts.write_text(project.root / "reports/codegen/rms_norm.md", "text\n")
    made = statement.build(project)
    artifacts.validate(made, "statement", "statement")
    folders = (project.root / "artifacts", project.root / "reports")
    files = {path.relative_to(project.root).as_posix() for folder in folders for path in folder.rglob("*.*")}
    digests = {subject["name"]: subject["digest"]["sha256"] for subject in made["subject"]}
    assert set(digests) == files | {"README.md#results"}
    assert digests[TIMING] == artifacts.sha256_file(project.root / TIMING)
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    environment = artifacts.sha256_file(project.artifacts / "environment.json")
    assert made["predicate"]["environment_sha256"] == environment


@needs_keygen
def test_signed_results_verify_and_name_the_signer(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify --sign` writes statement and signature, `verify --signed` finds both and who made them."""
    alice = key(tmp_path, "alice")
    assert command(monkeypatch, project, f"verify --sign {shlex.quote(str(alice))}") == 0
    assert "wrote artifacts/synthetic-gpu/statement.json" in capsys.readouterr().out
    line = f"verify --signed --allowed-signers {shlex.quote(str(allowed(alice)))}"
    assert command(monkeypatch, project, line) == 0
    assert "signed: by alice@example.org\nsound: " in capsys.readouterr().out
    # What lies there now is no reason for a verification without a signature to complain.
    assert verify.run(project) == []


@needs_keygen
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / TIMING).unlink(), f"{TIMING}: expected the file that was signed, found none."),
        (
            lambda root: (root / "reports/synthetic-gpu/results.md").write_text("better\n"),
            "reports/synthetic-gpu/results.md: expected sha256 ",
        ),
        (
            lambda root: (root / "reports/synthetic-gpu/more.md").write_text("more\n"),
            "reports/synthetic-gpu/more.md: expected it among the signed files, found that it is not.",
        ),
        (
            lambda root: (root / "README.md").write_text(
                (root / "README.md").read_text().replace("| rms_norm", "| RMS_NORM", 1).replace("rms_norm", "x", 1)
            ),
            "README.md#results: expected sha256 ",
        ),
    ],
    ids=["missing", "changed", "surplus", "readme"],
)
def test_a_file_that_is_not_as_it_was_signed_is_named(
    project: Project, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    """The statement still is what was signed, and the tree is not what the statement says."""
    alice = key(tmp_path, "alice")
    statement.sign(project, alice)
    assert statement.differences(project) == []
    spoil(project.root)
    assert statement.signed_by(project, allowed(alice)) == "alice@example.org"
    (sentence,) = statement.differences(project)
    assert sentence.startswith(said)


@needs_keygen
def test_an_edited_statement_is_not_the_one_that_was_signed(project: Project, tmp_path: Path) -> None:
    """Whoever edits a file and its digest in the statement lacks the signature of that."""
    alice = key(tmp_path, "alice")
    where, _ = statement.sign(project, alice)
    found = json.loads(where.read_text())
    found["subject"][0]["digest"]["sha256"] = "0" * 64
    artifacts.write(where, found)
    with pytest.raises(SigningError, match=r"expected a signature by alice@example\.org of this statement, found one"):
        statement.signed_by(project, allowed(alice))


@needs_keygen
def test_an_unknown_signer_is_refused(project: Project, tmp_path: Path) -> None:
    """A sound signature by somebody who is not allowed to is none."""
    alice, mallory = key(tmp_path, "alice"), key(tmp_path, "mallory")
    statement.sign(project, mallory)
    with pytest.raises(SigningError, match=r"expected the signature of somebody in .*, found an unknown signer\.$"):
        statement.signed_by(project, allowed(alice))


@needs_keygen
def test_a_signature_for_another_purpose_is_refused(project: Project, tmp_path: Path) -> None:
    """The namespace is signed along, so that a signature of a commit or a file says nothing here."""
    alice = key(tmp_path, "alice")
    where, signature = statement.sign(project, alice)
    signature.unlink()
    subprocess.run(["ssh-keygen", "-Y", "sign", "-n", "file", "-f", alice, where], check=True, capture_output=True)
    with pytest.raises(SigningError, match="found one of another"):
        statement.signed_by(project, allowed(alice))


@needs_keygen
def test_broken_results_are_not_signed(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signature is made of what verifies, and of nothing else."""
    (project.reports / "results.md").write_text("better\n")
    assert command(monkeypatch, project, f"verify --sign {shlex.quote(str(key(tmp_path)))}") == 1
    assert capsys.readouterr().err.startswith("broken: reports/")
    assert not statement.path(project).exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verify --sign nothing", "nothing: expected an SSH key, found no file"),
        ("verify --signed", "--signed and --allowed-signers FILE belong together"),
        ("verify --allowed-signers x", "--signed and --allowed-signers FILE belong together"),
        ("verify --signed --allowed-signers x", "statement.json: expected it, found none"),
    ],
)
def test_what_is_missing_is_one_sentence_and_one(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    """No key, half of the options, no statement: each is told."""
    assert command(monkeypatch, project, line) == 1
    *_, sentence = capsys.readouterr().err.splitlines()
    assert said in sentence


@needs_keygen
def test_a_file_that_is_no_key_and_one_that_is_no_list_are_told(project: Project, tmp_path: Path) -> None:
    """What ssh-keygen says of a bad key is passed on in one sentence."""
    bad = tmp_path / "bad"
    bad.write_text("no key\n")
    bad.chmod(0o600)
    with pytest.raises(SigningError, match=r"bad: cannot sign: .*\.$") as caught:
        statement.sign(project, bad)
    assert "\n" not in str(caught.value)
    assert not statement.path(project).exists()
    statement.sign(project, key(tmp_path))
    with pytest.raises(SigningError, match=r"nowhere: expected a file of allowed signers, found none"):
        statement.signed_by(project, tmp_path / "nowhere")


def test_without_ssh_keygen_the_sentence_says_what_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without OpenSSH cannot sign and cannot check, and everything else works."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "key").write_text("")
    asked: list[Callable[[], object]] = [
        lambda: signing.sign(b"x", tmp_path / "key"),
        lambda: signing.signer(b"x", tmp_path / "sig", tmp_path / "key"),
    ]
    for ask in asked:
        with pytest.raises(SigningError, match=r"^ssh-keygen: expected the program on PATH, found none; install"):
            ask()


def test_the_statement_of_a_missing_signature_is_told(project: Project) -> None:
    """A statement alone is a list of digests that anybody can write."""
    artifacts.write(statement.path(project), statement.build(project))
    with pytest.raises(SigningError, match=r"statement\.json\.sig: expected it, found none"):
        statement.signed_by(project, project.root)
