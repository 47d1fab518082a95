"""Runs accepted jobs: starts, follows, replaces and retries their workers until every job has ended.

Purpose: starts the jobs that the schedule allows, and applies a worker's events and its exit to its job.
Invariants: a job has at most one worker at a time, and gets further ones until it has an outcome. A thread per worker
reads the worker's output; everything else runs on the thread that `call` and `later` use.
Failure behaviour:

- A killed worker is replaced. The job fails when `TRIES` workers were killed.
- If a worker exits without "done" or "failed", the job fails with `UnsupportedError`, because another worker would end
  likewise. The reason is the worker's last lines on standard error.
- If a worker reports a failure that may not recur, the job is retried as the retry schedule allows. If a client waits
  for the outcome, it gets the error instead.
- If a worker cannot be started, its job fails with the reason.
- A line that is not an event is counted and ignored.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.dataio.core.errors import HeadraceError, TransientError, UnsupportedError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.jobs.gate import PriorityGate
from headrace.dataio.sidecar.jobs.job_table import Job, JobTable, failure, given_up, replaced
from headrace.dataio.sidecar.jobs.journal import is_locked
from headrace.dataio.sidecar.jobs.schedule import RetrySchedule
from headrace.dataio.sidecar.jobs.worker import End, Event, Worker, decode_event, started_at

TRIES = 3
LOST_SECONDS = 60.0
"""How long a job that lost its arena waits for its trainer to stage it again."""
_KILLED_HINT = "save again; if it is killed again, see the kernel's log, and give the daemon more memory"
_CANNOT_RUN_HINT = "another try would end likewise; see the daemon's log, and repair its installation"

_log = get_logger(__name__)


class Runner:
    """Runs the jobs of `table`. Calls `accept(job)` for a waiting job when there is room for it."""

    def __init__(
        self,
        table: JobTable,
        *,
        commands: Mapping[str, Sequence[str]],
        gate: PriorityGate,
        call: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], Callable[[], None]],
        accept: Callable[[Job], None],
        retry_schedule: RetrySchedule,
        lost_seconds: float,
    ) -> None:
        self._table, self._commands, self._gate, self._accept = table, commands, gate, accept
        self._call, self._later, self._lost_seconds = call, later, lost_seconds
        self.retry_schedule = retry_schedule
        self.retries = 0
        """Number of workers that were started after one that failed."""
        self._cancel_check: Callable[[], None] = lambda: None

    def find_worker(self, job: Job) -> None:
        """Continue an earlier daemon's job: follow its worker if that is alive; else read its events and start another."""
        fd = self._table.journal.open(job.token, "events")
        try:
            alive = is_locked(fd)
        finally:
            os.close(fd)
        size, urgent, holds = job.entry.size, job.entry.urgent, job.entry.size if job.arena >= 0 else 0
        self._table.schedule.adopt(job.token, size, urgent=urgent, state="running", holds=holds)
        worker = Worker(self._table.journal, job.token, process=None)
        if alive:
            _log.info("%s is still run by process %d", job.entry.about or job.token, job.entry.pid)
            self._watch(job, worker)
        else:
            end = worker.follow(lambda line: self._on_event(job, decode_event(line)))
            self._on_worker_ended(job, end)

    def advance(self) -> None:
        """Accept and start the jobs that the schedule allows now."""
        for token in self._table.schedule.take():
            self._accept(self._table.jobs[token])
        for token in self._table.schedule.start():
            self._start(self._table.jobs[token])
        self._pause_others()

    def _pause_others(self) -> None:
        """Close the gate for other jobs while urgent ones run. Schedules itself again while the gate must be closed."""
        self._cancel_check()
        closed = self._table.schedule.holds_back(time.monotonic())
        self._gate.close_for_others(closed)
        if closed:  # retry the lock soon; check later whether to release it
            self._cancel_check = self._later(1.0 if self._gate.closed else 0.02, self._pause_others)

    def _start(self, job: Job) -> None:
        command, arena = self._commands.get(job.entry.kind, ()), -1 if job.released else job.arena
        gate = None if job.entry.urgent else self._gate
        try:
            worker = Worker.start(command, self._table.journal, job.entry, arena, gate)
        except (OSError, HeadraceError, IndexError) as error:
            name = command[0] if command else f"a job of kind {job.entry.kind}"
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._on_worker_ended(job, End(f"cannot start {name}: {reason}", killed=False))
            return
        tries, pid = job.entry.tries + 1, worker.pid
        job.entry = replaced(job.entry, tries=tries, pid=pid, started=started_at(pid))
        self._table.files.submit(self._table.journal.update, job.entry)
        self._watch(job, worker)

    def _watch(self, job: Job, worker: Worker) -> None:
        def watch() -> None:
            end = worker.follow(lambda line: self._call(partial(self._on_event, job, decode_event(line))))
            self._call(partial(self._on_worker_ended, job, end))

        threading.Thread(target=watch, name=f"headrace-job-{job.token[:8]}", daemon=True).start()

    def _on_event(self, job: Job, event: Event | None) -> None:
        kind = event.event if event else ""
        if event is None or job.outcome is not None:
            job.bad_lines += 1
        elif kind == "progress":
            job.done, job.total = event.done, event.total
            self._table.notify(job, m.Progress(job.token, event.done, event.total))
        elif kind == "released":
            self._on_released(job)
        elif kind == "committing":
            self._table.schedule.committing(job.token)
            self.advance()
        elif kind == "done":
            self._table.settle(job, m.Done(job.token, bytes(event.result).decode()))
        elif kind == "failed":
            self._on_failed(job, event)
        else:
            job.bad_lines += 1

    def _on_released(self, job: Job) -> None:
        if not job.released:
            job.released = True
            self._table.release_arena(job)
            self._table.notify(job, m.Released(job.token))
            self.advance()

    def _on_failed(self, job: Job, event: Event) -> None:
        job.failures += 1
        if job.failures <= job.entry.failures:  # an event that an earlier daemon handled
            return
        if event.again and not job.waiting:
            job.trouble = failure(job, event)
        else:
            self._table.settle(job, failure(job, event))

    def _on_worker_ended(self, job: Job, end: End) -> None:
        """The worker has exited: end the job, or start another worker, now or later."""
        if job.outcome is not None:
            self._finish(job)
        elif job.trouble is not None and job.failures > job.entry.failures:
            self._try_later(job, job.trouble)
        elif not end.killed or job.entry.tries - job.entry.failures >= TRIES:
            text = f"the {job.entry.kind} job failed: {end.reason}"[:4096]
            code, hint = (
                (TransientError.code, _KILLED_HINT) if end.killed else (UnsupportedError.code, _CANNOT_RUN_HINT)
            )
            self._table.settle(job, m.JobFailed(job.token, code, text, hint))
            self._finish(job)
        elif job.arena < 0 and not job.released and not job.lost:
            _log.warning(
                "%s has lost its daemon, worker and arena; waiting for its trainer", job.entry.about or job.token
            )
            job.lost = True
            self._later(self._lost_seconds, partial(self._give_up, job))
        else:
            _log.warning("%s gets another worker: %s", job.entry.about or job.token, end.reason)
            self._table.schedule.requeue(job.token)
            self.advance()

    def _try_later(self, job: Job, trouble: m.JobFailed) -> None:
        """Schedule a retry after a failure, because the store may recover."""
        now = time.time()
        failing_since = job.entry.failing_since or now
        pause = self.retry_schedule.pause(job.failures, now - failing_since, random.random())
        if pause is None:
            self._table.settle(job, given_up(trouble, job.failures, now - failing_since))
            self._finish(job)
            return
        name = job.entry.about or job.token
        _log.warning("%s failed and is retried in %.0f s, as no trainer waits for it: %s", name, pause, trouble.message)
        job.entry = replaced(job.entry, failures=job.failures, failing_since=failing_since)
        self._table.files.submit(self._table.journal.update, job.entry)
        job.next_try = time.monotonic() + pause
        self._table.schedule.retry_later(job.token)
        self._later(pause, partial(self._try_again, job))
        self.advance()

    def _try_again(self, job: Job) -> None:
        if self._table.has(job) and self._table.schedule.state(job.token) == "retrying":
            self.retries += 1
            self._table.schedule.requeue(job.token)
            self.advance()

    def _give_up(self, job: Job) -> None:
        """Start a last worker for a lost job that no trainer has staged again.

        The worker finishes the work that needs no arena, or it cleans up and reports the loss.
        """
        if job.lost and self._table.has(job):
            job.lost = False
            self._table.schedule.requeue(job.token)
            self.advance()

    def _finish(self, job: Job) -> None:
        self._table.finish(job)
        self.advance()
