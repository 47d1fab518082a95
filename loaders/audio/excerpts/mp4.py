"""Excerpts of MP4, M4A and MOV, found through the tables that list the position of each packet.

Purpose: libav creates an object for each packet when it opens a file, which takes ten milliseconds for an hour of
audio. This module reads the tables as arrays, and writes the tables of the excerpt from a part of them. The codec's
description is copied unchanged.

Invariants:
- An excerpt contains whole, unchanged packets: from the packet of `low` to a few packets after that of `high`. Its time
  stamps count from its first packet.
- Only simple files are cut: an audio track without fragments, whose packets are played in stored order, after at most
  one initial silence and without cuts.
- The packets that the index marks around the window must have the positions and time stamps that the index lists.
- The first and last packets of a file are not used, since libav trims parts of them by its own rules.

Failure behaviour: None for every other file; libav then reads it itself.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec
import numpy as np

from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders.audio.excerpts.base import Excerpt, marks_around
from headrace.loaders.decode import mp4
from headrace.loaders.decode.mp4 import Ints, Stored
from headrace.loaders.fetch.partial_file import Media

EXTENSIONS = mp4.EXTENSIONS
_EDGE = 8
"""Number of packets at the beginning and at the end of a file that an excerpt never includes."""
_MOST_CHUNKS = 1 << 14
"""Maximum number of chunks of packets in an excerpt."""
_MOST_TRACKS = 64
_MORE = 4
"""Number of packets after the last requested one, since decoders output some audio later than they receive it."""


class Track(msgspec.Struct, frozen=True):
    """The tables of a track: runs of packets with equal duration (`counts`, `ticks`), packet sizes, and chunks.

    `start` is the time at which the first sample is played. `end` is the time at which the edit ends the track. `lead`
    is the number of ticks of the packets before `start`.
    """

    scale: int
    start: Fraction
    end: Fraction | None
    lead: int
    handler: bytes
    described: bytes
    counts: Ints
    ticks: Ints
    sizes: Stored
    chunks: Stored
    first_of_chunk: Ints


def track(data: Media, info: AudioInfo, marks: Sequence[AudioMark]) -> Track | None:
    """The file's simple track whose packets are at the positions that the index lists. None if there is none.

    libav may number tracks differently from the file, since it counts cover pictures.
    """
    try:
        moov = mp4.find(data)
        views = [] if moov is None else [view for kind, view in mp4.inside(moov) if kind == b"trak"][:_MOST_TRACKS]
    except mp4.WRONG:
        return None
    for view in [*views[info.stream :], *views[: info.stream]]:
        with contextlib.suppress(*mp4.WRONG):
            candidate = None if moov is None else _track(moov, view)
            if candidate is not None and _fits(candidate, info, marks):
                return candidate
    return None


def _fits(track: Track, info: AudioInfo, marks: Sequence[AudioMark]) -> bool:
    """Whether the marked packets belong to this track and begin at the times that the index lists."""
    base, ends = info.time_base, np.cumsum(track.counts * track.ticks)
    if base is None or not marks or (track.scale % info.sample_rate and info.sample_rate % track.scale):
        return False
    for mark in marks:
        tick = (mark.pts * base - track.start) * track.scale + track.lead
        number = _packet_at(track, ends, math.floor(tick))
        if not 0 <= number < len(track.sizes) or _packet_time(track, ends, number) != tick:
            return False
        if next(_byte_ranges(track, number, number + 1))[0] != mark.at:
            return False
    return True


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """The excerpt from `low` to `high`, in seconds on the file's own time line."""
    track_ = track(data, info, marks_around(info, low, high))
    return None if track_ is None else _excerpt(data, track_, low, high)


def _excerpt(data: Media, track: Track, low: Fraction, high: Fraction) -> Excerpt | None:
    ends = np.cumsum(track.counts * track.ticks)
    times = [int((t - track.start) * track.scale) + track.lead for t in (low, high)]
    first, last = (_packet_at(track, ends, t) for t in times)
    last += 1 + _MORE
    if track.end is not None and high > track.end:
        return None
    if not _EDGE <= first < last <= len(track.sizes) - _EDGE or _run_of(track, first) != _run_of(track, last):
        return None
    stretches = list(itertools.islice(_byte_ranges(track, first, last), _MOST_CHUNKS + 1))
    if len(stretches) > _MOST_CHUNKS or sum(size for _, size in stretches) > len(data):
        return None  # the tables list the same bytes more than once, so a small file would become a large one
    if any(begin + size > len(data) for begin, size in stretches):
        return None
    parts = [data[begin : begin + size] for begin, size in stretches]
    head = mp4.brand(data) + struct.pack(">I4s", 8 + sum(size for _, size in stretches), b"mdat")
    shift = Fraction(_packet_time(track, ends, first) - track.lead, track.scale) + track.start
    return Excerpt([head, *parts, _moov_of(track, first, last, len(head))], "mov", shift=shift)


