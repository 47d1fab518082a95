"""`pack`: media files in, version 1 of a dataset out.

Purpose: gather, probe in worker processes, stream tar shards and index parts into the store, publish.

Invariants:

* Nothing is visible before the version document, which is written last: a packer that dies leaves at most objects that no
  version names, and packing again succeeds.
* The same input gives the same shards, byte for byte, under the same names, and the same index: a shard is named by its
  place and a digest of what it holds. So packers that race never overwrite each other's different bytes; one publishes.
* Memory is bounded: the names of all files, one shard's metadata, `PART_ROWS` rows and a few megabytes of payload, whatever
  the size of the files.
* The index describes the bytes that were stored: a file that changes between being probed and being sent stops the packing.

Failure behaviour: a file that cannot be packed is skipped and reported with its reason; with `strict` it is an error. An existing
dataset is a `ConflictError`; no usable file at all a `UsageError`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec
import xxhash

from dataio.core import crashpoints, limits
from dataio.core.errors import CorruptionError, MillraceError, TransientError, UnsupportedError, UsageError
from dataio.core.log import get_logger
from dataio.shards import tar, versions
from dataio.shards.contract import Member, Sample
from dataio.shards.dataset import Dataset
from dataio.shards.facts import TEXT_BYTES, Described, Failure, FileFact
from dataio.shards.parts import store_parts
from dataio.shards.pool import ProbePool
from dataio.shards.report import PackReport, Progress, Skipped
from dataio.shards.sources import Gathered, gather
from dataio.store.contract import Store
from dataio.store.open import open_store

__all__ = ["PackReport", "Progress", "Skipped", "pack"]

PART_ROWS = 50_000
"""An index part is closed at the end of the shard in which it reaches this many rows."""
_READ = 1 * limits.MIB
_log = get_logger(__name__)

_at_shard = crashpoints.declare("pack.shard-stored", "shards are stored, and nothing refers to them")
_at_index = crashpoints.declare("pack.index-stored", "shards and index are stored; there is no version yet")
_at_version = crashpoints.declare("pack.version-stored", "version 1 exists; the caller has not been told")


def pack(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    shard_bytes: int = 256 * limits.MIB,
    strict: bool = False,
    captions: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
    name: str | None = None,
    **storage_options: Any,
) -> Dataset:
    """Write media files into tar shards with an index at `url`, as version 1 of a dataset, and open it.

    `sources` are files, folders and globs; `dataio.shards.sources` says what becomes a sample and what its key is. A shard is
    closed before the sample that would make it larger than `shard_bytes`. `captions` gives texts by key to samples without a
    `.txt` file, and are stored as one. `progress` is called after every sample. `workers` are probing processes (default:
    one a core). The dataset's `report` says what was packed and what was skipped.

    Raises `NotFoundError` (a source, or the bucket), `UsageError` (equal keys, nothing to pack), `ConflictError` (a dataset is
    there already), and with `strict` the error of the first file that cannot be packed.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes must be positive, not {shard_bytes}")
    store = url if isinstance(url, Store) else open_store(url, **storage_options)
    try:
        report, version = _pack(store, sources, shard_bytes, strict, captions or {}, progress, workers, name)
        dataset = Dataset(store, version)
    except BaseException:
        if store is not url:
            store.close()
        raise
    dataset.report, dataset.owns_store = report, store is not url
    return dataset


def _pack(
    store: Store,
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    shard_bytes: int,
    strict: bool,
    captions: Mapping[str, str],
    progress: Callable[[Progress], None] | None,
    workers: int | None,
    name: str | None,
) -> tuple[PackReport, int]:
    started = time.monotonic()
    gathered = gather([sources] if isinstance(sources, str | os.PathLike) else sources)
    _check_captions(captions, gathered)
    tally = _Tally(gathered, strict, progress)
    versions.refuse_existing(store)
    if not gathered.groups:
        raise tally.nothing()
    name = name or store.location.url.rstrip("/").rpartition("/")[2] or "dataset"
    versions.claim(store, name)
    writer = _Writer(store, shard_bytes)
    with ProbePool(workers) as pool:
        for group, answer in pool.describe(gathered.groups):
            if isinstance(answer, Failure):
                tally.skip(Skipped(answer.path, answer.code, answer.reason))
            else:
                writer.add(group.key, answer, captions.get(group.key))
                tally.files += len(answer.files)
                tally.notes += [f"{group.key}: {note}" for note in answer.notes]
            tally.step(group.bytes)
    writer.finish()
    if not writer.shards:
        raise tally.nothing()
    document = versions.new_document(
        name, tuple(writer.shards), tuple(writer.parts), version=1, parent=None, message="packed"
    )
    _at_index()
    versions.publish(store, document)
    _at_version()
    return tally.report(document, time.monotonic() - started), document.version


def _check_captions(captions: Mapping[str, str], gathered: Gathered) -> None:
    known = {group.key for group in gathered.groups}
    for key, text in captions.items():
        if key not in known:
            raise UsageError(f"there is a caption for {key!r}, and no such sample", hint="captions go by sample key")
        if len(text.encode()) > TEXT_BYTES:
            raise UsageError(f"the caption of {key!r} is larger than {limits.format_bytes(TEXT_BYTES)}")


