"""Accepts staged checkpoints, and answers queries about them.

Purpose: adds jobs to the `JobTable` and passes them to the `Runner`. An accepted job runs to its end even if the
client, its worker or this daemon dies. Its events go to its listeners.
Invariants: `answer` gets a job only after the job is in the journal and its arena in the keeper. The last finished jobs
are remembered for clients that reconnect. All state belongs to one thread; files and the keeper belong to another.
Failure behaviour: a job is refused if a descriptor has the wrong type, its kind is unknown, the queue is full, or there
is no room for the arena. Then both descriptors are closed. The runner handles jobs whose worker fails. If no
keeper can be started, jobs are accepted without it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CapacityError, HeadraceError, TransientError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.jobs.gate import PriorityGate
from headrace.dataio.sidecar.jobs.job_table import (
    Answer,
    Job,
    JobTable,
    Listener,
    describe,
    no_room,
    shutting_down,
    with_plan,
)
from headrace.dataio.sidecar.jobs.journal import Entry, read_plan
from headrace.dataio.sidecar.jobs.memfd import check_arena, check_plan
from headrace.dataio.sidecar.jobs.runner import LOST_SECONDS, Runner
from headrace.dataio.sidecar.jobs.schedule import RetrySchedule, Schedule
from headrace.dataio.sidecar.wire import close_all

_received = declare("sidecar.stage-received", "the daemon has plan and arena; nothing is journaled: not promised")
_journaled = declare("sidecar.stage-journaled", "plan and entry are synced, the arena is kept; not yet acknowledged")
_acknowledged = declare("sidecar.stage-acknowledged", "the trainer knows that the daemon has it; no worker yet")

_log = get_logger(__name__)


class JobService:
    """The daemon's staged checkpoints. Not thread-safe.

    `call(f)` must run `f` on the thread that uses this object; other threads pass events through it. `later(seconds, f)`
    must run `f` on the same thread, and return a function that cancels the call.
    """

    def __init__(
        self,
        folder: Path,
        *,
        commands: Mapping[str, Sequence[str]],
        call: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], Callable[[], None]],
        schedule: Schedule,
        lost_seconds: float = LOST_SECONDS,
        retry_schedule: RetrySchedule | None = None,
    ) -> None:
        self._commands, self._call, self._later = commands, call, later
        self.schedule, self._table, self._gate = schedule, JobTable(folder, schedule), PriorityGate(folder / "gate")
        self._runner = Runner(
            self._table,
            commands=commands,
            gate=self._gate,
            call=call,
            later=later,
            accept=self._make_durable,
            retry_schedule=retry_schedule or RetrySchedule(),
            lost_seconds=lost_seconds,
        )
        self.accepting = True

    # accepting jobs

    def submit(
        self,
        kind: str,
        arena: int,
        plan: int,
        answer: Answer,
        *,
        about: str = "",
        urgent: bool = False,
        wait: float = 0.0,
    ) -> Job | None:
        """Accept a job now, or within `wait` seconds when there is room. Takes ownership of both descriptors in any case.

        `answer` is called with the job once it is durable, or with the error. Returns None if the job was refused at once.
        """
        token = uuid.uuid4().hex
        try:
            size = self._check(kind, arena, plan)
            has_room = self.schedule.offer(token, size, urgent=urgent, may_wait=wait > 0)
        except HeadraceError as error:
            close_all((arena, plan))
            answer(error)
            return None
        entry = Entry(
            token=token,
            kind=kind,
            about=about,
            urgent=urgent,
            size=size,
            plan_bytes=0,
            plan_digest="",
            accepted=time.time(),
        )
        job = self._table.jobs[token] = Job(entry, arena, plan, answer)
        _received()
        if has_room:
            self._make_durable(job)
        else:
            job.cancel_wait = self._later(wait, partial(self._refuse, job, no_room(wait)))
        return job

    def withdraw(self, job: Job) -> None:
        """The job's client has disconnected: drop the job if it still waits for room."""
        if self._table.has(job) and self.schedule.state(job.token) == "waiting":
            _log.warning(
                "%s was withdrawn while it waited for room: its trainer has exited", job.entry.about or job.token
            )
            job.answer = None
            self._refuse(job, TransientError("the trainer has exited"))

    def drain(self) -> None:
        """Accept no more jobs; refuse those that wait for room."""
        self.accepting = False
        for job in list(self._table.jobs.values()):
            if self.schedule.state(job.token) == "waiting":
                self._refuse(job, shutting_down())

    def adopt(self, on_job: Callable[[Job], None]) -> None:
        """Continue the jobs of an earlier daemon; `on_job` is called with each before its events."""
        arenas = self._table.keeper.take()
        for entry in self._table.journal.load():
            job = self._table.jobs[entry.token] = Job(entry, arenas.pop(entry.token, -1))
            on_job(job)
            self._runner.find_worker(job)
        for token, fd in arenas.items():
            os.close(fd)
            self._table.keeper.drop(token)
        self._runner.advance()

    # queries

    def find(self, token: str) -> Job:
        """The job with this token.

        `NotFoundError` if it is unknown, or if its arena is lost: then its trainer stages it again.
        """
        return self._table.find(token)

    def follow(self, job: Job, listener: Listener) -> None:
        """Call `listener` with the job's state and its further events, until its end."""
        if job.total:
            listener(m.Progress(job.token, job.done, job.total))
        if job.released:
            listener(m.Released(job.token))
        if job.outcome is not None:
            listener(job.outcome)
        else:
            job.listeners.append(listener)

    def attend(self, job: Job, listener: Listener) -> None:
        """As `follow`, for a listener that acts on the outcome: a failure is reported at once instead of retried."""
        self.follow(job, listener)
        if job.outcome is None:
            job.waiting.append(listener)

    def leave(self, listener: Listener) -> None:
        """Remove a listener."""
        for job in self._table.jobs.values():
            job.listeners = [other for other in job.listeners if other is not listener]
            job.waiting = [other for other in job.waiting if other is not listener]

    @property
    def busy(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._table.jobs)

    def state(self, job: Job) -> str:
        """The job's state, as `JobTable.state` describes."""
        return self._table.state(job)

    def trouble(self, job: Job) -> str:
        """Why the job is retried; empty if it is not."""
        return job.trouble.message if job.trouble is not None else ""

    def room(self) -> dict[str, float]:
        """Counts of the schedule and of the retries."""
        retries = {"retries": self._runner.retries, "retry_limit_seconds": self._runner.retry_schedule.limit}
        return {**self.schedule.room(), **retries}

    def status(self) -> dict[str, object]:
        """Counts and the latest jobs, for the status."""
        latest = [*self._table.jobs.values(), *list(self._table.finished.values())[-16:]]
        return {
            **self.room(),
            "finished": len(self._table.finished),
            "kept": self._table.keeper.holds,
            "gate_closed": self._gate.closed,
            "jobs": [describe(job, self.state(job)) for job in latest],
        }

    def close(self) -> None:
        """Close; jobs and arenas stay for the next daemon."""
        self._table.close()
        self._gate.close()

    # accepting

    def _check(self, kind: str, arena: int, plan: int) -> int:
        if not self.accepting:
            raise shutting_down()
        if kind not in self._commands:
            raise UsageError(
                f"the sidecar knows no job {kind!r}", hint=f"it knows {', '.join(self._commands) or 'none'}"
            )
        size = check_arena(arena)
        check_plan(plan)
        return size

    def _make_durable(self, job: Job) -> None:
        """Write the job to the journal and pass its arena to the keeper, in the thread for files."""
        job.cancel_wait()

        def keep() -> None:
            error: HeadraceError | None = None
            try:
                plan = read_plan(job.plan)
                job.entry = with_plan(job.entry, plan)
                self._table.journal.record(job.entry, plan)
                self._table.keeper.put(job.token, job.arena)
            except HeadraceError as caught:
                error = caught
            except OSError as caught:
                error = CapacityError(f"the job cannot be journaled: {caught.strerror}", hint="see the daemon's disk")
            self._call(partial(self._on_durable, job, error))

        self._table.files.submit(keep)

    def _on_durable(self, job: Job, error: HeadraceError | None) -> None:
        if error is not None:
            self._refuse(job, error)
            return
        _journaled()
        os.close(job.plan)
        job.plan = -1
        answer, job.answer = job.answer, None
        job = self._match_lost_job(job)
        self.schedule.journaled(job.token)
        if answer is not None:
            answer(job)
        _acknowledged()
        self._runner.advance()

    def _match_lost_job(self, job: Job) -> Job:
        """The earlier job for the same checkpoint, if it had lost its arena; else `job`.

        The earlier job gets the arena, and `job` is forgotten.
        """
        lost_jobs = [
            lost_job
            for lost_job in self._table.jobs.values()
            if lost_job.lost and lost_job.entry.plan_digest == job.entry.plan_digest
        ]
        if not lost_jobs:
            return job
        lost_job, arena = lost_jobs[0], job.arena
        _log.info("%s is back with its arena", lost_job.entry.about or lost_job.token)
        lost_job.arena, lost_job.lost, job.arena = arena, False, -1
        self._table.forget(job)
        self.schedule.adopt(
            lost_job.token, lost_job.entry.size, urgent=lost_job.entry.urgent, state="queued", holds=lost_job.entry.size
        )
        self._table.files.submit(self._table.keeper.put, lost_job.token, arena)
        self._table.clean(job.token)
        return lost_job

    def _refuse(self, job: Job, error: HeadraceError) -> None:
        job.cancel_wait()
        job.outcome = m.JobFailed(job.token, *m.error_fields(error))
        self._table.notify(job, job.outcome)
        self._table.forget(job)
        close_all(fd for fd in (job.arena, job.plan) if fd >= 0)
        self._table.clean(job.token)
        if job.answer is not None:
            job.answer(error)
        self._runner.advance()
