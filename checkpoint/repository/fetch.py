"""Reads a committed step: its manifests, and chunks out of packs.

- `open_step` reads the manifests that the step's decision names, directly or in groups, and compares each with its
  digest there.
- `fetch` reads chunks in coalesced ranges with bounded memory, and checks every chunk. It reads a damaged chunk again,
  then from every other copy that the store knows. It can read a raw chunk directly into the caller's memory (`room`),
  without a copy.
- A chunk that is stored as a difference also needs its base chunk, which is read and checked in the same way.

Invariant: a returned manifest is the one that the decision names, and a returned chunk matches its digest. At most
`workers` batches of `BATCH_BYTES` are in memory. The store reads a batch in one call.
Failure behaviour: `CorruptionError` for a manifest that is missing or damaged in every copy. A chunk that is damaged
in every copy is passed on as None; the caller reports which tensors need it. Transient errors of the store are raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import local
from typing import Generic, Protocol, TypeVar

from headrace.checkpoint.format import codec, names
from headrace.checkpoint.format import group as groups
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import CHUNK_BYTES, digest
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.group import Group
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
"""Default number of threads.

It is larger than the number of threads that hash concurrently, because some threads wait for the store.
"""
_COPIES = 4
_GAP = 64 * KIB
"""Ranges with at most this many bytes between them are read as one, which is cheaper than another request."""


class Place(Protocol):
    """A chunk's position in its pack, its sizes, codec and digest."""

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
    """Chunks of one pack, in the order of their offsets, and the ranges (offset, length) that hold them."""

    pack: str
    chunks: tuple[P, ...]
    ranges: tuple[tuple[int, int], ...]


def batches(pack: str, chunks: Iterable[P], most: int = BATCH_BYTES) -> Iterator[Batch[P]]:
    """Group the chunks of one pack into batches of at most `most` bytes. This is a pure function."""
    members: list[P] = []
    ranges: list[tuple[int, int]] = []
    for chunk in sorted(chunks, key=lambda c: c.offset):
        joined = _join(ranges, chunk)
        if members and sum(length for _, length in joined) > most:
            yield Batch(pack, tuple(members), tuple(ranges))
            members, joined = [], [(chunk.offset, chunk.stored)]
        members.append(chunk)
        ranges = joined
    if members:
        yield Batch(pack, tuple(members), tuple(ranges))


def _join(ranges: Sequence[tuple[int, int]], chunk: Place) -> list[tuple[int, int]]:
    if ranges:
        start, length = ranges[-1]
        end = max(start + length, chunk.offset + chunk.stored)
        if chunk.offset - (start + length) <= _GAP:
            return [*ranges[:-1], (start, end - start)]
    return [*ranges, (chunk.offset, chunk.stored)]


def no_room(pack: str, chunk: object) -> None:
    """The default `room`: every chunk is read into an internal buffer."""


def fetch(
    store: Store,
    work: Iterable[Batch[P]],
    use: Callable[[str, P, memoryview | None], None],
    room: Callable[[str, P], memoryview | None] = no_room,
    workers: int = THREADS,
) -> None:
    """Read every batch and pass each chunk to `use(pack, chunk, payload)`, from several threads.

    `room(pack, chunk)` returns memory for the bytes of a raw chunk, or None. `fetch` writes the bytes there before it
    checks them, and the payload is that memory. Any other payload is valid only during the call.
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
    is_read = _try_read(store, batch.pack, views)
    for chunk, stored in zip(batch.chunks, places, strict=True):
        good = _unpacked(store, chunk, stored) if is_read else None
        use(batch.pack, chunk, good if good is not None else _read_again(store, batch.pack, chunk, stored))


def _places(
    chunks: Sequence[Place], rooms: Sequence[memoryview | None], buffer: memoryview
) -> tuple[list[tuple[int, memoryview]], list[memoryview]]:
    """Return the reads, as (offset, memory), and the memory that then holds each chunk's stored bytes.

    This is a pure function.

    Chunks without memory from `room` are read into `buffer`. Ranges with small gaps are joined.
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
    memory = []
    for chunk, room in zip(chunks, rooms, strict=True):
        if room is None:
            offset, at = next(start for start in reversed(starts) if start[0] <= chunk.offset)
            room = buffer[at + chunk.offset - offset :][: chunk.stored]
        memory.append(room)
    return sorted(views, key=lambda view: view[0]), memory


