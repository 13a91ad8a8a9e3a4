"""What the commands share: where they print, which checkout they work on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from triton_kernel_lab.project import Project, ProjectError, find_project, kernel_names

__all__ = ["device_project", "interpreting_project", "known", "progress", "root", "say"]


def say(text: str) -> None:
    """Print a line for whoever called."""
    typer.echo(text)


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; under CI and in pipes nothing moves."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield lambda line: None
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda line: status.update(f"{title}: {line}")


def root() -> Path:
    """The checkout's root, or the working directory of an installed package outside one."""
    with contextlib.suppress(ProjectError):
        return find_project().root
    return Path.cwd()


def interpreting_project() -> Project:
    """The checkout; on runner ``cpu`` kernels run in Triton's interpreter."""
    project = find_project()
    if project.runner == "cpu":
        # Read when Triton is first imported, which only happens after this.
        os.environ["TRITON_INTERPRET"] = "1"
    return project


def device_project() -> Project:
    """The checkout of a stage that works on a device, which runner ``cpu`` does without.

    Raises:
        ProjectError: the runner is a GPU and there is no CUDA device.
    """
    project = interpreting_project()
    if project.runner != "cpu":
        import torch

        if torch.cuda.device_count() == 0:
            raise ProjectError(
                f"runner {project.runner} needs its GPU, found no CUDA device; `make repro` rehearses without one."
            )
    return project


def known(kernel: str) -> str:
    """The kernel's name, if the registry has it; ValueError if not."""
    names = kernel_names()
    if kernel not in names:
        raise ValueError(f"kernel {kernel}: expected one of {', '.join(names)}.")
    return kernel
