"""Makes a `rows.safetensors` of the rows of each episode of a LeRobot data set.

Purpose: a loader reads the state and the action at the instants of a clip. The rows of an episode lie in a Parquet file
with those of many others. `EpisodeRows` reads a local copy of such a file, and returns the rows of one episode after
the other as one file of tensors.

Invariants:

* Every column of numbers or booleans becomes one tensor with its own type, and one entry for each row. Columns of lists
  become tensors with more dimensions. Texts and other columns are left out.
* Rows are found by their column `episode_index`. An episode has exactly as many rows as its list says, one after the
  other. `timestamp` is the time from the episode's start in seconds, and grows from row to row.
* Only one batch of `_BATCH` rows and the rows of one episode are in memory. Row groups without a wanted episode are
  not read, if the file has statistics.
* Equal rows give equal bytes.

Failure behaviour: an episode whose rows are missing, incomplete or not tensors raises `CorruptionError` or
`UnsupportedError` from `read`, and other episodes can still be read. A file that is no Parquet file raises
`CorruptionError` for every episode.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

ROWS_BYTES = 64 * limits.MIB
"""The largest `rows.safetensors`."""
EPISODE, TIME = "episode_index", "timestamp"
_BATCH = 4096
_BATCH_BYTES = 256 * limits.MIB
_GROUP_BYTES, _GROUP_VALUES = 1 * limits.GIB, 1 << 28
"""The largest column of a row group, unpacked, and the most values in it. A few bytes can say that a value is repeated."""
_MAX_DIMENSIONS = 4
_TYPES = {
    "bool": "BOOL",
    **{f"int{8 * size}": f"I{8 * size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"U{8 * size}" for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
}
"""The names of the types in safetensors, by those of numpy."""


class EpisodeRows:
    """Reads the rows of episodes from one Parquet file, in the order of their numbers. It is a context manager.

    Args:
        path (Path): a local copy of the file.
        name (str): its name in messages.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._name, self._undo = name, contextlib.ExitStack()
        with _arrow_errors(name):
            self._file = self._undo.enter_context(pq.ParquetFile(path, pre_buffer=False))
            check_footer(self._file.metadata, name)
            schema = self._file.schema_arrow
        self._columns = [field.name for field in schema if _leaf(field.type) is not None]
        if len(set(schema.names)) < len(schema.names):
            raise CorruptionError(f"{name}: two columns have the same name")
        if EPISODE not in schema.names or not pa.types.is_integer(schema.field(EPISODE).type):
            raise CorruptionError(f"{name}: there is no column {EPISODE!r} of integers")
        self._batches = self._read_batches()
        self._batch: Any = None
        self._wanted = -1

    def read(self, episode: int, length: int) -> bytes:
        """Return the rows of an episode as a file of tensors.

        Args:
            episode (int): the number of the episode, larger than that of the last call.
            length (int): the number of its rows.

        Raises:
            CorruptionError: the file does not have these rows.
            UnsupportedError: the rows are not tensors, or are larger than `ROWS_BYTES`.
        """
        self._wanted = episode
        with _arrow_errors(self._name):
            pieces, count, size = [], 0, 0
            for piece in self._pieces(episode):
                pieces.append(piece)
                count, size = count + piece.num_rows, size + piece.nbytes
                if count > length or size > ROWS_BYTES:
                    break
            if size > ROWS_BYTES:
                raise UnsupportedError(f"its rows take more than {limits.format_bytes(ROWS_BYTES)}")
            if count != length:
                found = f"more than {length}" if count > length else str(count)
                raise CorruptionError(f"{self._name} has {found} rows of it, and its length is {length}")
            table = pa.Table.from_batches(pieces)
            arrays = {name: _array(table[name].combine_chunks(), name) for name in self._columns}
        _check_times(arrays.get(TIME))
        return tensors(arrays)

    def _pieces(self, episode: int) -> Iterator[Any]:
        """Yield the rows of the episode, and keep what follows them for the next call."""
        while True:
            if self._batch is None or not self._batch.num_rows:
                self._batch = next(self._batches, None)
                if self._batch is None:
                    return
            numbers = self._batch[EPISODE].to_numpy(zero_copy_only=False)
            begin = int(np.argmax(numbers >= episode)) if (numbers >= episode).any() else len(numbers)
            rest = numbers[begin:]
            count = int(np.argmax(rest != episode)) if (rest != episode).any() else len(rest)
            piece = self._batch.slice(begin, count)
            self._batch = self._batch.slice(begin + count)
            if count:
                yield piece
            if self._batch.num_rows:
                return

    def _read_batches(self) -> Iterator[Any]:
        """Yield the batches of the row groups that may have the episode that is wanted now, or a later one."""
        for group in range(self._file.metadata.num_row_groups):
            if self._last_episode(group) < self._wanted:
                continue
            for batch in self._file.iter_batches(_BATCH, [group], self._columns, use_threads=False):
                if batch.nbytes > _BATCH_BYTES:
                    raise CorruptionError(f"{self._name}: {_BATCH} rows take more than 256 MiB")
                yield batch

    def _last_episode(self, group: int) -> float:
        """Return the largest number of an episode in a row group, or infinity if the file does not say it."""
        row_group = self._file.metadata.row_group(group)
        for at in range(row_group.num_columns):
            column = row_group.column(at)
            if column.path_in_schema == EPISODE:
                statistics = column.statistics
                known = statistics is not None and statistics.has_min_max and isinstance(statistics.max, int)
                return statistics.max if known else math.inf
        return math.inf

    def close(self) -> None:
        """Close the file."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_footer(metadata: Any, name: str) -> None:
    """Raise `CorruptionError` if a column of a Parquet file declares more than a reader can hold."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for at in range(group.num_columns):
            column = group.column(at)
            if column.total_uncompressed_size > _GROUP_BYTES or column.num_values > _GROUP_VALUES:
                raise CorruptionError(
                    f"{name}: the column {column.path_in_schema!r:.200} of row group {number} is too large"
                )


