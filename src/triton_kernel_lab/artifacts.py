"""The only reader and writer of artifacts.

Every artifact is JSON that a closed schema in ``schemas/`` describes. Both
directions check it; neither lets NaN, infinity, negative zero (equal artifacts
have equal bytes) or a duplicate key through. A leaf: this module imports
nothing of the project.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

Artifact = dict[str, Any]
_MAX_DEPTH = 32
_WIDTH = 120
_BASE = jsonschema.Draft202012Validator
# The digests of bytes that were found sound: a command reads an artifact many times, and checking takes longest.
_sound: set[bytes] = set()
_encode_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ": ")).encode

__all__ = [
    "Artifact",
    "ArtifactError",
    "dumps",
    "input_record",
    "known_kinds",
    "parse",
    "read",
    "sha256_file",
    "validate",
    "write",
    "write_text",
]


class ArtifactError(ValueError):
    """An artifact that cannot be believed; the message is one sentence."""


def _schema_dir() -> Path:
    packaged = Path(__file__).parent / "schemas"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "schemas"


@functools.cache
def _registry() -> Registry[Any]:
    # An explicit registry: a $ref outside it is an error, never a download.
    schemas = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(_schema_dir().glob("*.json")))
    return Registry().with_resources((schema["$id"], Resource.from_contents(schema)) for schema in schemas)


def _whole_pattern(checker: Any, pattern: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    # In Python `$` also matches before a final newline; in JSON Schema it does not.
    strict = pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern
    if isinstance(value, str) and not re.search(strict, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


@functools.cache
def _definition(reference: str) -> Any:
    """What ``file.json#/path`` refers to: each schema names the file, its own too."""
    name, _, pointer = reference.partition("#/")
    found = _registry().contents(name)
    for part in pointer.split("/"):
        found = found[part]
    return found


