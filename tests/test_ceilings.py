"""The stage ``ceilings`` on a made-up device: how products are measured, and what the artifact says of the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_device
import pytest
import synthetic
import torch
from fake_device import Device

from triton_kernel_lab import artifacts
from triton_kernel_lab.lab import ceilings, nvml, sweep
from triton_kernel_lab.lab.window import Bench


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A made-up device, the fourth of its host; tensors and calls are the CPU's."""
    monkeypatch.setattr(ceilings, "_device", lambda bench: torch.device("cpu"))
    monkeypatch.setattr(nvml, "number", lambda index: 3)
    made = fake_device.install(monkeypatch)
    made.l2_bytes = 64
    return made


def _readings(device: Device, monkeypatch: pytest.MonkeyPatch, capped: int) -> None:
    """Let the card be at its power limit for so many readings after ten, and then no longer."""
    count = 0

    def read(index: int) -> nvml.Reading:
        nonlocal count
        count += 1
        device.reasons = ("power_cap",) if 10 < count <= 10 + capped else ()
        return Device.reading(device, index)

    monkeypatch.setattr(nvml, "read", read)


def _product(dtype: str = "float32") -> dict[str, Any]:
    return ceilings._matmul(Bench(1 << 20, 0, seed=7), dtype, 16)


def test_a_product_is_measured_with_rests_as_cells_are(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card at its power limit rests before it goes on, and the sample that met the limit does not count."""
    asked = len(_product()["samples_ns"])
    assert asked >= 20
    assert device.pauses == []
    _readings(device, monkeypatch, 1)
    assert len(_product()["samples_ns"]) == asked - 1
    assert device.pauses


def test_a_card_that_never_leaves_its_limit_gives_a_rate_all_the_same(device: Device) -> None:
    """Where every sample is flagged all of them count."""
    asked = len(_product()["samples_ns"])
    device.reasons = ("power_cap",)
    assert len(_product()["samples_ns"]) == asked


def test_tensor_cores_take_float32_only_while_tf32_is_measured(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's switch stands as it was before, whichever product was measured."""
    seen = []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return multiply(a, b)

    before = torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(torch, "mm", mm)
    for dtype in ("float32", "tf32"):
        seen.clear()
        _product(dtype)
        assert set(seen) == {dtype == "tf32"}
        assert torch.backends.cuda.matmul.allow_tf32 == before


def test_ceilings_name_the_card_that_they_were_measured_on(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a timing names that of each process: on a host of several cards they need not be the same."""
    monkeypatch.setattr(ceilings, "LADDER_BYTES", (1 << 10,))
    monkeypatch.setattr(ceilings, "DIRTY_BYTES", (1 << 10,))
    monkeypatch.setattr(ceilings, "MATMUL", (("float32", 16),))
    monkeypatch.setattr(ceilings, "_WARMUP_MS", 0)
    for name in ("copy", "read", "write", "null"):
        monkeypatch.setattr(sweep, name, lambda *tensors: None)
    found = synthetic.project(tmp_path, derive=False, shapes=("128x1024",), dtypes=("float16",), samples=20)
    ceilings.run(found)
    made = artifacts.read(found.artifacts / "ceilings.json", "ceilings")
    assert (made["status"], made["device"]) == ("measured", 3)
    del made["device"]
    # Those of earlier versions say nothing of it.
    artifacts.validate(made, "ceilings", "ceilings.json")


def test_without_a_gpu_the_ceilings_name_no_card(tmp_path: Path) -> None:
    """What was not measured was measured on none."""
    found = synthetic.project(tmp_path, derive=False, measured=False, runner="cpu")
    ceilings.run(found)
    made = artifacts.read(found.artifacts / "ceilings.json", "ceilings")
    assert (made["status"], made["device"]) == ("not_measured", None)
