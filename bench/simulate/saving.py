"""The ranks of one node that save a checkpoint to a store, and restore it, in pieces that are measured one by one.

A rank's save: plan, copy its bytes into host memory (there the stall ends), hash chunk by chunk on the node's cores, send the
chunks that are new over the store's link, a few at once, while later ones are hashed; when all ranks have, the commit. A restore:
plan, then chunks over the link, each hashed as it arrives. Calibration is `Pieces`.
Invariant: pure; bytes sent are those of new chunks. Failure behaviour: that of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.simulate.engine import Latch, Link, Process, Simulation, Sleep, Transfer

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Pieces:
    """What is measured: bytes a second of copying in memory (all ranks together) and of hashing (one core); seconds of planning,
    of a request beside its bytes, and of what a commit and an opening cost beside the bytes."""

    copy_rate: float = 8e9
    hash_rate: float = 2e9
    cores: int = 2
    plan_seconds: float = 0.01
    request_seconds: float = 0.002
    commit_seconds: float = 0.05
    open_seconds: float = 0.05
    uploads: int = 4


@dataclass(frozen=True)
class Saved:
    """Seconds until the last rank goes on, seconds until the commit, and bytes that went to the store."""

    stall: float
    durable: float
    sent: float


@dataclass(frozen=True)
class Restored:
    """Seconds until the last rank has its bytes, and bytes that came from the store."""

    seconds: float
    fetched: float


def predict_save(
    ranks: Sequence[float],
    *,
    changed: float = 1.0,
    store_rate: float,
    pieces: Pieces = Pieces(),
    chunk: float = CHUNK_BYTES,
) -> Saved:
    """A save of a node whose ranks have so many bytes each; `changed` is the share of them that the store does not have."""
    node = _Node(pieces, store_rate, chunk)
    staged, sent = [Latch() for _ in ranks], [Latch() for _ in ranks]
    times: dict[str, float] = {}
    for size, copied, done in zip(ranks, staged, sent, strict=True):
        node.simulation.start(node.save(size, changed, copied, done))
    node.simulation.start(node.then(staged, "stall", times))
    node.simulation.start(node.then(sent, "durable", times, after=pieces.commit_seconds))
    node.simulation.run()
    return Saved(times["stall"], times["durable"], node.store.carried)


def predict_restore(
    ranks: Sequence[float], *, store_rate: float, pieces: Pieces = Pieces(), chunk: float = CHUNK_BYTES
) -> Restored:
    """A restore of a node whose ranks want so many bytes each, which nobody else has."""
    node = _Node(pieces, store_rate, chunk)
    for size in ranks:
        node.simulation.start(node.restore(size))
    seconds = node.simulation.run()
    return Restored(seconds, node.store.carried)


class _Node:
    """Memory, cores and the link to the store, which all ranks share."""

    def __init__(self, pieces: Pieces, store_rate: float, chunk: float) -> None:
        self.simulation = Simulation()
        self._pieces, self._chunk = pieces, chunk
        self._memory = Link("memory", pieces.copy_rate)
        self._cores = [Link(f"core {number}", pieces.hash_rate) for number in range(max(1, pieces.cores))]
        self._next = 0
        self.store = Link("store", store_rate)

    def _core(self) -> Link:
        """Ranks hash in one thread each; they are dealt to the cores in turn."""
        self._next += 1
        return self._cores[(self._next - 1) % len(self._cores)]

    def _chunks(self, size: float) -> list[float]:
        whole, rest = divmod(size, self._chunk)
        return [self._chunk] * int(whole) + ([rest] if rest else [])

    def save(self, size: float, changed: float, copied: Latch, done: Latch) -> Process:
        """One rank: the stall, then hashing, with the sending behind it."""
        core = self._core()
        yield Sleep(self._pieces.plan_seconds)
        yield Transfer(size, [self._memory])
        self.simulation.open(copied)
        ready, left = [Latch() for _ in self._chunks(size)], changed * size
        senders = [Latch() for _ in range(self._pieces.uploads)]
        new: list[tuple[Latch, float]] = []
        for latch, chunk in zip(ready, self._chunks(size), strict=True):
            if (part := min(chunk, left)) > 0:
                new.append((latch, part))
            left -= part
        for number, finished in enumerate(senders):
            self.simulation.start(self._send(new[number :: len(senders)], finished))
        for latch, chunk in zip(ready, self._chunks(size), strict=True):
            yield Transfer(chunk, [core])
            self.simulation.open(latch)
        yield from senders
        self.simulation.open(done)

    def _send(self, chunks: Sequence[tuple[Latch, float]], finished: Latch) -> Process:
        for latch, size in chunks:
            yield latch
            yield Sleep(self._pieces.request_seconds)
            yield Transfer(size, [self.store])
        self.simulation.open(finished)

    def restore(self, size: float) -> Process:
        """One rank: several fetchers, each of which hashes what it got."""
        core = self._core()
        yield Sleep(self._pieces.open_seconds)
        chunks = self._chunks(size)
        fetchers = [Latch() for _ in range(self._pieces.uploads)]
        for number, finished in enumerate(fetchers):
            self.simulation.start(self._fetch(chunks[number :: len(fetchers)], core, finished))
        yield from fetchers

    def _fetch(self, chunks: Sequence[float], core: Link, finished: Latch) -> Process:
        for size in chunks:
            yield Sleep(self._pieces.request_seconds)
            yield Transfer(size, [self.store])
            yield Transfer(size, [core])
        self.simulation.open(finished)

    def then(self, latches: Sequence[Latch], what: str, times: dict[str, float], after: float = 0.0) -> Process:
        """Note when all of them are open, and `after` seconds have passed."""
        yield from latches
        yield Sleep(after)
        times[what] = self.simulation.now
