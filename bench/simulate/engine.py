"""The discrete-event engine: time, processes, and links that flows share.

A process is a generator. It yields the thing that it waits for: `Sleep(seconds)`, `Transfer(size, links)` or a `Latch`.
Flows share each link max-min fairly (progressive filling: D. Bertsekas and R. Gallager, "Data Networks", 2nd ed.,
section 6.5.2). A link may also bound how many flows it serves at once, as a store limits requests. Later flows queue in
order.
Invariant: a run is deterministic, time never goes back, and bytes are conserved (`Link.carried`).
Failure behaviour: a run is a `SimulationError` if it needs more than `MAX_EVENTS` events or its processes deadlock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

MAX_EVENTS = 5_000_000
_DONE = 1e-6


class SimulationError(Exception):
    """The simulation needs too many events or is deadlocked."""


@dataclass(eq=False)
class Link:
    """A link that serves at most `slots` flows at once. `rate` is in bytes a second for all flows together."""

    name: str
    rate: float
    slots: int = 1 << 30
    carried: float = 0.0
    serving: int = 0
    waiting: deque[_Flow] = field(default_factory=deque, repr=False)


@dataclass(frozen=True)
class Sleep:
    """Wait for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Transfer:
    """Move `size` bytes over all of `links` at once. The slots of the first link bound the number of concurrent
    transfers."""

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
        gate = flow.links[0]
        if gate.serving >= gate.slots:
            gate.waiting.append(flow)
            return
        gate.serving += 1
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
            gate = flow.links[0]
            gate.serving -= 1
            if gate.waiting:
                self._flows.append(gate.waiting.popleft())
                gate.serving += 1
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
