"""The trainer's side of staged checkpoints: one `StagedJob` each, updated by the connection's thread.

Invariants: every wait has a deadline. An event may arrive before the thread that staged the job has its token. Such
events are kept, at most `EARLY_EVENTS` of them.
Failure behaviour: when the connection breaks, every wait raises `TransientError`. The job usually continues, but this
process cannot know, so it must not write to the arena again.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable

from headrace.dataio.core.errors import DeadlineError, TransientError
from headrace.dataio.sidecar import protocol as m

WAIT_SECONDS = 24 * 3600.0
"""The limit of a wait without a timeout."""
EARLY_EVENTS = 1024


class StagedJob:
    """A checkpoint that the daemon owns: the daemon finishes it even if this process dies."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._changed = threading.Condition()
        self._progress = (0, 0)
        self._released = False
        self._outcome: m.Done | m.JobFailed | None = None
        self._broken: TransientError | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """(done, total) in the job's unit, which is bytes for a checkpoint; (0, 0) before its first report."""
        return self._progress

    @property
    def released(self) -> bool:
        """Whether the job has read the arena."""
        return self._released

    def wait_released(self, timeout: float | None = None) -> None:
        """Wait until the trainer may write to the arena again: the job has read it, or has ended.

        Args:
            timeout: Seconds; None for a day.

        Raises:
            DeadlineError: The timeout passed; the job continues.
            TransientError: The connection broke, so the job's state is unknown.
        """
        self._wait(lambda: self._released or self._outcome is not None, timeout, "to release its arena")

    def result(self, timeout: float | None = None) -> dict[str, object]:
        """Wait for the job's end and return its result.

        Args:
            timeout: Seconds; None for a day.

        Raises:
            HeadraceError: The job failed; this is its error.
            DeadlineError: The timeout passed; the job continues.
            TransientError: The connection broke before the end; call `Sidecar.follow(token)` on a new one.
        """
        self._wait(lambda: self._outcome is not None, timeout, "to end")
        if isinstance(self._outcome, m.JobFailed):
            raise m.error_of(self._outcome.code, self._outcome.message, self._outcome.hint)
        result: dict[str, object] = json.loads(self._outcome.result) if self._outcome else {}
        return result

    def _wait(self, reached: Callable[[], bool], timeout: float | None, goal: str) -> None:
        limit = WAIT_SECONDS if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._broken, limit)
            if reached():
                return
            if self._broken:
                raise self._broken
        raise DeadlineError(
            f"waited {limit:g} s for job {self.token} {goal}", hint="the job continues; see: headrace sidecar status"
        )

    def handle(self, event: m.JobEvent) -> None:
        """Apply an event; called by the connection."""
        with self._changed:
            if isinstance(event, m.Progress):
                self._progress = (event.done, event.total)
            elif isinstance(event, m.Released):
                self._released = True
            else:
                self._outcome = event
            self._changed.notify_all()

    def connection_lost(self, error: TransientError) -> None:
        """No more events will arrive; called by the connection."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()


class StagedJobs:
    """The jobs that one connection follows, by token. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, StagedJob] = {}
        self._early: deque[m.JobEvent] = deque(maxlen=EARLY_EVENTS)
        self._broken: TransientError | None = None

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def follow(self, token: str) -> StagedJob:
        """Follow the job with this token. Events that have arrived already are applied."""
        job = StagedJob(token)
        with self._lock:
            early = [event for event in self._early if event.token == token]
            if not any(isinstance(event, m.Done | m.JobFailed) for event in early):
                self._jobs[token] = job
            broken = self._broken
        for event in early:
            job.handle(event)
        if broken is not None:
            job.connection_lost(broken)
        return job

    def handle(self, event: m.JobEvent) -> None:
        """Pass an event to its job."""
        with self._lock:
            job = self._jobs.get(event.token)
            if job is None:
                self._early.append(event)  # it may arrive before `follow` is called with its token
            elif isinstance(event, m.Done | m.JobFailed):
                del self._jobs[event.token]
        if job is not None:
            job.handle(event)

    def connection_lost(self, error: TransientError) -> None:
        """No more events will arrive: every wait raises `error`."""
        with self._lock:
            self._broken = error
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.connection_lost(error)
