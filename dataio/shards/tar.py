"""Writing and reading tar shards. Writing is deterministic; reading does not trust the archive.

Purpose: shards have WebDataset's layout. Member `<key>.<ext>` belongs to the sample `<key>`, and the members of a
sample are adjacent. Any tar program, `webdataset` and DALI can read these shards. Shards made by other programs are
indexed in place.

Invariants:

* The same input gives the same bytes. Headers hold no time, owner or other data of the machine.
* The layout of a shard depends only on names and lengths. So the offset of every payload is known before the first byte
  is sent. `stream` holds one part of a payload in memory at a time.
* Every member that `scan` yields is a regular file inside the archive, with a relative name without `..`.

Failure behaviour: writing raises `TransientError` if the length of a payload differs from the layout. Reading raises
`CorruptionError` for a damaged or truncated archive, and `UnsupportedError` for members that a shard may not hold. Read
errors name the shard and the offset of the header.
"""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UnsupportedError
from headrace.dataio.store.joined import SHARD_PREFIX

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

BLOCK = 512
END = bytes(2 * BLOCK)
_BUFFER_BYTES = 64 * limits.KIB
_MEMBER_NAME = re.compile(r"(?P<key>(?:.*/)?[^/.]+)\.(?P<ext>[^/]+)", re.DOTALL)
_SIZE_LIMIT = 1 << 62
_COMPRESSION = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
"""The first bytes of compressed files."""
MAX_SAMPLE_MEMBERS = 10_000
"""The most members that a sample may have, in a tar or in a folder."""
_PLAIN_LENGTH = 8**11
"""A length of this many bytes or more needs a pax header."""
_DALI_VERSION = "v1.1"


@dataclass(frozen=True, slots=True)
class MemberLayout:
    """One member in the layout of a shard: its header bytes, and the offset and length of its payload."""

    name: str
    header: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TarMember:
    """One regular file in a shard. `header` is the offset of its first header, and `offset` that of its payload."""

    name: str
    key: str
    ext: str
    header: int
    offset: int
    length: int


# --- writing


def header_for(name: str, length: int) -> bytes:
    """Return the header of a regular file: ustar, preceded by a pax header if the name or the length needs one."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = length, 0o644, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padded(length: int) -> int:
    """Round `length` up to whole blocks."""
    return -(-length // BLOCK) * BLOCK


def member_bytes(name: str, length: int) -> int:
    """Return the bytes that a member takes in a shard, including header and padding."""
    is_plain = length < _PLAIN_LENGTH and len(name) <= tarfile.LENGTH_NAME and name.isascii()
    return (BLOCK if is_plain else len(header_for(name, length))) + padded(length)


def layout(members: Iterable[tuple[str, int]]) -> tuple[list[MemberLayout], int]:
    """Lay out (name, length) members in sequence. Return their layouts, and the size of the archive in bytes."""
    layouts, position = [], 0
    for name, length in members:
        header = header_for(name, length)
        layouts.append(MemberLayout(name, header, position + len(header), length))
        position += len(header) + padded(length)
    return layouts, position + len(END)


def stream(layouts: Sequence[MemberLayout], payloads: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the archive's bytes in parts. `payloads` yields the parts of each member, in the order of `layouts`."""
    for member, parts in zip(layouts, payloads, strict=True):
        yield member.header
        length = 0
        for part in parts:
            length += len(part)
            if length > member.length:
                break
            yield part
        if length != member.length:
            raise TransientError(
                f"{member.name} changed while it was being packed: {length} bytes instead of {member.length}",
                hint="pack again when no other process writes to the input",
            )
        yield bytes(padded(length) - length)
    yield END


# --- reading

ReadAt = Callable[[int, int], bytes]
"""A function of an offset and a length that returns exactly these bytes.

It is never called for bytes beyond the archive's size.
"""


def compressed_by(head: bytes) -> str | None:
    """Return the program that compressed the file with these first bytes (8 or more), or None."""
    return next((program for magic, program in _COMPRESSION.items() if head.startswith(magic)), None)


