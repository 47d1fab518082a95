"""Spans for OpenTelemetry: into memory, over OTLP to a real receiver, and not at all."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from headrace.dataio.core import tracing
from headrace.dataio.core.tracing import Tracer

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

QUIET = {"NVTX_DISABLE": "1", "OTEL_SDK_DISABLED": "true"}


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(kept: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    made = Tracer(QUIET)
    made._otel = tracing.OpenTelemetry(provider.get_tracer("test"))
    return made


def test_spans_nest_and_carry_what_they_are_about(tracer: Tracer, kept: InMemorySpanExporter) -> None:
    with tracer.span("loader.wait", {"batch": 7}), tracer.span("decode", {}):
        pass
    inner, outer = kept.get_finished_spans()
    assert (inner.name, outer.name) == ("decode", "loader.wait")
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert outer.attributes == {"headrace.batch": 7}


def test_an_error_inside_is_said_and_passed_on(tracer: Tracer, kept: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="inside"), tracer.span("decode", {}):
        raise ValueError("inside")
    (span,) = kept.get_finished_spans()
    assert span.status.status_code == StatusCode.ERROR


def test_a_span_of_another_process_is_recorded_below_the_one_that_asked(
    tracer: Tracer, kept: InMemorySpanExporter
) -> None:
    with tracer.span("sidecar.open", {}):
        asked = tracer.context()
    tracer.record("cache.fetch", 1000.5, 0.25, asked, {"bytes": 10}, "")
    tracer.record("cache.fetch", 1001.0, 0.25, asked, {}, "TransientError")
    ours, theirs, failed = kept.get_finished_spans()
    assert theirs.parent is not None
    assert (theirs.context.trace_id, theirs.parent.span_id) == (ours.context.trace_id, ours.context.span_id)
    assert (theirs.start_time, theirs.end_time) == (1_000_500_000_000, 1_000_750_000_000)
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "TransientError")


@pytest.mark.parametrize("parent", ["", "00-xyz", "00-" + "a" * 32 + "-" + "b" * 16, "x" * 64, "é" * 10])
def test_a_parent_that_is_none_begins_a_new_trace(tracer: Tracer, kept: InMemorySpanExporter, parent: str) -> None:
    tracer.record("cache.fetch", 1.0, 1.0, parent, {}, "")
    (span,) = kept.get_finished_spans()
    assert span.parent is None


def test_there_is_no_context_outside_of_a_span(tracer: Tracer) -> None:
    assert tracer.context() == ""


def test_nothing_is_imported_where_it_was_not_asked_for() -> None:
    code = (
        "import sys; from headrace.dataio.core.tracing import context, recording, span\n"
        "with span('a', n=1): assert context() == '' and not recording()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"NVTX_DISABLE": "1"}, timeout=150)


def test_a_collector_that_is_not_there_costs_the_program_nothing() -> None:
    code = "from headrace.dataio.core.tracing import span\nfor n in range(5000):\n with span('a', n=n): pass\nprint('done')"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"NVTX_DISABLE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        timeout=150,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert time.monotonic() - began < 60
