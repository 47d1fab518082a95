"""Tracing: named spans, as ranges for NVIDIA's profilers, in an event log, and for OpenTelemetry.

Purpose: `with span("loader.wait", batch=7): ...` writes to each of these that is active:

* NVTX ranges, if the package nvtx is installed and the process runs under a profiler or has imported nvtx itself.
  NVTX_DISABLE turns them off.
* One line of JSON in `$HEADRACE_EVENTS/rank-<rank>-<pid>.jsonl`, if that variable names a directory.
* An OpenTelemetry span. The application's own SDK is used if it has one. Otherwise, if `OTEL_EXPORTER_OTLP_ENDPOINT`
  (or `…_TRACES_ENDPOINT`) is set, an exporter sends batches by OTLP over HTTP. OTEL_SDK_DISABLED=true turns it off.

`context()` returns the current span as a W3C `traceparent`. Another process passes it to `record`.

Invariants: if none is active, a span costs one call, allocates nothing and imports no package. A process keeps at
most two event files of `FILE_BYTES`: the newest one and, as `….1`, the previous one.

Failure behaviour: a span never raises, and never hides an error of its block. An event log that cannot be written
gives one warning and stops. Missing OpenTelemetry packages give one warning. A collector that does not answer fills
the exporter's bounded queue, and delays the process's exit by at most `EXIT_SECONDS`. A malformed `traceparent`
starts a new trace.

W3C Trace Context: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.dataio.core.limits import MIB
from headrace.dataio.core.log import get_logger, warn_once

FILE_BYTES = 64 * MIB
HEADER = "headrace_events"
VERSION = 1
PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""NVIDIA's tools set one of these in the environment of a process that they profile."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXIT_SECONDS = 2.0
"""How long a process waits for the collector when it exits."""
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

_log = get_logger(__name__)
_NOTHING = nullcontext()
Value = int | float | str


class EventLog:
    """Appends spans to this process's file. Thread-safe. A forked child writes its own file."""

    def __init__(self, directory: str, rank: str = "0", file_bytes: int = FILE_BYTES) -> None:
        self._directory, self._limit = Path(directory), file_bytes
        self._rank = int(rank) if rank.isdecimal() else 0
        self._lock = threading.Lock()
        self._fd, self._pid, self._size, self._broken = -1, 0, 0, False

    def write(self, name: str, began: float, seconds: float, about: Mapping[str, Value]) -> None:
        """Append a span that began at `began` (Unix time) and took `seconds`."""
        event = {"name": name, "ts": round(began * 1e6), "dur": round(seconds * 1e6), "tid": threading.get_native_id()}
        line = json.dumps(event | ({"args": dict(about)} if about else {})).encode() + b"\n"
        with self._lock:
            if self._broken:
                return
            try:
                self._append(line)
            except OSError as error:
                self._broken = True
                warn_once(_log, f"the event log in {self._directory} stopped: {error.strerror}", "node")

    @property
    def path(self) -> Path:
        """The event log of this process."""
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
    """Sends spans to every active destination. The environment variables are read once, when it is created."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        directory = environ.get("HEADRACE_EVENTS")
        self._events = EventLog(directory, environ.get("RANK", "0")) if directory else None
        self._disabled = bool(environ.get("NVTX_DISABLE"))
        self._profiled = any(environ.get(name) for name in PROFILERS)
        self._otel = find_opentelemetry(environ)

    @cached_property
    def _nvtx(self) -> Any:
        """The nvtx module; None if no profiler would see the ranges. It is looked up at the first span."""
        return _find_nvtx() if not self._disabled and (self._profiled or "nvtx" in sys.modules) else None

    @property
    def recording(self) -> bool:
        """Whether `record` has a destination."""
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

    @contextmanager
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
    """Record the block as one span.

    Args:
        name: The span's name, for example `loader.wait`.
        about: Attributes (int, float or str) for the event log and for OpenTelemetry.

    Example:
        >>> with span("loader.wait", batch=7):
        ...     pass
    """
    return _get_tracer().span(name, about)


def context() -> str:
    """The current span of this thread as a W3C `traceparent`, for another process; "" if there is none."""
    return _get_tracer().context()


def recording() -> bool:
    """Whether `record` has a destination, so that its arguments are worth computing."""
    return _get_tracer().recording


def record(name: str, began: float, seconds: float, parent: str = "", *, error: str = "", **about: Value) -> None:
    """Record a span that has ended, for work that another process asked for.

    Args:
        name: The span's name.
        began: Start, in Unix time.
        seconds: Duration.
        parent: The `context()` of the process that asked for the work.
        error: The error's name; "" for success.
        about: Attributes, as for `span`.
    """
    _get_tracer().record(name, began, seconds, parent, about, error)


def _get_tracer() -> Tracer:
    global _tracer
    if _tracer is None:  # not at import: the look-up of nvtx would delay every command
        _tracer = Tracer()
    return _tracer


def _find_nvtx() -> Any:
    return importlib.import_module("nvtx") if importlib.util.find_spec("nvtx") else None


_tracer: Tracer | None = None


class OpenTelemetry:
    """Spans of one tracer (`opentelemetry.trace.Tracer`)."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._trace = importlib.import_module("opentelemetry.trace")

    @contextmanager
    def span(self, name: str, about: Mapping[str, Value]) -> Iterator[None]:
        """Make a span the current one of this thread for the block."""
        with self._tracer.start_as_current_span(name, attributes=_attributes(about)):
            yield

    def context(self) -> str:
        """The current span as a `traceparent`; "" if there is none."""
        span_context = self._trace.get_current_span().get_span_context()
        if not span_context.is_valid:
            return ""
        return f"00-{span_context.trace_id:032x}-{span_context.span_id:016x}-{int(span_context.trace_flags):02x}"

    def record(
        self, name: str, began: float, seconds: float, parent: str, about: Mapping[str, Value], error: str = ""
    ) -> None:
        """Record a span that has ended; it began at `began` (Unix time), below `parent`."""
        span = self._tracer.start_span(
            name, context=self._remote_context(parent), attributes=_attributes(about), start_time=round(began * 1e9)
        )
        if error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end(end_time=round((began + seconds) * 1e9))

    def _remote_context(self, parent: str) -> Any:
        match = _PARENT.fullmatch(parent)
        if match is None:
            return None
        trace, span, flags = (int(part, 16) for part in match.groups())
        context = self._trace.SpanContext(trace, span, is_remote=True, trace_flags=self._trace.TraceFlags(flags))
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))


