"""All staged checkpoints of one daemon: taken, carried, followed, found again.

Purpose: puts `schedule`, `journal`, `held` and `worker` together. Once a job is taken it runs to its end, whatever becomes
of the client,
of its worker, or of this daemon; events go to whoever listens.
Invariants: `answer` hears of a job only when it is journaled and its arena is kept; `kept` finished jobs are remembered, so
that a client
that reconnects can ask. All state belongs to one thread; files and the keeper to one other.
Failure behaviour: a descriptor of the wrong kind, an unknown command, a full queue or an arena without room refuses the job and
closes both descriptors. A worker that is killed is replaced `TRIES` times in all; one that ends by itself without "done" or
"failed" has failed, with its last lines on standard error as the reason. One that says it may succeed later is tried again as
`patience` allows, unless somebody waits for the outcome, who is told. A line that is no event is ignored and counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dataio.core.crashpoints import declare
from dataio.core.errors import CapacityError, MillraceError, NotFoundError, TransientError, UsageError
from dataio.core.log import get_logger
from dataio.sidecar import messages as m
from dataio.sidecar.transfer import events
from dataio.sidecar.transfer.gate import Gate
from dataio.sidecar.transfer.held import Held
from dataio.sidecar.transfer.job import (
    Answer,
    Job,
    Listener,
    describe,
    failure,
    given_up,
    no_room,
    replaced,
    shutting_down,
    with_plan,
)
from dataio.sidecar.transfer.journal import Entry, Journal, is_locked, read_plan
from dataio.sidecar.transfer.memfd import check_arena, check_plan
from dataio.sidecar.transfer.patience import Patience
from dataio.sidecar.transfer.schedule import Schedule
from dataio.sidecar.transfer.worker import End, Worker, started_at
from dataio.sidecar.wire import close_all

TRIES = 3
KEPT = 256
LOST_SECONDS = 60.0
"""How long a job without its arena waits for its trainer to come back with it."""

_received = declare("sidecar.stage-received", "the daemon has plan and arena; nothing is journaled: not promised")
_journaled = declare("sidecar.stage-journaled", "plan and entry are synced, the arena is kept; not yet acknowledged")
_acknowledged = declare("sidecar.stage-acknowledged", "the trainer knows that the daemon has it; no worker yet")

_log = get_logger(__name__)


class Jobs:
    """Not thread-safe, except that `call` may carry events in from other threads: `call(f)` must run `f` on the thread that
    uses this object. `later(seconds, f)` runs `f` there too, and returns what cancels it."""

    def __init__(
        self,
        folder: Path,
        commands: Mapping[str, Sequence[str]],
        call: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], Callable[[], None]],
        schedule: Schedule,
        lost_seconds: float = LOST_SECONDS,
        patience: Patience | None = None,
    ) -> None:
        self._commands, self._call, self._later, self._lost_seconds = commands, call, later, lost_seconds
        self._patience = patience or Patience()
        self.retries = 0
        """Workers that were started after one that failed."""
        self.schedule, self._journal = schedule, Journal(folder)
        self._held, self._gate = Held(folder), Gate(folder / "gate")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="millrace-journal")
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._finished: OrderedDict[str, Job] = OrderedDict()
        self._look_again: Callable[[], None] = lambda: None
        self.accepting = True

    # taking jobs

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
        """Take the job now, or when there is room within `wait` seconds; its descriptors are taken over in any case.

        `answer` hears of the job once it is kept for good, or why it was refused; None is returned when it was at once.
        """
        token = uuid.uuid4().hex
        try:
            size = self._check(kind, arena, plan)
            taken = self.schedule.offer(token, size, urgent=urgent, patient=wait > 0)
        except MillraceError as error:
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
        job = self._jobs[token] = Job(entry, arena, plan, answer)
        _received()
        if taken:
            self._keep(job)
        else:
            job.patience = self._later(wait, partial(self._refuse, job, no_room(wait)))
        return job

    def withdraw(self, job: Job) -> None:
        """The client of a job that waits for room has ended: nothing was promised."""
        if self._jobs.get(job.token) is job and self.schedule.state(job.token) == "waiting":
            _log.warning("%s was withdrawn while it waited for room: its trainer ended", job.entry.about or job.token)
            job.answer = None
            self._refuse(job, TransientError("the trainer ended"))

    def drain(self) -> None:
        """Take no more; those that wait for room are sent back."""
        self.accepting = False
        for job in list(self._jobs.values()):
            if self.schedule.state(job.token) == "waiting":
                self._refuse(job, shutting_down())

    def adopt(self, found: Callable[[Job], None]) -> None:
        """Find what an earlier daemon left; `found` hears of each job before its events."""
        arenas = self._held.take()
        for entry in self._journal.load():
            job = self._jobs[entry.token] = Job(entry, arenas.pop(entry.token, -1))
            found(job)
            self._find_worker(job)
        for token, fd in arenas.items():
            os.close(fd)
            self._held.drop(token)
        self._advance()

    # asking

    def find(self, token: str) -> Job:
        """The job with this token, or `NotFoundError`: also when its arena is lost, so that its trainer stages again."""
        job = self._jobs.get(token) or self._finished.get(token)
        if job is None or job.lost:
            raise NotFoundError(f"no staged job {token}", hint="stage again, or it ended long ago")
        return job

    def follow(self, job: Job, listener: Listener) -> None:
        """Tell `listener` where the job stands and what comes; after its end the listener is forgotten."""
        if job.total:
            listener(m.Progress(job.token, job.done, job.total))
        if job.released:
            listener(m.Released(job.token))
        if job.outcome is not None:
            listener(job.outcome)
        else:
            job.listeners.append(listener)

    def attend(self, job: Job, listener: Listener) -> None:
        """As `follow`, for one who acts on the outcome: a failure is told at once rather than tried again."""
        self.follow(job, listener)
        if job.outcome is None:
            job.waiting.append(listener)

    def leave(self, listener: Listener) -> None:
        """The listener is gone."""
        for job in self._jobs.values():
            job.listeners = [other for other in job.listeners if other is not listener]
            job.waiting = [other for other in job.waiting if other is not listener]

    @property
    def busy(self) -> int:
        """Jobs that are not over."""
        return len(self._jobs)

    def state(self, job: Job) -> str:
        """waiting, taken, queued, running, committing, retrying, lost, done, failed; gone when it goes on as another."""
        if self._jobs.get(job.token) is not job and job.outcome is None:
            return "gone"
        if job.outcome is not None:
            return "done" if isinstance(job.outcome, m.Done) else "failed"
        return "lost" if job.lost else self.schedule.state(job.token)

    def trouble(self, job: Job) -> str:
        """Why it is tried again; empty when it is not."""
        return job.trouble.message if job.trouble is not None else ""

    def room(self) -> dict[str, float]:
        """The schedule's numbers, and those of the retries."""
        retries = {"retries": self.retries, "retry_limit_seconds": self._patience.limit}
        return {**self.schedule.room(), **retries}

    def status(self) -> dict[str, object]:
        """Numbers and the latest jobs, for people and monitors."""
        latest = [*self._jobs.values(), *list(self._finished.values())[-16:]]
        return {
            **self.room(),
            "finished": len(self._finished),
            "kept": self._held.holds,
            "gate_closed": self._gate.closed,
            "jobs": [describe(job, self.state(job)) for job in latest],
        }

    def close(self) -> None:
        """Leave everything as it is for the next daemon."""
        self._files.shutdown()
        self._held.close()
        self._gate.close()

    # inside: taking

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

    def _keep(self, job: Job) -> None:
        """In the thread of the files: journal the job and have its arena kept."""
        job.patience()

        def keep() -> None:
            error: MillraceError | None = None
            try:
                plan = read_plan(job.plan)
                job.entry = with_plan(job.entry, plan)
                self._journal.record(job.entry, plan)
                self._held.put(job.token, job.arena)
            except MillraceError as caught:
                error = caught
            except OSError as caught:
                error = CapacityError(f"the job cannot be journaled: {caught.strerror}", hint="see the daemon's disk")
            self._call(partial(self._kept, job, error))

        self._files.submit(keep)

    def _kept(self, job: Job, error: MillraceError | None) -> None:
        if error is not None:
            self._refuse(job, error)
            return
        _journaled()
        os.close(job.plan)
        job.plan = -1
        answer, job.answer = job.answer, None
        job = self._found_again(job)
        self.schedule.journaled(job.token)
        if answer is not None:
            answer(job)
        _acknowledged()
        self._advance()

    def _found_again(self, job: Job) -> Job:
        """The job that had lost its arena, if this is it, come back with its trainer; else `job`."""
        same = [old for old in self._jobs.values() if old.lost and old.entry.plan_digest == job.entry.plan_digest]
        if not same:
            return job
        old, arena = same[0], job.arena
        _log.info("%s is back with its arena", old.entry.about or old.token)
        old.arena, old.lost, job.arena = arena, False, -1
        self._forget(job)
        self.schedule.adopt(old.token, old.entry.size, urgent=old.entry.urgent, state="queued", holds=old.entry.size)
        self._files.submit(self._held.put, old.token, arena)
        self._files.submit(self._clean, job.token)
        return old

    def _refuse(self, job: Job, error: MillraceError) -> None:
        job.patience()
        job.outcome = m.JobFailed(job.token, *m.error_fields(error))
        self._tell(job, job.outcome)
        self._forget(job)
        close_all(fd for fd in (job.arena, job.plan) if fd >= 0)
        self._files.submit(self._clean, job.token)
        if job.answer is not None:
            job.answer(error)
        self._advance()

    def _find_worker(self, job: Job) -> None:
        """What became of a job of an earlier daemon: it is over, lives, needs another worker, or its arena is lost."""
        fd = self._journal.open(job.token, "events")
        try:
            alive = is_locked(fd)
        finally:
            os.close(fd)
        size, urgent, holds = job.entry.size, job.entry.urgent, job.entry.size if job.arena >= 0 else 0
        self.schedule.adopt(job.token, size, urgent=urgent, state="running", holds=holds)
        worker = Worker(self._journal, job.token, None)
        if alive:
            _log.info("%s is carried by process %d, found again", job.entry.about or job.token, job.entry.pid)
            self._watch(job, worker)
        else:
            end = worker.follow(lambda line: self._heard(job, events.decode(line)))
            self._ended(job, end)

    # inside: running

    def _advance(self) -> None:
        """Do what has become possible."""
        for token in self.schedule.take():
            self._keep(self._jobs[token])
        for token in self.schedule.start():
            self._start(self._jobs[token])
        self._hold()

    def _hold(self) -> None:
        """Close the gate for others while urgent jobs run; look again as long as there are some."""
        self._look_again()
        closed = self.schedule.holds_back(time.monotonic())
        self._gate.close_for_others(closed)
        if closed:  # soon for the lock, which somebody may have had for a moment; later to let go of it
            self._look_again = self._later(1.0 if self._gate.closed else 0.02, self._hold)

    def _start(self, job: Job) -> None:
        command, arena = self._commands.get(job.entry.kind, ()), -1 if job.released else job.arena
        gate = None if job.entry.urgent else self._gate
        try:
            worker = Worker.start(command, self._journal, job.entry, arena, gate)
        except (OSError, MillraceError, IndexError) as error:
            name = command[0] if command else f"a job of kind {job.entry.kind}"
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._ended(job, End(f"cannot start {name}: {reason}", killed=False))
            return
        tries, pid = job.entry.tries + 1, worker.pid
        job.entry = replaced(job.entry, tries=tries, pid=pid, started=started_at(pid))
        self._files.submit(self._journal.update, job.entry)
        self._watch(job, worker)

    def _watch(self, job: Job, worker: Worker) -> None:
        def watch() -> None:
            end = worker.follow(lambda line: self._call(partial(self._heard, job, events.decode(line))))
            self._call(partial(self._ended, job, end))

        threading.Thread(target=watch, name=f"millrace-job-{job.token[:8]}", daemon=True).start()

    def _heard(self, job: Job, event: events.Event | None) -> None:
        kind = event.event if event else ""
        if event is None or job.outcome is not None:
            job.bad_lines += 1
        elif kind == "progress":
            job.done, job.total = event.done, event.total
            self._tell(job, m.Progress(job.token, event.done, event.total))
        elif kind == "released":
            self._released(job)
        elif kind == "committing":
            self.schedule.committing(job.token)
            self._advance()
        elif kind == "done":
            self._settle(job, m.Done(job.token, bytes(event.result).decode()))
        elif kind == "failed":
            self._failed(job, event)
        else:
            job.bad_lines += 1

    def _released(self, job: Job) -> None:
        if not job.released:
            job.released = True
            self._let_go(job)
            self._tell(job, m.Released(job.token))
            self._advance()

    def _failed(self, job: Job, event: events.Event) -> None:
        job.failures += 1
        if job.failures <= job.entry.failures:  # heard again, by a daemon that started later
            return
        if event.again and not job.waiting:
            job.trouble = failure(job, event)
        else:
            self._settle(job, failure(job, event))

    def _settle(self, job: Job, outcome: m.Done | m.JobFailed) -> None:
        job.outcome, job.lost = outcome, False
        if isinstance(outcome, m.JobFailed):
            _log.error("%s: %s", job.entry.about or job.token, outcome.message)
        self._tell(job, outcome)
        job.listeners.clear()

    def _ended(self, job: Job, end: End) -> None:
        """Its worker is gone: the job is over, or gets another one."""
        if job.outcome is not None:
            self._over(job)
        elif job.trouble is not None and job.failures > job.entry.failures:
            self._try_later(job, job.trouble)
        elif not end.killed or job.entry.tries - job.entry.failures >= TRIES:
            text = f"the {job.entry.kind} job failed: {end.reason}"
            self._settle(job, m.JobFailed(job.token, TransientError.code, text[:4096], "save again"))
            self._over(job)
        elif job.arena < 0 and not job.released and not job.lost:
            _log.warning("%s has lost daemon, worker and arena; waiting for its trainer", job.entry.about or job.token)
            job.lost = True
            self._later(self._lost_seconds, partial(self._give_up, job))
        else:
            _log.warning("%s gets another worker: %s", job.entry.about or job.token, end.reason)
            self.schedule.again(job.token)
            self._advance()

    def _try_later(self, job: Job, trouble: m.JobFailed) -> None:
        """Its worker failed, and another may do better when the store is back."""
        now = time.time()
        since = job.entry.failing_since or now
        pause = self._patience.pause(job.failures, now - since, random.random())
        if pause is None:
            self._settle(job, given_up(trouble, job.failures, now - since))
            self._over(job)
            return
        about = job.entry.about or job.token
        _log.warning("%s failed, nobody waits for it, and is tried again in %.0f s: %s", about, pause, trouble.message)
        job.entry = replaced(job.entry, failures=job.failures, failing_since=since)
        self._files.submit(self._journal.update, job.entry)
        job.next_try = time.monotonic() + pause
        self.schedule.later(job.token)
        self._later(pause, partial(self._try_again, job))
        self._advance()

    def _try_again(self, job: Job) -> None:
        if self._jobs.get(job.token) is job and self.schedule.state(job.token) == "retrying":
            self.retries += 1
            self.schedule.again(job.token)
            self._advance()

    def _give_up(self, job: Job) -> None:
        """Nobody came back with the arena: a last worker finishes what needs none, or cleans up and says what is lost."""
        if job.lost and self._jobs.get(job.token) is job:
            job.lost = False
            self.schedule.again(job.token)
            self._advance()

    def _over(self, job: Job) -> None:
        self._let_go(job)
        self._forget(job)
        self._files.submit(self._clean, job.token)
        self._finished[job.token] = job
        if len(self._finished) > KEPT:
            self._finished.popitem(last=False)
        self._advance()

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.token, None)
        self.schedule.over(job.token)

    def _let_go(self, job: Job) -> None:
        """The arena is not needed any more."""
        self.schedule.released(job.token)
        if job.arena >= 0:
            fd, job.arena = job.arena, -1
            self._files.submit(self._drop, job.token, fd)

    def _drop(self, token: str, fd: int) -> None:
        self._held.drop(token)
        os.close(fd)

    def _clean(self, token: str) -> None:
        with contextlib.suppress(OSError):
            self._journal.remove(token)
        self._held.drop(token)

    def _tell(self, job: Job, event: m.JobEvent) -> None:
        for listener in list(job.listeners):
            listener(event)
