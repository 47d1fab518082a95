"""JSON from outside, without the liberties that Python's parser takes.

Invariants: what `loads` returns holds no NaN, no infinity (not from `1e999` either), no integer of more than
`limits.JSON_NUMBER_DIGITS` digits, nothing nested deeper than `limits.JSON_DEPTH` and, where asked, no name twice in one object.
Depth is found before anything is built, so memory is that of the text's values.
Failure behaviour: `ValueError` saying what is wrong and, where the parser knows, at which offset; the caller names the document.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from headrace.dataio.core import limits

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)  # an open string ends with the text: linear


def loads(data: bytes, *, max_bytes: int = limits.JSON_DOCUMENT_BYTES, unique_names: bool = False) -> Any:
    """The value of a UTF-8 document (a byte order mark is allowed)."""
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {limits.format_bytes(max_bytes)}")
    _check_depth(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at offset {error.start}") from error
    pairs = _unique if unique_names else None
    return json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_integer, object_pairs_hook=pairs)


def _check_depth(data: bytes) -> None:
    depth = 0
    for match in _BRACKETS.finditer(data):
        character = data[match.start()]
        if character in b"[{":
            depth += 1
            if depth > limits.JSON_DEPTH:
                raise ValueError(f"nested deeper than {limits.JSON_DEPTH} at offset {match.start()}")
        elif character in b"]}":
            depth -= 1


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > limits.JSON_NUMBER_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} occurs twice in one object")
    return found
