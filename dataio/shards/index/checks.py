"""Checks of index rows, on whole columns at once.

Purpose: readers use index rows only after these checks. They check that members lie inside their shards, sizes are
positive and streams are complete.
Invariants: reading one sample checks its whole row group, so every check covers all rows with a few calls. Most of
these calls cost nothing when the rows are valid. A check is skipped when its columns were not read.
Failure behaviour: `CorruptionError` names the part, the first bad row and the column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import kernels as pc

I64 = npt.NDArray[np.int64]
Numbers = I64 | range | None
"""The row numbers that errors name. None: the positions in the table."""


class Rules(msgspec.Struct, frozen=True):
    """The constraints on columns. `together` maps a column to the columns that must be null in exactly the same
    rows."""

    required: Sequence[str]
    together: Mapping[str, Sequence[str]]
    positive: Sequence[str]
    not_negative: Sequence[str]


def check(table: Any, rules: Rules, name: str, shards: Mapping[str, int], numbers: Numbers = None) -> None:
    """Raise `CorruptionError` for the first bad value. `shards` maps each shard to its size."""
    rows = _Rows(table, name, range(table.num_rows) if numbers is None else numbers)
    for column in rows.those_of(rules.required):
        if rows[column].null_count:
            rows.refuse(pc.is_null(rows[column]), column, "is missing")
    for codec, columns in rules.together.items():
        for column in rows.those_of(columns) if codec in rows else ():
            nulls = {rows[codec].null_count, rows[column].null_count}
            if nulls != {0} and nulls != {len(rows[codec])}:
                differ = pc.xor(pc.is_null(rows[column]), pc.is_null(rows[codec]))
                rows.refuse(differ, column, "is there without its stream, or missing")
    for column in rows.those_of(rules.positive):
        if (least := _least(rows[column])) is not None and least <= 0:
            rows.refuse(pc.less_equal(rows[column], 0), column, "is not positive")
    for column in rows.those_of(rules.not_negative):
        if (least := _least(rows[column])) is not None and least < 0:
            rows.refuse(pc.less(rows[column], 0), column, "is negative")
    if "duration" in rows:
        rows.refuse(~np.isfinite(rows["duration"].to_numpy()), "duration", "is not finite")
    if "key" in rows:
        rows.refuse(pc.binary_length(rows["key"]).to_numpy() == 0, "key", "is empty")
    if "shard" in rows:
        which, sizes = _sizes(rows, shards)
        if "members" in rows:
            _check_members(rows, which, sizes)
    if "key_frames" in rows and "frames" in rows:
        _check_key_frames(rows)


class _Rows:
    def __init__(self, table: Any, name: str, numbers: I64 | range) -> None:
        self._columns = {
            column: chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()  # combine_chunks copies
            for column, chunked in zip(table.column_names, table.columns, strict=True)
        }
        self._name, self._numbers = name, numbers

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __getitem__(self, column: str) -> Any:
        return self._columns[column]

    def those_of(self, columns: Sequence[str]) -> list[str]:
        return [column for column in columns if column in self._columns]

    def refuse(self, bad: Any, column: str, why: str, rows: Any = None) -> None:
        """Raise for the first true value of `bad`. `rows` maps positions in `bad` to rows if they differ."""
        first = pc.index(bad, True).as_py() if not isinstance(bad, np.ndarray) else _first(bad)
        if first >= 0:
            row = first if rows is None else int(rows[first])
            raise CorruptionError(f"{self._name}: row {self._numbers[row]}: {column} {why}")


def _least(column: Any) -> Any:
    """The smallest value. None if all values are null."""
    if column.null_count == len(column):
        return None
    return pc.min_max(column)["min"].as_py() if column.null_count else column.to_numpy().min()


def _first(bad: npt.NDArray[np.bool_]) -> int:
    """The position of the first true value, or -1."""
    first = int(bad.argmax()) if len(bad) else 0
    return first if len(bad) and bad[first] else -1


def _sizes(rows: _Rows, shards: Mapping[str, int]) -> tuple[I64, I64]:
    """For each row, the number of its shard (from 0) and the size of that shard."""
    used = pc.unique(rows["shard"])
    which = pc.index_in(rows["shard"], used)
    sizes = pa.array([shards.get(key) for key in used.to_pylist()], pa.int64())
    if sizes.null_count:
        rows.refuse(pc.is_null(pc.take(sizes, which)), "shard", "is not a shard of this dataset version")
    numbers = np.asarray(which.to_numpy(), np.int64)
    return numbers, sizes.to_numpy()[numbers] if len(numbers) else numbers


def _check_members(rows: _Rows, which: I64, sizes: I64) -> None:
    lists = rows["members"]
    counts = pc.list_value_length(lists).to_numpy()
    rows.refuse(counts < 1, "members", "is empty")
    if not len(counts):
        return
    owners, flat = np.repeat(np.arange(len(counts)), counts), pc.list_flatten(lists)
    offset, length = flat.field("offset").to_numpy(), flat.field("length").to_numpy()
    size = sizes[owners]
    # compared by subtraction, since offset + length may overflow
    outside = (offset < 0) | (length < 0) | (offset > size) | (length > size - np.maximum(offset, 0))
    rows.refuse(outside, "members", "lies outside its shard", owners)
    end, shard = offset + length, which[owners]  # at most the shard's size, so the sum does not overflow
    overlap = (shard[1:] == shard[:-1]) & (offset[1:] < end[:-1]) & (offset[:-1] < end[1:])
    rows.refuse(overlap, "members", "overlaps the next member", owners)
    if "bytes" in rows:
        sums = np.add.reduceat(length, np.cumsum(counts) - counts)
        rows.refuse(sums != rows["bytes"].to_numpy(), "bytes", "is not the sum of the members")


def _check_key_frames(rows: _Rows) -> None:
    lists = rows["key_frames"]
    counts = pc.list_value_length(lists)
    if counts.null_count:
        rows.refuse(pc.less(counts, 1), "key_frames", "is empty")
        owners = pc.list_parent_indices(lists)
        frames = pc.take(rows["frames"], owners).to_numpy()
        owners = owners.to_numpy()
    else:
        each = counts.to_numpy()
        rows.refuse(each < 1, "key_frames", "is empty")
        owners = np.repeat(np.arange(len(each)), each)
        frames = rows["frames"].to_numpy()[owners]
    number = pc.list_flatten(lists).field("index").to_numpy()
    rows.refuse((number < 0) | (number > frames), "key_frames", "lies outside the video", owners)
