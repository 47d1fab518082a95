"""Read the compressed bytes of samples and verify them.

Purpose: read the files of a sample through a `ShardReader`, and compare them with the index's checksums before a
decoder receives them.

Invariants: `fetch` returns bytes with the XXH3-64 that the index lists, or raises. In a long file that is read in part,
each piece is verified when it is accessed. Wrong bytes are read up to three times:

1. through the cache;
2. directly from the store, since the cache's disk may be faulty;
3. from the store again `LATER` seconds later and through another connection, since the network may be faulty.

Failure behaviour: `CorruptionError` with shard, offset and length if the store's own bytes are wrong or missing. Other
errors of the store are raised unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

from headrace.dataio.cache.readers.base import GAP_BYTES, Read, ShardReader, one_by_one
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, RangeError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.sample import Files, Member, Sample
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import describe_damage
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.byte_ranges import Runs
from headrace.loaders.fetch.partial_file import HEAD_CACHE_BYTES, HeadCache, Media, PartialFile
from headrace.loaders.interfaces import ArrayTargets, Needs

_log = get_logger(__name__)


LATER = 0.25
"""Seconds to wait before bytes that were wrong twice are read again."""
AT_ONCE = 64
"""Number of reads that are prepared together. With many more, the garbage collector would run between them."""
Range = tuple[str, int, int]
"""Part of an object: key, offset, length."""


def files_of(sample: Sample, exts: Sequence[str]) -> Files:
    """The files of a sample with these extensions, in this order."""
    if [member.ext for member in sample.members] == list(exts):
        return Files(sample.shard, sample.members)
    return Files(sample.shard, [_member(sample, ext) for ext in exts])


def spans(files: Files) -> list[Range]:
    """The ranges that `SampleReader.fetch_into` reads.

    Adjacent files form one range, which includes the tar headers between them.
    """
    shard, members = files.shard, files.members
    start, end, gaps = members[0].offset, 0, GAP_BYTES * (len(members) - 1)
    for member in members:  # a plain loop takes half the time, and thousands of samples a second pass here
        offset, length = member.offset, member.length
        if offset < start:
            start = offset
        if offset + length > end:
            end = offset + length
        gaps += length
    if end - start <= gaps:
        return [(shard, start, end - start)]
    return [(shard, member.offset, member.length) for member in members]


class StoreReader:
    """A `ShardReader` without a cache: every read goes to the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read_later(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Like `read`, after `LATER` seconds and through another connection."""
        time.sleep(LATER)
        check_cancelled()
        self._store.reconnect()
        return self.read(key, ranges)

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        buffers = [memoryview(bytearray(length)) for _, length in ranges]
        self._store.get_ranges_into(key, [(start, b) for (start, _), b in zip(ranges, buffers, strict=True) if b])
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
    """Reads the samples of one dataset. Safe to share between threads if `reader` is.

    Args:
        reader: reads ranges of shards, with or without a cache.
        store: the dataset's store, read directly when the cache returned wrong bytes.
        held: limit in bytes on the heads of long files in memory.
    """

    def __init__(self, reader: ShardReader, store: Store, head_cache_bytes: int = HEAD_CACHE_BYTES) -> None:
        self._reader, self._store, self._direct = reader, store, StoreReader(store)
        self._heads = HeadCache(head_cache_bytes)

    def fetch(self, sample: Sample, needs: Needs) -> dict[str, Media]:
        """The requested files by extension, read-only.

        Of a file that is needed in part, the predicted pieces are read now. Other pieces are read when a decoder
        accesses them.
        """
        members = [_member(sample, ext) for ext in needs]
        whole_members = [member for member in members if needs[member.ext] is None]
        media = dict[str, Media]()
        try:
            views = (
                self._reader.read(sample.shard, [(m.offset, m.length) for m in whole_members]) if whole_members else []
            )
            for member, view in zip(whole_members, views, strict=True):
                is_valid = len(view) == member.length and _matches_checksum(view, member.xxh3)
                media[member.ext] = view if is_valid else self._read_again(sample.shard, member)
        except (NotFoundError, RangeError) as error:
            raise self._missing_bytes(sample.shard, whole_members, error) from error
        if len(whole_members) < len(members):
            media |= {m.ext: self._open(sample.shard, m, runs) for m in members if (runs := needs[m.ext]) is not None}
        return media

    def _open(self, shard: str, member: Member, runs: Runs) -> PartialFile:
        """Open a long file and fetch these pieces."""
        file = PartialFile(
            shard,
            member,
            read=functools.partial(self._read_part, shard, member),
            read_direct=functools.partial(self._direct.read, shard),
            read_later=functools.partial(self._direct.read_later, shard),
            describe=functools.partial(describe_damage, self._store, shard),
            heads=self._heads,
        )
        file.prefetch(runs)
        return file

    def _read_part(self, shard: str, member: Member, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Read ranges of a long file. The cache learns where the file begins and ends."""
        return self._reader.read(shard, _within_file(member, ranges))[1:-1]

    def fetch_into(self, files: Files, memory: memoryview) -> int:
        """Read files of a sample into writable `memory`, one after the other. `memory` must be long enough.

        Returns:
            The number of bytes that were read.
        """
        pieces = _pieces(files, memory)
        try:
            self._reader.read_into(files.shard, pieces)
            for (_, view), member in zip(pieces, files.members, strict=True):
                if not _matches_checksum(view, member.xxh3):
                    view[:] = self._read_again(files.shard, member)
        except (NotFoundError, RangeError) as error:
            raise self._missing_bytes(files.shard, files.members, error) from error
        return sum([len(view) for _, view in pieces])

    def fetch_first(self, targets: Sequence[tuple[Files, memoryview]]) -> int:
        """`fetch_into` for many samples; stops at the first sample with an error.

        Returns:
            The number of samples that were read. To get the error of the next one, call `fetch_into` or `fetch`.
        """
        count = 0
        with contextlib.suppress(HeadraceError):
            for start in range(0, len(targets), AT_ONCE):
                batch = targets[start : start + AT_ONCE]
                reads = [(files.shard, _pieces(files, memory)) for files, memory in batch]
                for (_, pieces), (files, _), _ in zip(reads, batch, self._reader.read_each(reads), strict=True):
                    for (_, view), member in zip(pieces, files.members, strict=True):
                        if not _matches_checksum(view, member.xxh3):
                            return count
                    count += 1
                    check_cancelled()
        return count

    def fetch_arrays(self, samples: Sequence[tuple[Sample, Needs, ArrayTargets]]) -> list[dict[str, memoryview] | None]:
        """Read the needed files of many samples, and their arrays directly into the targets.

        Returns:
            For each sample, its other files by extension. None if the sample must be read by `fetch`: a file has
            another length or prefix than its target, or a file, or one of an earlier sample, cannot be read.
        """
        found: list[dict[str, memoryview] | None] = [None] * len(samples)
        placed = [(number, files) for number, one in enumerate(samples) if (files := _placed(*one)) is not None]
        with contextlib.suppress(HeadraceError):
            for start in range(0, len(placed), AT_ONCE):
                batch = placed[start : start + AT_ONCE]
                reads = [(samples[number][0].shard, _pieces_of(files)) for number, files in batch]
                for (number, files), _ in zip(batch, self._reader.read_each(reads), strict=True):
                    found[number] = _checked(files)
                    check_cancelled()
        return found

    def ranges(self, sample: Sample, needs: Needs) -> list[Range]:
        """The ranges that `fetch` reads, as far as the index predicts them, without the pieces that are in memory.

        Those of a long file begin and end with an empty range.
        """
        predicted = list[Range]()
        for member in sample.members:
            if member.ext not in needs:
                continue
            runs = needs[member.ext]
            if runs is None:
                predicted.append((sample.shard, member.offset, member.length))
            else:
                missing = self._heads.uncached(sample.shard, member, runs)
                if missing:
                    part = _within_file(member, byte_ranges.ranges(member, missing))
                    predicted += [(sample.shard, offset, length) for offset, length in part]
        return predicted

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Tell the reader which ranges are read next, soonest first."""
        self._reader.announce(upcoming)

    @property
    def head_bytes(self) -> int:
        """Bytes in memory for the heads of long files."""
        return self._heads.nbytes

    def close(self) -> None:
        self._reader.close()

    def _read_again(self, shard: str, member: Member) -> memoryview:
        """Read a file again whose bytes were wrong: from the store at once, then later through another connection."""
        offset, length, xxh3 = member.offset, member.length, member.xxh3
        view = self._direct.read(shard, [(offset, length)])[0]
        if _matches_checksum(view, xxh3):
            warn_once(_log, f"the cache returned wrong bytes of {shard}; the store's bytes are right and were used")
            return view
        view = self._direct.read_later(shard, [(offset, length)])[0]
        if _matches_checksum(view, xxh3):
            warn_once(
                _log, f"bytes of {shard} were wrong twice, then right through another connection: check the network"
            )
            return view
        raise CorruptionError(
            f"{describe_damage(self._store, shard, offset)}: the {length} bytes at {offset} are not those that were packed",
            hint="check the dataset with `headrace verify`",
        )

    def _missing_bytes(self, shard: str, members: Sequence[Member], error: HeadraceError) -> CorruptionError:
        """The error for a shard that is missing, or too short for a range. Of a joined shard, it names the object."""
        name = describe_damage(self._store, shard, *(member.offset for member in members))
        return CorruptionError(f"{name}: {error.message}", hint=error.hint)


def _within_file(member: Member, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """These ranges of a file, between an empty range at its beginning and one at its end (`ShardReader.read`)."""
    return [(member.offset, 0), *ranges, (member.offset + member.length, 0)]


def _pieces(files: Files, memory: memoryview) -> list[tuple[int, memoryview]]:
    """The offset of each file, and its part of `memory`, one after the other."""
    pieces: list[tuple[int, memoryview]] = []  # a plain loop, as in `spans`
    at = 0
    for member in files.members:
        end = at + member.length
        pieces.append((member.offset, memory[at:end]))
        at = end
    return pieces


class _PlacedFile(msgspec.Struct, frozen=True, gc=False):
    """A file that is read into `start` and, if it ends with an array, the array into the batch's memory.

    `start` must then be the `prefix`.
    """

    member: Member
    start: memoryview
    prefix: bytes = b""
    array: memoryview | None = None


def _placed(sample: Sample, needs: Needs, targets: ArrayTargets) -> list[_PlacedFile] | None:
    """The needed files and where they are read.

    None if the sample lacks one of them, or if one does not have the length of its target.
    """
    files: list[_PlacedFile] = []  # a plain loop, as in `spans`
    places, missing = targets.places, len(targets.places)
    for member in sample.members:
        if (place := places.get(member.ext)) is not None:
            prefix, size, at = place.prefix, place.size, targets.slot * place.size
            if member.length != len(prefix) + size:
                return None
            start = memoryview(bytearray(len(prefix)))
            files.append(_PlacedFile(member, start, prefix, place.memory[at : at + size]))
            missing -= 1
        elif member.ext in needs:
            files.append(_PlacedFile(member, memoryview(bytearray(member.length))))
    return files if len(files) == len(needs) and not missing else None


def _pieces_of(files: Sequence[_PlacedFile]) -> list[tuple[int, memoryview]]:
    pieces: list[tuple[int, memoryview]] = []
    for file in files:
        offset = file.member.offset
        pieces.append((offset, file.start))
        if file.array is not None:
            pieces.append((offset + len(file.start), file.array))
    return pieces


def _checked(files: Sequence[_PlacedFile]) -> dict[str, memoryview] | None:
    """The files without arrays. None if a file has another prefix than its target, or a wrong checksum."""
    others: dict[str, memoryview] = {}
    for file in files:
        digest = xxhash.xxh3_64(file.start)
        if file.array is None:
            others[file.member.ext] = file.start.toreadonly()
        elif file.start == file.prefix:
            digest.update(file.array)
        else:
            return None
        if digest.intdigest() != file.member.xxh3:
            return None
    return others


def _matches_checksum(view: memoryview, xxh3: int) -> bool:
    return xxhash.xxh3_64_intdigest(view) == xxh3


def _member(sample: Sample, ext: str) -> Member:
    for member in sample.members:
        if member.ext == ext:
            return member
    raise _unlisted_error(ext)


def _unlisted_error(ext: str) -> CorruptionError:
    return CorruptionError(f"the index lists no .{ext} file for this sample")