def scan(read_at: ReadAt, size: int, shard: str) -> Iterator[TarMember]:
    """Yield the members of an archive of `size` bytes, in order. `shard` is its name in errors.

    Directories, and members whose names have no key and extension (no dot, or a leading dot), are skipped, as in
    WebDataset.
    """
    buffer = _ReadBuffer(read_at, size)
    position = 0
    while True:
        start, extensions, extended_bytes = position, dict[str, str](), 0
        while True:
            block = _read_header(buffer, position, size, shard)
            if block is None:
                if position != start:
                    raise CorruptionError(f"{shard}: the archive ends after an extended header at offset {start}")
                return
            type_flag = block[156:157]
            if type_flag not in (b"x", b"g", b"L"):
                break
            length = _number(block[124:136], shard, position)
            extended_bytes += length
            if extended_bytes > limits.TAR_HEADER_BYTES:
                raise UnsupportedError(f"{shard}: extended header at offset {position} is larger than a shard may hold")
            _check_inside(position + BLOCK, length, size, shard, position)
            extensions |= _parse_extended(type_flag, buffer.read(position + BLOCK, length), shard, position)
            position += BLOCK + padded(length)
        name, length = _name_and_length(block, extensions, shard, position)
        _check_type(type_flag, name, shard, position)
        _check_inside(position + BLOCK, length, size, shard, position)
        match = _MEMBER_NAME.fullmatch(name)
        if type_flag != b"5" and match is not None:
            yield TarMember(name, match["key"], match["ext"].lower(), start, position + BLOCK, length)
        position += BLOCK + padded(length)


def samples(read_at: ReadAt, size: int, shard: str) -> Iterator[tuple[str, Iterator[TarMember]]]:
    """Yield the samples of the archive: the key and the members of each run of adjacent members with the same key.

    The caller must consume the members of a sample before it requests the next sample. The first member beyond
    `MAX_SAMPLE_MEMBERS` raises `UnsupportedError`.
    """
    for key, run in itertools.groupby(scan(read_at, size, shard), key=lambda member: member.key):
        yield key, _limited(run, key, shard)


def too_many(key: str) -> str:
    """Return the error text for a sample with too many members."""
    return f"the sample {key!r} has more than {MAX_SAMPLE_MEMBERS} members"


def _limited(run: Iterator[TarMember], key: str, shard: str) -> Iterator[TarMember]:
    for number, member in enumerate(run):
        if number == MAX_SAMPLE_MEMBERS:
            raise UnsupportedError(
                f"{shard}: {too_many(key)}; the first one above the limit is at offset {member.header}",
                hint="give each sample its own key: the part of a name before the first dot",
            )
        yield member