# --- tables


def _track(moov: memoryview, view: memoryview) -> Track | None:
    boxes = list(mp4.inside(moov))
    if any(kind == b"mvex" for kind, _ in boxes):
        return None
    track = dict(mp4.inside(view))
    media = dict(mp4.inside(track[b"mdia"]))
    tables = dict(mp4.inside(dict(mp4.inside(media[b"minf"]))[b"stbl"]))
    if bytes(media[b"hdlr"][8:12]) != b"soun" or not tables.keys().isdisjoint([b"ctts", b"stss", b"stz2", b"cslg"]):
        return None
    movie, scale = (mp4.ticks_per_second(view) for view in (dict(boxes)[b"mvhd"], media[b"mdhd"]))
    edit = mp4.edited(track, movie)
    sizes = mp4.packet_sizes(tables[b"stsz"])
    if edit is None or sizes is None or struct.unpack_from(">I", tables[b"stsd"], 4) != (1,):
        return None
    times, chunks = mp4.numbers(tables[b"stts"], 2).astype(np.int64), mp4.chunk_offsets(tables)
    first_of_chunk = mp4.first_of_chunk(tables, len(chunks))
    if times[:, 0].sum() != len(sizes) or not times[:, 1].all() or first_of_chunk[-1] != len(sizes):
        return None
    described, handler = bytes(tables[b"stsd"]), bytes(media[b"hdlr"])
    end = edit.start + edit.seconds if edit.seconds else None
    return Track(
        scale,
        start=edit.start,
        end=end,
        lead=edit.media,
        handler=handler,
        described=described,
        counts=times[:, 0],
        ticks=times[:, 1],
        sizes=sizes,
        chunks=chunks,
        first_of_chunk=first_of_chunk,
    )


# --- parts of tables


def _packet_at(track: Track, ends: Ints, time: int) -> int:
    """The number of the packet that contains this tick.

    -1 before the first packet, and the number of packets after the last one.
    """
    if time < 0:
        return -1
    run = int(np.searchsorted(ends, time, side="right"))
    if run == len(ends):
        return len(track.sizes)
    run_start = int(ends[run - 1]) if run else 0
    return int(track.counts[:run].sum()) + (time - run_start) // int(track.ticks[run])


def _run_of(track: Track, packet: int) -> int:
    """The number of the run of equally long packets that contains this packet."""
    return int(np.searchsorted(np.cumsum(track.counts), packet, side="right"))


def _packet_time(track: Track, ends: Ints, packet: int) -> int:
    """The tick at which the packet begins."""
    run = _run_of(track, packet)
    return int(ends[run]) - (int(track.counts[: run + 1].sum()) - packet) * int(track.ticks[run])


def _byte_ranges(track: Track, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the position of these packets in the file: (offset, bytes) for each chunk's part."""
    low = int(np.searchsorted(track.first_of_chunk, first, side="right")) - 1
    high = int(np.searchsorted(track.first_of_chunk, last, side="left"))
    for chunk in range(low, high):
        begin, end = int(track.first_of_chunk[chunk]), int(track.first_of_chunk[chunk + 1])
        skipped = int(track.sizes[begin : max(begin, first)].sum(dtype=np.int64))
        size = int(track.sizes[max(begin, first) : min(end, last)].sum(dtype=np.int64))
        yield int(track.chunks[chunk]) + skipped, size


def _moov_of(track: Track, first: int, last: int, place: int) -> bytes:
    """The tables of a file that stores these packets one after the other, from offset `place` on."""
    ticks, count = int(track.ticks[_run_of(track, first)]), last - first
    tables = [
        mp4.box(b"stsd", track.described),
        mp4.table(b"stts", 1, [count, ticks]),
        mp4.table(b"stsc", 1, [1, count, 1]),
        mp4.table(b"stsz", 0, np.append(count, track.sizes[first:last])),
        mp4.table(b"stco", 1, [place]),
    ]
    matrix = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    length, scale = count * ticks, track.scale
    mvhd = struct.pack(">12x2I2I8x", scale, length, 1 << 16, 0) + matrix + bytes(24) + struct.pack(">I", 2)
    tkhd = struct.pack(">I8x2I20x", 7, 1, 0) + matrix + bytes(8)
    minf = mp4.box(b"minf", mp4.table(b"smhd", 0, []), mp4.box(b"stbl", *tables))
    mdhd = struct.pack(">12x2I4x", scale, length)
    mdia = mp4.box(b"mdia", mp4.box(b"mdhd", mdhd), mp4.box(b"hdlr", track.handler), minf)
    return mp4.box(b"moov", mp4.box(b"mvhd", mvhd), mp4.box(b"trak", mp4.box(b"tkhd", tkhd), mdia))
