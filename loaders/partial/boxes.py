"""The boxes of MP4 and MOV, and the tables in which they say where each packet lies.

Purpose: libav makes an object of every packet of a file when it opens it; who needs some of them takes arrays out of the tables,
and writes tables of those.
Invariant: pure; nothing is read of a box but what it says that it has.
Failure behaviour: `WRONG` for what does not add up; whoever asks leaves such a file to libav.
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
from headrace.loaders.partial.file import Media

EXTENSIONS = frozenset(["mp4", "m4a", "m4b", "m4v", "mov"])
WRONG = (struct.error, ValueError, KeyError, IndexError, ZeroDivisionError)
_MOST_BYTES = 64 * limits.MIB
"""Of the tables."""
_MOST_OF_BRAND = 1 << 10
_DESCRIBING = (b"udta", b"meta")
_ONCE = 1 << 16
"""The rate of an edit that plays what it holds as it is."""

Ints = npt.NDArray[np.int64]
Stored = npt.NDArray[Any]
"""Of the file's own byte order, in its memory."""
Boxes = Mapping[bytes, memoryview]


class Edit(msgspec.Struct, frozen=True):
    """A track is shown from its tick `media` on, for so many `seconds` (0: to its end), `start` seconds after the file begins."""

    start: Fraction = Fraction(0)
    media: int = 0
    seconds: Fraction = Fraction(0)


def find(data: Media) -> memoryview | None:
    """The file's tables: what is inside `moov`."""
    at = 0
    while at + 16 <= len(data):
        size, kind, large = struct.unpack(">I4sQ", data[at : at + 16])
        size, head = (large, 16) if size == 1 else (size, 8)
        if kind == b"moov":
            return data[at + head : at + size] if head <= size <= min(_MOST_BYTES, len(data) - at) else None
        if size < head:  # to the end of the file, or nonsense
            return None
        at += size
    return None


def brand(data: Media) -> bytes:
    """The file's first box, if it says which kind of MP4 it is: QuickTime describes some things otherwise than others do."""
    size, kind = struct.unpack(">I4s", data[:8])
    return bytes(data[:size]) if kind == b"ftyp" and size <= _MOST_OF_BRAND else b""


def inside(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Boxes one after the other: kind, payload."""
    at = 0
    while at + 8 <= len(view):
        size, kind = struct.unpack_from(">I4s", view, at)
        if size < 8 or at + size > len(view):
            raise ValueError(f"a box of {size} bytes")
        yield kind, view[at + 8 : at + size]
        at += size


def once(view: memoryview) -> Boxes:
    """Boxes of which each is there once."""
    found = list(inside(view))
    if len(found) != len(dict(found)):
        raise ValueError("a box that comes twice")
    return dict(found)


def tracks(movie: Iterable[tuple[bytes, memoryview]]) -> list[memoryview]:
    """The tracks among a movie's boxes, as libav numbers its streams.

    libav makes a stream of a cover picture (`covr`) where it meets one, and several streams of one track of IAMF. Tracks behind
    either have other numbers; they are left out, so that libav reads such a file by itself.
    """
    found = list[memoryview]()
    for kind, view in movie:
        if kind == b"trak":
            parts = list(inside(view))
            found.append(view)
            if any(_more_streams(name, part) for name, part in parts):
                break
        elif kind in _DESCRIBING and b"covr" in bytes(view):
            break
    return found


def _more_streams(kind: bytes, view: memoryview) -> bool:
    """Whether libav makes other streams of a track's box than the one of the track."""
    if kind in _DESCRIBING:
        return b"covr" in bytes(view)
    if kind != b"mdia":
        return False
    minf = dict(inside(view)).get(b"minf", view[:0])
    stbl = dict(inside(minf)).get(b"stbl", view[:0])
    return b"iamf" in bytes(dict(inside(stbl)).get(b"stsd", view[:0]))


def ticks_per_second(view: memoryview) -> int:
    """Of the header of a movie, or of a track's media."""
    (scale,) = struct.unpack_from(">I", view, 20 if view[0] == 1 else 12)
    if not scale:
        raise ValueError("no time scale")
    return int(scale)


def edited(track: Boxes, movie: int) -> Edit | None:
    """What is shown of a track, if it is one stretch, maybe behind nothing; `movie` are the ticks of a second there."""
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
    """A table of whole numbers, as they are stored, since there may be very many: (rows, columns)."""
    (count,) = struct.unpack_from(">I", view, 4)
    return np.frombuffer(view[8:], kind, count * columns).reshape(count, columns)


def sizes(view: memoryview) -> Stored | None:
    """The bytes of each packet; None where the table says one size for all."""
    size, count = struct.unpack_from(">II", view, 4)
    return None if size else np.frombuffer(view, ">u4", count, 12)


def chunks(tables: Boxes) -> Stored:
    """At which byte each chunk of packets begins."""
    return numbers(tables[b"stco"], 1)[:, 0] if b"stco" in tables else numbers(tables[b"co64"], 1, ">i8")[:, 0]


def first_of_chunk(tables: Boxes, count: int) -> Ints:
    """The first packet of each of so many chunks, and how many packets there are in all."""
    runs = numbers(tables[b"stsc"], 3)
    lasting = np.diff(np.append(runs[:, 0].astype(np.int64), count + 1))
    if len(runs) == 0 or runs[0, 0] != 1 or (runs[:, 2] != 1).any() or (lasting <= 0).any():
        raise ValueError("chunks that are out of order, or described otherwise")
    found = np.zeros(count + 1, np.int64)
    np.cumsum(np.repeat(runs[:, 1], lasting), out=found[1:])
    return found


def box(kind: bytes, *payload: bytes | memoryview) -> bytes:
    """A box that holds these, one after the other."""
    return struct.pack(">I4s", 8 + sum(map(len, payload)), kind) + b"".join(payload)


def table(kind: bytes, first: int, entries: Any, stored: str = ">u4", version: int = 0) -> bytes:
    """A table: its version, no flags, one number, and others."""
    return box(kind, struct.pack(">B3xI", version, first), np.asarray(entries, stored).tobytes())
