"""The commit protocol: decisions as pure values, then real races, takeovers, aborts and late ranks on real stores."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.format.documents import (
    Base,
    Commit,
    Decision,
    Lease,
    PendingDelete,
    ProcessName,
    StepOfRun,
    Timeline,
    encode,
    read,
)
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect, to_delete
from headrace.checkpoint.repository.commit import (
    Attempt,
    Committed,
    Stop,
    View,
    Wait,
    WriteCommit,
    WriteDecision,
    decide,
)
from headrace.checkpoint.repository.lease import LeaseKeeper, LeaseTimes
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.dataio.core.clock import SYSTEM_CLOCK
from headrace.dataio.core.errors import (
    ConflictError,
    DeadlineError,
    HeadraceError,
    MismatchError,
    NotFoundError,
    TransientError,
    UnsupportedError,
)
from headrace.dataio.core.limits import SMALL_OBJECT_BYTES
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.testing.system import ManualClock
from tests.support.checkpoint_states import (
    RUN,
    Made,
    Wrapped,
    begin,
    latest,
    load,
    make,
    manifest_of,
    save,
    tiny_state,
)

ME, OTHER = "01HZZZZZZZ0000000000000000", "01HZZZZZZZ0000000000000001"
TWO = Attempt("r", 1, 5, ME, 2)
NEWER = Timeline(run="r", timeline=2, parent=None, created=0.0, process=ProcessName("other-host", 7))


def test_every_situation_has_the_one_right_next_action() -> None:
    commits = [None, Commit(step=5, attempt=ME), Commit(step=5, attempt=OTHER), Commit(step=5, tombstone=True)]
    decisions = [None, Decision(attempt=ME, outcome="commit"), Decision(attempt=ME, outcome="abort")]
    ranks = [frozenset[int](), frozenset({1}), frozenset({0, 1})]
    for c, f, r, newer, alive in itertools.product(commits, decisions, ranks, [None, NEWER], [True, False]):
        action = decide(TWO, View(r, f, c, newer, alive))
        if c is not None:
            expected: type = Committed if c.attempt == ME else Stop
        elif f is not None:
            expected = WriteCommit if f.outcome == "commit" else Stop
        elif newer is not None or not alive:
            expected = Stop
        else:
            expected = WriteDecision if len(r) == 2 else Wait
        assert type(action) is expected, (c, f, r, newer, alive)


@pytest.mark.parametrize(
    ("view", "error", "says"),
    [
        (View(commit=Commit(step=5, attempt=OTHER)), ConflictError, f"attempt {OTHER} won"),
        (View(commit=Commit(step=5, tombstone=True)), ConflictError, "removed by retention"),
        (
            View(decision=Decision(attempt=ME, outcome="abort", reason="collected")),
            TransientError,
            "aborted: collected",
        ),
        (View(newer=NEWER), ConflictError, "timeline 2, opened by process 7 on other-host"),
        (View(lease_alive=False), TransientError, "could not renew its lease"),
    ],
)
def test_a_stop_says_who_won_or_what_happened(view: View, error: type[HeadraceError], says: str) -> None:
    action = decide(TWO, view)
    assert isinstance(action, Stop)
    assert isinstance(action.error, error)
    assert says in str(action.error)


def both(*work: Callable[[], object]) -> list[Any]:
    """Run all at once; what each returned or raised."""
    results: list[Any] = [None] * len(work)

    def one(i: int) -> None:
        try:
            results[i] = work[i]()
        except HeadraceError as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_of_two_savers_of_one_step_one_wins_and_the_other_learns_who(store: Store) -> None:
    number = begin(store)
    made = [make(store, tiny_state(seed), step=3, number=number) for seed in (1, 2)]
    results = both(*(lambda m=m: save(store, m) for m in made))
    winners = [r for r in results if isinstance(r, Base)]
    losers = [r for r in results if isinstance(r, ConflictError)]
    assert len(winners) == len(losers) == 1
    assert f"attempt {winners[0].attempt} won" in str(losers[0])
    seed = 1 if winners[0].attempt == made[0].plan.attempt else 2
    assert load(store, winners[0]) == tiny_state(seed)


def test_a_step_that_is_there_already_is_refused_before_anything_is_uploaded(store: Store) -> None:
    number = begin(store)
    save(store, make(store, tiny_state(1), step=3, number=number))
    packs = [info.key for info in store.list(names.PACKS)]
    with pytest.raises(ConflictError, match="won"):
        save(store, make(store, tiny_state(2), step=3, number=number))
    assert [info.key for info in store.list(names.PACKS)] == packs


def test_a_trainer_that_was_replaced_stops_and_says_by_whom(store: Store) -> None:
    first = begin(store)
    kept = save(store, make(store, tiny_state(1), step=1, number=first))
    begin(store, kept)
    with pytest.raises(ConflictError, match=r"timeline 1 was taken over by timeline 2, opened by process \d+ on"):
        save(store, make(store, tiny_state(2), step=2, number=first))
    assert latest(store) == kept


class TakenOver(Wrapped):
    """Another trainer opens its timeline just when this one has written its manifest."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = self.inner.put_if_absent(key, data)
        if key.endswith(".manifest"):
            begin(self.inner)
        return won


