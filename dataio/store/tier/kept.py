"""One object of the tier: read, and in the making; and a writer's claim on the budget.

Invariants: an object has its name only when it is whole and carries its label. `Writer.digest` is of the bytes that were given,
not of those that the disk has. A claim is a file that its writer holds locked, so it ends with the process.
Failure behaviour: `CapacityError` when there is no room, `OSError` of the disk; a file without a sound label is no object.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.contract import Buffer

MAGIC = b"MLRKEPT1"
ROOM_BYTES = 64 * MIB
"""What a writer reserves at a time where nothing has to go for it."""
_TAIL = struct.Struct("<I8s")
_LABEL_BYTES = 8192
_COUNT = struct.Struct("<Q")


class Room(Protocol):
    """The directory, as a writer sees it."""

    @property
    def root(self) -> Path: ...
    def path_of(self, source: str, key: str) -> Path: ...
    def locked(self) -> AbstractContextManager[None]: ...
    def make_room(self, size: int, claim: Callable[[int], None]) -> None: ...


class Label(msgspec.Struct, array_like=True, frozen=True):
    """Behind an object's bytes: what it is. `digest` is XXH3-128 of the bytes."""

    source: str
    key: str
    size: int
    digest: bytes


_label = msgspec.msgpack.Decoder(Label)


class Held:
    """An object, open for reading; what is read stays the same when the object is dropped."""

    def __init__(self, fd: int, label: Label) -> None:
        self._fd, self.label = fd, label

    @property
    def size(self) -> int:
        return self.label.size

    def fill(self, offset: int, buffer: memoryview) -> bool:
        """Whether `buffer` now holds the bytes from `offset`. OSError when the disk fails."""
        if offset < 0 or offset + len(buffer) > self.size:
            return False
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not got:
                return False
            done += got
        return True

    def pieces(self, start: int = 0, size: int = 4 * MIB) -> Iterator[memoryview]:
        """The bytes from `start`, each piece in memory of its own. `CorruptionError` when the file has become shorter."""
        for at in range(start, self.size, size):
            piece = memoryview(bytearray(min(size, self.size - at)))
            if not self.fill(at, piece):
                raise CorruptionError(f"the kept copy of {self.label.key} is shorter than it was")
            yield piece

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        self.close()


class Writer:
    """One object in the making. Not thread-safe."""

    def __init__(self, reservation: Reservation, path: Path, source: str, key: str) -> None:
        self._reservation, self._path = reservation, path
        self.source, self.key, self.size = source, key, 0
        self._digest = xxhash.xxh3_128()
        self._behind = len(_behind(Label(source, key, 2**63, bytes(16))))  # at most; claimed with the first bytes
        self._claimed = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def digest(self) -> bytes:
        """XXH3-128 of what was written so far."""
        return bytes(self._digest.digest())

    def write(self, data: Buffer) -> None:
        """Append; `CapacityError` when there is no room. What was written before stays readable by `written`."""
        view = memoryview(data).cast("B")
        self._take(len(view))
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self.size + done)
        self._digest.update(view)
        self.size += len(view)

    def written(self, piece: int = 4 * MIB) -> Iterator[bytes]:
        """What `write` has taken, to be written elsewhere instead."""
        for at in range(0, self.size, piece):
            yield os.pread(self._fd, min(piece, self.size - at), at)

    def commit(self) -> Label:
        """Give it its name: from now on it is an object."""
        label = Label(self.source, self.key, self.size, self.digest)
        self._take(0)
        os.pwrite(self._fd, _behind(label), self.size)
        self._close()
        self._reservation.become(self._path, self.source, self.key, self._claimed)
        return label

    def discard(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)

    def _take(self, size: int) -> None:
        if self._claimed == 0:
            size += self._behind
        self._reservation.take(size)
        self._claimed += size

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Reservation:
    """A writer's claim on the budget; grows as it writes, and ends with its process at the latest. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._folder = room.root / "writing" / secrets.token_hex(8)
        hidden = self._folder.with_name(f".{self._folder.name}")  # until it is locked, nobody takes it for a dead one's
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self._folder)
        self._claim = self._used = self._files = 0

    def writer(self, source: str, key: str) -> Writer:
        self._files += 1
        return Writer(self, self._folder / str(self._files), source, key)

    def take(self, size: int) -> None:
        """Before `size` more bytes are written."""
        if self._used + size > self._claim:
            self._room.make_room(size, lambda granted: self._say(self._claim + granted))
        self._used += size

    def become(self, path: Path, source: str, key: str, size: int) -> None:
        """The file is an object now, and `size` bytes of the claim with it. Under the room's lock: whoever counts sees the
        bytes once, neither missed nor twice."""
        with self._room.locked():
            os.replace(path, self._room.path_of(source, key))
            self._used -= size
            self._say(self._claim - size)

    def close(self) -> None:
        """Give back the rest, and remove what was not committed."""
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        self._lock = -1

    def _say(self, claim: int) -> None:
        os.pwrite(self._lock, _COUNT.pack(claim), 0)
        self._claim = claim


def _behind(label: Label) -> bytes:
    """What follows the object's bytes in its file."""
    encoded = msgspec.msgpack.encode(label)
    return encoded + _TAIL.pack(len(encoded), MAGIC)


def open_at(path: Path, source: str, key: str) -> Held | None:
    """The object in this file, or None when it is not there whole."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    label = _read_label(fd)
    if label is None or (label.source, label.key) != (source, key):
        os.close(fd)
        return None
    return Held(fd, label)


def _read_label(fd: int) -> Label | None:
    """The label behind the bytes, when it is one and fits them."""
    try:
        end = os.fstat(fd).st_size
        length, magic = _TAIL.unpack(os.pread(fd, _TAIL.size, max(end - _TAIL.size, 0)))
        if magic != MAGIC or length > _LABEL_BYTES:
            return None
        at = end - _TAIL.size - length
        label = _label.decode(os.pread(fd, length, at)) if at >= 0 else None
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return None
    return label if label is not None and label.size == at else None


def claim_of(folder: Path) -> int | None:
    """What a living writer may still write; None for a dead one's folder."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0 if _is_young(folder) else None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return 0 if _is_young(folder) else None
    except BlockingIOError:
        claim = os.pread(fd, _COUNT.size, 0)
        return _COUNT.unpack(claim)[0] if len(claim) == _COUNT.size else 0
    finally:
        os.close(fd)


def _is_young(folder: Path) -> bool:
    """Writers of earlier releases locked their folder a moment after they had made it."""
    try:
        return time.time() - folder.lstat().st_mtime < 5
    except OSError:
        return False