@dataclass
class _Tally:
    """Counts while packing, and applies `strict`."""

    gathered: Gathered
    strict: bool
    progress: Callable[[Progress], None] | None
    skipped: list[Skipped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    samples: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.bytes_total = sum(group.bytes for group in self.gathered.groups)
        for item in self.gathered.skipped:
            self.skip(item)

    def skip(self, item: Skipped) -> None:
        if self.strict:
            raise _error_class(item.code)(f"{item.path}: {item.reason}", hint="without strict it would be skipped")
        _log.info("skipped %s: %s", item.path, item.reason)
        self.skipped.append(item)

    def step(self, size: int) -> None:
        self.samples += 1
        self.bytes += size
        if self.progress is not None:
            done = Progress(self.samples, len(self.gathered.groups), self.bytes, self.bytes_total, len(self.skipped))
            self.progress(done)

    def nothing(self) -> UsageError:
        why = "no media files were found"
        if self.skipped:
            first = self.skipped[0]
            why = f"all {len(self.skipped)} candidates were skipped; {first.path}: {first.reason}"
        return UsageError(f"there is nothing to pack: {why}", hint="give media files, or folders of them")

    def report(self, document: versions.VersionDocument, seconds: float) -> PackReport:
        return PackReport(
            files=self.files,
            samples=document.samples,
            shards=len(document.shards),
            bytes=sum(shard.size for shard in document.shards),
            seconds=seconds,
            skipped=tuple(self.skipped),
            ignored=self.gathered.ignored,
            notes=tuple(self.notes),
        )


def _error_class(code: str) -> type[MillraceError]:
    return {UnsupportedError.code: UnsupportedError}.get(code, CorruptionError)


@dataclass(frozen=True)
class _Payload:
    """A member's bytes: a file as it was described, or the bytes themselves."""

    ext: str
    size: int
    xxh3: int
    source: FileFact | bytes

    def parts(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        else:
            yield from _read_unchanged(self.source)


def _read_unchanged(fact: FileFact) -> Iterator[bytes]:
    hasher = xxhash.xxh3_64()
    try:
        with open(fact.path, "rb", buffering=0) as file:
            while chunk := file.read(_READ):
                hasher.update(chunk)
                yield chunk
    except OSError as error:
        raise _changed(fact, f"cannot be read any more: {error.strerror or error}") from error
    if hasher.intdigest() != fact.xxh3:
        raise _changed(fact, "changed while it was being packed")


def _changed(fact: FileFact, what: str) -> TransientError:
    return TransientError(f"{fact.path} {what}", hint="pack again when nothing writes to the input")


class _Writer:
    """Collects samples into shards and rows into index parts, and stores each as it is full."""

    def __init__(self, store: Store, shard_bytes: int) -> None:
        self.shards: list[versions.Shard] = []
        self.parts: list[versions.IndexPart] = []
        self._store, self._shard_bytes = store, shard_bytes
        self._pending: list[tuple[str, Described, list[_Payload]]] = []
        self._pending_bytes = len(tar.END)
        self._rows: list[Sample] = []
        self._count = 0

    def add(self, key: str, described: Described, caption: str | None) -> None:
        """Take one sample; it may be stored later."""
        payloads = [_Payload(fact.ext, fact.size, fact.xxh3, fact) for fact in described.files]
        if caption is not None and all(p.ext != "txt" for p in payloads):
            data = caption.encode()
            payloads.append(_Payload("txt", len(data), xxhash.xxh3_64_intdigest(data), data))
            payloads.sort(key=lambda p: p.ext)
            described = msgspec.structs.replace(described, text=caption)
        size = sum(tar.member_bytes(f"{key}.{p.ext}", p.size) for p in payloads)
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._store_shard()
        self._pending.append((key, described, payloads))
        self._pending_bytes += size

    def finish(self) -> None:
        """Store what is left."""
        if self._pending:
            self._store_shard()
        if self._rows:
            self._store_part()

    def _store_shard(self) -> None:
        payloads = [(f"{key}.{p.ext}", p) for key, _, members in self._pending for p in members]
        placed, size = tar.layout((name, p.size) for name, p in payloads)
        content = msgspec.msgpack.encode([(name, p.size, p.xxh3) for name, p in payloads])
        key = f"shards/{len(self.shards):08}-{blake3.blake3(content).hexdigest()[:16]}.tar"
        self._store.put_multipart(key, tar.stream(placed, (p.parts() for _, p in payloads)))
        _at_shard()
        self.shards.append(versions.Shard(key=key, size=size, samples=len(self._pending)))
        self._add_rows(key, iter(placed))
        self._pending, self._pending_bytes = [], len(tar.END)
        if len(self._rows) >= PART_ROWS:
            self._store_part()

    def _add_rows(self, shard: str, placed: Iterator[tar.Placed]) -> None:
        for key, described, payloads in self._pending:
            members = tuple(Member(p.ext, next(placed).offset, p.size, p.xxh3) for p in payloads)
            sample = Sample(
                id=self._count,
                key=key,
                shard=shard,
                members=members,
                duration=described.duration,
                video=described.video,
                audio=described.audio,
                text=described.text,
                fields=json.loads(described.fields),
            )
            self._rows.append(sample)
            self._count += 1

    def _store_part(self) -> None:
        self.parts += store_parts(self._store, self._rows, len(self.parts))
        self._rows = []
