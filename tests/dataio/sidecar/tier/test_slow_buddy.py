"""A trainer saves faster than the buddy takes copies. The buddy gets whole steps all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.checkpoint.tier.saving import KeptSteps
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.tier.client import BuddyClient
from headrace.dataio.sidecar.tier.config import Address, TierConfig
from headrace.dataio.sidecar.tier.tier_service import TierService
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.dataio.sidecar.conftest import wait_for
from tests.dataio.sidecar.tier.conftest import config, port_of
from tests.support.local_tier import record

Listening = tuple[TierService, Address]


class Trainer:
    """Saves whole steps of two packs: some during each transfer of an object."""

    def __init__(self, tier: LocalTier, committed: bool) -> None:
        self.tier, self.committed, self.kept, self.step = tier, committed, KeptSteps(), 0

    def save(self) -> None:
        self.step += 1
        keys = [f"packs/{self.step}/{n}" for n in (1, 2)]
        for key in keys:
            self.tier.keep("s", key, bytes([self.step % 256]) * MIB)
        made = record("s", self.step, keys, committed=float(self.committed))
        self.tier.put_record(made)
        if not self.committed:
            self.kept.add(self.tier, made)
        self.tier.remove_surplus()


@pytest.mark.parametrize("committed", [False, True])
def test_a_buddy_that_takes_copies_more_slowly_than_a_trainer_saves_gets_whole_steps(
    committed: bool,
    certificates: Path,
    listening: Listening,
    open_tier: Callable[[TierConfig], TierService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guest = config(tmp_path / "a", certificates, "127.0.0.2", buddy=listening[1])
    trainer = Trainer(LocalTier(guest.folder, TierLimits(guest.bytes, guest.steps)), committed)
    offer, offers = BuddyClient.offer, list[str]()

    def slow(self: BuddyClient, local_tier: LocalTier, source: str, key: str) -> bool:
        offers.append(key)
        sent = offer(self, local_tier, source, key)
        if trainer.step < 40:
            for _ in range(6):  # more than the tier keeps
                trainer.save()
        return sent

    monkeypatch.setattr(BuddyClient, "offer", slow)
    trainer.save()
    node = open_tier(guest)
    peer = listening[0].local_tier
    wait_for(lambda: [r for r in peer.records() if r.step > 5])
    whole = [r for r in peer.records() if all(peer.has("s", key) for key in r.own)]
    assert {r.step for r in whole} == {r.step for r in peer.records()}
    wait_for(lambda: trainer.step >= 40 and peer.records()[0].step == trainer.step)
    wait_for(lambda: node.status()["buddy"]["waiting"] == 0)  # type: ignore[index]
    sent = {key.split("/")[1] for key in offers}
    assert all({f"packs/{step}/1", f"packs/{step}/2"} <= set(offers) for step in sent)  # none was broken off
    assert len(trainer.tier.records()) <= guest.steps + 2 + 1  # one was held
    wait_for(lambda: not list((guest.folder / "holds").iterdir()))


def test_a_buddy_that_lost_its_tier_gets_the_steps_again(
    certificates: Path, open_tier: Callable[[TierConfig], TierService], tmp_path: Path
) -> None:
    first = open_tier(config(tmp_path / "b", certificates, listen=Address("127.0.0.1", 0), names=("127.0.0.2",)))
    address = Address("127.0.0.1", port_of(first))
    guest = config(tmp_path / "a", certificates, "127.0.0.2", buddy=address)
    trainer = Trainer(LocalTier(guest.folder, TierLimits(guest.bytes, guest.steps)), committed=True)
    trainer.save()
    node = open_tier(guest)
    wait_for(lambda: [r.step for r in first.local_tier.records()] == [1])
    first.close()
    empty = open_tier(config(tmp_path / "new", certificates, listen=address, names=("127.0.0.2",)))
    trainer.save()  # the sender notices the broken connection now
    wait_for(lambda: [r.step for r in empty.local_tier.records()] == [2, 1])
    assert all(empty.local_tier.has("s", f"packs/{step}/{n}") for step in (1, 2) for n in (1, 2))
    wait_for(lambda: node.status()["buddy"]["waiting"] == 0)  # type: ignore[index]
