"""Which GPU a command works on: what is asked for, what is left visible, and what is said of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic
import torch

from triton_kernel_lab import artifacts, cli, devices, nsight
from triton_kernel_lab.lab import nvml

UUIDS = ("GPU-aaaa-0", "GPU-aabb-1", "GPU-cccc-2")
ROOT = Path(__file__).parents[1]

# The driver's library as pynvml shows it, with three GPUs.
DRIVER = f"""
class NVMLError(Exception):
    pass

class Place:
    def __init__(self, index):
        self.busId = f"00000000:0{{index}}:00.0".encode()

UUIDS = {UUIDS!r}

def nvmlInit():
    pass

def nvmlDeviceGetCount():
    return len(UUIDS)

def nvmlDeviceGetHandleByIndex(index):
    return index

nvmlDeviceGetIndex = nvmlDeviceGetHandleByIndex

def nvmlDeviceGetUUID(index):
    return UUIDS[index]

def nvmlDeviceGetName(index):
    return "NVIDIA H200"

nvmlDeviceGetPciInfo = Place
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of three GPUs for this process and its children; returns the folder of its driver's library."""
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "pynvml.py").write_text(DRIVER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.fspath(folder), os.environ["PYTHONPATH"]]))
    for name in (devices.VARIABLE, "CUDA_VISIBLE_DEVICES"):
        # Set first, so that what a test leaves there is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return folder


@pytest.fixture
def driverless(host: Path) -> None:
    """The same host without a working driver."""
    with (host / "pynvml.py").open("a") as stream:
        stream.write("\ndef nvmlInit():\n    raise NVMLError('no driver')\n")


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 2)])
def test_the_device_asked_for_is_the_only_one_left(name: str, number: int) -> None:
    """The environment keeps one GPU by its UUID, the sentence says which, and asking again gives the same."""
    devices.ask(name)
    said = devices.pin()
    assert said == f"NVIDIA H200, number {number} of this host ({UUIDS[number]}, 00000000:0{number}:00.0)"
    assert visible() == UUIDS[number]
    assert devices.pin() == said


@pytest.mark.usefixtures("host")
def test_without_a_wish_it_is_the_first() -> None:
    """On a host of several GPUs one is left all the same, so that a run uses one device."""
    assert str(devices.pin()).startswith("NVIDIA H200, number 0 of this host")
    assert visible() == UUIDS[0]
    assert devices.asked() is None


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("2,0", [2, 0]),
        ("1", [1]),
        (" 1 , 2 ", [1, 2]),
        ("GPU-cccc", [2]),
        ("GPU-aa", []),
        ("0,-1,1", [0]),
        ("7", []),
        ("", []),
    ],
)
def test_only_visible_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, before: str, found: list[int]) -> None:
    """What CUDA_VISIBLE_DEVICES leaves is counted, in its order and, as CUDA does, up to what names no single GPU."""
    for index, number in enumerate(found):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        devices.ask(f"cuda:{index}")
        assert f"number {number} of this host" in str(devices.pin())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    devices.ask(f"cuda:{len(found)}")
    with pytest.raises(devices.DeviceError, match=f"device cuda:{len(found)}: expected .*, found none of that name"):
        devices.pin()
    assert visible() == before


@pytest.mark.usefixtures("host")
def test_a_part_of_a_gpu_is_left_as_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG device has a UUID of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    devices.ask("cuda:1")
    assert devices.pin() == "part of a GPU (MIG-2)"
    assert visible() == "MIG-2"


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["cpu", "1", "cuda:", "cuda:-1", "cuda:01", "cuda:1.0", "CUDA:1", "cuda:1 ", ""])
def test_what_is_no_name_of_a_device_is_refused(name: str) -> None:
    """The sentence says what a name looks like, and nothing is chosen."""
    with pytest.raises(devices.DeviceError, match=r"device: expected cuda or cuda:N, such as cuda:1, got "):
        devices.ask(name)
    assert devices.asked() is None


@pytest.mark.usefixtures("host")
def test_the_known_devices_are_named() -> None:
    """A number too high is told with those that there are."""
    devices.ask("cuda:3")
    with pytest.raises(devices.DeviceError, match="expected one of cuda:0, cuda:1, cuda:2, found none of that name"):
        devices.pin()


@pytest.mark.usefixtures("driverless")
def test_a_host_without_a_driver_has_no_device() -> None:
    """Asked for nothing, nothing is said; asked for one, the sentence says that there is none."""
    assert devices.pin() is None
    devices.ask("cuda:0")
    with pytest.raises(devices.DeviceError, match="device cuda:0: expected a CUDA device, found none"):
        devices.pin()
    assert visible() is None


@pytest.mark.usefixtures("host")
def test_a_choice_after_cuda_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads the environment once: a later choice would be said and not kept."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices.pin() is None
    devices.ask("cuda:1")
    with pytest.raises(devices.DeviceError, match="expected to be chosen before CUDA starts"):
        devices.pin()
    assert visible() is None


@pytest.mark.usefixtures("host")
def test_a_child_process_works_on_the_same_gpu() -> None:
    """A process that is started afterwards sees one GPU, and a command of the lab in it finds that one again."""
    devices.ask("cuda:2")
    said = devices.pin()
    code = "import os; from triton_kernel_lab import devices; print(os.environ['CUDA_VISIBLE_DEVICES'], devices.pin())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == f"{UUIDS[2]} {said}\n"


