"""The directories of a cache's tiers, the files in them, and how blocks are written to those files.

Purpose: create, adopt and remove cache files, and remember which disks fail. A `PersistentFile` is `<name>.blocks` with
a map `<name>.map` that lists its blocks, so a restarted daemon begins with the blocks that the last one fetched
(docs/design/0002).
Invariants: the engine calls `Disks` under its lock. A block is listed only after it was written, and its digest is
checked after a restart before any reader gets the bytes. A file that does not match its map (size, owner, type) is
removed unread. One daemon at a time owns a directory of persistent files. When a block has two attempts, only one of
them writes piece by piece. The block belongs to the attempt that completes it first; the other one writes nothing
afterwards. So a block's bytes and its digest come from one attempt.
Failure behaviour: when a disk cannot be written, the engine logs one warning, and tries the disk again after
`RECOVER_SECONDS`. Blocks that it holds are still served. A write error is a `DiskError`. A failed fetch may leave bytes
in the file; they are not listed, and the next fetch overwrites them. If a block cannot be added to the map, it is lost
at the next start. Damaged maps are removed together with their files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from headrace.dataio.cache.blocks import BlockDirectory, BlockFile, Descriptor
from headrace.dataio.cache.plan.events import Create, ObjectId
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.log import get_logger, warn_once

RECOVER_SECONDS = 30.0

_log = get_logger(__name__)


class TierDirectory(msgspec.Struct, frozen=True):
    """A directory for cache files, with its maximum size in bytes.

    With `keep`, files outlive the engine, and the next engine adopts them. Then only one engine at a time may use the
    directory.
    """

    path: Path
    budget: int
    keep: bool = False


class Disks:
    """The cache files by number. `tiers`: fastest first."""

    def __init__(self, tiers: Sequence[TierDirectory], block_bytes: int, clock: Clock) -> None:
        self.tiers, self._block_bytes, self._clock = tiers, block_bytes, clock
        self.files: dict[int, BlockFile] = {}
        self._paused: dict[int, float] = {}  # failed tiers, and when to try them again

    def create(self, create: Create) -> None:
        """Create an empty file; `OSError` when its disk fails."""
        tier = self.tiers[create.tier]
        self.files[create.file] = (
            create_persistent(tier.path, create.object, self._block_bytes)
            if create.keep and tier.keep
            else BlockDirectory(tier.path).create(create.object.size)
        )

    def drop(self, file: int) -> bool:
        """Forget and unlink a file; returns whether it existed."""
        dropped = self.files.pop(file, None)
        if dropped is not None:
            dropped.unlink()
        return dropped is not None

    def remaining(self) -> Iterator[tuple[int, AdoptedFile]]:
        """The files that an earlier engine left, as (tier, file). Blocks are verified when they are first requested."""
        for number, tier in enumerate(self.tiers):
            if tier.keep:
                for found in adopt(tier.path, self._block_bytes):
                    yield number, found

    # disk errors

    @property
    def paused(self) -> bool:
        """Whether any tier is paused after an error."""
        return bool(self._paused)

    def pause(self, tier: int, error: OSError) -> None:
        """Stop using the tier for `RECOVER_SECONDS`."""
        self._paused[tier] = self._clock.monotonic() + RECOVER_SECONDS
        all_failed = len(self._paused) == len(self.tiers)
        instead = "reading from the store directly" if all_failed else "using the other tiers"
        warn_once(_log, f"the cache in {self.tiers[tier].path} cannot be written ({error.strerror}): {instead}")

    def recovered(self) -> list[int]:
        """End the pauses that are over; returns their tiers."""
        found = [tier for tier, until in self._paused.items() if self._clock.monotonic() >= until]
        for tier in found:
            del self._paused[tier]
        return found


_MAGIC = b"headrace-cache-1"
_HEAD = struct.Struct("<16sIIQ")  # magic, block size, bytes of the object's name, digest of it
_RECORD = struct.Struct("<IQ")  # block, XXH3-64 of its bytes
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
NAME_BYTES = 16 << 10
MAP_BYTES = 64 << 20

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[tuple[str, str, int, float]] = msgspec.msgpack.Decoder(tuple[str, str, int, float])


def digest(data: memoryview | bytes) -> int:
    """The digest of a block, as a map lists it."""
    return xxhash.xxh3_64_intdigest(data)


class PersistentFile(BlockFile):
    """A cache file with a name.

    `listing` is its map, open for appending. `digests` are the digests of the blocks that an earlier daemon listed.
    """

    __slots__ = ("_listing", "_path", "digests")

    def __init__(self, path: Path, *, writer: Descriptor, reader: Descriptor, listing: Descriptor, size: int) -> None:
        super().__init__(writer, reader, size)
        self._path, self._listing = path, listing
        self.digests: dict[int, int] = {}

    def wrote(self, block: int, digest: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._listing.fileno(), _RECORD.pack(block, digest))

    def unlink(self) -> None:
        # the map goes first: a file without a map is removed at the next start
        for path in (_map_of(self._path), self._path):
            with contextlib.suppress(OSError):
                path.unlink()


class AdoptedFile(msgspec.Struct, frozen=True):
    """A file of an earlier daemon, and its object."""

    object: ObjectId
    file: PersistentFile


def create_persistent(directory: Path, obj: ObjectId, block_bytes: int) -> PersistentFile:
    """A new empty file for `obj`; `OSError` when the disk is full or the directory is missing."""
    path = directory / f"{secrets.token_hex(8)}.blocks"
    writer = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        os.ftruncate(writer.fileno(), obj.size)
        reader = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        listing = Descriptor(os.open(_map_of(path), _APPEND | os.O_CREAT | os.O_EXCL, 0o600))
        name = _encode((obj.source, obj.key, obj.size, obj.modified))
        os.write(listing.fileno(), _HEAD.pack(_MAGIC, block_bytes, len(name), digest(name)) + name)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return PersistentFile(path, writer=writer, reader=reader, listing=listing, size=obj.size)


def adopt(directory: Path, block_bytes: int) -> Iterator[AdoptedFile]:
    """Yield the usable files in `directory`, most recently written last, and remove the others."""
    maps = [(path.stat().st_mtime_ns, path) for path in directory.glob("*.map")]
    mapped = {path.with_suffix(".blocks") for _, path in maps}
    for orphan in set(directory.glob("*.blocks")) - mapped:
        _remove(orphan)
    for _, path in sorted(maps):
        try:
            found = _open(path, block_bytes)
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            _log.warning("removing an unusable cache file of an earlier daemon: %s", error)
            _remove(path, path.with_suffix(".blocks"))
            continue
        yield found


def _open(map_path: Path, block_bytes: int) -> AdoptedFile:
    obj, digests = _read_map(map_path, block_bytes)
    path = map_path.with_suffix(".blocks")
    writer = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    found = os.fstat(writer.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != obj.size:
        raise ValueError(f"{path.name} is not the file that its map describes")
    reader = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    file = PersistentFile(
        path, writer=writer, reader=reader, listing=Descriptor(os.open(map_path, _APPEND)), size=obj.size
    )
    file.digests = digests
    return AdoptedFile(obj, file)


def _read_map(path: Path, block_bytes: int) -> tuple[ObjectId, dict[int, int]]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size > MAP_BYTES:
            raise ValueError(f"{path.name} is too large for a map")
        data = memoryview(os.read(fd, MAP_BYTES))
    finally:
        os.close(fd)
    magic, size, length, expected = _HEAD.unpack_from(data)
    name = bytes(data[_HEAD.size : _HEAD.size + min(length, NAME_BYTES)])
    if magic != _MAGIC or size != block_bytes or digest(name) != expected:
        raise ValueError(f"{path.name} is not a map of blocks of {block_bytes} bytes")
    obj = ObjectId(*_decode.decode(name))
    blocks = -(-obj.size // block_bytes)
    records = data[_HEAD.size + length :]
    whole = records[: len(records) // _RECORD.size * _RECORD.size]  # the last one may be incomplete
    return obj, {block: found for block, found in _RECORD.iter_unpack(whole) if block < blocks}


def _map_of(path: Path) -> Path:
    return path.with_suffix(".map")


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


class DiskError(Exception):
    """The cache's own disk failed with `error`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class SupersededError(Exception):
    """Another attempt has written the whole block."""