def _reference(checker: Any, reference: str, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    # Resolved once for each reference. The library resolves anew at each value, half of all checking.
    yield from checker.descend(value, _definition(reference))


def _is_integer(_checker: Any, value: Any) -> bool:
    # JSON Schema calls 1.0 an integer; a count or a nanosecond has one spelling here.
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def _least(reference: Any) -> int | None:
    """The bound behind a reference to a bounded integer of common.json; None for any other schema."""
    definitions = _registry().contents("common.json")["$defs"]
    schema = definitions.get(str(reference).removeprefix("common.json#/$defs/"), {})
    bounded = schema.keys() == {"type", "minimum"} and schema["type"] == "integer"
    return int(schema["minimum"]) if bounded else None


def _items(checker: Any, items: Any, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    # Raw samples are looked at as a whole: one by one, 100,000 of them take jsonschema eight seconds.
    least = _least(items.get("$ref")) if isinstance(items, dict) else None
    if least is not None and isinstance(value, list) and all(type(item) is int and item >= least for item in value):
        return
    yield from _BASE.VALIDATORS["items"](checker, items, value, schema)


@functools.cache
def _validator(kind: str) -> Any:
    types = _BASE.TYPE_CHECKER.redefine("integer", _is_integer)
    keywords = {"$ref": _reference, "pattern": _whole_pattern, "items": _items}
    # The stubs give extend no types.
    strict = jsonschema.validators.extend(_BASE, keywords, type_checker=types)  # type: ignore[no-untyped-call]
    return strict(_registry().contents(f"{kind}.json"), registry=_registry())


@functools.cache
def known_kinds() -> frozenset[str]:
    """The artifact kinds that have a schema."""
    return frozenset(path.stem for path in _schema_dir().glob("*.json")) - {"common"}


def _json_path(parts: Iterable[str | int]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


class _Repeated(dict[str, Any]):
    """An object in which ``key`` occurs twice; kept until its JSON path is known."""

    key: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) == len(pairs):
        return seen
    names = [key for key, _ in pairs]
    repeated = _Repeated(seen)
    repeated.key = next(key for key in names if names.count(key) > 1)
    return repeated


def _fault(value: Any, depth: int) -> str | None:
    """What no schema can see: NaN, for one, satisfies every bound."""
    if depth > _MAX_DEPTH:
        return f"expected at most {_MAX_DEPTH} levels, found more"
    if isinstance(value, _Repeated):
        return f"expected each key once, found {value.key!r} twice"
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number, found NaN or infinity"
    if isinstance(value, float) and value == 0 and math.copysign(1, value) < 0:
        return "expected 0.0, found -0.0"
    return None


def _check_values(payload: Any, where: str) -> None:
    stack: list[tuple[tuple[str | int, ...], Any]] = [((), payload)]
    while stack:
        path, value = stack.pop()
        if (fault := _fault(value, len(path))) is not None:
            raise ArtifactError(f"{where}: {_json_path(path)}: {fault}.")
        children: Iterable[tuple[str | int, Any]] = ()
        if isinstance(value, dict):
            children = value.items()
        elif isinstance(value, list):
            children = enumerate(value)
        # Raw samples are hundreds of thousands of integers, none of which can be at fault.
        stack += [((*path, key), child) for key, child in children if isinstance(child, float | dict | list)][::-1]


def _check_schema(payload: Any, kind: str, where: str) -> None:
    errors = list(_validator(kind).iter_errors(payload))
    # Another version differs in many places; only the version explains them.
    version = [error for error in errors if list(error.absolute_path) == ["schema_version"]]
    error = jsonschema.exceptions.best_match(version or errors)
    if error is None:
        return
    message = error.message
    if error.validator == "const":
        message = f"expected {error.validator_value!r}, found {error.instance!r}"
    message = message if len(message) <= 240 else message[:237] + "..."
    raise ArtifactError(f"{where}: {_json_path(error.absolute_path)}: {message} (schema {kind}.json).")


def _known(kind: Any, where: str) -> str:
    if not isinstance(kind, str) or kind not in known_kinds():
        raise ArtifactError(f"{where}: $.artifact_kind: expected one of {sorted(known_kinds())}, found {kind!r}.")
    return kind


def validate(payload: Any, kind: str, where: str) -> None:
    """Raise ArtifactError unless ``payload`` is a sound artifact of ``kind``."""
    _known(kind, where)
    if not isinstance(payload, dict):
        raise ArtifactError(f"{where}: $: expected an object of kind {kind}, found {type(payload).__name__}.")
    _check_values(payload, where)
    _check_schema(payload, kind, where)


def parse(data: bytes, where: str, kind: str | None = None) -> Artifact:
    """Parse and check an artifact.

    Args:
        data: the bytes of the file; UTF-8 without a byte-order mark.
        where: the name that messages give to the source.
        kind: the kind that the caller expects; None takes any known kind.

    Raises:
        ArtifactError: when the bytes are not JSON, not a known kind or do not
            satisfy its schema.
    """
    digest = hashlib.sha256(data).digest()
    again = digest in _sound
    try:
        payload = json.loads(data.decode("utf-8"), object_pairs_hook=None if again else _object)
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{where}: $: expected UTF-8, found byte {error.object[error.start]:#04x}.") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ArtifactError(f"{where}: $: expected JSON, found an error at {at}: {error.msg}.") from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of thousands of digits.
        raise ArtifactError(f"{where}: $: expected an artifact, found JSON out of bounds: {error}.") from error
    if not isinstance(payload, dict):
        raise ArtifactError(f"{where}: $: expected an object, found {type(payload).__name__}.")
    if not again:
        _check_values(payload, where)
    found = _known(payload.get("artifact_kind"), where)
    if kind is not None and found != kind:
        raise ArtifactError(f"{where}: $.artifact_kind: expected {kind!r}, found {found!r}.")
    if not again:
        _check_schema(payload, found, where)
        _sound.add(digest)
    return payload


def read(path: Path | str, kind: str | None = None, *, mend: str = "") -> Artifact:
    """Read and check an artifact file; ``mend`` names the command that makes it."""
    hint = f" Run `{mend}`." if mend else ""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}.{hint}") from error
    try:
        return parse(data, str(path), kind)
    except ArtifactError as error:
        raise ArtifactError(f"{error}{hint}") from error


def _encode(value: Any, indent: str) -> str:
    """JSON with sorted keys; a vector or an object of scalars takes one line, and so does whatever fits one."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        rows = [f"{json.dumps(key)}: {_encode(value[key], inner)}" for key in sorted(value)]
        return _fold(rows, "{}", indent, not any(isinstance(item, dict | list | tuple) for item in value.values()))
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return _fold([_encode(item, inner) for item in value], "[]", indent, False)
    return _encode_plain(value)


def _fold(rows: list[str], ends: str, indent: str, flat: bool) -> str:
    """Rows between two brackets: on one line where they are ``flat`` or fit ``_WIDTH`` columns, or on a line each."""
    # With a line for each scalar a twelfth of the tracked bytes was indentation.
    fits = len(indent) + sum(len(row) + 2 for row in rows) <= _WIDTH and not any("\n" in row for row in rows)
    if flat or fits:
        return ends[0] + ", ".join(rows) + ends[1]
    return f"{ends[0]}\n" + ",\n".join(f"{indent} {row}" for row in rows) + f"\n{indent}{ends[1]}"


def dumps(payload: Mapping[str, Any]) -> str:
    """The one text form of an artifact: sorted keys, LF, a final newline."""
    return _encode(payload, "") + "\n"


def write_text(path: Path | str, text: str) -> None:
    """Replace a file in one step, so that a reader never sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def write(path: Path | str, payload: Artifact) -> None:
    """Check an artifact against its schema and write it atomically."""
    validate(payload, str(payload.get("artifact_kind")), str(path))
    try:
        write_text(path, dumps(payload))
    except (OSError, UnicodeEncodeError) as error:
        raise ArtifactError(f"{path}: cannot be written: {error}.") from error


def sha256_file(path: Path | str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def input_record(root: Path, path: Path | str) -> dict[str, str]:
    """What an artifact says of a file that it was made from."""
    return {"path": Path(path).resolve().relative_to(root.resolve()).as_posix(), "sha256": sha256_file(path)}
