"""The process that carries one job, and how its daemon, or the next one, follows it.

A job's command gets `--arena-fd N --plan-fd M --progress-fd P --gate-fd G` and exactly those descriptors (-1 for none: no
arena, when it was released
before and only what the progress file holds is left to be done; no gate, when nobody may hold it back), runs in a session of
its own, and writes its
events to standard output, which is the job's `.events` file. See `events` for what it may say.
Invariants: the worker holds the lock on that file from before its first instruction to its end, so "does it live" has one answer
for every daemon; a new daemon reads the file from its beginning, and so hears all that the old one heard.
Failure behaviour: a worker that says more than `SAID_BYTES` is killed. One that cannot be started ends at once, with the reason.
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

from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar.transfer.events import Lines
from headrace.dataio.sidecar.transfer.gate import Gate
from headrace.dataio.sidecar.transfer.journal import Entry, Journal, is_locked

POLL_SECONDS = 0.02
SAID_BYTES = 16 * MIB
_LAST_BYTES = 8192
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended. `killed`: by a signal, as far as anyone knows, so that another one may do better."""

    reason: str
    killed: bool


class Worker:
    """A worker that was started here, or by an earlier daemon (`process` is None)."""

    def __init__(self, journal: Journal, token: str, process: subprocess.Popen[bytes] | None, start: int = 0) -> None:
        self._journal, self._token, self._process, self._start = journal, token, process, start
        self._events = journal.open(token, "events")
        self._ended = select.poll()
        if process is not None:
            self._pidfd = os.pidfd_open(process.pid)
            self._ended.register(self._pidfd, select.POLLIN)

    @classmethod
    def start(cls, command: Sequence[str], journal: Journal, entry: Entry, arena: int, gate: Gate | None) -> Worker:
        """A new one. OSError when the command cannot be started, `CorruptionError` when the plan is damaged."""
        token = entry.token
        with contextlib.ExitStack() as stack:

            def own(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            plan = own(journal.plan(entry))
            progress = own(journal.open(token, "progress"))
            passing = own(gate.for_a_worker()) if gate is not None else -1
            events = own(journal.open(token, "events", os.O_RDWR | os.O_CREAT | os.O_APPEND))
            log = own(journal.open(token, "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            fcntl.flock(events, fcntl.LOCK_EX | fcntl.LOCK_NB)
            start = _at_a_lines_start(events)
            numbers = {"--arena-fd": arena, "--plan-fd": plan, "--progress-fd": progress, "--gate-fd": passing}
            process = subprocess.Popen(
                [*command, *(str(part) for pair in numbers.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=events,
                stderr=log,
                pass_fds=[fd for fd in numbers.values() if fd >= 0],
                start_new_session=True,
            )
        return cls(journal, token, process, start)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def follow(self, heard: Callable[[bytes], object]) -> End:
        """Give every line to `heard`, until the worker has ended: its own, or all there are when an earlier daemon started it."""
        lines, at = Lines(), self._start
        try:
            while True:
                gone = self._is_gone()  # asked before reading: what it said last is not missed
                while data := os.pread(self._events, 1 * MIB, at):
                    at += len(data)
                    for line in lines.feed(data):
                        heard(line)
                if gone:
                    return self._end()
                if at - self._start > SAID_BYTES:
                    self.kill()
        finally:
            os.close(self._events)
            if self._process is not None:
                os.close(self._pidfd)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _is_gone(self) -> bool:
        if self._process is None:
            if is_locked(self._events):
                time.sleep(5 * POLL_SECONDS)
                return False
            return True
        if not self._ended.poll(POLL_SECONDS * 1000):
            return False
        self._process.wait()
        return True

    def _end(self) -> End:
        code = self._process.returncode if self._process is not None else None
        what = "its process ended" if code is None else f"its process ended with code {code}"
        said = "\n".join(self._last_words())[-3000:]
        return End(f"{what} and no result" + (f"; it said last:\n{said}" if said else ""), code is None or code < 0)

    def _last_words(self) -> list[str]:
        with contextlib.suppress(OSError):
            fd = self._journal.open(self._token, "log", os.O_RDONLY)
            try:
                size = os.fstat(fd).st_size
                text = os.pread(fd, _LAST_BYTES, max(0, size - _LAST_BYTES)).decode("utf-8", "replace")
                return text.splitlines()[-_LAST_LINES:]
            finally:
                os.close(fd)
        return []


def _at_a_lines_start(events: int) -> int:
    """The end of the file, where a new line begins: what the worker before was saying when it died stays apart."""
    size = os.fstat(events).st_size
    return size + os.write(events, b"\n") if size and os.pread(events, 1, size - 1) != b"\n" else size


def started_at(pid: int) -> int:
    """When the process began, in clock ticks since the machine did; 0 when there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read(4096).rpartition(b")")[2].split()[19])
    return 0
