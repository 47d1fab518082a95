"""Publishes in a thread of the trainer, so that training does not wait.

Invariant: versions are published in the order of the calls. At most `MAX_WAITING` wait; a further call waits for room.
Failure behaviour: an error is logged, and the future raises it. Training continues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.publishing import publisher
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.repository import steps as repository
from headrace.dataio.core.errors import DeadlineError, NotFoundError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

MAX_WAITING = 2
_log = get_logger(__name__)


class BackgroundPublisher:
    """Publishes steps of one run, one after the other.

    Args:
        store: the repository.
        run: the run of the steps.
        timeout: limit in seconds of the wait for a save, and of the wait for room.
    """

    def __init__(self, store: Store, run: str, timeout: float) -> None:
        self._store, self._run, self._timeout = store, run, timeout
        self._held: dict[str, publisher.Held] = {}
        self._room = threading.Semaphore(MAX_WAITING)
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Future[Published]:
        """Publish a step, or the step of a save in flight after its commit."""
        if not self._room.acquire(timeout=self._timeout):
            raise DeadlineError(f"{MAX_WAITING} versions still wait to be published after {self._timeout:g} s")
        self._pool = self._pool or ThreadPoolExecutor(1, "headrace-publisher")
        future = self._pool.submit(self._releasing, lambda: self._publish(name, step, choice, move))
        future.add_done_callback(lambda done: _log_error(name, done))
        return future

    def close(self) -> None:
        """Wait until all versions are published."""
        if self._pool is not None:
            self._pool.shutdown()

    def _releasing(self, work: Callable[[], Published]) -> Published:
        try:
            return work()
        finally:
            self._room.release()

    def _publish(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Published:
        wanted: int | str | Base
        if isinstance(step, Handle):
            saved = step.result(self._timeout)
            wanted = Base(saved.timeline, saved.step, saved.attempt)
        else:
            wanted = step
        base = repository.find(self._store, self._run, wanted)
        if base is None:
            raise NotFoundError(f"run {self._run} has no step to publish", hint="save one first")
        held = self._held.setdefault(name, publisher.Held())
        return publisher.publish(self._store, name, self._run, base, choice, held=held, move=move)


def _log_error(name: str, done: Future[Published]) -> None:
    if (error := done.exception()) is not None:
        _log.error("%s was not published: %s", name, error)
