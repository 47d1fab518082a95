"""A daemon that is killed and started again: its cache, and the connections to it."""

from __future__ import annotations

import shutil
import signal
import urllib.request
from pathlib import Path

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.store.base import Store
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for


def read(daemon: RunningDaemon, store: Store, key: str) -> bytes:
    reader = open_reader(store, daemon.socket)
    try:
        (view,) = reader.read(key, [(0, store.stat(key).size)])
        return bytes(view)
    finally:
        reader.close()


def test_a_daemon_that_was_killed_begins_with_the_cache_of_the_last_one(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    key, data = next(iter(shards.items()))
    assert read(daemon, store, key) == data
    assert daemon.status()["cache"]["fetched_bytes"] == len(data)
    daemon.kill()
    daemon.start()
    assert daemon.status()["cache"]["adopted_bytes"] == len(data)
    assert read(daemon, store, key) == data
    assert daemon.status()["cache"]["fetched_bytes"] == 0


def test_damage_on_the_disk_between_two_daemons_never_reaches_a_reader(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    key, data = next(iter(shards.items()))
    read(daemon, store, key)
    daemon.kill()
    (blocks,) = (daemon.folder / "cache").glob("*.blocks")
    with blocks.open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"rot")
    daemon.start()
    assert read(daemon, store, key) == data
    assert daemon.status()["cache"]["fetched_bytes"] == 4 * MIB, "the damaged block alone"


def test_a_daemon_that_is_told_to_stop_says_that_it_drains(daemon: RunningDaemon) -> None:
    assert daemon.kill(signal.SIGTERM) == 0
    assert "draining: 0 staged checkpoints to finish" in daemon.log.read_text()


def test_a_daemon_whose_cache_directory_vanishes_goes_on_serving(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    shutil.rmtree(daemon.folder / "cache")
    for key, data in shards.items():
        assert read(daemon, store, key) == data
    assert daemon.status()["cache"]["paused"]
    assert "reading from the store directly" in daemon.log.read_text()


def test_a_second_daemon_on_the_same_cache_directory_keeps_nothing_in_it(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], tmp_path: Path
) -> None:
    other = RunningDaemon(daemon.folder / "o", tmp_path / "other.log", {"cache_dir": str(daemon.folder / "cache")})
    other.folder.mkdir()
    try:
        other.start()
        key, data = next(iter(shards.items()))
        assert read(other, store, key) == data
        assert list((daemon.folder / "cache").glob("*.blocks")) == []
        assert "another daemon keeps its files" in other.log.read_text()
    finally:
        other.stop()


def test_many_clients_that_come_at_once_are_all_served(daemon: RunningDaemon) -> None:
    before = daemon.descriptors()
    clients = [Sidecar.find(daemon.socket) for _ in range(300)]
    try:
        assert all(client is not None for client in clients)
        assert daemon.status()["clients"] >= 300
    finally:
        for client in clients:
            if client is not None:
                client.close()
    wait_for(lambda: daemon.descriptors() <= before)


def test_a_daemon_with_tiers_fills_the_fast_one_first_and_does_without_one_that_is_not_there(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    fast, slow = daemon.folder / "fast", daemon.folder / "slow"
    other = RunningDaemon(
        daemon.folder / "o", tmp_path / "other.log", {"cache_dir": f"{tmp_path}/file/x=1GiB,{fast}=16MiB,{slow}"}
    )
    other.folder.mkdir()
    try:
        other.start()
        for key, data in shards.items():
            assert read(other, store, key) == data
        first, second = other.status()["cache"]["tiers"]
        assert (first["directory"], first["budget_bytes"]) == (str(fast), 16 * MIB)
        assert (second["directory"], second["budget_bytes"]) == (str(slow), 64 * MIB)
        assert first["used_bytes"] == 9 * MIB
        assert second["used_bytes"] == sum(map(len, shards.values())) - 9 * MIB
        assert f"does not use {tmp_path}/file/x" in other.log.read_text()
        page = f"http://127.0.0.1:{other.status()['http_port']}/metrics"
        wait_for(
            lambda: b'headrace_cache_tier_used_bytes{tier="0"} 9.437184e+06' in urllib.request.urlopen(page).read()
        )
    finally:
        other.stop()
