"""Random histories of a published name in virtual time: the real publisher, subscriber, tags and collection.

One seed draws everything: how many publishers and subscribers there are, which processes are killed or stopped and when,
and which requests are refused, lost, late or doubled. A publisher of the trainer compares saves in staging memory, before or
after their commit, while the next save may take the memory.

Promises that `PublishingHistory.run` checks:

- A subscriber's tensors hold exactly one version, also after an error of `apply` (except of the first one).
- The versions that a subscriber sees have ascending numbers.
- A version whose publication was reported exists, or a newer one does, or the name was withdrawn after it. The newest
  version can be read at the end, although a collector removed what the policy does not keep.
- One number is that of one version. Of two publications with one number, one fails.
- Every wait ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import TensorSpec, lay_out, whole
from headrace.checkpoint.format.documents import Base, Repo, encode
from headrace.checkpoint.publishing import changes, comparison, publisher, records, source, withdrawal
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.publishing.subscriber import Subscriber
from headrace.checkpoint.repository import collect, fetch, inventory, lease
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.saving.arena import StagedCopy, Staging
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError
from headrace.dataio.core.limits import KIB
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, Faults, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched
from tests.simulation.history import BrokenPromiseError
from tests.support.checkpoint_states import RUN, Made, begin, make, save

NAME = "policy"
LIMIT = 48 * 3600.0
SIZE = 48 * KIB
TARGETS = (
    ("PUT", "published/"),
    ("PUT", "tags/"),
    ("PUT", "leases/"),
    ("DELETE", ""),
    ("GET", "published/"),
    None,
    None,
)


@dataclass
class PublishingJournal:
    """What the processes did. `contents`: the tensors of each attempt."""

    contents: dict[str, dict[str, bytes]] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)
    applied: int = 0
    refused: int = 0
    killed: int = 0
    paused: int = 0
    removed: int = 0
    withdrawn: int = 0
    early: int = 0
    left_records: int = 0


class PublishingHistory:
    """One history, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed, self.simulation = seed, Simulation(seed, limit=LIMIT)
        self.draw = self.simulation.random
        share, late = self.draw.choice((0.0, 0.0, 0.01, 0.03)), self.draw.choice((0.0, 0.02, 0.1))
        faults = Faults(refused=share, lost=share, late=late, twice=late, late_seconds=400.0, patience=5.0)
        self.bucket = Bucket(self.simulation, latency=0.02, faults=faults)
        self.store, self.clock = SimulatedStore(self.bucket), self.simulation.clock
        self.journal, self.over = PublishingJournal(), False
        self.staging, self.staged = Staging(), ""
        self.saved: dict[str, Base | None] = {}
        self._target = self.draw.choice(TARGETS)
        self.bucket.watch = self._strike

    def run(self) -> PublishingJournal:
        """Run the history to its end, then check the final state."""
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        with patched(self.simulation, lease, fetch, inventory, comparison, source, changes):
            self.simulation.start(self._story, process=Process("driver"))
            self._run_all()
            self.bucket.faults = Faults()
            self.simulation.start(self._judge, process=Process("judge"))
            self._run_all()
        self.staging.close()
        return self.journal

    def _run_all(self) -> None:
        self.simulation.run()
        for task in self.simulation.tasks:
            if task.error is not None:
                raise BrokenPromiseError(f"seed {self.seed}: {task.process.name}: {task.error!r}") from task.error
        self.simulation.tasks.clear()

    def _story(self) -> None:
        for name, work, count in (
            ("collector", self._collector, self.draw.choice((0, 1))),
            ("withdrawer", self._withdrawer, self.draw.choice((0, 0, 1))),
            ("publisher", self._publisher, self.draw.choice((0, 1, 1, 2))),
            ("staged publisher", self._staged_publisher, self.draw.choice((0, 1, 1))),
            ("subscriber", self._subscriber, self.draw.choice((1, 2))),
        ):
            for number in range(count):
                process = Process(f"{name} {number}")
                self.simulation.start(work, process=process, name=process.name)
        try:
            self._trainer()
            self.simulation.sleep(self.draw.uniform(10, 120))
        except HeadraceError:  # the store failed before the first save
            pass
        finally:
            self.over = True

    def _trainer(self) -> None:
        """Save steps whose weights change a little."""
        random = Random(self.seed)
        number = begin(self.store)
        weights = bytearray(np.random.default_rng(self.seed).bytes(SIZE))
        for step in range(1, self.draw.randint(3, 6)):
            for _ in range(random.choice((3, 300, SIZE))):
                weights[random.randrange(SIZE)] ^= 1
            state = {"frozen": bytes(5000), "weights": bytes(weights), "step": bytes([step])}
            made = make(self.store, state, step=step, number=number)
            self.journal.contents[made.plan.attempt] = state
            self._stage(made, state)
            self.saved[made.plan.attempt] = None
            self.simulation.sleep(self.draw.choice((0.0, 3.0)))
            try:
                self.saved[made.plan.attempt] = save(self.store, made, clock=self.clock)
            except HeadraceError:
                continue
            self.simulation.sleep(self.draw.uniform(1, 40))

    def _stage(self, made: Made, state: dict[str, bytes]) -> None:
        """Take the staging memory from the save before, and copy the state into it."""
        specs = [TensorSpec(name, "uint8", whole((len(data),))) for name, data in state.items()]
        layout, attempt = lay_out(specs), made.plan.attempt
        arena = self.staging.take(layout, 1.0)
        arena.bytes[: len(made.arena)] = made.arena
        self.staging.set_copy(StagedCopy(attempt, made.plan.tree, tuple(specs), layout))
        self.staging.give_back()
        self.staged = attempt

    def _publisher(self) -> None:
        held = self.draw.choice((None, comparison.Held()))
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, 20))
            try:
                steps = list(repository.visible(self.store, RUN))
                if not steps:
                    continue
                base: Base = steps[0] if self.draw.random() < 0.8 else self.draw.choice(steps)
                version = publisher.publish(self.store, NAME, RUN, base, Choice(), held=held, clock=self.clock)
            except HeadraceError:
                continue
            self._report(version)

    def _staged_publisher(self) -> None:
        """Compare the newest save in staging memory, and publish it after its commit, if it was committed."""
        held, last = comparison.Held(), ""
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, 2))
            if self.staged == last:
                continue
            last, compared = self.staged, None
            with suppress(HeadraceError):
                compared = publisher.begin(self.store, NAME, Choice(), last, self.staging, held, self.clock)
            self.simulation.sleep(self.draw.choice((0.0, 5.0, 60.0)))
            base = self.saved[last]
            if base is None:  # the save failed, or takes longer than the publisher waits
                if compared is not None:
                    compared.discard(self.store)
                continue
            try:
                version = publisher.publish(
                    self.store,
                    NAME,
                    RUN,
                    base,
                    Choice(),
                    held=held,
                    staging=self.staging,
                    early=compared,
                    clock=self.clock,
                )
            except HeadraceError:
                continue
            self._report(version)
            self.journal.early += (
                compared is not None and version.update is not None and version.update == compared.update
            )

    def _report(self, version: records.Published) -> None:
        if version.number in self.journal.published:
            raise BrokenPromiseError(f"two publications of version {version.number} were reported")
        self.journal.published.append(version.number)

    def _collector(self) -> None:
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, 30))
            try:
                done = collect.retain(self.store, RUN, Keep(last=1, tags=()), self.clock)
            except HeadraceError:
                continue
            self.journal.removed += len(done.tombstones) if done else 0

    def _withdrawer(self) -> None:
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, 60))
            try:
                withdrawal.withdraw(self.store, NAME, clock=self.clock)
            except HeadraceError:
                continue
            self.journal.withdrawn += 1

    def _subscriber(self) -> None:
        held: dict[str, torch.Tensor] = {
            "frozen": torch.zeros(5000, dtype=torch.uint8),
            "weights": torch.zeros(SIZE, dtype=torch.uint8),
            "step": torch.zeros(1, dtype=torch.uint8),
        }
        subscriber, last = Subscriber(self.store, NAME, sidecar=None, clock=self.clock), 0
        expected: dict[str, bytes] | None = None
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, 15))
            try:
                version = subscriber.newest()
                if version is None:
                    continue
                if version.number < last:
                    raise BrokenPromiseError(f"version {version.number} was seen after version {last}")
                last, wanted = version.number, self.journal.contents[version.attempt]
                version.apply(held)
            except HeadraceError:
                self.journal.refused += 1
                if expected is not None and contents(held) != expected:
                    raise BrokenPromiseError("a failed apply left other contents") from None
                continue
            if contents(held) != wanted:
                raise BrokenPromiseError(f"version {version.number} was applied, and the tensors hold something else")
            expected = wanted
            self.journal.applied += 1

    def _strike(self, operation: str, key: str, now: float) -> None:
        """Kill or stop the process that sends a certain request, before it is applied."""
        process = self.simulation.process
        if self._target is None or process.name in ("driver", "judge"):
            return
        wanted, part = self._target
        if operation != wanted or part not in key or self.draw.random() > 0.3:
            return
        if self.draw.random() < 0.5:
            self.simulation.kill(process)
            self.journal.killed += 1
        else:
            self.simulation.pause(process, self.draw.uniform(1, 900))
            self.journal.paused += 1
        if self.draw.random() < 0.7:
            self._target = None

    def _judge(self) -> None:
        """After all late requests were applied, the newest version is at least the newest reported, and can be read.

        Records of dead collectors may still name its step.
        """
        self.simulation.sleep(3600)
        self.journal.left_records = len(list(self.store.list(names.GC)))
        collect.collect(self.store, (), self.clock)
        collect.retain(self.store, RUN, Keep(last=1, tags=()), self.clock)
        newest, number = records.find(self.store, NAME), records.newest_number(self.store, NAME) or 0
        if number < max(self.journal.published, default=0):
            raise BrokenPromiseError(
                f"version {max(self.journal.published)} was published, and the newest record is {number}"
            )
        if newest is None:  # there is no record, or the newest one withdraws the name
            return
        wanted = self.journal.contents[newest.attempt]
        held = {name: torch.zeros(len(data), dtype=torch.uint8) for name, data in wanted.items()}
        try:
            version = Subscriber(self.store, NAME, sidecar=None, clock=self.clock).newest()
            assert version is not None
            version.apply(held)
        except (CorruptionError, NotFoundError) as error:
            raise BrokenPromiseError(f"the newest version {newest.number} cannot be read: {error}") from error
        if contents(held) != wanted:
            raise BrokenPromiseError("the newest version has other contents than its step")


def contents(held: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The bytes of the tensors."""
    return {name: tensor.numpy().tobytes() for name, tensor in held.items()}
