"""Fetching ahead from the buddy: what one record names comes together, each object once, bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.tier import buddy_fetch
from headrace.dataio.sidecar.tier.client import BuddyClient
from headrace.dataio.sidecar.tier.config import Address, TierConfig
from headrace.dataio.sidecar.tier.tier_service import TierService
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.dataio.sidecar.conftest import wait_for
from tests.dataio.sidecar.tier.conftest import config
from tests.support.local_tier import record

KEYS = [f"packs/{n}" for n in range(12)]


class Watched:
    """`BuddyClient.fetch`, counted; every one waits until `gate` is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.begun: list[str] = []
        self.most = self.now = 0
        real = BuddyClient.fetch

        def fetch(buddy: BuddyClient, local_tier: LocalTier, source: str, key: str) -> bool:
            with self.lock:
                self.begun.append(key)
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                assert self.gate.wait(60)
                return real(buddy, local_tier, source, key)
            finally:
                with self.lock:
                    self.now -= 1

        monkeypatch.setattr(BuddyClient, "fetch", fetch)


@pytest.fixture
def node(
    listening: tuple[TierService, Address],
    open_tier: Callable[[TierConfig], TierService],
    tmp_path: Path,
    certificates: Path,
) -> TierService:
    """A node that knows a step of which its buddy has all objects."""
    buddy, address = listening
    for n, key in enumerate(KEYS):
        buddy.local_tier.keep("s", key, bytes([n]) * MIB)
    buddy.local_tier.put_record(record("s", 1, KEYS))
    made = open_tier(config(tmp_path / "a", certificates, "127.0.0.2", buddy=address))
    assert made.recall("s", "")
    return made


def test_what_a_record_names_comes_when_one_of_it_is_asked_for(node: TierService) -> None:
    assert node.recall("s", KEYS[5])
    # an object is there a moment before it is counted
    wait_for(lambda: node.recalled["found"] == 1 + len(KEYS))
    assert node.recalled == {"found": 1 + len(KEYS), "absent": 0, "failed": 0}
    for n, key in enumerate(KEYS):
        held = node.local_tier.open("s", key)
        assert held is not None
        assert b"".join(held.pieces()) == bytes([n]) * MIB


def test_an_object_is_fetched_once_and_only_so_many_at_a_time_the_wanted_first(
    node: TierService, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    with ThreadPoolExecutor(8) as trainers:
        first = trainers.submit(node.recall, "s", KEYS[0])
        wait_for(lambda: len(watched.begun) == buddy_fetch.CONNECTIONS)
        last = [trainers.submit(node.recall, "s", KEYS[-1]) for _ in range(4)]
        wait_for(lambda: node._recalls is not None and node._recalls._queue[0] == ("s", KEYS[-1]))
        watched.gate.set()
        assert first.result(60)
        assert all(future.result(60) for future in last)
    wait_for(lambda: all(node.local_tier.has("s", key) for key in KEYS))
    assert sorted(watched.begun) == sorted(KEYS), "each once"
    assert watched.most == buddy_fetch.CONNECTIONS


def test_when_the_buddy_breaks_off_no_reader_waits_for_the_rest(
    node: TierService, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = []

    def fetch(_buddy: BuddyClient, _local_tier: LocalTier, _source: str, key: str) -> bool:
        fired.append(key)
        raise ConnectionError("the node died")

    monkeypatch.setattr(BuddyClient, "fetch", fetch)
    assert not node.recall("s", KEYS[0])
    assert 1 <= len(fired) <= buddy_fetch.CONNECTIONS
    assert not node.recall("s", KEYS[1]), "not asked again so soon"
    wait_for(lambda: node.recalled["failed"] == len(fired))


def test_a_tier_without_room_for_all_takes_what_fits(
    listening: tuple[TierService, Address],
    open_tier: Callable[[TierConfig], TierService],
    tmp_path: Path,
    certificates: Path,
) -> None:
    from dataclasses import replace

    buddy, address = listening
    for n, key in enumerate(KEYS):
        buddy.local_tier.keep("s", key, bytes([n]) * MIB)
    buddy.local_tier.put_record(record("s", 1, KEYS))
    small = replace(config(tmp_path / "a", certificates, "127.0.0.2", buddy=address), bytes=5 * MIB)
    node = open_tier(small)
    assert node.recall("s", "")
    node.recall("s", KEYS[0])
    wait_for(lambda: sum(node.recalled.values()) == 1 + len(KEYS))
    assert node.local_tier.used() <= 5 * MIB
    assert node.recalled["failed"] > 0
    assert node._recalls is not None
    assert not node._recalls._unreachable_until, "the buddy is well"
