"""Worker processes for untrusted media, which are killed and replaced if they take too long.

Invariants:

* A pool has at most `workers` processes. It starts each when it is first needed. A worker handles one request at a
  time.
* Every request has a time limit, and its answer has a size limit.
* Workers end when this process ends.
* An answer is bytes that the caller's `decode` converts to checked types.

Failure behaviour: a request that takes too long raises `DeadlineError`. A request that crashes its worker, or whose
answer is malformed, raises `CorruptionError`. That worker is killed, and the next request gets a new one. If a worker
cannot start at all, no file is at fault, and the pool raises `UnsupportedError`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import shlex
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, DeadlineError, UnsupportedError, UsageError
from headrace.dataio.core.programs import environment

_PIPE_BYTES = 1 << 20
_START_SECONDS = 120.0
ANSWER_BYTES = 16 * limits.MIB
T = TypeVar("T")


class WorkerPool:
    """A pool of processes. It is a context manager, and threads can share it.

    Args:
        command: the command that starts one process, usually `run_module(…)`.
        hello: the first message that each process sends.
        workers (int): the most processes. None means one per core.
        answer_bytes (int): the size limit of an answer in bytes. The default is 16 MiB.
    """

    def __init__(
        self, command: Sequence[str], hello: bytes, workers: int | None = None, *, answer_bytes: int = ANSWER_BYTES
    ) -> None:
        self.workers = worker_count(workers)
        self._command, self._hello, self._answer_bytes = command, hello, answer_bytes
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._all: set[_Worker] = set()
        self._closing = False
        for _ in range(self.workers):
            self._idle.put(None)
        # only these threads start processes: the kernel kills a worker when the thread that started it ends
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="media")

    def ask(self, request: bytes, seconds: float, decode: Callable[[bytes], T]) -> T:
        """Wait for a free worker, send it `request`, and wait at most `seconds` for the answer."""
        return self.submit(request, seconds, decode).result()

    def submit(self, request: bytes, seconds: float, decode: Callable[[bytes], T]) -> Future[T]:
        """Like `ask`, but without waiting. The caller limits how many requests are in flight."""
        return self._threads.submit(self._ask, request, seconds, decode)

    def _ask(self, request: bytes, seconds: float, decode: Callable[[bytes], T]) -> T:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._command, self._answer_bytes)
                self._all.add(worker)
                if self._closing:  # checked after adding: either `close` sees the worker, or this thread sees `close`
                    worker.kill()
                worker.start(self._hello)
            return worker.ask(request, seconds, decode)
        finally:
            if worker is not None and worker.is_dead():
                worker.close()
                self._all.discard(worker)
                worker = None
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all workers immediately."""
        self._closing = True
        for worker in list(self._all):
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_count(workers: int | None, default: int | None = None) -> int:
    """Check the number of workers that a user gives, and return it.

    Args:
        workers: the user's number, from 1 to `limits.WORKERS`. None means the default.
        default: the number without a user's choice. None means one per core of this machine.

    Raises:
        UsageError: the number is not an integer, or out of range.
    """
    if workers is None:
        return default or os.cpu_count() or 1
    if not isinstance(workers, int) or not 1 <= workers <= limits.WORKERS:
        raise UsageError(
            f"workers={workers!r} is not a number of workers",
            hint=f"give a number from 1 to {limits.WORKERS}, or None for the default",
        )
    return workers


def start_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a worker process, with unbuffered pipes for its standard input and its standard output."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env=environment(),
    )


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, command: Sequence[str], answer_bytes: int) -> None:
        self._command, self._answer_bytes = command, answer_bytes
        self._process = start_process(command)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)  # so that the time limit also applies to a worker that does not read
        with contextlib.suppress(OSError):  # the kernel refuses to enlarge a pipe if the user has many pipes
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def start(self, hello: bytes) -> None:
        try:
            if self._read_frame(time.monotonic() + _START_SECONDS) == hello:
                return
        except (EOFError, TimeoutError, OSError, ValueError):
            pass
        self.kill()
        raise UnsupportedError("a worker process does not start", hint=f"`{shlex.join(self._command)}` shows why")

    def ask(self, request: bytes, seconds: float, decode: Callable[[bytes], T]) -> T:
        deadline = time.monotonic() + seconds
        try:
            self._write(struct.pack(">I", len(request)), deadline)
            self._write(request, deadline)
            return decode(self._read_frame(deadline))
        except TimeoutError as error:
            self.kill()
            raise DeadlineError(f"reading it took longer than {seconds:.0f} s and was stopped") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.kill()
            raise CorruptionError("the decoder's answer is malformed") from error
        except (EOFError, OSError, ValueError) as error:
            self.kill()
            raise CorruptionError(f"reading it crashed the decoder ({self._exit_reason()})") from error

    def _exit_reason(self) -> str:
        code = self._process.wait()
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"exit code {code}"

    def _read_frame(self, deadline: float) -> bytes:
        length = int(struct.unpack(">I", self._read(4, deadline))[0])
        if length > self._answer_bytes:
            raise EOFError
        return self._read(length, deadline)

    def _read(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            _wait_for(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, length - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _write(self, data: bytes, deadline: float) -> None:
        remaining = memoryview(data)
        while remaining:
            _wait_for(self._in, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                remaining = remaining[os.write(self._in, remaining) :]

    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process. A thread that waits on its pipes then returns."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close the pipes. A second call does nothing.

        Call this only when no thread uses the pipes, because the kernel may give their file descriptors to other files.
        """
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _wait_for(fd: int, event: int, deadline: float) -> None:
    """Wait until the pipe can be read or written, or its other end is closed."""
    poll = select.poll()
    poll.register(fd, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise TimeoutError
