"""Staged checkpoints: each is carried out by a process of its own, started by the daemon.

Purpose: once a job is accepted it runs to its end, whatever becomes of the client; events go to whoever listens.
A job's command gets `--arena-fd N --plan-fd M` and exactly those two descriptors, runs in a session of its own, and writes
one JSON object a line: {"event": "progress", "done": int, "total": int}, {"event": "released"},
{"event": "done", "result": {…}} or {"event": "failed", "code": str, "message": str, "hint": str}. It should ignore a
broken standard output: it outlives a killed daemon.

Invariants: at most `running` jobs run and `queued` wait, first come first served; `kept` finished ones are remembered, so that a
client that reconnects can ask. The daemon's descriptors are closed when the process has its own.
Failure behaviour: a descriptor of the wrong kind, an unknown command or a full queue refuses the job and closes both
descriptors. A process that ends without "done" or "failed" has failed, with its last lines on standard error as the
reason. A line that is too long or no event is ignored and counted.
"""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

import msgspec

from dataio.core.errors import CapacityError, MillraceError, NotFoundError, TransientError, UsageError
from dataio.core.log import get_logger
from dataio.sidecar import messages as m
from dataio.sidecar.memfd import check_arena, check_plan
from dataio.sidecar.wire import close_all

LINE_BYTES = 32 << 10
STDERR_LINES = 20

_log = get_logger(__name__)
Listener = Callable[[m.JobEvent], None]


class _Event(msgspec.Struct, frozen=True):
    event: str
    done: m.Size = 0
    total: m.Size = 0
    result: msgspec.Raw = msgspec.Raw(b"{}")
    code: str = MillraceError.code
    message: str = ""
    hint: str = ""


_events = msgspec.json.Decoder(_Event)


@dataclass(slots=True, eq=False)
class Job:
    """One staged checkpoint. `state`: queued, running, done, failed."""

    token: str
    kind: str
    arena_bytes: int
    descriptors: tuple[int, ...]
    accepted: float
    state: str = "queued"
    released: bool = False
    done: int = 0
    total: int = 0
    outcome: m.Done | m.JobFailed | None = None
    bad_lines: int = 0
    listeners: list[Listener] = field(default_factory=list)
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=STDERR_LINES))


