"""The command line. Each command imports what it needs, so that help costs no torch."""

from __future__ import annotations

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from triton_kernel_lab import devices, gate_commands
from triton_kernel_lab.console import pin, progress, say
from triton_kernel_lab.project import ProjectError, find_project
from triton_kernel_lab.stage_commands import COMMANDS

__all__ = ["app", "main"]

OK, ERROR, FAILED, NOT_COMPARABLE = 0, 1, 2, 3

app = typer.Typer(
    name="triton-kernel-lab",
    help="Triton kernels for LLM inference, checked and timed so that a stranger can believe it.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class CacheMode(StrEnum):
    """Whether the L2 cache is swept before each sample."""

    cold = "cold"
    hot = "hot"


LimitOption = Annotated[float, typer.Option("--max-regression-percent", help="How much larger a p50 may be.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    device: Annotated[
        str | None, typer.Option(help="GPU to work on, such as cuda:1; an option of every command.")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel to measure; repeat for several.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shape such as 128x1024; repeat for several.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float16, bfloat16 or float32; repeat for several.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the JSON report goes; folders that are missing are made.")
    ] = None,
    cache_mode: Annotated[CacheMode, typer.Option(help="cold sweeps the L2 before each sample.")] = CacheMode.cold,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each candidate.")] = 500,
    warmup_ms: Annotated[int, typer.Option(min=1, help="Milliseconds of the real loop before timing.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and order.")] = 20260,
    baseline: Annotated[Path | None, typer.Option(help="Report or roofline.json to compare with.")] = None,
    max_regression_percent: LimitOption = 10.0,
) -> None:
    """Without a command: check and time kernels on this GPU and write one report."""
    if device is not None:
        devices.ask(device)
    if context.invoked_subcommand is not None:
        return
    if not (kernel or shape or dtype or output or baseline):
        say(context.get_help())
        return
    from triton_kernel_lab import bench as quick
    from triton_kernel_lab.analysis import flat, verdicts
    from triton_kernel_lab.report import verdict as text

    base = flat.load_baseline(baseline) if baseline else None
    base_environment = flat.environment_beside(baseline, base) if baseline and base else None
    request = quick.Request(
        kernels=kernel or (_kernels_of(base) if base else []),
        shapes=shape or [],
        dtypes=dtype or ["float16", "bfloat16"],
        cache_mode=cache_mode.value,
        samples=samples,
        warmup_ms=warmup_ms,
        sweep_bytes=256 << 20,
        seed=seed,
    )
    pin()
    with progress("measuring") as log:
        report = quick.run(request, _root(), log)
    say(quick.render(report))
    if output:
        quick.write(output, report)
        say(f"wrote {output}")
    if base:
        # A run that was narrowed on the command line leaves out the rest of the baseline; a full one misses it.
        narrowed = bool(kernel or shape or dtype)
        asked = {(case["kernel"], case["shape"], case["dtype"]) for case in report["cases"]} if narrowed else None
        verdict = flat.compare(
            base,
            report,
            max_regression_percent,
            base_environment=base_environment,
            origin=str(baseline),
            asked=asked,
        )
        say(text.render(verdict))
        raise typer.Exit(verdicts.exit_code(verdict))


def _root() -> Path:
    """The checkout, or the working directory of an installed package outside one."""
    with contextlib.suppress(ProjectError):
        return find_project().root
    return Path.cwd()


def _kernels_of(base: dict[str, Any]) -> list[str]:
    """The kernels of a baseline."""
    rows = base["cases"] if base["artifact_kind"] == "report" else base["cells"]
    return sorted({row["kernel"] for row in rows})


for _command in (*COMMANDS, *gate_commands.COMMANDS):
    app.command()(_command)


def _device_first(arguments: list[str]) -> list[str]:
    """The same command line with ``--device`` ahead of the command, where the parser takes it for any."""
    ahead: list[str] = []
    behind = list(arguments)
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument.partition("=")[0] == "--device":
            end = index + 1 if "=" in argument else index + 2
            if end > len(arguments):
                return [argument]
            ahead, behind = arguments[index:end], arguments[:index] + arguments[end:]
    return ahead + behind


def _kinds(error: Exception) -> set[str]:
    """The names of an error's classes: asking by name imports neither torch nor SciPy."""
    return {kind.__name__ for kind in type(error).__mro__}


def _exit_code(error: Exception) -> int:
    """2 for a wrong kernel, 3 for what cannot be compared, else 1."""
    kinds = _kinds(error)
    if "CorrectnessError" in kinds or ("BenchError" in kinds and getattr(error, "exit_code", ERROR) == FAILED):
        return FAILED
    return NOT_COMPARABLE if kinds & {"NotComparableError", "RevisionError"} else ERROR


def _sentence(error: Exception) -> str | None:
    """What to say of an error of the project's own, or of its input; None for a crash."""
    if "ClickException" in _kinds(error):
        # The parser ends a wrong command line with 2, which is a regression's code here.
        message: str = error.format_message()  # type: ignore[attr-defined]
        return f"{message.removesuffix('.')}; see `triton-kernel-lab --help`."
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("triton_kernel_lab"):
        return f"expected the module {error.name}, found none; `pip install -e '.[gpu,dev]'` brings it."
    ours = type(error).__module__.startswith("triton_kernel_lab")
    return str(error) if ours or isinstance(error, ValueError | OSError) else None


def main() -> None:
    """Run the command line; a known error is one sentence on standard error."""
    try:
        code = app(_device_first(sys.argv[1:]), standalone_mode=False)
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        typer.echo(f"error: {sentence}", err=True)
        code = _exit_code(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
