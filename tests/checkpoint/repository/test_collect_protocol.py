"""Savers, a reader and several collectors of the real code, interleaved at every operation on the store.

The counterpart of an exhaustive model of the protocol: time may pass so that every lease is over while its holder sleeps, any
actor may be killed anywhere, and at every moment every step that exists has all its packs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format import manifest, names
from headrace.checkpoint.format.documents import Base, StepOfRun
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect, to_delete
from headrace.checkpoint.repository.inventory import Inventory, SeenAttempt
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import TransientError
from tests.support.checkpoint_states import RUN, begin, load, make, save, tiny_state
from tests.support.stepping import Actor, MemoryStore, drive_to_end, stepping

pytestmark = pytest.mark.slow

SAVER, READER, FIRST, SECOND, THIRD, TIME, KILL_SAVER, KILL_FIRST = range(8)


class World:
    """One committed step, a saver of a second that leans on it, collectors that condemn the first and later the second."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.base = save(self.store, make(self.store, tiny_state(1), step=1, number=begin(self.store)))
        made = make(self.store, tiny_state(2), step=2, bases=(self.base,))
        self.new = Base(1, 2, made.plan.attempt)
        self.states = {1: tiny_state(1), 2: tiny_state(2)}
        stepping(self.store)
        first, both = {StepOfRun(RUN, 1, 1)}, {StepOfRun(RUN, 1, 1), StepOfRun(RUN, 1, 2)}
        self.actors = [
            Actor(self.store, lambda: save(self.store, made)),
            Actor(self.store, lambda: repository.find(self.store, RUN, "latest")),
            Actor(self.store, lambda: collect(self.store, first)),
            Actor(self.store, lambda: collect(self.store, first)),
            Actor(self.store, lambda: collect(self.store, both)),
        ]
        self._packs: dict[str, list[str]] = {}

    def move(self, choice: int) -> None:
        if choice == TIME:
            self.store.now += 1000.0
        elif choice in (KILL_SAVER, KILL_FIRST):
            self.actors[SAVER if choice == KILL_SAVER else FIRST].kill()
        else:
            self.actors[choice].step()
        self.check()

    def check(self) -> None:
        """Every step that is committed, or complete and not removed, has all its packs."""
        for base in (self.base, self.new):
            found = commit.find_commit(self.store, names.commit(RUN, 1, base.step))
            decision = commit.find_decision(self.store, names.decision(RUN, 1, base.step, base.attempt))
            if decision is None or decision.outcome != "commit" or (found is not None and found.tombstone):
                continue
            for pack in self._needs(base):
                assert pack in self.store.objects, f"step {base.step} has lost {pack}"

    def _needs(self, base: Base) -> Sequence[str]:
        key = names.manifest(RUN, 1, base.step, base.attempt, 0)
        if key not in self._packs:
            assert key in self.store.objects, f"step {base.step} has lost its manifest"
            data = self.store.objects[key][0]
            self._packs[key] = [pack.key for pack in manifest.decode(data, key).packs]
        return self._packs[key]

    def end(self) -> None:
        """Everybody comes to an end, and what is left is what readers get."""
        drive_to_end(self.actors, self.check)
        self.store.now += 1000.0
        collect(self.store, ())  # finishes what a killed collector began; until then its steps are refused to readers
        assert not [key for key in self.store.objects if key.startswith("gc/")]
        self.check()
        for base in (self.base, self.new):
            found = commit.find_commit(self.store, names.commit(RUN, 1, base.step))
            if found is not None and not found.tombstone:
                assert load(self.store, base) == self.states[base.step]
        if self.actors[SAVER].error is None:
            assert commit.find_commit(self.store, names.commit(RUN, 1, 2)) is not None


def play(choices: Sequence[int]) -> World:
    world = World()
    for choice in choices:
        world.move(choice)
    world.end()
    return world


CHOICES = st.lists(st.integers(0, 7), max_size=160)


@settings(max_examples=60, deadline=None)
@given(CHOICES)
def test_no_order_of_moves_loses_a_pack_of_a_step(choices: list[int]) -> None:
    play(choices)


def schedules(seed: int, count: int) -> list[list[int]]:
    """Bursts: one actor moves some times, then another; time passes now and then; kills are rare."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        moves: list[int] = []
        while len(moves) < 200:
            actor = chance.choices(range(8), [6, 1, 5, 5, 4, 1.5, 0.05, 0.1])[0]
            moves += [actor] * (chance.randint(1, 25) if actor < TIME else 1)
        found.append(moves)
    return found


def test_bursts_of_moves_lose_nothing_either() -> None:
    errors = [play(moves).actors[SAVER].error for moves in schedules(1, 120)]
    assert None in errors  # savers that commit
    assert any(isinstance(error, TransientError) for error in errors)  # and savers that wake up fenced


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_great_many_bursts_lose_nothing() -> None:
    for moves in schedules(2, 5000):
        play(moves)


def by_commit(seen: Inventory, attempt: SeenAttempt) -> bool:
    """A wrong rule: an attempt counts only after its COMMIT is written."""
    found = seen.commits.get(attempt.step)
    return attempt.decision is not None and (found is None or found.tombstone or found.attempt != attempt.attempt)


def without_fences(seen: Inventory, now: float) -> list[SeenAttempt]:
    return []


def sparing_nothing(*_: object) -> set[StepOfRun]:
    return set()


@pytest.mark.parametrize(
    ("name", "rule", "seed"),
    [("is_dead", by_commit, 3), ("to_fence", without_fences, 16), ("spared", sparing_nothing, 3)],
)
def test_the_search_finds_what_each_rule_is_for(
    name: str, rule: Callable[..., object], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, name, rule)
    with pytest.raises(AssertionError, match="has lost"):
        for moves in schedules(seed, 1500):
            play(moves)


def test_a_saver_that_wakes_between_fate_and_commit_cannot_bring_a_removed_step_back() -> None:
    world = World()
    while not any("/fate" in key and world.new.attempt in key for key in world.store.objects):
        world.move(SAVER)
    world.move(TIME)
    world.actors[THIRD].finish()
    world.actors[SAVER].finish()
    found = commit.find_commit(world.store, names.commit(RUN, 1, 2))
    assert found is not None
    assert found.tombstone
    assert world.actors[SAVER].error is None  # it was committed, by the collector, before it was let go
    world.end()
    assert not [key for key in world.store.objects if key.startswith("packs/")]


@pytest.mark.parametrize("last", [1, 2])
def test_a_step_committed_while_a_policy_is_applied_is_never_let_go(last: int) -> None:
    """At whichever operation of the policy's look the step becomes visible."""
    moments = 0
    while True:
        store = MemoryStore()
        base = save(store, make(store, tiny_state(1), step=1, number=begin(store)))
        made = make(store, tiny_state(2), step=2, bases=(base,))
        stepping(store)
        looking = Actor(store, lambda store=store: to_delete(store, RUN, Keep(last=last)))  # type: ignore[misc]
        for _ in range(moments):
            looking.step()
        if looking.done:
            break
        new = save(store, made)
        looking.finish()
        assert looking.error is None
        assert looking.result <= ({StepOfRun(RUN, 1, 1)} if last == 1 else set())
        assert next(repository.visible(store, RUN)) == new
        moments += 1
    assert moments >= 4
