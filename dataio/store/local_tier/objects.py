"""One object of the tier: reading it, writing it, and a writer's reservation of the budget.

Invariants: a file gets an object's name only when it is complete and ends with its label. `Writer.digest` covers the
bytes that the writer was given, not those on the disk. A reservation is a file that its writer keeps locked, so the
reservation ends with the process.

Failure behaviour: `CapacityError` if there is no space, and `OSError` from the disk. A file without a valid label
counts as absent.
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
from headrace.dataio.store.base import Buffer
from headrace.dataio.store.local_tier.spare import LEAST_BYTES

MAGIC = b"MLRKEPT1"
ROOM_BYTES = 64 * MIB
"""The most that a writer reserves at once, unless it needs more (`LocalTier.make_room`)."""
_TAIL = struct.Struct("<I8s")
_LABEL_BYTES = 8192
_COUNT = struct.Struct("<Q")


class TierDirectory(Protocol):
    """What a writer needs from the tier's directory."""

    @property
    def root(self) -> Path: ...
    def path_of(self, source: str, key: str) -> Path: ...
    def locked(self) -> AbstractContextManager[None]: ...
    def make_room(self, size: int, claim: Callable[[int], None]) -> None: ...
    def take_spare(self, target: Path, claim: Callable[[int], None]) -> int | None: ...


class Label(msgspec.Struct, array_like=True, frozen=True):
    """Describes an object, and follows its bytes in the file. `digest` is XXH3-128 of the bytes."""

    source: str
    key: str
    size: int
    digest: bytes


_label = msgspec.msgpack.Decoder(Label)


