"""Reading Parquet files from memory without importing `pyarrow.parquet`.

Purpose: `pyarrow.parquet` imports Arrow's file systems, including the clients of four cloud stores. This import takes
longer than reading the first samples.
Invariants: a reader returns what `pyarrow.parquet.ParquetFile` returns with its default options. Only the calling
thread reads. Arrow's thread pool is not started, because it sometimes aborts a process that exits immediately.
Failure behaviour: Arrow's own errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import _parquet


class Reader:
    """The Parquet file in `data`. `metadata` is the metadata of its footer, if the caller has read it before."""

    def __init__(self, data: Any, metadata: Any = None) -> None:
        self._reader = _parquet.ParquetReader()
        self._reader.open(pa.BufferReader(data), metadata=metadata, pre_buffer=False)
        self.metadata: Any = self._reader.metadata

    def read(self, groups: Sequence[int] | None = None, columns: Collection[str] | None = None) -> Any:
        """A table of these columns (None: all) of these row groups (None: all), in the file's order."""
        chosen = range(self.metadata.num_row_groups) if groups is None else groups
        stored = None if columns is None else leaves(self.metadata, columns)
        return self._reader.read_row_groups(list(chosen), column_indices=stored, use_threads=False)


def leaves(metadata: Any, columns: Collection[str]) -> list[int]:
    """The numbers of the leaf columns that store these columns. A list or a struct is stored as one or more leaf
    columns."""
    schema = metadata.schema
    return [n for n in range(metadata.num_columns) if schema.column(n).path.partition(".")[0] in columns]


def paths(schema: Any) -> list[str]:
    """The paths of the leaf columns of a file with this schema, in the order in which `leaves` numbers them."""
    return [path for field in schema for path in _paths(field.type, field.name)]


def _paths(kind: Any, path: str) -> list[str]:
    if pa.types.is_list(kind):
        return _paths(kind.value_type, f"{path}.list.element")
    if pa.types.is_struct(kind):
        return [below for field in kind for below in _paths(field.type, f"{path}.{field.name}")]
    return [path]
