"""A discrete-event model of one node, which tests compare with real runs: reading an epoch, saving and restoring.

A process is a generator. It yields the thing that it waits for: `Sleep(seconds)`, `Transfer(size, links)` or a `Latch`.
Flows share each link max-min fairly (progressive filling: D. Bertsekas and R. Gallager, "Data Networks", 2nd ed.,
section 6.5.2).

- Reading: every rank reads its batches in order and requests the blocks of later batches ahead of time. Without the
  daemon each rank fetches the blocks of its own samples. With the daemon the node fetches each block once.
- Saving: a rank plans, then copies the bytes into host memory, where the stall ends. It then hashes chunk by chunk on
  the node's cores and sends new chunks while it hashes later ones. The commit follows when all ranks are done.
- Restoring: a rank opens the checkpoint, then fetches and hashes chunks.

`ReadCosts` and `SaveCosts` hold the measured numbers.
Invariants: a run is deterministic, time never goes back, and bytes are conserved (`Link.carried`). Fetched bytes are
whole blocks, sent bytes are those of new chunks.
Failure behaviour: a run is a `SimulationError` if it needs more than `MAX_EVENTS` events or its processes deadlock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

MAX_EVENTS = 5_000_000
_DONE = 1e-6


class SimulationError(Exception):
    """The simulation needs too many events or is deadlocked."""


@dataclass(eq=False)
class Link:
    """A link. `rate` is in bytes a second for all flows together."""

    name: str
    rate: float
    carried: float = 0.0


@dataclass(frozen=True)
class Sleep:
    """Wait for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Transfer:
    """Move `size` bytes over all of `links` at once."""

    size: float
    links: Sequence[Link]


class Latch:
    """A latch opens once. The processes that wait for it then continue."""

    def __init__(self) -> None:
        self.open = False
        self.waiting: list[Process] = []


Process = Generator[Sleep | Transfer | Latch, None, None]


@dataclass(eq=False)
class _Flow:
    process: Process
    left: float
    links: Sequence[Link]
    rate: float = 0.0


class Simulation:
    """Runs processes until all have ended. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Process]] = []
        self._flows: list[_Flow] = []
        self._ready: deque[Process] = deque()
        self._count = itertools.count()
        self._blocked = 0

    def start(self, process: Process) -> None:
        """Start `process` at the current time."""
        self._ready.append(process)

    def open(self, latch: Latch) -> None:
        """Open `latch` and resume the processes that wait for it."""
        if not latch.open:
            latch.open = True
            self._blocked -= len(latch.waiting)
            self._ready.extend(latch.waiting)
            latch.waiting.clear()

    def run(self) -> float:
        """Run until no process is left, and return the time."""
        for _ in range(MAX_EVENTS):
            while self._ready:
                self._step(self._ready.popleft())
            if not self._timers and not self._flows:
                if self._blocked:
                    raise SimulationError(f"{self._blocked} processes wait for each other")
                return self.now
            self._advance()
        raise SimulationError(f"more than {MAX_EVENTS} events")

    def _step(self, process: Process) -> None:
        try:
            wanted = next(process)
        except StopIteration:
            return
        if isinstance(wanted, Sleep):
            heapq.heappush(self._timers, (self.now + max(0.0, wanted.seconds), next(self._count), process))
        elif isinstance(wanted, Transfer):
            self._admit(_Flow(process, max(wanted.size, _DONE), wanted.links))
        elif wanted.open:
            self._ready.append(process)
        else:
            wanted.waiting.append(process)
            self._blocked += 1

    def _admit(self, flow: _Flow) -> None:
        self._flows.append(flow)
        self._share()

    def _advance(self) -> None:
        """Advance the time to the next timer or the end of the next flow."""
        ends = min((flow.left / flow.rate for flow in self._flows), default=float("inf"))
        timer = self._timers[0][0] - self.now if self._timers else float("inf")
        passed = min(ends, timer)
        for flow in self._flows:
            moved = flow.rate * passed
            flow.left -= moved
            for link in flow.links:
                link.carried += moved
        self.now += passed
        while self._timers and self._timers[0][0] <= self.now + 1e-12:
            self._ready.append(heapq.heappop(self._timers)[2])
        over = [flow for flow in self._flows if flow.left <= _DONE * 2]
        if over:
            self._end(over)

    def _end(self, over: list[_Flow]) -> None:
        self._flows = [flow for flow in self._flows if flow not in over]
        for flow in over:
            self._ready.append(flow.process)
        self._share()

    def _share(self) -> None:
        """Set max-min fair rates: raise all flows equally until a link is full, fix its flows, and continue with the
        rest."""
        left = {link: link.rate for flow in self._flows for link in flow.links}
        open_flows = set(self._flows)
        while open_flows:
            counts: dict[Link, int] = {}
            for flow in open_flows:
                for link in flow.links:
                    counts[link] = counts.get(link, 0) + 1
            tight = min(counts, key=lambda link: left[link] / counts[link])
            share = left[tight] / counts[tight]
            fixed = [flow for flow in open_flows if tight in flow.links]
            for flow in fixed:
                flow.rate = max(share, 1e-9)
                for link in flow.links:
                    left[link] = max(0.0, left[link] - share)
            open_flows.difference_update(fixed)


# --- reading


Block = tuple[str, int]


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
    shared: bool,
    ahead: int = 8,
    pieces: ReadCosts = ReadCosts(),
) -> Prediction:
    """Predict one epoch. `shared` means with the daemon. `store_rate` is in bytes a second."""
    simulation, store = Simulation(), Link("store", store_rate)
    node = _Cache(simulation, sizes, (store,), pieces)
    for epoch in epochs:
        cache = node if shared else _Cache(simulation, sizes, (store,), pieces)
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


# --- saving and restoring


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
