"""The ranks of one node reading an epoch from a store, with and without the node's daemon.

Every rank reads its batches in order and asks for the blocks of the next ones ahead of time. Without the daemon each rank
fetches the blocks that its own samples lie in; with it the node fetches each block once. Calibration is three measured
numbers (`Pieces`).
Invariant: pure; bytes fetched are whole blocks. Failure behaviour: that of the engine.
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
"""Of the data set whose order is looked at: enough for all lanes."""


@dataclass(frozen=True)
class Pieces:
    """What is measured: seconds of CPU a sample, seconds of a request beside its bytes, seconds until the first request."""

    sample_seconds: float = 0.0002
    request_seconds: float = 0.002
    start_seconds: float = 0.05
    threads: int = 4


@dataclass(frozen=True)
class Prediction:
    """Wall seconds until the last rank is done, and bytes that the store sent."""

    seconds: float
    fetched: float


@dataclass(frozen=True)
class Epoch:
    """What one rank reads: for each batch the blocks that it needs and how many samples they are."""

    batches: Sequence[tuple[Sequence[Block], int]]


class _Cache:
    """Which blocks are there or on their way; one for the node, or one for each rank."""

    def __init__(
        self, simulation: Simulation, sizes: dict[Block, float], links: Sequence[Link], pieces: Pieces
    ) -> None:
        self._simulation, self._sizes, self._links, self._pieces = simulation, sizes, links, pieces
        self._known: dict[Block, Latch] = {}
        self._free, self._queue = pieces.threads, deque[Block]()

    def want(self, block: Block) -> Latch:
        """The latch that opens when the block is there; the first who asks has it fetched."""
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
    pieces: Pieces = Pieces(),
) -> Prediction:
    """What an epoch takes: `shared` is with the daemon; rates in bytes a second."""
    simulation, store, nic = Simulation(), Link("store", store_rate), Link("nic", nic_rate)
    node = _Cache(simulation, sizes, (store, nic), pieces)
    for epoch in epochs:
        cache = node if shared else _Cache(simulation, sizes, (store, nic), pieces)
        simulation.start(_rank(epoch, cache, ahead, pieces))
    seconds = simulation.run()
    return Prediction(seconds, store.carried)


def _rank(epoch: Epoch, cache: _Cache, ahead: int, pieces: Pieces) -> Process:
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
    """The blocks that (key, offset, length) ranges lie in, each once, in order."""
    found: dict[Block, None] = {}
    for key, offset, length in ranges:
        for number in range(offset // block_bytes, (offset + max(length, 1) - 1) // block_bytes + 1):
            found[key, number] = None
    return list(found)


@functools.cache
def amplification(
    gpus: int, gpus_a_node: int, batch: int, sample_bytes: float, block_bytes: float, *, shared: bool
) -> float:
    """Bytes that a node fetches over bytes that its ranks need, in an epoch in the loaders' own order.

    Whole blocks are fetched; a block that several samples of one reader lie in is fetched once. `shared`: the reader is the node
    (with the daemon), else each rank. Two nodes stand for all. `batch` is a rank's.
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
    """How many blocks these samples lie in, when all lie one after the other."""
    first = np.floor(samples * sample_bytes / block_bytes).astype(np.int64)
    last = np.floor(((samples + 1) * sample_bytes - 1) / block_bytes).astype(np.int64)
    most = int((last - first).max())
    return int(np.unique(np.concatenate([np.minimum(first + more, last) for more in range(most + 1)])).size)
