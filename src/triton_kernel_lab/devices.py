"""Which GPU a process and all that it starts work on: one, chosen before CUDA starts. Without torch."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

__all__ = ["VARIABLE", "DeviceError", "ask", "asked", "pin"]

VARIABLE = "TKL_DEVICE"
"""The environment variable that chooses where no option can be given, as for the stages that DVC runs."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")


class DeviceError(ValueError):
    """The device that was asked for cannot be had; one sentence says why."""


def ask(name: str) -> None:
    """Choose a device for this process and its children, ``cuda`` or ``cuda:N``; ``pin`` looks for it.

    Raises:
        DeviceError: it is no name of a CUDA device.
    """
    _number(name)
    os.environ[VARIABLE] = name


def asked() -> str | None:
    """The device that an option or the environment asks for."""
    return os.environ.get(VARIABLE) or None


def pin() -> str | None:
    """Leave one GPU visible to this process and to all that it starts, and say which.

    It is the one asked for, else the first. N counts the visible GPUs in the
    order of nvidia-smi; afterwards the one that is left is cuda:0.

    Returns:
        The GPU's name, number, UUID and place on the bus; None where no device is
        asked for and the driver names none, or CUDA has chosen already.

    Raises:
        DeviceError: the device asked for is not there, or CUDA has started.
    """
    name = asked()
    number = _number(name) if name else 0
    if _started():
        if name:
            raise DeviceError(f"device {name}: expected to be chosen before CUDA starts, found it started.")
        return None
    found = _gpus()
    if not name and not found:
        return None
    if number >= len(found):
        known = f"one of {', '.join(f'cuda:{index}' for index in range(len(found)))}" if found else "a CUDA device"
        raise DeviceError(f"device {name}: expected {known}, found none of that name.")
    uuid, said = found[number]
    if len(found) > 1:
        # By UUID, because CUDA's own order need not be that of nvidia-smi.
        os.environ[_VISIBLE] = uuid
    if name:
        # A child of this process sees one GPU, and may ask again.
        os.environ[VARIABLE] = "cuda:0"
    return said


def _number(name: str) -> int:
    matched = _NAME.fullmatch(name)
    if matched is None:
        raise DeviceError(f"device: expected cuda or cuda:N, such as cuda:1, got {name!r}.")
    return int(matched[1] or 0)


def _started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _gpus() -> list[tuple[str, str]]:
    """UUID and description of each visible GPU; none where there is no driver to ask."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        known = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        return [(uuid, _describe(pynvml, uuid, known.get(uuid))) for uuid in _visible(list(known))]
    # Without the driver's library, or with a driver that does not answer, there is no device.
    except pynvml.NVMLError:
        return []


def _visible(uuids: list[str]) -> list[str]:
    """Those that the environment leaves; as CUDA does, up to the first entry that names none."""
    named = os.environ.get(_VISIBLE)
    if named is None:
        return uuids
    left: list[str] = []
    for entry in (each.strip() for each in named.split(",")):
        if entry.isascii() and entry.isdigit() and int(entry) < len(uuids):
            left.append(uuids[int(entry)])
        elif entry.startswith("GPU-") and len(matching := [uuid for uuid in uuids if uuid.startswith(entry)]) == 1:
            left += matching
        elif entry.startswith("MIG-"):
            left.append(entry)
        else:
            break
    return left


def _describe(nvml: Any, uuid: str, handle: Any) -> str:
    if handle is None:
        return f"part of a GPU ({uuid})"
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    place = bus.decode() if isinstance(bus, bytes) else bus
    return f"{nvml.nvmlDeviceGetName(handle)}, number {nvml.nvmlDeviceGetIndex(handle)} of this host ({uuid}, {place})"
