"""One connection of the daemon as a state machine. Sans-I/O: events in, instructions out.

States: *new* (only `Hello` is valid), *ready*, *over*. Events are the client's messages and the results of its
requests. `connections` executes the instructions in order.

Invariants: the descriptors of a message are in exactly one instruction, which may be `Discard`. Every request of a
ready connection is answered once. A file that was sent is held until the client has closed it as often as it was sent,
or until the connection ends. At most `OPENS` opens and `RECALLS` fetches from the buddy are in progress, and the client
has at most `HELD` holds on files; a request above a limit gets a capacity error.
Failure behaviour: a message that the state does not allow, or with descriptors that it must not have, ends the
connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.dataio.core.errors import CapacityError, DeadlineError, UsageError
from headrace.dataio.sidecar import protocol as m

OPENS = 64
HELD = 1024
RECALLS = 4


Runs = Sequence[tuple[int, int]]
Grown = Sequence[tuple[int, Runs]]


class Holdable(Protocol):
    """The part of a lease that the session uses. While the session refers to it, the cache counts the file as held."""

    @property
    def file(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def present(self) -> Sequence[tuple[int, int]]: ...
    @property
    def once(self) -> bool: ...


class Send(msgspec.Struct, frozen=True):  # creating a dataclass takes five times as long
    """Send the message, and the read-only descriptor of `lease` if there is one."""

    message: m.FromDaemon
    lease: Holdable | None = None


@dataclass(frozen=True, slots=True)
class StartOpen:
    """Fetch the ranges into the cache; answer with `opened`."""

    request: m.Open


@dataclass(frozen=True, slots=True)
class Prefetch:
    request: m.Announce


@dataclass(frozen=True, slots=True)
class Touch:
    files: list[int]


@dataclass(frozen=True, slots=True)
class StartJob:
    """Check and queue a staged checkpoint, taking over both descriptors; answer with `staged` or `refused`."""

    id: int
    kind: str
    arena: int
    plan: int
    about: str = ""
    trace: str = ""
    urgent: bool = False
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class FollowJob:
    """Answer with `staged` or `refused`, then send the job's events."""

    id: int
    token: str


@dataclass(frozen=True, slots=True)
class StartRecall:
    """Fetch an object from the buddy; answer with `recalled`."""

    request: m.Recall


@dataclass(frozen=True, slots=True)
class Report:
    """Send the daemon's status."""

    id: int


@dataclass(frozen=True, slots=True)
class Record:
    """Record a trainer's report."""

    report: m.Report


