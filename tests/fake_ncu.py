"""An executable named ncu that plays Nsight Compute: each way in which a run of it can end.

It answers --version, profiles the plan that its command names without running it,
writes what it prints to --log-file, and reads an exported report back.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # At run time this file is also the program, which should start at once.
    import pytest

# What each metric is given as, by default and in the mode that spoils it.
VALUES = {
    "dram__bytes_read.sum": ("1,048,576", "words", "plenty"),
    "dram__bytes_write.sum": ("1024.5", "", ""),
    "lts__t_sector_hit_rate.pct": ("50.25", "beyond", "115.94"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("97.5", "", ""),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("0", "missing", "n/a"),
}
HEAD = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")
VERSION = "NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 36398880) (public-release)"
# What is printed, and the exit code.
REFUSALS = {
    "denied": (
        "==PROF== Connected to process 7 (python3)\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to "
        "access NVIDIA GPU Performance Counters on the target device 0.\n==WARNING== No kernels were profiled.\n",
        1,
    ),
    "library": ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", 1),
    "garbage": ("\x00 what is\nthis?\n", 0),
    "silent": ("", 9),
    "crash": ("==ERROR== The application returned an error code (1).\n", 1),
}


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "ok", *, unit: str = "byte", passes: int = 1
) -> Path:
    """Put an ncu of this mode first on PATH; returns the file in which it notes its arguments, one JSON list a run."""
    seen, program = folder / "seen.jsonl", folder / "bin" / "ncu"
    program.parent.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({"mode": mode, "unit": unit, "passes": passes, "seen": os.fspath(seen)})
    command = shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__), settings])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([os.fspath(program.parent), os.environ["PATH"]]))
    return seen


def remove(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave no ncu on PATH."""
    monkeypatch.setenv("PATH", os.fspath(folder))


def main(settings: dict[str, Any], arguments: list[str]) -> int:
    """Act as ncu was told to, given ncu's arguments."""
    if arguments == ["--version"]:
        print(VERSION)
        return 0
    with open(settings["seen"], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(arguments) + "\n")
    given = dict(itertools.pairwise(arguments))
    text, code = _ran(settings, arguments, given)
    if settings["mode"] == "crash":
        sys.stderr.write("Traceback (most recent call last):\n  File x\nRuntimeError: CUDA error: an illegal access\n")
    if text:
        Path(given["--log-file"]).write_text(text, encoding="utf-8")
    return code


def _ran(settings: dict[str, Any], arguments: list[str], given: dict[str, str]) -> tuple[str, int]:
    if settings["mode"] in REFUSALS:
        return REFUSALS[settings["mode"]]
    if "--import" in given:
        plan = json.loads(Path(given["--import"]).read_text(encoding="utf-8"))
    else:
        plan = json.loads(Path(arguments[-2]).read_text(encoding="utf-8"))
        Path(arguments[-1]).write_text("done\n", encoding="utf-8")
    if "--export" in given:
        Path(given["--export"]).write_text(json.dumps(plan), encoding="utf-8")
        return f"==PROF== Report: {given['--export']}\n", 0
    if given.get("--page") == "details":
        return "  _kernel (8, 1, 1)x(256, 1, 1)\n    Section: GPU Speed Of Light Throughput\n", 0
    return _table(plan, settings, given.get("--metrics", ",".join(VALUES)).split(",")), 0


def _table(plan: dict[str, Any], settings: dict[str, Any], metrics: list[str]) -> str:
    """A raw page in CSV, an empty kernel ahead of each call as the watched process launches it."""
    mode, unit, second = settings["mode"], settings["unit"], metrics == ["lts__t_sector_hit_rate.pct"]
    kernel = "_other" if mode == "unsteady" and second else "_kernel"
    calls = {"none": [], "short": ["_null_kernel"], "two": ["_null_kernel", kernel, "void second<4, int>(int *)"]}
    kernels = calls.get(mode, ["_null_kernel", kernel]) * (len(plan["cells"]) * len(plan["candidates"]))
    counts = [spoilt if mode == spoiler else value for value, spoiler, spoilt in map(VALUES.__getitem__, metrics)]
    # Asked for or not, the passes stand in every raw page.
    rows = [[*HEAD, *metrics, "profiler__replayer_passes"]]
    rows.append([*[""] * len(HEAD), *(unit if "bytes" in metric else "%" for metric in metrics), "pass"])
    for number, name in enumerate(kernels):
        known = (str(number), "7", "python3", "127.0.0.1", name, "1", "7", "(128, 1, 1)", "(8, 1, 1)")
        rows.append([*known, *counts, str(settings["passes"])])
    said = ["==WARNING== Note: Running with uncontrolled GPU caches.", "==PROF== Connected to process 7 (python3)"]
    return "\n".join([*said, *(",".join(f'"{cell}"' for cell in row) for row in rows), ""])


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
