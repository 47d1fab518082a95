"""From a trainer's clocks to the daemon's status, metrics and errors."""

from __future__ import annotations

import http.client
import logging
import os
import re
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.dataio.core.errors import TransientError
from headrace.dataio.sidecar import connection, wire
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import LoaderMeter, SaveMeter, Sidecar, open_reader
from headrace.dataio.sidecar.meters import group_name
from headrace.dataio.sidecar.status import KEPT_MESSAGES, MESSAGE_CHARS, RecentMessages
from headrace.dataio.sidecar.status_server import is_own, page
from headrace.dataio.store.base import Store
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for


@dataclass
class Ticking:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def get(daemon: RunningDaemon, path: str, host: str | None = None, method: str = "GET") -> tuple[int, Any, bytes]:
    asking = http.client.HTTPConnection("127.0.0.1", daemon.status()["http_port"], timeout=120)
    asking.request(method, path, headers={"Host": host} if host else {})
    answer = asking.getresponse()
    return answer.status, answer.headers, answer.read()


def test_a_meter_counts_what_is_in_progress() -> None:
    clock = Ticking()
    meter = LoaderMeter(clock)
    assert meter.report() is None
    meter.asked()
    clock.now = 2.0
    report = meter.report()
    assert report is not None
    assert (report.wall, report.wait, report.steps, report.idle) == (2.0, 2.0, 0, 2.0)
    assert meter.got(8) == 2.0
    clock.now = 10.0
    report = meter.report()
    assert report is not None
    assert (report.wall, report.wait, report.steps, report.samples, report.idle) == (10.0, 2.0, 1, 8, 8.0)
    meter.asked()
    clock.now = 11.0
    meter.got(0, steps=0)  # an error
    report = meter.report()
    assert report is not None
    assert (report.wait, report.steps, report.samples) == (3.0, 1, 8)


def test_a_job_is_called_as_its_environment_says() -> None:
    assert group_name({"HEADRACE_JOB": "mine", "SLURM_JOB_ID": "7"}) == "mine"
    assert group_name({"SLURM_JOB_ID": "7"}) == "slurm 7"
    assert group_name({}) == f"process group {os.getpgid(0)}"


