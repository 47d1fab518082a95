"""Named spans of time: ranges for NVIDIA's profilers, a log of events in files, and OpenTelemetry.

Purpose: `with span("loader.wait", batch=7): ...` shows up in Nsight Systems where the package nvtx is there and the process runs
under a profiler or uses nvtx itself (NVTX_DISABLE turns it off), as a line of JSON in
`$HEADRACE_EVENTS/rank-<rank>-<pid>.jsonl` where that variable names a directory, and as a span of OpenTelemetry
(`headrace.dataio.core.otel`). `context()` names the current span to another process, which gives it to `record`.
Invariant: with none of them, a span costs one call and allocates nothing. A process writes at most two files of `FILE_BYTES`: the
newest and, as `….1`, the one before; what is older is dropped.
Failure behaviour: an event log that cannot be written costs one warning and ends; a span never raises, and never hides an
error of what it holds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.dataio.core import otel
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.log import get_logger, warn_once

FILE_BYTES = 64 * MIB
HEADER = "headrace_events"
VERSION = 1
PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""One of these is in the environment of a process that NVIDIA's tools look at."""

_log = get_logger(__name__)
_NOTHING = nullcontext()
Value = int | float | str


class EventLog:
    """Appends spans to a file of this process. Safe for threads; a forked child writes a file of its own."""

    def __init__(self, directory: str, rank: str = "0", file_bytes: int = FILE_BYTES) -> None:
        self._directory, self._limit = Path(directory), file_bytes
        self._rank = int(rank) if rank.isdecimal() else 0
        self._lock = threading.Lock()
        self._fd, self._pid, self._size, self._broken = -1, 0, 0, False

    def write(self, name: str, began: float, seconds: float, about: Mapping[str, Value]) -> None:
        """A span from `began` (Unix time) that took `seconds`."""
        event = {"name": name, "ts": round(began * 1e6), "dur": round(seconds * 1e6), "tid": threading.get_native_id()}
        line = json.dumps(event | ({"args": dict(about)} if about else {})).encode() + b"\n"
        with self._lock:
            if self._broken:
                return
            try:
                self._append(line)
            except OSError as error:
                self._broken = True
                warn_once(_log, f"no more events are logged in {self._directory}: {error.strerror}")

    @property
    def path(self) -> Path:
        """This process's file."""
        return self._directory / f"rank-{self._rank}-{os.getpid()}.jsonl"

    def _append(self, line: bytes) -> None:
        if self._pid != os.getpid():
            self._start()
        elif self._size + len(line) > self._limit:
            os.close(self._fd)
            self.path.replace(f"{self.path}.1")
            self._start()
        self._size += os.write(self._fd, line)

    def _start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd, self._pid = os.open(self.path, flags, 0o600), os.getpid()
        header = {HEADER: VERSION, "rank": self._rank, "pid": self._pid, "host": socket.gethostname()}
        self._size = os.fstat(self._fd).st_size + os.write(self._fd, json.dumps(header).encode() + b"\n")


class Tracer:
    """Where spans go: decided once, from the environment."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        directory = environ.get("HEADRACE_EVENTS")
        self._events = EventLog(directory, environ.get("RANK", "0")) if directory else None
        self._disabled = bool(environ.get("NVTX_DISABLE"))
        self._profiled = any(environ.get(name) for name in PROFILERS)
        self._otel = otel.find(environ)

    @cached_property
    def _nvtx(self) -> Any:
        """Looked for with the first span, and not imported where nobody would see the ranges."""
        return _find_nvtx() if not self._disabled and (self._profiled or "nvtx" in sys.modules) else None

    @property
    def recording(self) -> bool:
        """Whether anybody hears of what `record` is told."""
        return self._events is not None or self._otel is not None

    def span(self, name: str, about: Mapping[str, Value]) -> AbstractContextManager[object]:
        if self._events is None and self._nvtx is None and self._otel is None:
            return _NOTHING
        return self._span(name, about)

    def context(self) -> str:
        return self._otel.context() if self._otel is not None else ""

    def record(
        self, name: str, began: float, seconds: float, parent: str, about: Mapping[str, Value], error: str
    ) -> None:
        if self._events is not None:
            self._events.write(name, began, seconds, {**about, "error": error} if error else about)
        if self._otel is not None:
            self._otel.record(name, began, seconds, parent, about, error)

    @contextlib.contextmanager
    def _span(self, name: str, about: Mapping[str, Value]) -> Iterator[None]:
        began, clock = time.time(), time.perf_counter()
        if self._nvtx is not None:
            self._nvtx.push_range(name, domain="headrace")
        try:
            with self._otel.span(name, about) if self._otel is not None else _NOTHING:
                yield
        finally:
            if self._nvtx is not None:
                self._nvtx.pop_range(domain="headrace")
            if self._events is not None:
                self._events.write(name, began, time.perf_counter() - clock, about)


def span(name: str, **about: Value) -> AbstractContextManager[object]:
    """What happens inside is one span of this name; `about` goes to the event log and to OpenTelemetry."""
    return _found().span(name, about)


def context() -> str:
    """The current span of this thread, for another process: a W3C `traceparent`, or nothing."""
    return _found().context()


def recording() -> bool:
    """Whether `record` is worth its arguments."""
    return _found().recording


def record(name: str, began: float, seconds: float, parent: str = "", *, error: str = "", **about: Value) -> None:
    """A span that is over: from `began` (Unix time), for what another process did within `parent`, its `context()`."""
    _found().record(name, began, seconds, parent, about, error)


def _found() -> Tracer:
    global _tracer
    if _tracer is None:  # not at import: looking for nvtx takes a while, and the command line need not wait for it
        _tracer = Tracer()
    return _tracer


def _find_nvtx() -> Any:
    return importlib.import_module("nvtx") if importlib.util.find_spec("nvtx") else None


_tracer: Tracer | None = None
