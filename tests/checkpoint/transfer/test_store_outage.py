"""The store is killed while a daemon's worker sends a checkpoint whose trainer is dead, and started again on its directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.checkpoint.repository import check
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.store.open import open_store
from headrace.dataio.testing import s3_server
from headrace.dataio.testing.s3_server import S3Server, start_seaweedfs
from tests.checkpoint.transfer.conftest import Node
from tests.conftest import use_s3_server
from tests.support.checkpoint_states import begin, latest, load, make, save
from tests.support.transfer_client import state
from tests.support.waiting import wait_for

pytestmark = pytest.mark.s3


class Server:
    """A server of this test's own, since it is killed."""

    def __init__(self, server: S3Server) -> None:
        self.server = server

    def kill(self) -> None:
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait()

    def start(self) -> None:
        """On the same directory and ports."""
        self.server.process = subprocess.Popen(
            self.server.process.args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.server._folder,
            start_new_session=True,
        )
        s3_server._wait_ready(self.server)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with start_seaweedfs() as started:
        started.create_bucket("headrace")
        use_s3_server(started, monkeypatch)
        yield Server(started)


def job(node: Node) -> dict[str, Any]:
    found = Sidecar.find(node.socket)
    assert found is not None
    with found:
        status: dict[str, Any] = found.status()
        return dict(status["jobs"]["jobs"][0])


@pytest.mark.soak  # the short versions: test_retries beside the daemon, test_kept_steps and test_carry_again beside the worker
@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        pytest.param((), False, id="no-tier"),
        pytest.param(("--tier-bytes", "1GiB", "--tier-dir"), True, id="tier"),
    ],
)
def test_a_save_whose_trainer_is_dead_commits_when_the_store_is_back(
    node: Node, server: Server, flags: tuple[str, ...], kept: bool
) -> None:
    size = 20 * MIB
    with open_store("s3://headrace/run") as store:
        first = save(store, make(store, state(1, size), step=1, number=begin(store)))
        node.flags = (*flags, str(node.folder / "tier")) if flags else ()
        node.start(HEADRACE_HOLD="ckpt.in-pack")
        trainer = node.trainer("s3://headrace/run", 2, 2, size, first)
        node.held()
        trainer.kill()
        server.kill()
        node.go()
        found = wait_for(lambda: (output := job(node))["state"] == "retrying" and output, 90)
        assert found["failures"] >= 1
        assert found["released"] == kept
        assert ("kept in this node's tier" in found["error"]) == kept
        server.start()
        wait_for(lambda: job(node)["state"] == "done", 90)
        last = latest(store)
        assert last is not None
        assert last.step == 2
        assert (load(store, first), load(store, last)) == (state(1, size), state(2, size))
        assert check.check(store).clean
    assert not node.entries
