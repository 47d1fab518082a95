"""A node with a valid certificate sends wrong records and objects: what others have kept does not change."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.tier.client import BuddyClient, BuddyError
from headrace.dataio.sidecar.tier.config import Address, TierConfig, client_context
from headrace.dataio.sidecar.tier.protocol import RateLimit
from headrace.dataio.sidecar.tier.tier_service import TierService
from headrace.dataio.store.local_tier.records import Record, TierLimits, as_guest
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.dataio.sidecar.tier.conftest import config
from tests.support.local_tier import record

Listening = tuple[TierService, Address]
DATA, WRONG = random.Random(1).randbytes(MIB + 17), random.Random(2).randbytes(MIB + 17)
KEPT = record("s", 1, ["packs/1", "manifest"], committed=0.0)


def keep(tier: LocalTier, made: Record) -> None:
    for key in made.own:
        tier.keep("s", key, DATA)
    tier.put_record(made)


def whole(tier: LocalTier, key: str) -> bytes | None:
    found = tier.open("s", key)
    return None if found is None else b"".join(found.pieces())


@pytest.fixture
def attacker(tmp_path: Path, certificates: Path, listening: Listening) -> TierConfig:
    return config(tmp_path / "attacker", certificates, "127.0.0.2", buddy=listening[1])


@pytest.fixture
def buddy(attacker: TierConfig) -> BuddyClient:
    return BuddyClient.connect(attacker, client_context(attacker), RateLimit(None))


WRONG_RECORDS = {
    "committed": replace(KEPT, committed=7.0),
    "over": replace(KEPT, over=True),
    "another list of objects": replace(KEPT, own=("packs/9",)),
    "fewer objects": replace(KEPT, references=(), own=("manifest",), created=99.0),
}


@pytest.mark.parametrize("wrong", WRONG_RECORDS.values(), ids=list(WRONG_RECORDS))
def test_a_guests_record_does_not_replace_one_of_this_node(
    wrong: Record, listening: Listening, buddy: BuddyClient
) -> None:
    tier = listening[0].local_tier
    keep(tier, KEPT)
    with buddy:
        buddy.keep(wrong)
    assert tier.records() == [KEPT]
    assert all(tier.has("s", key) for key in KEPT.own)


@pytest.mark.parametrize("key", KEPT.own)
def test_a_guests_object_does_not_replace_one_of_this_nodes_steps(
    key: str, listening: Listening, attacker: TierConfig, buddy: BuddyClient
) -> None:
    tier, theirs = listening[0].local_tier, LocalTier(attacker.folder, TierLimits(64 * MIB, 2))
    keep(tier, KEPT)
    theirs.keep("s", key, WRONG)
    with buddy:
        with pytest.raises(BuddyError, match=f"{key} belongs to a step that this node or another guest has kept"):
            buddy.offer(theirs, "s", key)
        theirs.keep("s", "packs/2", WRONG)
        assert buddy.offer(theirs, "s", "packs/2")  # the connection stays
    assert whole(tier, key) == DATA


def test_a_guests_pack_does_not_replace_one_of_another_guest(
    listening: Listening, attacker: TierConfig, buddy: BuddyClient
) -> None:
    """A manifest may be replaced, because a second worker of its guest may have written another one."""
    tier, theirs = listening[0].local_tier, LocalTier(attacker.folder, TierLimits(64 * MIB, 2))
    keep(tier, as_guest(KEPT))
    for key in KEPT.own:
        theirs.keep("s", key, WRONG)
    with buddy:
        with pytest.raises(BuddyError, match="packs/1 belongs to a step"):
            buddy.offer(theirs, "s", "packs/1")
        assert buddy.offer(theirs, "s", "manifest")
    assert whole(tier, "packs/1") == DATA


def test_a_buddy_that_lists_records_of_another_store_is_not_believed(
    listening: Listening,
    attacker: TierConfig,
    open_tier: Callable[[TierConfig], TierService],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = open_tier(attacker)
    tier = listening[0].local_tier
    tier.put_record(replace(KEPT, source="another"))
    tier.put_record(record("s", 2, ["packs/2"]))
    listed = tier.records()
    monkeypatch.setattr(tier, "records", lambda source=None, _run=None: listed)
    assert not node.recall("s", "")
    assert node.local_tier.records() == []
    assert node.recalled["failed"] == 1
