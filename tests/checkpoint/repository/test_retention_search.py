"""Retention in a run with other actors, interleaved at every operation on a store that lists in pages.

A run has three steps, and these actors:

- A replaced trainer saves a fourth step and applies its policy.
- A second trainer restores the second step, opens a new timeline, saves, and applies its policy.
- A third process applies a policy from the command line.
- A user tags the second step.
- A reader reads the latest step.

Leases may expire, and each actor may be killed at any operation. At any time, every step that exists has all its packs, and
every tag names a step. A trainer that restores the latest step finds one that is not older than the step that the previous
trainer continued from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format import manifest, names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.lineage import ParentLease
from headrace.checkpoint.repository import collect, tags, timeline, writers
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.repository.writers import WriterState
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.saving import dedup
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, NotFoundError
from headrace.dataio.store.base import ObjectInfo, Store
from tests.support.checkpoint_states import RUN, begin, load, make, save, tiny_state
from tests.support.stepping import Actor, MemoryStore, StoreClock, drive_to_end, stepping

pytestmark = pytest.mark.slow

ZOMBIE, TRAINER, RETAIN, TAGGER, READER, TIME, KILL_ZOMBIE, KILL_RETAIN, KILL_TRAINER = range(9)
ACTORS, CHOICES = 5, 9


class World:
    """See the module's text. `last`: how many steps the policies keep."""

    def __init__(self, last: int = 1) -> None:
        self.store = MemoryStore(page=2)
        self.clock = StoreClock(self.store)
        self.keep, number = Keep(last=last), begin(self.store)
        self.states: dict[str, dict[str, bytes]] = {}
        self.bases: list[Base] = []
        for step in (1, 2, 3):
            self.bases.append(self._save(step, number, tuple(self.bases[-1:]), step))
        self._packs: dict[str, list[str]] = {}
        self.committed = 0
        stepping(self.store)
        self.actors = [
            Actor(self.store, work) for work in (self._zombie, self._trainer, self._retain, self._tagger, self._reader)
        ]

    # who is at work

    def _save(self, step: int, number: int, bases: tuple[Base, ...], seed: int) -> Base:
        made = make(self.store, tiny_state(seed), step=step, number=number, bases=bases)
        self.states[made.plan.attempt] = tiny_state(seed)
        return save(self.store, made)

    def _retain(self) -> None:
        collect.retain(self.store, RUN, self.keep, clock=self.clock)

    def _zombie(self) -> None:
        self._save(4, 1, (self.bases[2],), 4)
        self._retain()

    def _trainer(self) -> None:
        """Goes back to the second step."""
        base, parent = self.bases[1], ParentLease(self.store, clock=self.clock)
        try:
            parent.hold(RUN, base)
            self.store.exists("training")
            number = opened_by_saving(self.store, 3, base, parent)
            self._save(3, number, (base,), 7)
        finally:
            parent.release()
        self.committed = number
        self._retain()

    def _tagger(self) -> str:
        return tags.tag(self.store, "best", RUN, 2, clock=self.clock).attempt

    def _reader(self) -> None:
        base = repository.find(self.store, RUN, "latest")
        assert base is not None
        with chunk_reader.LeasedStep(self.store, RUN, base) as step:
            for moment in range(4):
                self.store.exists(f"reading {moment}")
            found = {m.name: b"" for m in step.manifests[0].tensors}
            assert set(found) == set(self.states[base.attempt])
            if not self._whole(base):
                raise CorruptionError("a reader misses a pack")

    # what must hold

    def move(self, choice: int) -> None:
        if choice == TIME:
            self.store.now += 1000.0
        elif choice > TIME:
            self.actors[{KILL_ZOMBIE: ZOMBIE, KILL_RETAIN: RETAIN, KILL_TRAINER: TRAINER}[choice]].kill()
        else:
            self.actors[choice].step()
        self.check()

    def check(self) -> None:
        for base in self._existing():
            for pack in self._needs(base):
                assert pack in self.store.objects, f"step {base.step} of timeline {base.timeline} has lost {pack}"
        tagger = self.actors[TAGGER]
        if tagger.done and tagger.error is None:
            assert any(b.attempt == self.bases[1].attempt for b in self._existing()), "the tagged step was removed"
        self._check_latest()

    def _check_latest(self) -> None:
        """No process that starts now finds less than the second step."""
        found = next(repository.visible(self.store, RUN), None)
        assert found is not None, "the run has lost its latest step"
        assert found.step >= 2, f"the run has fallen back to step {found.step}"

    def _whole(self, base: Base) -> bool:
        return all(pack in self.store.objects for pack in self._needs(base))

    def _existing(self) -> list[Base]:
        """Steps that are committed, or complete, and not removed."""
        found = []
        for key in list(self.store.objects):
            parsed = names.parse_step_key(key)
            if parsed is None or parsed.kind != "fate":
                continue
            decision = self.store.document(key)
            assert decision is not None
            commit = self.store.document(names.commit(RUN, parsed.timeline, parsed.step))
            if commit is not None and (commit["tombstone"] or commit["attempt"] != parsed.attempt):
                continue
            if decision["fate"] == "commit":
                found.append(Base(parsed.timeline, parsed.step, parsed.attempt))
        return found

    def _needs(self, base: Base) -> Sequence[str]:
        key = names.manifest(RUN, base.timeline, base.step, base.attempt, 0)
        if key not in self._packs:
            assert key in self.store.objects, f"step {base.step} has lost its manifest"
            self._packs[key] = [pack.key for pack in manifest.decode(self.store.objects[key][0], key).packs]
        return self._packs[key]

    def end(self) -> None:
        """All actors end. Then the policy is applied once more, and readers must find exactly the remaining steps."""
        drive_to_end(self.actors, self.check)
        for actor in self.actors:
            assert not isinstance(actor.error, CorruptionError), repr(actor.error)  # removed is not damaged
        self.store.now += 2 * plans.RECORD_SECONDS  # records of collectors that were killed are no warning any more
        for _ in range(2):
            collect.retain(self.store, RUN, self.keep, clock=self.clock) or collect.collect(self.store, ())
            self.check()
        assert not [key for key in self.store.objects if key.startswith(("gc/", "leases/"))]
        latest = next(repository.visible(self.store, RUN))
        if self.committed:
            assert (latest.timeline, latest.step) == (self.committed, 3)
        for base in self._existing():
            assert load(self.store, base) == self.states[base.attempt]


