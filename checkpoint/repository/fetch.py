"""Reading chunks out of packs: coalesced ranges, bounded memory, every chunk checked, a bad one fetched once more, and then from
every other copy that the store knows of.

Invariant: what is handed out are the bytes with the chunk's digest. Memory in flight is at most `_THREADS` batches of
`BATCH_BYTES`, and a batch is one call to the store.
Failure behaviour: a chunk that is wrong in every copy, or whose pack is missing or too short, is handed out
as None; the caller knows what the chunk was for and says so. Passing trouble raises as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local
from typing import Generic, Protocol, TypeVar

from checkpoint.format import codec
from checkpoint.format.chunk import CHUNK_BYTES
from checkpoint.repository.ahead import in_order
from dataio.core.errors import AccessDeniedError, NotFoundError, UsageError
from dataio.core.limits import KIB
from dataio.store.contract import Store

BATCH_BYTES = 4 * CHUNK_BYTES
_THREADS = 2
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


def fetch(store: Store, work: Iterable[Batch[P]], use: Callable[[str, P, memoryview | None], None]) -> None:
    """Read every batch and hand each chunk to `use(pack, chunk, payload)`, from several threads.

    The payload is valid during the call only.
    """
    buffers = local()

    def one(batch: Batch[P]) -> None:
        if not hasattr(buffers, "bytes"):
            buffers.bytes = memoryview(bytearray(BATCH_BYTES))
        _read_batch(store, batch, buffers.bytes, use)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-read") as pool:
        for _ in in_order(pool, one, work, 2 * _THREADS):
            pass


def _read_batch(
    store: Store, batch: Batch[P], buffer: memoryview, use: Callable[[str, P, memoryview | None], None]
) -> None:
    views, at = [], 0
    for offset, length in batch.ranges:
        views.append((offset, buffer[at : at + length]))
        at += length
    whole = _try_read(store, batch.pack, views)
    for chunk in batch.chunks:
        offset, view = next((o, v) for o, v in reversed(views) if o <= chunk.offset)
        stored = view[chunk.offset - offset : chunk.offset - offset + chunk.stored]
        good = codec.unpack(stored, chunk.codec, chunk.raw, chunk.digest) if whole else None
        use(batch.pack, chunk, good or _read_again(store, batch.pack, chunk, stored))


def _read_again(store: Store, pack: str, chunk: Place, stored: memoryview) -> memoryview | None:
    """The chunk by itself, then from the other copies, of which a store has a few at most."""
    for _ in range(_COPIES):
        if _try_read(store, pack, [(chunk.offset, stored)]):
            good = codec.unpack(stored, chunk.codec, chunk.raw, chunk.digest)
            if good is not None:
                return good
        if not store.distrust(pack):
            return None
    return None


def _try_read(store: Store, pack: str, views: Sequence[tuple[int, memoryview]]) -> bool:
    """Whether the pack has all of these ranges."""
    try:
        store.get_ranges_into(pack, views)
    except AccessDeniedError:
        raise
    except (NotFoundError, UsageError):  # no such pack, or it ends before the range does
        return False
    return True
