"""Random histories of one run in virtual time: the real commit, restore and collection code, judged after every read.

One seed draws everything: how many ranks and trainers there are, whether they commit in groups, which processes are
killed or stopped and when, which requests are refused, lost, late or doubled, and the order of simultaneous events.

Promise that `History.run` checks: a step that was reported as committed stays restorable to the byte until the policy
removes it; every other attempt is invisible or complete; the latest step never goes back; every wait ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from unittest import mock

from msgspec import structs

from headrace.checkpoint.format import group, names
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.documents import Base, Commit, Decision, Repo, StepName, decode, encode
from headrace.checkpoint.lineage import ParentLease
from headrace.checkpoint.repository import collect, fetch, group_commit, inventory, lease, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.retention import Keep, Plan
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.saving.executor import own_manifest_of
from headrace.checkpoint.saving.plan import OwnManifest, PutPlan
from headrace.checkpoint.saving.progress import ProgressFile
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError
from headrace.dataio.core.limits import KIB
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Simulation
from headrace.dataio.testing.simulation.store import Bucket, Faults, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched
from tests.support.checkpoint_states import RUN, make, whole_tensors

LEASE_SECONDS = 60.0
FROZEN, FRESH = 64 * KIB, 16
"""Bytes of a rank's tensor that never changes, and of its tensor that changes with every step."""
ANY, TRAINER, COLLECTOR = "", "trainer", "collector"
TARGETS = (
    *((ANY, "PUT", part) for part in ("/fate", "/COMMIT", ".manifest", "/group-", ".pack", "leases/", "gc/")),
    *((ANY, "LIST", part) for part in ("runs/", "packs/", "leases/", "gc/")),
    *((ANY, "DELETE", part) for part in ("leases/", "packs/")),
    *((COLLECTOR, "PUT", "/COMMIT") for _ in range(4)),
    (COLLECTOR, "GET", "leases/"),
    *((TRAINER, "PUT", "/COMMIT"), (TRAINER, "PUT", "/fate"), None, None),
)
"""At which request a process is struck: whose, its operation, a part of its key; None: at no request."""
LIMIT = 6 * 3600.0
"""Every process of a history must have ended after this many virtual seconds."""


class BrokenPromiseError(AssertionError):
    """What a reader or the final judgement saw, with the seed."""


@dataclass(frozen=True)
class Acked:
    """A save that was reported as committed, and when."""

    base: Base
    at: float


@dataclass
class Journal:
    """What the processes did and were told. `contents`: what each attempt saves, by tensor."""

    contents: dict[str, dict[str, bytes]] = field(default_factory=dict)
    acked: list[Acked] = field(default_factory=list)
    opened: list[tuple[int, float]] = field(default_factory=list)
    reads: int = 0
    killed: int = 0
    paused: int = 0
    removed: int = 0


