"""The audit of one kernel for one target: each launch compiled once, and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton_kernel_lab import routing
from triton_kernel_lab.cases._base import load
from triton_kernel_lab.codegen.binaries import tool_versions
from triton_kernel_lab.codegen.compiling import compile_launch, describe, reason
from triton_kernel_lab.codegen.launches import Call, Launch, calls, plan

__all__ = ["Record", "audit", "tool_versions"]

Record = dict[str, Any]


def audit(kernel: str, target: str) -> list[Record]:
    """The records of a codegen artifact for one kernel and target, in the order of the first calls.

    Calls that lead to the same binary share a record, which names them all.
    """
    records: dict[Any, Record] = {}
    compiled: dict[Any, tuple[Any, Launch]] = {}
    for call in calls(load(kernel)):
        for key, record, found in _of_call(call, target):
            records.setdefault(key, record)["calls"].append(call.label)
            if found:
                compiled.setdefault(key, found)
    for key, code in zip(compiled, describe(list(compiled.values()), target), strict=True):
        records[key]["code"] = code
    return list(records.values())


def _of_call(call: Call, target: str) -> Iterator[tuple[Any, Record, tuple[Any, Launch] | None]]:
    """For each launch what tells its binary from others, its record, and the compiled kernel."""
    try:
        launches = plan(call, target)
    except routing.FallbackError as error:
        yield str(error), _failed(target, None, {}, {}, str(error)), None
        return
    for launch in launches:
        name = launch.kernel.fn.__name__
        try:
            kernel = compile_launch(launch, target)
        # Each layer of the compiler raises errors of its own kind, some plain RuntimeError.
        except Exception as error:
            record = _failed(target, name, launch.constants, launch.options, reason(error))
            yield repr((name, record)), record, None
        else:
            yield (name, kernel.hash), _compiled(target, name, launch, kernel), (kernel, launch)


def _compiled(target: str, function: str, launch: Launch, kernel: Any) -> Record:
    kinds = {"signature": _signature(kernel), "constants": _constants(kernel)}
    return _head(target, function, launch.options) | kinds | {"status": "ok", "reason": None, "code": None}


def _head(target: str, function: str | None, options: Any) -> Record:
    return {"target": target, "function": function, "options": dict(options), "calls": []}


def _failed(target: str, function: str | None, constants: Any, options: Any, why: str) -> Record:
    plain = {name: _plain(value) for name, value in constants.items()}
    head = _head(target, function, options)
    return head | {"signature": {}, "constants": plain, "status": "failed", "reason": why, "code": None}


def _signature(compiled: Any) -> dict[str, str]:
    """The type of each argument that is passed, ``:16`` where a multiple of 16 may be assumed."""
    source = compiled.src
    names = list(source.signature)
    even = {names[path[0]] for path, attributes in source.attrs.items() if ["tt.divisibility", 16] in attributes}
    passed = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
    return {name: f"{kind}:16" if name in even else str(kind) for name, kind in passed.items()}


def _constants(compiled: Any) -> Record:
    """The compile-time constants, arguments that are 1 among them."""
    names = list(compiled.src.signature)
    return {names[path[0]]: _plain(value) for path, value in compiled.src.constants.items()}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
