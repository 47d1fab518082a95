"""The record of a collector that died names the step of a published version."""

from __future__ import annotations

import pytest

from headrace.checkpoint import Keep, Subscriber, read
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import PendingDelete, Policy, StepOfRun, encode
from headrace.checkpoint.publishing import records
from headrace.checkpoint.repository import collect, tag_records
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.checkpoint.publishing.conftest import Trainer, empty_like, same


@pytest.fixture
def store(trainer: Trainer) -> Store:
    return open_store(str(trainer.url))


def die_with_a_record(store: Store, policy: Policy | None) -> None:
    """Leave the record of a collector that was about to remove step 1."""
    record = PendingDelete(steps=(StepOfRun("exp42", 1, 1),), policy=policy)
    store.put(f"{names.GC}{names.new_id()}.json", encode(record))


def apply(trainer: Trainer) -> bool:
    held = empty_like(trainer.weights[1])
    with Subscriber(trainer.url, "policy", sidecar=None) as subscriber:
        subscriber.wait(60).apply(held)
    return same(held, trainer.weights[1])


def test_subscribers_read_a_step_that_its_tag_keeps(trainer: Trainer, store: Store) -> None:
    trainer.next_version()
    die_with_a_record(store, Keep(last=1).policy)
    assert apply(trainer)
    with pytest.raises(NotFoundError, match="removed"):
        read(trainer.url, run="exp42", step=1)  # other readers wait until the record has ended
    for _ in range(2):
        trainer.train()
        trainer.save()
        collect.retain(store, "exp42", Keep(last=1))
        assert apply(trainer), "the collections that took the record over spared the step"


@pytest.mark.parametrize("policy", [None, Keep(last=1).policy], ids=["removal", "policy"])
def test_subscribers_refuse_a_step_that_is_being_removed(trainer: Trainer, store: Store, policy: Policy | None) -> None:
    """A person removes it, whatever its tags are; or the tag was deleted."""
    record = trainer.next_version()
    die_with_a_record(store, policy)
    if policy is not None:
        store.delete_many([tag_records.key_of(record.tag)])
    with pytest.raises(NotFoundError, match="removed"):
        apply(trainer)


def test_only_the_tag_of_this_version_counts(trainer: Trainer, store: Store) -> None:
    record = trainer.next_version()
    keeps = tag_records.keeps_published
    assert keeps(store, record.tag, "exp42", record.base)
    assert not keeps(store, record.tag, "exp43", record.base)
    assert not keeps(store, records.tag_of("policy", 2, names.new_id()), "exp42", record.base)
    assert not keeps(store, "", "exp42", record.base)
    assert not keeps(store, "published.../../x", "exp42", record.base)
    store.put(tag_records.key_of(record.tag), b"{")
    assert not keeps(store, record.tag, "exp42", record.base)
