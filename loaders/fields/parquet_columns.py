"""Columns of numbers of a small Parquet file from an untrusted source.

Purpose: read the values that belong to the instants of a video, such as the states of a robot, as numpy arrays.

Invariants:
- Only the calling thread reads.
- The footer, the number of columns, and the pages of the chosen columns are measured before Arrow reads them. So the
  memory is bounded by `TABLE_BYTES`, whatever the footer claims.
- A column has numbers, or lists of numbers of one length. Nulls and all other types are refused.

Failure behaviour: `CorruptionError` for damaged bytes and for nulls, `MissingValueError` for columns that are missing or
have no numbers, `UnsupportedError` for lists of different lengths and for files above a limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, MissingValueError, UnsupportedError
from headrace.dataio.core.limits import MIB, format_bytes
from headrace.loaders.fields.options import NUMPY_DTYPES, listed

TABLE_BYTES = 256 * MIB
"""The most bytes of the chosen columns, in the file before compression and in memory."""
_FOOTER_BYTES, _COLUMNS, _NAME_BYTES = 4 * MIB, 4096, 1 * MIB
_MAGIC = b"PAR1"
_PAGE_BYTES = 4096
"""A page counts as at least this size, so the number of pages is bounded."""
_ITEM_BYTES = 8

Array = npt.NDArray[Any]


class ColumnReader:
    """Reads columns of a Parquet file. The footer is checked and parsed once.

    Args:
        data: the whole file.
        what: name of the file, for errors.

    Raises:
        CorruptionError: the file is damaged.
        UnsupportedError: the footer is too large.
    """

    def __init__(self, data: memoryview, what: str = "the file") -> None:
        from headrace.dataio.shards.index import arrow

        self._data, self._what = data, what
        _check_footer(data, what)
        with _arrow_errors(what):
            self._reader = arrow.ParquetReader(data, limits=(_NAME_BYTES, _COLUMNS))

    @property
    def names(self) -> Sequence[str]:
        """The names of the columns."""
        with _arrow_errors(self._what):
            names: Sequence[str] = self._reader.schema.names
            return names

    def read(self, names: Collection[str]) -> dict[str, Array]:
        """Return columns by name: (rows, ...).

        Raises:
            MissingValueError: the file lacks a column, or a column has no numbers.
            CorruptionError: the file is damaged, has several columns of a name, or a column has nulls.
            UnsupportedError: a column has lists of different lengths, or the columns are too large.
        """
        from headrace.dataio.shards.index import arrow

        reader, what = self._reader, self._what
        with _arrow_errors(what):
            known = reader.schema
            for name in names:
                if name not in known.names:
                    raise MissingValueError(f"{what} has no column {name!r:.80}", hint=f"it has {listed(known.names)}")
                if known.get_field_index(name) < 0:
                    raise CorruptionError(f"{what} has several columns {name!r:.80}")
                if _dtype(_innermost(known.field(name).type)) is None:
                    raise _not_numbers(known, name, what)
                _check_size(known.field(name).type, reader.metadata.num_rows, f"{what} has a column {name!r:.80}")
                if below := [other for other in known.names if other.startswith(f"{name}.")]:
                    raise UnsupportedError(
                        f"{what} has the columns {name!r:.80} and {below[0]!r:.80}", hint="rename one"
                    )
            for number in arrow.leaf_columns(reader.metadata, names):
                _check_chunks(self._data, reader.metadata, number, what)
            table = reader.read(columns=names)
            return {name: _values(table.column(name).combine_chunks(), name, what) for name in names}


@contextlib.contextmanager
def _arrow_errors(what: str) -> Iterator[None]:
    import pyarrow as pa  # few loaders need it

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise CorruptionError(f"{what} is not a readable Parquet file: {error!s:.200}") from error


def _check_footer(data: memoryview, what: str) -> None:
    if len(data) < 12 or bytes(data[:4]) != _MAGIC or bytes(data[-4:]) != _MAGIC:
        raise CorruptionError(f"{what} is not a Parquet file, or is truncated")
    length = int.from_bytes(data[-8:-4], "little")
    if length > len(data) - 12:
        raise CorruptionError(f"{what} is damaged: its footer is longer than the file")
    if length > _FOOTER_BYTES:
        raise UnsupportedError(
            f"{what} has a footer of {format_bytes(length)}", hint=f"at most {format_bytes(_FOOTER_BYTES)}"
        )


def _innermost(kind: Any) -> Any:
    """The type of the items of a column, or of its lists."""
    import pyarrow as pa

    while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def _not_numbers(schema: Any, name: str, what: str) -> MissingValueError:
    """The error for a column without numbers. It names the columns that have numbers."""
    kind = _innermost(schema.field(name).type)
    numbers = [field.name for field in schema if _dtype(_innermost(field.type)) is not None]
    hint = f"its columns of numbers are {listed(numbers)}" if numbers else "it has no columns of numbers"
    if str(kind) in ("string", "large_string", "string_view"):
        hint += "; the fields Text and Json read texts, from a .txt or .json file of the sample"
    return MissingValueError(f"{what} has a column {name!r:.80} of {kind!s:.80}, which are not numbers", hint=hint)


def _check_size(kind: Any, rows: int, what: str) -> None:
    """Raise `UnsupportedError` if a column has lists that would take too much memory.

    Arrow stores a null in place of a list of a fixed size as so many numbers.
    """
    import pyarrow as pa

    values = rows
    while pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        values *= kind.list_size if pa.types.is_fixed_size_list(kind) else 1
        kind = kind.value_type
    if _ITEM_BYTES * values > TABLE_BYTES:
        raise _too_large(what, _ITEM_BYTES * values)


def _too_large(what: str, size: int) -> UnsupportedError:
    return UnsupportedError(
        f"{what} of {format_bytes(size)}",
        hint=f"at most {format_bytes(TABLE_BYTES)}: divide the recording into samples",
    )


def _check_chunks(data: memoryview, metadata: Any, column: int, what: str) -> None:
    """Raise an error if reading this leaf column could take more memory than `TABLE_BYTES`."""
    from headrace.dataio.shards.index import arrow

    total = rows = 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        start, end = arrow.chunk_range(metadata.row_group(group).column(column))
        if not 0 <= start <= end <= len(data):
            raise CorruptionError(f"{what} is damaged: a column lies outside the file")
        for page in _pages(data[start:end], what):
            total += max(page.unpacked, _ITEM_BYTES * page.values, _PAGE_BYTES)
            if total > TABLE_BYTES:
                raise _too_large(f"{what} has a column", total)
    if _ITEM_BYTES * rows > TABLE_BYTES:
        raise _too_large(f"{what} has a column", _ITEM_BYTES * rows)


def _values(column: Any, name: str, what: str) -> Array:
    """A column as an array. Lists become axes."""
    import pyarrow as pa

    from headrace.dataio.shards.index import arrow

    shape = [len(column)]
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        if column.null_count:
            raise CorruptionError(f"{what} has nulls in its column {name!r:.80}")
        lengths = np.unique(arrow.list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise UnsupportedError(f"{what} has lists of different lengths in its column {name!r:.80}")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = arrow.list_flatten(column)
    if column.null_count:
        raise CorruptionError(f"{what} has nulls in its column {name!r:.80}")
    return np.asarray(column.to_numpy(zero_copy_only=False), _dtype(column.type)).reshape(shape)


def _dtype(kind: Any) -> str | None:
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return name if name in NUMPY_DTYPES and not name.startswith("complex") else None


# --- the headers of pages, in Thrift's compact protocol


class _Page(NamedTuple):
    unpacked: int
    packed: int
    values: int


_UNPACKED, _PACKED, _HEADERS, _VALUES = 2, 3, (5, 7, 8), 1
"""The fields of a page's header, of which `_HEADERS` are structs whose field `_VALUES` is a count."""
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEPTH = 16


