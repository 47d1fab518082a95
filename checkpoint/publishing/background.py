"""Publishes in a thread of the trainer, so that training does not wait.

Invariant: versions are published in the order of the calls. At most `MAX_WAITING` wait; a further call waits for room.
Failure behaviour: an error is logged, and the future raises it. Training continues. A call that finds no room in time
raises `DeadlineError`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.publishing import publisher
from headrace.checkpoint.publishing.comparison import Held
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.saving.arena import Staging
from headrace.dataio.core.errors import DeadlineError
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
        staging: the staging memory of the saves, from which a step is published if it is still there.
    """

    def __init__(self, store: Store, run: str, timeout: float, staging: Staging | None = None) -> None:
        self._store, self._run, self._timeout, self._staging = store, run, timeout, staging
        self._held: dict[str, Held] = {}
        self._room = threading.Semaphore(MAX_WAITING)
        self._pool: ThreadPoolExecutor | None = None
        self._futures = set[Future[Published]]()

    @property
    def is_idle(self) -> bool:
        """Whether no version is being published or waits for it."""
        return all(future.done() for future in tuple(self._futures))

    def submit(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Future[Published]:
        """Publish a step, or the step of a save in flight after its commit."""
        if not self._room.acquire(timeout=self._timeout):
            raise DeadlineError(
                f"{MAX_WAITING} versions still wait to be published after {self._timeout:g} s",
                hint="publish fewer steps, or look at the store: it may be slow",
            )
        try:
            self._pool = self._pool or ThreadPoolExecutor(1, "headrace-publisher")
            future = self._pool.submit(self._publish, name, step, choice, move)
        except BaseException:
            self._room.release()
            raise
        self._futures.add(future)
        future.add_done_callback(lambda done: self._done(name, done))
        return future

    def close(self, timeout: float) -> None:
        """Wait until all versions are published; `DeadlineError` if one is not within `timeout` seconds."""
        if self._pool is None:
            return
        self._pool.shutdown(wait=False)
        _, late = wait(set(self._futures), timeout)
        if late:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise DeadlineError(
                f"{len(late)} versions of run {self._run} are not published after {timeout:g} s",
                hint="close with a longer timeout, or publish again with `headrace ckpt publish`",
            )

    def _done(self, name: str, future: Future[Published]) -> None:
        self._room.release()  # also for a future that was cancelled before it ran
        self._futures.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.error("%s was not published: %s", name, error)

    def _publish(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Published:
        wanted = self._saved(step) if isinstance(step, Handle) else step
        base = repository.find(self._store, self._run, wanted)
        if base is None:
            raise repository.missing(self._store, self._run)
        held = self._held.setdefault(name, Held())
        return publisher.publish(
            self._store, name, self._run, base, choice, held=held, staging=self._staging, move=move
        )

    def _saved(self, handle: Handle) -> Base:
        """Wait for a save. Its error still counts as not fetched, so the checkpointer raises it as well."""
        if not handle.wait(self._timeout):
            raise DeadlineError(
                f"step {handle.step} is not committed after {self._timeout:g} s", hint="publish it once it is"
            )
        if handle.error is not None:
            raise handle.error
        saved = handle.result()
        return Base(saved.timeline, saved.step, saved.attempt)
