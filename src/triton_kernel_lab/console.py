"""What the commands share: where they print, which checkout they work on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from triton_kernel_lab import devices, registry
from triton_kernel_lab.project import Project, ProjectError, find_project

__all__ = ["device_project", "interpreting_project", "known", "pin", "progress", "root", "say"]


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


def pin() -> None:
    """Leave one GPU to this command and all that it starts, and say which; before anything starts CUDA."""
    if said := devices.pin():
        typer.echo(f"device: {said}", err=True)


def interpreting_project() -> Project:
    """The checkout; on runner ``cpu`` kernels run in Triton's interpreter, else on one GPU.

    Raises:
        ProjectError: a device is asked for on runner ``cpu``.
        DeviceError: the device asked for is not there.
    """
    project = find_project()
    if project.runner != "cpu":
        pin()
    elif asked := devices.asked():
        raise ProjectError(
            f"device {asked}: runner cpu works without one; leave out --device and {devices.VARIABLE}, "
            "or set `runner` in params.yaml to the GPU's name."
        )
    else:
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
    """The kernel's name, if it is one of the project's and some package provides it; ValueError if not."""
    project = find_project()
    names = project.kernels
    if kernel not in names:
        raise ValueError(f"kernel {kernel}: expected one of {', '.join(names)}.")
    if project.listed is not None and not registry.is_ours(kernel) and registry.provider(kernel) is None:
        raise ValueError(
            f"kernel {kernel}: expected an installed package with this name among its entry points "
            f"`{registry.GROUP}`, found none; `pip install -e .` installs the project's own."
        )
    return kernel
