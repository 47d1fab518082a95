"""Runs that lean on steps of other runs: nothing that they need is collected, whoever moves when."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.format import documents, manifest, names
from headrace.checkpoint.format.documents import Base, Lease, StepOfRun, read
from headrace.checkpoint.repository import commit, timeline
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import collect
from headrace.checkpoint.repository.inventory import Inventory
from headrace.dataio.core.errors import NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from tests.support.checkpoint_states import RUN, begin, load, make, save, tiny_state
from tests.support.stepping import Actor, MemoryStore, drive_to_end, stepping

pytestmark = pytest.mark.slow

FORK = "fork"
SAVER, FIRST, SECOND, TIME, KILL = range(5)


class World:
    """A step of one run, the saver of a step of another run that leans on it, two collectors that condemn the first.

    Both steps have the same timeline and number, so only the run tells them apart."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        origin = save(self.store, make(self.store, tiny_state(1), step=1, number=begin(self.store)))
        base = msgspec.structs.replace(origin, run=RUN)
        number = begin(self.store, run=FORK)
        made = make(self.store, tiny_state(2), step=1, number=number, bases=(base,), run=FORK)
        self.steps = {RUN: (origin, tiny_state(1)), FORK: (Base(number, 1, made.plan.attempt), tiny_state(2))}
        stepping(self.store)
        pending_deletes = {StepOfRun(RUN, 1, 1)}
        self.actors = [Actor(self.store, lambda: save(self.store, made))]
        self.actors += [Actor(self.store, lambda: collect(self.store, pending_deletes)) for _ in range(2)]

    def move(self, choice: int) -> None:
        if choice == TIME:
            self.store.now += 1000.0
        elif choice == KILL:
            self.actors[SAVER].kill()
        else:
            self.actors[choice].step()
        self.check()

    def there(self, run: str) -> bool:
        """Whether the run's step is committed, or complete, and not removed."""
        base = self.steps[run][0]
        found = commit.find_commit(self.store, names.commit(run, 1, 1))
        decision = commit.find_decision(self.store, names.decision(run, 1, 1, base.attempt))
        return decision is not None and decision.outcome == "commit" and not (found is not None and found.tombstone)

    def check(self) -> None:
        for run in filter(self.there, self.steps):
            key = names.manifest(run, 1, 1, self.steps[run][0].attempt, 0)
            for pack in manifest.decode(self.store.objects[key][0], key).packs:
                assert pack.key in self.store.objects, f"run {run} has lost {pack.key}"

    def end(self) -> None:
        drive_to_end(self.actors, self.check)
        self.store.now += 1000.0
        collect(self.store, ())
        self.check()
        for run in filter(self.there, self.steps):
            base, state = self.steps[run]
            assert load(self.store, base, run=run) == state


def play(choices: Iterable[int]) -> World:
    world = World()
    for choice in choices:
        world.move(choice)
    world.end()
    return world


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=120))
def test_no_order_of_moves_loses_a_pack_of_a_fork(choices: list[int]) -> None:
    play(choices)


def bursts(seed: int, count: int) -> Iterable[list[int]]:
    chance = random.Random(seed)
    for _ in range(count):
        moves: list[int] = []
        while len(moves) < 110:
            actor = chance.choices(range(5), [6, 5, 5, 1, 0.1])[0]
            moves += [actor] * (chance.randint(1, 25) if actor < TIME else 1)
        yield moves


def test_bursts_lose_nothing_and_forks_do_lean_on_what_is_collected_later() -> None:
    leant = 0
    for moves in bursts(1, 60):
        world = play(moves)
        if world.there(FORK) and not world.there(RUN):
            key = names.manifest(FORK, 1, 1, world.steps[FORK][0].attempt, 0)
            found = manifest.decode(world.store.objects[key][0], key)
            leant += any(pack.attempt == world.steps[RUN][0].attempt for pack in found.packs)
    assert leant > 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_great_many_bursts_lose_nothing_of_a_fork() -> None:
    for moves in bursts(2, 3000):
        play(moves)


