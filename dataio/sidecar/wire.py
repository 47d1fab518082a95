"""Frames on a Unix stream socket, with file descriptors.

A frame is a 4-byte little-endian length, one byte that counts its descriptors, and the payload. Descriptors are sent by
SCM_RIGHTS with the frame's first bytes, so they arrive no later than the frame's end. The framer queues received
descriptors, and each complete frame takes its own from the queue.

Invariants: a payload has at most `limits.MESSAGE_BYTES`; a larger one is refused before it is buffered. One frame
carries at most `DESCRIPTORS` descriptors. Either the framer or the frame that it returned owns a received descriptor,
never both.
Failure behaviour: `UsageError` for an oversize frame, a wrong count of descriptors, and descriptors without a frame.
The stream cannot be used afterwards, and `Framer.close` closes the descriptors that it still holds.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.dataio.core import limits
from headrace.dataio.core.errors import DeadlineError, UsageError

DESCRIPTORS = 2
"""Maximum number of descriptors in one frame."""
_HEADER = struct.Struct("<IB")
_ANCILLARY = socket.CMSG_SPACE((DESCRIPTORS + 2) * array.array("i").itemsize)
CHUNK = 64 * limits.KIB
_TRUNCATED, _CLOEXEC, _NOSIGNAL = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_NOSIGNAL)
_DONTWAIT = int(socket.MSG_DONTWAIT)
"""The flags as plain integers: arithmetic on the enum costs a microsecond per operation."""


class Frame(NamedTuple):
    """One message's bytes and its descriptors. The receiver must close the descriptors."""

    payload: bytes
    descriptors: tuple[int, ...]


class Framer:
    """Combines received bytes and descriptors into frames. Sans-I/O, except that it closes descriptors."""

    def __init__(self) -> None:
        self._data, self._descriptors = bytearray(), list[int]()

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> list[Frame]:
        """The frames that `data` completes."""
        if not self._data and not descriptors and not self._descriptors and len(data) >= _HEADER.size:
            length, count = _HEADER.unpack_from(data)
            if not count and length == len(data) - _HEADER.size and length <= limits.MESSAGE_BYTES:
                return [Frame(data[_HEADER.size :], ())]  # the common case: exactly one frame, without descriptors
        self._data += data
        self._descriptors += descriptors
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
            if self._descriptors and (not self._data or len(self._descriptors) > DESCRIPTORS):
                raise UsageError(f"{len(self._descriptors)} unexpected file descriptors")
        except UsageError:
            close_all(fd for frame in frames for fd in frame.descriptors)
            self.close()
            raise
        return frames

    def close(self) -> None:
        """Close the descriptors of incomplete frames."""
        close_all(self._descriptors)
        self._descriptors, self._data = [], bytearray()

    def _next(self) -> Frame | None:
        if len(self._data) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._data)
        if length > limits.MESSAGE_BYTES:
            raise UsageError(f"a message of {length} bytes; the most is {limits.MESSAGE_BYTES}")
        if count > DESCRIPTORS:
            raise UsageError(f"a message with {count} file descriptors; the most is {DESCRIPTORS}")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        if len(self._descriptors) < count:
            raise UsageError(f"a message lacks {count - len(self._descriptors)} of its {count} file descriptors")
        payload = bytes(self._data[_HEADER.size : end])
        del self._data[:end]
        frame_descriptors, self._descriptors = tuple(self._descriptors[:count]), self._descriptors[count:]
        return Frame(payload, frame_descriptors)


def frame(payload: bytes, descriptors: int = 0) -> bytes:
    """`payload` with its header."""
    if len(payload) > limits.MESSAGE_BYTES:
        raise UsageError(
            f"a message of {len(payload)} bytes; the most is {limits.MESSAGE_BYTES}",
            hint="ask for fewer ranges at once",
        )
    return _HEADER.pack(len(payload), descriptors) + payload


def receive(sock: socket.socket, *, wait: bool = True) -> tuple[bytes, list[int]]:
    """Receive bytes and descriptors; (b"", []) at the end of the stream.

    If more descriptors arrive than fit, the kernel closes the excess and this raises `UsageError`. Without `wait`, or on
    a non-blocking socket, raises `BlockingIOError` when no data is available.
    """
    data, ancillary, flags, _ = sock.recvmsg(CHUNK, _ANCILLARY, _CLOEXEC if wait else _CLOEXEC | _DONTWAIT)
    if not ancillary and not flags & _TRUNCATED:
        return data, []
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if flags & _TRUNCATED:
        close_all(descriptors)
        raise UsageError("a message with too many file descriptors")
    return data, list(descriptors)


def send(sock: socket.socket, data: memoryview | bytes, descriptors: Sequence[int] = (), *, wait: bool = True) -> int:
    """Send as much of `data` as the socket accepts, and return that size. The descriptors go with the first byte.

    Without `wait`, or on a non-blocking socket, raises `BlockingIOError` when the socket accepts nothing now.
    """
    flags = _NOSIGNAL if wait else _NOSIGNAL | _DONTWAIT
    if not descriptors:
        return sock.send(data, flags)
    rights = array.array("i", descriptors)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], flags)


def connect(sock: socket.socket, path: str, timeout: float) -> None:
    """Connect within `timeout` seconds.

    On a socket with a timeout, `connect` fails at once when the accept queue is full. It is repeated until it succeeds or
    the time is over.
    """
    until = time.monotonic() + timeout
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def send_all(sock: socket.socket, data: bytes, descriptors: Sequence[int], timeout: float) -> None:
    """Send all of `data`, with the descriptors. `DeadlineError` if the daemon accepts nothing for `timeout` seconds."""
    view, until = memoryview(data), 0.0
    while view:
        try:
            view, descriptors = view[send(sock, view, descriptors, wait=False) :], ()
        except BlockingIOError:
            until = until or time.monotonic() + timeout
            writable = select.poll()
            writable.register(sock, select.POLLOUT)
            if not writable.poll(max(0.0, until - time.monotonic()) * 1000):
                raise DeadlineError(f"the sidecar read no data for {timeout:g} s") from None


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the peer process, as the kernel recorded them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
