"""JSON documents: a strict parser for untrusted text, and a digest inside the document (`seal`).

Purpose: `dataset.json`, version documents and the documents of a checkpoint repository name all other objects. No
object has the digests of these documents, so each document has its own BLAKE3 digest as its last entry.

Invariants:

* `parse_json` refuses NaN, infinity (`1e999` included), an integer of more than `limits.JSON_NUMBER_DIGITS` digits, and
  nesting deeper than `limits.JSON_DEPTH`. With `unique_names` it also refuses a name that occurs twice in one object.
* Depth is checked before any value is built, so memory is bounded by the text's own values.
* A sealed document is ordinary JSON. The digest covers every byte before its own entry, so fields may be added later.

Failure behaviour: `parse_json` raises `ValueError` with the reason and, if known, the offset. The caller adds the
document's name. `unseal` raises `CorruptionError` with the document's name, also when the digest is missing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import blake3

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)  # an open string ends with the text: linear time
_SEAL = re.compile(rb',\n "digest": "([0-9a-f]{64})"\n\}\n\Z')
_END = b"\n}\n"


def parse_json(data: bytes, *, max_bytes: int = limits.JSON_DOCUMENT_BYTES, unique_names: bool = False) -> Any:
    """Parse a UTF-8 JSON document. A byte order mark is allowed.

    Args:
        data: The document.
        max_bytes: A longer document is refused.
        unique_names: Refuse an object that has a name twice.

    Returns:
        The value, built from dict, list, str, int, float, bool and None.

    Raises:
        ValueError: The document is malformed or exceeds a limit.

    Example:
        >>> parse_json(b'{"a": [1, 2]}')
        {'a': [1, 2]}
    """
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {limits.format_bytes(max_bytes)}")
    _check_depth(data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at offset {error.start}") from error
    pairs = _unique_names if unique_names else None
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_float, parse_int=_integer, object_pairs_hook=pairs
    )


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


def _refuse_constant(name: str) -> Any:
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


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} occurs twice in one object")
    return mapping


def seal(document: bytes) -> bytes:
    """Add the digest to `document`, an indented JSON object with at least one entry. Its last line must be `}`."""
    body = document.removesuffix(_END)
    if body == document:
        raise ValueError("only an indented JSON object can be sealed")
    return body + b',\n "digest": "' + blake3.blake3(body).hexdigest().encode() + b'"\n}\n'


def is_sealed(data: bytes) -> bool:
    """Whether `data` ends with a digest, valid or not."""
    return _SEAL.search(data) is not None


def digest_of(data: bytes) -> str:
    """The digest at the end of a sealed document, in hexadecimal digits; "" if the document has none."""
    match = _SEAL.search(data)
    return "" if match is None else match[1].decode()


def unseal(data: bytes, name: str) -> bytes:
    """Check the digest, and return the document without it."""
    match = _SEAL.search(data)
    if match is None:
        raise CorruptionError(f"{name} does not end in its digest", hint="the document was truncated or edited")
    body = data[: match.start()]
    if blake3.blake3(body).hexdigest().encode() != match[1]:
        raise CorruptionError(
            f"{name} is damaged: its BLAKE3 digest does not match", hint="the document was changed after it was written"
        )
    return body + _END
