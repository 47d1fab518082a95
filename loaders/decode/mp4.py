"""MP4 and MOV: read their tables as arrays, and write a small file that lists only the packets of one clip.

Purpose: libav creates an object for every packet, audio included, when it opens a file. This takes some milliseconds for ten
minutes of video; for hours of video it takes about as long as decoding a clip. Here the tables become numpy arrays, and the
tables of an excerpt are written from a part of them. Boxes for codec, rotation and colour are copied unchanged, and packets
stay where they are.
Invariants: pure; a box is read only within its own length. An excerpt holds the file's own packets, with their bytes, key
frames, and stamps up to one shift, from the clip's key frame to behind the next one. Only simple files are cut: a video track
without fragments, with one sample description and one edit that contains the excerpt. The positions of both key frames, and
the number of frames between them, must be those of the index.
Failure behaviour: the readers of tables raise one of `WRONG`. `excerpt` returns None then, and libav reads the file itself.
Errors of reading the file pass through.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core import limits
from headrace.dataio.shards.contract import KeyFrame, VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.fetch.partial_file import Media

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


def packet_sizes(view: memoryview) -> Stored | None:
    """The bytes of each packet; None where the table says one size for all."""
    size, count = struct.unpack_from(">II", view, 4)
    return None if size else np.frombuffer(view, ">u4", count, 12)


def chunk_offsets(tables: Boxes) -> Stored:
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


FEW = 2_000
"""Frames; of a video that has fewer, libav has read the tables as quickly."""
_MORE = 64
"""Packets behind the next key frame: pictures come from a decoder later than they went in."""
_MOST_OF_TABLES = 16 * limits.MIB
_LARGE_BOX, _FULL_BOX = 16, 4
"""Bytes before what is in a box: kind and length; version and flags."""
_UNLIKELY = 1 << 28
"""Ticks; of durations and delays that are longer, libav has opinions of its own."""
_KNOWN = frozenset([b"stsd", b"stts", b"ctts", b"cslg", b"stss", b"sdtp", b"stsc", b"stsz", b"stco", b"co64"])
_ENCRYPTED = frozenset([b"encv", b"drmi"])
_pts, _index = attrgetter("pts"), attrgetter("index")


class Excerpt:
    """A file: `head`, all of the bytes of another one, and `tail`."""

    def __init__(self, head: bytes, data: Media, tail: bytes) -> None:
        self._head, self._data, self._tail = memoryview(head), data, memoryview(tail)

    def __len__(self) -> int:
        return len(self._head) + len(self._data) + len(self._tail)

    def __getitem__(self, where: slice) -> memoryview:
        start, end, _ = where.indices(len(self))
        found, at = list[memoryview](), 0
        for part in (self._head, self._data, self._tail):
            low, high = max(0, start - at), min(len(part), end - at)
            if low < high:
                found.append(part[low:high])
            at += len(part)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


class _Track(msgspec.Struct, frozen=True):
    """The boxes of a track, of its media, of what is in them and of its tables, with what is shown of it, in ticks."""

    movie: Boxes
    track: Boxes
    media: Boxes
    middle: Boxes
    tables: Boxes
    edit: Edit
    scale: int


class _Packets(msgspec.Struct, frozen=True):
    """Some of a track's, `behind` of them before the next key frame: where they lie, their bytes, how many ticks each lasts and
    is shown later than decoded, at which tick of the track it is shown, which are key frames, unless all are, and what others
    depend on, if that is told."""

    behind: int
    places: Ints
    sizes: Ints
    lasting: Ints
    delayed: Ints
    shown: Ints
    keys: Ints | None
    flags: memoryview | None


def pays(info: VideoInfo) -> bool:
    """Whether a file is of the kind, and long enough."""
    return info.ext in EXTENSIONS and info.frames >= FEW


def excerpt(data: Media, info: VideoInfo, wanted: Wanted) -> Excerpt | None:
    """The file in which stream 0 is this video from the key frame that is wanted to behind the next one after the clip."""
    ends = _ends(info, wanted)
    if ends is None:
        return None
    try:
        moov = find(data)
        track = None if moov is None else _track(moov, info)
        packets = None if track is None else _packets(track.tables, *ends)
    except WRONG:
        return None
    if track is None or packets is None or not _fits(track, packets, ends, len(data)):
        return None
    return _written(data, track, packets)


def _ends(info: VideoInfo, wanted: Wanted) -> tuple[KeyFrame, KeyFrame] | None:
    """The key frame that is wanted and the next one behind the clip, in files of which the index says where they lie. Neither the
    first nor what follows the last: parts of those are left out by rules that are libav's."""
    keys, key = info.key_frames, wanted.key
    after = bisect_right(keys, wanted.values[-1], key=_index if wanted.by == "index" else _pts)
    if after == len(keys) or keys[after].at < 0 or key.at < 0 or not keys[0].pts < key.pts < keys[after].pts:
        return None
    return key, keys[after]


