"""Staged jobs: accepted once and for all, carried out whatever becomes of the client, refused without harm."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.errors import (
    CapacityError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.sidecar.jobs.memfd import sealed
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for

STAGE_AND_WAIT = """
import fcntl, os, sys, time
from headrace.dataio.sidecar.client import Sidecar
socket, plan = sys.argv[1:]
fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
os.write(fd, b"state" * 1000)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
staged = Sidecar.find(socket).stage("test", fd, plan.encode())
print(staged.token, flush=True)
time.sleep(60)
"""


def arena(data: bytes = b"state" * 1000, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plan(**what: object) -> bytes:
    return json.dumps(what).encode()


def test_a_staged_job_runs_with_exactly_its_descriptors(daemon: RunningDaemon) -> None:
    with daemon.connect() as sidecar:
        before = daemon.descriptors()
        fd = arena()
        staged = sidecar.stage("test", fd, plan())
        staged.wait_released(30)
        result = staged.result(150)
        assert result["digest"] == hashlib.sha256(b"state" * 1000).hexdigest()
        assert result["descriptors"] == 8, (
            "standard input, output, error, the arena, its mapping's, progress, the gate, and the listing's own"
        )
        assert result["session"] is True
        assert staged.progress == (5000, 5000)
        os.close(fd)
        wait_for(lambda: sidecar.status()["jobs"]["running"] == 0)  # type: ignore[index]
        wait_for(lambda: daemon.descriptors() == before)


def test_a_plan_may_be_larger_than_a_message(daemon: RunningDaemon) -> None:
    with daemon.connect() as sidecar:
        fd = arena()
        assert sidecar.stage("test", fd, plan(filler="x" * (1 << 20))).result(150)
        os.close(fd)


def test_a_job_goes_on_when_its_client_is_killed(daemon: RunningDaemon, tmp_path: Path) -> None:
    gate, written = tmp_path / "gate", tmp_path / "written"
    what = plan(gate=str(gate), write=str(written)).decode()
    client = subprocess.Popen(
        [sys.executable, "-c", STAGE_AND_WAIT, str(daemon.socket), what], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    token = client.stdout.readline().strip()
    client.kill()
    client.communicate()
    assert not written.exists()
    gate.touch()
    wait_for(written.exists)
    assert written.read_text() == hashlib.sha256(b"state" * 1000).hexdigest()
    with daemon.connect() as sidecar:  # a client that comes later may ask for it by its token
        assert sidecar.follow(token).result(150)["digest"] == written.read_text()
        with pytest.raises(NotFoundError):
            sidecar.follow("nothing")


def test_a_job_goes_on_when_the_daemon_is_killed(daemon: RunningDaemon, tmp_path: Path) -> None:
    gate, written, fd = tmp_path / "gate", tmp_path / "written", arena()
    with daemon.connect() as sidecar:
        staged = sidecar.stage("test", fd, plan(gate=str(gate), write=str(written)))
        wait_for(lambda: staged.progress[1])
        daemon.kill()
        with pytest.raises(TransientError, match="connection to the sidecar"):
            staged.result(150)
        with pytest.raises(TransientError):
            staged.wait_released(30)
        with pytest.raises(TransientError):
            sidecar.status()
    gate.touch()
    wait_for(written.exists)
    os.close(fd)


def test_a_wait_ends_at_its_deadline(daemon: RunningDaemon, tmp_path: Path) -> None:
    fd = arena()
    with daemon.connect() as sidecar:
        staged = sidecar.stage("test", fd, plan(gate=str(tmp_path / "gate")))
        with pytest.raises(DeadlineError):
            staged.wait_released(0.05)
        with pytest.raises(DeadlineError):
            staged.result(0.05)
        (tmp_path / "gate").touch()
        staged.result(150)
    os.close(fd)


def test_a_failed_job_raises_its_own_error(daemon: RunningDaemon) -> None:
    fd = arena()
    with daemon.connect() as sidecar:
        staged = sidecar.stage(
            "test", fd, plan(fail={"code": "conflict", "message": "step 7 is taken", "hint": "look who"})
        )
        with pytest.raises(ConflictError, match="step 7 is taken") as caught:
            staged.result(150)
        assert caught.value.hint == "look who"
        staged.wait_released(30)
    os.close(fd)


def test_a_job_that_dies_silently_has_failed_with_its_last_words(daemon: RunningDaemon) -> None:
    fd = arena()
    with daemon.connect() as sidecar:
        with pytest.raises(UnsupportedError, match=r"(?s)code 9.*the disk is on fire"):
            sidecar.stage("test", fd, plan(die="the disk is on fire")).result(150)
        status: Any = sidecar.status()
        assert status["jobs"]["jobs"][-1]["state"] == "failed"
    os.close(fd)


def test_lines_that_are_no_events_are_ignored_and_counted(daemon: RunningDaemon) -> None:
    fd = arena()
    lines = ["hello", "[1]", '{"event": "dance"}', '{"event": "done", "result": 3}', "x" * 200_000, '{"event": 3}']
    lines.append('{"event": "done", "result": {"x": "' + "y" * 40_000 + '"}}')
    with daemon.connect() as sidecar:
        assert "digest" in sidecar.stage("test", fd, plan(lines=lines)).result(150)
        status: Any = sidecar.status()
        assert status["jobs"]["jobs"][-1]["ignored_lines"] == len(lines)
    os.close(fd)


def test_jobs_over_the_limit_queue_visibly_and_a_full_queue_refuses(daemon: RunningDaemon, tmp_path: Path) -> None:
    daemon.stop()
    daemon.options.update(running_jobs=1, queued_jobs=2)
    daemon.start()
    fd, gate = arena(), tmp_path / "gate"
    with daemon.connect() as sidecar:
        staged = [sidecar.stage("test", fd, plan(gate=str(gate))) for _ in range(3)]
        status: Any = sidecar.status()
        assert (status["jobs"]["running"], status["jobs"]["queued"]) == (1, 2)
        wait_for(lambda: staged[0].progress[1])
        before = daemon.descriptors()
        with pytest.raises(CapacityError, match="the most is 2"):
            sidecar.stage("test", fd, plan())
        assert daemon.descriptors() == before
        gate.touch()
        for job in staged:
            job.result(150)
    os.close(fd)


def pipe_end() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def plain_file() -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: arena(seals=0), "the arena lacks F_SEAL_SHRINK"),
        (lambda: arena(seals=fcntl.F_SEAL_GROW), "the arena lacks F_SEAL_SHRINK"),
        (pipe_end, "the arena is not a memory file"),
        (plain_file, "the arena is not a memory file"),
        (lambda: os.eventfd(0), "is not a memory file"),
        (lambda: os.open("/tmp", os.O_PATH), "is not a memory file"),
    ],
)
def test_an_arena_of_the_wrong_kind_is_refused_without_harm(
    daemon: RunningDaemon, make: Callable[[], int], reason: str
) -> None:
    with daemon.connect() as sidecar:
        before = daemon.descriptors()
        fd = make()
        with pytest.raises(UsageError, match=reason):
            sidecar.stage("test", fd, plan())
        os.close(fd)
        assert daemon.descriptors() == before
        assert sidecar.status()["jobs"]["running"] == 0  # type: ignore[index]


def test_a_plan_that_may_still_change_is_refused(daemon: RunningDaemon) -> None:
    fd, weak = arena(), arena(plan())
    with daemon.connect() as sidecar:
        with pytest.raises(UsageError, match="the plan lacks F_SEAL_GROW and F_SEAL_WRITE"):
            sidecar.call(lambda id: m.Stage(id, "test"), (fd, weak))
        with pytest.raises(UsageError, match="no job 'dance'"):
            sidecar.stage("dance", fd, plan())
        with pytest.raises(UsageError, match="1 descriptors with a checkpoint"):
            sidecar.call(lambda id: m.Stage(id, "test"), (fd,))
    os.close(fd)
    os.close(weak)


def test_a_sealed_memory_file_cannot_change() -> None:
    fd = sealed("x", b"abc")
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1), lambda: os.ftruncate(fd, 9)):
        with pytest.raises(OSError):
            change()
    os.close(fd)


def test_sigterm_finishes_what_is_staged_and_exits_with_0(daemon: RunningDaemon, tmp_path: Path) -> None:
    daemon.stop()
    daemon.options["running_jobs"] = 1
    daemon.start()
    fd, gate = arena(), tmp_path / "gate"
    sidecar = daemon.connect()
    jobs = [sidecar.stage("test", fd, plan(gate=str(gate), write=str(tmp_path / name))) for name in ("first", "second")]
    os.kill(daemon.pid, signal.SIGTERM)
    wait_for(lambda: not daemon.socket.exists())
    assert Sidecar.find(daemon.socket) is None
    assert sidecar.status()["draining"] is True
    with pytest.raises(TransientError, match="shutting down"):
        sidecar.stage("test", fd, plan())
    gate.touch()
    for job in jobs:
        job.result(150)
    assert daemon.process is not None
    assert daemon.process.wait(150) == 0
    assert (tmp_path / "first").exists()
    assert (tmp_path / "second").exists()
    os.close(fd)
    sidecar.close()


def test_a_drain_that_takes_too_long_says_so_and_leaves_the_job_running(daemon: RunningDaemon, tmp_path: Path) -> None:
    daemon.stop()
    daemon.options["drain_seconds"] = 0.2
    daemon.start()
    fd, gate, written = arena(), tmp_path / "gate", tmp_path / "written"
    with daemon.connect() as sidecar:
        staged = sidecar.stage("test", fd, plan(gate=str(gate), write=str(written)))
        wait_for(lambda: staged.progress[1])
        assert daemon.kill(signal.SIGTERM) == 3
        assert "1 staged checkpoints unfinished" in daemon.log.read_text()
    gate.touch()
    wait_for(written.exists)
    os.close(fd)
