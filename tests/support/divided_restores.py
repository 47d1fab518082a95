"""Jobs that save tensors by parts and restore other parts of them, in virtual time, with the real code of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.format import chunking, group, names
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.documents import Base, Repo, encode
from headrace.checkpoint.ranks import PendingError
from headrace.checkpoint.repository import commit, fetch, group_commit, inventory, lease, timeline
from headrace.checkpoint.restoring import chunk_homes, chunk_reader, divided_step
from headrace.checkpoint.restoring.chunk_reader import ChunkReader, Saved, StepLease, Want
from headrace.checkpoint.restoring.chunk_relay import ChunkRelay
from headrace.checkpoint.restoring.opening import open_found, read_decision
from headrace.checkpoint.restoring.shared_reads import _needed_by_several
from headrace.checkpoint.saving.commit_worker import commit_staged
from headrace.checkpoint.tier.restoring import Found
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Signal, Simulation
from headrace.dataio.testing.simulation.store import Bucket, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched
from tests.support.checkpoint_states import RUN, MemorySink, make

Contents = npt.NDArray[np.uint8]
Row = tuple[str, Box | None, bytes]
Boxes = Mapping[str, Sequence[Box]]
_PATCHED = (lease, fetch, inventory, group_commit, commit)


def content(name: str, shape: Sequence[int]) -> Contents:
    """The bytes of a tensor, drawn from its name."""
    draw = np.random.default_rng(list(name.encode()))
    return draw.integers(0, 256, tuple(shape), np.uint8)


def part(name: str, box: Box) -> Contents:
    return content(name, box.shape)[tuple(slice(a, a + n) for a, n in zip(box.offset, box.local, strict=True))]


def rows_of(name: str, box: Box) -> list[Row]:
    """The rows of a shard, as a save cuts it: in bands, if it is cut in an inner dimension."""
    whole = part(name, box)
    return [(name, band, whole[chunking.inside(band, box)].tobytes()) for band in chunking.bands(box, 1)]


def piece(shape: Sequence[int], dim: int, index: int, count: int) -> Box | None:
    """The part of a rank when a tensor is cut in one dimension, as FSDP cuts it; None for a rank without a part."""
    step = -(-shape[dim] // count)
    start = min(index * step, shape[dim])
    size = min(step, shape[dim] - start)
    if not size:
        return None
    offset = tuple(start if d == dim else 0 for d in range(len(shape)))
    return Box(tuple(shape), offset, tuple(size if d == dim else n for d, n in enumerate(shape)))


class MailedRanks(SimulatedRanks):
    """Simulated ranks with messages between two ranks. A message is sent when the other rank receives it."""

    def __init__(self, job: Job, group_: Group, rank: int) -> None:
        super().__init__(group_, rank)
        self._job = job

    def isend(self, data: torch.Tensor, rank: int, tag: int) -> _Letter:
        letter = self._job.letter(self.rank, rank, tag)
        letter.data = data
        letter.sent.set()
        return letter

    def irecv(self, data: torch.Tensor, rank: int, tag: int) -> _Incoming:
        return _Incoming(self._job.letter(rank, self.rank, tag), data)


class _Letter:
    def __init__(self, simulation: Simulation) -> None:
        self.sent, self.taken = Signal(simulation), Signal(simulation)
        self.data = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        assert self.taken.wait(3600.0), "the message was never received"


@dataclass
class _Incoming:
    letter: _Letter
    into: torch.Tensor

    def wait(self) -> None:
        assert self.letter.sent.wait(3600.0), "the message was never sent"
        assert len(self.letter.data) == len(self.into)
        self.into.copy_(self.letter.data)
        self.letter.taken.set()


@dataclass
class Job:
    """A saved step in a simulated bucket, and jobs that restore it.

    `errors`: by rank, the error of the last job. `groups`: how many ranks commit as a group.
    """

    groups: int = names.GROUP_RANKS
    errors: dict[int, BaseException] = field(default_factory=dict)
    sent: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.simulation = Simulation(1)
        self.bucket = Bucket(self.simulation, latency=0.02)
        self.store, self.clock = SimulatedStore(self.bucket), self.simulation.clock
        self.bucket.watch = lambda operation, key, now: self.sent.append((operation, key))
        self.bucket.apply_put(names.REPO, encode(Repo(id=names.new_id(self.clock), created=0.0)))
        self._letters: dict[tuple[int, int, int], _Letter] = {}

    def letter(self, sender: int, receiver: int, tag: int) -> _Letter:
        return self._letters.setdefault((sender, receiver, tag), _Letter(self.simulation))

    def save(self, state: Sequence[Sequence[Row]]) -> Base:
        """Save the rows of each rank as one step, and return its attempt."""
        attempt, world = names.new_id(self.clock), len(state)
        shares = [
            group.share_digest([TensorSpec(name, "uint8", box, True) for name, box, _ in rows if box is not None])
            for rows in state
        ]
        self.run([lambda: timeline.open_timeline(self.store, RUN, None, self.clock)])

        def one(rank: int) -> object:
            made = make(
                self.store,
                state[rank],  # type: ignore[arg-type]
                step=1,
                attempt=attempt,
                rank=rank,
                world_size=world,
                values={"rank": rank},
                replicas=group.plan_digest(shares),
                commit_timeout=300.0,
                lease_seconds=60.0,
            )
            return commit_staged(made.arena, made.plan, lambda _: None, store=self.store, clock=self.clock)

        self.run([partial(one, rank) for rank in range(world)])
        assert not self.errors, self.errors
        return Base(1, 1, attempt)

    def run(self, work: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one task for each rank; return the results, and keep the errors."""
        with patched(self.simulation, *_PATCHED), mock.patch.object(names, "GROUP_RANKS", self.groups):
            tasks = [self.simulation.start(each, process=Process(str(rank))) for rank, each in enumerate(work)]
            self.simulation.run()
        self.errors = {rank: task.error for rank, task in enumerate(tasks) if task.error is not None}
        return [task.result for task in tasks]

    def restore(self, base: Base, wanted: Sequence[Boxes], sent: bool = True) -> list[Any]:
        """Restore boxes on the ranks of another job, through the divided manifests: by rank, what `Restored` holds."""
        ranks_of = Group(self.simulation, len(wanted))
        self._letters.clear()
        return self.run(
            [
                partial(restore, self, base, boxes, MailedRanks(self, ranks_of, r), sent)
                for r, boxes in enumerate(wanted)
            ]
        )

    def count(self, operation: str = "", part: str = "") -> int:
        """The number of requests to the store, without packs."""
        return sum(operation in what and part in key and not key.startswith("packs/") for what, key in self.sent)


