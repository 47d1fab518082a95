"""A process's connection to the sidecar: requests and answers, and the events of staged jobs.

Purpose: one socket shared by all threads of the process. A thread of its own receives what comes unasked; whoever asks waits
for its answer, and receives by itself meanwhile.
Invariants: every wait has a deadline; descriptors that come are closed unless somebody waits for them. While an answer or a job
is waited for, a daemon that says nothing is asked for its status, which a live one answers at once; one that stays silent hangs,
and the connection is broken. Not to be carried through `fork`: the child opens its own.
Failure behaviour: when the connection breaks, every wait, now and later, raises `TransientError`: whether a staged job goes
on cannot be known from here (as a rule it does), so its arena must not be written again.
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

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 30.0
TICK_SECONDS = 1.0
"""How often the receiving thread looks after what is to be told to the daemon without an answer."""
PING_SECONDS = 5.0
"""How long the daemon may say nothing, while it is waited for, before it is asked whether it lives."""
HUNG_SECONDS = 15.0
"""How long it may then take to say anything."""
WAIT_SECONDS = 24 * 3600.0
"""The bound of a wait for which its caller names none."""
BATCH = 1024
_TICK = struct.pack("@ll", int(TICK_SECONDS), 0)

_log = get_logger(__name__)
SidecarName = str | os.PathLike[str] | None
Answer = m.Opened | m.Bypassed | m.Staged | m.Recalled | m.Status
_GOOD = (m.Opened, m.Bypassed, m.Staged, m.Recalled, m.Status)
_ANSWERS = (*_GOOD, m.Failed)


class _Slot:
    """Where one request waits for its answer."""

    __slots__ = ("answer", "descriptors", "over", "waiting")

    def __init__(self, *, waits: bool) -> None:
        """`waits`: for another thread to receive it."""
        self.waiting = threading.Lock() if waits else None  # an Event would cost several times as much
        if self.waiting is not None:
            self.waiting.acquire()
        self.answer: m.FromDaemon | None = None
        self.descriptors: tuple[int, ...] = ()
        self.over = False

    def wake(self) -> None:
        """Called once: by whoever took the slot from the connection's list."""
        self.over = True
        if self.waiting is not None:
            self.waiting.release()


