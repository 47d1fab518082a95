"""Reads a committed step: its manifests, and chunks out of packs.

- `open_step` reads the manifests that the step's decision names, and compares each with its digest there.
- `fetch` reads chunks in coalesced ranges with bounded memory, and checks every chunk. A bad chunk is fetched once
  more, then from every other copy that the store knows. A raw chunk may be read straight to its destination (`room`),
  without a copy.
- A chunk that is stored as a difference also needs its base, which is read and checked in the same way.

Invariant: a returned manifest is the one that was sealed, and a chunk that is handed out matches its digest. At most
`workers` batches of `BATCH_BYTES` are in memory; a batch is one call to the store.
Failure behaviour: `CorruptionError` for a manifest that is missing or damaged in every copy. A chunk that is wrong in
every copy is handed out as None, and the caller reports what needed it. Transient errors of the store pass through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import local
from typing import Generic, Protocol, TypeVar

from headrace.checkpoint.format import codec, names
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import CHUNK_BYTES, digest
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import DELTAS, RAW, Manifest
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt
from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.core.limits import KIB
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
BATCH_BYTES = 4 * CHUNK_BYTES
THREADS = 4
"""The default. More threads than hash at once, because some wait for the store."""
_COPIES = 4
_GAP = 64 * KIB
"""Ranges closer than this are read as one: cheaper than another request."""


class Place(Protocol):
    """Where a chunk lies in its pack, and what it must be."""

    @property
    def digest(self) -> bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def raw(self) -> int: ...
    @property
    def codec(self) -> int: ...


P = TypeVar("P", bound=Place)
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Batch(Generic[P]):
    """Chunks of one pack, by offset, and the ranges (offset, length) that hold them."""

    pack: str
    chunks: tuple[P, ...]
    ranges: tuple[tuple[int, int], ...]


def batches(pack: str, chunks: Iterable[P]) -> Iterator[Batch[P]]:
    """The chunks of one pack in batches of at most `BATCH_BYTES`. Pure."""
    taken: list[P] = []
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(chunks, key=lambda c: c.offset):
        joined = _join(ranges, chunk)
        if taken and sum(length for _, length in joined) > BATCH_BYTES:
            yield Batch(pack, tuple(taken), tuple(ranges))
            taken, joined = [], [(chunk.offset, chunk.stored)]
        taken.append(chunk)
        ranges = joined
    if taken:
        yield Batch(pack, tuple(taken), tuple(ranges))


def _join(ranges: Sequence[tuple[int, int]], chunk: Place) -> list[tuple[int, int]]:
    if ranges:
        start, length = ranges[-1]
        end = max(start + length, chunk.offset + chunk.stored)
        if chunk.offset - (start + length) <= _GAP:
            return [*ranges[:-1], (start, end - start)]
    return [*ranges, (chunk.offset, chunk.stored)]


def no_room(pack: str, chunk: object) -> None:
    """Every chunk goes through a buffer of ours."""


def fetch(
    store: Store,
    work: Iterable[Batch[P]],
    use: Callable[[str, P, memoryview | None], None],
    room: Callable[[str, P], memoryview | None] = no_room,
    workers: int = THREADS,
) -> None:
    """Read every batch and hand each chunk to `use(pack, chunk, payload)`, from several threads.

    `room(pack, chunk)` is where the bytes of a raw chunk may be put before they are checked, or None; the payload is then that
    memory. Any other payload is valid during the call only.
    """
    store.read_once(names.PACKS)
    buffers = local()

    def one(batch: Batch[P]) -> None:
        rooms = [room(batch.pack, chunk) if chunk.codec == RAW else None for chunk in batch.chunks]
        if None in rooms and not hasattr(buffers, "bytes"):
            buffers.bytes = memoryview(bytearray(BATCH_BYTES))
        _read_batch(store, batch, rooms, getattr(buffers, "bytes", memoryview(b"")), use)

    with ThreadPoolExecutor(workers, thread_name_prefix="headrace-read") as pool:
        for _ in in_order(pool, one, work, 2 * workers):
            pass


def _read_batch(
    store: Store,
    batch: Batch[P],
    rooms: Sequence[memoryview | None],
    buffer: memoryview,
    use: Callable[[str, P, memoryview | None], None],
) -> None:
    views, places = _places(batch.chunks, rooms, buffer)
    whole = _try_read(store, batch.pack, views)
    for chunk, stored in zip(batch.chunks, places, strict=True):
        good = _unpacked(store, chunk, stored) if whole else None
        use(batch.pack, chunk, good if good is not None else _read_again(store, batch.pack, chunk, stored))


def _places(
    chunks: Sequence[Place], rooms: Sequence[memoryview | None], buffer: memoryview
) -> tuple[list[tuple[int, memoryview]], list[memoryview]]:
    """What is to be read, as (offset, memory), and where each chunk's stored bytes then are. Pure.

    Chunks without room lie in `buffer`, ranges that are near each other as one.
    """
    views = [(chunk.offset, room) for chunk, room in zip(chunks, rooms, strict=True) if room is not None]
    runs: list[tuple[int, int]] = []
    for chunk, room in zip(chunks, rooms, strict=True):
        if room is None:
            runs = _join(runs, chunk)
    starts, at = [], 0
    for offset, length in runs:
        starts.append((offset, at))
        views.append((offset, buffer[at : at + length]))
        at += length
    found = []
    for chunk, room in zip(chunks, rooms, strict=True):
        if room is None:
            offset, at = next(start for start in reversed(starts) if start[0] <= chunk.offset)
            room = buffer[at + chunk.offset - offset :][: chunk.stored]
        found.append(room)
    return sorted(views, key=lambda view: view[0]), found


def _read_again(store: Store, pack: str, chunk: Place, stored: memoryview) -> memoryview | None:
    """The chunk by itself, then from the other copies, of which a store has a few at most."""
    for _ in range(_COPIES):
        if _try_read(store, pack, [(chunk.offset, stored)]):
            good = _unpacked(store, chunk, stored)
            if good is not None:
                return good
        if not store.invalidate(pack):
            return None
    return None


def read_one(store: Store, pack: str, chunk: Place) -> memoryview | None:
    """One chunk by itself; None when it cannot be had."""
    return _read_again(store, pack, chunk, memoryview(bytearray(chunk.stored)))


def _unpacked(store: Store, chunk: Place, stored: memoryview) -> memoryview | None:
    """The chunk's bytes when they are the right ones; of a difference, with its base, which is read for it."""
    if chunk.codec not in DELTAS:
        return codec.unpack(stored, chunk.codec, chunk.raw, chunk.digest)
    link = codec.link_of(stored)
    if link is None or link.raw != chunk.raw:
        return None
    base = read_one(store, link.pack, link)
    if base is None:
        _log.error("the base of a chunk is damaged: %d bytes at offset %d of %s", link.stored, link.offset, link.pack)
        return None
    payload = codec.decode_difference(stored, base, chunk.raw, chunk.codec)
    return payload if payload is not None and digest(payload) == chunk.digest else None


