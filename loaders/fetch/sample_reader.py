"""From samples to their compressed bytes, checked.

Purpose: read the members of a sample through a `ShardReader` and compare them with the index's digests before any
decoder sees them.
Invariant: `fetch` returns bytes whose XXH3-64 is the index's, or raises; of long files that are needed in part it
returns something that compares each piece when it is looked at. A first mismatch may be the cache's fault (its disk may
rot), so the bytes are read once more, straight from the store. A second one may be the network's, so they are read
again `LATER` seconds later, by another connection: only a third mismatch is a verdict.
Failure behaviour: `CorruptionError` naming shard, offset and length when the store's own bytes are wrong or missing;
other errors of the store pass through.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import xxhash

from headrace.dataio.cache.readers.base import GAP_BYTES, Read, ShardReader, one_by_one
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, RangeError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.contract import Files, Member, Sample
from headrace.dataio.store.base import Store
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.partial import needed
from headrace.loaders.partial.file import Media, PartialFile
from headrace.loaders.partial.heads import HELD_BYTES, Heads
from headrace.loaders.partial.needed import Runs

_log = get_logger(__name__)


LATER = 0.25
"""Seconds after which bytes that were wrong twice are looked at again."""
AT_ONCE = 64
"""So many reads are prepared at once: objects enough that the garbage collector would look for some among thousands."""
_WHOLE: Mapping[str, Runs] = {}
Range = tuple[str, int, int]
"""Of an object: key, offset, length."""


def ranges(sample: Sample, exts: Sequence[str], partial: Mapping[str, Runs] = _WHOLE) -> list[Range]:
    """What is read of a sample, as far as the index lists it and it is foreseen."""
    if not partial:
        return [(sample.shard, member.offset, member.length) for member in sample.members if member.ext in exts]
    return [
        (sample.shard, offset, length)
        for member in sample.members
        if member.ext in exts
        for offset, length in (
            needed.ranges(member, partial[member.ext]) if member.ext in partial else [(member.offset, member.length)]
        )
    ]


def files(sample: Sample, exts: Sequence[str]) -> Files:
    """Where the members of these extensions lie, in this order."""
    if [member.ext for member in sample.members] == list(exts):
        return Files(sample.shard, sample.members)
    by_ext = {member.ext: member for member in reversed(sample.members)}
    return Files(sample.shard, [by_ext.get(ext) or _unlisted(ext) for ext in exts])


def spans(files: Files) -> list[Range]:
    """What `SampleReader.fetch_into` reads of one or more files: those that lie side by side, with the headers between
    them, as one."""
    shard, each = files.shard, files.each
    first, end, gaps = each[0].offset, 0, GAP_BYTES * (len(each) - 1)
    for member in each:  # plainly, in half the time: thousands a second pass here
        offset, length = member.offset, member.length
        if offset < first:
            first = offset
        if offset + length > end:
            end = offset + length
        gaps += length
    if end - first <= gaps:
        return [(shard, first, end - first)]
    return [(shard, member.offset, member.length) for member in each]


class StoreReader:
    """A `ShardReader` without a cache: every read goes to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_later(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The same after a while, by another connection."""
        time.sleep(LATER)
        check_cancelled()  # whether anybody still wants it
        self._store.reconnect()
        return self.read(key, ranges)

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        buffers = [memoryview(bytearray(length)) for _, length in ranges]
        self._store.get_ranges_into(key, [(start, b) for (start, _), b in zip(ranges, buffers, strict=True)])
        return [buffer.toreadonly() for buffer in buffers]

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._store.get_ranges_into(key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        return one_by_one(self, reads)

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        pass

    def close(self) -> None:
        pass


class SampleReader:
    """Reads samples of one dataset, and holds so many bytes of the heads of long files. Safe to share between threads,
    as its reader is."""

    def __init__(self, reader: ShardReader, store: Store, held: int = HELD_BYTES) -> None:
        self._reader, self._direct, self._heads = reader, StoreReader(store), Heads(held)

    def fetch(self, sample: Sample, exts: Sequence[str], partial: Mapping[str, Runs] = _WHOLE) -> dict[str, Media]:
        """The members of these extensions, read-only; each extension once. Of those that are `partial`, the pieces that
        are foreseen are there, and others are read when they are looked at."""
        members = [_member(sample, ext) for ext in dict.fromkeys(exts)]
        whole = [member for member in members if member.ext not in partial] if partial else members
        found = dict[str, Media]()
        try:
            views = self._reader.read(sample.shard, [(m.offset, m.length) for m in whole]) if whole else []
            for member, view in zip(whole, views, strict=True):
                found[member.ext] = self._checked(sample.shard, member, view)
        except (NotFoundError, RangeError) as error:
            raise _lost(sample.shard, error) from error
        for member in members if partial else ():
            if member.ext in partial:
                read = functools.partial(self._reader.read, sample.shard)
                again = functools.partial(self._direct.read, sample.shard)
                later = functools.partial(self._direct.read_later, sample.shard)
                file = found[member.ext] = PartialFile(sample.shard, member, read, again, self._heads, later)
                file.foresee(partial[member.ext])
        return found

    def fetch_into(self, files: Files, memory: memoryview) -> int:
        """Some files of a sample, one after the other into writable `memory`, which is long enough; how many bytes they
        are."""
        pieces = _pieces(files, memory)
        try:
            self._reader.read_into(files.shard, pieces)
            for (offset, view), member in zip(pieces, files.each, strict=True):
                if not _is_right(view, member.xxh3):
                    view[:] = self._again(files.shard, offset, len(view), member.xxh3)
        except (NotFoundError, RangeError) as error:
            raise _lost(files.shard, error) from error
        return sum([len(view) for _, view in pieces])

    def fetch_first(self, wanted: Sequence[tuple[Files, memoryview]]) -> int:
        """`fetch_into` for one after the other, as far as nothing is wrong: how many of the first are there. What is
        the matter with the next one, `fetch_into` or `fetch` says."""
        done = 0
        with contextlib.suppress(HeadraceError):
            for first in range(0, len(wanted), AT_ONCE):
                some = wanted[first : first + AT_ONCE]
                reads = [(files.shard, _pieces(files, memory)) for files, memory in some]
                for (_, pieces), (files, _), _ in zip(reads, some, self._reader.read_each(reads), strict=True):
                    for (_, view), member in zip(pieces, files.each, strict=True):
                        if not _is_right(view, member.xxh3):
                            return done
                    done += 1
                    check_cancelled()  # whether anybody still wants the rest
        return done

    def ranges(self, sample: Sample, exts: Sequence[str], partial: Mapping[str, Runs] = _WHOLE) -> list[Range]:
        """What `fetch` reads of a sample, as far as it is foreseen and not held."""
        if partial:
            by_ext = {member.ext: member for member in reversed(sample.members)}
            partial = {
                ext: self._heads.others(sample.shard, by_ext[ext], runs)
                for ext, runs in partial.items()
                if ext in by_ext
            }
        return ranges(sample, exts, partial)

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Say which ranges are read next, soonest first."""
        self._reader.announce(upcoming)

    @property
    def held(self) -> int:
        """Bytes of heads of long files that it holds."""
        return self._heads.nbytes

    def close(self) -> None:
        self._reader.close()

    def _checked(self, shard: str, member: Member, view: memoryview) -> memoryview:
        if len(view) == member.length and _is_right(view, member.xxh3):
            return view
        return self._again(shard, member.offset, member.length, member.xxh3)

    def _again(self, shard: str, offset: int, length: int, xxh3: int) -> memoryview:
        """What was wrong once more, straight from the store."""
        again = self._direct.read(shard, [(offset, length)])[0]
        if _is_right(again, xxh3):
            warn_once(_log, f"the cache returned wrong bytes of {shard}; the store's are right and were used")
            return again
        again = self._direct.read_later(shard, [(offset, length)])[0]
        if _is_right(again, xxh3):
            warn_once(_log, f"bytes of {shard} were wrong twice, and right by another connection: check the network")
            return again
        raise CorruptionError(
            f"{shard}: the {length} bytes at {offset} are not those that were packed",
            hint="check the dataset with `headrace verify`",
        )


def _pieces(files: Files, memory: memoryview) -> list[tuple[int, memoryview]]:
    """Where each file lies, and where in `memory` it goes: one after the other."""
    pieces: list[tuple[int, memoryview]] = []  # made plainly, as `spans` is
    at = 0
    for member in files.each:
        end = at + member.length
        pieces.append((member.offset, memory[at:end]))
        at = end
    return pieces


def _lost(shard: str, error: HeadraceError) -> CorruptionError:
    """The shard is gone, or too short for the range."""
    return CorruptionError(f"{shard}: {error.message}", hint=error.hint)


def _is_right(view: memoryview, xxh3: int) -> bool:
    return xxhash.xxh3_64_intdigest(view) == xxh3


def _member(sample: Sample, ext: str) -> Member:
    try:
        return sample.member(ext)
    except KeyError:
        _unlisted(ext)


def _unlisted(ext: str) -> NoReturn:
    raise CorruptionError(f"the index lists no .{ext} file for this sample") from None
