"""The commands of the pipeline's stages, and those that prepare or rehearse it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from triton_kernel_lab.console import device_project, interpreting_project, known, pin, progress, root, say
from triton_kernel_lab.project import ProjectError, find_project

__all__ = ["COMMANDS"]

# No stage depends on what is not always there, so whoever makes it asks for the tables.
_AGAIN = "run `dvc repro -f -s tables` to print it"

KernelArgument = Annotated[str, typer.Argument(help="A kernel of the registry, such as rms_norm.")]


def env() -> None:
    """Print the device and the software that would measure."""
    import json

    pin()
    import torch

    from triton_kernel_lab.lab.environment import probe

    device = torch.cuda.current_device() if torch.cuda.device_count() else None
    say(json.dumps(probe(device=device), indent=2))


def environment() -> None:
    """Stage: write environment.json, or refuse a machine that is not the runner."""
    project = interpreting_project()
    from triton_kernel_lab.lab import environment as stage

    stage.run(project)


def sources(kernel: KernelArgument) -> None:
    """Stage: list the files that each stage of one kernel consists of, for DVC to compare."""
    from triton_kernel_lab import source_lists

    source_lists.run(find_project(), known(kernel))


def ceilings() -> None:
    """Stage: measure ladders, floors and matmul rates."""
    project = device_project()
    from triton_kernel_lab.lab import ceilings as stage

    with progress("ceilings") as log:
        stage.run(project, log)


def correctness(kernel: KernelArgument) -> None:
    """Stage: check one kernel against its float64 oracle; exit 2 if it is wrong."""
    name, project = known(kernel), device_project()
    from triton_kernel_lab.lab import correctness as stage

    with progress("correctness") as log:
        stage.run(project, name, log)


def timing(kernel: KernelArgument) -> None:
    """Stage: time one kernel that passed its correctness stage."""
    name, project = known(kernel), device_project()
    from triton_kernel_lab.lab import timing as stage

    with progress("timing") as log:
        stage.run(project, name, log)


def counters(kernel: KernelArgument) -> None:
    """Stage: count one kernel's DRAM traffic with Nsight Compute, or say why that cannot be."""
    name, project = known(kernel), device_project()
    from triton_kernel_lab.lab import counters as stage

    with progress("counters") as log:
        stage.run(project, name, log)


def tune(kernel: KernelArgument) -> None:
    """Measure launch configurations on this GPU and write the kernel's launch table."""
    name, project = known(kernel), device_project()
    if project.runner == "cpu":
        raise ProjectError("tune: runner cpu has no launch configurations to measure; set `runner` to a GPU's name.")
    from triton_kernel_lab.lab import tune as stage

    say(f"wrote {stage.run(project, name, say)}")


def nsight(
    kernel: Annotated[str, typer.Option(help="Kernel to look into, by any of its names.")],
    shape: Annotated[str, typer.Option(help="Its shape, such as 128x1024.")],
    output: Annotated[
        Path,
        typer.Option(help="Where .json, .ncu-rep and .txt go, without a suffix; folders that are missing are made."),
    ],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Profile one cold call with Nsight Compute: its report, its details as text, its counts as JSON."""
    from triton_kernel_lab.cases._base import DTYPES, find

    case = find(kernel)
    dims = case.parse_dims(shape)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: expected one of {', '.join(DTYPES)}.")
    pin()
    from triton_kernel_lab.lab import nsight as profiler

    with progress("profiling") as log:
        made = profiler.run(case, dims, dtype, output, root(), log)
    if made["counter_status"] != "ok":
        say(f"{made['counter_status']}: {made['reason']}")
    say("wrote " + ", ".join(str(output.parent / name) for name in made["files"]))


def crosscheck() -> None:
    """Time every cell by our windows and by NVIDIA's NVBench, and set the two side by side."""
    project = device_project()
    from triton_kernel_lab import crosscheck as tool

    with progress("crosscheck") as log:
        written = tool.run(project, progress=log)
    say(f"wrote {written.relative_to(project.root)}; {_AGAIN}")


def noise(
    sessions: Annotated[int, typer.Option(help="Sessions to measure; each times every kernel anew.")] = 3,
    kernel: Annotated[list[str] | None, typer.Option(help="Only this kernel; repeat for several.")] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option("--from", help="A measured session's folder, in place of measuring; repeat for each."),
    ] = None,
) -> None:
    """Measure how much identical code differs between sessions, which calibrates the gate's margins."""
    from triton_kernel_lab import noise as tool

    if folders:
        project = find_project()
        written = tool.from_folders(project, folders)
    else:
        names, project = [known(name) for name in kernel or ()], device_project()
        with progress("noise") as log:
            written = tool.measure(project, sessions, names, log)
    say(f"wrote {written.relative_to(project.root)}; {_AGAIN}")


