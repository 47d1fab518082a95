"""Reading through the tier: the nearest copy that is good."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.stores import TierReader
from tests.support.local_tier import Counting, is_pack, local_tier


@pytest.fixture
def remote(store: Store) -> Counting:
    store.put("packs/1", b"0123456789")
    store.put("COMMIT", b"store")
    return Counting(store)


def ranges(store: Store, key: str = "packs/1") -> bytes:
    one, two = bytearray(3), bytearray(2)
    store.get_ranges_into(key, [(0, memoryview(one)), (8, memoryview(two))])
    return bytes(one + two)


def test_what_is_kept_is_not_asked_of_the_store(remote: Counting, tmp_path: Path) -> None:
    tier, url = local_tier(tmp_path), remote.location.url
    tier.keep(url, "packs/1", b"0123456789")
    tier.keep(url, "COMMIT", b"tier")
    reader = TierReader(remote, tier, is_pack)
    assert ranges(reader) == b"01289"
    assert reader.get("packs/1") == b"0123456789"
    assert remote.calls == []
    assert reader.get("COMMIT") == b"store"
    assert reader.bytes == {"tier": 15, "buddy": 0, "store": 5}


def test_what_is_not_kept_comes_from_the_store(remote: Counting, tmp_path: Path) -> None:
    reader = TierReader(remote, local_tier(tmp_path), is_pack)
    assert ranges(reader) == b"01289"
    with pytest.raises(NotFoundError):
        reader.get("packs/2")
    with pytest.raises(UsageError):
        reader.get_into("packs/1", 9, memoryview(bytearray(5)))
    assert reader.bytes == {"tier": 0, "buddy": 0, "store": 5}


def test_a_distrusted_copy_is_dropped_and_the_next_one_read(remote: Counting, tmp_path: Path) -> None:
    tier, url = local_tier(tmp_path), remote.location.url
    tier.keep(url, "packs/1", b"wrong 6789")
    asked = []

    def recall(source: str, key: str) -> bool:
        asked.append((source, key))
        tier.keep(source, key, b"01xxx56789")
        return True

    reader = TierReader(remote, tier, is_pack, recall)
    assert ranges(reader) == b"wro89"
    assert reader.invalidate("packs/1")
    assert not tier.has(url, "packs/1")
    assert ranges(reader) == b"01x89"
    assert asked == [(url, "packs/1")]
    assert reader.invalidate("packs/1")
    assert not tier.has(url, "packs/1")
    assert ranges(reader) == b"01289"
    assert not reader.invalidate("packs/1")  # the store's own copy is the last
    assert not reader.invalidate("COMMIT")
    assert asked == [(url, "packs/1")]
    assert reader.bytes == {"tier": 5, "buddy": 5, "store": 5}


def test_a_buddy_without_the_object_is_asked_once(remote: Counting, tmp_path: Path) -> None:
    asked: list[str] = []
    reader = TierReader(remote, local_tier(tmp_path), is_pack, lambda _source, key: bool(asked.append(key)))
    assert ranges(reader) == ranges(reader) == b"01289"
    assert asked == ["packs/1"]