def _try_read(store: Store, pack: str, views: Sequence[tuple[int, memoryview]]) -> bool:
    """Whether the pack has all of these ranges."""
    try:
        store.get_ranges_into(pack, views)
    except (NotFoundError, RangeError):  # no such pack, or it ends before the range does
        return False
    return True


def in_order(pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """`map(work, items)` on `pool`, lazily."""
    window: deque[Future[R]] = deque()
    for item in items:
        if len(window) >= ahead:
            yield window.popleft().result()
        window.append(pool.submit(work, item))
    while window:
        yield window.popleft().result()


_AT_ONCE = 8
"""Manifests that are read at once: most of what one takes is the store's answer."""


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step with its manifests, by rank."""

    run: str
    base: Base
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A committed step as its decision describes it: the attempt, and the digests of its ranks' manifests."""

    run: str
    base: Base
    attempt: Attempt
    digests: tuple[bytes, ...]

    def decode(self, rank: int, data: bytes) -> Manifest:
        """The manifest of a rank, checked, from the bytes of its object."""
        return manifests.decode(data, self.attempt.manifest_key(rank), self.digests[rank])


def open_step(store: Store, run: str, base: Base) -> Step:
    """The step's manifests, each checked against the digest in the decision, and all against each other."""
    found = sealed(store, run, base)
    return together(found, read(store, found, range(len(found.digests)), found.decode))


def manifests_like(
    store: Store, run: str, base: Base, rank: int, world_size: int, replicas: bytes
) -> tuple[Manifest, ...]:
    """What holds all that `rank` is likely to save again: its own manifest where as many ranks divided the same work, which they
    then did alike, else those of all."""
    found = sealed(store, run, base)
    if replicas and len(found.digests) == world_size > 1:
        own = found.decode(rank, _encoded(store, found, rank))
        if own.replicas == replicas:
            return (own,)
    return open_step(store, run, base).manifests


def sealed(store: Store, run: str, base: Base) -> Sealed:
    """The step's decision."""
    where = Attempt(run, base.timeline, base.step, base.attempt, 0)
    decision = commit.find_decision(store, where.decision_key)
    if decision is None:
        raise CorruptionError(f"{where.decision_key} is missing although its step is committed")
    if decision.outcome != "commit" or not decision.manifests or decision.attempt != base.attempt:
        raise CorruptionError(f"{where.decision_key} does not commit the attempt that COMMIT names")
    try:
        return Sealed(run, base, where, tuple(bytes.fromhex(each) for each in decision.manifests))
    except ValueError:  # of a document without a digest of its own, as older ones are
        raise CorruptionError(f"{where.decision_key} names manifests by what is no digest") from None


def read(store: Store, found: Sealed, ranks: Sequence[int], take: Callable[[int, bytes], T]) -> list[T]:
    """What `take` makes of the manifests of these ranks, one after another, as they lie in the store."""
    with ThreadPoolExecutor(_AT_ONCE, "headrace-manifests") as pool:
        coming = in_order(pool, lambda rank: _encoded(store, found, rank), ranks, _AT_ONCE)
        return [take(rank, data) for rank, data in zip(ranks, coming, strict=True)]


def together(found: Sealed, given: Sequence[Manifest]) -> Step:
    """The step of these manifests, by rank, once they were seen to belong together."""
    for each in given:
        if each.world_size != len(given):
            raise CorruptionError(
                f"{found.attempt.decision_key} names {len(given)} manifests of a world of {each.world_size}"
            )
    what = manifests.check_shards(given)
    if what is not None:
        raise CorruptionError(f"{found.attempt.decision_key}: {what}", hint="run `headrace ckpt check`")
    return Step(found.run, found.base, tuple(given))


def _encoded(store: Store, found: Sealed, rank: int) -> bytes:
    """The manifest with the decision's digest, from any copy that has it. The last copy is read twice: a byte may have changed
    on the way."""
    key = found.attempt.manifest_key(rank)
    while digest(data := _get(store, key)) != found.digests[rank]:
        if not store.invalidate(key):
            return _get(store, key)
    return data


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key, max_bytes=manifests.MAX_BYTES)
    except NotFoundError:
        raise CorruptionError(f"{key} is missing although its step is committed") from None