def play(choices: Sequence[int], last: int = 1) -> World:
    world = World(last)
    for choice in choices:
        world.move(choice)
    world.end()
    return world


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, CHOICES - 1), max_size=200), st.integers(1, 2))
def test_no_order_of_moves_loses_a_step_that_a_policy_keeps(choices: list[int], last: int) -> None:
    play(choices, last)


def schedules(seed: int, count: int) -> list[list[int]]:
    """Bursts: one actor moves some times, then another; time passes now and then; kills are rare."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        moves: list[int] = []
        while len(moves) < 600:
            who = chance.choices(range(CHOICES), [6, 6, 6, 2, 2, 0.7, 0.1, 0.1, 0.1])[0]
            moves += [who] * (chance.randint(1, 120) if who < TIME else 1)
        found.append(moves)
    return found


def test_bursts_of_moves_lose_nothing_either() -> None:
    outcomes = [tuple(actor.error is None for actor in play(moves).actors) for moves in schedules(5, 15)]
    for who in (ZOMBIE, TRAINER):  # each sometimes comes through, and sometimes is told why not
        assert {outcome[who] for outcome in outcomes} == {True, False}, who


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
def test_a_great_many_bursts_lose_nothing(seed: int) -> None:
    for moves in schedules(100 + seed, 400):
        play(moves, last=1 + seed % 2)


def judged_once(store: object, records: object, *_: object) -> set[object]:
    """A wrong rule: a step that was once selected for removal stays selected."""
    return {step for record in records for step in record.steps}  # type: ignore[attr-defined]


def test_the_search_finds_what_applying_the_policy_again_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_still_pending", judged_once)
    with pytest.raises(AssertionError, match="the tagged step was removed"):
        for moves in schedules(16, 200):
            play(moves)


class Loose(ParentLease):
    """The rule that is wrong: what was restored is not held."""

    def hold(self, run: str, base: Base) -> None:
        repository.require_exists(self._store, run, base)


def moments(prepare: Callable[[MemoryStore], Actor], meanwhile: Callable[[MemoryStore], object]) -> list[Actor]:
    """`meanwhile` done at once before each operation of an actor, in a new store each time."""
    found: list[Actor] = []
    while True:
        store = MemoryStore(page=2)
        actor = prepare(store)
        for _ in range(len(found)):
            actor.step()
        if actor.done:
            return found
        meanwhile(store)
        actor.finish()
        found.append(actor)


def opened_by_saving(store: Store, step: int, restored: Base, parent: ParentLease) -> int:
    """What a trainer that starts does before its first save; the number of its timeline."""
    state = WriterState("heir-1", restored=restored, may_start_fresh=True)
    return writers.place(store, RUN, step, state, lambda base: parent.hold(RUN, base)).timeline


def three_steps(store: MemoryStore) -> list[Base]:
    number, found = begin(store), list[Base]()
    for step in (1, 2, 3):
        found.append(save(store, make(store, tiny_state(step), step=step, number=number, bases=tuple(found[-1:]))))
    return found


def test_a_tag_given_while_its_step_is_let_go_keeps_it_or_is_refused() -> None:
    """At whichever operation of the retention the tag is given."""

    def retaining(store: MemoryStore) -> Actor:
        three_steps(store)
        stepping(store)
        return Actor(store, lambda: collect.retain(store, RUN, Keep(last=1)))

    given: list[bool] = []

    def tagging(store: MemoryStore) -> None:
        try:
            tags.tag(store, "best", RUN, 1)
            given.append(True)
        except NotFoundError:
            given.append(False)
        stores.append(store)

    stores: list[MemoryStore] = []
    for actor, good, store in zip(moments(retaining, tagging), given, stores, strict=True):
        assert actor.error is None
        there = [base.step for base in repository.visible(store, RUN)]
        assert there == ([3, 1] if good else [3])
        assert bool(list(tags.all_tags(store))) == good
    assert True in given
    assert False in given


@pytest.mark.parametrize("kind", [ParentLease, Loose])
def test_a_step_that_a_trainer_goes_back_to_stays_until_it_has_one_of_its_own(kind: type[ParentLease]) -> None:
    """At whichever operation of its start a retention comes by."""

    def starting(store: MemoryStore) -> Actor:
        base, *_ = three_steps(store)
        parent = kind(store)

        def start() -> int:
            parent.hold(RUN, base)
            store.exists("training")
            return opened_by_saving(store, 2, base, parent)

        stepping(store)
        return Actor(store, start)

    lost = 0
    for actor in moments(starting, lambda store: collect.retain(store, RUN, Keep(last=1))):
        assert actor.error is None or isinstance(actor.error, NotFoundError | ConflictError)
        lost += actor.error is None and repository.is_removed(actor.store, RUN, Base(1, 1, ""))
    assert bool(lost) == (kind is Loose)


def test_a_trainer_that_goes_back_and_dies_before_its_first_save_leaves_a_latest_step() -> None:
    """At whichever operation of a retention that sleeps until the dead trainer's lease is over."""
    stores: list[MemoryStore] = []

    def retaining(store: MemoryStore) -> Actor:
        three_steps(store)
        stepping(store)
        return Actor(store, lambda: collect.retain(store, RUN, Keep(last=1)))

    def going_back(store: MemoryStore) -> None:
        stores.append(store)
        base, parent = repository.find(store, RUN, 1) if visible_steps(store)[-1:] == [1] else None, ParentLease(store)
        if base is not None:
            with suppress(NotFoundError):
                parent.hold(RUN, base)
                begin(store, base)
            store.now += 1000  # the lease is over; no process releases it

    moments(retaining, going_back)
    assert all(map(visible_steps, stores))


