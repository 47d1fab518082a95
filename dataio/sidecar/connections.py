"""The daemon's clients: it accepts connections, receives messages, and keeps the state of each client.

Purpose: input and output for the sessions' state machines. This module passes frames to a session, and the session's
instructions to the service that executes them.
Invariants: runs on the loop's thread and never blocks. A client's opens, held files and outbox are bounded, and all its
files are released when it disconnects. A client that does not read is disconnected when more than `OUTBOX_BYTES` wait
for it. Received descriptors that were not passed on are closed with the connection.
Failure behaviour: a client that breaks a rule, or whose socket fails, loses its connection; other clients are not
affected. When no descriptor is left for a new client, the daemon tries again a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field

from headrace.dataio.cache.blocks import Descriptor, Lease
from headrace.dataio.cache.engine import Engine
from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.job_stats import JobStats
from headrace.dataio.sidecar.jobs.job_table import Job
from headrace.dataio.sidecar.reads import ReadService
from headrace.dataio.sidecar.session import (
    Discard,
    FollowJob,
    HangUp,
    Instruction,
    Prefetch,
    Record,
    Report,
    Send,
    Session,
    StartJob,
    StartOpen,
    StartRecall,
    Touch,
)
from headrace.dataio.sidecar.staging import StagingService
from headrace.dataio.sidecar.status import fitting

HELLO_SECONDS = 10.0
LISTED_CLIENTS = 64
STATUS_BYTES = limits.MESSAGE_BYTES - 1024

_log = get_logger(__name__)


class ConnectionManager:
    """All connections.

    `limit()` returns their maximum number, and `status()` the daemon's status. `on_connect()` is called for each new
    connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        *,
        job_stats: JobStats,
        reads: ReadService,
        staging: StagingService,
        limit: Callable[[], int],
        status: Callable[[], dict[str, object]],
        on_connect: Callable[[], None],
    ) -> None:
        self._loop, self._engine, self._job_stats = loop, engine, job_stats
        self._reads, self._staging = reads, staging
        self._limit, self._status, self._on_connect = limit, status, on_connect
        self._clients: dict[int, ClientState] = {}
        self._next = 1
        self._listener: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._clients)

    def listed(self) -> Iterator[dict[str, int]]:
        """The first `LISTED_CLIENTS` clients, for the status."""
        for client in list(self._clients.values())[:LISTED_CLIENTS]:
            yield {"pid": client.pid, "held_files": client.session.held, "opens": client.session.opens}

    def listen(self, listener: socket.socket) -> None:
        """Start accepting clients."""
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def stop_listening(self) -> None:
        """Stop accepting clients and close the socket."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        self._listener = None

    def close(self) -> None:
        """End all connections."""
        for client in list(self._clients.values()):
            if client.peer is not None:
                client.peer.close("")

    def dropped(self, file: int) -> None:
        """Tell the clients that hold this file that the cache has dropped it."""
        for client in list(self._clients.values()):
            client.execute(client.session.dropped(file))

    # connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # usually no descriptors are left: try again in a second
            _log.error("cannot accept a client: %s", error.strerror)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(1.0, self._accept_again, listener)
            return
        pid, uid = wire.peer(sock)
        if uid != os.geteuid():
            _log.warning("refused a connection from process %d of user %d: it belongs to another user", pid, uid)
            sock.close()
        elif len(self._clients) >= self._limit():
            refusal = m.Refused(
                "capacity", f"the sidecar has {len(self._clients)} clients; the limit is {self._limit()}"
            )
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                wire.send(sock, wire.frame(m.encode(refusal)))
            sock.close()
        else:
            self._welcome(sock, pid)

    def _accept_again(self, listener: socket.socket) -> None:
        if self._listener is listener:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _welcome(self, sock: socket.socket, pid: int) -> None:
        self._on_connect()
        number, self._next = self._next, self._next + 1
        client = ClientState(Session(os.getpid()), pid, lambda instructions: self._execute(client, instructions))
        client.listener = lambda event: client.execute(client.session.job(event))
        self._clients[number] = client
        client.peer = ClientSocket(
            sock,
            self._loop,
            frame=lambda payload, fds: self._received(client, payload, fds),
            ended=lambda: self._ended(number),
        )
        client.hello_timer = self._loop.call_later(HELLO_SECONDS, self._expect_hello, number)

    def _expect_hello(self, number: int) -> None:
        client = self._clients.get(number)
        if client is not None and client.peer is not None and client.session.state == "new":
            client.peer.close("it sent no hello in time")

    def _received(self, client: ClientState, payload: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            message = m.decode_from_client(payload)
        except HeadraceError as error:
            wire.close_all(descriptors)
            client.execute([HangUp(error.message)])
            return
        if type(message) is m.Open and not descriptors and client.session.can_open_now(message):
            lease = self._reads.present(client, message)
            if lease is not None:
                self._execute(client, client.session.opened_now(message, lease, self._reads.grown(client)))
                return
        client.execute(client.session.received(message, descriptors))

    def _ended(self, number: int) -> None:
        client = self._clients.pop(number)
        if client.hello_timer is not None:
            client.hello_timer.cancel()
        client.session.end()
        self._job_stats.ended(id(client), client.process)
        self._staging.ended(client)
        self._reads.ended(client)

    def _reported(self, client: ClientState, report: m.Report) -> None:
        self._job_stats.report(id(client), client.process, report)
        if client.job:
            self._reads.assign(client)

    # instructions

    def _execute(self, client: ClientState, instructions: list[Instruction]) -> None:
        peer = client.peer
        if peer is None:
            return
        for instruction in instructions:
            if type(instruction) is Send:  # the most common case; this is faster than a pattern
                lease = instruction.lease
                descriptor = lease.take_descriptor() if isinstance(lease, Lease) else None
                peer.send(m.encode(instruction.message), descriptor)
                continue
            match instruction:
                case StartOpen(request):
                    self._reads.open(client, request)
                case Prefetch(request):
                    self._reads.prefetch(client, request)
                case Touch(files):
                    self._engine.touch(files)
                case StartJob():
                    self._staging.stage(client, instruction)
                case FollowJob(id, token):
                    self._staging.follow(client, id, token)
                case StartRecall(request):
                    self._staging.recall(client, request)
                case Report(id):
                    peer.send(m.encode(m.Status(id, fitting(self._status(), STATUS_BYTES))))
                case Record(report):
                    self._reported(client, report)
                case Discard(descriptors):
                    wire.close_all(descriptors)
                case HangUp(reason):
                    peer.hang_up(reason)


@dataclass(slots=True, eq=False)
class ClientState:
    """The daemon's state of one client. Services pass their instructions to `execute`."""

    session: Session
    pid: int
    execute: Callable[[list[Instruction]], None]
    peer: ClientSocket | None = None
    hello_timer: asyncio.TimerHandle | None = None
    listener: Callable[[m.JobEvent], None] | None = None
    opening: bool = False  # the store of an announcement is being opened
    job: str = ""  # the job whose limits apply
    staging: list[Job] = field(default_factory=list)
    """Staged jobs that are not acknowledged yet."""

    @property
    def process(self) -> int:
        """The client's pid according to the kernel; its own claim if it is in another pid namespace."""
        return self.pid or self.session.client_pid

    @property
    def ready(self) -> bool:
        """Whether the handshake is done and the connection open."""
        return self.session.state == "ready"


