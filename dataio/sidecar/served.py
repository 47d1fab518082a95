"""One client as the daemon's parts see it, and the work that is done for clients beside the loop.

Invariant: everything here lives on the loop's thread. Failure behaviour: none of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from headrace.dataio.sidecar import machine
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.peer import Peer
from headrace.dataio.sidecar.transfer.job import Job


@dataclass(slots=True, eq=False)
class Client:
    """A connection. What a part decides for it goes to `carry_out`."""

    session: machine.Session
    pid: int
    carry_out: Callable[[list[machine.Instruction]], None]
    peer: Peer | None = None
    greeting: asyncio.TimerHandle | None = None
    listener: Callable[[m.JobEvent], None] | None = None
    opening: bool = False  # the store of an announcement
    job: str = ""  # with which it shares limits
    staging: list[Job] = field(default_factory=list)
    """Jobs that were not answered yet."""

    @property
    def process(self) -> int:
        """The kernel's word for who it is; the client's own from another pid namespace, where the kernel has none."""
        return self.pid or self.session.client_pid

    @property
    def ready(self) -> bool:
        """Whether it has said hello and is still there."""
        return self.session.state == "ready"


class Tasks:
    """Coroutines that run beside the loop's callbacks, until they end or the daemon does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._tasks = loop, set[asyncio.Task[None]]()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
