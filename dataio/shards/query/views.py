"""Selects samples of an index: those that meet a condition, or those with given keys.

Purpose: a `View` holds the samples that meet a condition. `matching` lets DuckDB evaluate the condition, which
`headrace.dataio.shards.query.conditions` validates, over Arrow columns. Headrace reads the columns through the store and
checks them. DuckDB itself reads no files.

Invariants:
* DuckDB runs `Predicate.sql` over a table with exactly the columns that the text needs. A few parts are read at a time.
  Apart from a bitmap of the selected rows, memory does not grow with the dataset. The resulting rows are in the order of
  the samples' numbers.
* The digest of a view covers the version's document, the conditions and the selected rows. So equal digests mean equal
  samples.

Failure behaviour: a condition that is invalid, or fails on a value (a cast), raises `UsageError`, which quotes it. Read
errors are passed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.conditions import Predicate, connect, import_duckdb, parse, quote
from headrace.dataio.shards.query.open_index import OpenIndex, RowNumbers, RowSelection
from headrace.dataio.shards.versions.documents import Lineage, VersionDocument
from headrace.dataio.store.base import Store


@dataclass(frozen=True)
class View:
    """The samples of a version that meet its conditions.

    `rows` are the selected rows of each part, and `bytes` the total bytes of their members.
    """

    index: OpenIndex
    rows: RowSelection
    bytes: Sequence[int]
    lineage: Lineage
    ids: str
    """BLAKE3 of the selected rows."""

    @property
    def total_bytes(self) -> int:
        """The total bytes of the samples' members."""
        return sum(self.bytes)

    def numbers(self, version: OpenIndex) -> Iterator[int]:
        """Yield the samples' numbers in the version, whose index is given, in ascending order."""
        start = 0
        for part, rows in enumerate(self.rows):
            remaining = version.remaining_rows(part)
            yield from (start + (rows if remaining is None else np.searchsorted(remaining, rows))).tolist()
            start = int(version.ends[part])

    @property
    def digest(self) -> str:
        """BLAKE3 of the version's digest, the conditions and the rows."""
        source = self.lineage.sources[0]
        identity = msgspec.json.encode([source.digest, self.lineage.where, self.ids])
        return str(blake3.blake3(identity).hexdigest())

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The entries that a view adds to its version's fingerprint."""
        source = self.lineage.sources[0]
        return {"of": source.digest, "where": list(self.lineage.where), "ids": self.ids}


def narrow(store: Store, document: VersionDocument, opened: OpenIndex, lineage: Lineage, condition: str) -> View:
    """Make a view of the samples in `opened` that meet `condition`.

    `lineage` is the lineage of the view to filter. To filter a version, pass a lineage that names the version as its
    source and has no conditions.
    """
    rows, sizes, hasher = RowSelection(), list[int](), blake3.blake3()
    for part, (chosen, size) in enumerate(matching(opened, document, condition)):
        rows.add(chosen, opened.part_rows(part))
        sizes.append(size)
        hasher.update(len(chosen).to_bytes(8, "little"))
        hasher.update(chosen.astype("<u4").tobytes())
    return View(
        index=OpenIndex(store, document, rows),
        rows=rows,
        bytes=sizes,
        lineage=msgspec.structs.replace(lineage, where=(*lineage.where, condition)),
        ids=str(hasher.hexdigest()),
    )


def matching(opened: OpenIndex, document: VersionDocument, text: str) -> Iterator[tuple[RowNumbers, int]]:
    """Yield for each part the rows of samples that meet the condition `text`, and the total bytes of their members."""
    connection = connect()
    try:
        predicate = parse(connection, text, document.summary().fields)
        _check_type(connection, predicate)
        columns = [*predicate.columns, *({"bytes"} - set(predicate.columns))]
        for number, table in enumerate(opened.tables(columns)):
            rows = _select_rows(connection, predicate, table)
            size = pc.sum(table["bytes"].take(pa.array(rows)), min_count=0).as_py()
            yield _rows_of_part(opened, number, rows), size
    finally:
        connection.close()


def rows_with_keys(opened: OpenIndex, keys: Iterable[str]) -> tuple[RowSelection, list[int], set[str]]:
    """Return for each part the rows of samples with one of these keys, and the total bytes of their members.

    Also returns the keys that no sample has.
    """
    missing = set(keys)
    sorted_keys, selected, sizes = pa.array(sorted(missing), pa.string()), RowSelection(), list[int]()
    for number, table in enumerate(opened.tables(["key", "bytes"])):
        hits = table.filter(pc.is_in(table["key"], sorted_keys))
        missing.difference_update(hits["key"].to_pylist())
        rows = np.flatnonzero(pc.is_in(table["key"], sorted_keys).to_numpy()).astype(np.uint32)
        selected.add(_rows_of_part(opened, number, rows), opened.part_rows(number))
        sizes.append(pc.sum(hits["bytes"], min_count=0).as_py())
    return selected, sizes, missing


def _rows_of_part(opened: OpenIndex, part: int, rows: RowNumbers) -> RowNumbers:
    remaining = opened.remaining_rows(part)
    return rows if remaining is None else remaining[rows]


def _check_type(connection: Any, predicate: Predicate) -> None:
    """Run the condition over an empty table. This checks its names and types, and that its value is a boolean."""
    connection.register("part", _numbered(index.SCHEMA.empty_table().select(list(predicate.columns))))
    try:
        result = connection.execute(predicate.sql.replace("SELECT __row", f"SELECT (\n{predicate.text}\n)", 1))
        kind = str(result.description[0][1])
        result.fetchall()
    except import_duckdb().Error as error:
        raise _evaluation_error(predicate, error) from error
    if kind not in ("BOOLEAN", "bool"):
        raise UsageError(
            f"{quote(predicate.text)} is not a condition: its value is of type {kind}", hint="compare it with a value"
        )


def _select_rows(connection: Any, predicate: Predicate, table: Any) -> RowNumbers:
    connection.register("part", _numbered(table))
    try:
        columns: Mapping[str, Any] = connection.execute(predicate.sql).fetchnumpy()
    except import_duckdb().Error as error:
        raise _evaluation_error(predicate, error) from error
    return np.sort(np.asarray(columns["__row"], np.uint32))


def _numbered(table: Any) -> Any:
    return table.append_column("__row", pa.array(np.arange(table.num_rows, dtype=np.uint32)))


def _evaluation_error(predicate: Predicate, error: Exception) -> UsageError:
    return UsageError(f"the condition {quote(predicate.text)} fails: {str(error).strip().splitlines()[0]}")