def _pages(chunk: memoryview, what: str) -> Iterator[_Page]:
    """The headers of the pages of a column chunk."""
    at = 0
    while at < len(chunk):
        header = _Header(chunk, at)
        try:
            page = header.page()
        except (IndexError, ValueError) as error:
            raise CorruptionError(f"{what} is damaged: a page has no header") from error
        if min(page) < 0:
            raise CorruptionError(f"{what} is damaged: a page has a negative size")
        at = header.at + page.packed
        yield page


class _Header:
    """Reads a struct at `at` of `data`."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data, self.at = data, at

    def page(self) -> _Page:
        sizes, values = {_UNPACKED: -1, _PACKED: -1}, 0
        for field, kind in self._fields():
            if field in sizes and kind == _I32:
                sizes[field] = self._integer()
            elif field in _HEADERS and kind == _STRUCT:
                for inner, inner_kind in self._fields():
                    if inner == _VALUES and inner_kind == _I32:
                        values = self._integer()
                    else:
                        self._skip(inner_kind, 0)
            else:
                self._skip(kind, 0)
        return _Page(sizes[_UNPACKED], sizes[_PACKED], values)

    def _fields(self) -> Iterator[tuple[int, int]]:
        """The number and the type of each field of a struct. The caller reads each value."""
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._integer()
            yield field, head & 15

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _DEPTH:
            raise ValueError("too deep")
        if kind in (_BYTE, _DOUBLE):
            self.at += 1 if kind == _BYTE else 8
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _BINARY:
            length = self._varint()
            self.at += length
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            for _ in range(min(count, len(self._data) - self.at)):
                self._skip(_BYTE if head & 15 in (_TRUE, _FALSE) else head & 15, depth + 1)
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError("not a type of a page's header")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("too long")

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
