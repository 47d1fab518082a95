"""Cache files that outlive their daemon: `<name>.blocks`, and beside it `<name>.map`, which says what is in it.

Purpose: a daemon that starts again begins with what the last one had fetched. Format and reasons: docs/design/0002.
Invariants: a block is listed only after it was written; what is listed is a claim, checked against its digest before anybody
gets the bytes. A file that does not fit its map (size, owner, kind) is removed unread. One daemon at a time owns the directory.
Failure behaviour: a map that cannot be written loses its blocks at the next start, and nothing else; damaged maps are removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from headrace.dataio.cache.blocks import BlockFile, Descriptor
from headrace.dataio.cache.events import ObjectId
from headrace.dataio.core.log import get_logger

_MAGIC = b"headrace-cache-1"
_HEAD = struct.Struct("<16sIIQ")  # magic, block size, bytes of the object's name, digest of it
_RECORD = struct.Struct("<IQ")  # block, XXH3-64 of its bytes
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
NAME_BYTES = 16 << 10
MAP_BYTES = 64 << 20

_log = get_logger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode: msgspec.msgpack.Decoder[tuple[str, str, int, float]] = msgspec.msgpack.Decoder(tuple[str, str, int, float])


def digest(data: memoryview | bytes) -> int:
    """What a map says of a block."""
    return xxhash.xxh3_64_intdigest(data)


class KeptFile(BlockFile):
    """A cache file with a name; `listing` is its map, open to be appended to. `digests` are those of the blocks that an earlier
    daemon listed."""

    __slots__ = ("_listing", "_path", "digests")

    def __init__(self, path: Path, writer: Descriptor, reader: Descriptor, listing: Descriptor, size: int) -> None:
        super().__init__(writer, reader, size)
        self._path, self._listing = path, listing
        self.digests: dict[int, int] = {}

    def wrote(self, block: int, digest: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._listing.fileno(), _RECORD.pack(block, digest))

    def unlink(self) -> None:
        for path in (_map_of(self._path), self._path):  # without its map a file is nothing
            with contextlib.suppress(OSError):
                path.unlink()


class Adopted(msgspec.Struct, frozen=True):
    """What a directory held of one object."""

    object: ObjectId
    file: KeptFile


def create(directory: Path, obj: ObjectId, block_bytes: int) -> KeptFile:
    """A new empty file for `obj`; OSError when there is no room or no directory."""
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
    return KeptFile(path, writer, reader, listing, obj.size)


def adopt(directory: Path, block_bytes: int) -> Iterator[Adopted]:
    """What is in `directory`, the file last written to last. Whatever cannot be used is removed."""
    maps = [(path.stat().st_mtime_ns, path) for path in directory.glob("*.map")]
    mapped = {path.with_suffix(".blocks") for _, path in maps}
    for orphan in set(directory.glob("*.blocks")) - mapped:
        _remove(orphan)
    for _, path in sorted(maps):
        try:
            found = _open(path, block_bytes)
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            _log.warning("a cache file that an earlier daemon left is of no use and removed: %s", error)
            _remove(path, path.with_suffix(".blocks"))
            continue
        yield found


def _open(map_path: Path, block_bytes: int) -> Adopted:
    obj, digests = _read_map(map_path, block_bytes)
    path = map_path.with_suffix(".blocks")
    writer = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    found = os.fstat(writer.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != obj.size:
        raise ValueError(f"{path.name} is not the file that its map describes")
    reader = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    file = KeptFile(path, writer, reader, Descriptor(os.open(map_path, _APPEND)), obj.size)
    file.digests = digests
    return Adopted(obj, file)


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
    whole = records[: len(records) // _RECORD.size * _RECORD.size]  # the last one may be torn
    return obj, {block: found for block, found in _RECORD.iter_unpack(whole) if block < blocks}


def _map_of(path: Path) -> Path:
    return path.with_suffix(".map")


def _remove(*paths: Path) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