class Staged:
    """A checkpoint that the daemon owns: it is carried out whatever becomes of this process."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._changed = threading.Condition()
        self._progress = (0, 0)
        self._released = False
        self._outcome: m.Done | m.JobFailed | None = None
        self._broken: TransientError | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """(done, in all) in the job's own unit, bytes as a rule; (0, 0) until it says so."""
        return self._progress

    def wait_released(self, timeout: float | None = None) -> None:
        """Until the arena may be written again: the job has read it, or is over. `DeadlineError` after `timeout` seconds,
        `TransientError` when the connection broke and so nobody knows."""
        self._wait(lambda: self._released or self._outcome is not None, timeout, "to release its arena")

    def result(self, timeout: float | None = None) -> dict[str, object]:
        """What the job reported when it was done. Raises the job's own error; `DeadlineError` after `timeout` seconds,
        `TransientError` when the connection broke before its end: ask a new one for `Sidecar.follow(token)`."""
        self._wait(lambda: self._outcome is not None, timeout, "to end")
        if isinstance(self._outcome, m.JobFailed):
            raise m.error_of(self._outcome.code, self._outcome.message, self._outcome.hint)
        result: dict[str, object] = json.loads(self._outcome.result) if self._outcome else {}
        return result

    def _wait(self, reached: Callable[[], bool], timeout: float | None, what: str) -> None:
        limit = WAIT_SECONDS if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._broken, limit)
            if reached():
                return
            if self._broken:
                raise self._broken
        raise DeadlineError(
            f"waited {limit:g} s for job {self.token} {what}", hint="it goes on; see: headrace sidecar status"
        )

    def heard(self, event: m.JobEvent) -> None:
        """For the connection: an event of this job came."""
        with self._changed:
            if isinstance(event, m.Progress):
                self._progress = (event.done, event.total)
            elif isinstance(event, m.Released):
                self._released = True
            else:
                self._outcome = event
            self._changed.notify_all()

    def broke(self, error: TransientError) -> None:
        """For the connection: nothing more will come."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()


class Sidecar:
    """One connection to the node's daemon. Safe to share between threads."""

    def __init__(self, sock: socket.socket, path: Path, daemon_pid: int) -> None:
        self._sock, self._fd, self.path, self.daemon_pid = sock, sock.fileno(), path, daemon_pid
        self._pid, self._framer = os.getpid(), wire.Framer()
        self._ids = itertools.count(1)
        self._slots: dict[int, _Slot] = {}
        self._jobs: dict[str, Staged] = {}
        self._early: deque[m.JobEvent] = deque(maxlen=BATCH)
        self._lock = threading.Lock()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.spin = AdaptivePoll()
        self._events, self._poll = select.epoll(), select.poll()
        self._events.register(sock, select.EPOLLIN)
        self._poll.register(sock, select.POLLIN)
        self._broken: TransientError | None = None
        self._heard, self._asked = time.monotonic(), 0.0  # the daemon last; and when it was asked whether it lives
        self.closed_files: deque[int] = deque()
        """Files to give back to the daemon; appended to by finalizers, so anywhere and at any time."""
        self.touched_files: set[int] = set()
        self.forgotten: Callable[[int], None] = lambda _file: None
        self.reporting: Callable[[], m.Report | None] = lambda: None
        """Asked once a tick for what to report, where the daemon understands that."""
        self._reports = self.goes_on = False
        self._thread = threading.Thread(target=self._receive, name="headrace-sidecar", daemon=True)

    @classmethod
    def find(cls, sidecar: SidecarName = "auto") -> Sidecar | None:
        """A connection to the daemon at this socket ("auto": the default one), or None when none answers."""
        path = paths.chosen(sidecar)
        if path is None:
            return None
        try:
            return cls._connect(path)
        except (PermissionError, ConflictError) as error:  # somebody else's
            warn_once(_log, f"the sidecar on {path} is not for this user: {getattr(error, 'strerror', error)}")
        except (OSError, HeadraceError) as error:
            _log.debug("no sidecar on %s: %s", path, error)
        return None

    @classmethod
    def _connect(cls, path: Path) -> Sidecar:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_SECONDS)
            _connect_to(sock, os.fspath(path))
            pid, uid = wire.peer(sock)
            if uid not in (os.geteuid(), 0):  # root's is the service manager's, which passes it to the daemon
                raise ConflictError(f"the sidecar on {path} belongs to user {uid}")
            _send_all(sock, wire.frame(m.encode(m.Hello(m.VERSION, os.getpid()))), (), CONNECT_SECONDS)
            found = cls(sock, path, pid)
            found._handshake()
            # from here on one call sends and one receives: Python would poll before each for the sake of a time-out of its own
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        except BaseException:
            sock.close()
            raise
        found._thread.start()
        return found

    def _handshake(self) -> None:
        until = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < until:
            data, descriptors = wire.receive(self._sock)
            if not data:
                break
            for frame in self._framer.feed(data, descriptors):
                answer = m.decode_from_daemon(frame.payload)
                if isinstance(answer, m.Welcome):
                    self._reports, self.goes_on = answer.reports, answer.goes_on
                    return
                if isinstance(answer, m.Refused):
                    raise m.error_of(answer.code, answer.message, "")
        raise TransientError(f"the sidecar on {self.path} did not answer")

    # what it can do

    def stage(
        self, kind: str, arena_fd: int, plan: bytes, about: str = "", *, urgent: bool = False, wait: float = 0.0
    ) -> Staged:
        """Hand over an arena (a memory file sealed against shrinking) and its plan; returns once the daemon owns both.

        `about` tells people what is saved; an `urgent` job overtakes others; `wait` seconds at most may pass until the daemon
        has room, then it is a `CapacityError`. The caller keeps its own descriptor, and must not write to the arena before
        `Staged.wait_released` returns.
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
        return self._staged(answer)

    def follow(self, token: str) -> Staged:
        """A job staged earlier, perhaps through another connection. `NotFoundError` when the daemon does not know it."""
        answer, _ = self.call(lambda id: m.Follow(id, token))
        return self._staged(answer)

    def recall(self, source: str, key: str, timeout: float) -> bool:
        """Have the buddy's copy of an object brought into the node's tier (an empty key: the records of all steps of that store);
        whether it is there now."""
        answer, _ = self.call(lambda id: m.Recall(id, source, key), timeout=timeout)
        return isinstance(answer, m.Recalled) and answer.there

    def status(self) -> dict[str, object]:
        """What the daemon says of itself."""
        answer, _ = self.call(m.AskStatus)
        if not isinstance(answer, m.Status):
            raise TransientError("the sidecar answered another question")
        status: dict[str, object] = json.loads(answer.status)
        return status

    @property
    def broken(self) -> bool:
        """Whether the connection has ended, or belongs to the process that this one was forked from."""
        return self._broken is not None or os.getpid() != self._pid

    def close(self) -> None:
        """End the connection; staged jobs go on."""
        self._break("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Sidecar({os.fspath(self.path)!r}, process {self.daemon_pid})"

    # asking

    def call(
        self, build: Callable[[int], m.FromClient], descriptors: Sequence[int] = (), timeout: float = ANSWER_SECONDS
    ) -> tuple[Answer, tuple[int, ...]]:
        """Send the message that `build` makes of a new id; returns its answer, and descriptors that are now the caller's."""
        # The asking thread receives while no other one is at it, and from before it asks, since the answer may be as quick:
        # handing each answer over from the connection's thread would double the time of a round trip.
        here = self._receiving.acquire(blocking=False)
        try:
            id, slot = next(self._ids), _Slot(waits=not here)
            with self._lock:
                self._raise_if_broken()
                self._slots[id] = slot
            try:
                if here:
                    self._mute(0)
                self._send(build(id), descriptors, timeout)
                self._wait(slot, timeout)
            finally:
                if not slot.over:
                    with self._lock:
                        self._slots.pop(id, None)
        finally:
            if here:
                self._mute(select.EPOLLIN)  # the connection's thread goes on, also for others who wait
                self._receiving.release()
        answer = slot.answer
        if isinstance(answer, _GOOD):
            return answer, slot.descriptors
        if answer is None:
            self._raise_if_broken()
            raise DeadlineError(f"the sidecar on {self.path} did not answer within {timeout:g} s")
        if isinstance(answer, m.Failed):
            raise m.error_of(answer.code, answer.message, answer.hint)
        raise TransientError("the sidecar answered another question")

    def tell(self, message: m.FromClient) -> None:
        """Send a message that has no answer."""
        self._raise_if_broken()
        self._send(message, (), ANSWER_SECONDS)

    def _staged(self, answer: Answer) -> Staged:
        if not isinstance(answer, m.Staged):
            raise TransientError("the sidecar answered another question")
        staged = Staged(answer.token)
        with self._lock:
            self._jobs[answer.token] = staged
            early = [event for event in self._early if event.token == answer.token]
            broken = self._broken
            if any(isinstance(event, m.Done | m.JobFailed) for event in early):
                del self._jobs[answer.token]
        for event in early:
            staged.heard(event)
        if broken is not None:
            staged.broke(broken)
        return staged

    def _send(self, message: m.FromClient, descriptors: Sequence[int], timeout: float) -> None:
        data = wire.frame(m.encode(message), len(descriptors))
        if self.closed_files and not descriptors:  # what was let go of is told first, in the same breath
            data = wire.frame(m.encode(m.Closed(self._let_go_of()))) + data
        try:
            with self._sending:
                _send_all(self._sock, data, descriptors, timeout)
        except (OSError, DeadlineError) as error:
            self._break(str(error))  # half a frame may have gone out
            self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if os.getpid() != self._pid:
            raise TransientError("a connection to the sidecar does not survive fork", hint="open one in the child")
        if self._broken is not None:
            raise TransientError(self._broken.message, hint=self._broken.hint)

    # receiving

    def _wait(self, slot: _Slot, timeout: float) -> None:
        """Until the slot has its answer, which this thread receives unless the slot `waits`."""
        if slot.waiting is not None:
            slot.waiting.acquire(timeout=timeout)
            return
        began = time.monotonic()
        until, looks = began + timeout, self.spin.worth
        sleeps = min(until, began + self.spin.seconds) if looks else began
        try:
            while not slot.over and self._broken is None and time.monotonic() < sleeps:
                self._take(wait=False)
            while not slot.over and self._broken is None and (left := until - time.monotonic()) > 0:
                if left >= TICK_SECONDS or self._poll.poll(left * 1000):
                    self._take(wait=left >= TICK_SECONDS)
            self.spin.waited(time.monotonic() - began if slot.over else math.inf, looked=looks)
        except HeadraceError as error:
            self._break(error.message)
        except (OSError, ValueError) as error:
            self._break(str(error))

    def _mute(self, events: int) -> None:
        """What wakes the connection's thread, 0 while another one receives; the end of the connection wakes it anyway."""
        try:  # noqa: SIM105  # twice in every round trip
            self._events.modify(self._fd, events)
        except (OSError, ValueError):  # closed: the connection is over, which is known
            pass

    def _take(self, *, wait: bool) -> None:
        """Receive once, if something is there, or with `wait` comes within a tick; the caller holds `_receiving`."""
        try:
            data, descriptors = wire.receive(self._sock, wait=wait)
        except BlockingIOError:
            return
        if not data:
            raise TransientError("the daemon ended it")
        for frame in self._framer.feed(data, descriptors):
            self._heard = time.monotonic()  # a whole message: what drips is as good as silent
            self._got(frame)

    def _receive(self) -> None:
        reason, tick = "the daemon ended it", time.monotonic() + TICK_SECONDS
        try:
            while not self.broken:
                if self._events.poll(TICK_SECONDS):
                    with self._receiving:
                        self._take(wait=False)  # an asker may have been first
                if time.monotonic() >= tick:
                    tick = time.monotonic() + TICK_SECONDS
                    self._require_life()
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

    def _got(self, frame: wire.Frame) -> None:
        message = m.decode_from_daemon(frame.payload)
        if isinstance(message, _ANSWERS):
            with self._lock:
                slot = self._slots.pop(message.id, None)
                if slot is not None:
                    slot.answer, slot.descriptors = message, frame.descriptors
            if slot is not None:
                slot.wake()
                return
            if isinstance(message, m.Opened) and frame.descriptors:  # it came too late: give it back
                self.closed_files.append(message.file)
        elif isinstance(message, m.JobEvent):
            self._job_event(message)
        elif isinstance(message, m.Forget):
            self.forgotten(message.file)
            self._housekeeping()
        wire.close_all(frame.descriptors)

    def _job_event(self, event: m.JobEvent) -> None:
        with self._lock:
            staged = self._jobs.get(event.token)
            if staged is None:
                self._early.append(event)  # it may overtake the thread that waits for `Staged`
            elif isinstance(event, m.Done | m.JobFailed):
                del self._jobs[event.token]
        if staged is not None:
            staged.heard(event)

    def _require_life(self) -> None:
        """Break the connection when the daemon hangs: it was stopped, or waits for something that does not come."""
        now = time.monotonic()
        if self._asked <= self._heard:
            if now - self._heard >= PING_SECONDS and (self._slots or self._jobs):
                self._asked = now
                with contextlib.suppress(TransientError):
                    self.tell(m.AskStatus(next(self._ids)))
        elif now - self._asked >= HUNG_SECONDS:
            raise TransientError(f"the daemon hangs: it has said nothing for {now - self._heard:.0f} s")

    def _housekeeping(self) -> None:
        """Tell the daemon which files were let go of, and which were read."""
        with contextlib.suppress(TransientError):
            while closed := self._let_go_of():
                self.tell(m.Closed(closed))
            touched, self.touched_files = self.touched_files, set()
            if touched:
                self.tell(m.Touched(sorted(touched)[:BATCH]))

    def _let_go_of(self) -> list[int]:
        closed: list[int] = []
        with contextlib.suppress(IndexError):  # another thread may be as quick
            while len(closed) < BATCH:
                closed.append(self.closed_files.popleft())
        return closed

    def _report(self) -> None:
        if self._reports and (report := self.reporting()) is not None:
            with contextlib.suppress(TransientError):
                self.tell(report)

    def _break(self, reason: str) -> None:
        with self._lock:
            if self._broken is not None:
                return
            self._broken = TransientError(
                f"the connection to the sidecar on {self.path} ended: {reason}",
                hint="what was staged goes on, or is found complete by the next save; do not write to its arena",
            )
            slots, self._slots = list(self._slots.values()), {}
            jobs, self._jobs = list(self._jobs.values()), {}
        if os.getpid() == self._pid:  # or it would end the connection of the process that this one was forked from
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread, which closes it
        for slot in slots:
            slot.wake()
        for job in jobs:
            job.broke(self._broken)