def visible_steps(store: MemoryStore) -> list[int]:
    return [base.step for base in repository.visible(store, RUN)]


def test_whoever_looks_for_the_latest_step_while_it_is_replaced_finds_the_new_one() -> None:
    """At whichever operation of the look two newer steps come and all that was there goes."""

    def looking(store: MemoryStore) -> Actor:
        three_steps(store)
        stepping(store)
        return Actor(store, lambda: repository.find(store, RUN, "latest"))

    def replacing(store: MemoryStore) -> None:
        for step in (4, 5):
            save(store, make(store, tiny_state(step), step=step))
        collect.retain(store, RUN, Keep(last=1))

    found = [actor.result.step for actor in moments(looking, replacing)]
    assert set(found) <= {3, 5}
    assert found[0] == 5


def test_a_step_removed_while_it_is_tagged_gets_no_tag() -> None:
    """At whichever operation of the tagging the retention comes by."""

    def tagging(store: MemoryStore) -> Actor:
        three_steps(store)
        stepping(store)
        return Actor(store, lambda: tags.tag(store, "best", RUN, 1))

    stores: list[MemoryStore] = []

    def retaining(store: MemoryStore) -> None:
        collect.retain(store, RUN, Keep(last=1))
        stores.append(store)

    for actor, store in zip(moments(tagging, retaining), stores, strict=True):
        there = 1 in [base.step for base in repository.visible(store, RUN)]
        assert (actor.error is None) == there
        assert bool(list(tags.all_tags(store))) == there


