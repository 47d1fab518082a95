"""Copies the stored bytes of chunks from packs of the source into new packs at the destination.

Invariant: a chunk is written only after its bytes were compared with its digest. The chunks of one source pack are
written in their order into one pack, so a pack of which everything is copied is stored with the same bytes. Packs have
names that only this process draws.
Memory: `workers` packs are written at a time, each with at most `_AHEAD` + 2 batches of
`_BATCH_BYTES`, and the parts that the store is sending.
Failure behaviour: `DamagedChunk` for a chunk that is damaged or missing in every copy at the source. Errors of the
stores are raised. A pack that was not completed does not exist.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.checkpoint.format import codec, names, pack
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.manifest import DELTAS, PACK_BYTES, Chunk, PackName
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.saving.dedup import Stored
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError, UnsupportedError
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_BATCH_BYTES = 8 * MIB
_AHEAD = 1
"""Batches that are read ahead of the one that is written, for each pack."""
_OWN_PACK_BYTES = 32 * MIB
"""A source pack of which more is copied gets a pack of its own. Smaller parts are stored together."""
_READS = 4
_log = get_logger(__name__)

_in_pack = declare("copy.in-pack", "a pack is partly copied: there is no such object yet")
_pack_copied = declare("copy.pack", "one pack is copied: invisible, and the next copier uses it")


class DamagedChunk(CorruptionError):
    """A chunk of the source that is damaged in every copy. The caller reports which tensors need it."""

    def __init__(self, pack_key: str, chunk: Chunk) -> None:
        super().__init__(f"{chunk.stored} bytes at offset {chunk.offset} of {pack_key} are damaged")
        self.pack_key, self.chunk = pack_key, chunk


class Inline(Executor):
    """An executor that runs each call at once, in the thread of the caller. Tests use it for a fixed order."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def executor(workers: int, name: str) -> Executor:
    """A pool of this many threads; one worker runs in the thread of the caller."""
    return Inline() if workers == 1 else ThreadPoolExecutor(workers, thread_name_prefix=f"headrace-{name}")


@dataclass(frozen=True, slots=True)
class Links:
    """For chunks that are stored as differences: the base at the source and the new place of the base, by digest."""

    bases: Mapping[bytes, Stored]


@dataclass(frozen=True, slots=True)
class _Job:
    """Chunks that go into one new pack, by the key of their source pack."""

    chunks: tuple[tuple[str, tuple[Chunk, ...]], ...]


class ChunkCopier:
    """Copies chunks into packs of one attempt.

    Args:
        source: The store that has the chunks.
        store: The destination.
        attempt: The attempt at the destination.
        workers: The number of packs that are written at a time.
        copied: Called with the stored bytes of each chunk that was written.
    """

    def __init__(
        self,
        source: Store,
        store: Store,
        attempt: str,
        workers: int,
        copied: Callable[[int], object],
    ) -> None:
        self._source, self._store, self._attempt, self._copied = source, store, attempt, copied
        self._worker, self._numbers = os.urandom(4).hex(), itertools.count()
        self._writers, self._readers = executor(workers, "copy"), executor(workers, "copy-read")
        self._at_once, self._lock = workers, threading.Lock()
        source.read_once(names.PACKS)

    def close(self) -> None:
        """Wait for the threads."""
        self._writers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def copy(self, rank: int, chunks: Sequence[tuple[str, Chunk]], links: Links) -> dict[bytes, Stored]:
        """Copy these chunks, given with the keys of their packs. Returns their new places by digest."""
        places: dict[bytes, Stored] = {}

        def one(job: _Job) -> None:
            written = self._write(rank, job, links)
            with self._lock:
                places.update(written)

        for _ in fetch.in_order(self._writers, one, _jobs(chunks), self._at_once):
            pass
        return places

    def _write(self, rank: int, job: _Job, links: Links) -> dict[bytes, Stored]:
        written: dict[bytes, Stored] = {}
        keys: list[PackName] = []

        def name_of(_: int) -> str:
            with self._lock:
                number = next(self._numbers)
            keys.append(PackName(self._attempt, names.pack_name(rank, self._worker, number)))
            return keys[-1].key

        def packed(_: int, entry: pack.Entry) -> None:
            chunk = Chunk(entry.digest, 0, entry.offset, entry.stored, entry.raw, entry.codec)
            base = links.bases.get(entry.digest) if entry.codec in DELTAS else None
            written[entry.digest] = Stored(keys[-1], chunk, base)
            self._copied(entry.stored)
            _in_pack()

        for _ in pack.write_all(self._store, name_of, self._read(job, links), packed):
            _pack_copied()
        return written

    def _read(self, job: _Job, links: Links) -> Iterator[pack.NewChunk]:
        batches = (batch for key, chunks in job.chunks for batch in fetch.batches(key, chunks, _BATCH_BYTES))
        for new in fetch.in_order(self._readers, self._checked, batches, _AHEAD):
            for chunk, stored in new:
                yield self._linked(chunk, stored, links)

    def _checked(self, batch: fetch.Batch[Chunk]) -> list[tuple[Chunk, memoryview]]:
        """The stored bytes of a batch, each chunk compared with its digest."""
        return read_checked(self._source, batch)

    def _linked(self, chunk: Chunk, stored: memoryview, links: Links) -> pack.NewChunk:
        """The chunk as it is stored at the destination. A difference names the new place of its base."""
        base = links.bases.get(chunk.digest)
        if chunk.codec not in DELTAS or base is None:
            return pack.NewChunk(chunk.digest, stored, chunk.raw, chunk.codec)
        place = base.chunk
        link = codec.Link(
            place.digest, base.pack.attempt, base.pack.name, place.offset, place.stored, place.raw, place.codec
        )
        linked = codec.relink(stored, link)
        if len(linked) <= chunk.raw:
            return pack.NewChunk(chunk.digest, linked, chunk.raw, chunk.codec)
        payload = _decoded(self._source, chunk, stored)  # the new link is longer, and the difference hardly smaller
        if payload is None:
            raise DamagedChunk(base.pack.key, chunk)
        return pack.NewChunk(chunk.digest, payload.toreadonly(), chunk.raw)