def in_its_own_run(seen: Inventory, pending_deletes: Iterable[StepOfRun], now: float) -> set[StepOfRun]:
    """The rule of collectors that know nothing of forks."""
    leant = {
        StepOfRun(held.lease.run, base.timeline, base.step)
        for leases in seen.leases.values()
        for held in leases
        if not plans.is_over(held, now)
        for base in held.lease.bases
    }
    return set(pending_deletes) & leant


def test_the_search_finds_what_the_run_of_a_base_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "spared", in_its_own_run)
    with pytest.raises(AssertionError, match=f"run {FORK} has lost"):
        for moves in bursts(7, 1500):
            play(moves)


def test_a_collector_of_before_forks_refuses_a_lease_that_leans_on_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    while not [key for key in world.store.objects if key.startswith("leases/")]:
        world.move(SAVER)
    (key,) = [key for key in world.store.objects if key.startswith("leases/")]
    lease = documents.decode(world.store.objects[key][0], Lease, key)
    assert (lease.version, lease.bases[0].run) == (2, RUN)
    monkeypatch.setattr(Lease, "newest", 1)
    with pytest.raises(UnsupportedError, match="install a newer Headrace"):
        documents.decode(world.store.objects[key][0], Lease, key)
    monkeypatch.undo()
    world.end()


def model(seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    frozen = torch.from_numpy(rng.standard_normal(2 * MIB // 4, dtype=np.float32))
    return {"frozen": frozen, "tuned": torch.full((100_000,), float(seed))}


@pytest.mark.parametrize("how", ["restored", "named"])
def test_a_fork_finds_the_frozen_bytes_of_its_origin_and_outlives_it(how: str, store_url: str) -> None:
    with Checkpointer(store_url, run="origin", sidecar=None) as checkpointer:
        checkpointer.save(1, model(1)).result(60)
        checkpointer.save(2, model(2)).result(60)
    base = ("origin", 1) if how == "named" else None
    with Checkpointer(store_url, run="tuned", sidecar=None, base=base) as checkpointer:
        if how == "restored":
            into = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
            assert checkpointer.restore(into, 2, run="origin") == 2
        with open_store(store_url) as store:
            held = [read(store, info.key, Lease).run for info in store.list("leases/")]
        assert held == (["origin"] if how == "restored" else [])  # until there is a step of its own
        first = checkpointer.save(1, model(3)).result(60)
        assert first.bytes_deduplicated == 2 * MIB
        assert first.bytes_written < MIB
        second = checkpointer.save(2, model(4)).result(60)
        assert second.bytes_deduplicated == 2 * MIB
    with open_store(store_url) as store:
        assert not list(store.list("leases/"))
        removed = collect(store, {StepOfRun("origin", 1, 1), StepOfRun("origin", 1, 2)})
        assert len(removed.tombstones) == 2
        assert repository.find(store, "origin", "latest") is None
    with Checkpointer(store_url, run="tuned", sidecar=None) as checkpointer:
        into = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        assert checkpointer.restore(into) == 2
    assert all(torch.equal(into[name], tensor) for name, tensor in model(4).items())


def test_a_fork_of_what_is_not_there_starts_anew(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path), run="tuned", sidecar=None, base="nothing") as checkpointer:
        assert checkpointer.save(1, model(1)).result(60).bytes_deduplicated == 0
    with pytest.raises(UsageError, match="name a run"):
        Checkpointer(str(tmp_path), run="tuned", base="no/run")


def test_a_trainer_whose_base_is_not_there_takes_nothing_over(tmp_path: Path) -> None:
    state = {"w": torch.arange(5.0)}
    with Checkpointer(str(tmp_path), run=FORK, sidecar=None) as running:
        running.save(1, state).result(60)
        with (
            Checkpointer(str(tmp_path), run=FORK + "2", base=(FORK, 7), sidecar=None) as mistaken,
            pytest.raises(NotFoundError, match="no step 7"),
        ):
            mistaken.save(2, state)
    with open_store(str(tmp_path)) as store:
        assert timeline.numbers(store, FORK + "2") == []