class PendingBlock:
    """A block that is being fetched into a file. Safe to share between the threads of its attempts."""

    __slots__ = ("_block", "_file", "_first", "_lock", "_written")

    def __init__(self, file: BlockFile, block: int, first: int) -> None:
        self._file, self._block, self._first = file, block, first
        self._lock, self._written = threading.Lock(), False

    def start_writer(self) -> BlockWriter:
        """A writer for the attempt that writes piece by piece."""
        return BlockWriter(self._first, xxhash.xxh3_64() if isinstance(self._file, PersistentFile) else None, self)

    def write_all(self, view: memoryview) -> None:
        """Write the whole block at once, if no attempt has completed it."""
        with self._lock:
            if not self._written:
                self._write(self._first, view)
                self._file.wrote(self._block, digest(view) if isinstance(self._file, PersistentFile) else 0)
                self._written = True

    def write_piece(self, offset: int, piece: memoryview) -> None:
        """Write a piece; `SupersededError` when the other attempt has written the whole block."""
        with self._lock:
            if self._written:
                raise SupersededError
            self._write(offset, piece)

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            self._file.write(offset, data)
        except OSError as error:
            raise DiskError(error) from None

    def finish(self, found: int) -> None:
        """Complete the block after all pieces are written; `found` is their digest."""
        with self._lock:
            if not self._written:
                self._file.wrote(self._block, found)
            self._written = True


class BlockWriter:
    """Writes a block piece by piece, for one attempt.

    Call `write` for every piece in order, then `finish`. If the store restarts the read, call `write` again from the first
    piece.
    """

    __slots__ = ("_first", "_hash", "_part")

    def __init__(self, first: int, hash: xxhash.xxh3_64 | None, part: PendingBlock) -> None:
        self._first, self._hash, self._part = first, hash, part

    def write(self, offset: int, piece: memoryview) -> None:
        if self._hash is not None:
            if offset == self._first:
                self._hash.reset()
            self._hash.update(piece)
        self._part.write_piece(offset, piece)

    def finish(self) -> None:
        self._part.finish(self._hash.intdigest() if self._hash is not None else 0)
