"""From samples to their compressed bytes, checked.

Purpose: read the members of a sample through a `ShardReader` and compare them with the index's digests before any decoder
sees them.
Invariant: `fetch` returns bytes whose XXH3-64 is the index's, or raises. A first mismatch may be the cache's fault (its disk
may rot), so the bytes are read once more, straight from the store.
Failure behaviour: `CorruptionError` naming shard, offset and length when the store's own bytes are wrong or missing; other
errors of the store pass through.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from dataio.cache.contract import ShardReader
from dataio.core.errors import CorruptionError, NotFoundError, UsageError
from dataio.core.log import get_logger, warn_once
from dataio.shards.contract import Member, Sample
from dataio.store.contract import Store

_log = get_logger(__name__)


class StoreReader:
    """A `ShardReader` without a cache: every read goes to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        buffers = [memoryview(bytearray(length)) for _, length in ranges]
        self._store.get_ranges_into(key, [(start, b) for (start, _), b in zip(ranges, buffers, strict=True)])
        return [buffer.toreadonly() for buffer in buffers]

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


class Source:
    """Reads samples of one dataset. Safe to share between threads, as its reader is."""

    def __init__(self, reader: ShardReader, store: Store) -> None:
        self._reader, self._direct = reader, StoreReader(store)

    def fetch(self, sample: Sample, exts: Sequence[str]) -> dict[str, memoryview]:
        """The members of these extensions, read-only; each extension once."""
        members = [_member(sample, ext) for ext in dict.fromkeys(exts)]
        try:
            views = self._reader.read(sample.shard, [(m.offset, m.length) for m in members])
            return {m.ext: self._checked(sample, m, view) for m, view in zip(members, views, strict=True)}
        except (NotFoundError, UsageError) as error:  # the shard is gone, or too short for the range
            raise CorruptionError(f"{sample.shard}: {error.message}", hint=error.hint) from error

    def announce(self, upcoming: Sequence[tuple[Sample, Sequence[str]]]) -> None:
        """Say which samples are read next, soonest first."""
        members = [(sample, _member(sample, ext)) for sample, exts in upcoming for ext in dict.fromkeys(exts)]
        self._reader.announce([(sample.shard, member.offset, member.length) for sample, member in members])

    def close(self) -> None:
        self._reader.close()

    def _checked(self, sample: Sample, member: Member, view: memoryview) -> memoryview:
        if _is_right(view, member):
            return view
        again = self._direct.read(sample.shard, [(member.offset, member.length)])[0]
        if _is_right(again, member):
            warn_once(_log, f"the cache returned wrong bytes of {sample.shard}; the store's are right and were used")
            return again
        raise CorruptionError(
            f"{sample.shard}: the {member.length} bytes at {member.offset} are not those that were packed",
            hint="check the dataset with `millrace verify`",
        )


def _is_right(view: memoryview, member: Member) -> bool:
    return len(view) == member.length and xxhash.xxh3_64_intdigest(view) == member.xxh3


def _member(sample: Sample, ext: str) -> Member:
    try:
        return sample.member(ext)
    except KeyError:
        raise CorruptionError(f"the index lists no .{ext} file for this sample") from None
