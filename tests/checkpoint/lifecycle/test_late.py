"""What savers and collectors overwrite or delete, where an earlier request is applied last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.format import names, ulid
from checkpoint.format.documents import Base, StepOfRun
from checkpoint.lifecycle.collect import collect
from checkpoint.repository import check, commit
from checkpoint.repository.lease import LeaseKeeper
from dataio.core.errors import TransientError
from dataio.store.open import open_store
from dataio.testing.late import Late
from tests.checkpoint.lifecycle.stepping import MemoryStore
from tests.checkpoint.making import RUN, begin, latest, load, make, save, tiny_state

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
    with LeaseKeeper(store, attempt, RUN, 1, 2, bases, holder=holder):
        pass


def test_a_base_is_spared_while_any_lease_of_the_attempt_lives() -> None:
    """The saver's is over, and that of a process that finishes from a tier lives: the attempt is not fenced, so the saver may
    renew and commit."""
    store = MemoryStore()
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    attempt = ulid.new()
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
    with LeaseKeeper(late, attempt := ulid.new(), RUN, 1, 4, [base], life=0.2) as lease:
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


KINDS = {
    "repo.json": "repo.json",
    "timelines": "/timelines/",
    "packs": "packs/",
    "manifests": ".manifest",
    "decisions": "/fate",
    "COMMITs and tombstones": "/COMMIT",
    "leases": "leases/",
    "records of collectors": "gc/",
    "everything": "",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_a_life_may_be_applied_once_more_at_its_end(late: Late, kind: str) -> None:
    """Saves, a removal, deletes; then those of one kind from the last to the first, so that the earliest body is the last."""
    steps = three_steps(late)
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
