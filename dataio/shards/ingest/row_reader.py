"""The process that reads the rows of Parquet files with embedded media: `python -m headrace.dataio.shards.ingest.row_reader`.

Purpose: write the media of a row to files, from which the probe workers make a sample like from other files. Parquet
can only be read from the beginning of a row group, so one process reads all rows in the order of the plan. It also
answers the questions about a file that a plan needs (`headrace.dataio.shards.ingest.embedded`): a hostile footer can
abort the process that parses it.

Invariants:

* A row group is decoded once if its rows are requested in order. An earlier row, or another row group, opens it again.
* The process holds the current pages of each column and about `_BATCH_BYTES` of rows. Allocations fail above
  `MEMORY_BYTES`, since a page may have up to 2 GiB.
* A value of more than `VALUE_BYTES` is refused.
* Arrow's threads are not used.

Failure behaviour: a row that cannot be a sample is a `Failure`. After damage, every later row of the row group has the
same `Failure`. If the scratch folder is full, `scratch_full` is set.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.ingest.embedded import PARQUET_LIMITS, answer
from headrace.dataio.shards.ingest.manifests import fields_json
from headrace.dataio.shards.ingest.row_messages import (
    ROWS_HELLO,
    EmbeddedColumn,
    RowFiles,
    RowGroup,
    RowResult,
    RowTask,
    decode_request,
    encode_message,
)
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS
from headrace.dataio.shards.media.messages import TEXT_BYTES, Failure
from headrace.dataio.shards.media.signatures import HEAD_BYTES, extension_of, format_of
from headrace.dataio.shards.workers import worker

MEMORY_BYTES = min(8 * limits.GIB, limits.memory_bytes() // 2)
"""The memory limit of the process. Arrow needs up to four times the bytes of the largest page."""
VALUE_BYTES = 1 * limits.GIB
"""The most bytes of one embedded medium."""
_BATCH_BYTES = 8 * limits.MIB
_BATCH_ROWS = 256
_READ_BYTES = 1 * limits.MIB
_SCRATCH_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_PLAIN_EXTENSION = re.compile(r"[a-z0-9]{1,16}")


class RowReader:
    """Reads rows. It keeps its place in the row group of the last request."""

    def __init__(self) -> None:
        self._cursor: _Cursor | None = None

    def read(self, task: RowTask) -> RowResult:
        """Write the media of a row to files in the task's folder."""
        where = task.row.display_name
        try:
            files = _files(self._row(task), task)
        except HeadraceError as error:
            return Failure(where, error.code, error.message)
        except MemoryError:
            limit = limits.format_bytes(MEMORY_BYTES)
            return Failure(where, CapacityError.code, f"reading it takes more than {limit} of memory")
        except OSError as error:
            full = error.errno in _SCRATCH_FULL
            code = CapacityError.code if full else CorruptionError.code
            return Failure(where, code, f"cannot be read: {error.strerror or error}", scratch_full=full)
        return files

    def _row(self, task: RowTask) -> Any:
        if self._cursor is None or not self._cursor.can_reach(task):
            self._cursor = None  # frees its pages before others are read
            self._cursor = _Cursor(task.file, task.row.group)
        return self._cursor.row(task.row.row)


