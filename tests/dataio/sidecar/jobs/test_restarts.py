"""A daemon that starts again finds its jobs: over, alive, without a worker, or without an arena."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.sidecar.jobs.runner import TRIES
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.dataio.sidecar.jobs.test_fd_keeper import keeper_pid
from tests.dataio.sidecar.jobs.test_staging import arena, plan

DIGEST = hashlib.sha256(b"state" * 1000).hexdigest()


def folder(daemon: RunningDaemon) -> Path:
    return Path(f"{daemon.socket}.jobs")


def entries(daemon: RunningDaemon) -> list[str]:
    return [path.name for path in folder(daemon).glob("*.job")]


def the_job(daemon: RunningDaemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["jobs"]["jobs"][0]
    return found


def worker(token: str) -> int:
    """The job's process: the one that writes its events."""
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if token in os.readlink(link):
                return int(link.parts[2])
        except OSError:
            continue
    return 0


@pytest.fixture
def fd() -> Iterator[int]:
    made = arena()
    yield made
    os.close(made)


def begun(daemon: RunningDaemon, fd: int, gate: Path, **more: object) -> str:
    """The token of a job that is being carried, and held."""
    with daemon.connect() as sidecar:
        staged = sidecar.stage("test", fd, plan(gate=str(gate), **more), "run, step 1")
        wait_for(lambda: staged.progress[1])
        return staged.token


def test_a_worker_that_outlived_its_daemon_is_followed_again(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    daemon.kill()
    daemon.start()
    assert the_job(daemon)["state"] == "running"
    assert daemon.status()["saves"][0]["about"] == "run, step 1"
    with daemon.connect() as sidecar:
        staged = sidecar.follow(token)
        (tmp_path / "gate").touch()
        assert staged.result(150)["digest"] == DIGEST
        staged.wait_released(30)
    assert the_job(daemon)["workers"] == 1
    assert daemon.status()["saves"][0]["state"] == "committed"
    wait_for(lambda: not entries(daemon))


def test_a_job_that_ended_meanwhile_is_remembered_and_its_files_are_removed(
    daemon: RunningDaemon, fd: int, tmp_path: Path
) -> None:
    token = begun(daemon, fd, tmp_path / "gate", write=str(tmp_path / "written"))
    daemon.kill()
    (tmp_path / "gate").touch()
    pid = worker(token)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    daemon.start()
    with daemon.connect() as sidecar:
        assert sidecar.follow(token).result(150)["digest"] == DIGEST
    wait_for(lambda: sorted(path.name for path in folder(daemon).iterdir() if path.name != "keeper") == ["gate"])


def test_when_daemon_and_worker_are_killed_another_worker_gets_the_same_arena(
    daemon: RunningDaemon, fd: int, tmp_path: Path
) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    daemon.kill()
    os.kill(worker(token), signal.SIGKILL)
    (tmp_path / "gate").touch()
    daemon.start()
    with daemon.connect() as sidecar:
        assert sidecar.follow(token).result(150)["digest"] == DIGEST
    assert the_job(daemon)["workers"] == 2
    assert "gets another worker" in daemon.log.read_text()


def test_a_queued_job_is_not_forgotten(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    daemon.stop()
    daemon.options.update(running_jobs=1)
    daemon.start()
    first = begun(daemon, fd, tmp_path / "gate")
    with daemon.connect() as sidecar:
        second = sidecar.stage("test", fd, plan(write=str(tmp_path / "written"))).token
    daemon.kill()
    (tmp_path / "gate").touch()
    daemon.start()
    wait_for((tmp_path / "written").exists)
    with daemon.connect() as sidecar:
        assert sidecar.follow(first).result(150)["digest"] == DIGEST
        assert sidecar.follow(second).result(150)["digest"] == DIGEST


def test_a_worker_is_replaced_a_bounded_number_of_times(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    with daemon.connect() as sidecar:
        staged = sidecar.follow(token)
        for tries in range(1, TRIES + 1):
            wait_for(lambda tries=tries: the_job(daemon)["workers"] == tries and worker(token))  # type: ignore[misc]
            os.kill(worker(token), signal.SIGKILL)
        with pytest.raises(TransientError, match="code -9"):
            staged.result(150)
    assert the_job(daemon)["workers"] == TRIES
    wait_for(lambda: not entries(daemon))


def kill_all(daemon: RunningDaemon, token: str) -> None:
    keeper = keeper_pid(folder(daemon))
    daemon.kill()
    os.kill(worker(token), signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)


def test_without_daemon_worker_and_keeper_the_trainer_brings_the_arena_again(
    daemon: RunningDaemon, fd: int, tmp_path: Path
) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    kill_all(daemon, token)
    (tmp_path / "gate").touch()
    daemon.start()
    assert the_job(daemon)["state"] == "lost"
    with daemon.connect() as sidecar:
        with pytest.raises(NotFoundError):
            sidecar.follow(token)
        staged = sidecar.stage("test", fd, plan(gate=str(tmp_path / "gate")), "run, step 1")
        assert staged.token == token, "it is the same job, so it goes on from its progress"
        assert staged.result(150)["digest"] == DIGEST
    assert len(daemon.status()["jobs"]["jobs"]) == 1


def test_what_is_lost_for_good_is_said_and_never_called_done(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    kill_all(daemon, token)
    daemon.options.update(lost_seconds=0.2)
    daemon.start()
    wait_for(lambda: the_job(daemon)["state"] == "failed")
    assert "run, step 1: there is no arena" in daemon.log.read_text()
    wait_for(lambda: not entries(daemon))


def test_an_entry_that_is_not_sound_does_not_keep_the_daemon_from_its_work(
    daemon: RunningDaemon, fd: int, tmp_path: Path
) -> None:
    token = begun(daemon, fd, tmp_path / "gate")
    daemon.kill()
    (folder(daemon) / f"{'0' * 32}.job").write_bytes(b"MLRJOB torn")
    (tmp_path / "gate").touch()
    daemon.start()
    assert f"{'0' * 32}.job is invalid and was moved to refused" in daemon.log.read_text()
    with daemon.connect() as sidecar:
        assert sidecar.follow(token).result(150)["digest"] == DIGEST
