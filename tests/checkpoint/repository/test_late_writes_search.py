"""Two savers of one plan and collectors of the real code, interleaved at every operation, on a store that applies requests late.

Any earlier request may be applied once more at any moment, and the next one may time out. At every moment every step that exists
has its packs as its manifest means them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import pytest

from headrace.checkpoint.format import manifest, names, pack
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base, Decision, StepOfRun, decode
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.collect import collect
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.dataio.core.errors import TransientError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Buffer
from headrace.dataio.testing.faulty_stores import Write
from tests.support.checkpoint_states import RUN, Made, begin, load, make, save
from tests.support.stepping import Actor, MemoryStore, drive_to_end, stepping

pytestmark = pytest.mark.slow

Result = TypeVar("Result")
FIRST_SAVER, SECOND_SAVER, FIRST, SECOND, TIME, LAND, LOSE = range(7)
STATES = {n: {"frozen": bytes(160 * KIB), "w": os.urandom(80 * KIB) * 2} for n in (1, 2)}
"""The second saver compresses, so that its packs have other bytes."""


class LateMemory(MemoryStore):
    """`sent`: all requests that change something; the next of an actor is lost, after `lose`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Write] = []
        self.lose = False

    def put(self, key: str, data: Buffer) -> None:
        self._send(Write(key, bytes(data)), lambda: super(LateMemory, self).put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._send(Write(key, bytes(data), True), lambda: super(LateMemory, self).put_if_absent(key, data))

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        body = b"".join(bytes(part) for part in parts)
        return self._send(Write(key, body), lambda: super(LateMemory, self).put_multipart(key, [body]))

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._send(Write(key, None), partial(super().delete_many, [key]))

    def _send(self, write: Write, work: Callable[[], Result]) -> Result:
        self.sent.append(write)
        if self.lose:
            self.lose = False
            raise TransientError("timed out")
        return work()

    def land(self, write: Write) -> None:
        if write.data is None:
            self.objects.pop(write.key, None)
        elif not (write.if_absent and write.key in self.objects):
            self.objects[write.key] = write.data, self.now


class World:
    """A committed step; two savers of the next, which leans on it; collectors of the first, and of both."""

    def __init__(self) -> None:
        self.store = LateMemory()
        self.base = save(self.store, make(self.store, STATES[1], step=1, number=begin(self.store)))
        made = make(self.store, STATES[2], step=2, bases=(self.base,))
        self.new = Base(1, 2, made.plan.attempt)
        self.progress = os.memfd_create("progress")
        other = Made(made.arena, msgspec.structs.replace(made.plan, compression="zstd"))
        stepping(self.store)
        first, both = {StepOfRun(RUN, 1, 1)}, {StepOfRun(RUN, 1, 1), StepOfRun(RUN, 1, 2)}
        self.actors = [
            Actor(self.store, lambda: self._save(made)),
            Actor(self.store, lambda: self._save(other)),
            Actor(self.store, lambda: collect(self.store, first)),
            Actor(self.store, lambda: collect(self.store, both)),
        ]

    def _save(self, made: Made) -> None:
        book = ProgressFile(self.progress)
        commit_staged(made.arena, made.plan, lambda _: None, store=RecordingStore(self.store, book), progress=book)

    def move(self, choice: int, draw: random.Random) -> None:
        if choice == TIME:
            self.store.now += 1000.0
        elif choice == LAND:
            self.store.land(draw.choice(self.store.sent))
        elif choice == LOSE:
            self.store.lose = True
        else:
            self.actors[choice].step()
        self.check()

    def check(self) -> None:
        """Every step that is committed, or complete and not removed, has its manifest and its packs."""
        objects = self.store.objects
        for base in (self.base, self.new):
            decision_key = names.decision(RUN, 1, base.step, base.attempt)
            commit_key = names.commit(RUN, 1, base.step)
            found = commit.find_commit(self.store, commit_key) if commit_key in objects else None
            decision = decode(objects[decision_key][0], Decision, decision_key) if decision_key in objects else None
            removed = found is not None and found.tombstone
            if removed or (found is None and (decision is None or decision.outcome != "commit")):
                continue
            assert decision is not None, f"step {base.step} has lost its decision"
            key = names.manifest(RUN, 1, base.step, base.attempt, 0)
            assert key in objects, f"step {base.step} has lost its manifest"
            assert (digest(objects[key][0]).hex(),) == decision.manifests
            self._check_packs(base, manifest.decode(objects[key][0], key))

    def _check_packs(self, base: Base, found: manifest.Manifest) -> None:
        tables = {}
        for name in found.packs:
            assert name.key in self.store.objects, f"step {base.step} has lost {name.key}"
            tables[name.key] = {entry.offset: entry for entry in pack.read_table(self.store, name.key)}
        for chunk in found.chunks:
            entry = tables[found.packs[chunk.pack].key].get(chunk.offset)
            assert entry is not None, f"step {base.step} has lost a chunk"
            assert (entry.digest, entry.stored) == (chunk.digest, chunk.stored), f"step {base.step} has lost a chunk"

    def end(self, draw: random.Random) -> bool:
        """All come to an end, and everything is applied once more; whether the new step is there."""
        self.store.lose = False
        drive_to_end(self.actors, self.check)
        for write in draw.sample(self.store.sent, len(self.store.sent)):
            self.store.land(write)
            self.check()
        for _ in range(2):
            self.store.now += 1000.0
            collect(self.store, ())
            self.check()
        os.close(self.progress)
        found = commit.find_commit(self.store, names.commit(RUN, 1, 2))
        if found is None or found.tombstone:
            return False
        assert load(self.store, self.new) == STATES[2]
        return True


def play(seed: int) -> bool:
    """Bursts: one actor moves some times, then another; requests are applied late, or lost, now and then."""
    draw, world, moves = random.Random(seed), World(), 0
    while moves < 150:
        choice = draw.choices(range(7), [6, 5, 3, 2, 1, 4, 0.3])[0]
        for _ in range(draw.randint(1, 25) if choice < TIME else 1):
            world.move(choice, draw)
            moves += 1
    return world.end(draw)


def play_all(seeds: Sequence[int]) -> list[bool]:
    return [play(seed) for seed in seeds]


def test_no_late_request_takes_anything_from_a_step() -> None:
    there = play_all(range(40))
    assert 5 < sum(there) < 40


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_great_many_late_requests_do_not_either() -> None:
    play_all(range(1000, 4000))


def test_the_search_finds_packs_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressFile, "name", lambda _, plan, n: manifest.PackName(plan.attempt, f"0-0123abcd-{n}"))
    with pytest.raises(AssertionError, match="has lost"):
        play_all(range(200))