@dataclass(frozen=True)
class Restored:
    """What one rank has restored: the bytes of each box, its rank-local tensors, and the chunks that it read itself."""

    boxes: dict[str, list[bytes]]
    local: dict[str, bytes]
    saved: dict[str, Saved]
    received: int


def restore(job: Job, base: Base, boxes: Boxes, ranks: MailedRanks, sent: bool) -> Restored:
    """One rank of a restore, with the parts of `Restorer` that do not need a state."""
    first = ranks.rank == 0
    lease_ = StepLease(job.store, RUN, base, job.clock, writes=first)

    def find() -> tuple[Found, fetch.Sealed]:
        lease_.__enter__()
        return Found(base), read_decision(job.store, RUN, base)

    try:
        opened_ = open_found(RUN, 1, find, ranks)
        assert opened_ is not None
        sealed = opened_[1]
        opened = divided_step.open_divided(job.store, sealed, ranks)
        types = opened.types(list(boxes))
        saved = opened.tensors(types, boxes)
        sinks = {name: [MemorySink(int(np.prod(box.local))) for box in its] for name, its in boxes.items()}
        wants = [
            Want(saved[name], box, sink)
            for name, its in boxes.items()
            for box, sink in zip(its, sinks[name], strict=True)
        ]
        own = {name: MemorySink(int(np.prod(s.shape))) for name, s in saved.items() if name not in boxes}
        wants += [Want(saved[name], chunking.whole(saved[name].shape), sink) for name, sink in own.items()]
        step = fetch.Step(RUN, base, ())
        reading = ChunkReader(step, wants)
        received = _read(job, reading, ranks) if sent else chunk_reader.read(job.store, step, wants) or 0
        with ranks.agreed():
            pass
    except HeadraceError as error:
        lease_.__exit__(type(error), error, error.__traceback__)
        raise
    lease_.__exit__(None, None, None)
    contents = {name: [bytes(sink.data) for sink in its] for name, its in sinks.items()}
    return Restored(contents, {name: bytes(sink.data) for name, sink in own.items()}, saved, received)


def _read(job: Job, reading: ChunkReader, ranks: MailedRanks) -> int:
    """Read as `shared_reads.read` does from a store outside the node; the number of chunks that other ranks sent."""
    routes = chunk_homes.find_routes([_needed_by_several(reading)], ranks)[0]
    pending = PendingError()
    with pending:
        reading.fetch(job.store, [(k, c) for k, c in reading.needed() if (k, c.offset) not in routes], 1)
    ChunkRelay(job.store, reading, routes, ranks, 1).run(pending)
    with ranks.agreed():
        pending.raise_kept()
    return sum(route.parent is not None for route in routes.values())
