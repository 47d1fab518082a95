"""The pool of worker processes that read and convert media, so that libav may hang or crash on a file.

Purpose: the pool first copies remote files into the scratch folder of their group. For a row with embedded media,
`RowPool` writes its files there. Then the pool sends the group to a worker. If the worker hangs or crashes, only that
group fails.

Invariants:

* At most `_SAMPLES_PER_WORKER` groups per worker are in flight. The remote files of all of them are copied
  concurrently.
* Results come in the order of the groups.
* `headrace.dataio.shards.workers.worker_pool` enforces the time limits and restarts workers.

Failure behaviour: a hang is a `Failure` with code "deadline". A crash is a `Failure` with code "corruption". If a
worker cannot start at all, no file is at fault, and the pool raises `UnsupportedError`.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, DeadlineError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.row_messages import RowResult
from headrace.dataio.shards.ingest.row_pool import RowPool
from headrace.dataio.shards.ingest.source_stores import ChangedError, SourceStores, is_url
from headrace.dataio.shards.media.messages import (
    DescribeResult,
    Failure,
    PrepareResult,
    PrepareTask,
    Recipe,
    Span,
    decode_outcome,
    encode_task,
)
from headrace.dataio.shards.workers.worker import PROBE_HELLO
from headrace.dataio.shards.workers.worker_pool import WorkerPool

_SAMPLES_PER_WORKER = 4
_ANSWER_BYTES = 256 * limits.MIB
_UNCHANGED = Recipe()
_InFlight = tuple[Group, PrepareTask, Future[PrepareResult]]
_COMMAND = run_module("headrace.dataio.shards.workers.worker", "probe")


def seconds_for(group: Group, recipe: Recipe = _UNCHANGED) -> float:
    """Return the time limit for a sample in seconds.

    It is one minute plus one second per 4 MiB. For re-encoding, it is ten minutes plus one second per 128 KiB.
    """
    if recipe.codec is not None:
        return 600.0 + group.bytes / (128 * limits.KIB)
    return 60.0 + group.bytes / (4 * limits.MIB)


class ProbePool:
    """A pool of media workers. It is a context manager.

    Args:
        workers (int): the number of processes. None means one per core.
        seconds: a function that gives the time limit of a group in seconds. The default is `seconds_for`.
        command: the command that starts one worker.
        stores: the stores of the files. Groups with remote files need them.
        check: called with each group after its files were read. A failure that it returns becomes the outcome, and so
            does a change of a remote file. By default, such a change raises `ChangedError`.
    """

    def __init__(
        self,
        workers: int | None = None,
        seconds: Callable[[Group], float] | None = None,
        command: Sequence[str] = _COMMAND,
        stores: SourceStores | None = None,
        check: Callable[[Group], Failure | None] | None = None,
    ) -> None:
        self._seconds, self._stores, self._check = seconds, stores, check
        self._pool = WorkerPool(command, PROBE_HELLO, workers, answer_bytes=_ANSWER_BYTES)
        self._rows = RowPool(stores)
        self._copying = ThreadPoolExecutor(_SAMPLES_PER_WORKER * self._pool.workers, thread_name_prefix="copy")

    def describe(
        self, groups: Iterable[Group], text_field: str | None = None
    ) -> Iterator[tuple[Group, DescribeResult]]:
        """Yield each group with its description, in order. The media stay as they are."""
        for group, outcome in self.prepare(groups, text_field=text_field):
            yield group, outcome if isinstance(outcome, Failure) else outcome.clips[0].described

    def prepare(
        self,
        groups: Iterable[Group],
        recipe: Recipe = _UNCHANGED,
        scratch: str = "",
        text_field: str | None = None,
    ) -> Iterator[tuple[Group, PrepareResult]]:
        """Yield each group with the samples that `recipe` makes from it, in order.

        `text_field` is the field of the samples' JSON that holds their text (`PrepareTask`). New files go into the
        group's own folder below `scratch`, which is `scratch_folder_of(group, recipe, scratch)`.
        """
        in_flight: deque[_InFlight] = deque()
        for group in groups:
            task = PrepareTask(
                key=group.key,
                files=group.members(),
                recipe=recipe,
                scratch=scratch_folder_of(group, recipe, scratch),
                caption=group.caption,
                fields=group.fields,
                text_field=text_field,
            )
            in_flight.append((group, task, self._start(group, task)))
            if len(in_flight) >= _SAMPLES_PER_WORKER * self._pool.workers:
                yield self._next_result(in_flight)
        while in_flight:
            yield self._next_result(in_flight)

    def _start(self, group: Group, task: PrepareTask) -> Future[PrepareResult]:
        limit = self._limit(group, task.recipe)
        if group.row is not None:
            return self._copying.submit(self._prepare_row, group, task, self._rows.submit(group.row, task.scratch))
        if group.is_remote:
            return self._copying.submit(self._copy_and_prepare, group, task, limit)
        return self._pool.submit(encode_task(task), limit, decode_outcome)

    def _limit(self, group: Group, recipe: Recipe) -> float:
        return self._seconds(group) if self._seconds else seconds_for(group, recipe)

    def _next_result(self, in_flight: deque[_InFlight]) -> tuple[Group, PrepareResult]:
        group, task, future = in_flight.popleft()
        try:
            outcome = future.result()
        except (DeadlineError, CorruptionError) as error:
            return group, Failure(task.files[0].path, error.code, error.message)
        is_checked = group.is_remote or group.row is not None  # by the thread that copied it, or by `RowPool`
        return group, outcome if is_checked else self._checked(group, outcome)

    def _checked(self, group: Group, outcome: PrepareResult) -> PrepareResult:
        """Return the outcome, or the failure that the check found. A full scratch folder stays what it is."""
        if self._check is None or (isinstance(outcome, Failure) and outcome.scratch_full):
            return outcome
        return self._check(group) or outcome

    def _prepare_row(self, group: Group, task: PrepareTask, reading: Future[RowResult]) -> PrepareResult:
        """Wait for the files of a row, run the task on them, and return its outcome."""
        row = reading.result()
        if isinstance(row, Failure):
            return row
        caption = row.caption if task.caption is None else task.caption
        files = tuple(Span(ext, path) for ext, path in row.files)
        task = msgspec.structs.replace(task, files=files, caption=caption, fields=row.fields)
        limit = self._limit(dataclasses.replace(group, bytes=row.bytes), task.recipe)
        try:
            outcome: PrepareResult = self._pool.ask(encode_task(task), limit, decode_outcome)
        except (DeadlineError, CorruptionError) as error:
            outcome = Failure("", error.code, error.message)
        return msgspec.structs.replace(outcome, path=group.display_name) if isinstance(outcome, Failure) else outcome

    def _copy_and_prepare(self, group: Group, task: PrepareTask, seconds: float) -> PrepareResult:
        """Copy the task's files into its folder, run the task, and return its outcome."""
        assert self._stores is not None
        try:
            os.makedirs(task.scratch, exist_ok=True)
            copies = [
                self._copy_span(span, size, os.path.join(task.scratch, f"in-{number}"))
                for number, (span, size) in enumerate(zip(task.files, group.sizes, strict=True))
            ]
        except ChangedError as error:
            if self._check is None:
                raise
            return Failure(task.files[0].path, error.code, error.message)
        except OSError as error:
            return Failure(task.files[0].path, CapacityError.code, error.strerror or str(error), scratch_full=True)
        local = msgspec.structs.replace(task, files=tuple(copies))
        outcome: PrepareResult = self._pool.ask(encode_task(local), seconds, decode_outcome)
        if isinstance(outcome, Failure):
            names = {copy.path: span.display_name for copy, span in zip(copies, task.files, strict=True)}
            outcome = msgspec.structs.replace(outcome, path=names.get(outcome.path, outcome.path))
        return self._checked(group, outcome)

    def _copy_span(self, span: Span, size: int, name: str) -> Span:
        """Copy the span to a local file and return that. A local span is returned as it is."""
        if not is_url(span.path):
            return span
        assert self._stores is not None
        path = f"{name}.{span.ext.replace('/', '_')}"
        if span.length < 0:
            self._stores.copy_whole(span.path, size, path)
        else:
            self._stores.copy(span.path, span.offset, size, path)
        return Span(span.ext, path)

    def close(self) -> None:
        """Kill the workers immediately, and abort the copies."""
        if self._stores is not None:
            self._stores.stop()
        self._rows.close()
        self._pool.close()
        self._copying.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scratch_folder_of(group: Group, recipe: Recipe, scratch: str) -> str:
    """Return the folder for the temporary files of `group`, or "" if it needs none."""
    is_elsewhere = group.spans or group.is_remote or group.row is not None
    needs_folder = recipe.changes or is_elsewhere or group.caption is not None or group.fields is not None
    return os.path.join(scratch, blake3.blake3(group.key.encode()).hexdigest()[:24]) if needs_folder else ""
