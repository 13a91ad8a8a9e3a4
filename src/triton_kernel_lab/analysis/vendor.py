"""What the vendor's datasheets promise, by the name that the driver gives a GPU.

Matched by the exact name: a "MIG 1g", "NVL", "PCIe" or "Laptop GPU" of the
same model is another device. Rates are dense, without structured sparsity;
what a datasheet does not say plainly is left out.
"""

from __future__ import annotations

from typing import Any

__all__ = ["vendor_spec"]

_HOPPER_FLOP = {
    "bfloat16": 989_400_000_000_000,
    "float16": 989_400_000_000_000,
    "tf32": 494_700_000_000_000,
    "float32": 67_000_000_000_000,
}

_SPECS: dict[str, dict[str, Any]] = {
    "NVIDIA H200": {
        "source": "NVIDIA H200 Tensor Core GPU datasheet, H200 SXM",
        "memory_bytes_per_s": 4_800_000_000_000,
        "flop_per_s": _HOPPER_FLOP,
    },
    "NVIDIA H100 80GB HBM3": {
        "source": "NVIDIA H100 Tensor Core GPU datasheet, H100 SXM",
        "memory_bytes_per_s": 3_350_000_000_000,
        "flop_per_s": _HOPPER_FLOP,
    },
    "NVIDIA A100-SXM4-80GB": {
        "source": "NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM",
        "memory_bytes_per_s": 2_039_000_000_000,
        "flop_per_s": {
            "bfloat16": 312_000_000_000_000,
            "float16": 312_000_000_000_000,
            "tf32": 156_000_000_000_000,
            "float32": 19_500_000_000_000,
        },
    },
    "NVIDIA GeForce RTX 5070 Ti": {
        "source": "NVIDIA GeForce RTX 5070 Family product page, RTX 5070 Ti",
        "memory_bytes_per_s": 896_000_000_000,
        "flop_per_s": {},
    },
}


def vendor_spec(gpu_name: str) -> dict[str, Any] | None:
    """The datasheet ceilings of a GPU, or None for one that is not listed.

    Returns:
        ``{source, memory_bytes_per_s, flop_per_s: {unit: FLOP/s}}``, integers.
    """
    spec = _SPECS.get(gpu_name)
    return None if spec is None else {**spec, "flop_per_s": dict(spec["flop_per_s"])}
