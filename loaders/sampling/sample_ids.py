"""The ids of a stream's samples, in little memory, and compact arrays of small numbers for each sample.

Purpose: a loader delivers all samples of a dataset, or only those that it can use. An array of ids takes 8 bytes for
each sample in every rank: 8 GB at 10^9 samples. The classes here hold the same ids as a range, as runs, as a bitmap or
as a bucket number for each sample.
Invariants:

* Ids are ascending. Row r of a stream is its r-th id, and `take` maps rows to ids.
* `IdsBuilder` chooses the representation that takes the least memory. All of them give the same results.
* `SmallCounts` and `BucketIds` have one byte for each sample if the numbers are below 256. Their directories take at
  most 1/8 byte a sample for each bucket.

Failure behaviour: rows are not checked here. A row outside the ids raises `IndexError` or returns an unspecified id, so
callers pass rows of an `Order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.loaders.sampling.permutation import I64

_BLOCK = 512
"""Samples for which a directory has one entry."""
_ROWS_AT_ONCE = 4096
"""Rows that are looked up together, which bounds the memory for their blocks."""
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Small = npt.NDArray[Any]
"""An array of unsigned integers."""


class SampleIds(ABC):
    """Ascending ids of samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: I64) -> I64:
        """Return the ids at these rows."""

    @abstractmethod
    def rows_below(self, end: int) -> int:
        """Return the number of ids below `end`."""

    def between(self, start: int, stop: int) -> I64:
        """Return the ids from `start` on that are below `stop`."""
        return self.take(np.arange(self.rows_below(start), self.rows_below(stop), dtype=np.int64))

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that the ids take, in bytes."""

    def __getitem__(self, row: int) -> int:
        return int(self.take(np.array([row], np.int64))[0])


class AllIds(SampleIds):
    """The ids 0 to n - 1."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def take(self, rows: I64) -> I64:
        return rows

    def rows_below(self, end: int) -> int:
        return min(end, self._samples)

    @property
    def nbytes(self) -> int:
        return 0


class RunIds(SampleIds):
    """Runs of consecutive ids. Run n has `lengths[n]` ids from `starts[n]` on. Runs are ascending and not empty."""

    def __init__(self, starts: I64, lengths: I64) -> None:
        self._starts, self._ends = starts, np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, rows: I64) -> I64:
        runs = np.searchsorted(self._ends, rows, side="right")
        return self._starts[runs] + rows - self._before(runs)

    def rows_below(self, end: int) -> int:
        run = int(np.searchsorted(self._starts, end, side="left")) - 1
        if run < 0:
            return 0
        before = int(self._ends[run - 1]) if run else 0
        return min(before + end - int(self._starts[run]), int(self._ends[run]))

    @property
    def nbytes(self) -> int:
        return self._starts.nbytes + self._ends.nbytes

    def _before(self, runs: I64) -> I64:
        """Return the number of ids before each of these runs."""
        return np.where(runs > 0, self._ends[np.maximum(runs - 1, 0)], 0)


class ListedIds(SampleIds):
    """An array of ids: 4 bytes each where they fit."""

    def __init__(self, ids: Small) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def take(self, rows: I64) -> I64:
        return self._ids[rows].astype(np.int64)

    def rows_below(self, end: int) -> int:
        return int(np.searchsorted(self._ids, end))

    @property
    def nbytes(self) -> int:
        return self._ids.nbytes


class BitmapIds(SampleIds):
    """A bitmap: bit i, least significant first, says whether i is an id.

    A directory holds the number of ids before each block of `_BLOCK` bits. The bitmap has whole blocks.
    """

    def __init__(self, bits: Bytes) -> None:
        self._bits = bits.reshape(-1, _BLOCK // 8)
        self._ends = _ends_of_blocks(lambda first, last: _ONES[self._bits[first:last]], len(self._bits))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, rows: I64) -> I64:
        return _find_in_blocks(self._ends, rows, self._block)

    def rows_below(self, end: int) -> int:
        return _count_below(self._ends, end, self._block)

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes + self._ends.nbytes

    def _block(self, blocks: I64) -> Mask:
        return np.unpackbits(self._bits[blocks], axis=1, bitorder="little").view(np.bool_)


