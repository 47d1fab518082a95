"""Room for arenas, and turns: who does not fit waits and is seen waiting; who is urgent goes first."""

from __future__ import annotations

import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.errors import CapacityError, TransientError
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.client import StagedJob
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.sidecar.jobs.memfd import sealed
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.dataio.sidecar.jobs.test_staging import arena, plan

ARENA = 5000


@pytest.fixture
def small(daemon: RunningDaemon) -> RunningDaemon:
    """Room for two arenas, one place to run in."""
    daemon.stop()
    daemon.options.update(arena_bytes=2 * ARENA + 1, running_jobs=1, queued_jobs=300)
    daemon.start()
    return daemon


def jobs(sidecar: Sidecar) -> dict[str, Any]:
    found: Any = sidecar.status()["jobs"]
    return found


def in_thread(work: Callable[[], StagedJob]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_an_arena_without_room_waits_visibly_and_is_taken_when_there_is_some(
    small: RunningDaemon, tmp_path: Path
) -> None:
    fd, gate = arena(), tmp_path / "gate"
    with small.connect() as sidecar:
        first = [sidecar.stage("test", fd, plan(gate=str(gate)), f"save {n}") for n in range(2)]
        thread, outcome = in_thread(lambda: sidecar.stage("test", fd, plan(), "save 3", wait=60))
        wait_for(lambda: jobs(sidecar)["waiting"] == 1)
        status: Any = sidecar.status()
        assert status["jobs"]["held_bytes"] == 2 * ARENA
        assert status["jobs"]["waiting_bytes"] == ARENA
        assert {save["about"]: save["state"] for save in status["saves"]}["save 3"] == "waiting"
        with urllib.request.urlopen(f"http://127.0.0.1:{status['http_port']}/metrics", timeout=120) as answer:
            text = answer.read().decode()
        assert f"headrace_staged_waiting_bytes {float(ARENA)}" in text
        assert f"headrace_staged_held_bytes {float(2 * ARENA)}" in text
        assert not outcome
        gate.touch()
        thread.join(60)
        assert outcome[0].result(150)
        for job in first:
            job.result(150)
        wait_for(lambda: jobs(sidecar)["held_bytes"] == 0)
    os.close(fd)


def test_waiting_for_room_is_bounded_and_then_the_client_is_told(small: RunningDaemon, tmp_path: Path) -> None:
    fd, gate = arena(), tmp_path / "gate"
    with small.connect() as sidecar:
        first = [sidecar.stage("test", fd, plan(gate=str(gate))) for _ in range(2)]
        before = small.descriptors()
        with pytest.raises(CapacityError, match="no room for the arena within"):
            sidecar.stage("test", fd, plan(), "save 3", wait=0.2)
        with pytest.raises(CapacityError, match="no room for an arena"):
            sidecar.stage("test", fd, plan())
        wait_for(lambda: small.descriptors() == before)
        status: Any = sidecar.status()
        assert {save["about"]: save["state"] for save in status["saves"]}["save 3"] == "failed"
        gate.touch()
        for job in first:
            job.result(150)
    os.close(fd)


def test_an_arena_larger_than_all_the_room_is_refused_at_once(small: RunningDaemon) -> None:
    fd = arena(bytes(2 * ARENA + 2))
    with small.connect() as sidecar, pytest.raises(CapacityError, match="larger than all"):
        sidecar.stage("test", fd, plan(), wait=60)
    os.close(fd)


def test_two_hundred_clients_that_vanish_while_they_wait_leave_nothing(small: RunningDaemon, tmp_path: Path) -> None:
    fd, gate, much = arena(), tmp_path / "gate", arena(bytes(2 * ARENA))
    with small.connect() as sidecar:
        job = sidecar.stage("test", fd, plan(gate=str(gate)))
        wait_for(lambda: job.progress[1])
        before, held = small.descriptors(), jobs(sidecar)["held_bytes"]
        gone = []
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(os.fspath(small.socket))
            sock.sendall(wire.frame(m.encode(m.Hello(m.VERSION, os.getpid()))))
            plan_fd = sealed("plan", plan())
            wire.send(sock, wire.frame(m.encode(m.Stage(1, "test", wait=60.0)), 2), (much, plan_fd))
            os.close(plan_fd)
            gone.append(sock)
        wait_for(lambda: jobs(sidecar)["waiting"] == 200)
        assert jobs(sidecar)["waiting_bytes"] == 200 * 2 * ARENA
        for sock in gone:
            sock.close()
        wait_for(lambda: jobs(sidecar)["waiting"] == 0)
        wait_for(lambda: small.descriptors() == before)
        assert jobs(sidecar)["held_bytes"] == held
        gate.touch()
        job.result(150)
    os.close(fd)
    os.close(much)


def test_an_urgent_job_overtakes_those_that_wait_and_closes_the_gate_for_those_that_run(
    small: RunningDaemon, tmp_path: Path
) -> None:
    fd, gate, own = arena(), tmp_path / "gate", tmp_path / "own"
    with small.connect() as sidecar:
        first, second = (sidecar.stage("test", fd, plan(gate=str(gate))) for _ in range(2))
        wait_for(lambda: first.progress[1])
        urgent = sidecar.stage("test", fd, plan(gate=str(own)), urgent=True)
        wait_for(lambda: urgent.progress[1])
        wait_for(lambda: jobs(sidecar)["gate_closed"])
        assert (jobs(sidecar)["running"], jobs(sidecar)["queued"]) == (2, 1)
        own.touch()
        assert urgent.result(150)
        wait_for(lambda: not jobs(sidecar)["gate_closed"])
        assert second.progress == (0, 0)
        gate.touch()
        assert first.result(150)
        assert second.result(150)
    os.close(fd)


def test_a_daemon_that_drains_sends_back_who_waits_for_room(small: RunningDaemon, tmp_path: Path) -> None:
    fd, gate = arena(), tmp_path / "gate"
    with small.connect() as sidecar:
        first = [sidecar.stage("test", fd, plan(gate=str(gate))) for _ in range(2)]
        thread, outcome = in_thread(lambda: sidecar.stage("test", fd, plan(), wait=60))
        wait_for(lambda: jobs(sidecar)["waiting"] == 1)
        assert small.process is not None
        small.process.send_signal(signal.SIGTERM)
        thread.join(150)
        assert isinstance(outcome[0], TransientError)
        gate.touch()
        for job in first:
            assert job.result(150)
        assert small.process.wait(150) == 0
    os.close(fd)


def test_sighup_changes_how_much_room_there_is(small: RunningDaemon) -> None:
    fd = arena(bytes(3 * ARENA))
    with small.connect() as sidecar:
        with pytest.raises(CapacityError):
            sidecar.stage("test", fd, plan())
        small.configuration.write_text('{"arena_bytes": 100000}')
        assert small.process is not None
        small.process.send_signal(signal.SIGHUP)
        wait_for(lambda: jobs(sidecar)["budget_bytes"] == 100_000)
        assert sidecar.stage("test", fd, plan()).result(150)
    os.close(fd)
