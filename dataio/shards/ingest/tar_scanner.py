"""Reads one tar from beginning to end for `index`: hashes its members and describes its samples.

Purpose: `TarScanner` makes the index rows of one shard, and collects skipped samples and remarks.

Invariants:

* Members to be probed (media, images, `.txt`, `.vtt`, `.json`) are copied to a temporary folder, where the worker
  processes read them. The folder holds at most `SPOOL_BYTES` and one sample.
* A sample is a run of adjacent members with the same key, as in WebDataset.
* The samples of a shard are held in memory. There are at most `MAX_SHARD_SAMPLES`.

Failure behaviour: a sample that cannot be used is skipped, and reported with its offset. A shard that is damaged or
compressed, or that holds a member that a shard must not hold, raises `CorruptionError` or `UnsupportedError`. A full
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
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import Skipped, skip_error
from headrace.dataio.shards.media.container import SAMPLE_EXTENSIONS, is_named_video, unsupported_media, unused_media
from headrace.dataio.shards.media.messages import Description, Failure
from headrace.dataio.shards.pieces import Hasher, piece_size
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.shards.units.engine import Step
from headrace.dataio.shards.units.journal import Done
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX, url_of

SPOOL_BYTES = 1 * limits.GIB
MAX_SHARD_SAMPLES = 1_000_000
_PROBED = SAMPLE_EXTENSIONS | {"txt", "vtt", "json"}
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SourceShard:
    """One tar to index: its key in the dataset, its store, and its key in that store."""

    key: str
    store: Store
    store_key: str
    size: int
    modified: float

    @property
    def url(self) -> str:
        return url_of(self.store, self.store_key)


@dataclass(slots=True)
class _RawSample:
    """One sample as read from the tar.

    `files` maps the path of each copied member to its extension and its name in the shard.
    """

    key: str
    offset: int
    members: list[Member] = field(default_factory=list)
    files: dict[Path, tuple[str, str]] = field(default_factory=dict)
    bytes: int = 0
    fault: str = ""

    def group(self) -> Group:
        return Group(self.key, tuple((ext, str(path)) for path, (ext, _) in self.files.items()), self.bytes)


class TarScanner:
    """Reads one shard in one pass.

    With `strict`, the first sample that cannot be used raises its error. With `prefix_keys`, the shard's path is put in
    front of the keys. `text_field` is the field of the samples' JSON that holds their text. `step` receives the bytes
    that were read.

    Attributes:
        skipped (list[Skipped]): the samples that cannot be used.
        notes (list[str]): remarks about the samples.
        members (int): the number of members of the samples.
    """

    def __init__(
        self, shard: SourceShard, *, strict: bool, prefix_keys: bool, step: Step, text_field: str | None = None
    ) -> None:
        self._shard, self._strict, self._step, self._text_field = shard, strict, step, text_field
        self.skipped, self.notes, self.members = list[Skipped](), list[str](), 0
        path = shard.key.partition("/")[2].partition("/")[2] if shard.key.startswith(PREFIX) else shard.key
        self._prefix = path.removesuffix(".tar") + "/" if prefix_keys else ""
        self._numbers = itertools.count()
        self._offsets_by_key: dict[str, int] = {}
        self._rows: list[tuple[int, Sample]] = []
        self.bytes = 0
        """The bytes that were reported to `step`."""

    def scan(self, pool: ProbePool) -> list[Sample]:
        """Read the shard and return its samples, ordered by offset."""
        shard = self._shard
        with (
            ReadAhead(shard.store, shard.store_key, shard.size) as ahead,
            scratch_folder("headrace-index-") as folder,
        ):
            _check_uncompressed(ahead.read_at(0, min(8, shard.size)), shard.url)
            samples = self._read_samples(ahead, Path(folder))
            for batch in _batches(samples):
                self._describe(batch, pool)
        if not self._rows:
            self.notes.append(f"{shard.url}: no samples were taken from it")
        return [sample for _, sample in sorted(self._rows, key=lambda row: row[0])]

    def _read_samples(self, ahead: ReadAhead, folder: Path) -> Iterator[_RawSample]:
        """Yield the shard's samples in order. A faulty sample is reported and left out."""
        for key, run in tar.samples(ahead.read_at, ahead.size, self._shard.url):
            raw = _RawSample(key, -1)
            for tar_member in run:
                self._read_member(raw, tar_member, ahead, folder)
            self._check_key(raw)
            if raw.fault:
                _discard(raw)
                self._skip(f"{raw.key} at offset {raw.offset}", CorruptionError.code, raw.fault)
            else:
                yield raw

    def _read_member(self, raw: _RawSample, tar_member: tar.TarMember, ahead: ReadAhead, folder: Path) -> None:
        if raw.offset < 0:
            raw.offset = tar_member.header
        if any(member.ext == tar_member.ext for member in raw.members):
            raw.fault = raw.fault or f"a second member is called {tar_member.name!r}, at offset {tar_member.header}"
        parts = ahead.parts(tar_member.offset, tar_member.length)
        if (tar_member.ext in _PROBED or is_named_video(tar_member.ext)) and not raw.fault:
            path = folder / f"{next(self._numbers)}.{tar_member.ext}"
            raw.files[path] = (tar_member.ext, tar_member.name)
            raw.bytes += tar_member.length
            parts = _copied_to(parts, path)
        hasher = Hasher(piece_size(tar_member.length))
        for part in parts:
            hasher.update(part)
        raw.members.append(
            Member(tar_member.ext, tar_member.offset, tar_member.length, hasher.whole(), hasher.pieces())
        )
        end = tar_member.offset + tar_member.length
        self._step(Done(bytes=end - self.bytes))
        self.bytes = end

    def _check_key(self, raw: _RawSample) -> None:
        first_offset = self._offsets_by_key.setdefault(raw.key, raw.offset)
        if first_offset != raw.offset:
            raw.fault = raw.fault or f"the key {raw.key!r} occurred before, at offset {first_offset}"
        if len(self._offsets_by_key) > MAX_SHARD_SAMPLES:
            raise UnsupportedError(f"{self._shard.url}: more than {MAX_SHARD_SAMPLES} samples in one shard")

    def _describe(self, batch: Iterator[_RawSample], pool: ProbePool) -> None:
        """Probe the samples that have copied members. The pool returns the answers in the order of the requests."""
        by_group: dict[int, _RawSample] = {}

        def groups() -> Iterator[Group]:
            for raw in batch:
                if raw.files:
                    group = raw.group()
                    by_group[id(group)] = raw
                    yield group
                else:
                    self._accept(raw, _NO_MEDIA)

        for group, answer in pool.describe(groups(), self._text_field):
            raw = by_group.pop(id(group))
            _discard(raw)
            if isinstance(answer, Failure):
                name = next((n for path, (_, n) in raw.files.items() if str(path) == answer.path), raw.key)
                self._skip(f"{name} at offset {raw.offset}", answer.code, answer.reason)
            else:
                self._accept(raw, answer)

    def _skip(self, name: str, code: str, reason: str) -> None:
        item = Skipped(f"{self._shard.url}: {name}", code, reason)
        if self._strict:
            raise skip_error(item)
        _log.info("skipped %s: %s", item.path, item.reason)
        self.skipped.append(item)

    def _accept(self, raw: _RawSample, facts: Description) -> None:
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
            videos=facts.videos,
        )
        self._rows.append((raw.offset, sample))
        self.members += len(raw.members)
        extensions = [member.ext for member in raw.members]
        unread = unsupported_media(extensions)
        own_names = [ext for ext in unused_media(extensions) if ext not in _PROBED and "." in ext]
        notes = (
            *facts.notes,
            *(
                f"its .{ext} file is kept but not read as media: a sample's audio must be named <key>.<ext>"
                for ext in own_names
            ),
            *(() if unread is None else (f"{unread[1]} (`headrace pack` with the tar as its source)",)),
        )
        self.notes += [f"{key}: {note}" for note in notes]


