"""Decoding a whole model: what follows from the raw times, and the floor that reading the weights sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_kernel_lab.analysis.stats import per_call_ns, percentile, rate_per_s, speedup
from triton_kernel_lab.artifacts import Artifact

__all__ = ["cache_bytes", "complete", "differing", "read_ceiling", "weight_bytes"]

_BF16_BYTES = 2
_COMPILED = "torch_compile"


def read_ceiling(ceilings: Artifact) -> dict[str, int] | None:
    """The largest rung of the read ladder: its bytes, p50 in ns and bytes a second; None where none was measured."""
    rungs = [rung for rung in ceilings["ladders"] if rung["kind"] == "read"]
    if not rungs:
        return None
    rung = max(rungs, key=lambda each: int(each["bytes"]))
    p50_ns = percentile(sorted(rung["samples_ns"]), 50)
    return {"bytes": rung["bytes"], "p50_ns": p50_ns, "bytes_per_s": rate_per_s(rung["bytes"], p50_ns)}


def weight_bytes(model: Mapping[str, int], weights: str) -> int:
    """What a step reads of the model's weights, each once, in bytes.

    All but the embedding table, of which a step reads a row a sequence. Norms and
    head are bfloat16; the linears of attention and MLP are bfloat16, or 4 bits a
    weight and a bfloat16 scale for each ``int4_group`` columns of a row.

    Args:
        model: sizes as the artifact keeps them.
        weights: "bfloat16" or "int4".
    """
    hidden, inner = model["hidden"], model["heads"] * model["head_dim"]
    shared = model["kv_heads"] * model["head_dim"]
    # Rows and columns of the linears of a layer: q, k and v, o, gate and up, down.
    linears = [(inner + 2 * shared, hidden), (hidden, inner)]
    linears += [(2 * model["intermediate"], hidden), (hidden, model["intermediate"])]
    layer = sum(_linear_bytes(rows, columns, weights, model["int4_group"]) for rows, columns in linears)
    norms = (2 * model["layers"] + 1) * hidden * _BF16_BYTES
    return model["layers"] * layer + norms + model["vocab"] * hidden * _BF16_BYTES


def _linear_bytes(rows: int, columns: int, weights: str, group: int) -> int:
    if weights == "int4":
        return rows * columns // 2 + rows * -(-columns // group) * _BF16_BYTES
    return rows * columns * _BF16_BYTES


def cache_bytes(model: Mapping[str, int], batch: int, context: int) -> int:
    """The bfloat16 keys and values of ``context`` tokens of each sequence, in bytes."""
    return 2 * model["layers"] * batch * model["kv_heads"] * context * model["head_dim"] * _BF16_BYTES


def complete(cell: Mapping[str, Any], model: Mapping[str, int], ceiling: Mapping[str, int]) -> dict[str, Any]:
    """A measured cell with ``cache_bytes``, and with ``derived`` in each opponent: null in one without times."""
    cached = cache_bytes(model, cell["batch"], cell["context"])
    compiled = _fastest_compiled(cell["opponents"])
    opponents = [
        {
            **each,
            "derived": _derived(each, cell["batch"], cached + weight_bytes(model, each["weights"]), ceiling, compiled),
        }
        for each in cell["opponents"]
    ]
    return {**cell, "cache_bytes": cached, "opponents": opponents}


def _derived(
    opponent: Mapping[str, Any], batch: int, read: int, ceiling: Mapping[str, int], compiled_ns: int | None
) -> dict[str, int | float | None] | None:
    """p50s of the wall time a token and of the steps, in ns; throughput; the floor and the distance to it."""
    token_ns = _token_p50_ns(opponent)
    if token_ns is None:
        return None
    floor_ns = per_call_ns(read * 1_000_000_000, ceiling["bytes_per_s"])
    return {
        "token_p50_ns": token_ns,
        "step_p50_ns": percentile(sorted(ns for run in opponent["runs"] for ns in run["step_ns"]), 50),
        "tokens_per_s": rate_per_s(batch, token_ns),
        "read_bytes": read,
        "floor_ns": floor_ns,
        "over_floor_ratio": round(token_ns / floor_ns, 4),
        "speedup_over_torch_compile": speedup(compiled_ns, token_ns),
    }


def _token_p50_ns(opponent: Mapping[str, Any]) -> int | None:
    """The median repetition's wall time a step."""
    times = sorted(per_call_ns(run["wall_ns"], run["tokens"]) for run in opponent["runs"])
    return percentile(times, 50) if times else None


def _fastest_compiled(opponents: Sequence[Mapping[str, Any]]) -> int | None:
    times = [_token_p50_ns(each) for each in opponents if each["name"].startswith(_COMPILED)]
    return min((ns for ns in times if ns is not None), default=None)


def differing(artifact: Artifact, ceiling: Mapping[str, int] | None) -> Iterator[str]:
    """``JSON path: expected ..., found ...`` for each figure that the raw times and the read ceiling do not give."""
    if artifact["status"] != "measured":
        return
    if ceiling is None or artifact["read_ceiling"] != ceiling:
        yield f"$.read_ceiling: expected {ceiling}, found {artifact['read_ceiling']}"
        return
    for index, cell in enumerate(artifact["cells"]):
        expected = complete(cell, artifact["model"], ceiling)
        if cell["cache_bytes"] != expected["cache_bytes"]:
            yield f"$.cells[{index}].cache_bytes: expected {expected['cache_bytes']}, found {cell['cache_bytes']}"
        for number, (found, wanted) in enumerate(zip(cell["opponents"], expected["opponents"], strict=True)):
            if found["derived"] != wanted["derived"]:
                where = f"$.cells[{index}].opponents[{number}].derived"
                yield f"{where}: expected {wanted['derived']}, found {found['derived']}"
            if (profile := found.get("profile")) and (most := _most_ns(profile)) < _busy_ns(profile):
                where = f"$.cells[{index}].opponents[{number}].profile.kernels"
                yield f"{where}: expected at most {most} ns together, found {_busy_ns(profile)}"


def _busy_ns(profile: Mapping[str, Any]) -> int:
    return sum(int(kernel["ns"]) for kernel in profile["kernels"])


def _most_ns(profile: Mapping[str, Any]) -> int:
    """What kernels can take of a step: neither longer than it, nor than each of them lasts."""
    return min(int(profile["span_ns"]), int(profile["kernel_ns"]))
