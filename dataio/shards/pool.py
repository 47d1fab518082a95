"""Reading and converting media in worker processes: a file on which libav hangs or crashes costs that file and nothing else.

Invariants: at most `workers` processes; at most `_AHEAD` samples per worker are in flight, and answers come in the order asked.
Every request has a time limit; a worker that passes it is killed and replaced. Workers die with this process.
Failure behaviour: a hang is a `Failure` with code "deadline", a crash one with code "corruption". A worker that cannot even start
raises `UnsupportedError`, since then no file is to blame.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import blake3
import msgspec

import dataio
from dataio.core import limits
from dataio.core.errors import CorruptionError, DeadlineError, UnsupportedError
from dataio.shards.facts import Answer, Failure, Outcome, Recipe, Task, decode_outcome, encode_task
from dataio.shards.probe_worker import HELLO, write_frame
from dataio.shards.sources import Group

_AHEAD = 4
_START_SECONDS = 120.0
_ANSWER_BYTES = 256 * limits.MIB
_AS_IT_IS = Recipe()
_COMMAND = (sys.executable, "-P", "-m", "dataio.shards.probe_worker")


def seconds_for(group: Group, recipe: Recipe = _AS_IT_IS) -> float:
    """The time limit for a sample: a minute, and more for large files, at 4 MiB/s; to re-encode, ten minutes and 128 KiB/s."""
    if recipe.codec is not None:
        return 600.0 + group.bytes / (128 * limits.KIB)
    return 60.0 + group.bytes / (4 * limits.MIB)


class ProbePool:
    """Use as a context manager. `command` starts one worker."""

    def __init__(
        self,
        workers: int | None = None,
        seconds: Callable[[Group], float] | None = None,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._workers = workers or os.cpu_count() or 1
        self._seconds, self._command = seconds, command
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._closing = False
        for _ in range(self._workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="probe")

    def describe(self, groups: Iterable[Group]) -> Iterator[tuple[Group, Answer]]:
        """Every group as it is, with its facts, in order."""
        for group, outcome in self.prepare(groups):
            yield group, outcome if isinstance(outcome, Failure) else outcome.clips[0].described

    def prepare(
        self, groups: Iterable[Group], recipe: Recipe = _AS_IT_IS, scratch: str = ""
    ) -> Iterator[tuple[Group, Outcome]]:
        """Every group with the samples made of it by `recipe`, in order.

        New files go into a folder of their own below `scratch`, which is `scratch_of(group, recipe, scratch)`.
        """
        flying: deque[tuple[Group, Future[Outcome]]] = deque()
        for group in groups:
            task = Task(
                key=group.key,
                files=group.members(),
                recipe=recipe,
                scratch=scratch_of(group, recipe, scratch),
                caption=group.caption,
                fields=group.fields,
            )
            flying.append((group, self._threads.submit(self._one, group, task)))
            if len(flying) >= _AHEAD * self._workers:
                yield _landed(flying)
        while flying:
            yield _landed(flying)

    def _one(self, group: Group, task: Task) -> Outcome:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._command)
                self._all.add(worker)
                if self._closing:  # checked after adding: either `close` sees the worker, or this sees `close`
                    worker.kill()
                worker.start()
            limit = self._seconds(group) if self._seconds else seconds_for(group, task.recipe)
            return worker.ask(task, limit)
        finally:
            if worker is not None and worker.is_dead():
                self._all.discard(worker)
                worker = None
            self._idle.put(worker)

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self._closing = True
        for worker in list(self._all):
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def scratch_of(group: Group, recipe: Recipe, scratch: str) -> str:
    """The folder for files made for `group`; empty where none are."""
    needed = recipe.changes or group.spans or group.caption is not None or group.fields is not None
    return os.path.join(scratch, blake3.blake3(group.key.encode()).hexdigest()[:24]) if needed else ""


def _landed(flying: deque[tuple[Group, Future[Outcome]]]) -> tuple[Group, Outcome]:
    group, future = flying.popleft()
    return group, future.result()


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        home = str(Path(dataio.__file__).parents[1])
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )

    def start(self) -> None:
        """Wait for the worker's first word."""
        try:
            if self._read_frame(time.monotonic() + _START_SECONDS) == HELLO:
                return
        except (EOFError, TimeoutError):
            pass
        self.kill()
        raise UnsupportedError(
            "the probe's worker process does not start", hint="`python -m dataio.shards.probe_worker` shows why"
        )

    def ask(self, task: Task, seconds: float) -> Outcome:
        """Send a task and wait for the answer for at most `seconds`."""
        first = task.files[0].path
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, encode_task(task))
            answer: Outcome = decode_outcome(self._read_frame(time.monotonic() + seconds))
            return answer
        except TimeoutError:
            self.kill()
            return Failure(first, DeadlineError.code, f"reading it took longer than {seconds:.0f} s and was given up")
        except (EOFError, BrokenPipeError, msgspec.MsgspecError):
            self.kill()
            return Failure(first, CorruptionError.code, f"reading it crashed the decoder ({self._end()})")

    def _end(self) -> str:
        code = self._process.wait()
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"exit code {code}"

    def _read_frame(self, deadline: float) -> bytes:
        length = int(struct.unpack(">I", self._read(4, deadline))[0])
        if length > _ANSWER_BYTES:
            raise EOFError
        return self._read(length, deadline)

    def _read(self, length: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) < length:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            chunk = os.read(fd, length - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process and close the pipes; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