def test_a_takeover_during_the_upload_is_seen_before_the_fate(store: Store) -> None:
    number = begin(store)
    made = make(store, tiny_state(1), step=1, number=number)
    with pytest.raises(ConflictError, match="taken over by timeline 2"):
        save(TakenOver(store), made)
    assert not store.exists(names.decision(RUN, number, 1, made.plan.attempt))


def test_a_saver_that_wakes_after_a_collector_fenced_it_fails_cleanly(store: Store) -> None:
    number = begin(store)
    made = make(store, tiny_state(1), step=1, number=number)

    class Fencing(Wrapped):
        def put_if_absent(self, key: str, data: Buffer) -> bool:
            won = self.inner.put_if_absent(key, data)
            if key.endswith(".manifest"):
                decision = Decision(attempt=made.plan.attempt, outcome="abort", reason="its lease was over")
                assert self.inner.put_if_absent(names.decision(RUN, number, 1, made.plan.attempt), encode(decision))
            return won

    with pytest.raises(TransientError, match="was aborted: its lease was over"):
        save(Fencing(store), made)
    assert latest(store) is None


def test_a_tombstone_is_not_a_step_and_never_becomes_one_again(store: Store) -> None:
    number = begin(store)
    first = save(store, make(store, tiny_state(1), step=1, number=number))
    gone = save(store, make(store, tiny_state(2), step=2, number=number))
    store.put(names.commit(RUN, number, 2), encode(Commit(step=2, tombstone=True)))
    assert latest(store) == first
    with pytest.raises(NotFoundError, match="no step 2"):
        repository.find(store, RUN, 2)
    assert commit.recognise(store, Attempt(RUN, number, 2, gone.attempt, 1)) is not None
    assert latest(store) == first
    with pytest.raises(ConflictError, match="removed by retention"):
        save(store, make(store, tiny_state(3), step=2, number=number))


def test_a_complete_attempt_is_finished_by_whoever_looks(store: Store) -> None:
    number = begin(store)
    base = save(store, make(store, tiny_state(1), step=1, number=number))
    store.delete_many([names.commit(RUN, number, 1)])
    assert latest(store) == base
    assert store.exists(names.commit(RUN, number, 1))


class LetGo(Wrapped):
    """A policy lets the step go as soon as it is committed, since a newer one is there."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = self.inner.put_if_absent(key, data)
        if key.endswith("/000000000001/COMMIT"):
            save(self.inner, make(self.inner, tiny_state(2), step=2))
            assert [step.step for step in collect(self.inner, to_delete(self.inner, RUN, Keep(last=1))).tombstones] == [
                1
            ]
        return won


class Again(Wrapped):
    """A store in which an earlier worker of every plan has been already, as far as its manifest."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won, at = self.inner.put_if_absent(key, data), names.parse_step_key(key)
        return won and not (at is not None and at.kind == "manifest")