# --- what the file says


def _track(moov: memoryview, info: VideoInfo) -> _Track | None:
    """The track of this video, if it is a plain one."""
    found = list(inside(moov))
    movie = dict(found)
    if b"mvex" in movie:
        return None
    track = once(tracks(found)[info.stream])
    media = once(track[b"mdia"])
    middle = once(media[b"minf"])
    tables = once(middle[b"stbl"])
    scale, edit = ticks_per_second(media[b"mdhd"]), edited(track, ticks_per_second(movie[b"mvhd"]))
    count, _, kind = struct.unpack_from(">II4s", tables[b"stsd"], 4)
    plain = bytes(media[b"hdlr"][8:12]) == b"vide" and count == 1 and kind not in _ENCRYPTED
    known = tables.keys() <= _KNOWN and not {b"stco", b"co64"} <= tables.keys()
    if not plain or not known or edit is None or Fraction(1, scale) != info.time_base:
        return None
    return _Track(movie, track, media, middle, tables, edit, scale)


def _packets(tables: Boxes, key: KeyFrame, after: KeyFrame) -> _Packets | None:
    """Those from one key frame to some behind the other."""
    sizes, chunks = packet_sizes(tables[b"stsz"]), chunk_offsets(tables)
    if sizes is None:
        return None
    count = len(sizes)
    starts, times = first_of_chunk(tables, len(chunks)), numbers(tables[b"stts"], 2)
    delays = numbers(tables[b"ctts"], 2, ">i4") if b"ctts" in tables else np.array([[count, 0]])
    until, later = (np.cumsum(runs[:, 0], dtype=np.int64) for runs in (times, delays))
    if not starts[-1] == until[-1] == later[-1] == count or not _likely(times, 1) or not _likely(delays, -_UNLIKELY):
        return None
    first, behind = (_at(place, sizes, chunks, starts) for place in (key.at, after.at))
    if first is None or behind is None:
        return None
    end = min(count, behind + _MORE)
    lasting, delayed = _each(times, until, first, end), _each(delays, later, first, end)
    decoded = _ticks_before(times, until, first) + np.append(0, np.cumsum(lasting[:-1]))
    return _Packets(
        behind=behind - first,
        places=_places(sizes, chunks, starts, first, end),
        sizes=sizes[first:end].astype(np.int64),
        lasting=lasting,
        delayed=delayed,
        shown=decoded + delayed,
        keys=_keys(tables, first, end),
        flags=_flags(tables, count, first, end),
    )


def _places(sizes: Stored, chunks: Stored, starts: Ints, first: int, end: int) -> Ints:
    """At which bytes some packets begin: one behind the other in each chunk."""
    chunk = np.searchsorted(starts, np.arange(first, end), side="right") - 1
    begin = int(starts[chunk[0]])
    before = np.append(0, np.cumsum(sizes[begin:end], dtype=np.int64))
    found: Ints = chunks[chunk] + before[first - begin : -1] - before[starts[chunk] - begin]
    return found


def _keys(tables: Boxes, first: int, end: int) -> Ints | None:
    """Which of some packets are key frames; None where all are."""
    if b"stss" not in tables:
        return None
    keys: Ints = numbers(tables[b"stss"], 1)[:, 0].astype(np.int64) - 1
    return keys[(keys >= first) & (keys < end)] - first


def _flags(tables: Boxes, count: int, first: int, end: int) -> memoryview | None:
    """Of some packets of so many, what others depend on."""
    if b"sdtp" not in tables:
        return None
    if len(tables[b"sdtp"]) != _FULL_BOX + count:
        raise ValueError("not a flag for each packet")
    return tables[b"sdtp"][_FULL_BOX + first : _FULL_BOX + end]


