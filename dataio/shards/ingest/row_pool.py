"""Reads rows with embedded media for the packer: in the order of the plan, in one process of their own.

Purpose: `RowPool` writes the media of each row into the scratch folder of its group. The probe workers then make a
sample of these files.

Invariants:

* Rows are read one after the other, so a row group is decoded once. Meanwhile, the probe workers examine earlier rows.
* Of an object in a store, the row group and the footer are copied, into one file that has the rest as a hole. It is
  replaced when the next row group begins.
* A local file must have the size and the time that the plan has. An object must have the size.

Failure behaviour: if the reading process hangs or crashes, this row and all later rows of its row group have the same
`Failure`. A file that changed raises `ChangedError`. Errors of a store pass through. If the scratch folder is full,
`scratch_full` is set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, DeadlineError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards.ingest.row_messages import (
    ROWS_HELLO,
    RowGroup,
    RowRef,
    RowResult,
    RowTask,
    decode_row,
    encode_message,
)
from headrace.dataio.shards.ingest.source_stores import ChangedError, SourceStores, is_url
from headrace.dataio.shards.media.messages import Failure
from headrace.dataio.shards.workers.worker_pool import WorkerPool

READER = run_module("headrace.dataio.shards.ingest.row_reader")
"""The command that starts the reading process."""
_RETRY_HINT = "pack again when nothing writes to the input"


def seconds_for(group: RowGroup) -> float:
    """Return the time limit for a row in seconds, which may be the last row of its row group.

    It is one minute plus one second per 4 MiB of the row group.
    """
    return 60.0 + (group.length + group.unpacked) / (4 * limits.MIB)


class RowPool:
    """Reads rows in the order in which they are submitted.

    Args:
        stores: the stores of the files. Only files in stores need them.
        command: the command that starts the reading process.
    """

    def __init__(self, stores: SourceStores | None, command: Sequence[str] = READER) -> None:
        self._stores = stores
        self._pool = WorkerPool(command, ROWS_HELLO, 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._current: RowGroup | None = None
        self._file = ""
        self._failure: Failure | None = None

    def submit(self, row: RowRef, folder: str) -> Future[RowResult]:
        """Write the media of `row` to files in `folder`. The scratch file of its row group lies next to this folder."""
        return self._thread.submit(self._read, row, folder)

    def _read(self, row: RowRef, folder: str) -> RowResult:
        try:
            if row.group != self._current:
                self._begin(row.group, os.path.join(os.path.dirname(folder), "rows.parquet"))
        except OSError as error:
            return Failure(row.display_name, CapacityError.code, error.strerror or str(error), scratch_full=True)
        if self._failure is not None:
            return Failure(row.display_name, self._failure.code, self._failure.reason)
        request = encode_message(RowTask(row, self._file, folder))
        try:
            answer: RowResult = self._pool.ask(request, seconds_for(row.group), decode_row)
        except (DeadlineError, CorruptionError) as error:
            self._failure = Failure(
                row.display_name, error.code, f"its row group: {error.message}; are its pages too large?"
            )
            return self._failure
        return answer

    def _begin(self, group: RowGroup, scratch_file: str) -> None:
        """Check that the file has not changed, and copy the row group if the file lies in a store."""
        self._current, self._failure, self._file = None, None, group.path
        if is_url(group.path):
            assert self._stores is not None
            self._stores.check_unchanged(group.path, group.size)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch_file)
            ranges = [(group.offset, group.length), (group.footer, group.size - group.footer)]
            self._stores.copy_ranges(group.path, group.size, ranges, scratch_file)
            self._file = scratch_file
        else:
            _check_unchanged(group)
        self._current = group

    def close(self) -> None:
        """Kill the process immediately."""
        self._pool.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _check_unchanged(group: RowGroup) -> None:
    try:
        info = os.stat(group.path)
    except OSError as error:
        problem = f"cannot be read any more: {error.strerror or error}"
        raise ChangedError(f"{group.path} {problem}", hint=_RETRY_HINT) from error
    if (info.st_size, info.st_mtime_ns) != (group.size, group.modified_ns):
        raise ChangedError(f"{group.path} changed while it was being packed", hint=_RETRY_HINT)
