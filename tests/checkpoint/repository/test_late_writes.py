"""What savers and collectors overwrite or delete, where an earlier request is applied last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, StepOfRun
from headrace.checkpoint.repository import check, commit, tag_records, tags
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect, retain
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import NotFoundError, TransientError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.faulty_stores import Late
from tests.support.checkpoint_states import RUN, begin, latest, load, make, save, tiny_state
from tests.support.stepping import MemoryStore, StoreClock

FIRST = StepOfRun(RUN, 1, 1)


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Late]:
    with open_store(tmp_path / "store") as store:
        yield Late(store)


def three_steps(store: Late) -> list[Base]:
    """The second leans on the first, the third on the second."""
    found: list[Base] = []
    number = begin(store)
    for step in (1, 2, 3):
        found.append(save(store, make(store, tiny_state(step), step=step, number=number, bases=tuple(found[-1:]))))
    return found


def leased(store: MemoryStore, attempt: str, *bases: Base, holder: str = "") -> None:
    """One renewal of a lease, whose holder then stops for a while."""
    with LeaseKeeper(store, attempt, run=RUN, timeline=1, step=2, bases=bases, holder=holder):
        pass


def test_a_base_is_spared_while_any_lease_of_the_attempt_lives() -> None:
    """The saver's is over, and that of a process that finishes from a tier lives: the attempt is not fenced, so the saver may
    renew and commit."""
    store = MemoryStore()
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    attempt = names.new_id()
    leased(store, attempt, base)
    store.now += 1000
    leased(store, attempt, holder="0123abcd")
    done = collect(store, [FIRST])
    assert done.spared == (FIRST,)
    assert done.aborted == ()
    store.now += 1000
    done = collect(store, [FIRST])
    assert done.tombstones == (FIRST,)
    assert done.aborted == (attempt,)
    assert {names.lease(attempt), names.lease(attempt, "0123abcd")} <= {key for key, _ in done.objects}


def test_a_lease_whose_earlier_renewal_is_applied_last_protects_for_one_life_more(late: Late) -> None:
    base = three_steps(late)[0]
    with LeaseKeeper(late, attempt := names.new_id(), run=RUN, timeline=1, step=4, bases=[base], life=0.2) as lease:
        lease.release()
    renewal = next(request for request in late.writes if request.key == names.lease(attempt))
    late.land(renewal)
    assert collect(late, [FIRST]).spared == (FIRST,)


def test_a_tombstone_that_is_applied_late_removes_nothing_more(late: Late) -> None:
    """The first collector's request timed out, the second removed the step and its objects."""
    steps = three_steps(late)
    late.hold("/COMMIT")
    with pytest.raises(TransientError):
        collect(late, [FIRST])
    assert not late.holding
    tombstone = late.writes[-1]
    assert collect(late, []).tombstones == (FIRST,)
    late.land(tombstone)
    found = commit.find_commit(late, names.commit(RUN, 1, 1))
    assert found is not None
    assert found.tombstone
    assert [load(late, step) for step in steps[1:]] == [tiny_state(2), tiny_state(3)]
    collect(late, [])
    assert check.check(late).clean


def steps_of(store: Store) -> list[int]:
    return [base.step for base in repository.visible(store, RUN)]


def test_a_tag_is_not_moved_back_by_an_earlier_move_that_is_applied_last(late: Late) -> None:
    """The first move timed out and was tried again; once moved on, its steps are let go."""
    three_steps(late)
    tags.tag(late, "best", RUN, 1)
    tags.tag(late, "best", RUN, 2, move=True)
    tags.tag(late, "best", RUN, 3, move=True)
    records = [request for request in late.writes if request.key.startswith("tags/")]
    for request in reversed(records):
        late.land(request)
        assert tags.find(late, "best").step == 3
    for _ in range(2):
        retain(late, RUN, Keep(last=1))
        assert repository.find(late, RUN, "tag:best") == latest(late)


def test_a_tag_that_was_removed_does_not_come_back(late: Late) -> None:
    steps = three_steps(late)
    tags.tag(late, "best", RUN, 1)
    tags.tag(late, "best", RUN, 2, move=True)
    tags.untag(late, "best")
    records = [request for request in late.writes if request.key.startswith("tags/")]
    for request in reversed(records):
        late.land(request)
        assert not list(tags.all_tags(late))
    with pytest.raises(NotFoundError, match="no tag best"):
        tags.find(late, "best")
    with pytest.raises(NotFoundError, match="no tag best"):
        tags.untag(late, "best")
    retain(late, RUN, Keep(last=1))
    assert steps_of(late) == [3]
    assert tags.tag(late, "best", RUN, 3).base == steps[2]
    for request in reversed(records):
        late.land(request)
        assert tags.find(late, "best").step == 3


def test_a_move_that_failed_and_is_applied_late_loses_neither_the_tag_nor_its_step(late: Late) -> None:
    """The step that it would have named was let go meanwhile."""
    steps = three_steps(late)
    tags.tag(late, "best", RUN, 1)
    late.hold("tags/")
    with pytest.raises(TransientError):
        tags.tag(late, "best", RUN, 2, move=True)
    assert not late.holding
    move = next(request for request in reversed(late.writes) if request.key.startswith("tags/"))
    retain(late, RUN, Keep(last=1))
    assert steps_of(late) == [3, 1]
    late.land(move)
    assert repository.find(late, RUN, "tag:best") == steps[0]
    retain(late, RUN, Keep(last=1))
    assert steps_of(late) == [3, 1]
    assert load(late, steps[0]) == tiny_state(1)


