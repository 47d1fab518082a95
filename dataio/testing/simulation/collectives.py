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
    given: dict[int, object] = field(default_factory=dict)
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
        self._done = [0] * world_size

    def exchange(self, rank: int, given: T, combine: Callable[[Sequence[T]], R], received: Callable[[R], int]) -> R:
        """Contribute `given`, and return `combine` of the contributions of all ranks, in the order of ranks.

        `received` computes from the result how many bytes one rank receives.
        """
        number = self._done[rank]
        self._done[rank] += 1
        here = self._rounds.setdefault(number, _Round(Signal(self._simulation)))
        here.given[rank] = given
        if len(here.given) == self.world_size:
            del self._rounds[number]
            parts: Any = [here.given[each] for each in range(self.world_size)]
            with self._simulation.uncounted():
                found = combine(parts)
                here.results, size = found, received(found)
            self.bytes = max(self.bytes, size)
            seconds = self._latency * math.ceil(math.log2(max(self.world_size, 2))) + size / self._bandwidth
            self._simulation.later(seconds, here.ready.set)
        if not here.ready.wait(self._timeout):
            missing = [each for each in range(self.world_size) if each not in here.given]
            gone = missing[0] if missing else "?"
            raise TransientError(f"rank {gone} did not take part", hint="see that rank's log")
        return here.results  # type: ignore[return-value]


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
        given = self._group.exchange(
            self.rank, (number, message, reason), list, lambda all_: len(all_) + len(all_[0][1])
        )
        if error is not None:
            raise error
        for rank, (_, _, text) in enumerate(given):
            if text:
                kind = next((each for each in alike if text.startswith(f"{each.__name__}: ")), TransientError)
                raise kind(f"rank {rank} could not take part: {text}")
        if len({each[0] for each in given}) > 1:
            raise UsageError("the ranks ask for different steps")
        return given[0][1]

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
        return self._group.exchange(self.rank, sent, _delivered, _most_received).get(self.rank, {})


def _delivered(given: Sequence[Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
    found: dict[int, dict[int, bytes]] = defaultdict(dict)
    for sender, sent in enumerate(given):
        for receiver, data in sent.items():
            found[receiver][sender] = data
    return found


def _most_received(delivered: Mapping[int, Mapping[int, bytes]]) -> int:
    return max((sum(map(len, each.values())) for each in delivered.values()), default=0)


def _maximum(given: Sequence[bytes]) -> bytes:
    found = np.frombuffer(given[0], np.uint8).copy()
    for each in given[1:]:
        np.maximum(found, np.frombuffer(each, np.uint8), out=found)
    return found.tobytes()