def test_a_save_that_was_committed_says_so_though_retention_has_let_it_go_already(store: Store) -> None:
    made = make(store, tiny_state(1), step=1, number=begin(store))
    result = commit_staged(made.arena, made.plan, lambda _: None, store=LetGo(Again(store)))
    assert result["attempt"] == made.plan.attempt
    assert [base.step for base in repository.visible(store, RUN)] == [2]


def two_ranks(store: Store, number: int, step: int, **more: Any) -> list[Made]:
    """One replicated tensor cut in two halves, and one local tensor each."""
    boxes = [Box((400,), (0,), (150,)), Box((400,), (150,), (250,))]
    first = make(store, {}, step=step).plan.attempt
    return [
        make(
            store,
            {"shared": bytes([rank]) * boxes[rank].local[0], "mine": bytes([10 + rank]) * 7},
            step=step,
            number=number,
            attempt=first,
            rank=rank,
            world_size=2,
            boxes={"shared": boxes[rank]},
            values=f"rank {rank}",
            **more,
        )
        for rank in range(2)
    ]


class GoneOnceCommitted(Wrapped):
    """A store that does not answer for manifests any more when there is a COMMIT. `read`: how many it was asked for."""

    fired, read = False, 0

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        at = names.parse_step_key(key)
        self.read += at is not None and at.kind == "manifest"
        if at is not None and at.kind == "manifest" and self.inner.exists(names.commit(RUN, at.timeline, at.step)):
            self.fired = True
            raise TransientError("the store went away")
        return self.inner.get(key, max_bytes=max_bytes)


def test_a_save_that_was_committed_says_so_though_the_store_went_away_just_then(store: Store) -> None:
    away = GoneOnceCommitted(Again(store))
    made = make(store, tiny_state(1), step=1, number=begin(store))
    result = commit_staged(made.arena, made.plan, lambda _: None, store=away)
    assert away.fired
    assert (result["step"], result["attempt"]) == (1, made.plan.attempt)
    assert latest(store) == Base(made.plan.timeline, 1, made.plan.attempt)


def test_a_manifest_that_stands_is_not_read_again_for_what_it_says(store: Store) -> None:
    """It may have millions of chunks, and the writer of the decision has already read it once."""
    away = GoneOnceCommitted(store)
    made = make(store, tiny_state(1), step=1, number=begin(store))
    result = commit_staged(made.arena, made.plan, lambda _: None, store=away)
    assert (away.fired, away.read) == (False, 1)
    assert (result["step"], result["rank"], result["attempt"]) == (1, 0, made.plan.attempt)


def test_two_ranks_commit_one_step_whoever_comes_last(store: Store) -> None:
    number = begin(store)
    made = two_ranks(store, number, 4)
    results = both(*(lambda m=m: save(store, m) for m in made))
    assert results[0] == results[1] == latest(store)
    base = latest(store)
    assert base is not None
    assert load(store, base, 1)["mine"] == bytes([11]) * 7
    assert load(store, base, 5)["mine"] == bytes([10]) * 7  # a rank it was not saved with gets rank 0's
    assert manifest_of(store, base, 1).rank == 1
    assert not list(store.list(names.LEASES))


