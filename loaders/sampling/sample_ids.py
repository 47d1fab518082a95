"""The ids of a stream's samples, in little memory, and compact arrays of small numbers for each sample.

Purpose: a loader delivers all samples of a dataset, or only those that it can use. An array of ids takes 8 bytes for
each sample in every rank: 8 GB at 10^9 samples. The classes here hold the same ids as a range, as runs, as a bitmap or
as a bucket number for each sample.
Invariants:

* Ids are ascending. Row r of a stream is its r-th id, and `take` maps rows to ids.
* `IdsBuilder` chooses the representation that takes the least memory. All of them give the same results.
* `SmallCounts` and `BucketNumbers` have one byte for each sample if the numbers are below 256. Their directories take
  1/64 byte a sample for each bucket.

Failure behaviour: rows are not checked here. A row outside the ids raises `IndexError` or returns an unspecified id, so
callers pass rows of an `Order`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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

    @abstractmethod
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that hold the ids, from which `ids_from` makes the same ids."""

    @property
    def nbytes(self) -> int:
        """The memory that the ids take, in bytes."""
        return sum(array.nbytes for array in self.arrays().values())

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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {}


class RunIds(SampleIds):
    """Runs of consecutive ids. Run n begins with the id `starts[n]`. Runs 0 to n have `ends[n]` ids in all.

    Runs are ascending and not empty.
    """

    def __init__(self, starts: I64, ends: I64) -> None:
        self._starts, self._ends = starts, ends

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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"run_starts": self._starts, "run_ends": self._ends}

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

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"listed": self._ids}


class BitmapIds(SampleIds):
    """A bitmap: bit i, least significant first, says whether i is an id.

    A directory holds the number of ids up to the end of each block of `_BLOCK` bits. The bitmap has whole blocks.
    """

    def __init__(self, bits: Bytes, ends: I64 | None = None) -> None:
        self._bits = bits.reshape(-1, _BLOCK // 8)
        self._ends = _ends_of_bits(self._bits) if ends is None else ends

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, rows: I64) -> I64:
        return _find_in_blocks(self._ends, rows, self._block)

    def rows_below(self, end: int) -> int:
        return _count_below(self._ends, end, self._block)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"bits": self._bits, "bit_ends": self._ends}

    def _block(self, blocks: I64) -> Mask:
        return np.unpackbits(self._bits[blocks], axis=1, bitorder="little").view(np.bool_)


class BucketNumbers:
    """The bucket of each sample of a stream, with a directory.

    Args:
        numbers: The bucket of each sample.
        ends: For each bucket, the number of its samples up to the end of each block (see `bucket_ends`).
    """

    def __init__(self, numbers: Small, ends: I64) -> None:
        self.numbers, self.ends = numbers, ends

    def samples_in(self, bucket: int) -> int:
        """Return the number of samples in a bucket."""
        return int(self.ends[bucket, -1]) if self.ends.shape[1] else 0

    def ids_in(self, bucket: int, ids: SampleIds) -> BucketIds:
        """Return those of `ids`, which are the ids of the stream, that are in a bucket."""
        return BucketIds(ids, self.numbers, self.ends[bucket], bucket)


class BucketIds(SampleIds):
    """The ids of one bucket, from the bucket of each of the ids `ids`. Buckets of a stream share `numbers`."""

    def __init__(self, ids: SampleIds, numbers: Small, ends: I64, bucket: int) -> None:
        self._ids, self._numbers, self._ends, self._bucket = ids, numbers, ends, bucket

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, rows: I64) -> I64:
        return self._ids.take(_find_in_blocks(self._ends, rows, self._block))

    def rows_below(self, end: int) -> int:
        return _count_below(self._ends, self._ids.rows_below(end), self._block)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        own = {"bucket_ends": self._ends, "numbers": self._numbers, "bucket": np.array([self._bucket])}
        return {**own, **self._ids.arrays()}

    @property
    def nbytes(self) -> int:
        return self._ends.nbytes  # the other arrays belong to all buckets of the stream

    def _block(self, blocks: I64) -> Mask:
        inside = np.zeros((len(blocks), _BLOCK), np.bool_)
        for row, block in enumerate(blocks.tolist()):
            numbers = self._numbers[block * _BLOCK : (block + 1) * _BLOCK]
            inside[row, : len(numbers)] = numbers == self._bucket
        return inside