def roofline() -> None:
    """Stage: derive statistics, attainable times and speedups from raw samples."""
    from triton_kernel_lab.analysis import roofline as stage

    stage.run(find_project())


def figures() -> None:
    """Stage: draw the report's pictures."""
    from triton_kernel_lab.report.figures import stage

    stage.run(find_project())


def tables() -> None:
    """Stage: write results.md and metrics.json."""
    from triton_kernel_lab.report import tables as stage

    stage.run(find_project())


def site() -> None:
    """Stage: write the report as one page that opens offline, and summary.json."""
    from triton_kernel_lab.report.site import stage

    stage.run(find_project())


def readme() -> None:
    """Put results and pipeline between the markers of README.md and docs/METHODOLOGY.md."""
    from triton_kernel_lab.report import readme as stage

    stage.run(find_project())


def export(
    form: Annotated[str, typer.Option("--format", help="conbench, nvbench, csv or parquet.")],
    output: Annotated[Path, typer.Option(help="Where the file goes; folders that are missing are made.")],
) -> None:
    """Write the tracked results in another program's form; measures nothing."""
    from triton_kernel_lab.export import stage

    if form not in list(stage.Form):
        raise ValueError(f"--format: expected one of {', '.join(stage.Form)}, found {form!r}.")
    cells = stage.write(find_project(), stage.Form(form), output)
    say(f"wrote {output}: {cells} cells")


def codegen(
    kernel: Annotated[str | None, typer.Argument(help="A kernel of the registry; default: each of them.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 2 where tracked code differs.")] = False,
) -> None:
    """Stage: compile for every target without a GPU and read the binaries."""
    from triton_kernel_lab.codegen import stage
    from triton_kernel_lab.report import audit

    project = find_project()
    audits = stage.derive(project, [known(kernel)] if kernel else project.kernels)
    if check:
        from triton_kernel_lab.analysis import codegen_diff
        from triton_kernel_lab.report import codegen as report

        findings = codegen_diff.check(project, audits)
        say(report.render(list(audits), findings))
        raise typer.Exit(codegen_diff.exit_code(findings))
    say("\n".join(stage.write(project, audits)))
    audit.write(project, audits)


def new(
    kernel: Annotated[str, typer.Argument(help="The kernel's name, such as my_kernel.")],
    project: Annotated[Path | None, typer.Option(help="Make a new project of this folder, with the kernel.")] = None,
) -> None:
    """Write operator, launch table, case and test of a kernel, which work as written."""
    from triton_kernel_lab import scaffold

    written, following = scaffold.new(kernel, Path.cwd(), project)
    say("\n".join([*(f"wrote {path}" for path in written), f"next: {following}"]))


def rehearse() -> None:
    """Run the pipeline as runner cpu in a scratch copy, and re-derive the published report."""
    from triton_kernel_lab import rehearsal

    rehearsed, published = rehearsal.run(find_project())
    say(f"rehearsed report: {rehearsed}")
    say(f"published report: {published}")


COMMANDS: tuple[Callable[..., None], ...] = (
    env,
    environment,
    sources,
    ceilings,
    correctness,
    timing,
    counters,
    tune,
    nsight,
    crosscheck,
    noise,
    roofline,
    figures,
    tables,
    site,
    readme,
    export,
    codegen,
    new,
    rehearse,
)
"""In the order in which help lists them."""
