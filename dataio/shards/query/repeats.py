"""Keys that more than one sample has.

Purpose: the one question about an index that needs all of its keys at once, whatever their number.
Invariant: DuckDB counts what is streamed to it, so memory holds the keys' hash table and no rows.
Failure behaviour: errors of whoever reads the tables pass through.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.predicate import connect


def repeated_keys(tables: Iterable[Any]) -> list[str]:
    """Up to three keys that `tables` with a column `key` hold more than once."""
    connection = connect()
    try:
        schema = pa.schema([index.SCHEMA.field("key")])
        batches = (batch for table in tables for batch in table.select(["key"]).to_batches())
        connection.register("part", pa.RecordBatchReader.from_batches(schema, batches))
        found = connection.execute("SELECT key FROM part GROUP BY key HAVING count(*) > 1 ORDER BY key LIMIT 3")
        return [row[0] for row in found.fetchall()]
    finally:
        connection.close()
