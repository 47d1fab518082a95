"""The daemon's staged checkpoints: one `Job` each, and the `JobTable` that `JobService` and `Runner` share.

Purpose: holds the jobs that have not ended and the last `KEPT` that have. For each job, it updates the schedule, the
journal and the keeper together.
Invariants: a job is in at most one of the two tables. A removed job is not in the schedule. `arena` and `plan` are
descriptors that the job owns, -1 for none. All state belongs to one thread; a second one, `files`, uses the journal and
the keeper.
Failure behaviour: if a job's files cannot be removed, they are left to the next daemon, which finds that the job has
ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.dataio.core.errors import CapacityError, HeadraceError, NotFoundError, TransientError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.jobs.fd_keeper import FdKeeper
from headrace.dataio.sidecar.jobs.journal import Entry, Journal, digest
from headrace.dataio.sidecar.jobs.schedule import Schedule
from headrace.dataio.sidecar.jobs.worker import Event

KEPT = 256
_log = get_logger(__name__)


class JobTable:
    """The jobs by token: `jobs` are those that have not ended, `finished` the last ones that have."""

    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.schedule, self.journal, self.keeper = schedule, Journal(folder), FdKeeper(folder)
        self.files = ThreadPoolExecutor(1, thread_name_prefix="headrace-journal")
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.finished: OrderedDict[str, Job] = OrderedDict()

    def find(self, token: str) -> Job:
        """The job with this token.

        `NotFoundError` if it is unknown, or if its arena is lost: then its trainer stages it again.
        """
        job = self.jobs.get(token) or self.finished.get(token)
        if job is None or job.lost:
            raise NotFoundError(
                f"the sidecar knows no staged job {token}",
                hint="it ended long ago, or its arena was lost: stage it again",
            )
        return job

    def has(self, job: Job) -> bool:
        """Whether the job has not ended."""
        return self.jobs.get(job.token) is job

    def state(self, job: Job) -> str:
        """The job's state: one of the schedule's states, or "lost", "done", "failed" or "gone".

        A "gone" job continues as the earlier job for the same checkpoint.
        """
        if job.outcome is not None:
            return "done" if isinstance(job.outcome, m.Done) else "failed"
        if not self.has(job):
            return "gone"
        return "lost" if job.lost else self.schedule.state(job.token)

    def notify(self, job: Job, event: m.JobEvent) -> None:
        """Pass an event to all listeners."""
        for listener in list(job.listeners):
            listener(event)

    def settle(self, job: Job, outcome: m.Done | m.JobFailed) -> None:
        """Set the job's outcome, and pass it to the listeners."""
        job.outcome, job.lost = outcome, False
        if isinstance(outcome, m.JobFailed):
            _log.error("%s: %s", job.entry.about or job.token, outcome.message)
        self.notify(job, outcome)
        job.listeners.clear()

    def finish(self, job: Job) -> None:
        """Move a job that has an outcome and no worker to the finished jobs."""
        self.release_arena(job)
        self.forget(job)
        self.clean(job.token)
        self.finished[job.token] = job
        if len(self.finished) > KEPT:
            self.finished.popitem(last=False)

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.token, None)
        self.schedule.remove(job.token)

    def release_arena(self, job: Job) -> None:
        """Release the job's arena, here and in the keeper."""
        self.schedule.released(job.token)
        if job.arena >= 0:
            fd, job.arena = job.arena, -1
            self.files.submit(self._drop, job.token, fd)

    def clean(self, token: str) -> None:
        """Remove the job's files from the journal, and its arena from the keeper."""
        self.files.submit(self._clean, token)

    def close(self) -> None:
        """Close; jobs and arenas stay for the next daemon."""
        self.files.shutdown()
        self.keeper.close()

    def _drop(self, token: str, fd: int) -> None:
        self.keeper.drop(token)
        os.close(fd)

    def _clean(self, token: str) -> None:
        with contextlib.suppress(OSError):
            self.journal.remove(token)
        self.keeper.drop(token)


Listener = Callable[[m.JobEvent], None]
Answer = Callable[["Job | HeadraceError"], None]


@dataclass(slots=True, eq=False)
class Job:
    """One staged checkpoint. `arena` is a descriptor, or -1 when the job has no arena or has released it."""

    entry: Entry
    arena: int
    plan: int = -1
    answer: Answer | None = None
    cancel_wait: Callable[[], None] = lambda: None
    """Cancels its wait for room."""
    released: bool = False
    lost: bool = False
    """Whether the daemon and the worker died and the arena was lost. The trainer may still have the arena."""
    done: int = 0
    total: int = 0
    outcome: m.Done | m.JobFailed | None = None
    failures: int = 0
    """Number of failure events; `entry.failures` of them were handled."""
    trouble: m.JobFailed | None = None
    """The failure after which the job is retried."""
    next_try: float = 0.0
    """The time of the next retry, on the monotonic clock."""
    bad_lines: int = 0
    listeners: list[Listener] = field(default_factory=list)
    waiting: list[Listener] = field(default_factory=list)
    """The listeners of clients that wait for the outcome and act on it."""

    @property
    def token(self) -> str:
        return self.entry.token


def describe(job: Job, state: str) -> dict[str, object]:
    """The job's status."""
    problem = job.outcome or job.trouble
    return {
        "token": job.token,
        "kind": job.entry.kind,
        "about": job.entry.about,
        "state": state,
        "urgent": job.entry.urgent,
        "arena_bytes": job.entry.size,
        "done": job.done,
        "total": job.total,
        "released": job.released,
        "workers": job.entry.tries,
        "age_seconds": round(time.time() - job.entry.accepted, 3),
        "ignored_lines": job.bad_lines,
        "error": problem.message[:300] if isinstance(problem, m.JobFailed) else None,
        "failures": job.entry.failures,
        "retry_in_seconds": round(max(job.next_try - time.monotonic(), 0.0), 1) if state == "retrying" else None,
    }


def with_plan(entry: Entry, plan: bytes) -> Entry:
    """The entry with the plan's size and digest."""
    return replaced(entry, plan_bytes=len(plan), plan_digest=digest(plan))


def replaced(entry: Entry, **changes: object) -> Entry:
    """The entry with these fields changed."""
    return msgspec.structs.replace(entry, **changes)


def failure(job: Job, event: Event) -> m.JobFailed:
    """The worker's error, cut to the limits of a message."""
    return m.JobFailed(job.token, event.code[:64], event.message[:4096], event.hint[:4096])


def given_up(failed: m.JobFailed, failures: int, seconds: float) -> m.JobFailed:
    """The final error of a job that was retried."""
    text = f" [the sidecar gave up after {failures} tries in {seconds:.0f} s]"
    return m.JobFailed(failed.token, failed.code, failed.message[: 4096 - len(text)] + text, failed.hint)


def no_room(wait: float) -> CapacityError:
    return CapacityError(f"no room for the arena within {wait:g} s", hint="raise arena_bytes, or save less often")


def shutting_down() -> TransientError:
    return TransientError("the sidecar is shutting down", hint="save without it, or try again after its restart")
