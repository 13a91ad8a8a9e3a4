"""What the driver says of a device while it works: clocks, power, heat, company."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import pynvml
import torch

__all__ = ["Reading", "driver_version", "number", "other_processes", "policy", "read"]

_REASONS = {
    0x0000000000000004: "power_cap",
    0x0000000000000008: "hardware_slowdown",
    0x0000000000000020: "thermal",
    0x0000000000000040: "hardware_thermal",
    0x0000000000000080: "power_brake",
}


@dataclass(frozen=True)
class Reading:
    """One look at a device; a field is None where the driver does not tell it."""

    sm_clock_mhz: int | None
    power_mw: int | None
    temperature_c: int | None
    reasons: tuple[str, ...]


@functools.cache
def _handle(index: int) -> Any:
    pynvml.nvmlInit()
    # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's.
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _ask(call: Any, *arguments: Any) -> Any:
    with contextlib.suppress(pynvml.NVMLError):
        return call(*arguments)
    return None


def number(index: int) -> int | None:
    """Which device of its host it is, as nvidia-smi counts."""
    found: int | None = _ask(pynvml.nvmlDeviceGetIndex, _handle(index))
    return found


def driver_version() -> str | None:
    """The version of the NVIDIA driver."""
    pynvml.nvmlInit()
    version: str | None = _ask(pynvml.nvmlSystemGetDriverVersion)
    return version


def policy(index: int) -> dict[str, Any]:
    """How the device is set up: ECC, MIG, power limit, clocks."""
    handle = _handle(index)
    ecc = _ask(pynvml.nvmlDeviceGetEccMode, handle)
    mig = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    maximum = _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)
    application = _ask(pynvml.nvmlDeviceGetApplicationsClock, handle, pynvml.NVML_CLOCK_SM)
    return {
        "ecc_enabled": None if ecc is None else bool(ecc[0]),
        "mig_enabled": None if mig is None else bool(mig[0]),
        "power_limit_mw": _ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "max_sm_clock_mhz": maximum,
        "max_memory_clock_mhz": _ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "clock_policy": "unknown"
        if None in (maximum, application)
        else "default"
        if application == maximum
        else "locked",
    }


def other_processes(index: int) -> int | None:
    """How many compute processes besides one, presumably ours, use the device."""
    running = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, _handle(index))
    return None if running is None else max(len(running) - 1, 0)


def read(index: int) -> Reading:
    """Clock, power, temperature and the reasons why the clock is held back."""
    handle = _handle(index)
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return Reading(
        sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        power_mw=_ask(pynvml.nvmlDeviceGetPowerUsage, handle),
        temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        reasons=tuple(name for bit, name in _REASONS.items() if reasons & bit),
    )
