"""The text members of a sample: its WebVTT subtitles, the text in its JSON, and the fields that are added to its JSON.

Purpose: `read` and `words` return the text of a subtitle file. `cut` returns the part of it that belongs to a clip.
`text_of` returns the text in a JSON document. `with_fields` adds fields to the JSON member of a new sample.

Invariants:

* Cues keep the order of the file. Everything else (notes, styles, settings, tags) is left out of the text.
* A WebVTT file may have at most `TEXT_BYTES`.
* The text in a JSON document is a string, or the first string of a list of strings that is not empty. White space around
  it is removed. Null, empty strings and lists without any other string are no text.
* The new JSON member is the old object with the fields added or replaced. Its form is fixed, so equal input gives equal
  bytes.

Failure behaviour: a WebVTT file without the line `WEBVTT` at its beginning, or with an invalid time, raises
`CorruptionError`. A file that is too large raises `UnsupportedError`. A JSON member that cannot be parsed raises
`CorruptionError`. A JSON member that is not an object raises `UnsupportedError`. A text of another type, or of more than
`TEXT_BYTES`, raises `UnsupportedError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.json import parse_json
from headrace.dataio.shards.media.messages import TEXT_BYTES

# --- WebVTT

_TIME = r"(?:(\d{2,6}):)?([0-5]\d):([0-5]\d)\.(\d{3})"
_TIMING = re.compile(rf"{_TIME}[ \t]+-->[ \t]+{_TIME}(?:[ \t].*)?")
_TAG = re.compile(r"<[^<>\n]*>")


@dataclass(frozen=True, slots=True)
class Cue:
    """One subtitle. It is shown from `start` to `end`, in milliseconds."""

    start: int
    end: int
    text: str


def parse(text: str) -> list[Cue]:
    """Parse the cues of a WebVTT file."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not re.fullmatch(r"WEBVTT(?:[ \t].*)?", lines[0]):
        raise CorruptionError("not WebVTT: its first line is not WEBVTT")
    cues: list[Cue] = []
    rows = iter(lines)
    for line in rows:
        if "-->" in line:
            match = _TIMING.fullmatch(line.strip())
            if match is None:
                raise CorruptionError(f"not WebVTT: {line.strip()[:80]!r} is not a cue timing")
            body = []
            for body_line in rows:
                if not body_line.strip():
                    break
                body.append(body_line)
            cues.append(Cue(_milliseconds(match.groups()[:4]), _milliseconds(match.groups()[4:]), "\n".join(body)))
    return cues


def words(cues: list[Cue]) -> str:
    """Return the words of the cues as one text. Repeated adjacent lines (rolling captions) occur once."""
    plain_lines: list[str] = []
    for cue in cues:
        for line in cue.text.split("\n"):
            plain = " ".join(_TAG.sub("", line).split())
            if plain and (not plain_lines or plain_lines[-1] != plain):
                plain_lines.append(plain)
    return " ".join(plain_lines)


def cut(cues: list[Cue], start: int, end: int) -> str:
    """Return a WebVTT file with the cues in [start, end) milliseconds. Its times count from `start`."""
    parts = ["WEBVTT\n"]
    for cue in cues:
        if cue.start < end and cue.end > start:
            times = f"{_clock(max(cue.start, start) - start)} --> {_clock(min(cue.end, end) - start)}"
            parts.append(f"{times}\n{cue.text}\n")
    return "\n".join(parts)


def read(path: str) -> list[Cue]:
    """Read the cues of the file at `path`."""
    with open(path, "rb") as file:
        data = file.read(TEXT_BYTES + 1)
    if len(data) > TEXT_BYTES:
        raise UnsupportedError(f"the WebVTT file is larger than {limits.format_bytes(TEXT_BYTES)}")
    try:
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise CorruptionError("not UTF-8 text") from error


def _milliseconds(parts: tuple[str | None, ...]) -> int:
    hours, minutes, seconds, thousandths = (int(part or 0) for part in parts)
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + thousandths


def _clock(milliseconds: int) -> str:
    seconds, thousandths = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{thousandths:03}"


# --- JSON


def text_of(document: Mapping[str, object], field: str) -> str | None:
    """Return the text that a JSON document has under `field`, or None if it has none."""
    value = document.get(field)
    texts = value if isinstance(value, list) else [] if value is None else [value]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(texts):
        kinds = {list: "a list with other values than strings", bool: "true or false", dict: "an object"}
        raise UnsupportedError(f"{field!r} is {kinds.get(type(value), 'a number')}")
    text = next((stripped for one in strings if (stripped := one.strip())), None)
    if text is not None and len(_encoded(text)) > TEXT_BYTES:
        raise UnsupportedError(f"{field!r} is larger than {limits.format_bytes(TEXT_BYTES)}")
    return text


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a character
        raise CorruptionError(f"not JSON: {error}") from error


def with_fields(path: str | None, fields: Mapping[str, object], folder: str, name: str = "manifest") -> str:
    """Write a new JSON file in `folder` and return its path. It holds the object at `path`, if any, with `fields`."""
    target = Path(folder) / f"{name}.json"
    existing = {} if path is None else _read_object(Path(path))
    target.write_text(json.dumps({**existing, **fields}, ensure_ascii=False), "utf-8")
    return str(target)


def _read_object(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        data = file.read(limits.SAMPLE_JSON_BYTES + 1)
    try:
        parsed = parse_json(data, max_bytes=limits.SAMPLE_JSON_BYTES)
    except ValueError as error:
        raise CorruptionError(f"its .json is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UnsupportedError("the JSON of a sample must be an object")
    return parsed
