"""A small MP4 or MOV file that lists only the packets of one clip of a long video.

Purpose: when libav opens a file, it creates an object for every packet, including audio. This takes a few milliseconds
for ten minutes of video. For hours of video it takes about as long as decoding a clip. This module reads the tables
(`headrace.loaders.decode.mp4`), and writes the tables of an excerpt from a part of them. Boxes for codec, rotation and
colour are copied unchanged, and packets are not moved.

Invariants:
- All functions are pure.
- An excerpt lists the file's packets from the clip's key frame to a few packets after the first key frame that follows
  the clip. Their bytes and key frames are unchanged, and their time stamps differ by one constant.
- Only simple files are cut: a video track without fragments, with one sample description and one edit that contains the
  excerpt. The positions of both key frames, and the number of frames between them, must match the index.

Failure behaviour: for any other file, `excerpt` returns None, and libav reads the whole file. Errors of reading the file
are raised unchanged.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from fractions import Fraction
from operator import attrgetter

import msgspec
import numpy as np

from headrace.dataio.core import limits
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.mp4 import (
    EXTENSIONS,
    WRONG,
    Boxes,
    Edit,
    Ints,
    Stored,
    box,
    brand,
    chunk_offsets,
    edited,
    find,
    first_of_chunk,
    inside,
    numbers,
    once,
    packet_sizes,
    table,
    ticks_per_second,
    tracks,
)
from headrace.loaders.fetch.partial_file import Media, Partial

FEW = 2_000
"""Frames. For shorter videos, libav reads the tables as quickly."""
_MORE = 64
"""Packets after the next key frame, since decoders output frames later than they receive them."""
_MOST_OF_TABLES = 16 * limits.MIB
_LARGE_BOX, _FULL_BOX = 16, 4
"""Bytes before a box's content: kind and length; version and flags."""
_UNLIKELY = 1 << 28
"""Ticks. libav handles longer durations and delays differently."""
_KNOWN = frozenset([b"stsd", b"stts", b"ctts", b"cslg", b"stss", b"sdtp", b"stsc", b"stsz", b"stco", b"co64"])
_ENCRYPTED = frozenset([b"encv", b"drmi"])
_pts, _index = attrgetter("pts"), attrgetter("index")


class Excerpt:
    """A file made of `head`, all bytes of another file, and `tail`."""

    def __init__(self, head: bytes, data: Media, tail: bytes) -> None:
        self._head, self._data, self._tail = memoryview(head), data, memoryview(tail)

    def __len__(self) -> int:
        return len(self._head) + len(self._data) + len(self._tail)

    def present_until(self, start: int, end: int) -> int:
        """The end of the bytes from `start` on, at most `end`, that need no fetch (`Partial`)."""
        before = len(self._head)
        low, high = start - before, min(end - before, len(self._data))
        if not isinstance(self._data, Partial) or not low < high or high <= 0:
            return end
        until = self._data.present_until(max(0, low), high)
        return end if until == len(self._data) else before + until

    def __getitem__(self, key: slice) -> memoryview:
        start, end, _ = key.indices(len(self))
        parts, at = list[memoryview](), 0
        for part in (self._head, self._data, self._tail):
            low, high = max(0, start - at), min(len(part), end - at)
            if low < high:
                parts.append(part[low:high])
            at += len(part)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class _Track(msgspec.Struct, frozen=True):
    """The boxes of a track at each level, with its edit and its time scale (ticks per second)."""

    movie: Boxes
    track: Boxes
    media: Boxes
    middle: Boxes
    tables: Boxes
    edit: Edit
    scale: int


class _Packets(msgspec.Struct, frozen=True):
    """Some consecutive packets of a track; packet number `next_key` is the next key frame after the clip.

    - `places` and `sizes`: the packets' bytes in the file.
    - `lasting` and `delayed`: durations, and delays from decoding to display, in ticks.
    - `shown`: the tick of the track at which each packet is shown.
    - `keys`: the key frames; None if all packets are.
    - `flags`: the packets' dependencies, if the file lists them.
    """

    next_key: int
    places: Ints
    sizes: Ints
    lasting: Ints
    delayed: Ints
    shown: Ints
    keys: Ints | None
    flags: memoryview | None


