"""A collector that has collected before reads only changed objects, and deletes nothing that live attempts need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Commit, Decision, encode, read
from headrace.checkpoint.repository import collect, pack_users, retention, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Collector
from headrace.checkpoint.repository.inventory import Inventory, Reader, SeenAttempt
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Wrapped, begin, load, make, save, tiny_state


class Counting(Wrapped):
    """Counts reads, listings and calls of `stat` by operation and key."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen = Counter[tuple[str, str]]()

    def get(self, key: str, *, max_bytes: int = 0) -> bytes:
        self.seen["get", key] += 1
        return super().get(key, max_bytes=max_bytes)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.seen["list", prefix] += 1
        return super().list(prefix)

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        self.seen["folders", prefix] += 1
        return super().list_folders(prefix, after=after)

    def stat(self, key: str) -> ObjectInfo:
        self.seen["stat", key] += 1
        return super().stat(key)


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    with open_store(str(tmp_path / "ck")) as store:
        yield Counting(store)


def saved(store: Store, steps: int, *, frozen: int = 0) -> list[Base]:
    number, found = begin(store), list[Base]()
    for step in range(1, steps + 1):
        state = tiny_state(step, frozen)
        found.append(save(store, make(store, state, step=step, number=number, bases=tuple(found[-1:]))))
    return found


def test_a_committed_step_is_read_at_the_first_look_only(counting: Counting) -> None:
    steps = saved(counting, 4)
    reader = Reader(counting)
    first = reader.look()
    counting.seen.clear()
    again = reader.look()
    assert again.commits == first.commits
    assert {each.attempt for each in again.attempts.values()} == {base.attempt for base in steps}
    below = names.timeline_steps(RUN, 1)
    assert [(op, key) for op, key in counting.seen if key.startswith(below)] == [("folders", below)]


def test_a_new_step_and_a_changed_step_are_read_at_the_next_look(counting: Counting) -> None:
    steps = saved(counting, 3)
    reader = Reader(counting)
    reader.look()
    new = save(counting, make(counting, tiny_state(9), step=9, bases=(steps[-1],)))
    reader.changed([steps[0].of(RUN)])
    counting.seen.clear()
    seen = reader.look()
    assert new.of(RUN) in seen.commits
    read_again = {key for op, key in counting.seen if op == "get" and key.endswith("COMMIT")}
    assert read_again == {names.commit(RUN, 1, 1), names.commit(RUN, 1, 9)}


def test_the_objects_of_a_step_whose_tombstone_is_new_stay_until_the_next_look(counting: Counting) -> None:
    """An attempt that references the step may have been listed before the tombstone was written."""
    one, *_ = saved(counting, 3)
    reader, users = Reader(counting), pack_users.PackUsers(counting)
    reader.look()
    counting.put(names.commit(RUN, 1, 1), encode(Commit(step=1, attempt=one.attempt, tombstone=True, committed=1.0)))
    reader.changed([one.of(RUN)])
    new = reader.look()
    assert new.new_tombstones == {one.of(RUN)}
    assert not retention.garbage(new, users, 2.0)[0]
    known = reader.look()
    assert not known.new_tombstones
    deleted = {key for key, _ in retention.garbage(known, users, 2.0)[0]}
    assert names.manifest(RUN, 1, 1, one.attempt, 0) in deleted


def test_retention_after_a_commit_reads_only_the_commits_of_steps_that_stay(counting: Counting) -> None:
    steps = saved(counting, 6)
    collector = Collector(counting, collect.AT_ONCE)
    assert collect.retain(counting, RUN, Keep(last=5), collector=collector) is not None
    steps.append(save(counting, make(counting, tiny_state(7), step=7, bases=(steps[-1],))))
    counting.seen.clear()
    done = collect.retain(counting, RUN, Keep(last=5), collector=collector)
    assert done is not None
    assert [step.step for step in done.tombstones] == [2]
    staying = tuple(names.step(RUN, 1, base.step) for base in steps[2:-1])
    read_of_them = {key: count for (_, key), count in counting.seen.items() if key.startswith(staying)}
    assert read_of_them == {
        names.commit(RUN, 1, base.step): 1 for base in steps[2:-1]
    }  # no other collection removed them
    assert not [key for op, key in counting.seen if key.startswith(tuple(names.packs(b.attempt) for b in steps[2:-1]))]
    for step, base in enumerate(steps[2:], 3):
        assert load(counting, base) == tiny_state(step)


