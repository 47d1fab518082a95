"""Running conditions over an index.

Purpose: DuckDB evaluates a condition over Arrow columns. This package reads these columns through the store and checks
them. DuckDB itself reads no files.
Invariants: only the columns that the condition needs are read, a few parts at a time. So memory does not grow with the
dataset. The resulting rows are in the order of the samples' numbers.
Failure behaviour: `UsageError` if the text is not a condition, or if it fails on a value (a cast). Read errors pass
through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.kept import Rows
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.query.parts import join_types
from headrace.dataio.shards.query.predicate import Predicate, connect, import_duckdb, parse, quote
from headrace.dataio.shards.versions.documents import VersionDocument


def field_types(document: VersionDocument) -> dict[str, str]:
    """The promoted fields of a version, by name, with their types."""
    types = dict[str, str]()
    for part in document.index:
        for name, kind in part.fields.items():
            types[name] = join_types(types.get(name, kind), kind)
    return types


def matching(opened: OpenIndex, document: VersionDocument, text: str) -> Iterator[tuple[Rows, int]]:
    """For each part, the rows that are samples and meet the condition `text`, and the total bytes of their members."""
    connection = connect()
    try:
        predicate = parse(connection, text, field_types(document))
        _check_type(connection, predicate)
        columns = [*predicate.columns, *({"bytes"} - set(predicate.columns))]
        for number, table in enumerate(opened.tables(columns)):
            rows = _run(connection, predicate, table)
            size = pc.sum(table["bytes"].take(pa.array(rows)), min_count=0).as_py()
            yield _physical(opened, number, rows), size
    finally:
        connection.close()


def rows_with_keys(opened: OpenIndex, keys: Iterable[str]) -> tuple[list[tuple[Rows, int]], set[str]]:
    """For each part, the rows of samples with one of these keys, and their bytes. Also the keys that no sample has."""
    missing = set(keys)
    wanted, found = pa.array(sorted(missing), pa.string()), list[tuple[Rows, int]]()
    for number, table in enumerate(opened.tables(["key", "bytes"])):
        hits = table.filter(pc.is_in(table["key"], wanted))
        missing.difference_update(hits["key"].to_pylist())
        rows = np.flatnonzero(pc.is_in(table["key"], wanted).to_numpy()).astype(np.uint32)
        found.append((_physical(opened, number, rows), pc.sum(hits["bytes"], min_count=0).as_py()))
    return found, missing


def _physical(opened: OpenIndex, part: int, rows: Rows) -> Rows:
    left = opened.kept(part)
    return rows if left is None else left[rows]


def _check_type(connection: Any, predicate: Predicate) -> None:
    """Run the condition over an empty table. This checks its names and types, and that its value is a boolean."""
    connection.register("part", _numbered(index.SCHEMA.empty_table().select(list(predicate.columns))))
    try:
        found = connection.execute(predicate.sql.replace("SELECT __row", f"SELECT (\n{predicate.text}\n)", 1))
        kind = str(found.description[0][1])
        found.fetchall()
    except import_duckdb().Error as error:
        raise _failed(predicate, error) from error
    if kind not in ("BOOLEAN", "bool"):
        raise UsageError(
            f"{quote(predicate.text)} is no condition: its value is of type {kind}", hint="compare it with something"
        )


def _run(connection: Any, predicate: Predicate, table: Any) -> Rows:
    connection.register("part", _numbered(table))
    try:
        found: Mapping[str, Any] = connection.execute(predicate.sql).fetchnumpy()
    except import_duckdb().Error as error:
        raise _failed(predicate, error) from error
    return np.sort(np.asarray(found["__row"], np.uint32))


def _numbered(table: Any) -> Any:
    return table.append_column("__row", pa.array(np.arange(table.num_rows, dtype=np.uint32)))


def _failed(predicate: Predicate, error: Exception) -> UsageError:
    return UsageError(f"the condition {quote(predicate.text)} fails: {str(error).strip().splitlines()[0]}")