def bucket_ends(numbers: Small, buckets: int, new: Callable[[tuple[int, int], type[np.int64]], I64] = np.zeros) -> I64:
    """Return for each bucket the number of its samples up to the end of each block of `_BLOCK` samples.

    `new` makes the array.
    """
    blocks = -(-len(numbers) // _BLOCK)
    ends, before = new((buckets, blocks), np.int64), np.zeros(buckets, np.int64)
    for first in range(0, blocks, _ROWS_AT_ONCE):
        inside = numbers[first * _BLOCK : (first + _ROWS_AT_ONCE) * _BLOCK]
        count = -(-len(inside) // _BLOCK)
        cells = np.arange(len(inside)) // _BLOCK * buckets + inside
        counts = np.bincount(cells, minlength=count * buckets).reshape(count, buckets)
        ends[:, first : first + count] = (np.cumsum(counts, axis=0) + before).T
        before += counts.sum(axis=0)
    return ends


def ids_from(arrays: Mapping[str, npt.NDArray[Any]], samples: int) -> SampleIds:
    """Return the ids that `arrays` hold (`SampleIds.arrays`), for a dataset with `samples` samples."""
    if "bits" in arrays:
        return BitmapIds(arrays["bits"], arrays["bit_ends"])
    if "listed" in arrays:
        return ListedIds(arrays["listed"])
    if "run_starts" in arrays:
        return RunIds(arrays["run_starts"], arrays["run_ends"])
    return AllIds(samples)


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
        return RunIds(begins, np.cumsum(stops - begins, dtype=np.int64))


class SmallCounts:
    """A positive number for each row, in the smallest unsigned type, with a directory of their sums."""

    def __init__(self, counts: Small) -> None:
        self.counts = counts
        self._ends = _ends_of_counts(counts)

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
    """An array of `size` non-negative integers that is filled in order, in the smallest unsigned type.

    `new` makes an array of a size and type.
    """

    def __init__(self, size: int, new: Callable[[int, Any], Small] = np.zeros) -> None:
        self._new, self._at = new, 0
        self._values = new(size, np.uint8)

    def add(self, values: Any) -> None:
        """Add the next values."""
        largest = int(values.max()) if len(values) else 0
        if largest > np.iinfo(self._values.dtype).max:
            narrow = self._values
            self._values = self._new(len(narrow), np.min_scalar_type(largest))
            self._values[: self._at] = narrow[: self._at]
        self._values[self._at : self._at + len(values)] = values
        self._at += len(values)

    @property
    def values(self) -> Small:
        """The values that were added."""
        return self._values[: self._at]


def _ends_of_bits(bits: Bytes) -> I64:
    """Return the number of set bits up to the end of each row of `bits`."""
    ends, before = np.empty(len(bits), np.int64), 0
    for first in range(0, len(bits), _ROWS_AT_ONCE):
        counts = _ONES[bits[first : first + _ROWS_AT_ONCE]].sum(axis=1, dtype=np.int64)
        ends[first : first + len(counts)] = np.cumsum(counts) + before
        before += int(counts.sum())
    return ends


def _ends_of_counts(counts: Small) -> I64:
    """Return the sum of `counts` up to the end of each block of `_BLOCK` counts."""
    blocks = list[I64]()
    for first in range(0, len(counts), _ROWS_AT_ONCE * _BLOCK):
        inside = counts[first : first + _ROWS_AT_ONCE * _BLOCK]
        blocks.append(np.add.reduceat(inside, np.arange(0, len(inside), _BLOCK), dtype=np.int64))
    return np.cumsum(np.concatenate([np.zeros(0, np.int64), *blocks]))


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
