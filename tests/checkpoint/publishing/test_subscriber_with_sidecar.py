"""A subscriber whose daemon dies, hangs or lies: it holds one version, and the right one."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import Subscriber
from headrace.dataio.sidecar import connection
from headrace.dataio.sidecar import store as sidecar_store
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.sidecar.store import SidecarStore
from headrace.dataio.testing.system import stopped
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same
from tests.dataio.sidecar.conftest import RunningDaemon

FETCHES = 8
"""More requests than this subscriber sends for one version."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        running = RunningDaemon(Path(folder), tmp_path / "daemon.log")
        running.start()
        yield running
        running.stop()


def through(subscriber: Subscriber) -> dict[str, int]:
    """The bytes of unchanging objects that the subscriber read, by source."""
    assert isinstance(subscriber.store, SidecarStore)
    return dict(subscriber.store.bytes)


class KillAt:
    """Kills the daemon before the request with this number is sent, or after it was answered and before its bytes are read."""

    def __init__(self, daemon: RunningDaemon, number: int, *, answered: bool) -> None:
        self._daemon, self._number, self._answered = daemon, number, answered
        self.asked, self.fired = 0, False
        self._call = Sidecar.call

    def __call__(self, sidecar: Sidecar, build: Callable[[int], Any], *, timeout: float) -> Any:
        self.asked += 1
        is_the_one = self.asked == self._number
        if is_the_one and not self._answered:
            self._kill()
        answer = self._call(sidecar, build, timeout=timeout)
        if is_the_one:
            self._kill()
        return answer

    def _kill(self) -> None:
        self.fired = self._daemon.kill() == -signal.SIGKILL


@pytest.mark.parametrize("answered", [False, True], ids=["before", "answered"])
@pytest.mark.parametrize("what", ["step", "update"])
def test_a_daemon_that_is_killed_at_any_request_costs_no_version(
    trainer: Trainer, daemon: RunningDaemon, what: str, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first version is read from its step, later ones from updates. Each version is one that the daemon has not read."""
    monkeypatch.setattr(sidecar_store, "RETRY_SECONDS", 0.0)
    trainer.next_version()
    held = empty_like(trainer.weights[1])
    subscriber = Subscriber(trainer.url, "policy", sidecar=daemon.socket)
    if what == "update":
        subscriber.wait(60).apply(held)
        assert through(subscriber)["store"] == 0
    for number in range(1, FETCHES):
        trainer.next_version()
        kill = KillAt(daemon, number, answered=answered)
        with monkeypatch.context() as patch:
            patch.setattr(Sidecar, "call", lambda *args, kill=kill, **more: kill(*args, **more))
            subscriber.wait(60).apply(held)
        assert subscriber.version == trainer.step
        assert same(held, trainer.weights[trainer.step])
        if not kill.fired:
            break
        daemon.start()
        if what == "step":
            subscriber.close()
            subscriber = Subscriber(trainer.url, "policy", sidecar=daemon.socket)
    subscriber.close()
    assert 3 < number < FETCHES, "all requests of a version were reached"


def test_a_daemon_that_hangs_delays_a_wait_by_half_of_its_limit_and_a_fetch_until_it_is_noticed(
    trainer: Trainer, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.next_version()
    held, asked, call = empty_like(trainer.weights[1]), list[float](), Sidecar.call
    monkeypatch.setattr(connection, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection, "HUNG_SECONDS", 0.2)

    def counted(sidecar: Sidecar, build: Callable[[int], Any], *, timeout: float) -> Any:
        asked.append(timeout)
        return call(sidecar, build, timeout=timeout)

    with Subscriber(trainer.url, "policy", sidecar=daemon.socket) as subscriber:
        subscriber.wait(60).apply(held)
        assert through(subscriber)["store"] == 0
        monkeypatch.setattr(Sidecar, "call", counted)
        with stopped(daemon.pid):
            trainer.next_version()
            version = subscriber.wait(1)
            assert asked
            assert asked[0] <= 0.5
            version.apply(held)
        assert same(held, trainer.weights[2])
        assert through(subscriber)["store"] > 0
    told = [r.getMessage() for r in caplog.records if r.name.endswith("sidecar.store") and r.levelname == "WARNING"]
    assert 1 <= len(told) <= 2, told


def test_a_damaged_cache_gives_no_wrong_weights(
    trainer: Trainer, daemon: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """All bytes of all objects in the cache are wrong. They are found, and read from the store."""
    trainer.next_version()
    first, late = empty_like(trainer.weights[1]), empty_like(trainer.weights[1])
    with (
        Subscriber(trainer.url, "policy", sidecar=daemon.socket) as subscriber,
        Subscriber(trainer.url, "policy", sidecar=daemon.socket) as other,
    ):
        subscriber.wait(60).apply(first)
        other.wait(60).apply(late)
        trainer.next_version()
        subscriber.wait(60).apply(first)
        assert through(subscriber)["store"] == 0
        assert damage(daemon) > 3
        other.wait(60).apply(late)
        assert same(late, trainer.weights[2])
        with Subscriber(trainer.url, "policy", sidecar=daemon.socket) as newest:
            newest.wait(60).apply(first)
            assert same(first, trainer.weights[2])
    wrong = {record.getMessage() for record in caplog.records if "wrong bytes" in record.getMessage()}
    for part in ("/weights-", "/update-"):
        assert any(part in text for text in wrong), wrong


def damage(daemon: RunningDaemon) -> int:
    """Invert the bytes of all cache files. Returns how many there are."""
    files = [path for path in (daemon.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size > 0]
    for path in files:
        path.write_bytes(bytes(byte ^ 255 for byte in path.read_bytes()))
    return len(files)