def test_a_policy_applied_while_a_trainer_starts_anew_or_goes_back_keeps_what_was_there() -> None:
    """Until the new timeline has come as far, what it left behind stays."""
    store = MemoryStore()
    one, *_ = three_steps(store)
    before = collect.to_delete(store, RUN, Keep(last=1))
    assert {step.step for step in before} == {1, 2}
    begin(store)  # by mistake: it restored nothing, and dies before its first save
    assert collect.to_delete(store, RUN, Keep(last=1)) == before
    number = begin(store, one)
    assert collect.to_delete(store, RUN, Keep(last=1)) == before  # the trainer's lease spares the parent
    save(store, make(store, tiny_state(8), step=2, number=number, bases=(one,)))
    assert {step.step for step in collect.to_delete(store, RUN, Keep(last=1))} == {1, 2}
    save(store, make(store, tiny_state(9), step=3, number=number, bases=(one,)))
    assert len(collect.to_delete(store, RUN, Keep(last=1))) == 4


def test_a_trainer_whose_restored_step_was_removed_is_told_before_it_opens_a_timeline() -> None:
    store = MemoryStore()
    clock = StoreClock(store)
    one, *_ = three_steps(store)
    parent = ParentLease(store, clock=clock)
    parent.hold(RUN, one)
    assert collect.retain(store, RUN, Keep(last=1), clock=clock).spared  # type: ignore[union-attr]
    store.now += 1000  # it sleeps
    assert [step.step for step in collect.retain(store, RUN, Keep(last=1), clock=clock).tombstones] == [1]  # type: ignore[union-attr]
    with pytest.raises(
        ConflictError,
        match=r"step 2 cannot be saved, because retention removed its parent step: step 1 of run exp is",
    ):
        opened_by_saving(store, 2, one, parent)
    assert timeline.numbers(store, RUN) == [1]
    parent.release()
    assert not list(store.list("leases/"))


class Forgetful(MemoryStore):
    """Loses sight of names that are replaced while they are listed, as tmpfs may: at its second listing of leases."""

    looks = 0

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self.looks += prefix == names.LEASES
        return iter(()) if prefix == names.LEASES and self.looks == 2 else super().list(prefix)


