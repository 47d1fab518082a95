"""MP4 and MOV: the boxes and tables of a file, read as arrays.

Purpose: when libav opens a file, it creates an object for every packet. This module reads the tables as numpy arrays
instead. `mp4_excerpt` (video) and `audio.excerpts.mp4` write the tables of an excerpt from a part of them.

Invariants: all functions are pure. A box is read only within its own length.

Failure behaviour: the functions that read tables raise one of `WRONG`. Errors of reading the file are raised unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core import limits
from headrace.loaders.fetch.partial_file import Media

EXTENSIONS = frozenset(["mp4", "m4a", "m4b", "m4v", "mov"])
WRONG = (struct.error, ValueError, KeyError, IndexError, ZeroDivisionError)
_MOST_BYTES = 64 * limits.MIB
"""Limit on the size of the tables."""
_MOST_OF_BRAND = 1 << 10
_DESCRIBING = (b"udta", b"meta")
_ONCE = 1 << 16
"""The rate of an edit that plays its media at normal speed."""

Ints = npt.NDArray[np.int64]
Stored = npt.NDArray[Any]
"""Integers in the file's byte order, in the file's memory."""
Boxes = Mapping[bytes, memoryview]


class Edit(msgspec.Struct, frozen=True):
    """The part of a track that is played: from its tick `media` on, for `seconds` (0 means to its end).

    It begins `start` seconds after the beginning of the file.
    """

    start: Fraction = Fraction(0)
    media: int = 0
    seconds: Fraction = Fraction(0)


def find(data: Media) -> memoryview | None:
    """The file's tables: the content of `moov`. None if there is none, or if it is too large."""
    at = 0
    while at + 16 <= len(data):
        size, kind, large = struct.unpack(">I4sQ", data[at : at + 16])
        size, head = (large, 16) if size == 1 else (size, 8)
        if kind == b"moov":
            return data[at + head : at + size] if head <= size <= min(_MOST_BYTES, len(data) - at) else None
        if size < head:  # the box extends to the end of the file, or is malformed
            return None
        at += size
    return None


def brand(data: Media) -> bytes:
    """The file's first box, if it names the kind of MP4, else b"". QuickTime describes some properties differently."""
    size, kind = struct.unpack(">I4s", data[:8])
    return bytes(data[:size]) if kind == b"ftyp" and size <= _MOST_OF_BRAND else b""


def inside(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield consecutive boxes as (kind, payload)."""
    at = 0
    while at + 8 <= len(view):
        size, kind = struct.unpack_from(">I4s", view, at)
        if size < 8 or at + size > len(view):
            raise ValueError(f"a box of {size} bytes")
        yield kind, view[at + 8 : at + size]
        at += size


def once(view: memoryview) -> Boxes:
    """The boxes by kind. Raises `ValueError` if a kind appears twice."""
    boxes = list(inside(view))
    if len(boxes) != len(dict(boxes)):
        raise ValueError("a box that comes twice")
    return dict(boxes)


def tracks(movie: Iterable[tuple[bytes, memoryview]]) -> list[memoryview]:
    """The tracks among a movie's boxes, in the order of libav's streams.

    libav makes a stream of each cover picture (`covr`), and several streams of one IAMF track. Later tracks then have
    other numbers, so they are left out, and libav reads such a file itself.
    """
    views = list[memoryview]()
    for kind, view in movie:
        if kind == b"trak":
            parts = list(inside(view))
            views.append(view)
            if any(_more_streams(name, part) for name, part in parts):
                break
        elif kind in _DESCRIBING and b"covr" in bytes(view):
            break
    return views


def _more_streams(kind: bytes, view: memoryview) -> bool:
    """Whether libav makes additional streams from this box of a track."""
    if kind in _DESCRIBING:
        return b"covr" in bytes(view)
    if kind != b"mdia":
        return False
    minf = dict(inside(view)).get(b"minf", view[:0])
    stbl = dict(inside(minf)).get(b"stbl", view[:0])
    return b"iamf" in bytes(dict(inside(stbl)).get(b"stsd", view[:0]))


def ticks_per_second(view: memoryview) -> int:
    """The time scale in the header of a movie, or of a track's media."""
    (scale,) = struct.unpack_from(">I", view, 20 if view[0] == 1 else 12)
    if not scale:
        raise ValueError("no time scale")
    return int(scale)


def edited(track: Boxes, movie: int) -> Edit | None:
    """The part of a track that is played, if it is one span, optionally after an initial gap. Otherwise None.

    `movie` is the movie's ticks per second.
    """
    view = once(track[b"edts"]).get(b"elst") if b"edts" in track else None
    if view is None:
        return Edit()
    (count,) = struct.unpack_from(">I", view, 4)
    layout = struct.Struct(">QqI" if view[0] == 1 else ">IiI")
    edits = [layout.unpack_from(view, 8 + number * layout.size) for number in range(min(count, 3))]
    start = Fraction(0)
    if len(edits) == 2 and edits[0][1] == -1:
        start = Fraction(edits.pop(0)[0], movie)
    if len(edits) != 1 or edits[0][1] < 0 or edits[0][2] != _ONCE:
        return None
    return Edit(start, edits[0][1], Fraction(edits[0][0], movie))


def numbers(view: memoryview, columns: int, kind: str = ">u4") -> Stored:
    """A table of integers as stored, (rows, columns). It is not copied, since tables may be very long."""
    (count,) = struct.unpack_from(">I", view, 4)
    return np.frombuffer(view[8:], kind, count * columns).reshape(count, columns)


def packet_sizes(view: memoryview) -> Stored | None:
    """The size in bytes of each packet. None if the table gives one size for all packets."""
    size, count = struct.unpack_from(">II", view, 4)
    return None if size else np.frombuffer(view, ">u4", count, 12)


def chunk_offsets(tables: Boxes) -> Stored:
    """The byte at which each chunk of packets begins."""
    return numbers(tables[b"stco"], 1)[:, 0] if b"stco" in tables else numbers(tables[b"co64"], 1, ">i8")[:, 0]


def first_of_chunk(tables: Boxes, count: int) -> Ints:
    """The first packet of each of `count` chunks, followed by the number of packets."""
    runs = numbers(tables[b"stsc"], 3)
    lasting = np.diff(np.append(runs[:, 0].astype(np.int64), count + 1))
    if len(runs) == 0 or runs[0, 0] != 1 or (runs[:, 2] != 1).any() or (lasting <= 0).any():
        raise ValueError("chunks that are out of order, or described otherwise")
    firsts = np.zeros(count + 1, np.int64)
    np.cumsum(np.repeat(runs[:, 1], lasting), out=firsts[1:])
    return firsts


def box(kind: bytes, *payload: bytes | memoryview) -> bytes:
    """A box with the concatenated payloads."""
    return struct.pack(">I4s", 8 + sum(map(len, payload)), kind) + b"".join(payload)


def table(kind: bytes, number: int, entries: Any, stored: str = ">u4", version: int = 0) -> bytes:
    """A table box: its version, no flags, one number, and the entries."""
    return box(kind, struct.pack(">B3xI", version, number), np.asarray(entries, stored).tobytes())
