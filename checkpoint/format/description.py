"""A description: what belongs to the start of a run, such as its configuration and the version of its code.

It is one JSON object, stored under the digest of its bytes. Steps with equal descriptions name the same object.
Invariant: equal values give equal bytes: names are sorted. A description that `decode` returned has the digest that its
key and the manifest name.
Failure behaviour: `encode` raises `UsageError`, which names the entry. `decode` raises `CorruptionError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.format.chunking import digest
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import KIB, format_bytes

MAX_BYTES = 256 * KIB
"""The maximum size of a description, in bytes."""
MAX_DEPTH = 32
VERSION = 1
_INT64 = 1 << 63


def encode(sections: Mapping[str, object]) -> bytes:
    """The bytes of the description with these sections; `UsageError` if they cannot be stored."""
    plain = {"version": VERSION, **{name: plain_json(value, name, 0) for name, value in sections.items()}}
    data = json.dumps(plain, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"the description has {format_bytes(len(data))}, at most {format_bytes(MAX_BYTES)} can be stored",
            hint="store large files with put_artifact",
        )
    return data


def plain_json(value: object, path: str, depth: int) -> object:
    """The value as dicts, lists, numbers, texts, booleans and None. Tuples become lists, and keys become text."""
    if depth > MAX_DEPTH:
        raise UsageError(f"{path:.200}: nested deeper than {MAX_DEPTH}", hint="does the value contain itself?")
    if isinstance(value, Mapping):
        return {_text(key, path): plain_json(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return _text(value, path)
    raise UsageError(
        f"{path:.200}: a value of type {type(value).__name__} cannot be part of a description",
        hint="give dicts, lists, numbers, texts, booleans and None; for other objects, give str(value)",
    )


def _text(value: object, path: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UsageError(f"{path:.200}: {value!r:.60} is not a text", hint="the names of entries must be text")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{path:.200}: the text is not valid Unicode") from None
    return str(value)


def name_of(data: bytes) -> str:
    """The digest that names the description with these bytes."""
    return digest(data).hex()


def decode(data: bytes, name: str, key: str) -> dict[str, Any]:
    """The sections of the description in the object `key`, without its version."""
    if len(data) > MAX_BYTES or name_of(data) != name:
        raise CorruptionError(f"{key} is damaged: its digest differs from its name", hint="run `headrace ckpt check`")
    try:
        sections = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{key} is not a readable description: {error}") from None
    if not isinstance(sections, dict):
        raise CorruptionError(f"{key} is not a readable description")
    return {name: value for name, value in sections.items() if name != "version"}
