"""A process's connection to the sidecar: requests, answers, and the events of staged jobs.

Purpose: one socket shared by all threads of the process. A background thread receives events. A thread that sends a
request receives its answer itself, if no other thread is receiving.
Invariants: every wait has a deadline. Received descriptors are closed unless a request waits for them. If the daemon is
silent for `PING_SECONDS` while a request or a job is pending, it is asked for its status. If it does not answer within
`HUNG_SECONDS`, it counts as hung, and the connection is closed. A connection does not survive `fork`: the child opens
its own.
Failure behaviour: when the connection breaks, every current and later wait raises `TransientError`. A staged job usually
continues, but this process cannot know, so it must not write to the job's arena again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from headrace.dataio.core.errors import ConflictError, DeadlineError, HeadraceError, TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.tracing import context, span
from headrace.dataio.sidecar import paths, wire
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.jobs.memfd import sealed
from headrace.dataio.sidecar.staged_jobs import StagedJob, StagedJobs

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 30.0
TICK_SECONDS = 1.0
"""Interval at which the background thread sends closed files, touched files and reports."""
PING_SECONDS = 5.0
"""How long the daemon may be silent while a request or a job is pending, before it is asked for its status."""
HUNG_SECONDS = 15.0
"""How long the daemon may then stay silent, before the connection is closed."""
LAST_REPORT_SECONDS = 1.0
"""How long `close` waits for the daemon to accept the last report."""
BATCH = 1024
"""Maximum number of files in one message."""
_TICK = struct.pack("@ll", int(TICK_SECONDS), 0)

_log = get_logger(__name__)
SidecarName = str | os.PathLike[str] | None
Answer = m.Opened | m.Bypassed | m.Staged | m.Recalled | m.Status
_GOOD = (m.Opened, m.Bypassed, m.Staged, m.Recalled, m.Status)
_ANSWERS = (*_GOOD, m.Failed)


class _Slot:
    """The pending answer of one request."""

    __slots__ = ("answer", "descriptors", "done", "waiting")

    def __init__(self, *, waits: bool) -> None:
        """`waits`: another thread receives the answer."""
        self.waiting = threading.Lock() if waits else None  # an Event costs several times as much
        if self.waiting is not None:
            self.waiting.acquire()
        self.answer: m.FromDaemon | None = None
        self.descriptors: tuple[int, ...] = ()
        self.done = False

    def wake(self) -> None:
        """Mark the slot as done. The thread that removed it from the connection's table calls this once."""
        self.done = True
        if self.waiting is not None:
            self.waiting.release()


