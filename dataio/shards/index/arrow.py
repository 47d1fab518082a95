"""The parts of Arrow that opening a dataset needs, without the slow imports of `pyarrow.compute` and `pyarrow.parquet`.

Purpose: `pyarrow.compute` generates about three hundred functions with docstrings at import. `pyarrow.parquet` imports
Arrow's file systems, including the clients of four cloud stores. Each takes longer than importing the rest of pyarrow,
and would delay the first sample of every process that reads a dataset.
Invariants:

* Each function does the same as the `pyarrow.compute` function of the same name with its default options. `sum_` stands
  for `sum`, and `rows` for `take` on tables.
* `ParquetReader` returns what `pyarrow.parquet.ParquetFile` returns with its default options. Only the calling thread
  reads. Arrow's thread pool is not started, because it sometimes aborts a process that exits immediately.
* Code that runs before the first sample must not call methods such as `take` and `filter`: they import
  `pyarrow.compute`.

Failure behaviour: Arrow's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import _compute, _parquet

_call: Callable[..., Any] = _compute.call_function


_TYPES = {bool: pa.bool_(), int: pa.int64(), str: pa.string()}


def _scalar(value: Any) -> Any:
    """Convert a value to a scalar of an explicit type. To infer the type, Arrow would import more modules."""
    kind = _TYPES.get(type(value))
    return value if kind is None else pa.scalar(value, kind)


def _compute_function(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return _call(name, [_scalar(one) for one in arguments])

    return call


and_, equal, invert, less, less_equal, xor = map(
    _compute_function, ("and", "equal", "invert", "less", "less_equal", "xor")
)
binary_length, count_distinct, is_valid, min_max, sum_, unique = map(
    _compute_function, ("binary_length", "count_distinct", "is_valid", "min_max", "sum", "unique")
)
list_element, list_flatten, list_parent_indices, list_value_length, take = map(
    _compute_function, ("list_element", "list_flatten", "list_parent_indices", "list_value_length", "array_take")
)


def is_null(values: Any) -> Any:
    """Return a mask of the null values. NaN is not null."""
    return _call("is_null", [values], _compute.NullOptions(nan_is_null=False))


def index(values: Any, value: Any) -> Any:
    """Return the position of the first `value`, or -1."""
    return _call("index", [values], _compute.IndexOptions(_scalar(value)))


def index_in(values: Any, among: Any) -> Any:
    """Return for each value its position in `among`, or null."""
    return _call("index_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def is_in(values: Any, among: Any) -> Any:
    """Return for each value whether `among` contains it."""
    return _call("is_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def struct_field(values: Any, names: Sequence[str]) -> Any:
    """Return the field at the path `names` of each struct."""
    return _call("struct_field", [values], _compute.StructFieldOptions(list(names)))


def rows(table: Any, numbers: Any) -> Any:
    """Return the rows `numbers` of a table, in this order."""
    return _call("take", [table, numbers])


class ParquetReader:
    """Reads the Parquet file in `data`. `metadata` is the metadata of its footer, if the caller has already read it.

    `limits` are the most bytes of a string and the most items of a list in the footer. None means Arrow's own limits.
    """

    def __init__(self, data: Any, metadata: Any = None, limits: tuple[int, int] | None = None) -> None:
        self._reader = _parquet.ParquetReader()
        strings, items = limits or (None, None)
        self._reader.open(
            pa.BufferReader(data),
            metadata=metadata,
            pre_buffer=False,
            thrift_string_size_limit=strings,
            thrift_container_size_limit=items,
        )
        self.metadata: Any = self._reader.metadata

    @property
    def schema(self) -> Any:
        """The Arrow schema of the tables that `read` returns."""
        return self._reader.schema_arrow

    def read(self, groups: Sequence[int] | None = None, columns: Collection[str] | None = None) -> Any:
        """Read a table of these columns (None: all) of these row groups (None: all), in the file's order."""
        chosen = range(self.metadata.num_row_groups) if groups is None else groups
        stored = None if columns is None else leaf_columns(self.metadata, columns)
        return self._reader.read_row_groups(list(chosen), column_indices=stored, use_threads=False)


def leaf_columns(metadata: Any, columns: Collection[str]) -> list[int]:
    """Return the numbers of the leaf columns that store these columns.

    A list or a struct is stored as one or more leaf columns. The name of a column may have dots.
    """
    schema = metadata.schema
    return [n for n in range(metadata.num_columns) if _belongs_to(schema.column(n).path, columns)]


def _belongs_to(path: str, columns: Collection[str]) -> bool:
    """Return whether a leaf column is one of these columns, or a part of one."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in columns for count in range(1, len(parts) + 1))


def chunk_range(chunk: Any) -> tuple[int, int]:
    """Return the (start, end) in the file of a column chunk, which is described by its metadata."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


def leaf_paths(schema: Any) -> list[str]:
    """Return the paths of the leaf columns of a file with this schema, as `leaf_columns` numbers them."""
    return [path for field in schema for path in _paths(field.type, field.name)]


def _paths(kind: Any, path: str) -> list[str]:
    if pa.types.is_list(kind):
        return _paths(kind.value_type, f"{path}.list.element")
    if pa.types.is_struct(kind):
        return [below for field in kind for below in _paths(field.type, f"{path}.{field.name}")]
    return [path]