def _connect_to(sock: socket.socket, path: str) -> None:
    """Connect, also while so many others do that the daemon's queue is full, which a socket with a timeout hears as an error."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def _send_all(sock: socket.socket, data: bytes, descriptors: Sequence[int], timeout: float) -> None:
    view, until = memoryview(data), 0.0
    while view:
        try:
            view, descriptors = view[wire.send(sock, view, descriptors, wait=False) :], ()
        except BlockingIOError:
            until = until or time.monotonic() + timeout
            ready = select.poll()
            ready.register(sock, select.POLLOUT)
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                raise DeadlineError(f"the sidecar took nothing for {timeout:g} s") from None


SPIN_SECONDS = 100e-6
_NEW = 1 / 8
_MOST = 8
"""Times `seconds` that a longer wait counts for: one fetch ends the looking, and some quick answers later it begins again."""


class AdaptivePoll:
    """For one connection; its caller sees to one wait at a time. `looked` counts waits that began with looking, `helped` those
    of them that ended with it."""

    __slots__ = ("_alone", "_usual", "helped", "looked", "seconds")

    def __init__(self, seconds: float = SPIN_SECONDS, processors: int | None = None) -> None:
        self.seconds = seconds
        self._alone = (processors or len(os.sched_getaffinity(0))) < 2
        self._usual = _MOST * seconds
        self.looked = self.helped = 0

    @property
    def worth(self) -> bool:
        """Whether to look first now."""
        return self._usual < self.seconds and not self._alone

    def waited(self, seconds: float, *, looked: bool) -> None:
        """An answer took so long, forever where none came; `looked`: it was looked for first."""
        self._usual += (min(seconds, _MOST * self.seconds) - self._usual) * _NEW
        if looked:
            self.looked += 1
            self.helped += seconds < self.seconds