class BackgroundTasks:
    """Coroutines that run in the background until they end or `cancel` is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._tasks = loop, set[asyncio.Task[None]]()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


OUTBOX_BYTES = 1 << 20
READS = 8
"""Receives per loop iteration, so one busy client does not delay others."""


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    descriptor: Descriptor | None


class ClientSocket:
    """Calls `frame(payload, descriptors)` for every frame, and `ended()` once, when the connection is over."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        frame: Callable[[bytes, tuple[int, ...]], None],
        ended: Callable[[], None],
    ) -> None:
        self._sock, self._loop, self._frame, self._ended = sock, loop, frame, ended
        self._framer = wire.Framer()
        self._outbox: deque[_Outgoing] = deque()
        self._waiting = 0
        self._closing = False
        self.open = True
        sock.setblocking(False)
        loop.add_reader(sock.fileno(), self._on_readable)

    def send(self, payload: bytes, descriptor: Descriptor | None = None) -> None:
        """Send a frame, now or when the client reads again."""
        if not self.open or self._closing:
            return
        data = wire.frame(payload, 0 if descriptor is None else 1)
        if descriptor is None and not self._outbox and self._try_send(data):
            return
        self._outbox.append(_Outgoing(memoryview(data), descriptor))
        self._waiting += len(data)
        if self._waiting > OUTBOX_BYTES:
            self.close("it does not read its answers")
        elif len(self._outbox) == 1:
            self._flush()

    def hang_up(self, reason: str) -> None:
        """Close the connection after the outbox was sent, at the latest after five seconds."""
        if not self.open:  # the client disconnected first
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        if self._outbox:
            self._loop.call_later(5.0, self.close, reason)
        else:
            self.close(reason)

    def close(self, reason: str) -> None:
        """Close the connection at once, without sending the outbox."""
        if not self.open:
            return
        self.open = False
        if reason:
            _log.warning("closing the connection of a client: %s", reason)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._framer.close()
        self._outbox.clear()
        self._ended()

    def _on_readable(self) -> None:
        try:
            for _ in range(READS):
                data, descriptors = wire.receive(self._sock)
                if not data:
                    wire.close_all(descriptors)
                    self.close("")
                    return
                self._deliver(self._framer.feed(data, descriptors))
                if not self.open or self._closing or len(data) < wire.CHUNK:
                    return
        except BlockingIOError:
            return
        except (OSError, HeadraceError) as error:
            self.close(str(error))

    def _deliver(self, frames: list[wire.Frame]) -> None:
        for frame in frames:
            if self.open and not self._closing:
                self._frame(frame.payload, frame.descriptors)
            else:
                wire.close_all(frame.descriptors)

    def _try_send(self, data: bytes) -> bool:
        """Try to send without queueing, which succeeds while the client reads; False if the frame must be queued."""
        try:
            sent = wire.send(self._sock, data)
        except OSError:  # `_flush` reports it
            return False
        if sent < len(data):
            self._outbox.append(_Outgoing(memoryview(data)[sent:], None))
            self._waiting += len(data) - sent
            self._flush()
        return True

    def _flush(self) -> None:
        try:
            while self._outbox:
                first = self._outbox[0]
                rights = () if first.descriptor is None else (first.descriptor.fileno(),)
                sent = wire.send(self._sock, first.data, rights)
                self._waiting -= sent
                first.data, first.descriptor = first.data[sent:], None
                if not first.data:
                    self._outbox.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        except OSError as error:
            self.close("" if isinstance(error, ConnectionError) else str(error))
            return
        self._loop.remove_writer(self._sock.fileno())
        if self._closing:
            self.close("")
