"""Compares two versions or views of a dataset.

Purpose: a diff lists the samples that were added, removed or changed from one version to another, by key.

Invariants:
* A sample has changed if its members, its text or its fields differ. Its position does not matter. Views are compared
  like versions. Index parts with the same remaining rows in both versions are not read. Keys are in the order added,
  removed, changed, and sorted within each kind.
* While it compares, DuckDB holds each key that it reads and an 8-byte hash of the sample. Afterwards it holds only the
  keys that differ, and streams them. It uses at most `conditions.SPILL_MEMORY`, and a temporary folder beyond.

Failure behaviour: read errors are passed on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from headrace.dataio.shards.query.conditions import connect_with_disk

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset


_COLUMNS = ("key", "members", "text", "fields")
_ROWS_PER_FETCH = 10_000
# offsets are left out, because the same sample may have another position
_CONTENT = """SELECT key, hash(list_transform(members, lambda m: (m.ext, m.length, m.xxh3)), text, fields) AS content FROM {}"""
_JOINED = """
    CREATE TABLE changes AS
    SELECT coalesce(a.key, b.key) AS key, CASE WHEN a.key IS NULL THEN 0 WHEN b.key IS NULL THEN 1 ELSE 2 END AS kind
    FROM a FULL OUTER JOIN b ON a.key = b.key
    WHERE a.key IS NULL OR b.key IS NULL OR a.content <> b.content
"""
KINDS = ("added", "removed", "changed")


@dataclass(frozen=True)
class Change:
    """One sample that differs. `kind` is one of `KINDS`."""

    kind: str
    key: str


class Diff:
    """The differences between two versions or views. They stay in memory or a temporary folder until `close`.

    `added`, `removed`, `changed` and `unchanged` are numbers of samples. Iterating yields a `Change` for each sample
    that differs, ordered by kind and key.
    """

    def __init__(self, connection: Any, samples: tuple[int, int], resources: contextlib.ExitStack) -> None:
        self._connection, self._resources = connection, resources
        counts = dict(connection.execute("SELECT kind, count(*) FROM changes GROUP BY kind").fetchall())
        self.added, self.removed, self.changed = (int(counts.get(kind, 0)) for kind in range(3))
        self.unchanged = samples[0] - self.removed - self.changed

    def __iter__(self) -> Iterator[Change]:
        cursor = self._connection.cursor()
        cursor.execute("SELECT kind, key FROM changes ORDER BY kind, key")
        while rows := cursor.fetchmany(_ROWS_PER_FETCH):
            yield from (Change(KINDS[kind], key) for kind, key in rows)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def keys(self, kind: str) -> list[str]:
        """Return all keys of one kind."""
        return [change.key for change in self if change.kind == kind]

    def close(self) -> None:
        """Release the memory and the disk space."""
        self._resources.close()

    def __enter__(self) -> Diff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def diff(old: Dataset, new: Dataset) -> Diff:
    """Compare `old` with `new`."""
    old_parts, new_parts = _parts_to_read(old, new)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(connect_with_disk())
        for name, dataset, parts in (("a", old, old_parts), ("b", new, new_parts)):
            connection.execute(f"CREATE TABLE {name} (key VARCHAR, content UBIGINT)").fetchall()
            for part in parts:
                connection.register("part", _content_columns(dataset.index.part_table(part, _COLUMNS)))
                connection.execute(f"INSERT INTO {name} {_CONTENT.format('part')}").fetchall()
        connection.execute(_JOINED).fetchall()
        connection.execute("DROP TABLE a").fetchall()
        connection.execute("DROP TABLE b").fetchall()
        return Diff(connection, (len(old), len(new)), undo.pop_all())


def _content_columns(table: Any) -> Any:
    return pa.table({name: table[name] for name in _COLUMNS})


def _parts_to_read(old: Dataset, new: Dataset) -> tuple[Sequence[int], Sequence[int]]:
    """Return the parts of each dataset that the other one does not have with the same remaining rows."""
    same_store = old.url == new.url
    new_numbers = {(p.key, p.digest): n for n, p in enumerate(new.document.index)} if same_store else {}
    old_parts, new_parts = list[int](), set(range(len(new.document.index)))
    for number, part in enumerate(old.document.index):
        match = new_numbers.get((part.key, part.digest))
        if match is not None and _same_rows(old, number, new, match):
            new_parts.discard(match)
        else:
            old_parts.append(number)
    return old_parts, sorted(new_parts)


def _same_rows(old: Dataset, number: int, new: Dataset, match: int) -> bool:
    if _samples_in(old, number) != _samples_in(new, match):
        return False
    old_rows, new_rows = old.index.remaining_rows(number), new.index.remaining_rows(match)
    if old_rows is None or new_rows is None:
        return old_rows is new_rows or _samples_in(old, number) == old.index.part_rows(number)
    return bool(np.array_equal(old_rows, new_rows))


def _samples_in(dataset: Dataset, part: int) -> int:
    """Return the number of samples in a part of a version or view."""
    ends = dataset.index.ends
    return int(ends[part] - (ends[part - 1] if part else 0))