def tensors(arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Return arrays as a safetensors file. Equal arrays give equal bytes.

    Raises:
        UnsupportedError: an array has a type that safetensors does not have.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))  # so every tensor is aligned
    entries, parts, at = {}, [], 0
    for name in order:
        array = np.ascontiguousarray(arrays[name])
        kind = _TYPES.get(array.dtype.name)
        if kind is None:
            raise UnsupportedError(f"the column {name!r} has the type {array.dtype.name}")
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def _leaf(kind: Any) -> Any:
    """Return the type of the numbers in a column of this type, or None if it has none."""
    for _ in range(_MAX_DIMENSIONS):
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            return kind
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return None
        kind = kind.value_type
    return None


def _array(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a column as an array with one entry for each row."""
    shape = [len(column)]
    while isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        lengths = set(column.value_lengths().unique().to_pylist()) if not _is_fixed(column) else {column.type.list_size}
        if len(lengths) != 1 or None in lengths or column.null_count:
            raise UnsupportedError(f"the lists of the column {name!r} have different lengths, or some are missing")
        shape.append(lengths.pop())
        column = column.flatten()
    if column.null_count:
        raise UnsupportedError(f"values of the column {name!r} are missing")
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_fixed(column: Any) -> bool:
    return isinstance(column, pa.FixedSizeListArray)


def _check_times(times: np.ndarray[Any, Any] | None) -> None:
    if times is None or times.ndim != 1 or not np.issubdtype(times.dtype, np.floating):
        raise UnsupportedError(f"its rows have no column {TIME!r} of times in seconds")
    if not np.isfinite(times).all() or abs(times[0]) > 1.0 or (np.diff(times) <= 0).any():
        raise CorruptionError(f"the times in the column {TIME!r} do not begin at 0 or do not grow")


@contextlib.contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise CorruptionError(f"{name} is not a readable Parquet file: {error}") from error
