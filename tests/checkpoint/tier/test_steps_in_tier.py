"""Steps in the node's tier: kept first, read near, finished when only the tier has them; always the same bytes or an error."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Commit, StepName, encode
from headrace.checkpoint.repository import commit, timeline
from headrace.checkpoint.repository.fetch import open_step
from headrace.checkpoint.repository.retention import ORPHAN_SECONDS
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.saving.commit_worker import commit_staged, keep_staged
from headrace.checkpoint.saving.plan import Event, Released
from headrace.checkpoint.saving.progress import ProgressFile
from headrace.checkpoint.tier import restoring, saving
from headrace.dataio.core.errors import ConflictError, CorruptionError, TransientError
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.stores import TierReader
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, Made, begin, latest, load, make, tiny_state
from tests.support.local_tier import Counting, local_tier


class Unreachable(Exception):
    """For tests: the store fails where this says so."""


@pytest.fixture(params=["posix", pytest.param("s3", marks=[pytest.mark.s3, pytest.mark.soak])])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Counting]:
    url = request.getfixturevalue("s3_url") if request.param == "s3" else tmp_path / "store"
    with open_store(url) as opened:
        yield Counting(opened)


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return local_tier(tmp_path, steps=3)


def unreachable(_operation: str, _key: str) -> None:
    raise TransientError("the store is away")


def keep(store: Store, tier: LocalTier, made: Made) -> Base:
    result = commit_staged(made.arena, made.plan, lambda _: None, store=store, local_tier=tier)
    assert isinstance(result["kept"], float)
    return Base(made.plan.timeline, made.plan.step, made.plan.attempt)


def saved(remote: Store, tier: LocalTier, step: int = 1, seed: int = 1, base: Base | None = None) -> Base:
    number = max(timeline.numbers(remote, RUN), default=0) or begin(remote)
    bases = (base,) if base else ()
    return keep(remote, tier, make(remote, tiny_state(seed), step=step, number=number, bases=bases))


def packs(tier: LocalTier, source: str) -> list[str]:
    return [key for r in tier.records(source) for key in r.own if key.startswith("packs/")]


def test_a_kept_step_is_restored_without_reading_packs_or_manifests_from_the_store(
    remote: Counting, tier: LocalTier
) -> None:
    base = saved(remote, tier)
    reader = TierReader(remote, tier, saving.may_hold)
    remote.calls.clear()
    assert load(reader, base) == tiny_state(1)
    read = [key for operation, key in remote.calls if operation in ("get", "get_into")]
    assert read
    assert not any(saving.may_hold(key) for key in read)
    assert reader.bytes["store"] < 1000 < reader.bytes["tier"]


def test_a_step_that_leans_on_another_is_whole_in_the_tier(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier, step=1, seed=1)
    second = saved(remote, tier, step=2, seed=2, base=first)
    newest, oldest = tier.records()
    assert set(newest.references) >= set(oldest.own[:-1])
    tier.forget([oldest])
    reader = TierReader(remote, tier, saving.may_hold)
    remote.calls.clear()
    assert load(reader, second) == tiny_state(2)
    assert not any(saving.may_hold(key) for operation, key in remote.calls if operation == "get_into")


def test_the_arena_is_released_before_a_slow_store_has_anything(remote: Counting, tier: LocalTier) -> None:
    gate, events = threading.Event(), list[Event]()

    def slow(operation: str, key: str) -> None:
        if operation == "put_multipart":
            gate.wait(60)

    remote.before = slow
    made = make(remote, tiny_state(1), step=1, number=begin(remote))

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, Released):
            assert not list(remote.inner.list(names.PACKS))
            gate.set()

    commit_staged(made.arena, made.plan, emit, store=remote, local_tier=tier)
    assert any(isinstance(event, Released) for event in events)
    assert load(remote, Base(1, 1, made.plan.attempt)) == tiny_state(1)


@pytest.mark.parametrize("part", ["pack", "manifest", "fate"])
def test_damage_in_the_tier_falls_through_to_the_store(remote: Counting, tier: LocalTier, part: str) -> None:
    base = saved(remote, tier)
    record, source = tier.records()[0], remote.location.url
    key = {"pack": record.own[0], "manifest": record.own[-1], "fate": record.references[-1]}[part]
    path = tier.path_of(source, key)
    data = bytearray(path.read_bytes())
    data[9000 if part == "pack" else 100] ^= 1
    path.write_bytes(bytes(data) if part != "fate" else b"cut")
    reader = TierReader(remote, tier, saving.may_hold)
    assert load(reader, base) == tiny_state(1)
    assert reader.bytes["store"] > 0
    assert not tier.has(source, key)


def test_damage_in_the_tier_is_repaired_from_the_buddy(remote: Counting, tier: LocalTier, tmp_path: Path) -> None:
    base = saved(remote, tier)
    source, key = remote.location.url, tier.records()[0].own[0]
    path = tier.path_of(source, key)
    good = path.read_bytes()
    path.write_bytes(good[:9000] + b"rot" + good[9003:])

    def recall(asked: str, wanted: str) -> bool:
        assert (asked, wanted) == (source, key)
        path.write_bytes(good)
        return True

    reader = TierReader(remote, tier, saving.may_hold, recall)
    remote.calls.clear()
    assert load(reader, base) == tiny_state(1)
    assert reader.bytes["buddy"] > 0
    assert not any(k.startswith("packs/") for _, k in remote.calls)
    assert path.read_bytes() == good


def test_damage_everywhere_is_reported_and_never_returned(remote: Counting, tier: LocalTier) -> None:
    base = saved(remote, tier)
    source, key = remote.location.url, tier.records()[0].own[0]
    data = bytearray(remote.get(key))
    data[9000] ^= 1
    remote.put(key, data)
    tier.drop(source, key)
    tier.keep(source, key, data)
    with pytest.raises(CorruptionError, match="step 1 of run exp is damaged"):
        load(TierReader(remote, tier, saving.may_hold), base)


def test_a_step_saved_while_the_store_is_unreachable_is_no_step_until_a_restore_commits_it(
    remote: Counting, tier: LocalTier
) -> None:
    first = saved(remote, tier, step=1, seed=1)
    made = make(remote, tiny_state(2), step=2, number=1, bases=(first,))
    remote.before = unreachable
    released: list[Event] = []
    with pytest.raises(TransientError, match="not committed, but kept in this node's tier"):
        commit_staged(made.arena, made.plan, released.append, store=remote, local_tier=tier)
    assert any(isinstance(event, Released) for event in released)
    assert restoring.latest(tier, remote.location.url, RUN, "latest") == first
    remote.before = lambda _operation, _key: None
    assert latest(remote) == first
    with restoring.node_tier(None) as node:
        node.local_tier = tier
        node.send(remote, RUN)
        found = node.find(remote, RUN, "latest")
    assert found == restoring.Found(Base(1, 2, made.plan.attempt))
    assert load(remote, found.base) == tiny_state(2)
    assert [r.committed > 0 for r in tier.records()] == [True, True]
    assert not list(remote.list(names.LEASES))


def test_a_store_that_goes_away_in_the_middle_leaves_what_a_restore_finishes(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier, step=1, seed=1)
    fired: list[str] = []

    def fail(operation: str, key: str) -> None:
        if operation == "put_multipart":
            fired.append(key)
            raise TransientError("the store is away")

    remote.before = fail
    with pytest.raises(TransientError, match="kept in this node's tier"):
        saved(remote, tier, step=2, seed=2, base=first)
    assert fired
    remote.before = lambda _operation, _key: None
    sent = restoring.send_unfinished(remote, tier, RUN, lambda _source, _key: False)
    restoring.commit_unfinished(remote, tier, sent)
    found = latest(remote)
    assert found is not None
    assert found.step == 2
    assert load(remote, found) == tiny_state(2)


def unfinished(remote: Counting, tier: LocalTier, *, step: int = 2, bases: tuple[Base, ...] = ()) -> Made:
    """A step of which the tier has everything and the store nothing; it leans on `bases`."""
    made = make(remote, tiny_state(2), step=step, number=1, bases=bases)

    def fail(operation: str, key: str) -> None:
        if operation == "put_multipart":
            raise TransientError("the store is away")

    remote.before = fail
    with pytest.raises(TransientError, match="kept"):
        commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    remote.before = lambda _operation, _key: None
    return made


def try_to_finish(remote: Store, tier: LocalTier) -> None:
    sent = restoring.send_unfinished(remote, tier, RUN, lambda _source, _key: False)
    restoring.commit_unfinished(remote, tier, sent)


def test_a_worker_that_takes_over_sends_what_only_the_tier_has(
    remote: Counting, tier: LocalTier, tmp_path: Path
) -> None:
    made = make(remote, tiny_state(1), step=1, number=begin(remote))
    fired: list[str] = []

    def fail(operation: str, key: str) -> None:
        if operation == "put_multipart":
            fired.append(key)
            raise TransientError("as if the worker were killed")

    fd = os.open(tmp_path / "progress", os.O_RDWR | os.O_CREAT)
    remote.before = fail
    with pytest.raises(TransientError):
        commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier, progress=ProgressFile(fd))
    assert fired
    remote.before = lambda _operation, _key: None
    os.lseek(fd, 0, os.SEEK_SET)
    again = ProgressFile(fd)
    assert again.manifest is not None
    commit_staged(None, made.plan, lambda _: None, store=remote, local_tier=tier, progress=again)
    os.close(fd)
    assert load(remote, Base(1, 1, made.plan.attempt)) == tiny_state(1)


def test_a_step_kept_while_the_store_was_unreachable_altogether_is_sent_from_the_tier_by_the_next_worker(
    remote: Counting, tier: LocalTier, tmp_path: Path
) -> None:
    first = saved(remote, tier, step=1, seed=1)
    made = make(remote, tiny_state(2), step=2, number=1, bases=(first,))
    fd = os.open(tmp_path / "progress", os.O_RDWR | os.O_CREAT)
    remote.before = unreachable
    with pytest.raises(TransientError, match="kept in this node's tier"):
        commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier, progress=ProgressFile(fd))
    os.lseek(fd, 0, os.SEEK_SET)
    with pytest.raises(TransientError, match=r"the store is away$"):
        commit_staged(None, made.plan, lambda _: None, store=remote, local_tier=tier, progress=ProgressFile(fd))
    remote.before = lambda _operation, _key: None
    os.lseek(fd, 0, os.SEEK_SET)
    commit_staged(None, made.plan, lambda _: None, store=remote, local_tier=tier, progress=ProgressFile(fd))
    os.close(fd)
    assert load(remote, Base(1, 2, made.plan.attempt)) == tiny_state(2)
    assert [r.committed > 0 for r in tier.records()] == [True, True]


def test_a_newer_timeline_stops_what_only_the_tier_has(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier)
    unfinished(remote, tier)
    timeline.open_timeline(remote, RUN, StepName(1, 1))
    try_to_finish(remote, tier)
    assert latest(remote) == first
    assert tier.records()[0].over


def test_what_is_older_than_a_collector_lets_unexplained_packs_lie_is_over(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier)
    unfinished(remote, tier)
    newest = tier.records()[0]
    tier.put_record(msgspec.structs.replace(newest, created=newest.created - restoring.STALE_SECONDS))
    try_to_finish(remote, tier)
    assert latest(remote) == first
    assert tier.records()[0].over
    assert restoring.STALE_SECONDS < ORPHAN_SECONDS


def test_a_collectors_abort_stops_what_only_the_tier_has(remote: Counting, tier: LocalTier) -> None:
    from headrace.checkpoint.format.documents import Decision

    first = saved(remote, tier)
    made = unfinished(remote, tier)
    decision = names.decision(RUN, 1, 2, made.plan.attempt)
    assert remote.put_if_absent(decision, encode(Decision(attempt=made.plan.attempt, outcome="abort")))
    try_to_finish(remote, tier)
    assert latest(remote) == first
    assert tier.records()[0].over


def test_a_base_that_was_collected_stops_what_leans_on_it(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier)
    unfinished(remote, tier, bases=(first,))
    remote.put(names.commit(RUN, 1, 1), encode(Commit(step=1, tombstone=True)))
    try_to_finish(remote, tier)
    assert latest(remote) is None
    assert tier.records()[0].over
    assert not list(remote.list(names.step(RUN, 1, 2)))


def test_a_base_that_only_another_rank_leans_on_stops_it_too(remote: Counting, tier: LocalTier) -> None:
    first, attempt = saved(remote, tier), names.new_id()
    mine = make(remote, tiny_state(2), step=2, attempt=attempt, rank=0, world_size=2, commit_timeout=0.0)
    with pytest.raises(TransientError, match="no manifest of rank 1"):
        commit_staged(mine.arena, mine.plan, lambda _: None, store=remote, local_tier=tier)
    fired: list[str] = []

    def fail(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith("/fate"):
            fired.append(key)
            raise TransientError("the store is away")

    other = make(remote, tiny_state(1), step=2, attempt=attempt, rank=1, world_size=2, bases=(first,))
    remote.before = fail
    with pytest.raises(TransientError, match="away"):
        commit_staged(other.arena, other.plan, lambda _: None, store=remote)
    assert fired
    remote.before = lambda _operation, _key: None
    remote.put(names.commit(RUN, 1, 1), encode(Commit(step=1, tombstone=True)))
    try_to_finish(remote, tier)
    assert latest(remote) is None
    assert tier.records()[0].over


def test_a_step_with_ranks_that_no_node_has_is_left_alone(remote: Counting, tier: LocalTier) -> None:
    first = saved(remote, tier)
    attempt = names.new_id()
    made = make(remote, tiny_state(2), step=2, number=1, attempt=attempt, rank=0, world_size=2, commit_timeout=0.0)
    with pytest.raises(TransientError, match="no manifest of rank 1"):
        commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    try_to_finish(remote, tier)
    assert latest(remote) == first
    assert not tier.records()[0].over
    other = make(remote, tiny_state(2), step=2, number=1, attempt=attempt, rank=1, world_size=2)
    keep(remote, tier, other)
    found = latest(remote)
    assert found is not None
    assert found.step == 2


def test_a_step_that_was_committed_without_the_tier_hearing_of_it_is_noted(remote: Counting, tier: LocalTier) -> None:
    base = saved(remote, tier)
    path = next((tier.root / "records").iterdir())
    record = tier.records()[0]
    path.unlink()
    tier.put_record(msgspec.structs.replace(record, committed=0.0))
    try_to_finish(remote, tier)
    assert tier.records()[0].committed == pytest.approx(record.committed)
    assert latest(remote) == base


def test_a_full_tier_does_not_disturb_a_save(remote: Counting, tmp_path: Path) -> None:
    tier = local_tier(tmp_path, 200_000)
    made = make(remote, tiny_state(1), step=1, number=begin(remote))
    result = commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    assert result["kept"] is None
    assert load(remote, Base(1, 1, made.plan.attempt)) == tiny_state(1)
    assert tier.records() == []


def test_another_workers_manifest_is_not_mistaken_for_the_kept_one(remote: Counting, tier: LocalTier) -> None:
    number = begin(remote)
    made = make(remote, tiny_state(1), step=1, number=number)
    fired: list[str] = []

    def overtake(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.endswith(".manifest") and not fired:
            fired.append(key)
            commit_staged(made.arena, made.plan, lambda _: None, store=remote.inner)

    remote.before = overtake
    commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    assert fired
    assert load(TierReader(remote, tier, saving.may_hold), Base(number, 1, made.plan.attempt)) == tiny_state(1)


def test_a_worker_that_stopped_and_goes_on_late_changes_nothing_of_the_step_that_is_kept(
    remote: Counting, tier: LocalTier
) -> None:
    """It stopped before it kept its manifest; another worker of the same plan has committed since."""
    made = make(remote, tiny_state(1), step=1, number=begin(remote))
    late, records, keep = list[bytes](), list[Record](), tier.keep

    def stopped(source: str, key: str, data: bytes) -> None:
        if not late and key.endswith(".manifest"):
            late.append(data)
            commit_staged(
                made.arena, made.plan, lambda _: None, store=remote, local_tier=LocalTier(tier.root, tier.limits)
            )
            records[:] = tier.records()
        keep(source, key, data)

    tier.keep = stopped  # type: ignore[assignment, method-assign]
    commit_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    assert late[0] != remote.get(records[0].own[-1])
    assert tier.records() == records
    base = Base(1, 1, made.plan.attempt)
    assert load(TierReader(remote, tier, saving.may_hold), base) == tiny_state(1)


def test_a_record_and_a_manifest_of_two_workers_do_not_commit_a_step_without_its_packs(
    remote: Counting, tier: LocalTier
) -> None:
    first = saved(remote, tier, step=1, seed=1)
    unfinished(remote, tier)
    record = tier.records()[0]
    other = [names.pack(record.attempt, "0-00000000-0")]
    for key in other:
        tier.keep(record.source, key, b"the pack of an earlier worker")
    tier.put_record(msgspec.structs.replace(record, own=(*other, record.own[-1])))
    try_to_finish(remote, tier)
    found = latest(remote)
    assert found is not None
    assert found != first
    assert load(remote, found) == tiny_state(2)


def test_restoring_while_the_store_is_unreachable_takes_what_was_committed(tmp_path: Path, tier: LocalTier) -> None:
    store = Counting(open_store(tmp_path / "store"))
    first = saved(store, tier, step=1, seed=1)
    unfinished(store, tier)
    store.before = unreachable
    with restoring.node_tier(None) as node:
        node.local_tier = tier
        node.send(store, RUN)
        found = node.find(store, RUN, "latest")
        assert found == restoring.Found(first, offline=True)
        assert node.find(store, RUN, 1) == found
        with pytest.raises(TransientError, match="away"):
            node.find(store, RUN, 2)
        reader = node.reader(store)
    calls = len(store.calls)
    shutil.rmtree(tmp_path / "store")
    step = open_step(reader, RUN, first)
    assert step.base == first
    held = chunk_reader.tensors_of(step, 0)
    assert set(held) == set(tiny_state(1))
    assert len(store.calls) == calls


def test_a_trainer_that_restored_while_the_store_was_unreachable_learns_of_a_newer_step() -> None:
    error = restoring.outdated("exp", Base(1, 5, "a"), Base(2, 9, "b"))
    assert isinstance(error, ConflictError)
    assert "step 5 was restored while the store was unreachable, but step 9 of timeline 2 is newer" in error.message
    assert "has no step" in restoring.outdated("exp", Base(1, 5, "a"), None).message
    assert commit is not None


def kept_by_all(remote: Counting, tier: LocalTier, *, step: int, ranks: int, missing: int = -1) -> str:
    """A step that all ranks of the node but `missing` have kept in the tier only; its attempt."""
    attempt = names.new_id()
    for rank in range(ranks):
        if rank != missing:
            made = make(remote, tiny_state(100 * step + rank), step=step, attempt=attempt, rank=rank, world_size=ranks)
            keep_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    return attempt


def test_a_step_that_many_ranks_of_a_node_have_kept_is_committed_and_older_ones_are_not_sent(
    remote: Counting, tier: LocalTier
) -> None:
    saved(remote, tier)
    kept_by_all(remote, tier, step=2, ranks=6)
    newest = kept_by_all(remote, tier, step=3, ranks=6)
    remote.calls.clear()
    try_to_finish(remote, tier)
    assert latest(remote) == Base(1, 3, newest)
    sent = {key for operation, key in remote.calls if operation == "put_multipart"}
    assert len(sent) == 6
    assert all(newest in key for key in sent)


def test_an_older_step_is_committed_if_a_rank_lacks_the_newest_one(remote: Counting, tier: LocalTier) -> None:
    saved(remote, tier)
    whole = kept_by_all(remote, tier, step=2, ranks=3)
    kept_by_all(remote, tier, step=3, ranks=3, missing=1)
    try_to_finish(remote, tier)
    assert latest(remote) == Base(1, 2, whole)


def test_keeping_a_step_asks_the_store_for_nothing(remote: Counting, tier: LocalTier) -> None:
    saved(remote, tier)
    made = make(remote, tiny_state(2), step=2, number=1)
    remote.before, before = unreachable, len(remote.calls)
    record = keep_staged(made.arena, made.plan, lambda _: None, store=remote, local_tier=tier)
    assert len(remote.calls) == before
    assert record in tier.records()


def test_aborted_attempts_do_not_hide_an_older_complete_one(remote: Counting, tier: LocalTier) -> None:
    saved(remote, tier)
    whole = kept_by_all(remote, tier, step=2, ranks=2)
    for step in range(3, 9):  # more than a restore sends
        attempt = kept_by_all(remote, tier, step=step, ranks=2)
        commit.abort(remote, commit.Attempt(RUN, 1, step, attempt, 2), "another rank failed")
    try_to_finish(remote, tier)
    assert latest(remote) == Base(1, 2, whole)


def test_an_older_step_is_not_committed_while_the_store_does_not_take_the_newest_one(
    remote: Counting, tier: LocalTier
) -> None:
    first = saved(remote, tier)
    kept_by_all(remote, tier, step=2, ranks=2)
    newest = kept_by_all(remote, tier, step=3, ranks=2)
    refused: list[str] = []

    def refuse_newest(operation: str, key: str) -> None:
        if operation == "put_multipart" and newest in key:
            refused.append(key)
            raise TransientError("the store does not answer")

    remote.before = refuse_newest
    try_to_finish(remote, tier)
    assert len(refused) == 1
    assert latest(remote) == first
    remote.before = lambda _operation, _key: None
    try_to_finish(remote, tier)
    assert latest(remote) == Base(1, 3, newest)


def test_a_step_that_a_restore_sends_is_not_removed_meanwhile_by_its_trainer(remote: Counting, tier: LocalTier) -> None:
    saved(remote, tier)
    newest = kept_by_all(remote, tier, step=2, ranks=1)
    removing: list[list[Record]] = []

    def remove(operation: str, key: str) -> None:
        if operation == "put_multipart":
            removing.append(tier.forget_unchanged(r for r in tier.records() if r.attempt == newest))

    remote.before = remove
    try_to_finish(remote, tier)
    assert [len(held) for held in removing] == [1]
    assert latest(remote) == Base(1, 2, newest)
    assert [r.step for r in tier.records()] == [2, 1]
