"""The buddies' protocol: small messages, some followed by the bytes of an object or a record (the body).

Requests and their answers:

- `hello` → `welcome` | `refused`
- `offer` source, key, size, digest → `want` offset | `refused`; then size - offset bytes → `stored` | `refused`
- `keep` size, and a record of that many bytes → `stored` | `refused`
- `list` source → `listed` sizes, and the records in that order
- `fetch` source, key, offset → `found` size, digest, and the bytes from offset | `absent`

Invariants: a message has at most `MESSAGE_BYTES`, and a larger one is refused before it is read. Messages decode to
these types only. The size of a body is announced and bounded. Every message and every body has one time limit for all
of its bytes, so a peer that sends slowly cannot extend it.
Failure behaviour: `ProtocolError` for an invalid message; `OSError` when the connection breaks or is too slow.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec

from headrace.dataio.core.limits import GIB, KIB, MIB
from headrace.dataio.store.local_tier.objects import TierObject
from headrace.dataio.store.local_tier.records import RECORD_BYTES, Key

VERSION = 1
MESSAGE_BYTES = 64 * KIB
OBJECT_BYTES = 2 * GIB
RECORDS = 256
"""Maximum number of records in one answer."""
IO_SECONDS = 30.0
"""Time limit of one message, and the longest pause within a body."""
LEAST_RATE = 32 * KIB
"""Minimum bytes a second of a body: half of the lowest rate that can be configured. A slower transfer is aborted."""
PIECE = 1 * MIB
_LENGTH = struct.Struct("<I")
Size = Annotated[int, msgspec.Meta(ge=0, le=OBJECT_BYTES)]
RecordSize = Annotated[int, msgspec.Meta(ge=1, le=RECORD_BYTES)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class ProtocolError(Exception):
    """The peer violated the protocol."""


class Message(msgspec.Struct, frozen=True, tag_field="t", tag=str.lower):
    """Base of all messages."""


class Hello(Message, frozen=True):
    version: int


class Offer(Message, frozen=True):
    """Offer an object. The answer is the offset from which the peer wants it, or `size` if the peer has all of it."""

    source: Key
    key: Key
    size: Size
    digest: Digest


class Keep(Message, frozen=True):
    """Send a record, after all of its objects were offered."""

    size: RecordSize


class List(Message, frozen=True):
    """Request the records of a store."""

    source: Key


class Fetch(Message, frozen=True):
    source: Key
    key: Key
    offset: Size


class Welcome(Message, frozen=True):
    version: int


class Want(Message, frozen=True):
    offset: Size


class Stored(Message, frozen=True):
    pass


class Listed(Message, frozen=True):
    sizes: Annotated[list[RecordSize], msgspec.Meta(max_length=RECORDS)]


class Found(Message, frozen=True):
    size: Size
    digest: Digest


class Absent(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    code: Text
    message: Text


Request = Hello | Offer | Keep | List | Fetch
Answer = Welcome | Want | Stored | Listed | Found | Absent | Refused
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
M = TypeVar("M")


class RateLimit:
    """At most `rate` bytes a second, on average over a tenth of a second. Thread-safe."""

    def __init__(self, rate: int | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._rate, self._sleep, self._free_at = rate, sleep, 0.0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.1) + size / self._rate
            pause = self._free_at - now
        if pause > 0:
            self._sleep(pause)


class Channel:
    """Messages and bytes over a connected socket. For one thread at a time."""

    def __init__(self, sock: socket.socket, rate_limit: RateLimit | None = None) -> None:
        self._sock, self._rate_limit = sock, rate_limit or RateLimit(None)
        sock.settimeout(IO_SECONDS)
        self._timeout = IO_SECONDS
        if sock.family != socket.AF_UNIX:  # otherwise a message waits until the previous one is acknowledged
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        data = msgspec.msgpack.encode(message)
        self._send_all(memoryview(_LENGTH.pack(_check_length(len(data))) + data), time.monotonic() + IO_SECONDS)

    def request(self) -> Request | None:
        """The peer's next request; None if it closed the connection between two messages."""
        return self._receive(_requests)

    def answer(self) -> Answer:
        answer = self._receive(_answers)
        if answer is None:
            raise ConnectionError("the buddy closed the connection")
        return answer

    def send_bytes(self, pieces: Iterable[memoryview | bytes]) -> int:
        """Send the pieces at the configured rate; returns the number of bytes."""
        sent, until = 0, time.monotonic() + IO_SECONDS
        for piece in pieces:
            view = memoryview(piece)
            for at in range(0, len(view), PIECE):
                part = view[at : at + PIECE]
                until += len(part) / LEAST_RATE
                self._rate_limit.take(len(part))
                self._send_all(part, until)
                sent += len(part)
        return sent

    def send_object(self, tier_object: TierObject, start: int) -> int:
        """Send the object's bytes from `start`; returns their number."""
        return self.send_bytes(tier_object.parts(start, memoryview(bytearray(PIECE))))

    def body(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes in pieces. A piece is valid until the next one is requested."""
        if size < 0:
            raise ProtocolError("the object is shorter than the part that was received earlier")
        buffer, remaining = memoryview(bytearray(min(PIECE, max(size, 1)))), size
        until = time.monotonic() + IO_SECONDS
        while remaining:
            part = buffer[: min(remaining, len(buffer))]
            until += len(part) / LEAST_RATE
            self._fill(part, until)
            yield part
            remaining -= len(part)

    def whole(self, size: int) -> bytes:
        """The next `size` bytes."""
        data = bytearray(size)
        self._fill(memoryview(data), time.monotonic() + IO_SECONDS + size / LEAST_RATE)
        return bytes(data)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        head = bytearray(_LENGTH.size)
        if not self._fill(memoryview(head), time.monotonic() + IO_SECONDS, may_end=True):
            return None
        data = self.whole(_check_length(_LENGTH.unpack(head)[0]))
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"the received bytes are not a message: {error}") from None

    def _send_all(self, view: memoryview, until: float) -> None:
        while view:
            self._set_timeout(until)
            view = view[self._sock.send(view) :]

    def _set_timeout(self, until: float) -> None:
        """Make the next read or write time out at `until`, or after `IO_SECONDS` if that is earlier."""
        remaining = until - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the whole transfer took too long")
        wanted = min(remaining, IO_SECONDS)
        if wanted != self._timeout:  # each TLS record is a read of its own, and setting a timeout is a system call
            self._sock.settimeout(wanted)
            self._timeout = wanted

    def _fill(self, view: memoryview, until: float, *, may_end: bool = False) -> bool:
        done = 0
        while done < len(view):
            self._set_timeout(until)
            received = self._sock.recv_into(view[done:])
            if not received:
                if may_end and not done:
                    return False
                raise ConnectionError("the connection ended in the middle of a message")
            done += received
        return True


def _check_length(length: int) -> int:
    """Return `length`; `ProtocolError` if a message may not be that long."""
    if length > MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes; the limit is {MESSAGE_BYTES}")
    return length
