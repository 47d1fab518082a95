"""Worker processes read and convert media. A file on which libav hangs or crashes costs only that file.

The pool first copies the files that lie in stores into the scratch folder of their group. It copies as many groups at
once as are in flight.

Invariants: at most `_AHEAD` samples per worker are in flight. Results come in the order of the groups.
`headrace.dataio.shards.workers.worker_pool` enforces the time limits and restarts workers.
Failure behaviour: a hang is a `Failure` with code "deadline". A crash is a `Failure` with code "corruption". If a
worker cannot start at all, no file is at fault, and the pool raises `UnsupportedError`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, DeadlineError
from headrace.dataio.shards.ingest.source_stores import SourceStores, is_url
from headrace.dataio.shards.ingest.sources import Group
from headrace.dataio.shards.media.messages import (
    Answer,
    Failure,
    Outcome,
    Recipe,
    Span,
    Task,
    decode_outcome,
    encode_task,
)
from headrace.dataio.shards.workers.worker import PROBE_HELLO
from headrace.dataio.shards.workers.worker_pool import WorkerPool, run_module

_AHEAD = 4
_ANSWER_BYTES = 256 * limits.MIB
_AS_IT_IS = Recipe()
_Flying = tuple[Group, Task, Future[Outcome]]
_COMMAND = run_module("headrace.dataio.shards.workers.worker", "probe")


def seconds_for(group: Group, recipe: Recipe = _AS_IT_IS) -> float:
    """Return the time limit for a sample in seconds.

    It is one minute plus one second per 4 MiB. To re-encode, it is ten minutes plus one second per 128 KiB.
    """
    if recipe.codec is not None:
        return 600.0 + group.bytes / (128 * limits.KIB)
    return 60.0 + group.bytes / (4 * limits.MIB)


class ProbePool:
    """A pool of media workers, and a context manager. `command` starts one worker."""

    def __init__(
        self,
        workers: int | None = None,
        seconds: Callable[[Group], float] | None = None,
        command: Sequence[str] = _COMMAND,
        remote: SourceStores | None = None,
    ) -> None:
        self._seconds, self._remote = seconds, remote
        self._pool = WorkerPool(command, PROBE_HELLO, workers, answer_bytes=_ANSWER_BYTES)
        self._copying = ThreadPoolExecutor(_AHEAD * self._pool.workers, thread_name_prefix="copy")

    def describe(self, groups: Iterable[Group]) -> Iterator[tuple[Group, Answer]]:
        """Yield each group with its description, in order. The media stay as they are."""
        for group, outcome in self.prepare(groups):
            yield group, outcome if isinstance(outcome, Failure) else outcome.clips[0].described

    def prepare(
        self, groups: Iterable[Group], recipe: Recipe = _AS_IT_IS, scratch: str = ""
    ) -> Iterator[tuple[Group, Outcome]]:
        """Yield each group with the samples that `recipe` makes from it, in order.

        New files go into the group's own folder below `scratch`, which is `scratch_of(group, recipe, scratch)`.
        """
        flying: deque[_Flying] = deque()
        for group in groups:
            task = Task(
                key=group.key,
                files=group.members(),
                recipe=recipe,
                scratch=scratch_of(group, recipe, scratch),
                caption=group.caption,
                fields=group.fields,
            )
            limit = self._seconds(group) if self._seconds else seconds_for(group, recipe)
            if group.is_remote:
                flying.append((group, task, self._copying.submit(self._copied, task, group.sizes, limit)))
            else:
                flying.append((group, task, self._pool.submit(encode_task(task), limit, decode_outcome)))
            if len(flying) >= _AHEAD * self._pool.workers:
                yield _landed(flying)
        while flying:
            yield _landed(flying)

    def _copied(self, task: Task, sizes: Sequence[int], seconds: float) -> Outcome:
        """Copy the task's files into its folder, run the task, and return its outcome."""
        assert self._remote is not None
        try:
            os.makedirs(task.scratch, exist_ok=True)
            there = [
                self._beside(span, size, os.path.join(task.scratch, f"in-{number}"))
                for number, (span, size) in enumerate(zip(task.files, sizes, strict=True))
            ]
        except OSError as error:
            return Failure(task.files[0].path, CapacityError.code, error.strerror or str(error), ours=True)
        local = msgspec.structs.replace(task, files=tuple(there))
        outcome: Outcome = self._pool.ask(encode_task(local), seconds, decode_outcome)
        if not isinstance(outcome, Failure):
            return outcome
        names = {copy.path: span.named for copy, span in zip(there, task.files, strict=True)}
        return msgspec.structs.replace(outcome, path=names.get(outcome.path, outcome.path))

    def _beside(self, span: Span, size: int, name: str) -> Span:
        """Copy the span to a local file and return that. A local span is returned as it is."""
        if not is_url(span.path):
            return span
        assert self._remote is not None
        path = f"{name}.{span.ext.replace('/', '_')}"
        if span.length < 0:
            self._remote.copy_whole(span.path, size, path)
        else:
            self._remote.copy(span.path, span.offset, size, path)
        return Span(span.ext, path)

    def close(self) -> None:
        """Kill the workers at once, and abort the copies."""
        if self._remote is not None:
            self._remote.stop()
        self._pool.close()
        self._copying.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scratch_of(group: Group, recipe: Recipe, scratch: str) -> str:
    """Return the folder for the temporary files of `group`, or "" if it needs none."""
    needed = recipe.changes or group.spans or group.is_remote or group.caption is not None or group.fields is not None
    return os.path.join(scratch, blake3.blake3(group.key.encode()).hexdigest()[:24]) if needed else ""


def _landed(flying: deque[_Flying]) -> tuple[Group, Outcome]:
    group, task, future = flying.popleft()
    try:
        return group, future.result()
    except (DeadlineError, CorruptionError) as error:
        return group, Failure(task.files[0].path, error.code, error.message)
