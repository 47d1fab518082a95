"""Adding fields to the JSON member of a sample that is being made.

Invariant: the new member is the old object with the fields added or replaced, in a fixed form, so equal input gives equal bytes.
Failure behaviour: `CorruptionError` or `UnsupportedError` for a member that is not a JSON object.
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
    """What a group becomes, or one of the clips that it becomes: what is added to the key, and the files."""

    suffix: str
    files: Request


def with_fields(path: str | None, fields: Mapping[str, object], folder: str, name: str = "manifest") -> str:
    """The path of a new JSON file in `folder`: the object at `path`, if any, with `fields`."""
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