def _read_again(store: Store, pack: str, chunk: Place, stored: memoryview) -> memoryview | None:
    """Read the chunk again separately, then from the other copies. A store has only a few copies."""
    for _ in range(_COPIES):
        if _try_read(store, pack, [(chunk.offset, stored)]):
            good = _unpacked(store, chunk, stored)
            if good is not None:
                return good
        if not store.invalidate(pack):
            return None
    return None


def read_one(store: Store, pack: str, chunk: Place) -> memoryview | None:
    """Read one chunk and check it; None if every copy is missing or damaged."""
    return _read_again(store, pack, chunk, memoryview(bytearray(chunk.stored)))


def _unpacked(store: Store, chunk: Place, stored: memoryview) -> memoryview | None:
    """Decode the chunk and compare its digest; None if it is damaged.

    For a difference, the base chunk is read as well.
    """
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
    """Read the ranges; False if the pack is missing or too short."""
    try:
        store.get_ranges_into(pack, views)
    except (NotFoundError, RangeError):  # the pack is missing, or it ends before the range does
        return False
    return True


def in_order(pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """`map(work, items)` on `pool`, in order, with at most `ahead` items in flight."""
    window: deque[Future[R]] = deque()
    for item in items:
        if len(window) >= ahead:
            yield window.popleft().result()
        window.append(pool.submit(work, item))
    while window:
        yield window.popleft().result()


_AT_ONCE = 8
"""The number of manifests that are read concurrently. Most of the time of one read is the store's latency."""


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step with its manifests, by rank."""

    run: str
    base: Base
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A committed step as its decision describes it.

    The decision names the digest of each rank's manifest (`digests`), or the digest of each group of `group_ranks` ranks
    (`groups`).
    """

    run: str
    base: Base
    attempt: Attempt
    digests: tuple[bytes, ...]
    groups: tuple[bytes, ...] = ()
    group_ranks: int = 1


def open_step(store: Store, run: str, base: Base) -> Step:
    """Read the step's manifests. Each is compared with its digest, and all with each other."""
    return open_sealed(store, sealed(store, run, base))


def open_sealed(store: Store, step: Sealed) -> Step:
    """Read the manifests of a step whose decision is known."""
    return together(step, _read(store, step, range(step.attempt.world_size)))


def manifest_of_rank(store: Store, step: Sealed, rank: int) -> Manifest:
    """Read and check the manifest of one rank of a step whose decision is known. Those of other ranks are not read."""
    return _read(store, step, [rank])[0]


def manifests_like(
    store: Store, run: str, base: Base, rank: int, world_size: int, replicas: bytes
) -> tuple[Manifest, ...]:
    """The manifests to deduplicate `rank`'s next save against.

    If the world size and `replicas` are the same, the ranks divided the work in the same way, and the rank's own
    manifest is enough. Otherwise the manifests of all ranks are returned.
    """
    step = sealed(store, run, base)
    if replicas and step.attempt.world_size == world_size > 1:
        manifest = manifest_of_rank(store, step, rank)
        if manifest.replicas == replicas:
            return (manifest,)
    return open_sealed(store, step).manifests


def manifest_of(store: Store, run: str, base: Base, rank: int, expected: bytes, data: bytes) -> Manifest:
    """Decode the manifest of one rank, and compare it with its digest `expected`.

    `data`: the encoded manifest. If it is empty, the manifest is read from the store.
    """
    key = names.manifest(run, base.timeline, base.step, base.attempt, rank)
    return manifests.decode(data or _of_digest(store, key, expected), key, expected)


def sealed(store: Store, run: str, base: Base) -> Sealed:
    """Read the step's decision. Raises `CorruptionError` if it does not commit the attempt that COMMIT names."""
    key = names.decision(run, base.timeline, base.step, base.attempt)
    decision = commit.find_decision(store, key)
    if decision is None:
        raise CorruptionError(f"{key} is missing although its step is committed")
    if decision.outcome != "commit" or decision.attempt != base.attempt:
        raise CorruptionError(f"{key} does not commit the attempt that COMMIT names")
    world_size = decision.world_size if decision.groups else len(decision.manifests)
    group_ranks = max(decision.group_ranks, 1)
    if not world_size or (decision.groups and len(decision.groups) != -(-world_size // group_ranks)):
        raise CorruptionError(f"{key} does not name the manifests of all ranks")
    where = Attempt(run, base.timeline, base.step, base.attempt, world_size)
    try:
        digests, of_groups = (
            tuple(bytes.fromhex(each) for each in named) for named in (decision.manifests, decision.groups)
        )
    except ValueError:  # possible in older documents, which have no digest of their own
        raise CorruptionError(f"{key} names manifests by invalid digests") from None
    return Sealed(run, base, where, digests, of_groups, group_ranks)


def _read(store: Store, step: Sealed, ranks: Sequence[int]) -> list[Manifest]:
    """Read and check the manifests of these ranks, several at once. They are decoded one after another."""
    digests = digests_of(store, step, ranks)
    return list(read_manifests(store, step, {rank: digests[rank] for rank in ranks}))


def read_manifests(store: Store, step: Sealed, digests: Mapping[int, bytes]) -> Iterator[Manifest]:
    """Read and check manifests, given as digests by rank, in this order. Few of them are in memory undecoded."""
    objects = [(step.attempt.manifest_key(rank), expected) for rank, expected in digests.items()]
    for (key, expected), data in zip(objects, _encoded(store, objects), strict=True):
        yield manifests.decode(data, key, expected)


def read_groups(store: Store, step: Sealed, indexes: Sequence[int]) -> Iterator[Group]:
    """Read and check these groups, in this order."""
    objects = [(step.attempt.group_key(index), step.groups[index]) for index in indexes]
    for (key, expected), data in zip(objects, _encoded(store, objects), strict=True):
        yield groups.decode(data, key, expected)


def digests_of(store: Store, step: Sealed, ranks: Sequence[int]) -> dict[int, bytes]:
    """The digests of these ranks' manifests. They may be named by groups, which are then read."""
    if not step.groups:
        return {rank: step.digests[rank] for rank in ranks}
    digests: dict[int, bytes] = {}
    for group in read_groups(store, step, sorted({rank // step.group_ranks for rank in ranks})):
        digests |= {rank: member.manifest for rank, member in zip(group.ranks, group.members, strict=True)}
    for rank in ranks:
        if rank not in digests:
            raise missing_digest(step, rank)
    return digests


def missing_digest(step: Sealed, rank: int) -> CorruptionError:
    """The error of a step whose groups leave a rank out."""
    return CorruptionError(f"{step.attempt.decision_key}: no group names the manifest of rank {rank}")


def _encoded(store: Store, objects: Sequence[tuple[str, bytes]]) -> Iterator[bytes]:
    """The bytes of these objects, given as (key, digest), in their order."""
    if len(objects) == 1:
        yield _of_digest(store, *objects[0])
        return
    with ThreadPoolExecutor(_AT_ONCE, "headrace-manifests") as pool:
        yield from in_order(pool, lambda each: _of_digest(store, *each), objects, _AT_ONCE)


def together(step: Sealed, manifests_by_rank: Sequence[Manifest]) -> Step:
    """Check that the manifests, given by rank, agree with each other, and return them as a step."""
    for manifest in manifests_by_rank:
        if manifest.world_size != len(manifests_by_rank):
            raise other_world(step, manifest)
    mismatch = manifests.check_shards(manifests_by_rank)
    if mismatch is not None:
        raise CorruptionError(f"{step.attempt.decision_key}: {mismatch}", hint="run `headrace ckpt check`")
    return Step(step.run, step.base, tuple(manifests_by_rank))


def other_world(step: Sealed, manifest: Manifest) -> CorruptionError:
    """The error of a manifest that another number of ranks wrote."""
    count = step.attempt.world_size
    return CorruptionError(f"{step.attempt.decision_key} names {count} manifests of a world of {manifest.world_size}")


def _of_digest(store: Store, key: str, expected: bytes) -> bytes:
    """The bytes of an object, from any copy that has this digest.

    The last copy is read twice, because a byte may have changed in transit.
    """
    while digest(data := _get(store, key)) != expected:
        if not store.invalidate(key):
            return _get(store, key)
    return data


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key, max_bytes=manifests.MAX_BYTES)
    except NotFoundError:
        raise CorruptionError(f"{key} is missing although its step is committed") from None
