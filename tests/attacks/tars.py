"""Tars that are no shards: each with the error that it must be, made by code rather than kept as files.

`ATTACKS` maps a name to the evil bytes that follow one good member (`GOOD`), the class of the error and words of its message.
"""

from __future__ import annotations

import tarfile

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards import tar


def archive(members: list[tuple[str, bytes]]) -> bytes:
    placed, size = tar.layout((name, len(data)) for name, data in members)
    whole = b"".join(tar.stream(placed, ([data] for _, data in members)))
    assert len(whole) == size
    return whole


def header(name: str = "b.mp4", kind: bytes = b"0", size: int | bytes = 4, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[-512:])
    if isinstance(size, bytes):
        block[124:136] = size.ljust(12, b"\0")
    else:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return header("pax", kind, len(records)) + records.ljust(tar.padded(len(records)), b"\0")


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length += 1
    return str(length).encode() + body


GOOD = archive([("a.mp4", b"good")])[: -len(tar.END)]
BODY = b"evil".ljust(512, b"\0")
ATTACKS: dict[str, tuple[bytes, type[HeadraceError], str]] = {
    "dot dot": (header("../b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "dot dot inside": (header("a/../../b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "absolute": (header("/etc/b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "backslash": (header("..\\b.mp4") + BODY, UnsupportedError, "leave its folder"),
    "no name": (header("") + BODY, UnsupportedError, "leave its folder"),
    "symbolic link": (header(kind=b"2", size=0, link="/etc/passwd"), UnsupportedError, "symbolic link"),
    "hard link": (header(kind=b"1", size=0, link="a.mp4"), UnsupportedError, "hard link"),
    "character device": (header(kind=b"3", size=0), UnsupportedError, "device"),
    "block device": (header(kind=b"4", size=0), UnsupportedError, "device"),
    "pipe": (header(kind=b"6", size=0), UnsupportedError, "pipe"),
    "gnu sparse": (header(kind=b"S") + BODY, UnsupportedError, "sparse"),
    "unknown kind": (header(kind=b"Z") + BODY, UnsupportedError, "type b'Z'"),
    "gnu long link": (header("././@LongLink", b"K", 4) + BODY, UnsupportedError, "type b'K'"),
    "multi-volume": (header(kind=b"M") + BODY, UnsupportedError, "type b'M'"),
    "gnu dump directory": (header(kind=b"D", size=0), UnsupportedError, "type b'D'"),
    "hard link with a payload": (header(kind=b"1", link="a.mp4") + BODY, UnsupportedError, "hard link"),
    "base 256 beyond": (header(size=b"\x80" + (1 << 40).to_bytes(11, "big")) + BODY, CorruptionError, "truncated"),
    "pax size override": (
        pax(record("size", "0") + record("size", "2000")) + header() + BODY,
        CorruptionError,
        "truncated",
    ),
    "pax sparse 0.0": (pax(record("GNU.sparse.map", "0,4")) + header() + BODY, UnsupportedError, "sparse"),
    "pax record of no length": (pax(b"0 path=b.mp4\n") + header() + BODY, CorruptionError, "malformed"),
    "pax record length of many digits": (
        pax(b"9" * 400 + b" path=b\n") + header() + BODY,
        CorruptionError,
        "malformed",
    ),
    "truncated payload": (header(size=5000) + BODY, CorruptionError, "truncated"),
    "checksum of another header": (header()[:148] + b"0000000\0" + header()[156:] + BODY, CorruptionError, "checksum"),
    "volume": (header(kind=b"V", size=0), UnsupportedError, "type b'V'"),
    "huge": (header(size=0o77777777777) + BODY, CorruptionError, "truncated"),
    "huge in base 256": (header(size=b"\x80" + b"\x3f" * 11) + BODY, CorruptionError, "impossible number"),
    "negative": (header(size=b"\xff" * 11 + b"\xfe") + BODY, CorruptionError, "impossible number"),
    "no number": (header(size=b"12x4") + BODY, CorruptionError, "in place of a number"),
    "minus sign": (header(size=b"-4") + BODY, CorruptionError, "in place of a number"),
    "damaged": (b"\x01" + header()[1:] + BODY, CorruptionError, "checksum"),
    "pax dot dot": (pax(record("path", "../b.mp4")) + header() + BODY, UnsupportedError, "leave its folder"),
    "pax nul": (pax(record("path", "b\0.mp4")) + header() + BODY, UnsupportedError, "leave its folder"),
    "pax negative": (pax(record("size", "-5")) + header() + BODY, CorruptionError, "impossible size"),
    "pax huge": (pax(record("size", "9" * 30)) + header() + BODY, CorruptionError, "impossible size"),
    "pax beyond": (pax(record("size", "9999")) + header() + BODY, CorruptionError, "truncated"),
    "pax sparse": (pax(record("GNU.sparse.major", "1")) + header() + BODY, UnsupportedError, "sparse"),
    "pax global path": (pax(record("path", "b.mp4"), b"g") + header() + BODY, UnsupportedError, "global"),
    "pax lies on length": (pax(b"99 path=b.mp4\n") + header() + BODY, CorruptionError, "malformed"),
    "pax without equals": (pax(b"8 path\n\n") + header() + BODY, CorruptionError, "pax record|malformed"),
    "pax not utf-8": (pax(b"13 path=\xff\xff\xff\xff\n") + header() + BODY, CorruptionError, "damaged extended"),
    "pax at the end": (pax(record("path", "b.mp4")), CorruptionError, "after an extended header"),
    "gnu long dot dot": (
        header("././@LongLink", b"L", 9) + b"../b.mp4\0".ljust(512, b"\0") + header() + BODY,
        UnsupportedError,
        "leave its folder",
    ),
    "oversize header": (
        header("pax", b"x", limits.TAR_HEADER_BYTES + 1) + bytes(limits.TAR_HEADER_BYTES + 512),
        UnsupportedError,
        "larger than",
    ),
    "many headers": (
        pax(record("comment", "x" * (limits.TAR_HEADER_BYTES // 2 - 100))) * 3 + header() + BODY,
        UnsupportedError,
        "larger than",
    ),
}