@dataclass(frozen=True, slots=True)
class Discard:
    """Close these descriptors."""

    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection, after all earlier messages were sent."""

    reason: str


Instruction = (
    Send | StartOpen | Prefetch | Touch | StartJob | FollowJob | StartRecall | Report | Record | Discard | HangUp
)


class Session:
    """The state of one connection."""

    def __init__(self, daemon_pid: int) -> None:
        self._daemon_pid = daemon_pid
        self.state = "new"
        self.client_pid = 0
        self._opens: dict[int, int] = {}  # request -> the file that the client has
        self._held: dict[int, list[Holdable]] = {}
        self._holds = 0
        self.sent_runs: dict[int, Runs] = {}
        """The runs of held files that were last sent to the client."""
        self._recalls = 0
        self._announced: m.Announce | None = None

    # messages from the client

    def received(self, message: m.FromClient, descriptors: tuple[int, ...]) -> list[Instruction]:
        """Handle a message and its descriptors."""
        if self.state == "over":
            return [Discard(descriptors)] if descriptors else []
        if descriptors and not isinstance(message, m.Stage):
            return [Discard(descriptors), *self._end("descriptors with a message that takes none")]
        match message:
            case m.Hello():
                return self._hello(message)
            case _ if self.state == "new":
                return [*([Discard(descriptors)] if descriptors else []), *self._end("a message before hello")]
            case m.Stage():
                return self._stage(message, descriptors)
            case m.Open():
                return self._open(message)
            case m.Announce():
                return self._announce(message)
            case m.Touched(files):
                return [Touch(files)]
            case m.Closed(files):
                return self._closed(files)
            case m.Follow(id, token):
                return [FollowJob(id, token)]
            case m.Recall():
                return self._recall(message)
            case m.AskStatus(id):
                return [Report(id)]
            case m.Report():
                return [Record(message)]

    def end(self) -> None:
        """The connection has ended: release all files that it held."""
        self.state = "over"
        self._held.clear()
        self.sent_runs.clear()
        self._opens.clear()
        self._announced = None
        self._holds = 0

    # results

    def opened(self, request: int, lease: Holdable | None, grown: Grown = ()) -> list[Instruction]:
        """Answer an open: its ranges are in the cache, or the cache has no room for them (`lease` is None).

        `grown`: files of `sent_runs` that have more present bytes now.
        """
        if request not in self._opens:
            return []
        have = self._opens.pop(request)
        return [Send(m.Bypassed(request))] if lease is None else self._send_opened(request, have, lease, grown)

    def can_open_now(self, request: m.Open) -> bool:
        """Whether an open without descriptors may be answered by `opened_now`.

        If not, pass it to `received`, which reports any error.
        """
        return self.state == "ready" and request.id not in self._opens and len(self._opens) < OPENS

    def opened_now(self, request: m.Open, lease: Holdable, grown: Grown = ()) -> list[Instruction]:
        """Answer an open whose ranges were in the cache when it arrived."""
        return self._send_opened(request.id, request.have, lease, grown)

    def _send_opened(self, request: int, have: int, lease: Holdable, grown: Grown) -> list[Instruction]:
        grown_files = [(file, list(runs)) for file, runs in grown if file in self._held and file != lease.file]
        answer = m.Opened(request, lease.file, lease.size, list(lease.present), lease.once, grown_files)
        self.sent_runs.update({file: runs for file, runs in grown if file in self._held})
        if lease.file == have and lease.file in self._held:
            self.sent_runs[lease.file] = lease.present
            return [Send(answer)]
        if self._holds >= HELD:
            return self._fail(request, CapacityError(f"this process holds {HELD} cached files, which is the limit"))
        self._held.setdefault(lease.file, []).append(lease)
        self.sent_runs[lease.file] = lease.present
        self._holds += 1
        return [Send(answer, lease)]

    def open_failed(self, request: int, error: BaseException) -> list[Instruction]:
        """An open failed at the store, or reached its deadline."""
        if self._opens.pop(request, None) is None:
            return []
        return self._fail(request, error)

    def open_timed_out(self, request: int) -> list[Instruction]:
        """An open's deadline has passed."""
        return self.open_failed(request, DeadlineError("the bytes were not fetched within the deadline"))

    def staged(self, request: int, token: str) -> list[Instruction]:
        return [Send(m.Staged(request, token))]

    def recalled(self, request: int, found: bool) -> list[Instruction]:
        """The fetch of the buddy's copy has ended. `found`: whether the object is in the local tier now."""
        if self.state != "ready":
            return []
        self._recalls -= 1
        return [Send(m.Recalled(request, found))]

    def refused(self, request: int, error: BaseException) -> list[Instruction]:
        return self._fail(request, error)

    def job(self, event: m.JobEvent) -> list[Instruction]:
        return [Send(event)] if self.state == "ready" else []

    def dropped(self, file: int) -> list[Instruction]:
        """The cache dropped a file."""
        return [Send(m.Forget(file))] if file in self._held else []

    @property
    def held(self) -> int:
        """Number of files that the client holds."""
        return len(self._held)

    @property
    def opens(self) -> int:
        """Number of opens in progress."""
        return len(self._opens)

    # internal

    def _hello(self, hello: m.Hello) -> list[Instruction]:
        if self.state != "new":
            return self._end("a second hello")
        if hello.version != m.VERSION:
            text = (
                f"the sidecar speaks version {m.VERSION} and the client version {hello.version}: update the older one"
            )
            return [Send(m.Refused("unsupported", text)), *self._end(text)]
        self.state, self.client_pid = "ready", hello.pid
        return [Send(m.Welcome(m.VERSION, self._daemon_pid, reports=True, incremental=True))]

    def _open(self, request: m.Open) -> list[Instruction]:
        if request.id in self._opens:
            return self._end("two requests with one id")
        if len(self._opens) >= OPENS:
            return self._fail(request.id, CapacityError(f"{OPENS} opens are in progress, which is the limit"))
        self._opens[request.id] = request.have
        return [StartOpen(request)]

    def _announce(self, message: m.Announce) -> list[Instruction]:
        """Expand an announcement that continues the last one into the full list."""
        if message.dropped is not None:
            previous = self._announced
            if previous is None or previous.where != message.where:
                return self._end("an announcement that continues no earlier one")
            upcoming = [*previous.upcoming[message.dropped :], *message.upcoming]
            if len(upcoming) > m.RANGES:
                return self._end(f"{len(upcoming)} ranges are announced; the limit is {m.RANGES}")
            message = m.Announce(message.where, upcoming, message.trace)
        self._announced = message
        return [Prefetch(message)]

    def _stage(self, message: m.Stage, descriptors: tuple[int, ...]) -> list[Instruction]:
        if len(descriptors) != 2:
            error = UsageError(f"{len(descriptors)} descriptors with a checkpoint; it takes the arena's and the plan's")
            return [*([Discard(descriptors)] if descriptors else []), *self._fail(message.id, error)]
        urgent, wait = message.priority == m.PREEMPTION, message.wait
        return [StartJob(message.id, message.kind, *descriptors, message.about, message.trace, urgent, wait)]

    def _recall(self, message: m.Recall) -> list[Instruction]:
        if self._recalls >= RECALLS:
            return self._fail(message.id, CapacityError(f"{RECALLS} objects are being fetched, which is the limit"))
        self._recalls += 1
        return [StartRecall(message)]

    def _closed(self, files: list[int]) -> list[Instruction]:
        for file in files:
            leases = self._held.get(file)
            if not leases:
                return self._end(f"file {file} was closed more often than it was opened")
            leases.pop()
            self._holds -= 1
            if not leases:
                del self._held[file]
                self.sent_runs.pop(file, None)
        return []

    def _fail(self, request: int, error: BaseException) -> list[Instruction]:
        return [Send(m.Failed(request, *m.error_fields(error)))]

    def _end(self, reason: str) -> list[Instruction]:
        self.end()
        return [HangUp(reason)]