class History:
    """One history, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.simulation = Simulation(seed, limit=LIMIT)
        self.draw = self.simulation.random
        share, late = self.draw.choice((0.0, 0.0, 0.01, 0.03)), self.draw.choice((0.0, 0.02, 0.1))
        flipped = Random(seed).choice((0.0, 0.0, 0.02, 0.1))
        faults = Faults(
            refused=share, lost=share, late=late, twice=late, flipped=flipped, late_seconds=400.0, patience=5.0
        )
        self.bucket = Bucket(self.simulation, latency=0.02, faults=faults)
        self.store = SimulatedStore(self.bucket)
        self.clock = self.simulation.clock
        self.journal = Journal()
        self.keep = Keep(last=self.draw.choice((1, 2)))
        self.group_ranks = Random(seed).choice((names.GROUP_RANKS, names.GROUP_RANKS, 1, 2))
        self.over = False
        self._target = self.draw.choice(TARGETS)
        self.bucket.watch = self._strike

    def run(self) -> Journal:
        """Run the history to its end, then check the final state."""
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        with (
            patched(self.simulation, lease, fetch, inventory, group_commit),
            mock.patch.object(names, "GROUP_RANKS", self.group_ranks),
        ):
            self.simulation.start(self._story, process=Process("driver"))
            self._run_all()
            self.bucket.faults = Faults()
            self.simulation.start(self._judge, process=Process("judge"))
            self._run_all()
        return self.journal

    def _run_all(self) -> None:
        self.simulation.run()
        for task in self.simulation.tasks:
            if task.error is not None:
                raise BrokenPromiseError(f"seed {self.seed}: {task.process.name}: {task.error!r}") from task.error
        self.simulation.tasks.clear()

    # what happens

    def _story(self) -> None:
        for number in range(self.draw.choice((1, 2))):
            self._begin(self._collector, f"collector {number}")
        self._begin(self._reader, "reader")
        for number in range(self.draw.choice((1, 2, 2, 3))):
            ranks = self._start_trainer(number)
            self._disturb(ranks)
        self.simulation.sleep(self.draw.uniform(0, 2 * LEASE_SECONDS))
        self.over = True

    def _begin(self, work: object, name: str) -> Process:
        process = Process(name)
        self.simulation.start(work, process=process, name=name)  # type: ignore[arg-type]
        return process

    def _start_trainer(self, number: int) -> list[Process]:
        world = self.draw.choice((1, 2, 2, 3))
        group = Group(self.simulation, world, timeout=3 * LEASE_SECONDS)
        saves = self.draw.randint(1, 4)
        found = []
        for rank in range(world):
            process = Process(f"trainer {number}, rank {rank}")
            trainer = Trainer(self, SimulatedRanks(group, rank), saves)
            self.simulation.start(trainer.run, process=process, name=process.name)
            found.append(process)
        return found

    def _disturb(self, ranks: list[Process]) -> None:
        """Let the trainer work for a while; then kill or stop some of its ranks, or leave it alone."""
        self.simulation.sleep(self.draw.uniform(0, 30))
        what = self.draw.choice(("kill", "kill", "pause", "pause", "leave"))
        hit = self.draw.sample(ranks, self.draw.randint(1, len(ranks)))
        for process in hit if what == "kill" else ():
            self.simulation.kill(process)
            self.journal.killed += 1
        for process in hit if what == "pause" else ():
            self.simulation.pause(process, self.draw.uniform(1, 3 * LEASE_SECONDS))
            self.journal.paused += 1
        self.simulation.sleep(self.draw.uniform(0, 1.5 * LEASE_SECONDS))

    def _strike(self, operation: str, key: str, now: float) -> None:
        """Kill or stop the process that sends a certain request, before it is applied."""
        process = self.simulation.process
        if self._target is None or process.name in ("driver", "judge", "reader"):
            return
        whose, wanted, part = self._target
        if operation != wanted or part not in key or not process.name.startswith(whose):
            return
        if whose != COLLECTOR and self.draw.random() > 0.3:
            return
        if self.draw.random() < 0.3:
            self.simulation.kill(process)
            self.journal.killed += 1
        else:
            self.simulation.pause(process, self.draw.uniform(1, 4 * LEASE_SECONDS))
            self.journal.paused += 1
        if self.draw.random() < 0.7:
            self._target = None

    def _collector(self) -> None:
        collector = collect.Collector(self.store)
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, LEASE_SECONDS / 3))
            try:
                if self.draw.random() < 0.4:
                    done: Plan | None = collect.collect(self.store, [], self.clock, collector)
                else:
                    done = collect.retain(self.store, RUN, self.keep, self.clock, collector)
            except HeadraceError:
                continue
            self.journal.removed += len(done.tombstones) if done else 0

    def _reader(self) -> None:
        while not self.over:
            self.simulation.sleep(self.draw.uniform(0, LEASE_SECONDS / 6))
            began = self.simulation.now
            try:
                found = repository.find(self.store, RUN, "latest")
            except CorruptionError as error:
                self.require_flips(f"latest: {error}")
                continue
            except HeadraceError:
                continue
            self._check_not_older(found, began)
            try:
                there = list(repository.visible(self.store, RUN))
            except HeadraceError:
                continue
            if there:
                self._check_readable(self.draw.choice(there))

    # what must hold

    def require_flips(self, what: str) -> None:
        """A reader may find damage while bits flip on the way, three times in a row. The judge reads without flips."""
        if not self.bucket.faults.flipped:
            raise BrokenPromiseError(what)

    def _check_not_older(self, found: Base | None, began: float) -> None:
        """The latest step is not before one whose save had been reported as committed, in the newest timeline."""
        newest = max((number for number, _ in self.journal.opened), default=0)
        known = [a.base for a in self.journal.acked if a.at < began and a.base.timeline == newest]
        best = max((base.step for base in known), default=-1)
        if best >= 0 and (found is None or (found.timeline, found.step) < (newest, best)):
            raise BrokenPromiseError(f"step {best} of timeline {newest} was committed, and the latest is {found}")

    def _check_readable(self, base: Base) -> None:
        """What a reader of the step gets is what the attempt saved. While it reads, its lease keeps the step.

        Retention may remove the step only until the reader has its lease.
        """
        wanted = self.journal.contents[base.attempt]
        for _ in range(5):
            leased = False
            try:
                with chunk_reader.LeasedStep(self.store, RUN, base, self.clock) as step:
                    leased = True
                    self.simulation.sleep(self.draw.choice((0.0, 0.0, LEASE_SECONDS / 2)))
                    got = whole_tensors(self.store, step)
            except NotFoundError as error:
                if leased:
                    raise BrokenPromiseError(f"{base} was removed while it was read: {error}") from error
                return
            except CorruptionError as error:
                self.require_flips(f"{base}: {error}")
                continue
            except HeadraceError:
                continue
            if got != wanted:
                raise BrokenPromiseError(f"{base} has other bytes than were saved")
            self.journal.reads += 1
            return

    def _judge(self) -> None:
        """After everything has ended and every late request was applied: all committed steps, twice around a collection."""
        for _ in range(2):
            for base in self._committed():
                self._check_metadata(base)
                self._check_readable(base)
            self._check_acked()
            self._check_not_older(repository.find(self.store, RUN, "latest"), self.simulation.now)
            self.simulation.sleep(3 * LEASE_SECONDS + 300)
            collect.retain(self.store, RUN, Keep(last=1), self.clock)
            collect.collect(self.store, [], self.clock)

    def _check_metadata(self, base: Base) -> None:
        """Whichever process wrote the decision, it has the metadata of rank 0."""
        key = names.decision(RUN, base.timeline, base.step, base.attempt)
        found = decode(self.bucket.objects[key][0], Decision, key).values()
        if found != {"attempt": base.attempt, "rank": 0}:
            raise BrokenPromiseError(f"the decision of {base} has the metadata {found}")

    def _check_acked(self) -> None:
        """The COMMIT of every reported save names it, or is its tombstone, or retention has removed even that."""
        for acked in self.journal.acked:
            base = acked.base
            key = names.commit(RUN, base.timeline, base.step)
            found = self.bucket.objects.get(key)
            if found is None:
                raise BrokenPromiseError(f"the COMMIT of {base} is gone")
            if decode(found[0], Commit, key).attempt != base.attempt:
                raise BrokenPromiseError(f"the COMMIT of {base} names another attempt")

    def _committed(self) -> Iterator[Base]:
        for key in sorted(self.bucket.objects):
            parsed = names.parse_step_key(key)
            if parsed is not None and parsed.kind == "commit":
                commit = decode(self.bucket.objects[key][0], Commit, key)
                if not commit.tombstone:
                    yield Base(parsed.timeline, parsed.step, commit.attempt)


class Trainer:
    """One rank of a trainer: it goes on from the latest step and saves a few."""

    def __init__(self, history: History, ranks: SimulatedRanks, saves: int) -> None:
        self.history, self.ranks, self.saves = history, ranks, saves
        self.store, self.clock, self.journal = history.store, history.clock, history.journal
        self.held = ParentLease(self.store, LEASE_SECONDS, self.clock)
        self.own: OwnManifest | None = None

    def run(self) -> None:
        """Restore, then save; an error of a save is not the end of the trainer, a conflict is."""
        try:
            self._train()
        except HeadraceError:
            pass
        finally:
            self.held.release()

    def _train(self) -> None:
        begun = self.ranks.broadcast(self._open() if self.ranks.rank == 0 else b"")
        if not begun:
            return
        number, step, base = _place_of(begun)
        for _ in range(self.saves):
            self.history.simulation.sleep(self.history.draw.uniform(0, 6))
            attempt = self.ranks.broadcast(names.new_id(self.clock).encode() if self.ranks.rank == 0 else b"").decode()
            saved = self._save(number, step, attempt, base)
            kept = self.ranks.broadcast(b"1" if saved else b"")
            if kept:
                base = Base(number, step, attempt)
                self.held.release()
            step += 1

    def _open(self) -> bytes:
        """Find the latest step, lease it, and open a timeline that goes on from it; empty if that fails."""
        try:
            found = repository.find(self.store, RUN, "latest")
            if found is not None:
                self.held.hold(RUN, found)
            parent = None if found is None else StepName(found.timeline, found.step)
            number = timeline.open_timeline(self.store, RUN, parent, self.clock)
        except CorruptionError as error:
            self.history.require_flips(f"latest: {error}")
            return b""
        except HeadraceError:
            return b""
        self.journal.opened.append((number, self.history.simulation.now))
        where = f"{found.timeline} {found.step} {found.attempt}" if found is not None else ""
        return f"{number} {found.step + 1 if found is not None else 0} {where}".encode()

    def _save(self, number: int, step: int, attempt: str, base: Base | None) -> bool:
        rank, world = self.ranks.rank, self.ranks.world_size
        fresh = [hashlib.blake2b(f"{attempt} {r}".encode(), digest_size=FRESH).digest() for r in range(world)]
        frozen = bytes([number % 3, *range(255)]) * (FROZEN // 256)  # what one trainer never changes
        self.journal.contents[attempt] = {"frozen": frozen * world, "fresh": b"".join(fresh)}
        contents = {"frozen": frozen, "fresh": fresh[rank]}
        shards = [(name, box, contents[name]) for name, box in _boxes(rank, world)]
        agreed = bytes([world]) * 32
        if names.is_grouped(world):
            agreed = group.plan_digest([_share(r, world) for r in range(world)])
        made = make(
            self.store,
            shards,
            step=step,
            number=number,
            attempt=attempt,
            bases=(base,) if base is not None else (),
            rank=rank,
            world_size=world,
            replicas=agreed,
            run=RUN,
            lease_seconds=LEASE_SECONDS,
            commit_timeout=2 * LEASE_SECONDS,
            own_manifest=self.own,
            metadata={"attempt": attempt, "rank": rank},
        )
        began, simulation = self.history.simulation.now, self.history.simulation
        newest = max(number for number, _ in self.journal.opened)
        if self.history.draw.random() < 0.2:  # the daemon's worker was replaced, and is only slow
            twin = structs.replace(made.plan, compression="zstd")
            simulation.start(self._commit, made.arena, twin, at=self.history.draw.uniform(0, 5))
        self.own = None
        progress = ProgressFile(None)
        result = self._commit(made.arena, made.plan, progress)
        if result is None:
            return False
        self.own = own_manifest_of(result, progress.manifest if number % 2 else None)
        if newest > number:
            raise BrokenPromiseError(f"a save that began at {began} in timeline {number} replaced timeline {newest}")
        self.journal.acked.append(Acked(Base(number, step, attempt), simulation.now))
        return True

    def _commit(
        self, arena: memoryview, put: PutPlan, progress: ProgressFile | None = None
    ) -> dict[str, object] | None:
        try:
            return commit_staged(arena, put, lambda _: None, store=self.store, progress=progress, clock=self.clock)
        except HeadraceError:
            return None


def _boxes(rank: int, world: int) -> list[tuple[str, Box]]:
    sizes = (("frozen", FROZEN), ("fresh", FRESH))
    return [(name, Box((size * world,), (size * rank,), (size,))) for name, size in sizes]


def _share(rank: int, world: int) -> bytes:
    return group.share_digest(TensorSpec(name, "uint8", box, True) for name, box in _boxes(rank, world))


def _place_of(begun: bytes) -> tuple[int, int, Base | None]:
    number, step, *where = begun.decode().split()
    base = Base(int(where[0]), int(where[1]), where[2]) if where else None
    return int(number), int(step), base
