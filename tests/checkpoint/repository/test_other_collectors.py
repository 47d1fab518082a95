"""A collector keeps what it read, while other collections remove steps and savers fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Decision, Lease, encode, read, this_process
from headrace.checkpoint.repository import collect
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Collector
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.checkpoint.repository.test_pack_users import saved
from tests.support.checkpoint_states import RUN, begin, load, make, save, tiny_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "ck")) as store:
        yield store


def visible(store: Store) -> list[int]:
    return [base.step for base in repository.visible(store, RUN)]


def test_the_policy_does_not_count_steps_that_another_collection_removed(store: Store) -> None:
    steps = saved(store, 4)
    collector = Collector(store)
    assert collect.retain(store, RUN, Keep(last=4), collector=collector) is None
    collect.collect(store, [steps[1].of(RUN), steps[2].of(RUN)])
    save(store, make(store, tiny_state(5), step=5, bases=(steps[-1],)))
    collect.retain(store, RUN, Keep(last=3), collector=collector)
    assert visible(store) == [5, 4, 1]


def test_the_newest_step_stays_after_another_collection_removed_the_one_after_it(store: Store) -> None:
    steps = saved(store, 4)
    collector = Collector(store)
    assert collect.retain(store, RUN, Keep(last=4), collector=collector) is None
    collect.collect(store, [steps[3].of(RUN)])
    collect.retain(store, RUN, Keep(last=1), collector=collector)
    assert visible(store) == [3]


def test_an_attempt_at_a_step_that_is_committed_is_removed_when_its_lease_is_over(store: Store) -> None:
    """The collector does not read that step again, and finds the attempt by its lease."""
    one = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    collector = Collector(store)
    collect.collect(store, (), collector=collector)
    attempt = names.new_id()
    lease = Lease(attempt=attempt, run=RUN, timeline=1, step=1, bases=(), until=0.0, life=-10.0, process=this_process())
    store.put(names.lease(attempt), encode(lease))
    pack = names.pack(attempt, names.pack_name(0, "ffffffff", 0))
    store.put(pack, b"left")
    assert collect.collect(store, (), collector=collector).aborted == (attempt,)
    collect.collect(store, (), collector=collector)
    assert not store.exists(pack)
    assert not list(store.list(names.LEASES))
    assert load(store, one) == tiny_state(1)


@pytest.mark.parametrize("has_totals", [True, False])
def test_packs_are_deleted_although_another_collection_removed_a_step_of_another_run(
    store: Store, has_totals: bool
) -> None:
    """The other run's step referenced them. Older versions write decisions without totals."""
    number = begin(store)
    one = save(store, make(store, tiny_state(1), step=1, number=number))
    begin(store, run="other")
    base = Base(one.timeline, one.step, one.attempt, RUN)
    other = save(store, make(store, tiny_state(1), step=1, run="other", bases=(base,)))
    if not has_totals:
        key = names.decision("other", 1, 1, other.attempt)
        store.put(key, encode(structs.replace(read(store, key, Decision), totals=None)))
    collector = Collector(store)
    assert collect.retain(store, RUN, Keep(last=1), collector=collector) is None
    collect.collect(store, [other.of("other")])
    save(store, make(store, {"new": b"n" * 100}, step=2, number=number))
    for _ in range(3):
        collect.retain(store, RUN, Keep(last=1), collector=collector)
        collect.collect(store, (), collector=collector)
    assert not list(store.list(names.packs(one.attempt)))


def test_packs_are_deleted_although_the_collector_has_read_the_step_that_another_one_removed(store: Store) -> None:
    number = begin(store)
    one = save(store, make(store, tiny_state(1), step=1, number=number))
    two = save(store, make(store, tiny_state(2), step=2, number=number, bases=(one,)))
    begin(store, run="other")
    base = Base(two.timeline, two.step, two.attempt, RUN)
    other = save(store, make(store, tiny_state(2), step=1, run="other", bases=(base,)))
    save(store, make(store, {"new": b"n" * 100}, step=3, number=number))
    collector = Collector(store)
    assert collect.retain(store, RUN, Keep(last=2), collector=collector) is not None
    collect.collect(store, [other.of("other")])
    for _ in range(3):
        collect.retain(store, RUN, Keep(last=1), collector=collector)
        collect.collect(store, (), collector=collector)
    assert not list(store.list(names.packs(one.attempt)))
    assert not list(store.list(names.packs(two.attempt)))
