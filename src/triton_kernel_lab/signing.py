"""Signing bytes with an SSH key, and telling who signed them: `ssh-keygen -Y`, and nothing of our own.

A leaf: this module imports nothing of the project. Each failure is one sentence.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["NAMESPACE", "SigningError", "sign", "signer"]

NAMESPACE = "triton-kernel-lab"
"""What a signature is for, part of what is signed: none made for another purpose passes as one of these."""


class SigningError(ValueError):
    """Nothing was signed, or a signature does not hold; one sentence says why."""


def sign(data: bytes, key: Path) -> str:
    """The detached signature of ``data`` by a private key, or by an agent's key whose public half is given.

    Raises:
        SigningError: there is no ssh-keygen, or it cannot sign with this key.
    """
    if not key.is_file():
        raise SigningError(f"{key}: expected an SSH key, found no file; `ssh-keygen -t ed25519` makes one.")
    done = _keygen("sign", "-f", os.fspath(key), data=data)
    if done.returncode:
        raise SigningError(f"{key}: cannot sign: {_said(done)}.")
    return done.stdout.decode("ascii")


def signer(data: bytes, signature: Path, allowed: Path) -> str:
    """Who of the signers in ``allowed`` made a signature of ``data``.

    Args:
        data: what was signed.
        signature: the file of the detached signature.
        allowed: a file of the form that ssh-keygen calls allowed signers.

    Raises:
        SigningError: there is no ssh-keygen or no such file, nobody in it made the
            signature, or it is of other data.
    """
    if not allowed.is_file():
        raise SigningError(f"{allowed}: expected a file of allowed signers, found none; name one.")
    files = ("-s", os.fspath(signature), "-f", os.fspath(allowed))
    found = _keygen("find-principals", *files)
    names = found.stdout.decode("utf-8", "replace").replace(",", "\n").split("\n")
    if found.returncode or not names[0]:
        raise SigningError(f"{signature}: expected the signature of somebody in {allowed}, found an unknown signer.")
    if _keygen("verify", *files, "-I", names[0], data=data).returncode:
        raise SigningError(f"{signature}: expected a signature by {names[0]} of this statement, found one of another.")
    return names[0]


def _keygen(action: str, *arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    namespace = () if action == "find-principals" else ("-n", NAMESPACE)
    with tempfile.TemporaryFile() as stream:
        # A file and not a pipe: the passphrase of a key is then asked for on the terminal.
        stream.write(data)
        stream.seek(0)
        command = ["ssh-keygen", "-Y", action, *namespace, *arguments]
        try:
            return subprocess.run(command, stdin=stream, capture_output=True, check=False)
        except (FileNotFoundError, PermissionError) as error:
            raise SigningError("ssh-keygen: expected the program on PATH, found none; install OpenSSH.") from error


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removesuffix(".") if lines else f"exit status {done.returncode}"
