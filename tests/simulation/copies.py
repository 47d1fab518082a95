"""Random histories of a run that is copied: real copiers, collectors and readers of the destination, in virtual time.

The source grows and branches while copiers work. Requests to the destination are refused, lost, late or doubled, and
copiers and collectors are killed and stopped, as in `History`.

Promise: every step at the destination has the bytes of the source's step. The latest step there was one of the source's
branch at some time. What a copier reported as copied stays until a policy removes it. In the end, one more copy is
enough to make the latest step that of the source.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

from headrace.checkpoint.copies import step as step_copies
from headrace.checkpoint.copies.copy import COPIED, RunCopier, Selection, run_copiers
from headrace.checkpoint.copies.identity import attempt_of
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, Decision, Repo, decode, encode
from headrace.checkpoint.repository import fetch, group_commit, inventory, lease
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.core.limits import KIB
from headrace.dataio.store.base import Location
from headrace.dataio.testing.simulation.scheduler import Process
from headrace.dataio.testing.simulation.store import Faults
from headrace.dataio.testing.simulation.threads import patched
from tests.simulation.history import LEASE_SECONDS, Acked, BrokenPromiseError, History, Journal
from tests.support.checkpoint_states import RUN, begin, load, make, save
from tests.support.copied_runs import sharded
from tests.support.stepping import MemoryStore

GENERATIONS = 40
Snapshot = dict[str, tuple[bytes, float]]


class Source(MemoryStore):
    """The source. It answers at once and without faults, and has no collectors."""

    @property
    def location(self) -> Location:
        return Location("memory://source", {}, shareable=False)


@cache
def growth() -> tuple[tuple[Snapshot, ...], dict[str, dict[str, bytes]], list[set[tuple[int, int]]]]:
    """The source after each of its saves, the tensors of each attempt, and the steps of its branch after each save."""
    store, saved = Source(), list[Base]()
    snapshots, branches = list[Snapshot](), list[set[tuple[int, int]]]()
    number = begin(store)
    for step in (1, 2, 3, 4, 5, 4, 5, 6):
        if len(saved) == 5:  # the trainer goes back to step 3
            number = begin(store, saved[2])
        if step == 2:
            saved.append(sharded(store, 2, bytes(range(256)) * 512, step, number))
        else:
            state = {"turn": bytes([step % 2 + 1]) * (70 * KIB), "new": bytes([len(saved) + 9]) * (66 * KIB)}
            metadata = {"loss": len(saved) / 8}
            made = make(store, state, step=step, number=number, bases=tuple(saved[-2:]), metadata=metadata)
            saved.append(save(store, made))
        snapshots.append(dict(store.objects))
        branches.append({(base.timeline, base.step) for base in repository.visible(store, RUN)})
    return tuple(snapshots), {base.attempt: load(store, base) for base in saved}, branches


class CopyHistory(History):
    """One history, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        snapshots, contents, _ = growth()
        self.source, self.stage = Source(), 0
        self._grow(self.draw.randint(0, 3))
        for attempt, tensors in contents.items():
            self.journal.contents |= {attempt_of(attempt, RUN, n): tensors for n in range(GENERATIONS)}
        self._metadata = {
            attempt_of(attempt, RUN, n): {} if number == 1 else {"loss": number / 8}  # ranks of step 2 have none
            for number, attempt in enumerate(contents)
            for n in range(GENERATIONS)
        }
        assert len(snapshots) == 8

    def run(self) -> Journal:
        """Run the history to its end, then check the final state."""
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        with (
            patched(self.simulation, lease, fetch, inventory, group_commit),
            mock.patch.object(step_copies, "_TRIES", 3),
        ):
            self.simulation.start(self._story, process=Process("driver"))
            self._run_all()
            self.bucket.faults = Faults()
            self.simulation.start(self._judge, process=Process("judge"))
            self._run_all()
        return self.journal

    def _story(self) -> None:
        for number in range(self.draw.choice((1, 2))):
            self._begin(self._collector, f"collector {number}")
        self._begin(self._reader, "reader")
        for number in range(self.draw.choice((2, 3, 4))):
            process = self._begin(self._copier, f"trainer's copier {number}")
            self._disturb([process])
            self._grow(min(self.stage + self.draw.choice((0, 1, 2)), 7))
        self.simulation.sleep(self.draw.uniform(0, 2 * LEASE_SECONDS))
        self.over = True

    def _grow(self, stage: int) -> None:
        self.stage = stage
        self.source.objects.update(growth()[0][stage])

    def _copier(self) -> None:
        while not self.over:
            copier = self._new_copier()
            for _ in range(self.draw.randint(1, 3)):
                self.simulation.sleep(self.draw.uniform(0, LEASE_SECONDS / 4))
                self._copy(copier, Selection(last=self.draw.choice((None, 1, 2, 3))))

    def _copy(self, copier: RunCopier, selection: Selection) -> None:
        try:
            for outcome in copier.copy(selection):
                if outcome.state == COPIED:
                    base = Base(outcome.timeline, outcome.step, outcome.attempt)
                    self.journal.acked.append(Acked(base, self.simulation.now))
        except HeadraceError as error:
            if error.exit_code == 5:
                raise BrokenPromiseError(f"a conflict, although all is a copy: {error}") from error
            if isinstance(error, CorruptionError):
                self.require_flips(f"a copier found damage: {error}")

    def _new_copier(self) -> RunCopier:
        while True:
            try:
                return run_copiers(self.source, self.store, RUN, workers=1, life=LEASE_SECONDS, clock=self.clock)[0]
            except HeadraceError:
                self.simulation.sleep(1.0)

    def _check_not_older(self, found: Base | None, began: float) -> None:
        """The latest step was one of the source's branch after one of its saves so far."""
        seen = set().union(*growth()[2][: self.stage + 1])
        if found is not None and (found.timeline, found.step) not in seen:
            raise BrokenPromiseError(f"the latest step is {found}, which the source has not in its branch")

    def _check_metadata(self, base: Base) -> None:
        """The decision has the metadata of the source's step."""
        key = names.decision(RUN, base.timeline, base.step, base.attempt)
        found = decode(self.bucket.objects[key][0], Decision, key).values()
        if found != self._metadata[base.attempt]:
            raise BrokenPromiseError(f"the decision of {base} has the metadata {found}")

    def _judge(self) -> None:
        self._copy(self._new_copier(), Selection())
        newest = next(repository.visible(self.source, RUN))
        found = repository.find(self.store, RUN, "latest")
        if found is None or (found.timeline, found.step) != (newest.timeline, newest.step):
            raise BrokenPromiseError(f"the latest step is {found}, that of the source is {newest}")
        super()._judge()