_NO_MEDIA = Description(files=(), duration=0.0, video=None, audio=None, text=None, fields="{}", notes=())
"""The description of a sample without media, text or JSON."""


def _with_heads(members: list[Member], facts: Description) -> Iterator[Member]:
    """Yield the members with the heads and marks that the workers found.

    The digests remain those that the scanner computed.
    """
    pieces_by_ext = {file.ext: file.pieces for file in facts.files if file.pieces is not None}
    for member in members:
        pieces, file_pieces = member.pieces, pieces_by_ext.get(member.ext)
        if pieces is not None and file_pieces is not None:
            member = replace(member, pieces=replace(pieces, head=file_pieces.head, marks=file_pieces.marks))
        yield member


def _batches(samples: Iterator[_RawSample]) -> Iterator[Iterator[_RawSample]]:
    """Divide the samples into batches. The copied members of a batch take at most `SPOOL_BYTES` and one sample.

    The caller must exhaust a batch before it requests the next.
    """
    for first in samples:
        yield _one_batch(itertools.chain([first], samples))


def _one_batch(samples: Iterable[_RawSample]) -> Iterator[_RawSample]:
    total = 0
    for raw in samples:
        total += raw.bytes
        yield raw
        if total >= SPOOL_BYTES:
            return


def _copied_to(parts: Iterator[memoryview], path: Path) -> Iterator[memoryview]:
    try:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                written = 0
                while written < len(part):
                    written += file.write(part[written:])
                yield part
    except OSError as error:
        raise CapacityError(
            f"a member could not be copied to {path.parent}: {error.strerror or error}",
            hint="TMPDIR names another folder with more space",
        ) from error


def _discard(raw: _RawSample) -> None:
    for path in raw.files:
        path.unlink(missing_ok=True)


def _check_uncompressed(head: bytes, url: str) -> None:
    program = tar.compressed_by(head)
    if program is not None:
        raise UnsupportedError(
            f"{url} is compressed by {program} at offset 0, so no sample in it can be read by itself",
            hint="decompress it and index the plain tar, or unpack it and use `headrace pack`; media are compressed already",
        )
