"""What one daemon knows of its jobs, and where they are kept: the table that taking and running share.

Purpose: the jobs that are not over, the last `KEPT` that are, their places in the schedule, their entries in the journal, and the
arenas that are held for them.
Invariants: a job is in one of the two tables or in none; one that is forgotten has no place in the schedule. All of it belongs to
one thread; `files` is the one other, for the journal and for what holds arenas.
Failure behaviour: files of a job that cannot be removed are left to the next daemon, which finds the job over.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.transfer.held import Held
from headrace.dataio.sidecar.transfer.job import Job
from headrace.dataio.sidecar.transfer.journal import Journal
from headrace.dataio.sidecar.transfer.schedule import Schedule

KEPT = 256
_log = get_logger(__name__)


class Book:
    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.schedule, self.journal, self.held = schedule, Journal(folder), Held(folder)
        self.files = ThreadPoolExecutor(1, thread_name_prefix="headrace-journal")
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self.finished: OrderedDict[str, Job] = OrderedDict()

    def find(self, token: str) -> Job:
        """The job with this token, or `NotFoundError`: also when its arena is lost, so that its trainer stages again."""
        job = self.jobs.get(token) or self.finished.get(token)
        if job is None or job.lost:
            raise NotFoundError(f"no staged job {token}", hint="stage again, or it ended long ago")
        return job

    def has(self, job: Job) -> bool:
        """Whether it is not over."""
        return self.jobs.get(job.token) is job

    def state(self, job: Job) -> str:
        """waiting, taken, queued, running, committing, retrying, lost, done, failed; gone when it goes on as another."""
        if job.outcome is not None:
            return "done" if isinstance(job.outcome, m.Done) else "failed"
        if not self.has(job):
            return "gone"
        return "lost" if job.lost else self.schedule.state(job.token)

    def tell(self, job: Job, event: m.JobEvent) -> None:
        """Everybody who listens hears it."""
        for listener in list(job.listeners):
            listener(event)

    def settle(self, job: Job, outcome: m.Done | m.JobFailed) -> None:
        """Its outcome is known."""
        job.outcome, job.lost = outcome, False
        if isinstance(outcome, m.JobFailed):
            _log.error("%s: %s", job.entry.about or job.token, outcome.message)
        self.tell(job, outcome)
        job.listeners.clear()

    def over(self, job: Job) -> None:
        """It is settled, and nobody works on it."""
        self.let_go(job)
        self.forget(job)
        self.clean(job.token)
        self.finished[job.token] = job
        if len(self.finished) > KEPT:
            self.finished.popitem(last=False)

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.token, None)
        self.schedule.over(job.token)

    def let_go(self, job: Job) -> None:
        """The arena is not needed any more."""
        self.schedule.released(job.token)
        if job.arena >= 0:
            fd, job.arena = job.arena, -1
            self.files.submit(self._drop, job.token, fd)

    def clean(self, token: str) -> None:
        """Remove its entry, and what is held for it."""
        self.files.submit(self._clean, token)

    def close(self) -> None:
        """Leave everything as it is for the next daemon."""
        self.files.shutdown()
        self.held.close()

    def _drop(self, token: str, fd: int) -> None:
        self.held.drop(token)
        os.close(fd)

    def _clean(self, token: str) -> None:
        with contextlib.suppress(OSError):
            self.journal.remove(token)
        self.held.drop(token)
