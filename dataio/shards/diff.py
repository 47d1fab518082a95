"""The differences between two versions, by key.

Purpose: a diff lists added, removed and changed samples. A sample has changed if its members, its text or its fields
differ. Its position does not matter. Views are compared like versions.
Invariants: index parts with the same remaining rows in both versions are not read. Keys are in the order added,
removed, changed, and sorted within each kind. They are streamed from DuckDB, which holds the keys that differ and 16
bytes for each of the other keys that it read.
Failure behaviour: read errors pass through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.dataio.shards.query.conditions import connect
from headrace.dataio.shards.view import Opened

_COLUMNS = ("key", "members", "text", "fields")
_AT_ONCE = 10_000

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
    """The differences, which stay in memory until `close`. `unchanged` is the number of samples that do not differ."""

    def __init__(self, connection: Any, samples: tuple[int, int]) -> None:
        self._connection = connection
        found = dict(connection.execute("SELECT kind, count(*) FROM changes GROUP BY kind").fetchall())
        self.added, self.removed, self.changed = (int(found.get(kind, 0)) for kind in range(3))
        self.unchanged = samples[0] - self.removed - self.changed

    def __iter__(self) -> Iterator[Change]:
        cursor = self._connection.cursor()
        cursor.execute("SELECT kind, key FROM changes ORDER BY kind, key")
        while rows := cursor.fetchmany(_AT_ONCE):
            yield from (Change(KINDS[kind], key) for kind, key in rows)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def keys(self, kind: str) -> list[str]:
        """All keys of one kind."""
        return [change.key for change in self if change.kind == kind]

    def close(self) -> None:
        """Release the memory."""
        self._connection.close()

    def __enter__(self) -> Diff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def diff(old: Opened, new: Opened) -> Diff:
    """Compare `old` with `new`."""
    ours, theirs = _to_read(old, new)
    connection = connect()
    try:
        for name, dataset, parts in (("a", old, ours), ("b", new, theirs)):
            connection.execute(f"CREATE TABLE {name} (key VARCHAR, content UBIGINT)").fetchall()
            for part in parts:
                connection.register("part", _flat(dataset.index.part_table(part, _COLUMNS)))
                connection.execute(f"INSERT INTO {name} {_CONTENT.format('part')}").fetchall()
        connection.execute(_JOINED).fetchall()
        connection.execute("DROP TABLE a").fetchall()
        connection.execute("DROP TABLE b").fetchall()
        return Diff(connection, (len(old), len(new)))
    except BaseException:
        connection.close()
        raise


def _flat(table: Any) -> Any:
    return pa.table({name: table[name] for name in _COLUMNS})


def _to_read(old: Opened, new: Opened) -> tuple[Sequence[int], Sequence[int]]:
    """The parts of each dataset that the other one does not have with the same remaining rows."""
    same_store = old.url == new.url
    there = {(p.key, p.digest): n for n, p in enumerate(new.document.index)} if same_store else {}
    ours, theirs = list[int](), set(range(len(new.document.index)))
    for number, part in enumerate(old.document.index):
        twin = there.get((part.key, part.digest))
        if twin is not None and _same_rows(old, number, new, twin):
            theirs.discard(twin)
        else:
            ours.append(number)
    return ours, sorted(theirs)


def _same_rows(old: Opened, number: int, new: Opened, twin: int) -> bool:
    if len_of(old, number) != len_of(new, twin):
        return False
    ours, theirs = old.index.kept(number), new.index.kept(twin)
    if ours is None or theirs is None:
        return ours is theirs or len_of(old, number) == old.index.part_rows(number)
    return bool(np.array_equal(ours, theirs))


def len_of(dataset: Opened, part: int) -> int:
    """The number of samples in a part of a version or view."""
    ends = dataset.index.ends
    return int(ends[part] - (ends[part - 1] if part else 0))
