"""Spans through the socket: client and daemon are processes of their own, and a real OTLP receiver puts them together."""

from __future__ import annotations

import gzip
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.staging import job_span
from headrace.dataio.store.base import Store
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

CLIENT = """
import sys, os
from headrace.dataio.core.tracing import span
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.store.open import open_store
url, socket = sys.argv[1:]
with span("training"):
    reader = open_reader(open_store(url), socket)
    assert len(reader.read("shards/1.tar", [(0, 5 << 20)])[0]) == 5 << 20
    reader.close()
    arena = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(arena, 4096)
    import fcntl
    fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    sidecar = Sidecar.find(socket)
    sidecar.stage("test", arena, b'{"steps": []}').result(150)
    sidecar.close()
"""


class Receiver:
    """Decodes what exporters send, with OpenTelemetry's own messages."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def test_what_the_daemon_fetches_and_commits_is_below_the_trainers_spans(
    receiver: Receiver, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        daemon = RunningDaemon(Path(folder), tmp_path / "daemon.log")
        daemon.start()
        try:
            subprocess.run(
                [sys.executable, "-c", CLIENT, store.location.url, str(daemon.socket)], check=True, timeout=150
            )
            wait_for(lambda: receiver.named("cache.fetch") and receiver.named("sidecar.job"))
        finally:
            daemon.stop()
    (training,) = receiver.named("training")
    asked = {span.span_id for span in receiver.named("sidecar.open")}
    fetches = receiver.named("cache.fetch")
    assert len(fetches) == 2, "blocks"
    assert {span.parent_span_id for span in fetches} <= asked
    (stage,), (job,) = receiver.named("sidecar.stage"), receiver.named("sidecar.job")
    assert job.parent_span_id == stage.span_id
    assert {span.trace_id for span in [*fetches, job, stage]} == {training.trace_id}
    about = {a.key: a.value for a in fetches[0].attributes}
    assert about["headrace.key"].string_value == "shards/1.tar"
    assert about["headrace.bytes"].int_value == 4 << 20


def test_where_nothing_records_a_jobs_end_is_nothing() -> None:
    job_span("checkpoint", "", "")(m.Done("token", "{}"))


def test_a_context_longer_than_any_is_refused() -> None:
    text = m.encode(m.Stage(1, "checkpoint", "", "x" * 65))
    with pytest.raises(Exception, match="trace"):
        m.decode_from_client(text)
