"""The process that runs one job, its events, and how its daemon or the next one follows it.

A job's command gets `--arena-fd N --plan-fd M --progress-fd P --gate-fd G`, and inherits exactly those descriptors. -1
means none. There is no arena after its release: then only work that the progress file lists is left. There is no gate
for an urgent job. The worker runs in its own session and writes its events to standard output, which is the job's
`.events` file. An event is one JSON object per line:

- `{"event": "progress", "done": int, "total": int}`
- `{"event": "released"}`: the trainer may write to the arena again, and the job can be finished without it
- `{"event": "committing"}`: from now on the job only waits for other ranks
- `{"event": "done", "result": {…}}`
- `{"event": "failed", "code": str, "message": str, "hint": str, "again": bool}`; `again`: the same job may succeed
  later

Invariants: the worker holds the lock on the events file from before its first instruction to its end, so every daemon
can tell whether it is alive. A new daemon reads the file from its beginning, so it sees all events that the old daemon
saw.
Failure behaviour: a line that is longer than `LINE_BYTES` or is not an event is counted and ignored. The daemon kills a
worker that it has started if the worker writes more than `OUTPUT_BYTES`. If a worker cannot be started, `Worker.start`
raises.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.programs import environment
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.jobs.gate import PriorityGate
from headrace.dataio.sidecar.jobs.journal import Entry, Journal, is_locked

POLL_SECONDS = 0.02
OUTPUT_BYTES = 16 * MIB
_LAST_BYTES = 8192
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended. `killed`: by a signal, or in an unknown way, so another worker may succeed."""

    reason: str
    killed: bool


class Worker:
    """A worker that this daemon started, or an earlier one (then `process` is None).

    `start` is the offset of the worker's first event in the events file.
    """

    def __init__(
        self, journal: Journal, token: str, *, process: subprocess.Popen[bytes] | None, start: int = 0
    ) -> None:
        self._journal, self._token, self._process, self._start = journal, token, process, start
        self._events = journal.open(token, "events")
        self._exit_poll = select.poll()
        if process is not None:
            self._pidfd = os.pidfd_open(process.pid)
            self._exit_poll.register(self._pidfd, select.POLLIN)

    @classmethod
    def start(
        cls, command: Sequence[str], journal: Journal, entry: Entry, arena: int, gate: PriorityGate | None
    ) -> Worker:
        """Start a worker. `OSError` when the command cannot be started, `CorruptionError` when the plan is damaged."""
        token = entry.token
        with contextlib.ExitStack() as stack:

            def close_later(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            plan = close_later(journal.plan(entry))
            progress = close_later(journal.open(token, "progress"))
            gate_fd = close_later(gate.for_a_worker()) if gate is not None else -1
            events = close_later(journal.open(token, "events", os.O_RDWR | os.O_CREAT | os.O_APPEND))
            log = close_later(journal.open(token, "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = _start_new_line(events)
            numbers = {"--arena-fd": arena, "--plan-fd": plan, "--progress-fd": progress, "--gate-fd": gate_fd}
            process = subprocess.Popen(
                [*command, *(str(part) for pair in numbers.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=events,
                stderr=log,
                pass_fds=[fd for fd in numbers.values() if fd >= 0],
                start_new_session=True,
                env=environment(),
            )
        return cls(journal, token, process=process, start=start)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def follow(self, on_line: Callable[[bytes], object]) -> End:
        """Pass every line to `on_line` until the worker ends. Returns how it ended.

        If an earlier daemon started the worker, this includes the lines of the workers before it.
        """
        lines, at = Lines(), self._start
        try:
            while True:
                ended = self._has_ended()  # checked before reading, so the last lines are not missed
                while data := os.pread(self._events, 1 * MIB, at):
                    at += len(data)
                    for line in lines.feed(data):
                        on_line(line)
                if ended:
                    return self._end()
                if at - self._start > OUTPUT_BYTES:
                    self.kill()
        finally:
            os.close(self._events)
            if self._process is not None:
                os.close(self._pidfd)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _has_ended(self) -> bool:
        if self._process is None:
            if is_locked(self._events):
                time.sleep(5 * POLL_SECONDS)
                return False
            return True
        if not self._exit_poll.poll(POLL_SECONDS * 1000):
            return False
        self._process.wait()
        return True

    def _end(self) -> End:
        code = self._process.returncode if self._process is not None else None
        summary = "its process ended" if code is None else f"its process ended with code {code}"
        output = "\n".join(self._last_log_lines())[-3000:]
        return End(
            f"{summary} and no result" + (f"; its last output:\n{output}" if output else ""), code is None or code < 0
        )

    def _last_log_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            fd = self._journal.open(self._token, "log", os.O_RDONLY)
            try:
                size = os.fstat(fd).st_size
                text = os.pread(fd, _LAST_BYTES, max(0, size - _LAST_BYTES)).decode("utf-8", "replace")
                return text.splitlines()[-_LAST_LINES:]
            finally:
                os.close(fd)
        return []


def _start_new_line(events: int) -> int:
    """The size of the file. If the previous worker died within a line, that line is ended first."""
    size = os.fstat(events).st_size
    return size + os.write(events, b"\n") if size and os.pread(events, 1, size - 1) != b"\n" else size


def started_at(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read(4096).rpartition(b")")[2].split()[19])
    return 0


LINE_BYTES = 32 << 10


class Event(msgspec.Struct, frozen=True):
    """A decoded line. Which fields are used depends on `event`."""

    event: str
    done: m.Size = 0
    total: m.Size = 0
    result: msgspec.Raw = msgspec.Raw(b"{}")
    code: str = HeadraceError.code
    message: str = ""
    hint: str = ""
    again: bool = False


_events = msgspec.json.Decoder(Event)


def decode_event(line: bytes) -> Event | None:
    """The event of a line, or None if it is not one."""
    try:
        event = _events.decode(line) if line else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return event if event is not None and bytes(event.result).startswith(b"{") else None


class Lines:
    """Splits data into lines. An empty line replaces each one that is longer than `LINE_BYTES`."""

    def __init__(self) -> None:
        self._rest, self._overlong = b"", False

    def feed(self, data: bytes) -> list[bytes]:
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [b"" if len(line) > LINE_BYTES else line for line in complete]
        if complete and self._overlong:
            lines[0], self._overlong = b"", False
        if len(self._rest) > LINE_BYTES:
            self._rest, self._overlong = b"", True
        return lines
