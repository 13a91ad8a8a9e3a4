"""The codegen audit: real compilers, no device; planted faults turn its check red."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from codegen_data import made, spoilt

from triton_kernel_lab import artifacts
from triton_kernel_lab.artifacts import Artifact
from triton_kernel_lab.codegen import sass, stage
from triton_kernel_lab.codegen.occupancy import LIMITS, TARGETS, occupancy
from triton_kernel_lab.codegen.stage import CodegenError
from triton_kernel_lab.project import Project, find_project, kernel_names

ROOT = Path(__file__).parents[1]
PINNED = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)

PLANTED_OP = """
import torch

from triton_kernel_lab.ops import _launch
from triton_kernel_lab.ops._triton import INTERPRET, tl, triton


@triton.jit
def _wide_kernel(x_ptr, y_ptr, n, step, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at * step, mask=at < n) * scale, mask=at < n)


@triton.jit
def _picky_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x.to(tl.float16), mask=at < n)


@triton.jit
def _held_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.arange(0, BLOCK), x - tl.max(x, 0))


@triton.jit
def _summed_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK, loop_unroll_factor=1):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr, tl.sum(total, 0))


def summed(x):
    y = torch.empty(1, dtype=torch.float32)
    _launch.bind(_summed_kernel, (1,), (x, y), (x.numel(),), {"BLOCK": 1024}, config={}, num_warps=4)(x, y)
    return y


def wide(x):
    y = torch.empty(x.shape, dtype=x.dtype)
    scalars = (x.numel(), 1, 2.0)
    _launch.bind(_wide_kernel, (16,), (x, y), scalars, {"BLOCK": 1024}, config={}, num_warps=4)(x, y)
    return y


def picky(x):
    y = torch.empty(x.shape, dtype=x.dtype)
    _launch.bind(_picky_kernel, (16,), (x, y), (x.numel(),), {"BLOCK": 1024}, config={}, num_warps=4)(x, y)
    return y


def held(x):
    y = torch.empty(x.shape, dtype=x.dtype)
    constants = {"BLOCK": 16384, "INTERPRETED": INTERPRET}
    _launch.bind(_held_kernel, (1,), (x, y), (), constants, config={}, num_warps=16)(x, y)
    return y
"""
PLANTED_CASE = """
from triton_kernel_lab.cases._base import Case, Cost, Variant, randn
from triton_kernel_lab.ops.planted import held, picky, summed, wide


def inputs(dims, dtype, generator):
    return (randn(dims, dtype, generator),)


def unaligned(dims, dtype, generator):
    return (randn(dims, dtype, generator)[1:],)