# On the command line.


@pytest.fixture
def project(host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parameters and pipeline of this checkout, whose runner is a GPU, as the working directory."""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


def set_runner(project: Path, runner: str) -> None:
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("runner: nvidia-h200", f"runner: {runner}"))


def call(monkeypatch: pytest.MonkeyPatch, line: str, main: Callable[[], None] = cli.main) -> int:
    monkeypatch.setattr(sys, "argv", ["triton-kernel-lab", *shlex.split(line)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


STAGES = ("environment", "ceilings", "correctness swiglu", "timing swiglu", "counters swiglu")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "line",
    [f"{stage} --device cuda:1" for stage in STAGES]
    + ["--device cuda:1 environment", "environment --device=cuda:1", "--kernel swiglu --device cuda:1"]
    + ["--device=cuda:1 --kernel swiglu", "tune swiglu --device cuda:1", "noise --device cuda:1"],
)
def test_every_command_that_uses_a_device_says_which(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the option stands, one GPU is left, and a line says which before anything else is done."""
    assert call(monkeypatch, line) == 1
    said, why = capsys.readouterr().err.splitlines()
    assert said == f"device: NVIDIA H200, number 1 of this host ({UUIDS[1]}, 00000000:01:00.0)"
    assert "no CUDA device" in why.replace("No", "no")
    assert visible() == UUIDS[1]


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_its_device_from_the_environment(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DVC gives a stage's command no option: TKL_DEVICE is the same wish, and without it the first GPU is pinned."""
    monkeypatch.setenv(devices.VARIABLE, "cuda:2")
    call(monkeypatch, stage)
    assert "number 2 of this host" in capsys.readouterr().err
    monkeypatch.delenv(devices.VARIABLE)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    call(monkeypatch, stage)
    assert "number 0 of this host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("env --device gpu", "device: expected cuda or cuda:N, such as cuda:1, got 'gpu'."),
        ("--device cuda:3 env", "device cuda:3: expected one of cuda:0, cuda:1, cuda:2, found none of that name."),
        ("env --device", "Option '--device' requires an argument; see `triton-kernel-lab --help`."),
    ],
)
@pytest.mark.usefixtures("project")
def test_a_wrong_device_is_one_sentence(
    line: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the command with 1 and names what is expected."""
    assert call(monkeypatch, line) == 1
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.usefixtures("project")
def test_the_profiler_takes_the_option_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`triton-kernel-nsight` is the command `nsight`, with all of its options."""
    line = "--kernel swiglu --shape 128x1024 --output x --device cuda:9"
    assert call(monkeypatch, line, nsight.main) == 1
    assert "error: device cuda:9: expected one of cuda:0" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["option", "environment"])
@pytest.mark.parametrize("stage", STAGES)
def test_runner_cpu_takes_no_device(
    how: str, stage: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that would be left unused is refused, not ignored."""
    set_runner(project, "cpu")
    if how == "environment":
        monkeypatch.setenv(devices.VARIABLE, "cuda:1")
    assert call(monkeypatch, f"{stage} --device cuda:1" if how == "option" else stage) == 1
    assert "error: device cuda:1: runner cpu works without one; leave out --device and" in capsys.readouterr().err
    assert visible() is None


@pytest.mark.usefixtures("driverless")
def test_a_command_that_uses_no_device_looks_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What only derives works on any host, whichever device the measurement is told to use."""
    root = synthetic.project(tmp_path / "tree", shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20).root
    monkeypatch.chdir(root)
    monkeypatch.setenv(devices.VARIABLE, "cuda:1")
    assert call(monkeypatch, "tables") == 0
    assert capsys.readouterr().err == ""


# What an artifact keeps of it.


def test_a_measuring_process_records_its_gpu(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is kept with the process, where it makes no run incomparable; the schema takes it."""
    monkeypatch.setattr(nvml, "pynvml", __import__("pynvml"))
    monkeypatch.setattr(nvml, "_handle", lambda index: 1)
    kept = nvml.number(0)
    assert kept == 1
    (timing,) = synthetic.project(
        host / "tree", shapes=("128x1024",), dtypes=("float16",), processes=1, samples=20
    ).artifacts.glob("timing/swiglu.json")
    artifact = artifacts.read(timing, "timing")
    artifact["processes"][0]["device"] = kept
    artifacts.validate(artifact, "timing", "timing.json")


def test_no_number_of_a_gpu_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver does not tell is null."""

    class Silent:
        NVMLError = RuntimeError

        def __getattr__(self, name: str) -> object:
            def ask(handle: object) -> object:
                raise RuntimeError("not supported")

            return ask

    monkeypatch.setattr(nvml, "pynvml", Silent())
    monkeypatch.setattr(nvml, "_handle", lambda index: SimpleNamespace())
    assert nvml.number(0) is None


@pytest.mark.gpu
def test_gpu_cuda_sees_the_gpu_that_was_pinned() -> None:
    """Of a host's GPUs the last one, asked for by its number, is the one and only device of CUDA."""
    last = torch.cuda.device_count() - 1
    code = (
        f"from triton_kernel_lab import devices; devices.ask('cuda:{last}'); said = devices.pin(); import torch;"
        "uuid = str(torch.cuda.get_device_properties(0).uuid).removeprefix('GPU-');"
        "print(torch.cuda.device_count(), uuid in said)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]