class TierObject:
    """An object that is open for reading. It stays readable after its removal from the tier.

    Its descriptor has a shared lock, so that the file is not used for another object (`spare`).
    """

    def __init__(self, fd: int, label: Label) -> None:
        self._fd, self.label = fd, label

    @property
    def size(self) -> int:
        return self.label.size

    def fill(self, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` from `offset`; False if the object is too short. `OSError` if the disk fails."""
        if offset < 0 or offset + len(buffer) > self.size:
            return False
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not count:
                return False
            done += count
        return True

    def pieces(self, start: int = 0, size: int = 4 * MIB) -> Iterator[memoryview]:
        """The bytes from `start`, each piece in its own memory. `CorruptionError` if the file became shorter."""
        for at in range(start, self.size, size):
            piece = memoryview(bytearray(min(size, self.size - at)))
            if not self.fill(at, piece):
                raise CorruptionError(f"the tier's copy of {self.label.key} became shorter")
            yield piece

    def parts(self, start: int, buffer: memoryview) -> Iterator[memoryview]:
        """As `pieces`, but all pieces are in `buffer`. Each is valid until the next one is requested."""
        for at in range(start, self.size, len(buffer)):
            part = buffer[: min(len(buffer), self.size - at)]
            if not self.fill(at, part):
                raise CorruptionError(f"the tier's copy of {self.label.key} became shorter")
            yield part

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        self.close()


class Writer:
    """Writes one object. Not thread-safe."""

    def __init__(self, reservation: Reservation, path: Path, source: str, key: str) -> None:
        self._reservation, self._path = reservation, path
        self.source, self.key, self.size = source, key, 0
        self._digest = xxhash.xxh3_128()
        self._trailer_bytes = len(
            _trailer(Label(source, key, 2**63, bytes(16)))
        )  # the label's longest form; reserved with the first bytes
        self._claimed = 0
        self._is_spare = self._looked_for_spare = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @property
    def digest(self) -> bytes:
        """XXH3-128 of the bytes written so far."""
        return bytes(self._digest.digest())

    def write(self, data: Buffer) -> None:
        """Append `data`. On `CapacityError` or `OSError`, `written` can still read the bytes written before."""
        view = memoryview(data).cast("B")
        if len(view) >= LEAST_BYTES and not self._looked_for_spare:
            self._use_spare()
        self._reserve(len(view))
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], self.size + done)
        self._digest.update(view)
        self.size += len(view)

    def written(self, piece: int = 4 * MIB) -> Iterator[bytes]:
        """Yield the bytes written so far, in pieces, so that the caller can write them to another store."""
        for at in range(0, self.size, piece):
            yield os.pread(self._fd, min(piece, self.size - at), at)

    def commit(self) -> Label:
        """Append the label, and give the file the object's name. From then on, readers find the object.

        On `OSError`, `written` can still read the bytes.
        """
        label = Label(self.source, self.key, self.size, self.digest)
        self._reserve(0)
        if self._is_spare:
            os.ftruncate(self._fd, self.size)
        os.pwrite(self._fd, _trailer(label), self.size)
        self._unlock()  # before readers find the object
        self._reservation.commit(self._path, self.source, self.key, self._claimed)
        self.close()  # last: if the commit fails, `written` can still read the bytes
        return label

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)

    def _use_spare(self) -> None:
        """Continue in a spare file, if there is one. The bytes written before, which are few, are copied."""
        self._looked_for_spare = True
        fd = self._reservation.take_spare(self._path.with_name(f"{self._path.name}-spare"))
        if fd is None:
            return
        at = 0
        try:
            for piece in self.written():
                at += os.pwrite(fd, piece, at)
            os.replace(self._path.with_name(f"{self._path.name}-spare"), self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._is_spare = fd, True

    def _reserve(self, size: int) -> None:
        if self._claimed == 0:
            size += self._trailer_bytes
        self._reservation.reserve(size)
        self._claimed += size

    def close(self) -> None:
        """Close the file. An object that is not committed stays unnamed, and is removed with the reservation."""
        if self._fd >= 0:
            self._unlock()
            os.close(self._fd)
        self._fd = -1
        self._reservation.forget(self)

    def _unlock(self) -> None:
        if self._is_spare:  # closing is not enough, because a forked child may have the file open
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Reservation:
    """A writer's share of the budget. Not thread-safe.

    It grows as the writer writes, and ends with the process at the latest.
    """

    def __init__(self, directory: TierDirectory) -> None:
        self._directory = directory
        self._folder = directory.root / "writing" / secrets.token_hex(8)
        hidden = self._folder.with_name(
            f".{self._folder.name}"
        )  # hidden until it is locked, so that no process mistakes it for a dead writer's folder
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self._folder)
        self._claim = self._used = self._files = 0
        self._writers = set[Writer]()

    def writer(self, source: str, key: str) -> Writer:
        self._files += 1
        writer = Writer(self, self._folder / str(self._files), source, key)
        self._writers.add(writer)
        return writer

    def reserve(self, size: int) -> None:
        """Reserve `size` more bytes before they are written."""
        if (missing := self._used + size - self._claim) > 0:
            self._directory.make_room(missing, lambda granted: self._set_claim(self._claim + granted))
        self._used += size

    def take_spare(self, target: Path) -> int | None:
        """Take a spare file of the tier, and reserve its bytes; None if there is none."""
        return self._directory.take_spare(target, lambda granted: self._set_claim(self._claim + granted))

    def commit(self, path: Path, source: str, key: str, size: int) -> None:
        """Give the file the object's name, and release `size` bytes of the reservation.

        Both happen under the tier's lock, so that a process that adds up the tier's size counts the bytes exactly once.
        """
        with self._directory.locked():
            os.replace(path, self._directory.path_of(source, key))
            self._used -= size
            self._set_claim(self._claim - size)

    def forget(self, writer: Writer) -> None:
        """The writer has ended."""
        self._writers.discard(writer)

    def close(self) -> None:
        """Release the reservation, and close and remove files that were not committed."""
        for writer in list(self._writers):
            writer.close()
        if self._lock >= 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
        self._lock = -1

    def _set_claim(self, claim: int) -> None:
        os.pwrite(self._lock, _COUNT.pack(claim), 0)
        self._claim = claim


def _trailer(label: Label) -> bytes:
    """Encode the label and the fixed-size end of the file, which follow the object's bytes."""
    encoded = msgspec.msgpack.encode(label)
    return encoded + _TAIL.pack(len(encoded), MAGIC)


def open_at(path: Path, source: str, key: str) -> TierObject | None:
    """Open the object in this file; None if it is absent or incomplete."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it was removed, and its file is being overwritten
        os.close(fd)
        return None
    label = _read_label(fd)
    if label is None or (label.source, label.key) != (source, key):
        os.close(fd)
        return None
    return TierObject(fd, label)


def _read_label(fd: int) -> Label | None:
    """Read the label at the end of the file; None if it is invalid or does not match the file's size."""
    try:
        end = os.fstat(fd).st_size
        length, magic = _TAIL.unpack(os.pread(fd, _TAIL.size, max(end - _TAIL.size, 0)))
        if magic != MAGIC or length > _LABEL_BYTES:
            return None
        label_start = end - _TAIL.size - length
        label = _label.decode(os.pread(fd, length, label_start)) if label_start >= 0 else None
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError, ValueError):
        return None
    return label if label is not None and label.size == label_start else None


def claim_of(folder: Path) -> int | None:
    """The bytes that a live writer has reserved and not yet committed; None if the folder's writer is dead."""
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
    """Whether the folder is less than five seconds old: earlier releases locked it a moment after creating it."""
    try:
        return time.time() - folder.lstat().st_mtime < 5
    except OSError:
        return False