def test_a_move_whose_lease_ran_out_leaves_the_tag_its_step(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot know whether its own step is kept, so both are until the next move."""
    three_steps(late)
    tags.tag(late, "best", RUN, 1)
    with monkeypatch.context() as slow, pytest.raises(TransientError, match="could not renew its lease"):
        slow.setattr(LeaseKeeper, "alive", lambda _: False)
        tags.tag(late, "best", RUN, 2, move=True)
    retain(late, RUN, Keep(last=1))
    assert steps_of(late) == [3, 2, 1]
    tags.tag(late, "best", RUN, 3, move=True)
    retain(late, RUN, Keep(last=1))
    assert steps_of(late) == [3]


def test_tags_of_version_0_1_are_the_oldest_records(late: Late) -> None:
    three_steps(late)
    tags.tag(late, "best", RUN, 1)
    old = json.loads(late.get("tags/best.json"))
    assert old["version"] == 1
    del old["removed"], old["digest"]
    late.delete_many(["tags/best.json"])
    late.put("tags/best.json", json.dumps(old).encode())
    assert tags.find(late, "best").step == 1
    assert [tag.name for tag in tags.all_tags(late)] == ["best"]
    tags.tag(late, "best", RUN, 2, move=True)
    assert [info.key for info in late.list("tags/")] == ["tags/_best.000000001.json"]
    assert json.loads(late.get("tags/_best.000000001.json"))["version"] == 2  # an earlier collector stops at it
    late.put("tags/best.json", json.dumps(old).encode())
    assert tags.find(late, "best").step == 2


def test_records_of_tags_that_say_nothing_any_more_go_in_time() -> None:
    store = MemoryStore()
    clock = StoreClock(store)
    number = begin(store)
    for step in (1, 2):
        save(store, make(store, tiny_state(step), step=step, number=number))
    tags.tag(store, "best", RUN, 1, clock=clock)
    first = store.objects["tags/best.json"]
    tags.tag(store, "best", RUN, 2, move=True, clock=clock)
    store.objects["tags/best.json"] = first  # applied late
    collect(store, [], clock)
    assert "tags/best.json" in store.objects
    store.now += plans.RECORD_SECONDS + 1
    collect(store, [], clock)
    assert [key for key in store.objects if key.startswith("tags/")] == ["tags/_best.000000001.json"]
    tags.untag(store, "best", clock)
    assert [key for key in store.objects if key.startswith("tags/")] == ["tags/_best.000000002.json"]
    store.objects["tags/best.json"] = first
    store.now += plans.TOMBSTONE_SECONDS + 1
    for left in (["tags/_best.000000002.json"], []):
        collect(store, [], clock)
        assert [key for key in store.objects if key.startswith("tags/")] == left


def test_a_tag_may_be_moved_so_often_and_no_more(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    three_steps(late)
    monkeypatch.setattr(tag_records, "MAX_NUMBER", 2)
    tags.tag(late, "best", RUN, 1)
    tags.tag(late, "best", RUN, 2, move=True)
    with pytest.raises(UsageError, match="choose another name"):
        tags.tag(late, "best", RUN, 3, move=True)
    assert tags.find(late, "best").step == 2


def test_two_that_move_a_tag_at_once_both_succeed_and_others_that_never_stop_are_an_error(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_steps(late)
    tags.tag(late, "best", RUN, 1)
    listed, times = tag_records.listed, [1]

    def overtaken(store: Store, name: str = "") -> object:
        found = listed(store, name)
        if times[0] > 0 and found:
            times[0] -= 1
            number = found["best"][0][0] + 1
            store.put_if_absent(tag_records.key_of("best", number), late.get(found["best"][0][1].key))
        return found

    monkeypatch.setattr(tag_records, "listed", overtaken)
    tags.tag(late, "best", RUN, 2, move=True)
    assert times == [0]
    assert tags.find(late, "best").step == 2
    times[0] = 1000
    with pytest.raises(TransientError, match="other processes keep moving"):
        tags.tag(late, "best", RUN, 3, move=True)


KINDS = {
    "repo.json": "repo.json",
    "timelines": "/timelines/",
    "packs": "packs/",
    "manifests": ".manifest",
    "decisions": "/fate",
    "COMMITs and tombstones": "/COMMIT",
    "leases": "leases/",
    "records of collectors": "gc/",
    "tags": "tags/",
    "everything": "",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_life_may_be_applied_once_more_at_its_end(late: Late, kind: str) -> None:
    """Saves, a removal, deletes; then those of one kind from the last to the first, so that the earliest body is the last."""
    steps = three_steps(late)
    tags.tag(late, "best", RUN, 2)
    tags.tag(late, "best", RUN, 3, move=True)
    assert collect(late, [FIRST]).tombstones == (FIRST,)
    requests = [request for request in late.writes if KINDS[kind] in request.key]
    assert requests
    for request in reversed(requests):
        late.land(request)
    assert latest(late) == steps[2]
    assert [load(late, step) for step in steps[1:]] == [tiny_state(2), tiny_state(3)]
    found = commit.find_commit(late, names.commit(RUN, 1, 1))
    assert found is not None
    assert found.tombstone
    for _ in range(2):
        collect(late, [])
    assert check.check(late).clean
    assert [load(late, step) for step in steps[1:]] == [tiny_state(2), tiny_state(3)]
    assert not list(late.list("gc/"))
    assert repository.find(late, RUN, "tag:best") == steps[2]
