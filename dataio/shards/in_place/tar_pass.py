"""One pass over one tar: it hashes the members as it reads them, and describes the samples.

Invariants:

* Members to be probed (media, `.txt`, `.json`) are set aside in a temporary folder, where the worker processes read
  them. The folder holds at most `SPOOL_BYTES` and one sample.
* A sample is a run of neighbouring members with the same key, as in WebDataset.
* The samples of a shard are held in memory. There are at most `MAX_SHARD_SAMPLES`.

Failure behaviour: a sample that cannot be used is skipped in the tally, with its offset. A shard that is damaged or
compressed, or that holds something that a shard must not hold, raises `CorruptionError` or `UnsupportedError`. A full
temporary folder raises `CapacityError`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.shards import tar
from headrace.dataio.shards.in_place.tally import ShardAt, Tally
from headrace.dataio.shards.ingest.pool import ProbePool
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.sources import Group
from headrace.dataio.shards.media.container import SAMPLE_EXTENSIONS, not_read, passed_over
from headrace.dataio.shards.media.facts import Described, Failure
from headrace.dataio.shards.pieces import Hasher, size_for
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.store.mounts import PREFIX

SPOOL_BYTES = 1 * limits.GIB
MAX_SHARD_SAMPLES = 1_000_000
_DESCRIBED = SAMPLE_EXTENSIONS | {"txt", "json"}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(slots=True)
class _Raw:
    """One sample as read from the tar.

    `files` maps the path of each member set aside to its extension and its name in the shard.
    """

    key: str
    offset: int
    members: list[Member] = field(default_factory=list)
    files: dict[Path, tuple[str, str]] = field(default_factory=dict)
    bytes: int = 0
    fault: str = ""

    def group(self) -> Group:
        return Group(self.key, tuple((ext, str(path)) for path, (ext, _) in self.files.items()), self.bytes)


class Pass:
    """One pass over one shard."""

    def __init__(self, shard: ShardAt, tally: Tally, prefixed: bool) -> None:
        self._shard, self._tally = shard, tally
        path = shard.key.partition("/")[2].partition("/")[2] if shard.key.startswith(PREFIX) else shard.key
        self._prefix = path.removesuffix(".tar") + "/" if prefixed else ""
        self._numbers = itertools.count()
        self._seen: dict[str, int] = {}
        self._rows: list[tuple[int, Sample]] = []

    def rows(self, pool: ProbePool) -> list[Sample]:
        shard = self._shard
        with (
            ReadAhead(shard.store, shard.inner, shard.size) as ahead,
            scratch_folder("headrace-index-") as folder,
        ):
            _refuse_compressed(ahead.read_at(0, min(8, shard.size)), shard.url)
            raws = self._raws(ahead, Path(folder))
            for batch in _batches(raws):
                self._describe(batch, pool)
        if not self._rows:
            self._tally.notes.append(f"{shard.url}: no samples were taken from it")
        return [sample for _, sample in sorted(self._rows, key=lambda row: row[0])]

    def _raws(self, ahead: ReadAhead, folder: Path) -> Iterator[_Raw]:
        """Yield the shard's samples in order. A faulty sample is reported and left out."""
        for key, run in tar.samples(ahead.read_at, ahead.size, self._shard.url):
            raw = _Raw(key, -1)
            for entry in run:
                self._take(raw, entry, ahead, folder)
            self._refuse_seen(raw)
            if raw.fault:
                _discard(raw)
                self._skip(f"{raw.key} at offset {raw.offset}", CorruptionError.code, raw.fault)
            else:
                yield raw

    def _take(self, raw: _Raw, entry: tar.Entry, ahead: ReadAhead, folder: Path) -> None:
        if raw.offset < 0:
            raw.offset = entry.header
        if any(member.ext == entry.ext for member in raw.members):
            raw.fault = raw.fault or f"a second member is called {entry.name!r}, at offset {entry.header}"
        parts = ahead.parts(entry.offset, entry.length)
        if entry.ext in _DESCRIBED and not raw.fault:
            path = folder / f"{next(self._numbers)}.{entry.ext}"
            raw.files[path] = (entry.ext, entry.name)
            raw.bytes += entry.length
            parts = _set_aside(parts, path)
        hasher = Hasher(size_for(entry.length))
        for part in parts:
            hasher.update(part)
        raw.members.append(Member(entry.ext, entry.offset, entry.length, hasher.whole(), hasher.pieces()))
        self._tally.step(entry.offset + entry.length)

    def _refuse_seen(self, raw: _Raw) -> None:
        first = self._seen.setdefault(raw.key, raw.offset)
        if first != raw.offset:
            raw.fault = raw.fault or f"the key {raw.key!r} occurred before, at offset {first}"
        if len(self._seen) > MAX_SHARD_SAMPLES:
            raise UnsupportedError(f"{self._shard.url}: more than {MAX_SHARD_SAMPLES} samples in one shard")

    def _describe(self, batch: Iterator[_Raw], pool: ProbePool) -> None:
        """Probe the samples that have members set aside. The answers come in the order of the requests."""
        asked: dict[int, _Raw] = {}

        def groups() -> Iterator[Group]:
            for raw in batch:
                if raw.files:
                    group = raw.group()
                    asked[id(group)] = raw
                    yield group
                else:
                    self._accept(raw, _PLAIN)

        for group, answer in pool.describe(groups()):
            raw = asked.pop(id(group))
            _discard(raw)
            if isinstance(answer, Failure):
                name = next((n for path, (_, n) in raw.files.items() if str(path) == answer.path), raw.key)
                self._skip(f"{name} at offset {raw.offset}", answer.code, answer.reason)
            else:
                self._accept(raw, answer)

    def _skip(self, what: str, code: str, reason: str) -> None:
        self._tally.skip(Skipped(f"{self._shard.url}: {what}", code, reason))

    def _accept(self, raw: _Raw, facts: Described) -> None:
        key = self._prefix + raw.key.removeprefix("./") if self._prefix else raw.key
        sample = Sample(
            id=0,
            key=key,
            shard=self._shard.key,
            members=tuple(_with_heads(raw.members, facts)),
            duration=facts.duration,
            video=facts.video,
            audio=facts.audio,
            text=facts.text,
            fields=json.loads(facts.fields),
        )
        self._rows.append((raw.offset, sample))
        self._tally.samples += 1
        self._tally.members += len(raw.members)
        extensions = [member.ext for member in raw.members]
        unread = not_read(extensions)
        apart = [ext for ext in passed_over(extensions) if ext not in _DESCRIBED and "." in ext]
        notes = (
            *facts.notes,
            *(
                f"its .{ext} file is kept, and not read as media: the name of a sample's video is its key"
                for ext in apart
            ),
            *(() if unread is None else (f"{unread[1]} (`headrace pack` with the tar as its source)",)),
        )
        self._tally.notes += [f"{key}: {note}" for note in notes]


