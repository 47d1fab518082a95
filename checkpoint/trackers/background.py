"""Calls the trackers of a checkpointer in threads, so that they never delay or fail a save.

Each tracker has a queue and a thread. The thread starts with the first event.
Invariants:

- A tracker gets a step after its commit, and a version after its publication, in the order in which they ended.
- At most `MAX_WAITING` events wait for a tracker. While its queue is full, further events are dropped.
- An event is built once, in the thread of the tracker that is first, because the store may be slow.

Failure behaviour: the first error of a tracker, and the first event that is dropped, are logged as warnings. `close`
waits a limited time. What a tracker has not logged by then is not logged. The threads are daemons, so a tracker that
hangs does not keep the program from ending.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from headrace.checkpoint.handle import Handle
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.saves import before_exit
from headrace.checkpoint.trackers.events import (
    CommittedStep,
    PublishedVersion,
    Tracker,
    committed_step,
    published_version,
)
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

MAX_WAITING = 64
"""The maximum number of events that wait for one tracker."""
MAX_TRACKERS = 16
CLOSE_SECONDS = 10.0
"""Seconds that `close` waits for the trackers, all together."""
_log = get_logger(__name__)
Event = CommittedStep | PublishedVersion


class BackgroundTrackers:
    """The trackers of one checkpointer, on rank 0. All methods return at once, but for `close`.

    Args:
        store (Store): The repository.
        trackers (Sequence[Tracker]): What `started` returned.
    """

    def __init__(self, store: Store, trackers: Sequence[Tracker]) -> None:
        self._store, self._pid = store, os.getpid()
        self._changed = threading.Condition()
        self._expected = 0  # saves and publications in progress
        self._closed = False
        self._workers = [_Worker(tracker) for tracker in trackers]
        if self._workers:
            before_exit(self.close)

    def follow_save(self, handle: Handle, metadata: Mapping[str, Any]) -> None:
        """Log the step once it is committed."""
        if not self._expects():
            return

        def ended() -> None:
            committed = handle.error is None
            self._ended((lambda: committed_step(self._store, handle.result(), metadata)) if committed else None)

        handle.add_done_callback(ended)

    def follow_publication(self, future: Future[Published]) -> None:
        """Log the version once it is published."""
        if not self._expects():
            return

        def ended(done: Future[Published]) -> None:
            published = not done.cancelled() and done.exception() is None
            self._ended((lambda: published_version(self._store, done.result())) if published else None)

        future.add_done_callback(ended)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Wait until everything is logged, for at most `timeout` seconds."""
        if self._closed or os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._expected == 0, timeout)
            self._closed = True
        for worker in self._workers:
            worker.finish()
        for worker in self._workers:
            worker.join(deadline)

    def _expects(self) -> bool:
        with self._changed:
            if self._closed or not self._workers:
                return False
            self._expected += 1
            return True

    def _ended(self, build: Callable[[], Event] | None) -> None:
        with self._changed:
            self._expected -= 1
            if build is not None and not self._closed:
                shared = _Shared(build)
                for worker in self._workers:
                    worker.offer(shared)
            self._changed.notify_all()


class _Shared:
    """An event that the first caller builds."""

    def __init__(self, build: Callable[[], Event]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._event: Event | None = None

    def __call__(self) -> Event:
        with self._lock:
            if self._event is None:
                self._event = self._build()
            return self._event


class _Worker:
    """The queue and the thread of one tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self._name = tracker, type(tracker).__name__
        self._changed = threading.Condition()
        self._waiting = deque[_Shared]()
        self._finished = False
        self._thread: threading.Thread | None = None
        self._warned = set[str]()

    def offer(self, event: _Shared) -> None:
        """Add an event to the queue. If the queue is full, the event is dropped."""
        with self._changed:
            is_full = len(self._waiting) >= MAX_WAITING
            if not is_full:
                self._waiting.append(event)
                self._changed.notify_all()
        if is_full:
            self._warn("full", f"{MAX_WAITING} events wait already, so further ones are not logged")
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"headrace-{self._name}", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """End the thread after the events that wait now."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, on the monotonic clock."""
        if self._thread is not None:
            self._thread.join(max(deadline - time.monotonic(), 0))
            if self._thread.is_alive():
                self._warn("late", "it does not finish; what waits for it is not logged")

    def _run(self) -> None:
        while (event := self._next()) is not None:
            self._call(partial(self._log, event))
        self._call(self._tracker.close)

    def _next(self) -> _Shared | None:
        """The next event; None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._finished)
            return self._waiting.popleft() if self._waiting else None

    def _log(self, shared: _Shared) -> None:
        event = shared()
        if isinstance(event, CommittedStep):
            self._tracker.committed(event)
        else:
            self._tracker.published(event)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._warn("error", f"an event is not logged: {type(error).__name__}: {error}")

    def _warn(self, kind: str, problem: str) -> None:
        """Log the first problem of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s. Saves are not affected; this is logged once", self._name, problem)


def started(trackers: Sequence[Tracker], rank: int) -> list[Tracker]:
    """The trackers of this rank, ready to log. Ranks other than 0 have none.

    Raises:
        UsageError: A tracker has nothing to log to, or an object is no `Tracker`.
    """
    listed: list[object] = [trackers] if isinstance(trackers, Tracker | str) else list(trackers)
    if len(listed) > MAX_TRACKERS:
        raise UsageError(f"{len(listed)} trackers are given", hint=f"give at most {MAX_TRACKERS}")
    for tracker in listed:
        if not isinstance(tracker, Tracker):
            raise UsageError(
                f"{tracker!r:.200} is not a tracker",
                hint="give a list of objects of headrace.checkpoint.trackers, or derive a class from its events.Tracker",
            )
        if rank == 0:
            tracker.start()
    return [tracker for tracker in listed if isinstance(tracker, Tracker)] if rank == 0 else []