class Jobs:
    """All jobs of one daemon. Not thread-safe, except that `call` may carry events in from the jobs' own threads:
    `call(f)` must run `f` on the thread that uses this object."""

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        call: Callable[[Callable[[], None]], object],
        *,
        running: int = 2,
        queued: int = 16,
        kept: int = 256,
    ) -> None:
        self._commands, self._call = commands, call
        self._limits = (running, queued, kept)
        self._queue: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._finished: OrderedDict[str, Job] = OrderedDict()
        self.accepting = True

    def submit(self, kind: str, arena: int, plan: int) -> Job:
        """Check and queue a job; its two descriptors are taken over, also when it is refused."""
        try:
            size = self._check(kind, arena, plan)
        except BaseException:
            close_all((arena, plan))
            raise
        job = Job(uuid.uuid4().hex, kind, size, (arena, plan), time.time())
        self._queue.append(job)
        return job

    def start(self) -> None:
        """Start what may run. Apart from `submit`, so that the client hears of its job before the job's events."""
        while self._queue and len(self._running) < self._limits[0]:
            job = self._queue.popleft()
            self._running[job.token], job.state = job, "running"
            threading.Thread(target=self._carry, args=(job,), name=f"millrace-job-{job.token[:8]}", daemon=True).start()

    def find(self, token: str) -> Job:
        """The job with this token, or `NotFoundError`."""
        known = self._running.get(token) or self._finished.get(token)
        for job in [known] if known else self._queue:
            if job.token == token:
                return job
        raise NotFoundError(f"no staged job {token}", hint="the sidecar was restarted, or the job ended long ago")

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

    def leave(self, listener: Listener) -> None:
        """The listener is gone."""
        for job in [*self._queue, *self._running.values()]:
            job.listeners = [other for other in job.listeners if other is not listener]

    @property
    def busy(self) -> int:
        """Jobs that run or wait."""
        return len(self._queue) + len(self._running)

    def status(self) -> dict[str, object]:
        """Numbers and the latest jobs, for people and monitors."""
        latest = [*self._queue, *self._running.values(), *list(self._finished.values())[-16:]]
        return {
            "queued": len(self._queue),
            "running": len(self._running),
            "finished": len(self._finished),
            "jobs": [_describe(job) for job in latest],
        }

    # inside

    def _check(self, kind: str, arena: int, plan: int) -> int:
        if not self.accepting:
            raise TransientError("the sidecar is shutting down", hint="save without it, or try again after its restart")
        if kind not in self._commands:
            raise UsageError(
                f"the sidecar knows no job {kind!r}", hint=f"it knows {', '.join(self._commands) or 'none'}"
            )
        if len(self._queue) >= self._limits[1]:
            raise CapacityError(f"{len(self._queue)} staged checkpoints wait already; the most is {self._limits[1]}")
        size = check_arena(arena)
        check_plan(plan)
        return size

    def _carry(self, job: Job) -> None:
        """On a thread of the job's own: run the command and pass its events on."""
        arena, plan = job.descriptors
        command = [*self._commands[job.kind], "--arena-fd", str(arena), "--plan-fd", str(plan)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=job.descriptors,
                start_new_session=True,
            )
        except OSError as error:
            reason = f"cannot start {command[0]}: {error.strerror}"
            self._call(lambda: self._end(job, reason))
            return
        finally:
            close_all(job.descriptors)
        with process:
            if process.stdout is None or process.stderr is None:
                raise AssertionError("both were asked for")
            tail = threading.Thread(target=_keep_tail, args=(process.stderr, job.stderr), daemon=True)
            tail.start()
            self._read(job, process.stdout)
            code = process.wait()
            tail.join(5)
        self._call(lambda: self._end(job, f"its process ended with code {code} and no result"))

    def _read(self, job: Job, stdout: IO[bytes]) -> None:
        for line in _lines(stdout):
            try:
                event = _events.decode(line) if line else None
            except (msgspec.MsgspecError, ValueError, RecursionError):
                event = None
            self._call(lambda event=event: self._heard(job, event))  # type: ignore[misc]  # the default binds it now

    def _heard(self, job: Job, event: _Event | None) -> None:
        kind = event.event if event else ""
        if event is None or job.outcome is not None or not bytes(event.result).startswith(b"{"):
            job.bad_lines += 1
        elif kind == "progress":
            job.done, job.total = event.done, event.total
            self._tell(job, m.Progress(job.token, event.done, event.total))
        elif kind == "released":
            job.released = True
            self._tell(job, m.Released(job.token))
        elif kind == "done":
            self._settle(job, m.Done(job.token, bytes(event.result).decode()))
        elif kind == "failed":
            self._settle(job, m.JobFailed(job.token, event.code[:64], event.message[:4096], event.hint[:4096]))
        else:
            job.bad_lines += 1

    def _settle(self, job: Job, outcome: m.Done | m.JobFailed) -> None:
        job.outcome, job.state = outcome, "done" if isinstance(outcome, m.Done) else "failed"
        if isinstance(outcome, m.JobFailed):
            _log.error("job %s: %s", job.token, outcome.message)
        self._tell(job, outcome)
        job.listeners.clear()

    def _end(self, job: Job, reason: str) -> None:
        """The process is gone, and the arena's memory with it; the next job may run."""
        if job.outcome is None:
            last = "\n".join(job.stderr)[-3000:]
            text = f"the {job.kind} job failed: {reason}" + (f"; it said last:\n{last}" if last else "")
            self._settle(job, m.JobFailed(job.token, TransientError.code, text[:4096], "save again"))
        del self._running[job.token]
        self._finished[job.token] = job
        if len(self._finished) > self._limits[2]:
            self._finished.popitem(last=False)
        self.start()

    def _tell(self, job: Job, event: m.JobEvent) -> None:
        for listener in list(job.listeners):
            listener(event)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The stream's lines; an empty one for each that is longer than `LINE_BYTES`."""
    overlong = False
    while piece := stream.readline(LINE_BYTES):
        ended = piece.endswith(b"\n")
        if not overlong and (ended or len(piece) < LINE_BYTES):
            yield piece
        elif ended or len(piece) < LINE_BYTES:
            yield b""
        overlong = not ended


def _keep_tail(stream: IO[bytes], tail: deque[str]) -> None:
    for line in _lines(stream):
        tail.append(line.decode("utf-8", "replace").rstrip())


def _describe(job: Job) -> dict[str, object]:
    error = job.outcome.message[:300] if isinstance(job.outcome, m.JobFailed) else None
    return {
        "token": job.token,
        "kind": job.kind,
        "state": job.state,
        "arena_bytes": job.arena_bytes,
        "done": job.done,
        "total": job.total,
        "released": job.released,
        "age_seconds": round(time.time() - job.accepted, 3),
        "ignored_lines": job.bad_lines,
        "error": error,
    }
