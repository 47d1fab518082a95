"""Ranks that do not belong together, clocks that are wrong, and a store whose conditional writes are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import Base, Decision, encode
from headrace.checkpoint.repository import check, lease
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect, to_delete
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.clock import SYSTEM_CLOCK
from headrace.dataio.core.errors import ConflictError, CorruptionError, DeadlineError, MismatchError, UnsupportedError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.s3_server import S3Server
from headrace.dataio.testing.system import ManualClock
from tests.conftest import forget_s3fs_instances, use_s3_server
from tests.support.checkpoint_states import RUN, begin, latest, load, make, save, tiny_state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def test_ranks_of_different_worlds_are_never_one_step(store: Store) -> None:
    number = begin(store)
    one = make(store, tiny_state(1), step=1, number=number, rank=0, world_size=3, commit_timeout=0.0)
    with pytest.raises(DeadlineError, match="no manifest of rank 1, 2"):
        save(store, one, clock=ManualClock())
    for rank in (1, 2):
        other = make(
            store, {"x": b"1"}, step=1, number=number, attempt=one.plan.attempt, rank=rank, world_size=rank + 1
        )
        with pytest.raises(MismatchError, match="does not hold the same"):
            save(store, other)
    assert latest(store) is None


def test_two_processes_that_are_the_same_rank_leave_one_whole_part(store: Store) -> None:
    """The first manifest of a rank stands, and what is restored is all of one process and nothing of the other."""
    number = begin(store)
    boxes = [Box((400,), (0,), (150,)), Box((400,), (150,), (250,))]

    def part(rank: int, fill: int, attempt: str | None = None, timeout: float = 60.0) -> object:
        return make(
            store,
            {"shared": bytes([fill]) * boxes[rank].local[0], "mine": bytes([fill]) * 70_000},
            step=4,
            number=number,
            attempt=attempt,
            rank=rank,
            world_size=2,
            boxes={"shared": boxes[rank]},
            commit_timeout=timeout,
        )

    first = part(0, 1, timeout=0.0)
    for made in (first, part(0, 2, first.plan.attempt, timeout=0.0)):  # type: ignore[attr-defined]
        with pytest.raises(DeadlineError, match="no manifest of rank 1"):
            save(store, made, clock=ManualClock())  # type: ignore[arg-type]
    base = save(store, part(1, 3, first.plan.attempt))  # type: ignore[attr-defined, arg-type]
    assert load(store, base) == {"shared": bytes([1]) * 150 + bytes([3]) * 250, "mine": bytes([1]) * 70_000}
    assert check.check(store).clean


class Skewed:
    """A machine whose clock is wrong by so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic()

    def time(self) -> float:
        return SYSTEM_CLOCK.time() + self._seconds

    def sleep(self, seconds: float) -> None:
        SYSTEM_CLOCK.sleep(seconds)


@pytest.mark.parametrize("saver", [-3600.0, 3600.0])
@pytest.mark.parametrize("collector", [-3600.0, 3600.0])
def test_clocks_that_are_an_hour_off_cost_nothing(saver: float, collector: float, store: Store) -> None:
    """Leases are dated by the store; no order rests on a machine's clock."""
    number, bases = begin(store), list[Base]()
    for step in (1, 2, 3):
        clock = Skewed(saver * (-1) ** step)
        bases.append(save(store, make(store, tiny_state(step), step=step, number=number), clock=clock))
        assert latest(store) == bases[-1]
    busy = lease.LeaseKeeper(
        store, "0" * 25 + "1", run=RUN, timeline=number, step=4, bases=[bases[1]], clock=Skewed(saver)
    )
    with busy:
        done = collect(store, to_delete(store, RUN, Keep(last=1)), clock=Skewed(collector))
        assert done.aborted == ()
        assert [step.step for step in done.spared] == [2]
        busy.release()
    assert [base.step for base in repository.visible(store, RUN)] == [3, 2]
    assert load(store, bases[1]) == tiny_state(2)


@pytest.mark.s3
def test_a_store_that_ignores_preconditions_gets_no_repository(
    rclone_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3_server(rclone_server, monkeypatch)
    try:
        with open_store("s3://headrace/checkpoints") as store:
            with pytest.raises(UnsupportedError, match=r"precondition|If-None-Match|winner"):
                repository.ensure_repo(store)
            assert repository.read_repo(store) is None
    finally:
        forget_s3fs_instances()


def test_a_step_is_taken_once_whatever_the_writers_believe(store: Store) -> None:
    number = begin(store)
    save(store, make(store, tiny_state(1), step=1, number=number))
    with pytest.raises(ConflictError, match="won"):
        save(store, make(store, tiny_state(2), step=1, number=number), clock=Skewed(-3600.0))


@pytest.mark.parametrize("digest", ["zz", "é", "ab" * 31])
def test_a_fate_whose_digests_are_none_is_damage_and_is_found(digest: str, store: Store) -> None:
    base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
    decision = names.decision(RUN, base.timeline, base.step, base.attempt)
    store.put(decision, encode(Decision(attempt=base.attempt, outcome="commit", manifests=(digest,))))
    with pytest.raises(CorruptionError, match="digest"):
        load(store, base)
    assert not check.check(store).clean