class _Cursor:
    """A place in a row group. It only moves forward."""

    def __init__(self, file: str, group: RowGroup) -> None:
        self._file, self._group = file, group
        self._batches = _batches(file, group)
        self._batch: Any = None
        self._first = self._next = 0
        self._error: HeadraceError | None = None

    def can_reach(self, task: RowTask) -> bool:
        """Return whether the row lies in this row group, and not before the current batch."""
        return (self._file, self._group) == (task.file, task.row.group) and task.row.row >= self._first

    def row(self, number: int) -> Any:
        """Return a row as a batch of one row."""
        while number >= self._next:
            self._advance()
        return self._batch.slice(number - self._first, 1)

    def _advance(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._batch = None
            batch = next(self._batches, None)
        except MemoryError:
            limit = limits.format_bytes(MEMORY_BYTES)
            self._error = CapacityError(f"its row group takes more than {limit} of memory; write smaller row groups")
        except (pa.ArrowException, OSError) as error:
            self._error = CorruptionError(f"its row group is damaged: {_one_line(error)}")
        else:
            if batch is None or not len(batch):
                self._error = CorruptionError("the file has fewer rows than its footer states")
            else:
                self._batch, self._first, self._next = batch, self._next, self._next + len(batch)
        if self._error is not None:
            raise self._error


def _batches(path: str, group: RowGroup) -> Iterator[Any]:
    size = max(1, min(_BATCH_ROWS, _BATCH_BYTES * group.rows // max(1, group.unpacked)))
    with pq.ParquetFile(path, buffer_size=_READ_BYTES, **PARQUET_LIMITS) as file:
        yield from file.iter_batches(size, row_groups=[group.number], use_threads=False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# --- one row


def _files(row: Any, task: RowTask) -> RowFiles:
    """Write the files of a row, and return them with its caption and fields."""
    group = task.row.group
    os.makedirs(task.folder, exist_ok=True)
    files, total = [], 0
    for number, column in enumerate(group.media):
        value = _value(row.column(column.name)[0], column)
        if value is None:
            continue
        data, name = value
        ext = _extension(column, bytes(data[:HEAD_BYTES]), name)
        path = os.path.join(task.folder, f"row-{number}.{ext.rpartition('.')[2]}")
        with open(path, "wb") as file:
            file.write(data)
        files.append((ext, path))
        total += len(data)
    caption, fields = _other_values(row, task)
    return RowFiles(tuple(sorted(files)), total, caption, fields)


def _value(cell: Any, column: EmbeddedColumn) -> tuple[memoryview, str | None] | None:
    """Return the bytes and the name of a medium. None means that a further medium is missing."""
    name = None
    if pa.types.is_struct(cell.type) and cell.is_valid:
        path = cell["path"]
        name = path.as_py() if path.is_valid else None
        cell = cell["bytes"]
    if not cell.is_valid:
        if name:
            raise UnsupportedError(
                f"its {column.name!r} has a path and no bytes: embed the files with `datasets.table.embed_table_storage`, "
                "or give a manifest with their paths"
            )
        if not column.member:
            raise UnsupportedError(f"its {column.name!r} is null, so it has no medium")
        return None
    data = memoryview(cell.as_buffer())
    if len(data) > VALUE_BYTES:
        raise UnsupportedError(f"its {column.name!r} is larger than {limits.format_bytes(VALUE_BYTES)}")
    if not len(data):
        raise CorruptionError(f"its {column.name!r} is empty")
    return data, name


def _extension(column: EmbeddedColumn, head: bytes, name: str | None) -> str:
    """Return the extension of a member. A further member need not be a medium."""
    claimed = (name or "").rpartition(".")[2].lower()
    try:
        if column.member and format_of(head) is None and claimed not in KNOWN_EXTENSIONS:
            ext = claimed if _PLAIN_EXTENSION.fullmatch(claimed) and "." in (name or "") else "bin"
        else:
            ext = extension_of(head, name)
    except UnsupportedError as error:
        raise UnsupportedError(f"its {column.name!r}: {error.message}") from error
    return f"{column.member}.{ext}" if column.member else ext


def _other_values(row: Any, task: RowTask) -> tuple[str | None, str | None]:
    """Return the caption and the fields of a row."""
    group = task.row.group
    left_out = {column.name for column in group.media} | {group.key}
    try:
        (values,) = row.select([name for name in row.schema.names if name not in left_out]).to_pylist()
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        raise CorruptionError(f"a value cannot be read: {_one_line(error)}") from error
    caption = values.pop(group.caption, None) or None
    if caption is not None and len(caption.encode()) > TEXT_BYTES:
        raise UnsupportedError(f"its caption is larger than {limits.format_bytes(TEXT_BYTES)}")
    try:
        return caption, fields_json(values)
    except UsageError as error:
        raise UnsupportedError(error.message) from error


# --- the process


def serve_rows() -> None:
    """Serve the packer's requests until standard input ends."""
    worker.confine(MEMORY_BYTES)
    reader = RowReader()

    def serve_one(frame: bytes) -> bytes:
        task = decode_request(frame)
        return encode_message(reader.read(task) if isinstance(task, RowTask) else answer(task))

    worker.serve(ROWS_HELLO, serve_one)


if __name__ == "__main__":
    serve_rows()
