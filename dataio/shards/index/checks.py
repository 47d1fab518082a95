"""Checks of index rows, on whole columns at once.

Purpose: what an index says is believed only after this: members inside their shards, positive sizes, streams complete.
Invariant: every check looks at all rows with a few Arrow calls, and a check whose columns were not read is not made.
Failure behaviour: `CorruptionError` names the part, the first bad row and the column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataio.core.errors import CorruptionError


@dataclass(frozen=True)
class Rules:
    """What columns must be. `together`: these are null exactly where the column that names them is."""

    required: Sequence[str]
    together: Mapping[str, Sequence[str]]
    positive: Sequence[str]
    not_negative: Sequence[str]


def check(table: Any, rules: Rules, name: str, shards: Mapping[str, int], first_row: int = 0) -> None:
    """Raise for the first bad value. `shards` gives the size of every shard; rows are counted from `first_row` in errors."""
    rows = _Rows(table.combine_chunks(), name, first_row)
    for column in rows.those_of(rules.required):
        rows.refuse(pc.is_null(rows[column]), column, "is missing")
    for codec, columns in rules.together.items():
        for column in rows.those_of(columns) if codec in rows else ():
            absent = pc.is_null(rows[codec])
            rows.refuse(pc.xor(pc.is_null(rows[column]), absent), column, "is there without its stream, or missing")
    for column in rows.those_of(rules.positive):
        rows.refuse(pc.less_equal(rows[column], 0), column, "is not positive")
    for column in rows.those_of(rules.not_negative):
        rows.refuse(pc.less(rows[column], 0), column, "is negative")
    if "duration" in rows:
        rows.refuse(pc.invert(pc.is_finite(rows["duration"])), "duration", "is not finite")
    if "key" in rows:
        rows.refuse(pc.equal(rows["key"], ""), "key", "is empty")
    if "shard" in rows:
        sizes = _sizes(rows, shards)
        if "members" in rows:
            _check_members(rows, sizes)
    if "key_frames" in rows and "frames" in rows:
        _check_key_frames(rows)


class _Rows:
    def __init__(self, table: Any, name: str, first_row: int) -> None:
        self._columns = {
            column: chunked.combine_chunks() for column, chunked in zip(table.column_names, table.columns, strict=True)
        }
        self._name, self._first_row = name, first_row

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __getitem__(self, column: str) -> Any:
        return self._columns[column]

    def those_of(self, columns: Sequence[str]) -> list[str]:
        return [column for column in columns if column in self._columns]

    def refuse(self, bad: Any, column: str, why: str, rows: Any = None) -> None:
        """Raise for the first true value of `bad`; `rows` maps its places to rows where it is not one a row."""
        first = pc.index(bad, True).as_py()
        if first >= 0:
            row = first if rows is None else rows[first].as_py()
            raise CorruptionError(f"{self._name}: row {self._first_row + row}: {column} {why}")


def _sizes(rows: _Rows, shards: Mapping[str, int]) -> Any:
    """The size of every row's shard."""
    used = pc.unique(rows["shard"])
    sizes = pa.array([shards.get(key) for key in used.to_pylist()], pa.int64())
    found = sizes.take(pc.index_in(rows["shard"], used))
    rows.refuse(pc.is_null(found), "shard", "is not a shard of this dataset version")
    return found


def _check_members(rows: _Rows, sizes: Any) -> None:
    lists = rows["members"]
    owners = pc.list_parent_indices(lists)
    rows.refuse(pc.less(pc.list_value_length(lists), 1), "members", "is empty")
    flat = pc.list_flatten(lists)
    offset, length, size = flat.field("offset"), flat.field("length"), sizes.take(owners)
    # compared by subtraction, since offset + length may overflow
    outside = pc.or_(pc.greater(offset, size), pc.greater(length, pc.subtract(size, offset)))
    bad = pc.or_(pc.or_(pc.less(offset, 0), pc.less(length, 0)), outside)
    rows.refuse(bad, "members", "lies outside its shard", owners)
    if "shard" in rows and len(flat) > 1:
        shard = rows["shard"].take(owners)
        end = pc.add(offset, length)  # inside the shard, so it does not overflow
        same = pc.equal(shard[1:], shard[:-1])
        overlap = pc.and_(pc.less(offset[1:], end[:-1]), pc.less(offset[:-1], end[1:]))
        rows.refuse(pc.and_(same, overlap), "members", "overlaps the next member", owners)
    if "bytes" in rows:
        sums = (
            pa.table({"row": owners, "length": length})
            .group_by("row", use_threads=False)
            .aggregate([("length", "sum")])
        )
        rows.refuse(pc.not_equal(sums["length_sum"], rows["bytes"]), "bytes", "is not the sum of the members")


def _check_key_frames(rows: _Rows) -> None:
    lists = rows["key_frames"]
    rows.refuse(pc.less(pc.list_value_length(lists), 1), "key_frames", "is empty")
    owners = pc.list_parent_indices(lists)
    number = pc.list_flatten(lists).field("index")
    bad = pc.or_(pc.less(number, 0), pc.greater(number, rows["frames"].take(owners)))
    rows.refuse(bad, "key_frames", "lies outside the video", owners)
