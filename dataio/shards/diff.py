"""What changed between two versions, by key.

Purpose: added, removed and changed samples; a sample changed when its members, its text or its fields did, wherever
they lie.
Invariants: index parts that both versions hold alike are not read. Keys come in the order added, removed, changed, and
sorted within each; they are streamed from DuckDB, which holds the keys that differ and 16 bytes for each of the others
that it read.
Failure behaviour: errors of reading pass through; `UsageError` for a view of another kind of thing is not needed: views
compare like versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headrace.dataio.shards.query.predicate import connect
from headrace.dataio.shards.view import Opened

_COLUMNS = ("key", "members", "text", "fields")
_AT_ONCE = 10_000

# the tar's offsets are left out: the same sample may lie elsewhere
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
    """One sample that differs; `kind` is one of `KINDS`."""

    kind: str
    key: str


class Diff:
    """The differences, held until `close`. `unchanged` counts the samples that both have alike."""

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
        """Let go of the memory."""
        self._connection.close()

    def __enter__(self) -> Diff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def diff(old: Opened, new: Opened) -> Diff:
    """What changed from `old` to `new`."""
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
    """The parts of each that the other does not hold with the same rows left."""
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
    """Samples in a part of a version or view."""
    ends = dataset.index.ends
    return int(ends[part] - (ends[part - 1] if part else 0))
