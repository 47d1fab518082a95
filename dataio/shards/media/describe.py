"""Reads the files of one sample and collects all facts for its index row.

Purpose: the work of a probe worker. It hashes each file, probes the media files, and takes text and fields.

Invariants:

* The loaders' video stream is the largest in the sample's media files. The audio comes from the same file if that has
  any, and otherwise from the first other member that has.
* Images are probed only if there is no media file. The largest is then the sample's one frame.
* `<key>.txt` is the text. Without it, the text comes from `<key>.vtt`.
* The fields are the top-level values of `<key>.json` that are floats, 64-bit integers, booleans, null or short strings.
  All other values stay only in the JSON member.

Failure behaviour: `Failure` names the file and the reason. One bad member rejects the whole sample.
"""

from __future__ import annotations

import json
import os
from typing import Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.json import parse_json
from headrace.dataio.shards.media import images, vtt
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS, MEDIA_EXTENSIONS, not_read, passed_over
from headrace.dataio.shards.media.facts import TEXT_BYTES, Answer, Described, Failure, FileFact, Request
from headrace.dataio.shards.media.heads import with_head
from headrace.dataio.shards.media.probe import Probe, probe
from headrace.dataio.shards.pieces import Hasher, size_for
from headrace.dataio.shards.sample import AudioInfo, VideoInfo

PROMOTED_STRING = 1024
"""A string in a sample's JSON becomes a field of the index if it has at most this many characters."""
_INTEGERS = 1 << 63
_READ = 1 * limits.MIB


def describe(files: Request) -> Answer:
    """Read the files of one sample and describe it."""
    at = ""
    facts, probes = [], list[Probe]()
    text, said, fields = None, None, dict[str, Any]()
    extensions = [ext for ext, _ in files]
    refused = not_read(extensions)
    if refused is not None:
        return Failure(dict(files)[refused[0]], UnsupportedError.code, refused[1])
    try:
        for ext, at in files:
            facts.append(_fact(ext, at))
            if ext in MEDIA_EXTENSIONS:
                probes.append(probe(at, ext=ext))
                facts[-1] = with_head(facts[-1], probes[-1])
            elif ext == "txt":
                text = _text(at)
            elif ext == "vtt":
                said = vtt.words(vtt.read(at)) or None
            elif ext == "json":
                fields = _fields(at)
        for ext, at in files if not probes else ():
            if ext in IMAGE_EXTENSIONS:
                probes.append(Probe("image", 0.0, images.probe(_bytes(at, images.IMAGE_BYTES), ext), None))
    except HeadraceError as error:
        return Failure(at, error.code, error.message)
    except OSError as error:
        return Failure(at, CorruptionError.code, f"cannot be read: {error.strerror or error}")
    except MemoryError:
        most = limits.format_bytes(limits.PROBE_MEMORY_BYTES)
        return Failure(at, CapacityError.code, f"reading it takes more than {most} of memory")
    video, audio, duration = _choose(probes)
    return Described(
        files=tuple(facts),
        duration=duration,
        video=video,
        audio=audio,
        text=text if text is not None else said,
        fields=json.dumps(fields, ensure_ascii=False),
        notes=(
            *(note for p in probes for note in p.notes),
            *(f"its .{ext} file is kept, and not read as media" for ext in passed_over(extensions)),
            *_not_chosen(files, probes, video),
        ),
    )


def _not_chosen(files: Request, probes: list[Probe], chosen: VideoInfo | None) -> list[str]:
    """Return a note for each further video of a sample. A sample has one video, and the others are not used."""
    media = [ext for ext, _ in files if ext in MEDIA_EXTENSIONS]
    others = [ext for ext, p in zip(media, probes, strict=False) if p.video is not None and p.video is not chosen]
    return [f"its .{ext} file is kept, and not used: a sample has one video, the largest" for ext in others]


def _choose(probes: list[Probe]) -> tuple[VideoInfo | None, AudioInfo | None, float]:
    def area(p: Probe) -> int:
        return p.video.width * p.video.height if p.video else 0

    if not probes:  # only in an indexed shard; `pack` requires media
        return None, None, 0.0
    best = max(probes, key=area)
    audio = best.audio or next((p.audio for p in probes if p.audio), None)
    return best.video, audio, best.duration


def _fact(ext: str, path: str) -> FileFact:
    with open(path, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        hasher = Hasher(size_for(info.st_size))
        while chunk := file.read(_READ):
            hasher.update(chunk)
    return FileFact(ext, path, info.st_size, info.st_mtime_ns, hasher.whole(), hasher.pieces())


def _bytes(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UnsupportedError(f"larger than {limits.format_bytes(most)}")
    return data


def _text(path: str) -> str:
    try:
        return _bytes(path, TEXT_BYTES).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"not UTF-8 text, at offset {error.start}") from error


def _fields(path: str) -> dict[str, Any]:
    data = _bytes(path, limits.SAMPLE_JSON_BYTES)
    try:
        found = parse_json(data)
        promoted = {name: v for name, v in found.items() if _is_promoted(v)} if isinstance(found, dict) else None
        json.dumps(promoted, ensure_ascii=False).encode()
    except ValueError as error:
        raise CorruptionError(f"not JSON: {error}") from error
    if promoted is None:
        raise UnsupportedError("the JSON of a sample must be an object")
    return promoted


def _is_promoted(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= PROMOTED_STRING
    if isinstance(value, int):
        return -_INTEGERS <= value < _INTEGERS  # Parquet and SQL can hold these
    return value is None or isinstance(value, float)