def test_packs_of_a_removed_step_are_deleted_when_the_last_step_that_needs_them_is_removed(counting: Counting) -> None:
    steps = saved(counting, 4, frozen=3)
    collector = Collector(counting)
    first_packs = names.packs(steps[0].attempt)
    for last in (3, 2, 1):
        assert collect.retain(counting, RUN, Keep(last=last), collector=collector) is not None
        assert list(counting.list(first_packs))
    number = begin(counting)
    save(counting, make(counting, {"other": b"x" * 100}, step=9, number=number))
    assert collect.collect(counting, [steps[3].of(RUN)], collector=collector).tombstones
    assert not list(counting.list(first_packs))


def test_a_pack_that_the_live_step_does_not_name_is_deleted_once(counting: Counting) -> None:
    """A replaced worker left the pack."""
    one, _ = saved(counting, 2)
    left = names.pack(one.attempt, names.pack_name(0, "ffffffff", 0))
    counting.put(left, b"left")
    collector = Collector(counting)
    assert left in {key for key, _ in collect.collect(counting, (), collector=collector).objects}
    assert not counting.exists(left)
    assert not collect.collect(counting, (), collector=collector).objects
    assert load(counting, one) == tiny_state(1)


def test_an_attempt_that_was_not_decided_at_the_last_look_is_read_again(counting: Counting) -> None:
    """It had written only some of its manifests. The packs that the others name must count as needed, too."""
    users = pack_users.PackUsers(counting)
    base = save(counting, make(counting, tiny_state(1), step=1, number=begin(counting)))
    later = save(counting, make(counting, tiny_state(1), step=2, bases=(base,)))
    found = read(counting, names.decision(RUN, 1, 2, later.attempt), Decision)
    in_progress = SeenAttempt(later.of(RUN), later.attempt)
    needed = needed_after_look(users, [in_progress], base.attempt)
    assert needed == set()
    decided = SeenAttempt(later.of(RUN), later.attempt)
    decided.set_decision(found)
    packs = {info.key for info in counting.list(names.packs(base.attempt))}
    assert needed_after_look(users, [decided], base.attempt) == packs != set()


def test_all_packs_stay_while_a_document_of_a_live_attempt_is_missing(counting: Counting) -> None:
    base = save(counting, make(counting, tiny_state(1), step=1, number=begin(counting)))
    later = save(counting, make(counting, tiny_state(1), step=2, bases=(base,)))
    attempt = SeenAttempt(later.of(RUN), later.attempt, documents=2)
    users = pack_users.PackUsers(counting)
    assert needed_after_look(users, [attempt], base.attempt, "packs/unknown") == {"packs/unknown"}


def needed_after_look(users: pack_users.PackUsers, live: list[SeenAttempt], attempt: str, *more: str) -> set[str]:
    seen = Inventory(attempts={each.attempt: each for each in live})
    packs = {info.key for of, found in users.look(seen, live) for info in found if of == attempt}
    return users.needed(attempt, more or packs)


def test_a_run_of_many_steps_is_searched_for_its_latest_step_with_few_requests(counting: Counting) -> None:
    for steps in (3, 30):
        number = timeline.open_timeline(counting, RUN, None) if steps == 30 else begin(counting)
        for step in range(steps):
            latest = save(counting, make(counting, tiny_state(step), step=step, number=number))
        counting.seen.clear()
        assert repository.find(counting, RUN, "latest") == latest
        assert sum(counting.seen.values()) <= 8


@pytest.mark.parametrize("stored", [b"", b"{}", encode(Commit(step=7, attempt="x", committed=0.0)), None])
def test_the_latest_step_is_found_with_any_content_of_newest_json(counting: Counting, stored: bytes | None) -> None:
    steps = saved(counting, 3)
    if stored is None:
        counting.delete_many([names.newest(RUN, 1)])
    else:
        counting.put(names.newest(RUN, 1), stored)
    assert repository.find(counting, RUN, "latest") == steps[-1]
    timeline.record_newest(counting, RUN, 1, 1)  # a late request of an earlier writer
    assert repository.find(counting, RUN, "latest") == steps[-1]
    timeline.record_newest(counting, RUN, 1, 99)
    assert repository.find(counting, RUN, "latest") == steps[-1]


def test_the_step_of_an_attempt_is_found_by_bisection(counting: Counting) -> None:
    steps = saved(counting, 20)
    counting.seen.clear()
    found = repository.step_of_attempt(counting, RUN, steps[13].attempt)
    assert found is not None
    assert (found.timeline, found.step) == (1, 14)
    assert sum(counting.seen.values()) <= 2 + 5
    assert repository.step_of_attempt(counting, RUN, names.new_id()) is None
