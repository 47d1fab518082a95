"""Worker processes for untrusted media: asked one thing at a time, with a time limit, killed and replaced when late.

Invariants: at most `workers` processes of a pool, started when needed; every request has a time limit and its answer a size
limit; workers die with this process. An answer is bytes that the caller decodes with checked types.
Failure behaviour: `ask` raises `DeadlineError` for a request that took too long and `CorruptionError` for one that ended its
worker; the next gets a new one. A worker that cannot even start is an `UnsupportedError`, since no file is to blame then.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import dataio
from dataio.core import limits
from dataio.core.errors import CorruptionError, DeadlineError, UnsupportedError
from dataio.shards.probe_worker import write_frame

_START_SECONDS = 120.0
_ANSWER_BYTES = 16 * limits.MIB


class WorkerPool:
    """Runs `python -m module`, whose first frame is `hello`. A context manager; `ask` may be called by many threads."""

    def __init__(self, module: str, hello: bytes, workers: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1
        self._module, self._hello = module, hello
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._all: set[_Worker] = set()
        self._closing = False
        for _ in range(self.workers):
            self._idle.put(None)
        # processes are started by these threads only: "dies with its parent" means the thread that started it
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="media")

    def ask(self, request: bytes, seconds: float) -> bytes:
        """The answer to `request`, waiting for a free worker first and then at most `seconds`."""
        return self._threads.submit(self._ask, request, seconds).result()

    def _ask(self, request: bytes, seconds: float) -> bytes:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._module)
                self._all.add(worker)
                if self._closing:  # checked after adding: either `close` sees the worker, or this sees `close`
                    worker.kill()
                worker.start(self._hello)
            return worker.ask(request, seconds)
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


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, module: str) -> None:
        home = str(Path(dataio.__file__).parents[1])
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        self._module = module
        self._process = subprocess.Popen(
            (sys.executable, "-P", "-m", module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )

    def start(self, hello: bytes) -> None:
        try:
            if self._read_frame(time.monotonic() + _START_SECONDS) == hello:
                return
        except (EOFError, TimeoutError, OSError, ValueError):
            pass
        self.kill()
        raise UnsupportedError("a worker process does not start", hint=f"`python -m {self._module}` shows why")

    def ask(self, request: bytes, seconds: float) -> bytes:
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, request)
            return self._read_frame(time.monotonic() + seconds)
        except TimeoutError as error:
            self.kill()
            raise DeadlineError(f"reading it took longer than {seconds:.0f} s and was given up") from error
        except (EOFError, OSError, ValueError) as error:
            self.kill()
            raise CorruptionError(f"reading it crashed the decoder ({self._end()})") from error

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
