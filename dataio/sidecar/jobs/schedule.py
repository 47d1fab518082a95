"""Which staged checkpoints are accepted, started or paused, and when a failed one is retried. Sans-I/O.

A job is in one of these states:

- *waiting*: its arena does not fit into the budget; the daemon has not accepted it
- *taken*: it has room, and is being written to the journal
- *queued*, *running*
- *committing*: its manifest is written; it waits for other ranks and needs no slot
- *retrying*: its worker failed; it is queued again after a pause

Urgent jobs are a class of their own, with slots, a queue and a budget as large as those of the other jobs.
Invariants: the arenas that are held never exceed the budget of their class. Only adopted jobs and a reduced budget are
exceptions. Within a class, jobs are served in order of arrival, so small ones do not starve a large one. In each class,
at most `running` jobs run and at most `queued` wait. Committing jobs need a slot only if there are more than
`COMMITTING` of them. The pauses of `RetrySchedule` grow to `longest`, with jitter, so the nodes of a cluster do not
retry a store at the same time. The last retry begins at most `limit` seconds after the first failure.
Failure behaviour: `CapacityError` if the arena is larger than the budget, the queue is full, or there is no room for a
job that may not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.limits import format_bytes

COMMITTING = 64
HOLD_SECONDS = 90.0
"""Maximum time for which urgent jobs pause the others."""


@dataclass(slots=True, eq=False)
class _Item:
    size: int
    urgent: bool
    state: str
    holds: int
    """Bytes of the budget that it uses: the arena's size, until the arena is released."""


class Schedule:
    """Jobs by token, in order of arrival."""

    def __init__(self, running: int, queued: int, budget: int) -> None:
        self._running, self._queued, self.budget = running, queued, budget
        self._items: dict[str, _Item] = {}
        self._held_since: float | None = None

    # events

    def offer(self, token: str, size: int, *, urgent: bool, may_wait: bool) -> bool:
        """Add a job. Returns True if it is taken, or False if it waits for room, which `may_wait` allows."""
        self._check_admissible(size, urgent)
        fits = not self._tokens_in("waiting", urgent) and self._held_bytes(urgent) + size <= self.budget
        if not fits and not may_wait:
            raise CapacityError(
                f"no room for an arena of {format_bytes(size)}: {format_bytes(self._held_bytes(urgent))} of "
                f"{format_bytes(self.budget)} are held by checkpoints on their way",
                hint="raise arena_bytes",
            )
        self._items[token] = _Item(size, urgent, "taken" if fits else "waiting", size if fits else 0)
        return fits

    def adopt(self, token: str, size: int, *, urgent: bool, state: str, holds: int) -> None:
        """Add a job that an earlier daemon accepted, even if it does not fit."""
        self._items[token] = _Item(size, urgent, state, holds)

    def journaled(self, token: str) -> None:
        """The job is in the journal, and may run now."""
        self._items[token].state = "queued"

    def requeue(self, token: str) -> None:
        """Queue the job for another worker, because the last one has ended."""
        self._items[token].state = "queued"

    def retry_later(self, token: str) -> None:
        """The worker failed: the job gets another one after a pause."""
        self._items[token].state = "retrying"

    def released(self, token: str) -> None:
        """The arena was released, and no longer uses the budget."""
        self._items[token].holds = 0

    def committing(self, token: str) -> None:
        """The job only waits for other ranks, and no longer needs its slot."""
        if self._items[token].state == "running":
            self._items[token].state = "committing"

    def remove(self, token: str) -> None:
        """Remove a job that ended or was withdrawn."""
        self._items.pop(token, None)

    # decisions

    def take(self) -> list[str]:
        """Mark the waiting jobs for which there is room now as taken; returns their tokens."""
        taken = []
        for urgent in (True, False):
            for token in self._tokens_in("waiting", urgent):
                item = self._items[token]
                if self._held_bytes(urgent) + item.size > self.budget:
                    break
                item.state, item.holds = "taken", item.size
                taken.append(token)
        return taken

    def start(self) -> list[str]:
        """Mark the jobs that may start now as running; returns their tokens, urgent ones first."""
        started = []
        for urgent in (True, False):
            for token in self._tokens_in("queued", urgent)[: self._free_slots(urgent)]:
                self._items[token].state = "running"
                started.append(token)
        return started

    def holds_back(self, now: float) -> bool:
        """Whether jobs that are not urgent must pause at `now`: while an urgent one runs, at most `HOLD_SECONDS`."""
        if not self._tokens_in("running", urgent=True):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        return now - self._held_since < HOLD_SECONDS

    # queries

    def state(self, token: str) -> str:
        return self._items[token].state

    def room(self) -> dict[str, int]:
        """Counts and bytes, for status and metrics."""
        items = list(self._items.values())
        waiting = [item.size for item in items if item.state == "waiting"]
        return {
            "budget_bytes": self.budget,
            "held_bytes": sum(item.holds for item in items),
            "waiting_bytes": sum(waiting),
            "waiting": len(waiting),
            "queued": sum(item.state in ("taken", "queued") for item in items),
            "running": sum(item.state == "running" for item in items),
            "committing": sum(item.state == "committing" for item in items),
            "retrying": sum(item.state == "retrying" for item in items),
        }

    # internal

    def _check_admissible(self, size: int, urgent: bool) -> None:
        if size > self.budget:
            raise CapacityError(
                f"an arena of {format_bytes(size)} is larger than all that the sidecar may hold, "
                f"{format_bytes(self.budget)}",
                hint="raise arena_bytes",
            )
        unfinished = sum(len(self._tokens_in(state, urgent)) for state in ("waiting", "taken", "queued", "retrying"))
        if unfinished - self._free_slots(urgent) >= self._queued:
            raise CapacityError(f"{unfinished} staged checkpoints wait already; the most is {self._queued}")

    def _tokens_in(self, state: str, urgent: bool) -> list[str]:
        return [token for token, item in self._items.items() if item.state == state and item.urgent == urgent]

    def _held_bytes(self, urgent: bool) -> int:
        return sum(item.holds for item in self._items.values() if item.urgent == urgent)

    def _free_slots(self, urgent: bool) -> int:
        busy = len(self._tokens_in("running", urgent)) + max(0, len(self._tokens_in("committing", urgent)) - COMMITTING)
        return max(0, self._running - busy)


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """When a failed job is retried.

    `first` and `longest` bound the pause before a retry. `limit` bounds the time since the first failure. All are in
    seconds.
    """

    limit: float = 3600.0
    first: float = 1.0
    longest: float = 60.0

    def pause(self, failures: int, elapsed: float, draw: float) -> float | None:
        """Seconds until the next retry; None if the job must not be retried.

        The job has failed `failures` times, for the first time `elapsed` seconds ago. `draw` is a random number in [0, 1).
        """
        remaining = self.limit - elapsed
        if remaining <= 0:
            return None
        longest = min(self.longest, self.first * 2.0 ** min(failures - 1, 32))
        return min(longest * (1 + draw) / 2, remaining)