class Sidecar:
    """One connection to the node's daemon. Safe to share between threads.

    Example:
        >>> from headrace.dataio.sidecar.client import Sidecar
        >>> Sidecar.find("/nonexistent/sidecar.sock") is None
        True
    """

    def __init__(self, sock: socket.socket, path: Path, daemon_pid: int) -> None:
        self._sock, self._fd, self.path, self.daemon_pid = sock, sock.fileno(), path, daemon_pid
        self._pid, self._framer = os.getpid(), wire.Framer()
        self._ids = itertools.count(1)
        self._slots: dict[int, _Slot] = {}
        self._jobs = StagedJobs()
        self._lock = threading.Lock()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.spin = AdaptivePoll()
        self._events, self._poll = select.epoll(), select.poll()
        self._events.register(sock, select.EPOLLIN)
        self._poll.register(sock, select.POLLIN)
        self._broken: TransientError | None = None
        self._last_message, self._last_ping = time.monotonic(), 0.0
        self.closed_files: deque[int] = deque()
        """Files of which a hold has ended. Finalizers append to it, in any thread at any time."""
        self.touched_files: set[int] = set()
        self.forgotten: Callable[[int], None] = lambda _file: None
        self.reporting: Callable[[], m.Report | None] = lambda: None
        """Returns the report to send. Called once a tick and in `close`, if the daemon supports reports."""
        self._reports = self.incremental = False
        self._thread = threading.Thread(target=self._receive, name="headrace-sidecar", daemon=True)

    @classmethod
    def find(cls, sidecar: SidecarName = "auto") -> Sidecar | None:
        """Connect to the daemon.

        Args:
            sidecar: Path of the socket; "auto" is the default socket, None means no sidecar.

        Returns:
            The connection, or None if there is no sidecar, no daemon answers, or it belongs to another user.
        """
        path = paths.chosen(sidecar)
        if path is None:
            return None
        try:
            return cls._connect(path)
        except (PermissionError, ConflictError) as error:  # it belongs to another user
            warn_once(
                _log, f"this user may not use the sidecar on {path}: {getattr(error, 'strerror', error)}", per="node"
            )
        except (OSError, HeadraceError) as error:
            _log.debug("no sidecar on %s: %s", path, error)
        return None

    @classmethod
    def _connect(cls, path: Path) -> Sidecar:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            wire.connect(sock, os.fspath(path), CONNECT_SECONDS)
            pid, uid = wire.peer(sock)
            if uid not in (os.geteuid(), 0):  # root's service manager may have created the socket for the daemon
                raise ConflictError(f"the sidecar on {path} belongs to user {uid}")
            wire.send_all(sock, wire.frame(m.encode(m.Hello(m.VERSION, os.getpid()))), (), CONNECT_SECONDS)
            connection = cls(sock, path, pid)
            connection._handshake()
            # no Python timeout from here on, because it would add a poll to every send and receive
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        except BaseException:
            sock.close()
            raise
        connection._thread.start()
        return connection

    def _handshake(self) -> None:
        until = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < until:
            data, descriptors = wire.receive(self._sock)
            if not data:
                break
            for frame in self._framer.feed(data, descriptors):
                message = m.decode_from_daemon(frame.payload)
                if isinstance(message, m.Welcome):
                    self._reports, self.incremental = message.reports, message.incremental
                    return
                if isinstance(message, m.Refused):
                    raise m.error_of(message.code, message.message, "")
        raise TransientError(f"the sidecar on {self.path} did not answer")

    # requests

    def stage(
        self, kind: str, arena_fd: int, plan: bytes, about: str = "", *, urgent: bool = False, wait: float = 0.0
    ) -> StagedJob:
        """Hand a checkpoint to the daemon; returns once the daemon owns it.

        The caller keeps its own descriptor, and must not write to the arena before `StagedJob.wait_released` returns.

        Args:
            kind: Kind of job, such as "checkpoint".
            arena_fd: Descriptor of the arena, a memory file sealed against shrinking.
            plan: The encoded put plan.
            about: Description for the status page.
            urgent: Whether the job goes before others.
            wait: Seconds to wait until the daemon has room for the arena.

        Returns:
            The staged job.

        Raises:
            CapacityError: The daemon has no room within `wait` seconds.
            TransientError: The connection broke.
        """
        plan_fd = sealed("headrace-plan", plan)
        try:
            with span("sidecar.stage", kind=kind):
                within = context()
                answer, _ = self.call(
                    lambda id: m.Stage(id, kind, about[:256], within, int(urgent), wait),
                    (arena_fd, plan_fd),
                    ANSWER_SECONDS + wait,
                )
        finally:
            os.close(plan_fd)
        return self._follow_answer(answer)

    def follow(self, token: str) -> StagedJob:
        """A job that was staged earlier, perhaps through another connection.

        Raises:
            NotFoundError: The daemon does not know the job.
        """
        answer, _ = self.call(lambda id: m.Follow(id, token))
        return self._follow_answer(answer)

    def recall(self, source: str, key: str, timeout: float) -> bool:
        """Fetch the buddy's copy of an object into the node's local tier; returns whether it is there now.

        Args:
            source: Name of the store.
            key: The object's key; empty for the records of all steps of that store.
            timeout: Seconds to wait.
        """
        answer, _ = self.call(lambda id: m.Recall(id, source, key), timeout=timeout)
        return isinstance(answer, m.Recalled) and answer.found

    def status(self) -> dict[str, object]:
        """The daemon's status: the object that `headrace sidecar status --json` prints."""
        answer, _ = self.call(m.AskStatus)
        if not isinstance(answer, m.Status):
            raise _unexpected_answer()
        status: dict[str, object] = json.loads(answer.status)
        return status

    @property
    def broken(self) -> bool:
        """Whether the connection has ended, or belongs to the parent of a fork."""
        return self._broken is not None or os.getpid() != self._pid

    def close(self) -> None:
        """Send the last report, and end the connection. Staged jobs continue.

        The report waits at most `LAST_REPORT_SECONDS` for a daemon that reads nothing.
        """
        if not self.broken:
            self._report(LAST_REPORT_SECONDS)
        self._break("this process closed it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Sidecar({os.fspath(self.path)!r}, process {self.daemon_pid})"

    # sending requests

    def call(
        self, build: Callable[[int], m.FromClient], descriptors: Sequence[int] = (), timeout: float = ANSWER_SECONDS
    ) -> tuple[Answer, tuple[int, ...]]:
        """Send the message that `build` returns for a new id, and wait for its answer.

        Returns the answer and its descriptors, which the caller must close.
        """
        # This thread receives its answer itself if no other thread is receiving, and takes over before it sends. A handover
        # from the background thread would double the time of a round trip.
        receives_itself = self._receiving.acquire(blocking=False)
        try:
            id, slot = next(self._ids), _Slot(waits=not receives_itself)
            with self._lock:
                self._raise_if_broken()
                self._slots[id] = slot
            try:
                if receives_itself:
                    self._set_wake_events(0)
                self._send(build(id), descriptors, timeout)
                self._wait(slot, timeout)
            finally:
                if not slot.done:
                    with self._lock:
                        self._slots.pop(id, None)
        finally:
            if receives_itself:
                self._set_wake_events(select.EPOLLIN)  # the background thread continues, also for other requests
                self._receiving.release()
        answer = slot.answer
        if isinstance(answer, _GOOD):
            return answer, slot.descriptors
        if answer is None:
            self._raise_if_broken()
            raise DeadlineError(f"the sidecar on {self.path} did not answer within {timeout:g} s")
        if isinstance(answer, m.Failed):
            raise m.error_of(answer.code, answer.message, answer.hint)
        raise _unexpected_answer()

    def send(self, message: m.FromClient, timeout: float = ANSWER_SECONDS) -> None:
        """Send a message without an answer."""
        self._raise_if_broken()
        self._send(message, (), timeout)

    def _follow_answer(self, answer: Answer) -> StagedJob:
        if not isinstance(answer, m.Staged):
            raise _unexpected_answer()
        return self._jobs.follow(answer.token)

    def _send(self, message: m.FromClient, descriptors: Sequence[int], timeout: float) -> None:
        data = wire.frame(m.encode(message), len(descriptors))
        if self.closed_files and not descriptors:  # closed files go first, in the same send
            data = wire.frame(m.encode(m.Closed(self._take_closed_files()))) + data
        try:
            with self._sending:
                wire.send_all(self._sock, data, descriptors, timeout)
        except (OSError, DeadlineError) as error:
            self._break(str(error))  # a part of a frame may have been sent
            self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if os.getpid() != self._pid:
            raise TransientError("a connection to the sidecar does not survive fork", hint="open one in the child")
        if self._broken is not None:
            raise TransientError(self._broken.message, hint=self._broken.hint)

    # receiving

    def _wait(self, slot: _Slot, timeout: float) -> None:
        """Wait until the slot has its answer. This thread receives it, unless another thread does (`slot.waiting`)."""
        if slot.waiting is not None:
            slot.waiting.acquire(timeout=timeout)
            return
        began = time.monotonic()
        until, polls = began + timeout, self.spin.worth
        polls_until = min(until, began + self.spin.seconds) if polls else began
        try:
            while not slot.done and self._broken is None and time.monotonic() < polls_until:
                self._receive_once(wait=False)
            while not slot.done and self._broken is None and (remaining := until - time.monotonic()) > 0:
                if remaining >= TICK_SECONDS or self._poll.poll(remaining * 1000):
                    self._receive_once(wait=remaining >= TICK_SECONDS)
            self.spin.waited(time.monotonic() - began if slot.done else math.inf, polled=polls)
        except HeadraceError as error:
            self._break(error.message)
        except (OSError, ValueError) as error:
            self._break(str(error))

    def _set_wake_events(self, events: int) -> None:
        """Set the events that wake the background thread: 0 while another thread receives.

        The end of the connection always wakes it.
        """
        try:  # noqa: SIM105  # this runs twice in every round trip, and `suppress` is slower
            self._events.modify(self._fd, events)
        except (OSError, ValueError):  # the connection is closed
            pass

    def _receive_once(self, *, wait: bool) -> None:
        """Receive once; with `wait`, wait up to one tick for data. The caller holds `_receiving`."""
        try:
            data, descriptors = wire.receive(self._sock, wait=wait)
        except BlockingIOError:
            return
        if not data:
            raise TransientError("the daemon closed it")
        for frame in self._framer.feed(data, descriptors):
            self._last_message = time.monotonic()  # only complete messages show that the daemon works
            self._dispatch(frame)

    def _receive(self) -> None:
        reason, tick = "the daemon closed it", time.monotonic() + TICK_SECONDS
        try:
            while not self.broken:
                if self._events.poll(TICK_SECONDS):
                    with self._receiving:
                        self._receive_once(wait=False)  # a requesting thread may have taken the data
                if time.monotonic() >= tick:
                    tick = time.monotonic() + TICK_SECONDS
                    self._check_liveness()
                    self._housekeeping()
                    self._report()
        except HeadraceError as error:
            reason = error.message
        except (OSError, ValueError) as error:
            reason = str(error)
        self._break(reason)
        with self._receiving:
            self._events.close()
            self._sock.close()
            self._framer.close()

    def _dispatch(self, frame: wire.Frame) -> None:
        message = m.decode_from_daemon(frame.payload)
        if isinstance(message, _ANSWERS):
            with self._lock:
                slot = self._slots.pop(message.id, None)
                if slot is not None:
                    slot.answer, slot.descriptors = message, frame.descriptors
            if slot is not None:
                slot.wake()
                return
            if isinstance(message, m.Opened) and frame.descriptors:  # no request waits any more: end the hold
                self.closed_files.append(message.file)
        elif isinstance(message, m.JobEvent):
            self._jobs.handle(message)
        elif isinstance(message, m.Forget):
            self.forgotten(message.file)
            self._housekeeping()
        wire.close_all(frame.descriptors)

    def _check_liveness(self) -> None:
        """Raise `TransientError` if the daemon hangs, for example because it was stopped."""
        now = time.monotonic()
        if self._last_ping <= self._last_message:
            if now - self._last_message >= PING_SECONDS and (self._slots or self._jobs):
                self._last_ping = now
                with contextlib.suppress(TransientError):
                    self.send(m.AskStatus(next(self._ids)))
        elif now - self._last_ping >= HUNG_SECONDS:
            raise TransientError(f"the daemon hangs: it has been silent for {now - self._last_message:.0f} s")

    def _housekeeping(self) -> None:
        """Tell the daemon which holds have ended, and which files were read."""
        with contextlib.suppress(TransientError):
            while closed := self._take_closed_files():
                self.send(m.Closed(closed))
            touched, self.touched_files = self.touched_files, set()
            if touched:
                self.send(m.Touched(sorted(touched)[:BATCH]))

    def _take_closed_files(self) -> list[int]:
        closed: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may empty it first
            while len(closed) < BATCH:
                closed.append(self.closed_files.popleft())
        return closed

    def _report(self, timeout: float = ANSWER_SECONDS) -> None:
        if self._reports and (report := self.reporting()) is not None:
            with contextlib.suppress(TransientError):
                self.send(report, timeout)

    def _break(self, reason: str) -> None:
        with self._lock:
            if self._broken is not None:
                return
            self._broken = TransientError(
                f"the connection to the sidecar on {self.path} ended: {reason}",
                hint="staged checkpoints usually continue; do not write to their arenas; the next save finds completed work",
            )
            slots, self._slots = list(self._slots.values()), {}
        if os.getpid() == self._pid:  # after a fork, the parent still uses the socket
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the background thread, which closes the socket
        for slot in slots:
            slot.wake()
        self._jobs.connection_lost(self._broken)


def _unexpected_answer() -> TransientError:
    return TransientError(
        "the sidecar sent an answer of the wrong type", hint="restart the sidecar and the trainer with the same version"
    )


SPIN_SECONDS = 100e-6
_WEIGHT = 1 / 8
"""Weight of the newest wait in the moving average."""
_MAX_FACTOR = 8
"""A longer wait counts as this many times `seconds`: one slow answer ends the polling, and a few fast ones restart it."""


class AdaptivePoll:
    """Decides whether to poll for an answer before sleeping until it arrives.

    The cache answers within tens of microseconds, and waking an idle processor may take as long. Polling saves one of the
    two wake-ups of a round trip. It lasts at most `seconds`, and is used only while answers usually arrive within that
    time. It is never used on a machine with one processor, which the daemon needs. Only one thread at a time may use the
    object. `polled` counts waits that began with polling, `helped` those that ended during it.

    Adaptive spinning: Karlin, Li, Manasse, Owicki, SOSP 1991.
    """

    __slots__ = ("_average", "_one_processor", "helped", "polled", "seconds")

    def __init__(self, seconds: float = SPIN_SECONDS, processors: int | None = None) -> None:
        self.seconds = seconds
        self._one_processor = (processors or len(os.sched_getaffinity(0))) < 2
        self._average = _MAX_FACTOR * seconds
        self.polled = self.helped = 0

    @property
    def worth(self) -> bool:
        """Whether the next wait should begin with polling."""
        return self._average < self.seconds and not self._one_processor

    def waited(self, seconds: float, *, polled: bool) -> None:
        """Record a wait of `seconds` (infinity without an answer). `polled`: it began with polling."""
        self._average += (min(seconds, _MAX_FACTOR * self.seconds) - self._average) * _WEIGHT
        if polled:
            self.polled += 1
            self.helped += seconds < self.seconds