class BucketIds(SampleIds):
    """The ids of one bucket, from the bucket of each of the ids `ids`. Buckets of a stream share `chosen`."""

    def __init__(self, ids: SampleIds, chosen: Bytes, bucket: int) -> None:
        self._ids, self._chosen, self._bucket = ids, chosen, bucket
        self._ends = _ends_of_blocks(self._of_bucket, -(-len(chosen) // _BLOCK))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, rows: I64) -> I64:
        return self._ids.take(_find_in_blocks(self._ends, rows, self._block))

    def rows_below(self, end: int) -> int:
        return _count_below(self._ends, self._ids.rows_below(end), self._block)

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes

    def _of_bucket(self, first: int, last: int) -> Mask:
        inside = self._chosen[first * _BLOCK : last * _BLOCK] == self._bucket
        whole = np.zeros((last - first) * _BLOCK, np.bool_)
        whole[: len(inside)] = inside
        return whole.reshape(-1, _BLOCK)

    def _block(self, blocks: I64) -> Mask:
        return np.concatenate([self._of_bucket(int(block), int(block) + 1) for block in blocks])


class IdsBuilder:
    """Collects the ids of a dataset with `samples` samples, one mask after the other."""

    def __init__(self, samples: int) -> None:
        self._bits: Bytes = np.zeros(-(-samples // _BLOCK) * (_BLOCK // 8), np.uint8)
        self._samples, self._at, self._count, self._runs, self._last = samples, 0, 0, 0, False
        self._rest: Mask = np.zeros(0, np.bool_)

    def add(self, mask: Mask) -> None:
        """Add the next samples. The mask is true for those whose ids are wanted."""
        if not len(mask):
            return
        self._count += int(np.count_nonzero(mask))
        self._runs += int(np.count_nonzero(mask[1:] & ~mask[:-1])) + bool(mask[0] and not self._last)
        self._last = bool(mask[-1])
        whole = np.concatenate([self._rest, mask])
        full = len(whole) // 8 * 8
        self._write(whole[:full])
        self._rest = whole[full:].copy()

    def ids(self) -> SampleIds:
        """Return all ids that were added."""
        self._write(self._rest)
        width = 4 if self._samples <= 1 << 32 else 8
        if self._count == self._samples:
            return AllIds(self._samples)
        if 16 * self._runs <= min(len(self._bits), width * self._count):
            return self._as_runs()
        if width * self._count <= len(self._bits):
            return ListedIds(self._listed().astype(np.uint32 if width == 4 else np.uint64))
        return BitmapIds(self._bits)

    def _write(self, mask: Mask) -> None:
        packed = np.packbits(mask, bitorder="little")
        self._bits[self._at : self._at + len(packed)] = packed
        self._at += len(packed)

    def _listed(self) -> I64:
        held = np.flatnonzero(self._bits)
        inside = np.unpackbits(self._bits[held], bitorder="little").reshape(-1, 8)
        byte, bit = np.nonzero(inside)
        return held[byte] * 8 + bit

    def _as_runs(self) -> RunIds:
        starts, ends, before = list[I64](), list[I64](), False
        for first in range(0, len(self._bits), 1 << 20):
            bits = np.unpackbits(self._bits[first : first + (1 << 20)], bitorder="little").view(np.bool_)
            changes = np.flatnonzero(bits[1:] != bits[:-1]) + 1
            if bits[0] != before:
                changes = np.concatenate([np.zeros(1, np.int64), changes])
            first_is_start = not before
            starts.append(changes[0 if first_is_start else 1 :: 2] + 8 * first)
            ends.append(changes[1 if first_is_start else 0 :: 2] + 8 * first)
            before = bool(bits[-1])
        if before:
            ends.append(np.array([8 * len(self._bits)], np.int64))
        begins, stops = np.concatenate(starts), np.concatenate(ends)
        return RunIds(begins, stops - begins)


class SmallCounts:
    """A positive number for each row, in the smallest unsigned type, with a directory of their sums."""

    def __init__(self, counts: Small) -> None:
        self.counts = counts
        self._ends: I64 = np.cumsum(
            [
                int(counts[at : at + _BLOCK].sum(dtype=np.int64)) for at in range(0, len(counts), _BLOCK)
            ],
            dtype=np.int64,
        )  # fmt: skip

    @property
    def total(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def split(self, numbers: I64) -> tuple[I64, I64]:
        """Return for each number below `total` its row, and its position in that row's count."""
        found = [self._split(numbers[at : at + _ROWS_AT_ONCE]) for at in range(0, len(numbers), _ROWS_AT_ONCE)]
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows, positions = zip(*found, strict=True)
        return np.concatenate(rows), np.concatenate(positions)

    def first(self, row: int) -> int:
        """Return the sum of the counts of all rows before this one."""
        block = row // _BLOCK
        before = int(self._ends[block - 1]) if block else 0
        return before + int(self.counts[block * _BLOCK : row].sum(dtype=np.int64))

    def _split(self, numbers: I64) -> tuple[I64, I64]:
        blocks = np.searchsorted(self._ends, numbers, side="right")
        used, which = np.unique(blocks, return_inverse=True)
        inside = numbers - np.where(blocks > 0, self._ends[np.maximum(blocks - 1, 0)], 0)
        rows, positions = np.empty_like(numbers), np.empty_like(numbers)
        for number, block in enumerate(used.tolist()):
            mine = which == number
            ends = np.cumsum(self.counts[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.int64)
            found = np.searchsorted(ends, inside[mine], side="right")
            rows[mine] = block * _BLOCK + found
            positions[mine] = inside[mine] - np.where(found > 0, ends[np.maximum(found - 1, 0)], 0)
        return rows, positions


class SmallArray:
    """An array of non-negative integers that is filled in order, in the smallest unsigned type."""

    def __init__(self, size: int) -> None:
        self._values: Small = np.zeros(size, np.uint8)
        self._at = 0

    def add(self, values: Any) -> None:
        """Add the next values."""
        largest = int(values.max()) if len(values) else 0
        if largest > np.iinfo(self._values.dtype).max:
            self._values = self._values.astype(np.min_scalar_type(largest))
        self._values[self._at : self._at + len(values)] = values
        self._at += len(values)

    @property
    def values(self) -> Small:
        """The values that were added."""
        return self._values[: self._at]


def bucket_ids(ids: SampleIds, chosen: Bytes, buckets: int) -> Sequence[BucketIds]:
    """Return the ids of each bucket. `chosen` is the bucket of each of `ids`."""
    return [BucketIds(ids, chosen, bucket) for bucket in range(buckets)]


def _ends_of_blocks(block: Any, blocks: int) -> I64:
    """Return the number of ids up to the end of each block. `block(first, last)` has one row of counts for each."""
    ends, before = np.empty(blocks, np.int64), 0
    for first in range(0, blocks, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, blocks)
        ends[first:last] = np.cumsum(block(first, last).sum(axis=1, dtype=np.int64)) + before
        before = int(ends[last - 1])
    return ends


def _count_below(ends: I64, position: int, block: Any) -> int:
    """Return the number of true values before `position`. `block` returns the values of some blocks."""
    number, inside = divmod(position, _BLOCK)
    before = int(ends[min(number, len(ends)) - 1]) if number and len(ends) else 0
    if not inside or number >= len(ends):
        return before
    return before + int(np.count_nonzero(block(np.array([number]))[0, :inside]))


def _find_in_blocks(ends: I64, rows: I64, block: Any) -> I64:
    """Return the position of the r-th true value, for each of `rows`. `block` returns the values of some blocks."""
    found = np.empty(len(rows), np.int64)
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        own = rows[at : at + _ROWS_AT_ONCE]
        blocks = np.searchsorted(ends, own, side="right")
        used, which = np.unique(blocks, return_inverse=True)
        before = np.where(blocks > 0, ends[np.maximum(blocks - 1, 0)], 0)
        values = block(used)
        _, positions = np.nonzero(values)
        firsts = np.concatenate([np.zeros(1, np.int64), np.cumsum(values.sum(axis=1, dtype=np.int64))])
        found[at : at + len(own)] = blocks * _BLOCK + positions[firsts[which] + own - before]
    return found