class _ReadBuffer:
    """Reads at least `_BUFFER_BYTES` at a time, so that one read covers the headers of many small members."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at, self._size = read_at, size
        self._start, self._bytes = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        if not self._start <= offset <= offset + length <= self._start + len(self._bytes):
            ahead = min(max(length, _BUFFER_BYTES), self._size - offset)
            self._start, self._bytes = offset, self._read_at(offset, ahead)
        at = offset - self._start
        return self._bytes[at : at + length]


def _read_header(buffer: _ReadBuffer, position: int, size: int, shard: str) -> bytes | None:
    """Read and check the header block at `position`. Return None at the end-of-archive mark."""
    if position + BLOCK > size:
        raise CorruptionError(f"{shard}: truncated: no end-of-archive mark at offset {position}, the size is {size}")
    block = buffer.read(position, BLOCK)
    if not any(block):
        if position + 2 * BLOCK > size or any(buffer.read(position + BLOCK, BLOCK)):
            raise CorruptionError(f"{shard}: truncated or damaged end-of-archive mark at offset {position}")
        return None
    without_checksum = block[:148] + b" " * 8 + block[156:]
    signed_sum = sum(b - 256 if b > 127 else b for b in without_checksum)  # of old tar programs
    sums = sum(without_checksum), signed_sum
    if _number(block[148:156], shard, position) not in sums:
        raise CorruptionError(f"{shard}: damaged header at offset {position}: its checksum does not match")
    return block


def _number(field: bytes, shard: str, position: int) -> int:
    if field[0] & 0x80:  # base 256: the next bit is the sign
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40 or value > _SIZE_LIMIT:
            raise CorruptionError(f"{shard}: header at offset {position} holds an impossible number")
        return value
    text = field.rstrip(b"\0 ").lstrip(b" ")
    if not re.fullmatch(rb"[0-7]*", text):
        raise CorruptionError(f"{shard}: header at offset {position} holds {text!r} in place of a number")
    return int(text or b"0", 8)


def _parse_extended(type_flag: bytes, data: bytes, shard: str, position: int) -> dict[str, str]:
    try:
        if type_flag == b"L":
            return {"path": data.split(b"\0", 1)[0].decode()}
        records = dict(_pax_records(data))
    except ValueError as error:
        raise CorruptionError(f"{shard}: damaged extended header at offset {position}: {error}") from error
    if any(key.startswith("GNU.sparse") for key in records):
        raise UnsupportedError(f"{shard}: sparse member at offset {position}")
    if type_flag == b"g" and records.keys() & {"path", "size", "linkpath"}:
        raise UnsupportedError(f"{shard}: global header at offset {position} sets a path or a size")
    return records if type_flag == b"x" else {}


def _pax_records(data: bytes) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(data):
        digits = re.compile(rb"([1-9][0-9]{0,8}) ").match(data, at)
        end = at + int(digits[1]) if digits else 0
        if digits is None or not digits.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ValueError("malformed pax record")
        key, equals, value = data[digits.end() : end - 1].partition(b"=")
        if not equals:
            raise ValueError("pax record without a value")
        yield key.decode(), value.decode() if key in (b"path", b"size") else ""
        at = end


def _name_and_length(block: bytes, extensions: dict[str, str], shard: str, position: int) -> tuple[str, int]:
    size_text = extensions.get("size")
    if size_text is None:
        length = _number(block[124:136], shard, position)
    elif size_text.isascii() and size_text.isdigit() and len(size_text) < 20:
        length = int(size_text)
    else:
        raise CorruptionError(
            f"{shard}: extended header before offset {position} gives the impossible size {size_text!r}"
        )
    if "path" in extensions:
        return extensions["path"], length
    raw = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    try:
        return (prefix + b"/" + raw if prefix else raw).decode(), length
    except UnicodeDecodeError as error:
        raise UnsupportedError(f"{shard}: name at offset {position} is not UTF-8") from error


def _check_type(type_flag: bytes, name: str, shard: str, position: int) -> None:
    types = {
        b"1": "hard link",
        b"2": "symbolic link",
        b"3": "device",
        b"4": "device",
        b"6": "pipe",
        b"S": "sparse file",
    }
    if type_flag not in (b"0", b"\0", b"5"):
        kind = types.get(type_flag, f"member of type {type_flag!r}")
        raise UnsupportedError(f"{shard}: {name!r} at offset {position} is a {kind}; a shard holds only regular files")
    segments = name.rstrip("/").split("/")
    if not name or name.startswith("/") or ".." in segments or "\0" in name or "\\" in name:
        raise UnsupportedError(f"{shard}: the name {name!r} at offset {position} could leave its folder")


def _check_inside(start: int, length: int, size: int, shard: str, position: int) -> None:
    if start + length > size:
        raise CorruptionError(
            f"{shard}: truncated: the member at offset {position} ends at {start + length}, the archive at {size}"
        )


# --- index files of DALI


def dali_index(dataset: Dataset, shard: str) -> str:
    """Return the index file of a shard for DALI's `readers.webdataset`, which then does not scan the shard.

    The file has one line for each sample, in the order of the shard, with the extension, payload offset and length of
    each member. The offsets come from the sample index, so they are also correct for members with pax and GNU headers.

    Args:
        dataset: an open version of the dataset.
        shard: the key of the shard, one of `dataset.document.shards`.

    Returns:
        The text of the file. Write it to a file, and pass the file's path to DALI in `index_paths`.

    Raises:
        NotFoundError: the version does not have this shard.
        UnsupportedError: the shard is not a tar, or an extension has white space or unprintable characters, which the
            format cannot express.
    """
    import pyarrow.compute as pc

    if shard.startswith(SHARD_PREFIX):
        raise UnsupportedError(
            f"{shard!r} joins files where they lie, and is no tar, so DALI cannot read it",
            hint="make tars of the files with `headrace pack`",
        )
    table = dataset.columns(["shard", "members"])
    rows = table.filter(pc.equal(table["shard"], shard))["members"]
    if shard not in {known.key for known in dataset.document.shards}:
        raise NotFoundError(
            f"{dataset.url} version {dataset.version} has no shard {shard!r}", hint="see `headrace info`"
        )
    return "\n".join([f"{_DALI_VERSION} {len(rows)}", *(_dali_line(members.as_py(), shard) for members in rows)]) + "\n"


def _dali_line(members: list[dict[str, Any]], shard: str) -> str:
    return " ".join(_dali_member(member, shard) for member in members)


def _dali_member(member: dict[str, Any], shard: str) -> str:
    if len(member["ext"].split()) != 1 or not member["ext"].isprintable():
        raise UnsupportedError(f"{shard}: DALI's index cannot name the extension {member['ext']!r}")
    return f"{member['ext']} {member['offset']} {member['length']}"