def _likely(runs: Stored, least: int) -> bool:
    """Whether a table of runs (how many, of which value) is one that libav takes as it is."""
    return bool(runs[:, 0].min() > 0 and least <= runs[:, 1].min() and runs[:, 1].max() < _UNLIKELY)


def _at(place: int, sizes: Stored, chunks: Stored, starts: Ints) -> int | None:
    """Which packet begins at this byte."""
    chunk = int(np.searchsorted(chunks, place, side="right")) - 1
    if chunk < 0:
        return None
    first, end = int(starts[chunk]), int(starts[chunk + 1])
    begins = chunks[chunk] + np.append(0, np.cumsum(sizes[first : end - 1], dtype=np.int64))
    found = int(np.searchsorted(begins, place))
    return first + found if found < end - first and begins[found] == place else None


def _each(runs: Stored, ends: Ints, first: int, end: int) -> Ints:
    """The values of some packets, of a table of runs, which end before these ones."""
    low, high = (int(run) for run in np.searchsorted(ends, [first, end - 1], side="right"))
    until = np.minimum(ends[low : high + 1], end)
    values: Ints = np.repeat(runs[low : high + 1, 1].astype(np.int64), np.diff(until, prepend=first))
    return values


def _ticks_before(runs: Stored, ends: Ints, packet: int) -> int:
    """How many ticks all packets before this one last."""
    run = int(np.searchsorted(ends, packet, side="right"))
    whole = int(np.dot(runs[:run, 0].astype(np.int64), runs[:run, 1].astype(np.int64)))
    return whole + (packet - int(ends[run - 1] if run else 0)) * int(runs[run, 1])


def _fits(track: _Track, packets: _Packets, ends: tuple[KeyFrame, KeyFrame], length: int) -> bool:
    """Whether the tables and the index say the same, and nothing of the excerpt is cut off."""
    key, after = ends
    begin, end = int(packets.shown[0]), int(packets.shown[packets.behind])
    edit, keys = track.edit, packets.keys
    shown = np.count_nonzero((packets.shown >= begin) & (packets.shown < end))
    until = edit.media + edit.seconds * track.scale
    return bool(
        end - begin == after.pts - key.pts
        and shown == after.index - key.index
        and edit.media <= begin
        and (not edit.seconds or end <= until)
        and (keys is None or {0, packets.behind} <= set(keys.tolist()))
        and packets.sizes.min() > 0
        and packets.places.min() >= 0
        and (packets.places + packets.sizes).max() <= length
    )


# --- the file that is written


def _written(data: Media, track: _Track, packets: _Packets) -> Excerpt | None:
    """The tables come last, so that one knows how far all bytes are moved before they are written."""
    head = brand(data)
    head += struct.pack(">I4sQ", 1, b"mdat", _LARGE_BOX + len(data))
    moov = _moov(track, packets, len(head))
    return Excerpt(head, data, moov) if len(moov) <= _MOST_OF_TABLES else None


def _moov(track: _Track, packets: _Packets, moved: int) -> bytes:
    """The tables of these packets, all of which were moved by so many bytes."""
    count = len(packets.sizes)
    runs = np.ones((count, 2), np.int64)
    tables = [box(kind, track.tables[kind]) for kind in (b"stsd", b"cslg") if kind in track.tables]
    for kind, values in ((b"stts", packets.lasting), (b"ctts", packets.delayed)):
        if kind in track.tables:
            runs[:, 1] = values
            tables.append(table(kind, count, runs, ">i4", version=track.tables[kind][0]))
    if packets.keys is not None:
        tables.append(table(b"stss", len(packets.keys), packets.keys + 1))
    if packets.flags is not None:
        tables.append(box(b"sdtp", bytes(_FULL_BOX), packets.flags))
    tables += [
        table(b"stsc", 1, [1, 1, 1]),
        table(b"stsz", 0, np.append(count, packets.sizes)),
        table(b"co64", count, packets.places + moved, ">i8"),
    ]
    middle = [box(kind, view) for kind, view in track.middle.items() if kind != b"stbl"]
    minf = box(b"minf", *middle, box(b"stbl", *tables))
    mdia = box(b"mdia", *(box(kind, track.media[kind]) for kind in (b"mdhd", b"hdlr")), minf)
    trak = box(b"trak", box(b"tkhd", track.track[b"tkhd"]), mdia)
    return box(b"moov", box(b"mvhd", track.movie[b"mvhd"]), trak)
