"""The commands of the pipeline's stages, and those that prepare or rehearse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from triton_kernel_lab.console import device_project, interpreting_project, known, progress, say
from triton_kernel_lab.project import ProjectError, find_project

__all__ = ["COMMANDS"]

KernelArgument = Annotated[str, typer.Argument(help="A kernel of the registry, such as rms_norm.")]


def env() -> None:
    """Print the device and the software that would measure."""
    import json

    import torch

    from triton_kernel_lab.lab.environment import probe

    device = torch.cuda.current_device() if torch.cuda.device_count() else None
    say(json.dumps(probe(device=device), indent=2))


def environment() -> None:
    """Stage: write environment.json, or refuse a machine that is not the runner."""
    project = interpreting_project()
    from triton_kernel_lab.lab import environment as stage

    stage.run(project)


def ceilings() -> None:
    """Stage: measure ladders, floors and matmul rates."""
    project = device_project()
    from triton_kernel_lab.lab import ceilings as stage

    with progress("ceilings") as log:
        stage.run(project, log)


def correctness(kernel: KernelArgument) -> None:
    """Stage: check one kernel against its float64 oracle; exit 2 if it is wrong."""
    project = device_project()
    from triton_kernel_lab.lab import correctness as stage

    with progress("correctness") as log:
        stage.run(project, known(kernel), log)


def timing(kernel: KernelArgument) -> None:
    """Stage: time one kernel that passed its correctness stage."""
    project = device_project()
    from triton_kernel_lab.lab import timing as stage

    with progress("timing") as log:
        stage.run(project, known(kernel), log)


def tune(kernel: KernelArgument) -> None:
    """Measure launch configurations on this GPU and write the kernel's launch table."""
    project = device_project()
    if project.runner == "cpu":
        raise ProjectError("tune: runner cpu has no launch configurations to measure; set `runner` to a GPU's name.")
    from triton_kernel_lab.lab import tune as stage

    say(f"wrote {stage.run(project, known(kernel), say)}")


def roofline() -> None:
    """Stage: derive statistics, attainable times and speedups from raw samples."""
    from triton_kernel_lab.analysis import roofline as stage

    stage.run(find_project())


def figures() -> None:
    """Stage: draw the latency figure."""
    from triton_kernel_lab.report import figures as stage

    stage.run(find_project())


def tables() -> None:
    """Stage: write results.md and metrics.json."""
    from triton_kernel_lab.report import tables as stage

    stage.run(find_project())


def readme() -> None:
    """Put the result tables between the README's markers."""
    from triton_kernel_lab.report import readme as stage

    stage.run(find_project())


def codegen(
    kernel: Annotated[str | None, typer.Argument(help="A kernel of the registry; default: each of them.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 2 where tracked code differs.")] = False,
) -> None:
    """Stage: compile for every target without a GPU and read the binaries."""
    from triton_kernel_lab.codegen import stage
    from triton_kernel_lab.project import kernel_names

    project = find_project()
    audits = stage.derive(project, [known(kernel)] if kernel else kernel_names())
    if check:
        from triton_kernel_lab.analysis import codegen_diff
        from triton_kernel_lab.report import codegen as report

        findings = codegen_diff.check(project, audits)
        say(report.render(list(audits), findings))
        raise typer.Exit(codegen_diff.exit_code(findings))
    say("\n".join(stage.write(project, audits)))


def rehearse() -> None:
    """Run the pipeline as runner cpu in a scratch copy, and re-derive the published report."""
    from triton_kernel_lab import rehearsal

    rehearsed, published = rehearsal.run(find_project())
    say(f"rehearsed report: {rehearsed}")
    say(f"published report: {published}")


COMMANDS: tuple[Callable[..., None], ...] = (
    env,
    environment,
    ceilings,
    correctness,
    timing,
    tune,
    roofline,
    figures,
    tables,
    readme,
    codegen,
    rehearse,
)
"""In the order in which help lists them."""