def _jobs(chunks: Iterable[tuple[str, Chunk]]) -> Iterator[_Job]:
    """Divide chunks into jobs: large parts of a pack alone, small parts together."""
    by_pack: dict[str, list[Chunk]] = defaultdict(list)
    for key, chunk in chunks:
        by_pack[key].append(chunk)
    small: list[tuple[str, tuple[Chunk, ...]]] = []
    size = 0
    for key in sorted(by_pack):
        part = tuple(sorted(by_pack[key], key=lambda chunk: chunk.offset))
        stored = sum(chunk.stored for chunk in part)
        if stored >= _OWN_PACK_BYTES:
            yield _Job(((key, part),))
            continue
        small.append((key, part))
        size += stored
        if size > PACK_BYTES - _OWN_PACK_BYTES:
            yield _Job(tuple(small))
            small, size = [], 0
    if small:
        yield _Job(tuple(small))


def read_checked(store: Store, batch: fetch.Batch[Chunk]) -> list[tuple[Chunk, memoryview]]:
    """Read the stored bytes of a batch; raise `DamagedChunk` for a chunk that does not match its digest."""
    memory = memoryview(bytearray(sum(length for _, length in batch.ranges)))
    views, at = list[tuple[int, memoryview]](), 0
    for offset, length in batch.ranges:
        views.append((offset, memory[at : at + length]))
        at += length
    try:
        store.get_ranges_into(batch.pack, views)
        is_read = True
    except (NotFoundError, RangeError):
        is_read = False
    found = []
    for chunk in batch.chunks:
        offset, view = next(each for each in reversed(views) if each[0] <= chunk.offset)
        stored = view[chunk.offset - offset :][: chunk.stored]
        if not is_read or not _is_good(store, chunk, stored):
            stored = _read_again(store, batch.pack, chunk)
        found.append((chunk, stored))
    return found


def _read_again(store: Store, key: str, chunk: Chunk) -> memoryview:
    stored = memoryview(bytearray(chunk.stored))
    for _ in range(_READS):
        try:
            store.get_into(key, chunk.offset, stored)
            if _is_good(store, chunk, stored):
                return stored
        except (NotFoundError, RangeError):
            pass
        if not store.invalidate(key):
            break
    raise DamagedChunk(key, chunk)


def _is_good(store: Store, chunk: Chunk, stored: memoryview) -> bool:
    if chunk.codec not in DELTAS:
        return codec.unpack(stored, chunk.codec, chunk.raw, chunk.digest) is not None
    return _decoded(store, chunk, stored) is not None


def _decoded(store: Store, chunk: Chunk, stored: memoryview) -> memoryview | None:
    """The bytes of a chunk that is stored as a difference; None if it or its base is damaged."""
    link = codec.link_of(stored)
    if link is None or link.raw != chunk.raw:
        return None
    base = fetch.read_one(store, link.pack, link)
    payload = None if base is None else codec.decode_difference(stored, base, chunk.raw, chunk.codec)
    return payload if payload is not None and digest(payload) == chunk.digest else None


def take_over(store: Store, attempt: str) -> dict[bytes, Stored]:
    """The chunks in packs of an attempt that other copiers have completed. Each is read and compared with its digest.

    Differences are left out: their bases may be stored elsewhere.
    """
    found: dict[bytes, Stored] = {}
    for info in list(store.list(names.packs(attempt))):
        parsed = names.parse_pack_key(info.key)
        if parsed is None:
            continue
        try:
            entries = pack.read_table(store, info.key, info.size)
            chunks = [Chunk(e.digest, 0, e.offset, e.stored, e.raw, e.codec) for e in entries if e.codec not in DELTAS]
            for batch in fetch.batches(info.key, chunks, _BATCH_BYTES):
                for chunk, _ in read_checked(store, batch):
                    found[chunk.digest] = Stored(PackName(*parsed), chunk)
        except (CorruptionError, UnsupportedError, NotFoundError) as error:
            _log.warning("%s is not used: %s", info.key, error)
            found = {each: place for each, place in found.items() if place.pack.key != info.key}
    return found


def with_pack(chunk: Chunk, number: int) -> Chunk:
    """The chunk in pack `number` of a manifest's table."""
    return msgspec.structs.replace(chunk, pack=number)
