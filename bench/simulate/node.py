"""A model of one node's ranks: they read an epoch from a store, with and without the daemon, save a checkpoint and
restore it.

Reading: every rank reads its batches in order and requests the blocks of later batches ahead of time. Without the
daemon each rank fetches the blocks of its own samples. With the daemon the node fetches each block once.

Saving: a rank plans, then copies the bytes into host memory, where the stall ends. It then hashes chunk by chunk on the
node's cores and sends new chunks while it hashes later ones. The commit follows when all ranks are done.

Restoring: a rank opens the checkpoint, then fetches and hashes chunks.

`ReadCosts` and `SaveCosts` hold the measured numbers.
Invariant: the model is pure. Fetched bytes are whole blocks, sent bytes are those of new chunks.
Failure behaviour: that of the engine.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.bench.simulate.engine import Latch, Link, Process, Simulation, Sleep, Transfer

Block = tuple[str, int]
_SAMPLES = 100_000
"""Samples of the dataset whose order `amplification` examines: enough for all lanes."""


@dataclass(frozen=True)
class ReadCosts:
    """Measured costs in seconds: CPU time of a sample, a request without its bytes, and the time until the first
    request."""

    sample_seconds: float = 0.0002
    request_seconds: float = 0.002
    start_seconds: float = 0.05
    threads: int = 4


@dataclass(frozen=True)
class Prediction:
    """Wall seconds until the last rank is done, and the bytes that the store sent."""

    seconds: float
    fetched: float


@dataclass(frozen=True)
class Epoch:
    """The batches that one rank reads: for each batch its blocks and its number of samples."""

    batches: Sequence[tuple[Sequence[Block], int]]


class _Cache:
    """The blocks that are cached or being fetched. The node has one cache, or each rank has its own."""

    def __init__(
        self, simulation: Simulation, sizes: dict[Block, float], links: Sequence[Link], pieces: ReadCosts
    ) -> None:
        self._simulation, self._sizes, self._links, self._pieces = simulation, sizes, links, pieces
        self._known: dict[Block, Latch] = {}
        self._free, self._queue = pieces.threads, deque[Block]()

    def want(self, block: Block) -> Latch:
        """Return the latch that opens when the block is cached. The first request starts the fetch."""
        if block not in self._known:
            self._known[block] = Latch()
            self._queue.append(block)
            if self._free:
                self._free -= 1
                self._simulation.start(self._fetch())
        return self._known[block]

    def _fetch(self) -> Process:
        while self._queue:
            block = self._queue.popleft()
            yield Sleep(self._pieces.request_seconds)
            yield Transfer(self._sizes[block], self._links)
            self._simulation.open(self._known[block])
        self._free += 1


def predict(
    epochs: Sequence[Epoch],
    sizes: dict[Block, float],
    *,
    store_rate: float,
    nic_rate: float = 1e12,
    shared: bool,
    ahead: int = 8,
    pieces: ReadCosts = ReadCosts(),
) -> Prediction:
    """Predict one epoch. `shared` means with the daemon. Rates are in bytes a second."""
    simulation, store, nic = Simulation(), Link("store", store_rate), Link("nic", nic_rate)
    node = _Cache(simulation, sizes, (store, nic), pieces)
    for epoch in epochs:
        cache = node if shared else _Cache(simulation, sizes, (store, nic), pieces)
        simulation.start(_rank(epoch, cache, ahead, pieces))
    seconds = simulation.run()
    return Prediction(seconds, store.carried)


def _rank(epoch: Epoch, cache: _Cache, ahead: int, pieces: ReadCosts) -> Process:
    yield Sleep(pieces.start_seconds)
    batches, coming = iter(epoch.batches), deque[tuple[Sequence[Block], int]]()
    while True:
        for batch in itertools.islice(batches, 1 + ahead - len(coming)):
            coming.append(batch)
            for block in batch[0]:
                cache.want(block)
        if not coming:
            return
        blocks, samples = coming.popleft()
        for block in blocks:
            yield cache.want(block)
        yield Sleep(samples * pieces.sample_seconds)


def blocks_of(ranges: Iterator[tuple[str, int, int]], block_bytes: int) -> list[Block]:
    """Return the blocks that hold the (key, offset, length) ranges, each once, in order."""
    found: dict[Block, None] = {}
    for key, offset, length in ranges:
        for number in range(offset // block_bytes, (offset + max(length, 1) - 1) // block_bytes + 1):
            found[key, number] = None
    return list(found)


@functools.cache
def amplification(
    gpus: int, gpus_a_node: int, batch: int, sample_bytes: float, block_bytes: float, *, shared: bool
) -> float:
    """Read amplification: the bytes that a node fetches divided by the bytes that its ranks need.

    The epoch is in the loaders' own order. Readers fetch whole blocks. A reader fetches a block once, however many of
    its samples the block holds. With `shared` the reader is the node (with the daemon), otherwise each rank. The result
    is that of at most two nodes, which stand for all. `batch` is the batch size of one rank.
    """
    from headrace.loaders.sampling.order import Order

    everywhere = batch * gpus
    order = Order.of(max(_SAMPLES, 2 * everywhere), everywhere, sample_bytes=sample_bytes)
    batches = np.arange(order.full_batches, dtype=np.int64)[:, None] * everywhere
    fetched = needed = 0.0
    nodes = max(1, math.ceil(gpus / gpus_a_node))
    for node in {0, nodes // 2}:
        ranks = range(node * gpus_a_node, min(gpus, (node + 1) * gpus_a_node))
        own = [order.take(0, (batches + order.slots(0, rank, gpus)).ravel()) for rank in ranks]
        readers = [np.concatenate(own)] if shared else own
        fetched += block_bytes * sum(_blocks(samples, sample_bytes, block_bytes) for samples in readers)
        needed += sample_bytes * sum(samples.size for samples in own)
    return fetched / needed


def _blocks(samples: npt.NDArray[np.int64], sample_bytes: float, block_bytes: float) -> int:
    """Count the blocks that hold these samples. Samples are stored one after the other."""
    first = np.floor(samples * sample_bytes / block_bytes).astype(np.int64)
    last = np.floor(((samples + 1) * sample_bytes - 1) / block_bytes).astype(np.int64)
    most = int((last - first).max())
    return int(np.unique(np.concatenate([np.minimum(first + more, last) for more in range(most + 1)])).size)


CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class SaveCosts:
    """Measured costs of saves and restores.

    Rates are in bytes a second: copying in memory for all ranks together, hashing for one core. The seconds are those
    of planning, and of a request, a commit and an opening without their bytes.
    """

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
    """Seconds until the last rank continues, seconds until the commit, and the bytes sent to the store."""

    stall: float
    durable: float
    sent: float


@dataclass(frozen=True)
class Restored:
    """Seconds until the last rank has its bytes, and the bytes that the store sent."""

    seconds: float
    fetched: float


def predict_save(
    ranks: Sequence[float],
    *,
    changed: float = 1.0,
    store_rate: float,
    pieces: SaveCosts = SaveCosts(),
    chunk: float = CHUNK_BYTES,
) -> Saved:
    """Predict a save of one node. `ranks` are the bytes of each rank. `changed` is the share that the store does not
    have yet."""
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
    ranks: Sequence[float], *, store_rate: float, pieces: SaveCosts = SaveCosts(), chunk: float = CHUNK_BYTES
) -> Restored:
    """Predict a restore of one node. `ranks` are the bytes of each rank. Ranks share no bytes, and all come from the
    store."""
    node = _Node(pieces, store_rate, chunk)
    for size in ranks:
        node.simulation.start(node.restore(size))
    seconds = node.simulation.run()
    return Restored(seconds, node.store.carried)


class _Node:
    """The memory, the cores and the link to the store that all ranks share."""

    def __init__(self, pieces: SaveCosts, store_rate: float, chunk: float) -> None:
        self.simulation = Simulation()
        self._pieces, self._chunk = pieces, chunk
        self._memory = Link("memory", pieces.copy_rate)
        self._cores = [Link(f"core {number}", pieces.hash_rate) for number in range(max(1, pieces.cores))]
        self._next = 0
        self.store = Link("store", store_rate)

    def _core(self) -> Link:
        """Return the core for the next rank. Each rank hashes in one thread, and cores are assigned in turn."""
        self._next += 1
        return self._cores[(self._next - 1) % len(self._cores)]

    def _chunks(self, size: float) -> list[float]:
        whole, rest = divmod(size, self._chunk)
        return [self._chunk] * int(whole) + ([rest] if rest else [])

    def save(self, size: float, changed: float, copied: Latch, done: Latch) -> Process:
        """Simulate one rank: the stall, then hashing while new chunks are sent."""
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
        """Simulate one rank: several fetchers, each of which hashes its own chunks."""
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
        """Record the time `after` seconds after all of `latches` are open."""
        yield from latches
        yield Sleep(after)
        times[what] = self.simulation.now
