"""One client's socket in the daemon's event loop: frames in and out, with a bound on what waits to be sent.

Invariant: nothing here ever blocks; a client that does not read is cut off when `OUTBOX_BYTES` wait for it, so it costs
nobody else anything. Descriptors that came and were not handed out are closed with the connection.
Failure behaviour: whatever goes wrong on this socket ends this connection only, and is said in the log.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.dataio.cache.blocks import Descriptor
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import wire

OUTBOX_BYTES = 1 << 20
READS = 8
"""Receives in one turn of the loop, so that one busy client does not keep the others waiting."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    descriptor: Descriptor | None


class Peer:
    """Calls `frame(payload, descriptors)` for what arrives and `ended()` once, when the connection is over."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
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
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, payload: bytes, descriptor: Descriptor | None = None) -> None:
        """Send a frame now or when the client reads again."""
        if not self.open or self._closing:
            return
        data = wire.frame(payload, 0 if descriptor is None else 1)
        if descriptor is None and not self._outbox and self._gone(data):
            return
        self._outbox.append(_Outgoing(memoryview(data), descriptor))
        self._waiting += len(data)
        if self._waiting > OUTBOX_BYTES:
            self.close("it does not read what it asked for")
        elif len(self._outbox) == 1:
            self._flush()

    def hang_up(self, reason: str) -> None:
        """Close, once what waits has gone out."""
        if not self.open:  # the client was gone before it could be told
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        if self._outbox:
            self._loop.call_later(5.0, self.close, reason)
        else:
            self.close(reason)

    def close(self, reason: str) -> None:
        """Close at once."""
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

    def _readable(self) -> None:
        try:
            for _ in range(READS):
                data, descriptors = wire.receive(self._sock)
                if not data:
                    wire.close_all(descriptors)
                    self.close("")
                    return
                self._hand_out(self._framer.feed(data, descriptors))
                if not self.open or self._closing or len(data) < wire.CHUNK:
                    return
        except BlockingIOError:
            return
        except (OSError, HeadraceError) as error:
            self.close(str(error))

    def _hand_out(self, frames: list[wire.Frame]) -> None:
        for frame in frames:
            if self.open and not self._closing:
                self._frame(frame.payload, frame.descriptors)
            else:
                wire.close_all(frame.descriptors)

    def _gone(self, data: bytes) -> bool:
        """Whether all of it went out at once, as it does where the client reads; else what is left goes the long way."""
        try:
            sent = wire.send(self._sock, data)
        except OSError:  # said by the long way
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
