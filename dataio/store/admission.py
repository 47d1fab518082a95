"""Who may go next, when bytes and requests in flight are limited: a queue in the order of arrival, without clock or threads.

Invariants: the costs of those admitted never sum to more than `bytes`, and they are never more than `requests`. Nobody
overtakes: a small request waits behind a large one, so that the large one is not starved. At most `waiting` wait.
Failure behaviour: `ask` raises `CapacityError` for a cost that could never be admitted, or when the queue is full;
`expired` says who has waited until the deadline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.limits import format_bytes


@dataclass(eq=False, slots=True)
class Ticket:
    """One request: its cost in bytes, when it gives up (in the clock's seconds), and whether it may go."""

    cost: int
    deadline: float
    admitted: bool = False


@dataclass(slots=True)
class Admission:
    """The state. `bytes` and `requests` bound what is in flight, `waiting` the queue, `patience` (seconds) each wait."""

    bytes: int
    requests: int
    waiting: int = 1024
    patience: float = 60.0
    used: int = 0
    active: int = 0
    queue: deque[Ticket] = field(default_factory=deque)

    def ask(self, cost: int, now: float) -> Ticket:
        """A ticket, admitted at once or queued."""
        if cost > self.bytes:
            raise CapacityError(
                f"one request of {format_bytes(cost)} is above the budget of {format_bytes(self.bytes)} in flight",
                hint="raise the budget, or ask for less at once",
            )
        if len(self.queue) >= self.waiting:
            raise CapacityError(
                f"{len(self.queue)} requests are waiting for {format_bytes(self.bytes)} and {self.requests} requests in flight",
                hint="use fewer threads, or raise the budget",
            )
        ticket = Ticket(cost, now + self.patience)
        self.queue.append(ticket)
        self._admit()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request is over, or its owner waits no longer."""
        if ticket.admitted:
            self.used, self.active = self.used - ticket.cost, self.active - 1
        else:
            self.queue.remove(ticket)
        self._admit()

    def expired(self, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` has waited long enough."""
        return not ticket.admitted and now >= ticket.deadline

    def _admit(self) -> None:
        while self.queue and self.active < self.requests and self.used + self.queue[0].cost <= self.bytes:
            ticket = self.queue.popleft()
            ticket.admitted = True
            self.used, self.active = self.used + ticket.cost, self.active + 1