def test_a_lease_that_a_listing_misses_still_protects() -> None:
    store = Forgetful()
    one, *_ = three_steps(store)
    with LeaseKeeper(store, "0" * 26, run=RUN, timeline=1, step=9, bases=[one]):
        done = collect.retain(store, RUN, Keep(last=1))
        assert store.looks == 3
        assert done is not None
        assert [step.step for step in done.spared] == [1]
        assert not done.aborted
    assert load(store, one) == tiny_state(1)


def test_a_dead_collectors_record_is_no_warning_for_ever() -> None:
    """Of a step that was tagged just before the record, which the collector did not live to see."""
    store = MemoryStore()
    clock = StoreClock(store)
    three_steps(store)
    stepping(store)
    dead = Actor(store, lambda: collect.retain(store, RUN, Keep(last=1), clock=clock))
    while not any(key.startswith("gc/") for key in store.objects):
        if len(store.objects) and dead.done:
            raise AssertionError
        dead.step()
    dead.kill()
    step, attempt = 1, next(b.attempt for b in repository.visible(store, RUN) if b.step == 1)
    made = tags._tag("best", RUN, Base(1, step, attempt), clock)
    tags._write(store, made, move=False)  # as one that was given just before the record
    done = collect.collect(store, (), clock=clock)
    assert [s.step for s in done.tombstones] == [2]
    assert (RUN, 1, 1) in repository.pending_deletes(store)  # that collector may only sleep
    store.now += plans.RECORD_SECONDS + 1
    collect.collect(store, (), clock=clock)
    assert not repository.pending_deletes(store)
    assert [base.step for base in repository.visible(store, RUN)] == [3, 1]


def test_a_collector_that_slept_long_removes_nothing_more() -> None:
    store = MemoryStore()
    clock = StoreClock(store)
    three_steps(store)
    stepping(store)
    slow = Actor(store, lambda: collect.retain(store, RUN, Keep(last=1), clock=clock))
    while not any(key.startswith("gc/") for key in store.objects):
        slow.step()
    store.now += plans.RECORD_SECONDS
    slow.finish()
    assert isinstance(slow.error, HeadraceError)
    assert [base.step for base in repository.visible(store, RUN)] == [3, 2, 1]


def test_what_a_long_run_leaves_behind_is_bounded() -> None:
    """A step each minute, saved and let go: a week's tombstones stay, and nothing of older steps."""
    store = MemoryStore()
    clock = StoreClock(store)
    number, base, sizes = begin(store), tuple[Base, ...](), list[int]()
    for step in range(60):
        base = (save(store, make(store, tiny_state(step), step=step, number=number, bases=base)),)
        collect.retain(store, RUN, Keep(last=2), clock=clock)
        store.now += plans.TOMBSTONE_SECONDS / 10
        sizes.append(len(store.objects))
    assert max(sizes[30:]) <= max(sizes[:30]) <= 40
    assert load(store, base[0]) == tiny_state(59)
    steps = {key.step for name in store.objects if (key := names.parse_step_key(name))}
    assert min(steps - {0}) >= 45  # the pack of step 0, which has the frozen tensor, is still explained by its fate


def parts(step: int, count: int = 16) -> dict[str, bytes]:
    """Tensors each of which changes at every step, until its own step has come."""
    return {f"part-{i}": random.Random(f"{i} {min(step, i)}").randbytes(70_000) for i in range(count)}


@pytest.mark.parametrize(("share", "most"), [(dedup.LEAST_SHARE, 3.0), (1 << 40, 100.0)])
def test_packs_that_stay_for_the_sake_of_a_little_are_bounded(
    share: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step leaves one chunk behind that all later ones need: without the rule all packs stay."""
    monkeypatch.setattr(dedup, "LEAST_SHARE", share)
    store = MemoryStore()
    number, base = begin(store), tuple[Base, ...]()
    for step in range(16):
        base = (save(store, make(store, parts(step), step=step, number=number, bases=base)),)
        collect.retain(store, RUN, Keep(last=1))
    assert load(store, base[0]) == parts(15)
    stored = sum(info.size for info in store.list("packs/")) / sum(map(len, parts(15).values()))
    assert stored < most
    assert stored > 6.0 or most < 6.0
