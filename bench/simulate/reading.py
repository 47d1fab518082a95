"""The ranks of one node reading an epoch from a store, with and without the node's daemon.

Every rank reads its batches in order and asks for the blocks of the next ones ahead of time. Without the daemon each rank
fetches the blocks that its own samples lie in; with it the node fetches each block once. Calibration is three measured
numbers (`Pieces`).
Invariant: pure; bytes fetched are whole blocks. Failure behaviour: that of the engine.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.simulate.engine import Latch, Link, Process, Simulation, Sleep, Transfer

Block = tuple[str, int]


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


def amplification(ranks: int, samples_a_block: float) -> float:
    """Bytes fetched by a node without the daemon over those with it: the ranks that a block of so many samples is
    expected to go to, when samples fall to ranks at random."""
    return float(ranks * (1 - (1 - 1 / ranks) ** samples_a_block))