def pays(info: VideoInfo) -> bool:
    """Whether an excerpt is worthwhile: the file has a suitable kind, and is long enough or longer than its window."""
    return info.format in EXTENSIONS and (info.frames >= FEW or info.is_window)


def excerpt(data: Media, info: VideoInfo, wanted: Wanted) -> Excerpt | None:
    """A file whose stream 0 is this video, from the requested key frame to a few packets after the next key frame.

    The next key frame is the first one after the clip. None if the file is not simple.
    """
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
    return _write_excerpt(data, track, packets)


def _ends(info: VideoInfo, wanted: Wanted) -> tuple[KeyFrame, KeyFrame] | None:
    """The requested key frame, and the next one after the clip. None if the index does not list their positions.

    Also None for the first key frame of a file, and for a clip after the last one, since libav trims those parts by its
    own rules. `_packets` finds whether a window begins with the first packet of its file.
    """
    keys, key = info.key_frames, wanted.key
    following = bisect_right(keys, wanted.values[-1], key=_index if wanted.by == "index" else _pts)
    if (
        following == len(keys)
        or keys[following].at < 0
        or key.at < 0
        or not key.pts < keys[following].pts
        or (key.pts <= keys[0].pts and not info.is_window)
    ):
        return None
    return key, keys[following]


# --- read the file's tables


def _track(moov: memoryview, info: VideoInfo) -> _Track | None:
    """The track of this video. None if it is not simple."""
    boxes = list(inside(moov))
    movie = dict(boxes)
    if b"mvex" in movie:
        return None
    track = once(tracks(boxes)[info.stream])
    media = once(track[b"mdia"])
    middle = once(media[b"minf"])
    tables = once(middle[b"stbl"])
    scale, edit = ticks_per_second(media[b"mdhd"]), edited(track, ticks_per_second(movie[b"mvhd"]))
    count, _, kind = struct.unpack_from(">II4s", tables[b"stsd"], 4)
    is_plain = bytes(media[b"hdlr"][8:12]) == b"vide" and count == 1 and kind not in _ENCRYPTED
    is_known = tables.keys() <= _KNOWN and not {b"stco", b"co64"} <= tables.keys()
    if not is_plain or not is_known or edit is None or Fraction(1, scale) != info.time_base:
        return None
    return _Track(movie, track=track, media=media, middle=middle, tables=tables, edit=edit, scale=scale)


def _packets(tables: Boxes, key: KeyFrame, following: KeyFrame) -> _Packets | None:
    """The packets from key frame `key` to a few after key frame `following`."""
    sizes, chunks = packet_sizes(tables[b"stsz"]), chunk_offsets(tables)
    if sizes is None:
        return None
    count = len(sizes)
    starts, times = first_of_chunk(tables, len(chunks)), numbers(tables[b"stts"], 2)
    delays = numbers(tables[b"ctts"], 2, ">i4") if b"ctts" in tables else np.array([[count, 0]])
    time_ends, delay_ends = (np.cumsum(runs[:, 0], dtype=np.int64) for runs in (times, delays))
    if (
        not starts[-1] == time_ends[-1] == delay_ends[-1] == count
        or not _is_plausible(times, 1)
        or not _is_plausible(delays, -_UNLIKELY)
    ):
        return None
    first, next_key = (_packet_at(place, sizes, chunks, starts) for place in (key.at, following.at))
    if not first or next_key is None:
        return None
    end = min(count, next_key + _MORE)
    lasting, delayed = _expand_runs(times, time_ends, first, end), _expand_runs(delays, delay_ends, first, end)
    decoded = _ticks_before(times, time_ends, first) + np.append(0, np.cumsum(lasting[:-1]))
    return _Packets(
        next_key=next_key - first,
        places=_places(sizes, chunks, starts, first, end),
        sizes=sizes[first:end].astype(np.int64),
        lasting=lasting,
        delayed=delayed,
        shown=decoded + delayed,
        keys=_keys(tables, first, end),
        flags=_flags(tables, count, first, end),
    )


