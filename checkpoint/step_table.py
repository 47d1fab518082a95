"""Writes the steps of a repository and their metadata into a Parquet file, one row for each step.

Columns: run, timeline, step, attempt, time (UTC), seconds, bytes, bytes_written, ranks, current; then one column for each
name of metadata. The columns of metadata are integers, floats, booleans or texts, or texts if a name has values of
different kinds. A name that is also a fixed column gets the prefix `metadata.`.
Invariant: the file appears when it is complete.
Failure behaviour: `CapacityError` for more than 4,096 names. Errors of the file system are raised as `UsageError`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.checkpoint.format.metadata import Value
from headrace.checkpoint.repository.survey import StepLine
from headrace.dataio.core.errors import CapacityError, UsageError

MAX_NAMES = 4096
"""The maximum number of columns of metadata."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the number of rows, and the names of the columns."""

    rows: int
    columns: list[str]


def table_of(steps: Sequence[StepLine]) -> pa.Table:
    """The table of these steps."""
    fixed: dict[str, Any] = {
        "run": pa.array([line.run for line in steps], pa.string()),
        "timeline": pa.array([line.timeline for line in steps], pa.int64()),
        "step": pa.array([line.step for line in steps], pa.int64()),
        "attempt": pa.array([line.attempt for line in steps], pa.string()),
        "time": pa.array([int(line.committed * 1000) for line in steps], pa.timestamp("ms", "UTC")),
        "seconds": pa.array([line.seconds or None for line in steps], pa.float64()),
        "bytes": pa.array([line.bytes_state for line in steps], pa.int64()),
        "bytes_written": pa.array([line.bytes_written for line in steps], pa.int64()),
        "ranks": pa.array([line.world_size for line in steps], pa.int64()),
        "current": pa.array([line.current for line in steps], pa.bool_()),
    }
    names = sorted({name for line in steps for name in line.metadata})
    if len(names) > MAX_NAMES:
        raise CapacityError(
            f"the metadata has {len(names)} names, at most {MAX_NAMES} become columns", hint="use --run for one run"
        )
    for name in names:
        column = f"metadata.{name}" if name in fixed else name
        fixed[column] = _column([line.metadata.get(name) for line in steps])
    return pa.table(fixed)


def _column(values: Sequence[Value]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int}:
        return pa.array(values, pa.int64())
    if kinds and kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(
        [value if value is None or isinstance(value, str) else repr(value) for value in values], pa.string()
    )


def write(steps: Sequence[StepLine], target: Path) -> Written:
    """Write the table of these steps into the file `target`."""
    table = table_of(steps)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        pq.write_table(table, part)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}", hint="check the folder") from None
    finally:
        part.unlink(missing_ok=True)
    return Written(table.num_rows, table.column_names)