_PLAIN = Described(files=(), duration=0.0, video=None, audio=None, text=None, fields="{}", notes=())
"""The description of a sample without media, text or JSON."""


def _with_heads(members: list[Member], facts: Described) -> Iterator[Member]:
    """Yield the members with the heads and marks that the workers found.

    The digests stay those of the bytes that this pass read.
    """
    found = {file.ext: file.pieces for file in facts.files if file.pieces is not None}
    for member in members:
        pieces, said = member.pieces, found.get(member.ext)
        if pieces is not None and said is not None:
            member = replace(member, pieces=replace(pieces, head=said.head, marks=said.marks))
        yield member


def _batches(raws: Iterator[_Raw]) -> Iterator[Iterator[_Raw]]:
    """Divide the samples into batches. Each sets aside at most `SPOOL_BYTES` and one sample.

    The caller must exhaust a batch before it takes the next.
    """
    for first in raws:
        yield _until_full(itertools.chain([first], raws))


def _until_full(raws: Iterable[_Raw]) -> Iterator[_Raw]:
    total = 0
    for raw in raws:
        total += raw.bytes
        yield raw
        if total >= SPOOL_BYTES:
            return


def _set_aside(parts: Iterator[memoryview], path: Path) -> Iterator[memoryview]:
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                done = 0
                while done < len(part):
                    done += file.write(part[done:])
                yield part
    except OSError as error:
        raise CapacityError(
            f"a member could not be set aside in {path.parent}: {error.strerror or error}",
            hint="TMPDIR names another folder with more space",
        ) from error


def _discard(raw: _Raw) -> None:
    for path in raw.files:
        path.unlink(missing_ok=True)


def _refuse_compressed(head: bytes, url: str) -> None:
    for magic, program in _COMPRESSED.items():
        if head.startswith(magic):
            raise UnsupportedError(
                f"{url} is compressed by {program} at offset 0, so no sample in it can be read by itself",
                hint="decompress it and index the plain tar, or unpack it and use `headrace pack`; media is compressed already",
            )