def _places(sizes: Stored, chunks: Stored, starts: Ints, first: int, end: int) -> Ints:
    """The byte at which each packet begins. Packets of a chunk follow each other."""
    chunk = np.searchsorted(starts, np.arange(first, end), side="right") - 1
    begin = int(starts[chunk[0]])
    cumulative = np.append(0, np.cumsum(sizes[begin:end], dtype=np.int64))
    places: Ints = chunks[chunk] + cumulative[first - begin : -1] - cumulative[starts[chunk] - begin]
    return places


def _keys(tables: Boxes, first: int, end: int) -> Ints | None:
    """The positions of the key frames among some packets. None if all packets are key frames."""
    if b"stss" not in tables:
        return None
    keys: Ints = numbers(tables[b"stss"], 1)[:, 0].astype(np.int64) - 1
    return keys[(keys >= first) & (keys < end)] - first


def _flags(tables: Boxes, count: int, first: int, end: int) -> memoryview | None:
    """The dependency flags of some of the `count` packets."""
    if b"sdtp" not in tables:
        return None
    if len(tables[b"sdtp"]) != _FULL_BOX + count:
        raise ValueError("not a flag for each packet")
    return tables[b"sdtp"][_FULL_BOX + first : _FULL_BOX + end]


def _is_plausible(runs: Stored, least: int) -> bool:
    """Whether libav uses a table of runs (count, value) unchanged."""
    return bool(runs[:, 0].min() > 0 and least <= runs[:, 1].min() and runs[:, 1].max() < _UNLIKELY)


def _packet_at(place: int, sizes: Stored, chunks: Stored, starts: Ints) -> int | None:
    """The number of the packet that begins at this byte. None if no packet does."""
    chunk = int(np.searchsorted(chunks, place, side="right")) - 1
    if chunk < 0:
        return None
    first, end = int(starts[chunk]), int(starts[chunk + 1])
    begins = chunks[chunk] + np.append(0, np.cumsum(sizes[first : end - 1], dtype=np.int64))
    position = int(np.searchsorted(begins, place))
    return first + position if position < end - first and begins[position] == place else None


def _expand_runs(runs: Stored, ends: Ints, first: int, end: int) -> Ints:
    """The value of each packet in a range, from a table of runs. `ends` are the packets at which the runs end."""
    low, high = (int(run) for run in np.searchsorted(ends, [first, end - 1], side="right"))
    run_ends = np.minimum(ends[low : high + 1], end)
    values: Ints = np.repeat(runs[low : high + 1, 1].astype(np.int64), np.diff(run_ends, prepend=first))
    return values


def _ticks_before(runs: Stored, ends: Ints, packet: int) -> int:
    """The total duration, in ticks, of all packets before this one."""
    run = int(np.searchsorted(ends, packet, side="right"))
    full_runs = int(np.dot(runs[:run, 0].astype(np.int64), runs[:run, 1].astype(np.int64)))
    return full_runs + (packet - int(ends[run - 1] if run else 0)) * int(runs[run, 1])


def _fits(track: _Track, packets: _Packets, ends: tuple[KeyFrame, KeyFrame], length: int) -> bool:
    """Whether the tables match the index, and the edit removes nothing from the excerpt."""
    key, following = ends
    begin, end = int(packets.shown[0]), int(packets.shown[packets.next_key])
    edit, keys = track.edit, packets.keys
    shown = np.count_nonzero((packets.shown >= begin) & (packets.shown < end))
    edit_end = edit.media + edit.seconds * track.scale
    return bool(
        end - begin == following.pts - key.pts
        and shown == following.index - key.index
        and edit.media <= begin
        and (not edit.seconds or end <= edit_end)
        and (keys is None or {0, packets.next_key} <= set(keys.tolist()))
        and packets.sizes.min() > 0
        and packets.places.min() >= 0
        and (packets.places + packets.sizes).max() <= length
    )


# --- write the excerpt


def _write_excerpt(data: Media, track: _Track, packets: _Packets) -> Excerpt | None:
    """The excerpt. Its tables are at the end, so all byte positions are known before the tables are written."""
    head = brand(data)
    head += struct.pack(">I4sQ", 1, b"mdat", _LARGE_BOX + len(data))
    moov = _moov(track, packets, len(head))
    return Excerpt(head, data, moov) if len(moov) <= _MOST_OF_TABLES else None


def _moov(track: _Track, packets: _Packets, moved: int) -> bytes:
    """The tables of these packets, whose bytes have moved by `moved`."""
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
