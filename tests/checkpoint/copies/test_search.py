"""Two copiers, a collector of the destination and a policy, in random orders: no step there ever lacks a pack."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.checkpoint.copies.copy import RunCopier, Selection, run_copiers
from headrace.checkpoint.copies.step import StepCopier
from headrace.checkpoint.format import manifest, names
from headrace.checkpoint.format.documents import Base, StepOfRun
from headrace.checkpoint.repository import collect, commit, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.retention import Keep
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Location
from tests.support.checkpoint_states import RUN, begin, load, make, save
from tests.support.stepping import Actor, Killed, MemoryStore, StoreClock, drive_to_end, end_all, stepping

pytestmark = pytest.mark.slow
STEPS = tuple(range(1, 12))
ONE, TWO, COLLECTOR, POLICY, TIME, KILL = range(6)


def state_of(step: int) -> dict[str, bytes]:
    """A part that every second step shares, and one that no other step has."""
    return {
        "turn": np.random.default_rng(step % 2).bytes(80 * KIB),
        "new": np.random.default_rng(100 + step).bytes(70 * KIB),
    }


class Named(MemoryStore):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @property
    def location(self) -> Location:
        return Location(self._url, {}, shareable=False)


class World:
    """A run of eleven steps in two timelines at the source. One step is at the destination when the search begins."""

    def __init__(self, seed: int) -> None:
        self.source, self.store = Named("memory://source"), Named("memory://destination")
        self.chance = random.Random(seed)
        number, bases = begin(self.source), list[Base]()
        for step in STEPS[:-1]:
            bases.append(
                save(self.source, make(self.source, state_of(step), step=step, number=number, bases=tuple(bases[-2:])))
            )
        number = begin(self.source, bases[-2])
        last = make(self.source, state_of(STEPS[-1]), step=STEPS[-1], number=number, bases=(bases[-2],))
        save(self.source, last)
        list(self.copier().copy(Selection(steps=(1, 2))))
        stepping(self.store)
        self.actors = [Actor(self.store, self.copy) for _ in range(2)]
        self.actors += [Actor(self.store, self.collect), Actor(self.store, self.retain)]

    @property
    def clock(self) -> StoreClock:
        return StoreClock(self.store)

    def copier(self) -> RunCopier:
        return run_copiers(self.source, self.store, RUN, workers=1, clock=self.clock)[0]

    def copy(self) -> None:
        """Copy all steps, or some of them, so that a step may be copied after a newer one."""
        steps = tuple(self.chance.sample(STEPS[:-2] + STEPS[-1:], self.chance.randint(1, 2)))
        list(self.copier().copy(Selection(steps=steps if self.chance.random() < 0.9 else None)))

    def collect(self) -> None:
        collect.collect(self.store, (), self.clock)

    def retain(self) -> None:
        collect.retain(self.store, RUN, Keep(last=1), self.clock)

    def move(self, choice: int, chance: random.Random) -> None:
        if choice == TIME:
            self.store.now += 1000.0
        elif choice == KILL:
            at = chance.choice((ONE, TWO))
            self.actors[at].kill()
            self.actors[at] = Actor(self.store, self.copy)
        else:
            self.actors[choice].step()
            if self.actors[choice].done:
                self.restart(choice)
        self.check()

    def restart(self, choice: int) -> None:
        error = self.actors[choice].error
        assert error is None or isinstance(error, HeadraceError | Killed), repr(error)
        work = {ONE: self.copy, TWO: self.copy, COLLECTOR: self.collect, POLICY: self.retain}[choice]
        self.actors[choice] = Actor(self.store, work)

    def committed(self) -> list[tuple[StepOfRun, str]]:
        found = []
        for number in timeline.numbers(self.store, RUN):
            for at in timeline.steps(self.store, RUN, number):
                for attempt in timeline.attempts(self.store, RUN, number, at):
                    decision = commit.find_decision(self.store, names.decision(RUN, number, at, attempt))
                    current = commit.find_commit(self.store, names.commit(RUN, number, at))
                    is_gone = current is not None and (current.tombstone or current.attempt != attempt)
                    if decision is not None and decision.outcome == "commit" and not is_gone:
                        found.append((StepOfRun(RUN, number, at), attempt))
        return found

    def check(self) -> None:
        for step, attempt in self.committed():
            key = names.manifest(step.run, step.timeline, step.step, attempt, 0)
            assert key in self.store.objects, f"{step} has lost its manifest"
            for pack in manifest.decode(self.store.objects[key][0], key).packs:
                assert pack.key in self.store.objects, f"{step} has lost {pack.key}"

    def end(self) -> None:
        drive_to_end(self.actors, self.check)
        self.store.now += 1000.0
        collect.collect(self.store, (), self.clock)
        self.check()
        self.store.now += 8 * 86400.0
        collect.collect(self.store, (), self.clock)
        collect.collect(self.store, (), self.clock)
        list(self.copier().copy(Selection()))
        self.check()
        self.check_steps()

    def check_steps(self) -> None:
        """Every step of the source is copied with its bytes, or was removed at the destination."""
        there = {(each.timeline, each.step): each for each in repository.visible(self.store, RUN)}
        for base in repository.visible(self.source, RUN):
            copied = there.get((base.timeline, base.step))
            if copied is not None:
                assert load(self.store, copied) == load(self.source, base)
            else:
                assert repository.has_tombstone(self.store, RUN, base.timeline, base.step)
        newest = next(repository.visible(self.source, RUN))
        assert (newest.timeline, newest.step) in there


@pytest.fixture(autouse=True)
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataio.store.probe.require_preconditions", lambda *_: None)


@pytest.mark.parametrize("seed", range(12))
def test_no_step_of_a_copy_ever_lacks_a_pack(seed: int) -> None:
    chance = random.Random(seed)
    world = World(seed)
    weights = [(30, 10, 1, 40, 0.2, 0.2), (10, 10, 5, 40, 0.6, 0.4), (10, 3, 2, 60, 0.1, 0.1)][seed % 3]
    for _ in range(800):
        world.move(chance.choices(range(6), weights)[0], chance)
    world.end()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 400))
def test_no_step_of_a_copy_ever_lacks_a_pack_in_many_orders(seed: int) -> None:
    test_no_step_of_a_copy_ever_lacks_a_pack(seed)


def test_the_search_finds_a_lost_pack_if_bases_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCopier, "_require_bases", lambda *_: None)
    with pytest.raises(AssertionError, match="has lost"):
        for seed in range(200):
            test_no_step_of_a_copy_ever_lacks_a_pack(seed)
            end_all()