def test_a_loaders_reads_and_waits_and_a_savers_stalls_reach_status_and_metrics(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    loader, saver = LoaderMeter(), SaveMeter("exp")
    reader = open_reader(store, daemon.socket, loader)
    with daemon.connect() as other:
        other.reporting = saver.report
        for key, data in shards.items():
            loader.asked()
            assert bytes(reader.read(key, [(0, 1000)])[0]) == data[:1000]
            assert bytes(reader.read(key, [(1000, 1000)])[0]) == data[1000:2000]
            loader.got(4)
        saver.stalled(0.001)
        saver.committed(12, 5.0)
        wait_for(lambda: [j for j in daemon.status()["training"] if j["steps"] == 3 and j["last_step"] == 12])
        (job,) = daemon.status()["training"]
        assert (job["job"], job["trainers"], job["samples"], job["saves"]) == ("exp", 1, 12, 1)
        read = {
            sample.labels["source"]: sample.value
            for family in text_string_to_metric_families(get(daemon, "/metrics")[2].decode())
            for sample in family.samples
            if sample.name == "headrace_job_read_bytes_total" and sample.labels["job"] == "exp"
        }
        assert sum(read.values()) == 6000
        assert read["store"] == 3000
    reader.close()
    wait_for(lambda: daemon.status()["training"][0]["trainers"] == 0)
    assert daemon.status()["training"][0]["samples"] == 12


def test_a_loader_that_ends_before_the_first_tick_is_in_the_figures(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 3600.0)  # only `close` sends a report
    loader, key = LoaderMeter(), next(iter(shards))
    reader = open_reader(store, daemon.socket, loader)
    loader.asked()
    reader.read(key, [(0, 1000)])
    loader.got(4)
    reader.close()
    wait_for(lambda: [job for job in daemon.status()["training"] if job["trainers"] == 0])
    (job,) = daemon.status()["training"]
    assert (job["steps"], job["samples"]) == (1, 4)


def test_closing_does_not_wait_for_a_daemon_that_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LAST_REPORT_SECONDS", 0.05)
    path = tmp_path / "s" / "sidecar.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen(1)
        thread = threading.Thread(target=lambda: accepted.append(listening.accept()[0]) or accepted[0].sendall(welcome))
        accepted, welcome = list[socket.socket](), wire.frame(m.encode(m.Welcome(m.VERSION, 1, reports=True)))
        thread.start()
        found = Sidecar.find(path)
        assert found is not None
        found.reporting = SaveMeter("x").report
        with pytest.raises(BlockingIOError):
            while True:
                found._sock.send(bytes(65536), socket.MSG_DONTWAIT)
        found.close()
        with pytest.raises(TransientError, match=r"read no data for 0\.05 s"):
            found.send(m.Touched([1]))
        thread.join(60)
        accepted[0].close()


def test_reports_go_only_to_a_daemon_that_understands_them(tmp_path: Any) -> None:
    path = tmp_path / "s" / "sidecar.sock"
    path.parent.mkdir(mode=0o700)
    received: list[m.FromClient] = []
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.fspath(path))
    listening.listen(1)

    def old_daemon() -> None:
        sock, _ = listening.accept()
        framer = wire.Framer()
        while data := sock.recv(65536):
            for frame in framer.feed(data):
                received.append(m.decode_from_client(frame.payload))
                if isinstance(received[-1], m.Hello):
                    sock.sendall(wire.frame(b"\x83\xa1t\xa7welcome\xa7version\x01\xa3pid\x01"))
        sock.close()

    thread = threading.Thread(target=old_daemon)
    thread.start()
    found = Sidecar.find(path)
    assert found is not None
    asked = threading.Event()
    found.reporting = lambda: asked.set() or SaveMeter("x").report()
    found.closed_files.append(3)
    wait_for(lambda: any(isinstance(message, m.Closed) for message in received))  # a tick has passed
    found.close()
    thread.join(150)
    listening.close()
    assert not asked.is_set()
    assert not any(isinstance(message, m.Report) for message in received)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:80@evil.example", 421),
        ("10.0.0.1:80", 421),
        ("", 421),
    ],
)
def test_another_name_than_loopbacks_is_refused(daemon: RunningDaemon, host: str, status: int) -> None:
    fields = f"Accept: */*\r\nHost: {host}\r\n\r\n".encode()
    assert is_own(fields) is (status == 200)
    if host:
        assert get(daemon, "/status.json", host)[0] == status


def test_two_hosts_must_both_be_loopback_and_case_does_not_matter() -> None:
    assert is_own(b"HOST: LocalHost:80\r\n\r\n")
    assert not is_own(b"Host: localhost\r\nhoSt: evil.example\r\n\r\n")
    assert is_own(b"Accept: */*\r\n\r\n")


def test_the_page_comes_with_a_policy_that_allows_nothing_else(daemon: RunningDaemon) -> None:
    status, headers, body = get(daemon, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Frame-Options"] == "DENY"
    text = body.decode()
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(", text)
    assert set(re.findall(r"https?://[^\"'%\s]*", text)) == {"http://www.w3.org/2000/svg"}
    assert page().body == body
    head = get(daemon, "/", method="HEAD")
    assert (head[0], head[2]) == (200, b"")
    assert get(daemon, "/status.json", method="DELETE")[0] == 405


def test_errors_are_kept_in_plain_words_counted_and_bounded() -> None:
    recent = RecentMessages()
    log = logging.Logger("test")
    log.addHandler(recent)
    log.info("nothing to see")
    log.warning("the disk of %s is full", "/cache")
    log.warning("the disk of %s is full", "/cache")
    log.error("x" * 5000)
    newest, older = recent.latest(4e9)
    assert (older["text"], older["times"], older["level"]) == ("the disk of /cache is full", 2, "warning")
    assert len(str(newest["text"])) == MESSAGE_CHARS
    for n in range(100):
        log.error("trouble %d", n)
    assert [output["text"] for output in recent.latest(4e9)][:2] == ["trouble 99", "trouble 98"]
    assert len(recent.latest(4e9)) == KEPT_MESSAGES


def test_what_the_daemon_warns_of_is_on_its_status(daemon: RunningDaemon) -> None:
    with daemon.connect() as sidecar:
        sidecar._sock.sendall(wire.frame(b"garbage"))
        wait_for(lambda: sidecar.broken)
    (error,) = daemon.status()["errors"]
    assert "a client sent an invalid message" in error["text"]
