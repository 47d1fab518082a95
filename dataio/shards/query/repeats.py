"""Finding keys that more than one sample has.

Purpose: this check needs all keys of an index at once, regardless of their number.
Invariant: the keys are streamed to DuckDB, which counts them. So memory holds the hash table of the keys, and no rows.
Failure behaviour: errors from reading the tables pass through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.predicate import connect


def repeated_keys(tables: Iterable[Any]) -> list[str]:
    """Up to three keys that occur more than once in the column `key` of `tables`."""
    connection = connect()
    try:
        schema = pa.schema([index.SCHEMA.field("key")])
        batches = (batch for table in tables for batch in table.select(["key"]).to_batches())
        connection.register("part", pa.RecordBatchReader.from_batches(schema, batches))
        found = connection.execute("SELECT key FROM part GROUP BY key HAVING count(*) > 1 ORDER BY key LIMIT 3")
        return [row[0] for row in found.fetchall()]
    finally:
        connection.close()