CASE = Case(
    name="planted",
    cli_name="planted",
    axes=("M",),
    variants=(
        Variant("default", inputs, wide, wide, wide),
        Variant("picky", unaligned, picky, picky, picky),
        Variant("held", inputs, held, held, held),
        Variant("summed", inputs, summed, summed, summed),
    ),
    cost=lambda dims, dtype: Cost({}, {}, 0, "float32"),
    timed=((16384,),),
    checked=(),
    smoke=(),
    timed_dtypes=("float16",),
)
"""


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def plant(root: Path) -> None:
    """A spill, a load that is no longer wide and a type that sm_80 does not have."""
    operator = root / "src/triton_kernel_lab/ops/planted.py"
    edit(operator, "num_warps=16", "num_warps=1")
    edit(operator, "(x.numel(), 1, 2.0)", "(x.numel(), 3, 2.0)")
    edit(operator, "x.to(tl.float16)", "x.to(tl.float8e4nv).to(tl.float16)")


def checkout(root: Path) -> Path:
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "schemas", root / "schemas")
    for name in ("params.yaml", "dvc.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    package = root / "src/triton_kernel_lab"
    (package / "cases/planted.py").write_text(PLANTED_CASE, encoding="utf-8")
    (package / "ops/planted.py").write_text(PLANTED_OP, encoding="utf-8")
    (package / "ops/launch/planted.json").write_text("{}\n", encoding="utf-8")
    (package / "cases/__init__.py").write_text('KERNELS: list[str] = ["planted"]\n', encoding="utf-8")
    return root


def audit(root: Path, *arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a checkout, as in a session that interprets and has settings of its own."""
    settings = {"PYTHONPATH": os.fspath(root / "src"), "TRITON_CACHE_DIR": os.fspath(cache), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "triton_kernel_lab", "codegen", *arguments]
    return subprocess.run(
        command, cwd=root, env=os.environ | settings | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A checkout of three small kernels with their audit."""
    if PINNED is None or metadata.version("triton") != PINNED[1]:
        pytest.skip("the audit is made with the pinned Triton only, which `nox -s unit` installs")
    root = checkout(tmp_path_factory.mktemp("audited") / "tree")
    done = audit(root, cache=cache)
    assert done.returncode == 0, done.stderr
    return root


def launches(root: Path, function: str) -> dict[str, dict[str, Any]]:
    """The launches of one function by target."""
    found = artifacts.read(root / "artifacts/codegen/planted.json", "codegen")["launches"]
    return {launch["target"]: launch for launch in found if launch["function"] == function}


@pytest.fixture
def here(tmp_path: Path) -> Project:
    for name in ("params.yaml", "dvc.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return find_project(tmp_path)


# What is compiled.


def test_arguments_are_specialised_as_triton_does_on_a_device(audited: Path) -> None:
    """A pointer at 16 bytes and a multiple of 16 may be assumed so, a 1 is a constant, a float is neither."""
    for launch in launches(audited, "_wide_kernel").values():
        assert launch["signature"] == {"x_ptr": "*fp16:16", "y_ptr": "*fp16:16", "n": "i32:16", "scale": "fp32"}
        assert launch["constants"] == {"step": 1, "BLOCK": 1024}
        assert launch["options"] == {"num_warps": 4}
    for launch in launches(audited, "_picky_kernel").values():
        assert launch["signature"] == {"x_ptr": "*fp16", "y_ptr": "*fp16:16", "n": "i32"}
    for launch in launches(audited, "_held_kernel").values():
        # The session interprets; an operator that asks is told what it is told on a GPU.
        assert launch["constants"] == {"BLOCK": 16384, "INTERPRETED": False}


def test_every_target_is_read(audited: Path) -> None:
    """Each launch is compiled for each target, and its binary shows wide loads, no spill and a launchable block."""
    for function in ("_wide_kernel", "_held_kernel"):
        found = launches(audited, function)
        assert tuple(found) == TARGETS
        for launch in found.values():
            code = launch["code"]
            assert code["global_loads"]["128"] > 0
            assert code["local_loads"] == code["local_stores"] == code["stack_bytes"] == 0
            assert code["occupancy"]["blocks"] > 0
        assert len({launch["code"]["cubin_sha256"] for launch in found.values()}) == len(TARGETS)


def test_elements_of_a_thread_are_results_over_threads(audited: Path) -> None:
    """16384 results of 16 programs of 128 threads are 8 a thread, fetched in one go by a kernel without a loop."""
    code = launches(audited, "_wide_kernel")["sm_90"]["code"]
    assert code["elements_per_thread"] == 8
    whole = {"whole_kernel": True, "instructions": code["instructions"], "load_bytes": 16}
    assert code["hot_loop"] == whole | {"instructions_per_element": code["instructions"] / 8}


def test_a_turn_of_a_loop_is_counted_by_what_it_fetches(audited: Path) -> None:
    """On every target a turn of the loop over a row fetches whole vectors, and is far less than all instructions."""
    for launch in launches(audited, "_summed_kernel").values():
        loop = launch["code"]["hot_loop"]
        assert not loop["whole_kernel"]
        assert loop["load_bytes"] % 16 == 0
        assert loop["instructions_per_element"] == round(2 * loop["instructions"] / loop["load_bytes"], 4)
        assert 2 * loop["instructions"] < launch["code"]["instructions"]


def test_planted_faults_turn_the_check_red(audited: Path, cache: Path, tmp_path: Path) -> None:
    """A spill, a scalarised load and a kernel that one target cannot have: each is named, and the code is 2."""
    root = Path(shutil.copytree(audited, tmp_path / "tree"))
    before = {path: path.read_bytes() for path in (root / "artifacts").rglob("*.json")}
    plant(root)
    done = audit(root, "--check", cache=cache)
    assert done.returncode == 2, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.search(r" sm_\d+ ", line)]
    spilt = [line for line in rows if " spills " in line]
    assert [re.findall(r"sm_\d+", line)[0] for line in spilt] == list(TARGETS)
    assert all(re.search(r"_held_kernel .* 0 bytes, 0 loads, 0 stores +[1-9]\d+ bytes", line) for line in spilt)
    narrower = [line for line in rows if "narrower loads" in line]
    assert [re.findall(r"sm_\d+", line)[0] for line in narrower] == list(TARGETS)
    assert all(re.search(r"_wide_kernel .* 1 x 128 bit +8 x 16 bit", line) for line in narrower)
    (broken,) = [line for line in rows if "does not compile" in line]
    assert re.search(r"sm_80 +_picky_kernel +picky 16384 float16 .*fp8e4nv not supported", broken)
    assert "make codegen" in done.stdout
    assert {path: path.read_bytes() for path in (root / "artifacts").rglob("*.json")} == before


# A case without a table of its own goes by that of the kernels that it calls.
TABLED = [name for name in kernel_names(ROOT) if (ROOT / f"src/triton_kernel_lab/ops/launch/{name}.json").is_file()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", TABLED)
def test_every_line_of_a_launch_table_is_audited(kernel: str, target: str) -> None:
    """The calls that stand for a kernel choose each configuration that its table has for the target."""
    from triton_kernel_lab.cases._base import load
    from triton_kernel_lab.codegen.launches import calls, plan
    from triton_kernel_lab.ops import _launch

    table = _launch._table(kernel)
    lines = [line["config"] for line in table[_launch._nearest(table, target)]]
    chosen = [launch.config for call in calls(load(kernel)) for launch in plan(call, target)]
    assert [line for line in lines if line not in chosen] == []


def test_inputs_lie_in_the_order_of_the_arguments() -> None:
    """What is compiled for two weights depends on which comes first in memory, and so not on an allocator's mood."""
    import torch

    from triton_kernel_lab.cases._base import load
    from triton_kernel_lab.codegen import launches

    call = next(call for call in launches.calls(load("swiglu_linear")) if call.dims == (512, 8960, 1536))
    for _ in range(3):
        kept = [torch.empty(1 << 20) for _ in range(3)]
        (launch,) = launches.plan(call, "sm_90")
        starts = [tensor.data_ptr() for tensor in launch.tensors[:3]]
        assert starts == sorted(starts)
        assert all(start % 256 == starts[0] % 256 for start in starts)
        assert launch.constants["ORDER"] == 1
        del kept


def test_a_fallback_is_a_launch_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that leaves Triton on a target is named with its reason, not passed over."""
    from triton_kernel_lab import routing
    from triton_kernel_lab.codegen import audit as module

    def leaves(call: Any, target: str) -> Any:
        raise routing.FallbackError(f"no kernel for {target}")

    monkeypatch.setattr(module, "plan", leaves)
    monkeypatch.setattr(module, "describe", lambda compiled, target: [])
    (record,) = module.audit("swiglu", "sm_80")
    assert (record["status"], record["function"], record["reason"]) == ("failed", None, "no kernel for sm_80")
    assert "default 128x1024 float16" in record["calls"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "`ptxas` failed with error code 255\n`ptxas` stderr:\n"
            "ptxas /tmp/tmpz9/a.ptx, line 9; error : Unknown modifier\n"
            "Repro command: ptxas -lineinfo /tmp/tmpz9/a.ptx\n",
            "RuntimeError: ptxas PTX, line 9; error : Unknown modifier",
        ),
        (
            "at 3:8:\n    x.to(tl.float8e4nv)\n        ^\ntype fp8e4nv not supported",
            "RuntimeError: type fp8e4nv not supported",
        ),
        ("", "RuntimeError: no message"),
    ],
)
def test_a_cause_is_one_line_that_is_the_same_each_time(message: str, said: str) -> None:
    """Of a compiler's message the line that tells the cause is kept, without the names of temporary files."""
    from triton_kernel_lab.codegen.compiling import reason

    assert reason(RuntimeError(message)) == said


# Where it is made.


@pytest.mark.parametrize(("installed", "named"), [("3.6.0", "3.6.0"), (None, "none")])
def test_another_triton_is_refused(
    here: Project, monkeypatch: pytest.MonkeyPatch, installed: str | None, named: str
) -> None:
    """On a host with another Triton, or none, one sentence names both versions and the ways out."""

    def version(package: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    assert PINNED
    expected = f"expected Triton {PINNED[1]} as in constraints.txt, found {named}; `make codegen`"
    with pytest.raises(CodegenError, match=re.escape(expected)):
        stage.derive(here, ["rms_norm"])


def test_a_missing_pin_is_refused(here: Project) -> None:
    """Without a pinned version nothing says which code is the right one."""
    (here.root / "constraints.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    with pytest.raises(CodegenError, match=r"constraints\.txt: expected one line `triton==\.\.\.`, found 0\.$"):
        stage.derive(here, ["rms_norm"])


def ends_its_process(task: stage.Task) -> Any:
    """Stands for a compiler that aborts on one task."""
    if task == ("two", "sm_100"):
        os._exit(134)
    return {}, []


def test_a_compiler_that_aborts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the compiler takes its process along, the kernel and the target are found out."""
    monkeypatch.setattr(stage, "_audit", ends_its_process)
    with pytest.raises(CodegenError, match=r"^codegen of two for sm_100: the compiler brought its process down\.$"):
        stage._run([("one", "sm_80"), ("two", "sm_100"), ("three", "sm_90")])


def test_the_stage_writes_where_it_is_tracked(here: Project) -> None:
    """Written audits say how many launches they hold and name those that do not compile."""
    sound = made()
    failed: Artifact = spoilt(sound, status="failed", reason="CompilationError: no", code=None)
    said = stage.write(here, {"one": sound, "two": failed})
    assert [path.name for path in sorted(here.audits.iterdir())] == ["one.json", "two.json"]
    assert said[0].endswith("one.json: 2 launches for 4 targets")
    assert said[2] == "does not compile: sm_80 _kernel default 8x128 float16: CompilationError: no"


# What is read.

LISTING = """
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.EF.128 R4, [R14.64] ;
        /*0020*/             @!UPT LDG.E.ENL2.256 R4, R8, desc[UR4][R14.64] ;
        /*0030*/                   LDG.E R2, [R2.64] ;
        /*0040*/                   LDG.E.LTC128B.U16.CONSTANT R2, [R2.64] ;
        /*0050*/               @P2 STG.E.64 [R2.64], R4 ;
.L_x_0:
        /*0060*/                   LDL.64 R2, [R1] ;
        /*0070*/                   STL [R1], R2 ;
        /*0080*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*00a0*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;
        /*00b0*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT ;
        /*00c0*/                   UTMALDG.2D [UR8], [UR4] ;
        /*00d0*/                   BRA `(.L_x_0) ;
        /*00e0*/                   NOP ;
"""


def test_instructions_are_counted_by_what_they_do() -> None:
    """Widths, spills, tensor cores and asynchronous copies of a listing, with and without a predicate."""
    (found,) = sass.count_each(LISTING, [0xF0])
    assert found == sass.Instructions(
        total=14,
        global_loads={"16": 1, "32": 1, "128": 1, "256": 1},
        global_stores={"64": 1},
        local_loads=1,
        local_stores=1,
        tensor_core={"HGMMA": 1, "HMMA": 1, "UTCHMMA": 1},
        async_copies={"LDGSTS": 1, "UTMALDG": 1},
        # 16, 32, 4 and 2 bytes, and the 16 of an asynchronous copy.
        hot_loop=sass.HotLoop(whole_kernel=True, instructions=14, load_bytes=70),
    )


def looped(*lines: str) -> sass.HotLoop:
    """The hot loop of some instructions, 16 bytes each from address 0."""
    listing = "\n".join(f"        /*{16 * index:04x}*/  {line} ;" for index, line in enumerate(lines))
    (found,) = sass.count_each(listing, [16 * len(lines)])
    return found.hot_loop


def test_the_hot_loop_is_the_innermost_that_moves_most() -> None:
    """A turn of the inner of two nested loops is counted, not of the outer one, nor of one that moves less."""
    found = looped(
        "MOV R1, R2",
        "LDG.E R3, [R4.64]",  # 0x10: the first loop
        "@P0 BRA 0x10",
        "LDG.E.128 R3, [R4.64]",  # 0x30: the outer loop
        "LDG.E.128 R3, [R4.64]",  # 0x40: the inner loop
        "FADD R3, R3, R4",
        "NOP",
        "STG.E.128 [R4.64], R3",
        "@!P1 BRA 0x40",
        "@P2 BRA 0x30",
        "EXIT",
        "BRA 0xb0",
    )
    assert found == sass.HotLoop(whole_kernel=False, instructions=4, load_bytes=16)


def test_a_wait_that_spins_out_of_line_belongs_to_its_loop() -> None:
    """A block at the end of the code that jumps back into a loop neither hides it nor makes one of its own."""
    found = looped(
        "LDGSTS.E.128 [R2], [R4.64]",  # 0x00
        "UTMALDG.2D [UR8], [UR4]",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR16], R12",
        "@!P0 BRA 0x70",
        "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24",  # 0x40
        "BRA.U UP0, 0x0",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR16], R12",  # 0x70
        "@!P0 BRA 0x70",
        "BRA 0x40",
    )
    assert found == sass.HotLoop(whole_kernel=False, instructions=9, load_bytes=16)


@pytest.mark.parametrize(
    "lines",
    [
        ("LDG.E R2, [R4.64]", "EXIT", "BRA 0x20"),
        ("LDG.E R2, [R4.64]", "FADD R2, R2, R2", "@P0 BRA 0x10", "EXIT"),
        ("LDG.E R2, [R4.64]", "BRA P0, 0x30", "FADD R2, R2, R2", "EXIT"),
    ],
    ids=["the trap behind the end", "a loop that moves nothing", "a branch ahead"],
)
def test_without_a_loop_that_moves_data_the_whole_kernel_is_counted(lines: tuple[str, ...]) -> None:
    """What is no loop, or fetches nothing, is not taken for the hot one."""
    assert looped(*lines) == sass.HotLoop(whole_kernel=True, instructions=len(lines), load_bytes=4)


def test_kernels_in_one_listing_are_told_apart_by_their_sizes() -> None:
    """The first five instructions belong to one kernel and the others to the next."""
    first, second = sass.count_each(LISTING, [0x50, 0xA0])
    assert (first.total, second.total) == (5, 9)
    assert first.local_loads == 0
    assert second.global_loads == {}


@pytest.mark.parametrize("listing", ["", LISTING, LISTING.replace("/*0010*/", "/* 10 */")])
def test_a_listing_of_less_than_the_code_is_refused(listing: str) -> None:
    """A disassembler that leaves an instruction out, or prints it in another way, is an error and not a lower count."""
    with pytest.raises(ValueError, match=r"expected 256 bytes of code, found 1?[045] instructions"):
        sass.count_each(listing, [0xF0, 0x10])


def test_resources_are_those_of_the_kernel() -> None:
    """Of several functions the named one's registers, stack and local bytes are read."""
    line = " Function {}:\n  REG:{} STACK:{} SHARED:1024 LOCAL:0 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    listing = (
        "Resource usage:\n Common:\n  GLOBAL:11\n" + line.format("_helper", 8, 0) + line.format("_kernel", 255, 24)
    )
    assert sass.resources(listing, "_kernel") == sass.Resources(registers=255, stack_bytes=24, local_bytes=0)
    with pytest.raises(ValueError, match="expected the resources of _other, found none"):
        sass.resources(listing, "_other")


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "warps", "blocks", "limited_by"),
    [
        # 64 warps of 32 registers a thread fill the register file of 65536.
        ("sm_90", 32, 0, 8, 8, ("warps", "registers")),
        # 33 registers are given as 40: 12 warps on each of four partitions.
        ("sm_90", 33, 0, 8, 6, ("registers",)),
        ("sm_90", 255, 0, 8, 1, ("registers",)),
        ("sm_90", 16, 0, 1, 32, ("blocks",)),
        ("sm_120", 16, 0, 1, 24, ("blocks",)),
        ("sm_120", 16, 0, 8, 6, ("warps",)),
        # 100 KiB hold two blocks of 48 KiB and the 1 KiB that each pays.
        ("sm_120", 16, 48 << 10, 4, 2, ("shared_memory",)),
        ("sm_80", 16, 163 << 10, 4, 1, ("shared_memory",)),
        ("sm_80", 16, (163 << 10) + 1, 4, 0, ("shared_memory",)),
        ("sm_90", 16, 227 << 10, 4, 1, ("shared_memory",)),
        # 32 warps of 255 registers do not fit at all.
        ("sm_90", 255, 0, 32, 0, ("registers",)),
    ],
)
def test_occupancy_follows_the_documented_limits(
    target: str, registers: int, shared_bytes: int, warps: int, blocks: int, limited_by: tuple[str, ...]
) -> None:
    """Blocks that fit one multiprocessor, and what keeps out one more, in closed form."""
    found = occupancy(target, registers=registers, shared_bytes=shared_bytes, warps=warps)
    assert (found.blocks, found.limited_by) == (blocks, limited_by)
    assert found.ratio == round(blocks * warps / LIMITS[target].warps, 4)


# Asks NVIDIA's calculator, whose header comes in Triton's wheel, how many blocks of a kernel fit.
CALCULATOR = """
#include <cuda_occupancy.h>
int blocks(int major, int warps, size_t shared, size_t optin, int registers, size_t used, int block_warps) {
    cudaOccDeviceProp device = {0};
    device.computeMajor = major;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 << 10;
    device.sharedMemPerMultiprocessor = shared;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = optin;
    device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel = {0};
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = optin;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state = {0};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult found = {0};
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&found, &device, &kernel, &state, 32 * block_warps, used)) return -1;
    return found.activeBlocksPerMultiprocessor;
}
"""


def test_the_occupancy_is_that_of_nvidias_own_calculator(tmp_path: Path) -> None:
    """For each target, for kernels of many sizes, as many blocks fit as the calculator in Triton's wheel says."""
    spec = importlib.util.find_spec("triton")
    headers = Path(str(spec and spec.origin)).parent / "backends/nvidia/include"
    if shutil.which("cc") is None or not (headers / "cuda_occupancy.h").is_file():
        pytest.skip("needs a C compiler and the cuda_occupancy.h of Triton's wheel")
    (tmp_path / "calculator.c").write_text(CALCULATOR, encoding="utf-8")
    library = tmp_path / "calculator.so"
    command = ["cc", "-w", "-shared", "-fPIC", f"-I{headers}", "-o", str(library), str(tmp_path / "calculator.c")]
    subprocess.run(command, check=True, capture_output=True)
    blocks = ctypes.CDLL(str(library)).blocks
    blocks.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    sizes = (0, 16, 1024, 9 << 10, 33 << 10, 48 << 10, 99 << 10, 163 << 10, 227 << 10)
    for target, limits in LIMITS.items():
        major = int(target.removeprefix("sm_")) // 10
        for registers, shared, warps in itertools.product(
            (16, 32, 33, 64, 100, 128, 168, 255), sizes, (1, 2, 4, 8, 16, 32)
        ):
            if shared > limits.block_shared_bytes:
                continue
            theirs = blocks(
                major, limits.warps, limits.shared_bytes, limits.block_shared_bytes, registers, shared, warps
            )
            ours = occupancy(target, registers=registers, shared_bytes=shared, warps=warps).blocks
            assert ours == theirs, (target, registers, shared, warps)


@pytest.mark.parametrize(
    ("tasks", "processors", "memory_gib", "processes"),
    [(44, 2, 64, 2), (4, 16, 64, 4), (44, 64, 24, 12), (44, None, 0.5, 1)],
)
def test_processes_are_as_many_as_tasks_processors_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, tasks: int, processors: int | None, memory_gib: float, processes: int
) -> None:
    """A processor, two gibibytes and a task each; the scarcest decides, and one there always is."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": int(memory_gib * (1 << 30)) // 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert stage._processes(tasks) == processes


def test_the_audit_starts_without_torch() -> None:
    """The stage imports neither torch nor Triton; the processes that it starts do."""
    code = "import sys; import triton_kernel_lab.codegen.stage; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
