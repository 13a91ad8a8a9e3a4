"""The table of a codegen audit: a row for each function and target, and what it says of their launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic
from codegen_data import launch, made

from triton_kernel_lab import artifacts
from triton_kernel_lab.analysis import verify
from triton_kernel_lab.report import audit


def row(*launches: dict[str, Any]) -> dict[str, str]:
    """The one row of the table of these launches, by header."""
    lines = [line for line in audit.section(made(*launches)).splitlines() if line.startswith("|")]
    headers, _, cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return dict(zip(headers, cells, strict=True))


def with_code(**code: Any) -> dict[str, Any]:
    found = launch()
    return found | {"code": found["code"] | code}


def test_a_row_says_what_a_launch_takes_and_holds() -> None:
    """Registers, spills, shared memory, widths of loads, tensor cores, occupancy, instructions an element."""
    assert row(launch()) == {
        "Target": "sm_80",
        "Function": "_kernel",
        "Launches": "1",
        "Registers": "32",
        "Spilled (bytes)": "0",
        "Shared (bytes)": "1024",
        "Load widths (bits)": "128",
        "Tensor core": "HMMA",
        "Warps held": "100.0 %",
        "Instructions an element": "1.3",
    }


def test_launches_of_one_function_share_a_row_as_ranges() -> None:
    """What differs between them stands as from and to; widths and copies are listed."""
    other = with_code(
        registers=64,
        stack_bytes=8,
        local_bytes=8,
        global_loads={"16": 1, "128": 2},
        async_copies={"LDGSTS": 4},
        occupancy={"blocks": 0, "warps": 0, "ratio": 0.0, "limited_by": ["registers"]},
        hot_loop={"whole_kernel": True, "instructions": 9, "load_bytes": 6, "instructions_per_element": 3.0},
    )
    found = row(launch(), other)
    assert found["Launches"] == "2"
    assert found["Registers"] == "32 to 64"
    assert found["Spilled (bytes)"] == "0 to 16"
    assert found["Load widths (bits)"] == "128, 16, LDGSTS"
    assert found["Warps held"] == "none to 100.0 %"
    assert found["Instructions an element"] == "1.3 to 3.0"


def test_a_kernel_without_a_loop_is_marked() -> None:
    """Instructions of a whole kernel are another thing than those of a turn; bulk copies tell no elements."""
    loop = {"whole_kernel": True, "instructions": 9, "load_bytes": 6, "instructions_per_element": 3.0}
    assert row(with_code(hot_loop=loop))["Instructions an element"] == "3.0*"
    unknown = loop | {"whole_kernel": False, "load_bytes": 0, "instructions_per_element": None}
    assert row(with_code(hot_loop=unknown))["Instructions an element"] == "-"


def test_a_launch_that_does_not_compile_is_named_below() -> None:
    """It is counted as failed, and its cause stands under the table."""
    failed = launch() | {"status": "failed", "reason": "CompilationError: no such type", "code": None}
    assert row(failed)["Launches"] == "1, 1 failed"
    assert row(launch(), failed)["Registers"] == "32"
    assert "- sm_80 _kernel, default 8x128 float16: CompilationError: no such type" in audit.section(made(failed))


@pytest.mark.parametrize("spoil", ["edited", "missing"])
def test_verify_compares_the_table_with_its_audit(tmp_path: Path, spoil: str) -> None:
    """A table that is not what the tracked audit gives is broken, and so is one that is not there."""
    project = synthetic.project(tmp_path, shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20)
    artifacts.write(project.audits / "one.json", made())
    audit.write(project, {"one": made()})
    assert verify.run(project) == []
    where = audit.path(project, "one")
    if spoil == "missing":
        where.unlink()
    else:
        where.write_text(where.read_text().replace("| sm_90 ", "| sm_91 "))
    (problem,) = verify.run(project)
    assert problem.startswith("reports/codegen/one.md: ")
    assert problem.endswith(
        "run `dvc repro codegen@one`." if spoil == "missing" else "run `dvc repro -f -s codegen@one`."
    )
