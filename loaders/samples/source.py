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
from dataio.core.errors import CorruptionError, MillraceError, NotFoundError, UsageError
from dataio.core.log import get_logger, warn_once
from dataio.shards.contract import Member, Sample
from dataio.store.contract import Store

_log = get_logger(__name__)


Range = tuple[str, int, int]
"""Of an object: key, offset, length."""


def ranges(sample: Sample, exts: Sequence[str]) -> list[Range]:
    """What `Source.fetch` reads of a sample, as far as the index lists it."""
    return [(sample.shard, member.offset, member.length) for member in sample.members if member.ext in exts]


class StoreReader:
    """A `ShardReader` without a cache: every read goes to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        buffers = [memoryview(bytearray(length)) for _, length in ranges]
        self._store.get_ranges_into(key, [(start, b) for (start, _), b in zip(ranges, buffers, strict=True)])
        return [buffer.toreadonly() for buffer in buffers]

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._store.get_ranges_into(key, pieces)

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
        except (NotFoundError, UsageError) as error:
            raise _lost(sample, error) from error

    def fetch_into(self, sample: Sample, exts: Sequence[str], memory: memoryview) -> int:
        """The same, one after the other into writable `memory`, which is long enough; how many bytes they are."""
        members, at, pieces = [_member(sample, ext) for ext in exts], 0, list[tuple[int, memoryview]]()
        for member in members:
            pieces.append((member.offset, memory[at : at + member.length]))
            at += member.length
        try:
            self._reader.read_into(sample.shard, pieces)
            for member, (_, view) in zip(members, pieces, strict=True):
                if (checked := self._checked(sample, member, view)) is not view:
                    view[:] = checked
        except (NotFoundError, UsageError) as error:
            raise _lost(sample, error) from error
        return at

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Say which ranges are read next, soonest first."""
        self._reader.announce(upcoming)

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


def _lost(sample: Sample, error: MillraceError) -> CorruptionError:
    """The shard is gone, or too short for the range."""
    return CorruptionError(f"{sample.shard}: {error.message}", hint=error.hint)


def _is_right(view: memoryview, member: Member) -> bool:
    return len(view) == member.length and xxhash.xxh3_64_intdigest(view) == member.xxh3


def _member(sample: Sample, ext: str) -> Member:
    try:
        return sample.member(ext)
    except KeyError:
        raise CorruptionError(f"the index lists no .{ext} file for this sample") from None
