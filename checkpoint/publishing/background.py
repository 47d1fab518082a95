"""Publishes in a thread of the trainer, so that training does not wait.

Invariant: versions are published in the order of the calls. At most `MAX_WAITING` wait; a further call waits for room.
The weights of earlier versions use at most `HELD_BYTES`, and those of the name that is being published as much again.
From the call until its publication has ended, this process's retention keeps the step. Then the version's tag keeps it.
Failure behaviour: an error is logged, and the future raises it. Training continues. A call that finds no room in time
raises `DeadlineError`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.handle import Handle
from headrace.checkpoint.publishing import publisher
from headrace.checkpoint.publishing.comparison import HELD_BYTES, Held
from headrace.checkpoint.publishing.early import EarlyComparison
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.saving.arena import Staging
from headrace.dataio.core.errors import DeadlineError, HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

MAX_WAITING = 2
Protect = Callable[[int], Callable[[], None]]
"""Keeps the steps with a number until the returned function is called (`collect.Retention.protect`)."""
_log = get_logger(__name__)


class BackgroundPublisher:
    """Publishes steps of one run, one after the other.

    Args:
        store: the repository.
        run: the run of the steps.
        timeout: limit in seconds of the wait for a save, and of the wait for room.
        staging: the staging memory of the saves, from which a step is published if it is still there.
        protect: keeps a step that waits to be published. Default: retention does not run in this process.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        timeout: float,
        staging: Staging | None = None,
        protect: Protect = lambda _: lambda: None,
    ) -> None:
        self._store, self._run, self._timeout = store, run, timeout
        self._staging, self._protect = staging, protect
        self._held = OrderedDict[str, Held]()
        self._room = threading.Semaphore(MAX_WAITING)
        self._pool: ThreadPoolExecutor | None = None
        self._futures = set[Future[Published]]()

    @property
    def is_idle(self) -> bool:
        """Whether no version is being published or waits for it."""
        return all(future.done() for future in tuple(self._futures))

    def submit(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Future[Published]:
        """Publish a step, or the step of a save in flight after its commit."""
        number = step.step if isinstance(step, Handle) else step
        release = self._protect(number) if isinstance(number, int) else lambda: None
        try:
            future = self._submit(name, step, choice, move)
        except BaseException:
            release()
            raise
        future.add_done_callback(lambda _: release())
        return future

    def _submit(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Future[Published]:
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
            self.cancel_waiting()
            raise DeadlineError(
                f"{len(late)} versions of run {self._run} are not published after {timeout:g} s",
                hint="close with a longer timeout, or publish again with `headrace ckpt publish`",
            )

    def cancel_waiting(self) -> None:
        """Cancel the publications that have not begun. Later calls of `submit` fail."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, name: str, future: Future[Published]) -> None:
        self._room.release()  # also for a future that was cancelled before it ran
        self._futures.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.error("%s was not published: %s", name, error)

    def _publish(self, name: str, step: int | str | Handle, choice: Choice, move: bool) -> Published:
        held, early = self._held_of(name), None
        wanted: int | str | Base
        with ExitStack() as undo:
            if isinstance(step, Handle):
                until = time.monotonic() + self._timeout
                early = self._compared_early(name, step, choice, held)
                if early is not None:
                    undo.callback(early.discard, self._store)
                wanted = self._saved(step, until)
            else:
                wanted = step
            base = repository.find(self._store, self._run, wanted)
            if base is None:
                raise repository.missing(self._store, self._run)
            undo.pop_all()
        return publisher.publish(
            self._store, name, self._run, base, choice, held=held, staging=self._staging, early=early, move=move
        )

    def _held_of(self, name: str) -> Held:
        """The memory of a name. Names that were published longest ago lose theirs while all have more than `HELD_BYTES`."""
        held = self._held.setdefault(name, Held())
        self._held.move_to_end(name)
        while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > HELD_BYTES:
            self._held.popitem(last=False)
        return held

    def _compared_early(self, name: str, handle: Handle, choice: Choice, held: Held) -> EarlyComparison | None:
        """Compare the weights while the save writes them. An error is logged: the step is compared after its commit."""
        if self._staging is None or not handle.wait_staged(self._timeout) or handle.error is not None:
            return None
        try:
            return publisher.begin(self._store, name, choice, handle.attempt, self._staging, held)
        except HeadraceError as error:
            _log.info("step %s is compared after its commit: %s", handle.step, error)
            return None

    def _saved(self, handle: Handle, until: float) -> Base:
        """Wait for a save. Its error still counts as not fetched, so the checkpointer raises it as well."""
        if not handle.wait(max(until - time.monotonic(), 0)):
            raise DeadlineError(
                f"step {handle.step} is not committed after {self._timeout:g} s", hint="publish it once it is"
            )
        if handle.error is not None:
            raise handle.error
        saved = handle.result()
        return Base(saved.timeline, saved.step, saved.attempt)
