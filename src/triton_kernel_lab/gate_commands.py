"""The commands that judge: what is tracked, and what a commit made of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from triton_kernel_lab.console import pin, progress, say
from triton_kernel_lab.project import Project, find_project

__all__ = ["COMMANDS"]

ERROR, NOT_COMPARABLE = 1, 3

BaseOption = Annotated[str | None, typer.Option(help="Revision to compare with; default: the previous measurement.")]
KernelOption = Annotated[list[str] | None, typer.Option(help="With --confirm: kernel to time; repeat for several.")]
CellOption = Annotated[
    list[str] | None, typer.Option(help='With --confirm: a cell such as "2048x4096 bfloat16"; repeat for several.')
]


def verify(
    sign: Annotated[Path | None, typer.Option(help="SSH key to sign the results with once they are sound.")] = None,
    signed: Annotated[bool, typer.Option("--signed", help="Check who signed the results, too.")] = False,
    allowed_signers: Annotated[Path | None, typer.Option(help="With --signed: whose signatures count.")] = None,
) -> None:
    """Recompute everything derived and check the chain of digests; exit 1 on the first break."""
    from triton_kernel_lab import sources
    from triton_kernel_lab.analysis import verify as stage

    if signed != (allowed_signers is not None):
        raise ValueError("verify: --signed and --allowed-signers FILE belong together, expected both or neither.")
    project = find_project()
    broken = stage.run(project)
    # Told, not refused: the report that was just recomputed says the same to its readers.
    for line in sources.stale(project):
        typer.echo(f"stale: {line}", err=True)
    if allowed_signers and not broken:
        broken = _unsigned(project, allowed_signers)
    for line in broken:
        typer.echo(f"broken: {line}", err=True)
    if broken:
        raise typer.Exit(ERROR)
    say(f"sound: every artifact, digest, derived figure and table cell of runner {project.runner}")
    if sign:
        from triton_kernel_lab.report import statement

        for path in statement.sign(project, sign):
            say(f"wrote {path.relative_to(project.root)}")


def _unsigned(project: Project, allowed: Path) -> list[str]:
    """Each file that is not as it was signed; says who signed, if all are."""
    from triton_kernel_lab.report import statement

    who = statement.signed_by(project, allowed)
    differing = statement.differences(project)
    if not differing:
        say(f"signed: by {who}")
    return differing


def gate(
    base: BaseOption = None,
    rename: Annotated[list[str] | None, typer.Option(help="old=new of a renamed kernel; repeat for several.")] = None,
    regime: Annotated[list[str] | None, typer.Option(help="Regime to judge; repeat for several.")] = None,
    strict: Annotated[bool, typer.Option(help="End with 4 if a cell is ambiguous.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Where the JSON verdict goes; folders that are missing are made.")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Time both commits' kernels in turns on this GPU.")
    ] = False,
    kernel: KernelOption = None,
    cell: CellOption = None,
) -> None:
    """Compare the tracked raw samples with an earlier commit's; exit 2 if a kernel is slower or wrong."""
    from triton_kernel_lab import artifacts
    from triton_kernel_lab.analysis import verdicts
    from triton_kernel_lab.report import verdict as text

    if confirm:
        verdict = _confirm(base, rename or [], regime or [], kernel or [], cell or [])
    else:
        if kernel or cell:
            raise ValueError("gate: --kernel and --cell narrow what is timed, expected --confirm with them.")
        from triton_kernel_lab.analysis import gate as stage

        verdict = stage.run(find_project(), base, rename or [], regime or [])
    say(text.render(verdict))
    if output:
        artifacts.write(output, verdict)
    raise typer.Exit(verdicts.exit_code(verdict, strict))


def _confirm(
    base: str | None, rename: list[str], regime: list[str], kernel: list[str], cell: list[str]
) -> dict[str, object]:
    from triton_kernel_lab.analysis.pairing import parse_renames
    from triton_kernel_lab.lab import confirm as stage

    asked = stage.Request(base, kernel, stage.parse_cells(cell), regime, parse_renames(rename))
    pin()
    with progress("confirm") as log:
        return stage.run(find_project(), asked, progress=log)


def rebaseline(
    reason: Annotated[str, typer.Option(help="Why the change of machine or stack is intended.")],
    base: BaseOption = None,
) -> None:
    """Accept once that the tracked results cannot be compared with the base, and say why."""
    from triton_kernel_lab.analysis import gate as stage

    project = find_project()
    written = stage.rebaseline(project, reason, base).relative_to(project.root)
    say(f"wrote {written}; commit it with the artifacts that it accepts")


def history(
    kernel: Annotated[str, typer.Option(help="A kernel of past or present, such as rms_norm.")],
    cell: Annotated[str | None, typer.Option(help='A cell such as "2048x4096 bfloat16 cold_clean".')] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where a picture of it goes, as SVG; folders that are missing are made.")
    ] = None,
) -> None:
    """Print a kernel's times by commit, and where the machine or the stack changed."""
    from triton_kernel_lab import artifacts
    from triton_kernel_lab.analysis import history as past
    from triton_kernel_lab.report import history as text

    series, problems = past.run(find_project(), kernel, past.parse_cell(cell) if cell else None)
    say(text.render(series, problems))
    if plot:
        artifacts.write_text(plot, text.draw(series))
        say(f"wrote {plot}")


def bisect(
    kernel: Annotated[str, typer.Option(help="A kernel of the tree, such as rms_norm.")],
    good: Annotated[str, typer.Option(help="Revision at which it was fast and right.")],
    bad: Annotated[str, typer.Option(help="Revision at which it is slower or wrong.")],
    cell: Annotated[
        list[str] | None, typer.Option(help='A cell such as "2048x4096 bfloat16"; repeat for several.')
    ] = None,
) -> None:
    """Find the commit that made a kernel slower or wrong, by timing commits against a good one on this GPU."""
    from triton_kernel_lab import revisions
    from triton_kernel_lab.lab import bisect as search
    from triton_kernel_lab.lab.confirm import parse_cells
    from triton_kernel_lab.report import bisect as text

    project = find_project()
    pin()

    def subject(commit: str) -> str:
        return revisions.subject(project.root, commit)

    def told(step: search.Step) -> None:
        say(text.line(step.commit, subject(step.commit), step.state, step.changes, step.reason))

    found = search.run(project, kernel, good, bad, parse_cells(cell or []), log=told)
    say(text.conclusion([(commit, subject(commit)) for commit in found]))
    if len(found) > 1:
        raise typer.Exit(NOT_COMPARABLE)


COMMANDS: tuple[Callable[..., None], ...] = (verify, gate, rebaseline, history, bisect)
"""In the order in which help lists them."""
