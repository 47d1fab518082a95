"""Adds fields to the JSON member of a new sample.

Invariant: the new member is the old object with the fields added or replaced. Its form is fixed, so equal input gives
equal bytes.
Failure behaviour: a member that is not a JSON object raises `CorruptionError` or `UnsupportedError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.json import parse_json
from headrace.dataio.shards.media.facts import Request


class Sample(NamedTuple):
    """A sample made from a group: the suffix of its key, and its files. It is the whole group or one clip."""

    suffix: str
    files: Request


def with_fields(path: str | None, fields: Mapping[str, object], folder: str, name: str = "manifest") -> str:
    """Write a new JSON file in `folder` and return its path. It holds the object at `path`, if any, with `fields`."""
    target = Path(folder) / f"{name}.json"
    found = {} if path is None else _object(Path(path))
    target.write_text(json.dumps({**found, **fields}, ensure_ascii=False), "utf-8")
    return str(target)


def _object(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        data = file.read(limits.SAMPLE_JSON_BYTES + 1)
    try:
        found = parse_json(data, max_bytes=limits.SAMPLE_JSON_BYTES)
    except ValueError as error:
        raise CorruptionError(f"its .json is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedError("the JSON of a sample must be an object")
    return found