class Reads(Wrapped):
    """Which ranks' manifests of step 1 are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.ranks: list[int] = []

    def get(self, key: str, *, max_bytes: int = SMALL_OBJECT_BYTES) -> bytes:
        at = names.parse_step_key(key)
        if at is not None and (at.kind, at.step) == ("manifest", 1):
            self.ranks.append(at.rank)
        return self.inner.get(key, max_bytes=max_bytes)


@pytest.mark.parametrize(("divided", "read"), [(b"alike", [[0], [1]]), (b"otherwise", [[0, 0, 1], [0, 1, 1]])])
def test_of_a_base_that_was_divided_alike_a_rank_reads_its_own_manifest_alone(
    store: Store, divided: bytes, read: list[list[int]]
) -> None:
    number = begin(store)
    both(*(lambda m=m: save(store, m) for m in two_ranks(store, number, 1, replicas=b"alike")))
    base = latest(store)
    assert base is not None
    reads = [Reads(store), Reads(store)]
    again = two_ranks(store, number, 2, replicas=divided, bases=(base,))
    results = both(
        *(
            lambda m=m, s=s: commit_staged(m.arena, m.plan, lambda _: None, store=s)
            for m, s in zip(again, reads, strict=True)
        )
    )
    assert [sorted(each.ranks) for each in reads] == read  # several are read at once
    assert [result["bytes_written"] for result in results] == [0, 0]


class Meanwhile(ManualClock):
    """While somebody sleeps, the next of `others` happens."""

    def __init__(self, *others: Callable[[], object]) -> None:
        super().__init__()
        self.others = list(others)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.others:
            self.others.pop(0)()


class Fateless(Wrapped):
    """A store whose clients die before they write a decision."""

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        if key.endswith("/fate"):
            raise TransientError("it died")
        return self.inner.put_if_absent(key, data)


def dies_before_the_fate(store: Store, made: Made) -> None:
    with pytest.raises(TransientError, match="it died"):
        save(Fateless(store), made)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waited_leaves_the_manifests_to_the_one_that_came_last(store: Store, rank: int) -> None:
    """Of 1,024 ranks each would read 1,024 manifests."""
    made = two_ranks(store, begin(store), 4, lease_seconds=3600.0)
    own, other = made[rank], made[1 - rank]
    counting = GoneOnceCommitted(store)
    clock = Meanwhile(lambda: dies_before_the_fate(store, other), lambda: None, lambda: save(store, other))
    result = commit_staged(own.arena, own.plan, lambda _: None, store=counting, clock=clock)
    assert not clock.others
    assert result["attempt"] == own.plan.attempt
    assert (counting.read, counting.fired) == (0, False)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("timeout", [30.0, 1.0])
def test_ranks_that_waited_take_over_one_after_another_if_the_last_one_dies(
    store: Store, rank: int, timeout: float
) -> None:
    made = two_ranks(store, begin(store), 4, lease_seconds=3600.0, commit_timeout=timeout)
    own, other = made[rank], made[1 - rank]
    clock = Meanwhile(lambda: dies_before_the_fate(store, other))
    assert save(store, own, clock=clock) == latest(store)
    assert clock.now - 1000.0 == pytest.approx(min(timeout, 2.0 * (1 + rank) + clock.pauses[0]), abs=0.01)


def test_ranks_with_different_modules_are_never_committed_as_one_step(store: Store) -> None:
    number = begin(store)
    one = two_ranks(store, number, 4)[0]
    other = make(
        store, {"x": b"1"}, step=4, number=number, attempt=one.plan.attempt, rank=1, world_size=2, replicas=b"other"
    )
    results = both(lambda: save(store, one), lambda: save(store, other))
    assert all(isinstance(r, MismatchError) for r in results)
    assert "rank 1 does not hold the same modules" in str(results[0])
    assert latest(store) is None


def test_a_rank_that_waits_in_vain_names_the_missing_one_and_keeps_its_deadline(store: Store) -> None:
    clock = ManualClock()
    made = two_ranks(store, begin(store), 4, commit_timeout=30.0, lease_seconds=3600.0)
    with pytest.raises(DeadlineError, match="no manifest of rank 1 within 30 s"):
        save(store, made[0], clock=clock)
    assert 1029 < clock.now < 1032
    assert latest(store) is None
    assert save(store, made[1]) == latest(store)  # all are there now, so the late one completes it


def test_a_repository_of_a_newer_format_is_refused(store: Store) -> None:
    begin(store)
    store.put(names.REPO, b'{"version": 2, "anything": true}')
    with pytest.raises(UnsupportedError, match=r"repo.json has format version 2; this Headrace reads version 1"):
        repository.read_repo(store)


def test_a_step_that_a_collector_condemned_is_no_base(store: Store) -> None:
    number = begin(store)
    first = save(store, make(store, tiny_state(1), step=1, number=number))
    store.put("gc/1.json", encode(PendingDelete(steps=(StepOfRun(RUN, number, 1),))))
    second = save(store, make(store, tiny_state(1), step=2, number=number, bases=(first,)))
    manifest = manifest_of(store, second)
    assert manifest.bases == ()
    assert manifest.bytes_deduplicated == 0


class SlowManifest(Wrapped):
    """Time passes while the manifest is written, and leases cannot be renewed meanwhile."""

    def __init__(self, inner: Store, clock: ManualClock) -> None:
        super().__init__(inner)
        self.clock, self.late = clock, False

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith(names.LEASES) and self.late:
            raise TransientError("the store does not answer")
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = self.inner.put_if_absent(key, data)
        if key.endswith(".manifest"):
            self.late = True
            self.clock.now += 301
        return won


def test_a_saver_that_could_not_renew_its_lease_stops_before_the_fate(store: Store) -> None:
    clock, number = ManualClock(), begin(store)
    made = make(store, tiny_state(1), step=1, number=number, lease_seconds=300.0)
    with pytest.raises(TransientError, match="could not renew its lease in time and stopped before its decision"):
        save(SlowManifest(store, clock), made, clock=clock)
    assert not store.exists(names.decision(RUN, number, 1, made.plan.attempt))
    assert latest(store) is None


def test_a_lease_is_due_at_a_third_of_its_life_and_trusted_for_one() -> None:
    times = LeaseTimes(30.0)
    assert times.due(0.0)
    assert not times.alive(0.0)
    times.renewed(0.0)
    assert [times.due(t) for t in (9.9, 10.0)] == [False, True]
    assert [times.alive(t) for t in (29.9, 30.0)] == [True, False]
    assert times.wait(4.0) == 6.0
    assert times.wait(29.0) == 0.3  # overdue: try again soon, but not in a tight loop


def test_a_lease_names_its_bases_is_renewed_and_deleted(store: Store) -> None:
    clock = ManualClock()
    keeper = LeaseKeeper(store, ME, run=RUN, timeline=1, step=5, bases=[Base(1, 4, OTHER)], life=30.0, clock=clock)
    with keeper:
        first = read(store, names.lease(ME), Lease)
        assert first.bases == (Base(1, 4, OTHER),)
        assert first.until == clock.time() + 30
        clock.now += 11
        keeper.tick()
        assert read(store, names.lease(ME), Lease).until == clock.time() + 30
        keeper.release()
    assert not list(store.list(names.LEASES))


def test_a_keeper_that_is_forgotten_renews_no_more_and_leaves_no_thread(store: Store) -> None:
    LeaseKeeper(store, ME, run=RUN, timeline=1, step=5, bases=[], life=300.0, clock=SYSTEM_CLOCK).__enter__()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == f"headrace-lease-{ME}":
            thread.join(60)
            assert not thread.is_alive()
    assert list(store.list(names.LEASES))  # it runs out by itself


def test_a_lease_renews_itself_while_its_holder_works(store: Store) -> None:
    with LeaseKeeper(store, ME, run=RUN, timeline=1, step=5, bases=[], life=1.5, clock=SYSTEM_CLOCK):
        first = read(store, names.lease(ME), Lease).until
        deadline = SYSTEM_CLOCK.monotonic() + 20
        while read(store, names.lease(ME), Lease).until == first:
            assert SYSTEM_CLOCK.monotonic() < deadline
            SYSTEM_CLOCK.sleep(0.05)
