"""The directories of a cache's tiers, the files in them, and how blocks are written to those files.

Purpose: create, adopt and remove cache files, and remember which disks fail. A `PersistentFile` is `<name>.blocks` with
a map `<name>.map` that lists its blocks, so a restarted daemon begins with the blocks that the last one fetched
(docs/design/0002).
Invariants: the engine calls `Disks` under its lock. A block is listed only after it was written, and its digest is
checked after a restart before any reader gets the bytes. A file that does not match its map (size, owner, type) is
removed unread. One daemon at a time owns a directory of persistent files. A persistent file costs no descriptor: it is
opened when it is read or written, and a `DescriptorPool` keeps the files that were used last open
(docs/design/0036). When a block has two attempts, only one of them writes piece by piece. The block belongs to the
attempt that completes it first; the other one writes nothing afterwards. So a block's bytes and its digest come from
one attempt.
Failure behaviour: when a disk cannot be written, the engine logs one warning, and tries the disk again after
`RECOVER_SECONDS`. Blocks that it holds are still served. A write error is a `DiskError`. A failed fetch may leave bytes
in the file; they are not listed, and the next fetch overwrites them. If a block cannot be added to the map, it is lost
at the next start. Damaged maps are removed together with their files. A file that was deleted meanwhile, and a process
without free descriptors, are an `OSError` of `reader` and `writer`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from headrace.dataio.cache.blocks import NO_DESCRIPTORS, BlockDirectory, BlockFile, Descriptor, DescriptorPool
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
    """The cache files by number. `tiers`: fastest first.

    At most `descriptors` stay open for files that are read or written at times. Unnamed files have one more each.
    """

    def __init__(self, tiers: Sequence[TierDirectory], block_bytes: int, clock: Clock, descriptors: int = 256) -> None:
        self.tiers, self._block_bytes, self._clock = tiers, block_bytes, clock
        self._pool = DescriptorPool(descriptors)
        self.files: dict[int, BlockFile] = {}
        self._paused: dict[int, float] = {}  # failed tiers, and when to try them again

    def create(self, create: Create) -> None:
        """Create an empty file; `OSError` when its disk fails."""
        tier = self.tiers[create.tier]
        self.files[create.file] = (
            create_persistent(tier.path, create.object, self._block_bytes, self._pool)
            if create.keep and tier.keep
            else BlockDirectory(tier.path, self._pool).create(create.object.size)
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
                for adopted_file in adopt(tier.path, self._block_bytes, self._pool):
                    yield number, adopted_file

    def clear(self) -> None:
        """Forget all files. Those with a name stay on the disk."""
        self.files.clear()
        self._pool.clear()

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
        warn_once(_log, f"the cache in {self.tiers[tier].path} cannot be written ({error.strerror}): {instead}", "node")

    def recovered(self) -> list[int]:
        """End the pauses that are over; returns their tiers."""
        tiers = [tier for tier, until in self._paused.items() if self._clock.monotonic() >= until]
        for tier in tiers:
            del self._paused[tier]
        return tiers


_MAGIC = b"headrace-cache-1"
_HEAD = struct.Struct("<16sIIQ")  # magic, block size, bytes of the object's name, digest of it
_RECORD = struct.Struct("<IQ")  # block, XXH3-64 of its bytes
_READ = os.O_RDONLY | os.O_NOFOLLOW
_WRITE = os.O_RDWR | os.O_NOFOLLOW
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
NAME_BYTES = 16 << 10
MAP_BYTES = 64 << 20

_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[tuple[str, str, int, float]] = msgspec.msgpack.Decoder(tuple[str, str, int, float])


def digest(data: memoryview | bytes) -> int:
    """The digest of a block, as a map lists it."""
    return xxhash.xxh3_64_intdigest(data)


class PersistentFile(BlockFile):
    """A cache file with a name, and its map. `records` is the part of the map that an earlier daemon wrote."""

    __slots__ = ("_directory", "_name", "records")

    def __init__(self, pool: DescriptorPool, directory: str, name: str, *, size: int, records: bytes = b"") -> None:
        super().__init__(pool, size)
        self._directory, self._name, self.records = directory, name, records

    def reader(self) -> Descriptor:
        return self._pool.get(self, self._path(".blocks"), _READ)

    def writer(self) -> Descriptor:
        return self._pool.get(self, self._path(".blocks"), _WRITE)

    def digest_of(self, block: int) -> int | None:
        """The digest of a block that an earlier daemon listed."""
        return newest_digest(self.records, block)

    def wrote(self, block: int, digest: int) -> None:
        with contextlib.suppress(OSError):
            listing = self._pool.get(self, self._path(".map"), _APPEND)  # open until it is written
            os.write(listing.fileno(), _RECORD.pack(block, digest))

    def unlink(self) -> None:
        # the map goes first: a file without a map is removed at the next start
        for path in (self._path(".map"), self._path(".blocks")):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._pool.drop(self, _READ, _WRITE, _APPEND)

    def _path(self, suffix: str) -> str:
        return f"{self._directory}/{self._name}{suffix}"


class AdoptedFile(msgspec.Struct, frozen=True):
    """A file of an earlier daemon, its object, and the blocks that its map lists.

    `unlisted`: the bytes on the disk that are in none of these blocks, such as extents. They are counted and not read.
    """

    object: ObjectId
    file: PersistentFile
    blocks: set[int]
    unlisted: int = 0


def create_persistent(directory: Path, obj: ObjectId, block_bytes: int, pool: DescriptorPool) -> PersistentFile:
    """A new empty file for `obj`; `OSError` when the disk is full or the directory is missing."""
    stem = secrets.token_hex(8)
    path = directory / f"{stem}.blocks"
    writer = Descriptor(os.open(path, _WRITE | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        os.ftruncate(writer.fileno(), obj.size)
        listing = Descriptor(os.open(path.with_suffix(".map"), _APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        name = _encode((obj.source, obj.key, obj.size, obj.modified))
        os.write(listing.fileno(), _HEAD.pack(_MAGIC, block_bytes, len(name), digest(name)) + name)
    except OSError:
        _remove(path.with_suffix(".map"), path)
        raise
    return PersistentFile(pool, os.fspath(directory), stem, size=obj.size)


def adopt(directory: Path, block_bytes: int, pool: DescriptorPool) -> Iterator[AdoptedFile]:
    """Yield the usable files in `directory`, most recently written last, and remove the others.

    It opens one file at a time. `OSError` if the process has no descriptor for that.
    """
    maps, blocks = list[tuple[int, str]](), dict[str, os.stat_result]()
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            stem, dot, suffix = entry.name.rpartition(".")
            if suffix == "map" and dot:
                maps.append((entry.stat(follow_symlinks=False).st_mtime_ns, stem))
            elif suffix == "blocks" and dot:
                blocks[stem] = entry.stat(follow_symlinks=False)
    for orphan in blocks.keys() - {stem for _, stem in maps}:
        _remove(directory / f"{orphan}.blocks")
    for _, stem in sorted(maps):
        try:
            adopted_file = _adopt_file(directory, stem, blocks.get(stem), block_bytes, pool)
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise  # the file has no fault
            _log.warning("removing an unusable cache file of an earlier daemon: %s", error)
            _remove(directory / f"{stem}.map", directory / f"{stem}.blocks")
            continue
        yield adopted_file


def _adopt_file(
    directory: Path, stem: str, status: os.stat_result | None, block_bytes: int, pool: DescriptorPool
) -> AdoptedFile:
    folder = os.fspath(directory)
    obj, records = _read_map(f"{folder}/{stem}.map", block_bytes)
    is_own = status is not None and stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if status is None or not is_own or status.st_size != obj.size:
        raise ValueError(f"{stem}.blocks is not the file that its map describes")
    count = -(-obj.size // block_bytes)
    blocks = {block for block, _ in _RECORD.iter_unpack(records) if block < count}
    listed = sum(min(block_bytes, obj.size - block * block_bytes) for block in blocks)
    unlisted = status.st_blocks * 512 - listed
    file = PersistentFile(pool, folder, stem, size=obj.size, records=records)
    return AdoptedFile(obj, file, blocks, unlisted if unlisted > block_bytes // 4 else 0)  # else it is rounding


def _read_map(path: str, block_bytes: int) -> tuple[ObjectId, bytes]:
    """The object of a map, and its whole records."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if (size := os.fstat(fd).st_size) > MAP_BYTES:
            raise ValueError(f"{path} is too large for a map")
        data = os.read(fd, size)
    finally:
        os.close(fd)
    magic, size, length, expected_digest = _HEAD.unpack_from(data)
    name = data[_HEAD.size : _HEAD.size + min(length, NAME_BYTES)]
    if magic != _MAGIC or size != block_bytes or digest(name) != expected_digest:
        raise ValueError(f"{path} is not a map of blocks of {block_bytes} bytes")
    source, key, size, modified = _decode.decode(name)
    records = data[_HEAD.size + length :]
    whole_records = records[: len(records) // _RECORD.size * _RECORD.size]  # the last one may be incomplete
    return ObjectId(sys.intern(source), key, size, modified), whole_records


def newest_digest(records: bytes, block: int) -> int | None:
    """The digest in the last record of a block, if there is one."""
    encoded_block, at = struct.pack("<I", block), len(records)
    while (at := records.rfind(encoded_block, 0, at + len(encoded_block) - 1)) >= 0:
        if at % _RECORD.size == 0:
            newest: int = _RECORD.unpack_from(records, at)[1]
            return newest
    return None


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


class DiskError(Exception):
    """The cache's own disk failed with `error`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def out_of_descriptors(error: OSError) -> bool:
    """Whether the process, or the machine, only has too many open files. If so, log one warning."""
    exhausted = error.errno in NO_DESCRIPTORS
    if exhausted:
        warn_once(
            _log,
            "the cache's files cannot be opened, because this process has too many open files: reading from the store "
            "directly (raise the limit, LimitNOFILE= in systemd)",
            "node",
        )
    return exhausted


class SupersededError(Exception):
    """Another attempt has written the whole block."""


class PendingBlock:
    """A part that is being fetched into a file. Safe to share between the threads of its attempts.

    Only blocks get a record in the file's map. An extent has a `block` below 0.
    """

    __slots__ = ("_block", "_file", "_lock", "_start", "_written")

    def __init__(self, file: BlockFile, block: int, first: int) -> None:
        self._file, self._block, self._start = file, block, first
        self._lock, self._written = threading.Lock(), False

    def start_writer(self) -> BlockWriter:
        """A writer for the attempt that writes piece by piece."""
        return BlockWriter(self._start, xxhash.xxh3_64() if isinstance(self._file, PersistentFile) else None, self)

    def write_all(self, view: memoryview) -> None:
        """Write the whole block at once, if no attempt has completed it."""
        with self._lock:
            if not self._written:
                self._write(self._start, view)
                if self._block >= 0:
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

    def finish(self, block_digest: int) -> None:
        """Complete the block after all pieces are written; `block_digest` is their digest."""
        with self._lock:
            if not self._written and self._block >= 0:
                self._file.wrote(self._block, block_digest)
            self._written = True


class BlockWriter:
    """Writes a block piece by piece, for one attempt.

    Call `write` for every piece in order, then `finish`. If the store restarts the read, call `write` again from the first
    piece.
    """

    __slots__ = ("_hash", "_part", "_start")

    def __init__(self, first: int, hash: xxhash.xxh3_64 | None, part: PendingBlock) -> None:
        self._start, self._hash, self._part = first, hash, part

    def write(self, offset: int, piece: memoryview) -> None:
        if self._hash is not None:
            if offset == self._start:
                self._hash.reset()
            self._hash.update(piece)
        self._part.write_piece(offset, piece)

    def finish(self) -> None:
        self._part.finish(self._hash.intdigest() if self._hash is not None else 0)
