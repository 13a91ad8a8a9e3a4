"""Made-up codegen audits of a kernel that has two launches."""

from __future__ import annotations

import copy
from typing import Any

from triton_kernel_lab.artifacts import Artifact

SHA256 = "0" * 64


def launch(target: str = "sm_80", **changes: Any) -> dict[str, Any]:
    code = {
        "registers": 32,
        "stack_bytes": 0,
        "local_bytes": 0,
        "local_loads": 0,
        "local_stores": 0,
        "shared_bytes": 1024,
        "global_loads": {"128": 4},
        "global_stores": {"128": 2},
        "tensor_core": {"HMMA": 16},
        "async_copies": {},
        "instructions": 200,
        "elements_per_thread": 8.0,
        "hot_loop": {"whole_kernel": False, "instructions": 40, "load_bytes": 64, "instructions_per_element": 1.25},
        "occupancy": {"blocks": 8, "warps": 64, "ratio": 1.0, "limited_by": ["warps"]},
        "ptx_sha256": SHA256,
        "cubin_sha256": SHA256,
    }
    found = {
        "target": target,
        "function": "_kernel",
        "calls": ["default 8x128 float16"],
        "options": {"num_warps": 8},
        "signature": {"x_ptr": "*fp16:16"},
        "constants": {"BLOCK": 128},
        "status": "ok",
        "reason": None,
        "code": code,
    }
    return found | changes


def made(*launches: dict[str, Any]) -> Artifact:
    """An audit of two launches, one for each of two targets, or of the given ones."""
    return {
        "artifact_kind": "codegen",
        "schema_version": 2,
        "claim_kind": "synthetic",
        "producer": {"package": "triton-kernel-lab", "version": "0", "source_sha256": SHA256},
        "inputs": [],
        "kernel": "one",
        "triton": "3.7.1",
        "tools": {"ptxas": "12.8", "ptxas_blackwell": "13.1", "nvdisasm": "13.1"},
        "targets": ["sm_80", "sm_90", "sm_100", "sm_120"],
        "launches": list(launches) or [launch("sm_80"), launch("sm_90")],
    }


def spoilt(audit: Artifact, code: dict[str, Any] | None = None, **changes: Any) -> Artifact:
    """A copy whose first launch has some fields of its code, or of itself, changed."""
    found = copy.deepcopy(audit)
    first = found["launches"][0]
    first.update(changes)
    if code is None:
        first["code"] = None
    else:
        first["code"].update(code)
    return found
