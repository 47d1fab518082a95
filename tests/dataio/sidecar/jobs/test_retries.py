"""A worker that fails while trainer and store are away: tried again until the store is back, or the limit comes."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import TransientError
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.dataio.sidecar.jobs.test_restarts import DIGEST, begun, entries, the_job
from tests.dataio.sidecar.jobs.test_staging import arena, plan


@pytest.fixture
def fd() -> Iterator[int]:
    made = arena()
    yield made
    os.close(made)


def left_alone(daemon: RunningDaemon, fd: int, folder: Path, **more: object) -> str:
    """The token of a job whose trainer has ended. The job fails until the file `store` exists."""
    token = begun(daemon, fd, folder / "gate", store=str(folder / "store"), **more)
    wait_for(lambda: daemon.status()["clients"] == 1)  # whoever asks
    (folder / "gate").touch()
    return token


def metrics(daemon: RunningDaemon) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{daemon.status()['http_port']}/metrics", timeout=120) as answer:
        return str(answer.read().decode())


def test_a_job_that_no_client_waits_for_is_tried_again_until_the_store_is_back(
    daemon: RunningDaemon, fd: int, tmp_path: Path
) -> None:
    token = left_alone(daemon, fd, tmp_path, write=str(tmp_path / "written"))
    job = wait_for(lambda: (found := the_job(daemon))["state"] == "retrying" and found)
    assert (job["error"], job["released"]) == ("the store is away", False)
    assert job["failures"] >= 1
    assert job["retry_in_seconds"] <= 60
    assert daemon.status()["jobs"]["held_bytes"] == 5000
    [save] = daemon.status()["saves"]
    assert (save["state"] in ("retrying", "sending"), save["error"]) == (True, "the store is away")
    text = metrics(daemon)
    assert "headrace_staged_retry_limit_seconds 3600.0" in text
    assert "headrace_staged_retrying " in text
    wait_for(lambda: daemon.status()["jobs"]["retries"] >= 1)
    (tmp_path / "store").touch()
    wait_for((tmp_path / "written").exists)
    assert (tmp_path / "written").read_text() == DIGEST
    with daemon.connect() as sidecar:
        assert sidecar.follow(token).result(150)["digest"] == DIGEST
    assert daemon.status()["jobs"]["held_bytes"] == 0
    assert "headrace_staged_retries_total 0.0" not in metrics(daemon)
    assert "as no trainer waits for it" in daemon.log.read_text()


def test_it_is_given_up_at_the_limit_which_is_said(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    daemon.stop()
    daemon.options.update(retry_seconds=0.3)
    daemon.start()
    left_alone(daemon, fd, tmp_path)
    wait_for(lambda: the_job(daemon)["state"] == "failed")
    job = the_job(daemon)
    assert "the store is away [the sidecar gave up after" in job["error"]
    assert job["workers"] >= 2
    assert daemon.status()["jobs"]["held_bytes"] == 0
    assert daemon.status()["jobs"]["retry_limit_seconds"] == 0.3
    wait_for(lambda: not entries(daemon))


def test_a_trainer_that_waits_is_told_at_once(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    with daemon.connect() as sidecar:
        staged = sidecar.stage("test", fd, plan(store=str(tmp_path / "store")))
        with pytest.raises(TransientError, match=r"the store is away$"):
            staged.result(150)
    assert (the_job(daemon)["state"], the_job(daemon)["workers"]) == ("failed", 1)


def test_a_daemon_that_starts_again_goes_on_trying_and_counting(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    token = left_alone(daemon, fd, tmp_path)
    before = wait_for(lambda: the_job(daemon)["failures"])
    daemon.kill()
    daemon.start()
    wait_for(lambda: the_job(daemon)["failures"] > before)
    (tmp_path / "store").touch()
    wait_for(lambda: the_job(daemon)["state"] == "done")
    with daemon.connect() as sidecar:
        assert sidecar.follow(token).result(150)["digest"] == DIGEST


def test_a_job_that_cannot_succeed_any_more_is_not_tried_again(daemon: RunningDaemon, fd: int, tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    left_alone(daemon, fd, tmp_path, fail={"code": "conflict", "message": "another won", "hint": ""})
    wait_for(lambda: the_job(daemon)["state"] == "failed")
    assert the_job(daemon)["workers"] == 1