def find_opentelemetry(environ: Mapping[str, str]) -> OpenTelemetry | None:
    """Return the application's tracer, or one with our own exporter; None if neither is configured."""
    exported = any(environ.get(name) for name in ENDPOINTS)
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (
        exported or "opentelemetry.sdk.trace" in sys.modules
    ):
        return None
    try:
        trace = importlib.import_module("opentelemetry.trace")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        if isinstance(trace.get_tracer_provider(), sdk.TracerProvider):
            return OpenTelemetry(trace.get_tracer("headrace"))
        return OpenTelemetry(_make_provider(sdk, environ).get_tracer("headrace")) if exported else None
    except ImportError as error:
        message = f"the environment names a collector, but no spans are sent: {error}; pip install 'headrace[otel]'"
        warn_once(_log, message, "node")
        return None


def _make_provider(sdk: Any, environ: Mapping[str, str]) -> Any:
    """Make our own provider. It does not become the global provider of the process."""
    exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    resources = importlib.import_module("opentelemetry.sdk.resources")
    batches = importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor
    service = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "headrace"}
    provider = sdk.TracerProvider(resource=resources.Resource.create(service), shutdown_on_exit=False)
    provider.add_span_processor(batches(exporter))
    _ExitFlush(provider)
    return provider


class _ExitFlush:
    """Sends the remaining spans at exit, for at most `EXIT_SECONDS`. The SDK alone would try for half a minute.

    Its thread starts early, because Python 3.12.0 to 3.12.2 cannot start a thread at exit. A forked process has no such
    thread, so it tries to start one at exit.
    """

    def __init__(self, provider: Any) -> None:
        self._provider, self._leaving = provider, threading.Event()
        self._thread = self._start_thread()
        atexit.register(self.flush)

    def flush(self) -> None:
        """Send the remaining spans."""
        self._leaving.set()
        if not self._thread.is_alive():
            self._thread = self._start_thread()
        self._thread.join(EXIT_SECONDS)

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._wait, name="headrace-otel", daemon=True)
        thread.start()
        return thread

    def _wait(self) -> None:
        self._leaving.wait()
        self._provider.shutdown()


def _attributes(about: Mapping[str, Value]) -> dict[str, Value]:
    return {f"headrace.{name}": value for name, value in about.items()}
