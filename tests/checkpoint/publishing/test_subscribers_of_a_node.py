"""Subscriber processes of one node, a real daemon, and an S3 server whose answers are counted."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoint import Checkpointer, Subscriber
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.store import SidecarStore
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from tests.dataio.sidecar.conftest import RunningDaemon
from tests.support import nursery
from tests.support.subscriber_process import digests
from tests.support.waiting import wait_for

ROWS = 1024


class Run:
    """A run whose model and optimizer are saved, and the model published, with requests that pass no proxy."""

    def __init__(self, url: str, s3_server: S3Server) -> None:
        self.url = url
        torch.manual_seed(0)
        self.model = {f"layer_{n}": torch.randn(ROWS, 1000) for n in range(4)}
        self.optimizer = {f"layer_{n}": torch.randn(ROWS, 1000) for n in range(4)}
        self.digests: dict[int, dict[str, str]] = {}
        options = {"endpoint_url": s3_server.endpoint}
        self.checkpointer = Checkpointer(url, run="exp42", sidecar=None, storage_options=options)

    def publish(self, step: int, changed: float) -> None:
        with torch.no_grad():
            for tensor in self.model.values():
                tensor += (torch.rand(tensor.shape) < changed) * 0.01
        handle = self.checkpointer.save(step, {"model": self.model, "optimizer": self.optimizer})
        future = self.checkpointer.publish("policy", handle, include="model/*")
        assert future is not None
        future.result(60)
        self.digests[step] = digests(self.model)


@pytest.fixture
def proxy(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy that counts what the server sends to subscribers and daemon."""
    with FaultProxy(s3_server.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.fixture
def run(s3_url: str, s3_server: S3Server) -> Iterator[Run]:
    made = Run(s3_url, s3_server)
    with made.checkpointer:
        yield made


@pytest.fixture
def daemon(tmp_path: Path, proxy: FaultProxy) -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        running = RunningDaemon(Path(folder), tmp_path / "daemon.log", {"cache_bytes": 256 * MIB})
        running.start()
        yield running
        running.stop()


class Process:
    """A subscriber process."""

    def __init__(self, url: str, socket: str, *steps: int) -> None:
        self._child = nursery.start("tests.support.subscriber_process", url, socket, *map(str, steps))

    def line(self) -> dict[str, Any]:
        """What the process prints about its next version."""
        line = self._child.stdout.readline()
        assert line, self.end()
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> str:
        """Wait for the end of the process, and return what it logged."""
        _, err = self._child.communicate(120)
        return err


def follow(run: Run, proxy: FaultProxy, socket: str, count: int, first: int) -> list[int]:
    """Publish two versions to so many processes. Returns the bytes that the server sent for each."""
    run.publish(first, 1)
    sent, start = list[int](), proxy.answered
    processes = [Process(run.url, socket, first, first + 1) for _ in range(count)]
    for step in (first, first + 1):
        if step > first:
            run.publish(step, 0.3)
        for process in processes:
            line = process.line()
            assert (line["step"], line["digests"]) == (step, run.digests[step])
        sent.append(proxy.answered - start)
        start = proxy.answered
    for process in processes:
        process.end()
    return sent


@pytest.mark.s3
def test_four_subscribers_of_a_node_cost_the_store_what_one_costs(
    run: Run, proxy: FaultProxy, daemon: RunningDaemon
) -> None:
    one = follow(run, proxy, "", 1, 1)
    assert one[0] > 4 * ROWS * 4000
    assert MIB < one[1] < one[0] / 2, "an update"
    four = follow(run, proxy, str(daemon.socket), 4, 3)
    assert four[0] <= 1.1 * one[0]
    assert four[1] <= 1.1 * one[1]

    for most in (
        1.1 * one[0],
        0.1 * one[0],
    ):  # the step of the newest version was not read yet, then it is in the cache
        start = proxy.answered
        late = Process(run.url, str(daemon.socket), 4)
        assert late.line()["digests"] == run.digests[4]
        late.end()
        assert proxy.answered - start <= most


PARTS = ("weights-", "update-", ".manifest", "packs/")


@pytest.mark.s3
@pytest.mark.parametrize("part", PARTS)
def test_a_daemon_that_is_killed_while_it_fetches_costs_no_version(
    run: Run, proxy: FaultProxy, daemon: RunningDaemon, part: str
) -> None:
    """The daemon has received half of an object's bytes from the server when it is killed."""
    run.publish(1, 1)
    held = {name: torch.zeros_like(value) for name, value in run.model.items()}
    with Subscriber(run.url, "policy", poll=0.2, sidecar=daemon.socket) as subscriber, ThreadPoolExecutor(1) as pool:
        if part == "update-":
            subscriber.wait(60).apply(held)
            run.publish(2, 0.3)
        proxy.inject(Fault.STALL, times=50, method="GET", path=part)
        following = pool.submit(lambda: subscriber.wait(60).apply(held))
        wait_for(lambda: proxy.fired[Fault.STALL])
        os.kill(daemon.pid, signal.SIGSTOP)  # it sends no other request before it is killed
        assert not following.done()
        proxy.forget()  # the subscriber's own requests are answered
        assert daemon.kill() == -signal.SIGKILL
        following.result(60)
        assert digests(held) == run.digests[subscriber.version or 0]
        assert subscriber.version == (2 if part == "update-" else 1)
        assert isinstance(subscriber.store, SidecarStore)
        assert subscriber.store.bytes["store"] > 0
