"""A process group in virtual time: in every exchange, each rank waits for all others.

Purpose: the `Ranks` of a simulated job, for code that makes a common decision, gathers tables or exchanges parts.

Invariants: every rank of a group takes part in every exchange, in the same order. An exchange takes `latency` seconds
for each doubling of the number of ranks, plus the time that the bytes received by one rank need at `bandwidth`.

Failure behaviour: if a rank does not arrive within `timeout` seconds, the others raise `TransientError`.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from headrace.dataio.core.errors import HeadraceError, TransientError, UsageError
from headrace.dataio.testing.simulation.scheduler import Signal, Simulation

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class _Round:
    """One exchange: the input of each rank, and the result, which is the same for all ranks."""

    ready: Signal
    contributions: dict[int, object] = field(default_factory=dict)
    results: object = None


class Group:
    """A process group of `world_size` ranks. `bytes` is the maximum that a rank has received in one exchange so far."""

    def __init__(
        self,
        simulation: Simulation,
        world_size: int,
        *,
        latency: float = 20e-6,
        bandwidth: float = 10e9,
        timeout: float = 600.0,
    ) -> None:
        self.world_size, self.bytes = world_size, 0
        self._simulation, self._latency, self._bandwidth, self._timeout = simulation, latency, bandwidth, timeout
        self._rounds: dict[int, _Round] = {}
        self._num_exchanges = [0] * world_size

    def exchange(
        self, rank: int, contribution: T, combine: Callable[[Sequence[T]], R], received: Callable[[R], int]
    ) -> R:
        """Add this rank's `contribution`, and return `combine` of the contributions of all ranks, in the order of ranks.

        `received` computes from the result how many bytes one rank receives.
        """
        number = self._num_exchanges[rank]
        self._num_exchanges[rank] += 1
        exchange_round = self._rounds.setdefault(number, _Round(Signal(self._simulation)))
        exchange_round.contributions[rank] = contribution
        if len(exchange_round.contributions) == self.world_size:
            del self._rounds[number]
            parts: Any = [exchange_round.contributions[other] for other in range(self.world_size)]
            with self._simulation.uncounted():
                result = combine(parts)
                exchange_round.results, size = result, received(result)
            self.bytes = max(self.bytes, size)
            seconds = self._latency * math.ceil(math.log2(max(self.world_size, 2))) + size / self._bandwidth
            self._simulation.later(seconds, exchange_round.ready.set)
        if not exchange_round.ready.wait(self._timeout):
            missing = [other for other in range(self.world_size) if other not in exchange_round.contributions]
            absent_rank = missing[0] if missing else "?"
            raise TransientError(f"rank {absent_rank} did not take part", hint="see that rank's log")
        return exchange_round.results  # type: ignore[return-value]


class SimulatedRanks:
    """Implements `headrace.checkpoint.ranks.Ranks` for one rank of a `Group`."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self.rank, self.world_size = group, rank, group.world_size

    def gather(self, table: bytes) -> list[bytes]:
        """Return the tables of all ranks, in the order of ranks."""
        return self._group.exchange(self.rank, table, list, lambda all_: sum(map(len, all_)))

    all = gather

    def maximum(self, sent: bytes) -> bytes:
        """Return the maximum over all ranks, byte by byte."""
        return self._group.exchange(self.rank, sent, _maximum, len)

    def broadcast(self, sent: bytes) -> bytes:
        """Return rank 0's bytes."""
        return self._group.exchange(self.rank, sent, lambda given: given[0], len)

    def agree(
        self, number: int, message: bytes, error: Exception | None, alike: tuple[type[HeadraceError], ...] = ()
    ) -> bytes:
        """Return rank 0's message, or raise the error of this rank; if another rank failed, raise its reason."""
        reason = f"{type(error).__name__}: {error}" if error is not None else ""
        messages = self._group.exchange(
            self.rank, (number, message, reason), list, lambda all_: len(all_) + len(all_[0][1])
        )
        if error is not None:
            raise error
        for rank, (_, _, text) in enumerate(messages):
            if text:
                kind = next((cls for cls in alike if text.startswith(f"{cls.__name__}: ")), TransientError)
                raise kind(f"rank {rank} could not take part: {text}")
        if len({number for number, _, _ in messages}) > 1:
            raise UsageError("the ranks ask for different steps")
        return messages[0][1]

    @contextlib.contextmanager
    def agreed(self, number: int = 0, alike: tuple[type[HeadraceError], ...] = ()) -> Iterator[None]:
        """Raise on all ranks if the block fails on one."""
        error = None
        try:
            yield
        except Exception as caught:  # as `Ranks.agreed`
            error = caught
        self.agree(number, b"", error, alike)

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send `sent[r]` to rank r, and return the bytes that were sent to this one, by sender."""
        return self._group.exchange(self.rank, sent, _deliver, _most_received).get(self.rank, {})


def _deliver(outboxes: Sequence[Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
    inboxes: dict[int, dict[int, bytes]] = defaultdict(dict)
    for sender, sent in enumerate(outboxes):
        for receiver, data in sent.items():
            inboxes[receiver][sender] = data
    return inboxes


def _most_received(delivered: Mapping[int, Mapping[int, bytes]]) -> int:
    return max((sum(map(len, inbox.values())) for inbox in delivered.values()), default=0)


def _maximum(contributions: Sequence[bytes]) -> bytes:
    maximum = np.frombuffer(contributions[0], np.uint8).copy()
    for contribution in contributions[1:]:
        np.maximum(maximum, np.frombuffer(contribution, np.uint8), out=maximum)
    return maximum.tobytes()
