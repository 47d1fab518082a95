"""The `Rows` field: values of a table for the instants of a clip, such as the states and actions of a robot.

Purpose: find, for each frame of a clip, the row that holds at its instant.

Invariants:
- The row of an instant is the last one that begins at most `TOLERANCE` after it. The instants are the times of the
  decoded frames. The tolerance is much larger than the rounding of times to 64 bits.
- With `offsets`, the instants are seconds after the last frame of the clip. Beyond the first and the last row, that row
  is repeated, and marked.
- Times of rows are finite and never decrease. Nothing is unpickled.

Failure behaviour: `CorruptionError` for damaged files and times, and `UnsupportedError` for a clip outside the rows. Both
make a bad sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as option
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, MissingValueError, UnsupportedError, UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.sample import Sample
from headrace.loaders.clip import TOLERANCE
from headrace.loaders.fields.arrays import read_entries, read_npy, read_tensor
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.options import (
    ITEM_BYTES,
    check_dtype,
    check_file,
    check_options,
    converted,
    keepable,
    listed,
)
from headrace.loaders.fields.parquet_columns import TABLE_BYTES, ColumnReader
from headrace.loaders.validation import checked

if TYPE_CHECKING:
    import torch

FORMATS = ("npy", "safetensors", "parquet")
MAX_OFFSETS = 1 << 16
_TOLERANCE = float(TOLERANCE)
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
_PACKED = 8
"""The expected ratio of the size of a Parquet file in memory to its size. Budgets use it."""


@suggests_arguments(name="column", tensor="column", fps="rate")
@dataclass(frozen=True)
class Rows(Field):
    """The rows of a table that hold at the instants of a clip: (T, ...), one for each frame.

    A table is a `.npy` file, a `.safetensors` file or a `.parquet` file of the sample. Its times are seconds on the
    sample's clock, like the instants of the frames. The row of an instant is the last one that begins at most a
    millisecond after it. A clip with an instant outside the rows, by more than the duration of a row, makes a bad
    sample.

    With `offsets`, the entry `<name>.pad`, bool (B, len(offsets)), says which rows lie beyond the first or last row, and
    repeat it.

    Args:
        file (str): extension of the file, such as "rows.parquet".
        column (str | None): name of the column of numbers or of lists of one length, or of the tensor. Not for `.npy`.
        like (str): name of the `Video` field whose instants are taken.
        rate (float | None): rows in a second. The first row begins at 0. Default: None, the times of the file.
        time (str): name of the column or tensor of times, in seconds. With `rate`, it is not read. Default:
            "timestamp".
        offsets (Sequence[float] | None): take the rows at these seconds after the last frame of the clip, instead of
            those of the frames; also negative ones. Default: None.
        dtype (torch.dtype | str | None): convert the values to this dtype. Default: None, the file's dtype.
        required (bool): leave out samples that lack the file. Default: True. A file without the column is a bad sample;
            with `required=False`, the sample has no value.

    Raises:
        UsageError: an option is invalid, or the loader has no `Video` field called `like`.

    Example:
        >>> Rows("rows.parquet", "action", like="front", offsets=(0.0, 0.1, 0.2)).files
        ('rows.parquet',)
    """

    file: str
    column: str | None = None
    _: KW_ONLY
    like: str
    rate: float | None = None
    time: str = "timestamp"
    offsets: Sequence[float] | None = None
    dtype: torch.dtype | str | None = None
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)
    entries: Mapping[str, Any] = option(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_options(self, check_file(self, self.file))
        check_dtype(self, self.dtype)
        self._check_format()
        if not isinstance(self.like, str):
            raise UsageError(f"Rows's like cannot be {self.like!r:.80}", hint="give the name of a Video field")
        rate = checked("Rows's rate", self.rate, float | None)
        if rate is not None and not 0 < rate < 1_000_000:
            raise UsageError(f"Rows's rate cannot be {self.rate!r}", hint="rows in a second, above 0")
        self._check_offsets()

    def _check_format(self) -> None:
        kind = _format(self.file)
        if kind not in FORMATS:
            raise UsageError(
                f"Rows cannot read {self.file!r:.80}", hint=f"give a file of these formats: {', '.join(FORMATS)}"
            )
        column, time = self.column, checked("Rows's time", self.time, str)
        if kind == "npy" and (column is not None or self.rate is None):
            raise UsageError("a .npy file has one array and no times", hint="leave column out, and give rate=")
        if kind != "npy" and not (isinstance(column, str) and column and time):
            raise UsageError(
                f"Rows's column cannot be {column!r:.80}", hint='give the name of a column, such as "action"'
            )

    def _check_offsets(self) -> None:
        if self.offsets is None:
            object.__setattr__(self, "entries", {})
            return
        offsets: Any = self.offsets
        if not isinstance(offsets, Sequence) or not 1 <= len(offsets) <= MAX_OFFSETS:
            raise UsageError(f"offsets={offsets!r:.80} are not some seconds", hint="such as offsets=(0.0, 0.1)")
        numbers = tuple(float(checked("an offset", one, float)) for one in offsets)
        if not all(map(math.isfinite, numbers)):
            raise UsageError(f"offsets={offsets!r:.80} are not finite", hint="give seconds")
        object.__setattr__(self, "offsets", numbers)
        object.__setattr__(self, "entries", {"pad": np.ones(len(numbers), np.bool_)})

    def decode(self, data: FieldInput) -> Any:
        what = f".{self.file}"
        table = _table(self, data, what)
        has_column = self.column is None or table.has(self.column)
        if not has_column and not self.required:
            return None if self.offsets is None else (None, self.entries)
        try:
            values, times = _values_and_times(self, table, what)
        except MissingValueError as error:
            raise (error if has_column else keepable(error)) from None
        if not len(values):
            raise CorruptionError(f"{what} has no rows")
        clock = _TimesClock(times, len(values), what) if self.rate is None else _RateClock(len(values), self.rate)
        instants = np.array([float(instant) for instant in data.instants(self.like)])
        if self.offsets is None:
            return converted(_taken(values, _rows_of(instants, clock, what)), self._dtype)
        wanted = instants[-1] + np.array(self.offsets)
        numbers = clock.rows(wanted)
        pad = (numbers < 0) | (wanted + _TOLERANCE >= clock.end)
        taken = _taken(values, numbers.clip(0, len(values) - 1))
        return converted(taken, self._dtype), {"pad": pad}

    @property
    def _dtype(self) -> str | None:
        return None if self.dtype is None else str(self.dtype)

    def nbytes(self, sample: Sample) -> int:
        size = super().nbytes(sample)
        if _format(self.file) == "parquet":
            size = min(_PACKED * size, 2 * TABLE_BYTES)
        return size if self.dtype is None else size * ITEM_BYTES[str(self.dtype)]


def _format(file: str) -> str:
    return file.rpartition(".")[2].lower()


class _Table:
    """A file of rows. It is parsed once for all fields of a sample, and each column is read once."""

    def __init__(self, file: str, data: memoryview, what: str) -> None:
        self._data, self._what = data, what
        self._columns: dict[str, Any] = {}
        self._parquet = ColumnReader(data, what) if _format(file) == "parquet" else None
        self._tensors = read_entries(data, what) if _format(file) == "safetensors" else None

    def columns(self, *names: str) -> list[Any]:
        """The values of these columns, each (rows, ...). The one of a `.npy` file is called ""."""
        missing = [name for name in names if name not in self._columns]
        if missing and self._parquet is not None:
            self._columns |= self._parquet.read(missing)
        elif missing:
            self._columns |= {name: self._read(name) for name in missing}
        return [self._columns[name] for name in names]

    def has(self, name: str) -> bool:
        """Whether the file has this column or tensor."""
        if self._parquet is not None:
            return name in self._parquet.names
        return self._tensors is not None and name in self._tensors[0]

    def _read(self, name: str) -> Any:
        if self._tensors is None:
            return read_npy(self._data, self._what)
        entries, start = self._tensors
        if name not in entries:
            raise MissingValueError(f"{self._what} has no tensor {name!r:.80}", hint=f"it has {listed(entries)}")
        return read_tensor(self._data, start, entries[name], self._what)


def _table(rows: Rows, data: FieldInput, what: str) -> _Table:
    """The parsed file, which the fields of a sample share."""
    table: _Table | None = data.shared.get((Rows, rows.file))
    if table is None:
        table = data.shared[Rows, rows.file] = _Table(rows.file, data.files[rows.file], what)
    return table


def _values_and_times(rows: Rows, table: _Table, what: str) -> tuple[Any, npt.NDArray[Any] | None]:
    """The values, (rows, ...), and the times. None if there is a rate."""
    names = [rows.column or ""] if rows.rate else [rows.column or "", rows.time]
    values, times = [*table.columns(*names), None][:2]
    if not values.ndim:
        raise UnsupportedError(f"{what} has a single number, and not rows")
    return values, times


def _taken(values: Any, numbers: npt.NDArray[Any]) -> Any:
    """These rows, as an array or a tensor of its own."""
    if isinstance(values, np.ndarray):
        return values[numbers]
    import torch

    return values[torch.from_numpy(numbers)]


def _rows_of(instants: F64, clock: _RateClock | _TimesClock, what: str) -> I64:
    """The numbers of the rows that hold at these instants."""
    first, last = instants[0] + _TOLERANCE, instants[-1] - _TOLERANCE
    if first < clock.start - clock.duration or last > clock.end + clock.duration:
        raise UnsupportedError(
            f"{what} has rows from {clock.start:.3f} s to {clock.end:.3f} s, and the clip has frames from "
            f"{instants[0]:.3f} s to {instants[-1]:.3f} s"
        )
    return clock.rows(instants).clip(0, clock.count - 1)


class _RateClock:
    """Rows that follow each other at a rate, the first one at 0."""

    def __init__(self, count: int, rate: float) -> None:
        self._rate = rate
        self.count, self.duration, self.start, self.end = count, 1 / rate, 0.0, count / rate

    def rows(self, instants: F64) -> I64:
        """The numbers of the rows that hold at these instants. They may lie outside the table."""
        return np.floor((instants + _TOLERANCE) * self._rate).astype(np.int64)


class _TimesClock:
    """Rows that begin at given times. The last one lasts as long as the others do on average."""

    def __init__(self, times: Any, count: int, what: str) -> None:
        self.count = count
        if not isinstance(times, np.ndarray) or times.shape != (count,) or times.dtype.kind not in "iuf":
            raise CorruptionError(f"{what} has times that are not a number for each of its {count} rows")
        if not np.isfinite(times).all():
            raise CorruptionError(f"{what} has times that are not finite")
        self._times = times.astype(np.float64)
        if (np.diff(self._times) < 0).any():
            raise CorruptionError(f"{what} has times that are not in order")
        # times that were rounded to this dtype
        self._rounding = float(np.spacing(np.abs(times).max())) if times.dtype.kind == "f" else 0.0
        self.start, last = float(self._times[0]), float(self._times[-1])
        self.duration = (last - self.start) / max(1, count - 1)
        self.end = last + self.duration

    def rows(self, instants: F64) -> I64:
        """The numbers of the rows that hold at these instants. -1 is before the first one."""
        numbers: I64 = np.searchsorted(self._times, instants + (_TOLERANCE + self._rounding), side="right") - 1
        return numbers
