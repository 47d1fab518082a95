"""The daemon's clients: who may come in, what they send, and what is carried out for them.

Purpose: a thin shell around the sessions' state machines: frames go in, instructions come out and go to the part that does them.
Invariants: lives on the loop's thread; a client can cost no more than its bounds (opens, held files, outbox), and its end lets
go of all it held. Failure behaviour: a client that breaks a rule loses its connection and nobody else notices; where no
descriptor is left for another client, the next is looked for a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator

from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.lease import Lease
from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import machine, wire
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.board import Board
from headrace.dataio.sidecar.peer import Peer
from headrace.dataio.sidecar.reads import Reads
from headrace.dataio.sidecar.served import Client
from headrace.dataio.sidecar.staging import Staging
from headrace.dataio.sidecar.view import fitting

HELLO_SECONDS = 10.0
LISTED_CLIENTS = 64
STATUS_BYTES = limits.MESSAGE_BYTES - 1024

_log = get_logger(__name__)


class Clients:
    """All connections. `most()` is how many there may be, `status()` what the daemon says of itself; `came()` hears of each."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        board: Board,
        reads: Reads,
        staging: Staging,
        most: Callable[[], int],
        status: Callable[[], dict[str, object]],
        came: Callable[[], None],
    ) -> None:
        self._loop, self._engine, self._board = loop, engine, board
        self._reads, self._staging = reads, staging
        self._most, self._status, self._came = most, status, came
        self._clients: dict[int, Client] = {}
        self._next = 1
        self._listening: socket.socket | None = None

    def __len__(self) -> int:
        return len(self._clients)

    def listed(self) -> Iterator[dict[str, int]]:
        """Some of them, for status."""
        for client in list(self._clients.values())[:LISTED_CLIENTS]:
            yield {"pid": client.pid, "held_files": client.session.held, "opens": client.session.opens}

    def listen(self, listening: socket.socket) -> None:
        """Let clients in from now on."""
        self._listening = listening
        self._loop.add_reader(listening.fileno(), self._accept, listening)

    def stop_listening(self) -> None:
        """Let no more in, and close the socket."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()
        self._listening = None

    def close(self) -> None:
        """End all connections."""
        for client in list(self._clients.values()):
            if client.peer is not None:
                client.peer.close("")

    def dropped(self, file: int) -> None:
        """The cache has dropped a file: those who have it are told."""
        for client in list(self._clients.values()):
            client.carry_out(client.session.dropped(file))

    # in and out

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptors left, as a rule: look again in a second, and not at once
            _log.error("cannot accept a client: %s", error.strerror)
            self._loop.remove_reader(listening.fileno())
            self._loop.call_later(1.0, self._accept_again, listening)
            return
        pid, uid = wire.peer(sock)
        if uid != os.geteuid():
            _log.warning("refusing process %d of user %d", pid, uid)
            sock.close()
        elif len(self._clients) >= self._most():
            refusal = m.Refused(
                "capacity", f"the sidecar has {len(self._clients)} clients; the most is {len(self._clients)}"
            )
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                wire.send(sock, wire.frame(m.encode(refusal)))
            sock.close()
        else:
            self._welcome(sock, pid)

    def _accept_again(self, listening: socket.socket) -> None:
        if self._listening is listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _welcome(self, sock: socket.socket, pid: int) -> None:
        self._came()
        number, self._next = self._next, self._next + 1
        client = Client(machine.Session(os.getpid()), pid, lambda instructions: self._carry_out(client, instructions))
        client.listener = lambda event: client.carry_out(client.session.job(event))
        self._clients[number] = client
        client.peer = Peer(
            sock, self._loop, lambda payload, fds: self._received(client, payload, fds), lambda: self._ended(number)
        )
        client.greeting = self._loop.call_later(HELLO_SECONDS, self._expect_hello, number)

    def _expect_hello(self, number: int) -> None:
        client = self._clients.get(number)
        if client is not None and client.peer is not None and client.session.state == "new":
            client.peer.close("it did not say hello")

    def _received(self, client: Client, payload: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            message = m.decode_from_client(payload)
        except HeadraceError as error:
            wire.close_all(descriptors)
            client.carry_out([machine.HangUp(error.message)])
            return
        if type(message) is m.Open and not descriptors and client.session.at_once(message):
            lease = self._reads.present(client, message)
            if lease is not None:
                self._carry_out(client, client.session.opened_at_once(message, lease, self._reads.grown(client)))
                return
        client.carry_out(client.session.received(message, descriptors))

    def _ended(self, number: int) -> None:
        client = self._clients.pop(number)
        if client.greeting is not None:
            client.greeting.cancel()
        client.session.over()
        self._board.ended(id(client), client.process)
        self._staging.ended(client)
        self._reads.ended(client)

    def _reported(self, client: Client, report: m.Report) -> None:
        self._board.report(id(client), client.process, report)
        if client.job:
            self._reads.assign(client)

    # instructions

    def _carry_out(self, client: Client, instructions: list[machine.Instruction]) -> None:
        peer = client.peer
        if peer is None:
            return
        for instruction in instructions:
            if type(instruction) is machine.Send:  # most are, and a pattern takes longer
                lease = instruction.lease
                descriptor = lease.descriptor if isinstance(lease, Lease) else None
                peer.send(m.encode(instruction.message), descriptor)
                continue
            match instruction:
                case machine.StartOpen(request):
                    self._reads.open(client, request)
                case machine.Prefetch(request):
                    self._reads.prefetch(client, request)
                case machine.Touch(files):
                    self._engine.touch(files)
                case machine.StartJob():
                    self._staging.stage(client, instruction)
                case machine.FollowJob(id, token):
                    self._staging.follow(client, id, token)
                case machine.StartRecall(request):
                    self._staging.recall(client, request)
                case machine.Report(id):
                    peer.send(m.encode(m.Status(id, fitting(self._status(), STATUS_BYTES))))
                case machine.Record(report):
                    self._reported(client, report)
                case machine.Discard(descriptors):
                    wire.close_all(descriptors)
                case machine.HangUp(reason):
                    peer.hang_up(reason)
