"""Spans for OpenTelemetry: to whatever provider the application has set up, else by OTLP over HTTP where the variables say so.

Purpose: `find` gives a sink where there is somewhere to send spans: the process has set up an SDK of its own, or
`$OTEL_EXPORTER_OTLP_ENDPOINT` (or `…_TRACES_ENDPOINT`) is set; then the package's own exporter sends them in batches, from a
thread of its own. Contexts travel between processes as W3C `traceparent` texts.
Invariant: the packages are imported in neither case otherwise; `$OTEL_SDK_DISABLED=true` turns it off.
Failure behaviour: packages that are not installed are said once; a collector that does not answer costs the exporter's bounded
queue and never the program. A `traceparent` that is none begins a new trace.

W3C Trace Context, https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import atexit
import importlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.dataio.core.log import get_logger, warn_once

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXIT_SECONDS = 2.0
"""How long the end of the process waits for a collector that does not answer."""
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_log = get_logger(__name__)
Value = int | float | str


class OpenTelemetry:
    """Spans of one tracer (`opentelemetry.trace.Tracer`)."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._trace = importlib.import_module("opentelemetry.trace")

    @contextmanager
    def span(self, name: str, about: Mapping[str, Value]) -> Iterator[None]:
        """The current span of this thread for as long as the block runs."""
        with self._tracer.start_as_current_span(name, attributes=_attributes(about)):
            yield

    def context(self) -> str:
        """The current span as a `traceparent`; empty when there is none."""
        found = self._trace.get_current_span().get_span_context()
        if not found.is_valid:
            return ""
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"

    def record(
        self, name: str, began: float, seconds: float, parent: str, about: Mapping[str, Value], error: str = ""
    ) -> None:
        """A span that is over: from `began` (Unix time), below `parent`."""
        span = self._tracer.start_span(
            name, context=self._remote(parent), attributes=_attributes(about), start_time=round(began * 1e9)
        )
        if error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end(end_time=round((began + seconds) * 1e9))

    def _remote(self, parent: str) -> Any:
        found = _PARENT.fullmatch(parent)
        if found is None:
            return None
        trace, span, flags = (int(part, 16) for part in found.groups())
        context = self._trace.SpanContext(trace, span, is_remote=True, trace_flags=self._trace.TraceFlags(flags))
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(context))


def find(environ: Mapping[str, str]) -> OpenTelemetry | None:
    """Where spans go, or None."""
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
        return OpenTelemetry(_exporting(sdk, environ).get_tracer("headrace")) if exported else None
    except ImportError as error:
        warn_once(
            _log, f"no spans are sent, though the environment names a collector: {error}; pip install 'headrace[otel]'"
        )
        return None


def _exporting(sdk: Any, environ: Mapping[str, str]) -> Any:
    """A provider of our own, which is not made the process's."""
    exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    resources = importlib.import_module("opentelemetry.sdk.resources")
    batches = importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor
    service = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "headrace"}
    provider = sdk.TracerProvider(resource=resources.Resource.create(service), shutdown_on_exit=False)
    provider.add_span_processor(batches(exporter))
    _LastWords(provider)
    return provider


class _LastWords:
    """Sends what is left at the end, for no longer than `EXIT_SECONDS`: by itself the SDK tries for half a minute.

    In a thread that is there from the start, as Python 3.12.0 to 3.12.2 start none at their end; a process that was forked has
    to try.
    """

    def __init__(self, provider: Any) -> None:
        self._provider, self._leaving = provider, threading.Event()
        self._thread = self._started()
        atexit.register(self.say)

    def say(self) -> None:
        """Send it."""
        self._leaving.set()
        if not self._thread.is_alive():
            self._thread = self._started()
        self._thread.join(EXIT_SECONDS)

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._wait, name="headrace-otel", daemon=True)
        thread.start()
        return thread

    def _wait(self) -> None:
        self._leaving.wait()
        self._provider.shutdown()


def _attributes(about: Mapping[str, Value]) -> dict[str, Value]:
    return {f"headrace.{name}": value for name, value in about.items()}
