"""Excerpts of MP4, M4A and MOV, by the tables in which they say where each packet lies.

Purpose: libav makes an object of each packet of a file when it opens it, ten milliseconds for an hour; here arrays are made, and
the small file's tables are written from a part of them. What says which codec it is, is copied as it is.
Invariants: packets are the file's, whole, from the one that holds `low` to behind the one that holds `high`; the excerpt's stamps
count from its first packet. Only what one could hardly misread: a track of sound without fragments, whose packets are shown as
they are stored, behind at most one silence and without cuts. Neither its first packets nor its last ones, of which parts are
left out by rules that are libav's.
Failure behaviour: None for everything else, which libav reads by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dataio.core import limits
from dataio.shards.contract import AudioInfo
from loaders.partial.file import Media
from loaders.sound.excerpts.contract import Excerpt

EXTENSIONS = frozenset(["mp4", "m4a", "m4b", "m4v", "mov"])
_MOST_BYTES = 64 * limits.MIB
"""Of the tables; four days of sound."""
_MOST_OF_BRAND = 1 << 10
_EDGE = 8
"""So many packets at the beginning and at the end are not taken."""
_MORE = 4
"""Packets behind the last one that is wanted: decoders give some later than they get them."""

Ints = npt.NDArray[np.int64]


class Track(msgspec.Struct, frozen=True):
    """Of packets: how many have how many ticks each, their bytes, and where they lie. `start` is when its first sample sounds,
    and `lead` the ticks of its packets before that."""

    scale: int
    start: Fraction
    lead: int
    handler: bytes
    described: bytes
    counts: Ints
    ticks: Ints
    sizes: npt.NDArray[Any]
    chunks: Ints
    first_of_chunk: Ints


def track(data: Media, info: AudioInfo) -> Track | None:
    """The file's track of this sound, if it is a plain one."""
    try:
        moov = _moov(data)
        found = None if moov is None else _track(moov, info.stream)
        return None if found is None or (found.scale % info.sample_rate and info.sample_rate % found.scale) else found
    except (struct.error, ValueError, KeyError, IndexError, ZeroDivisionError):
        return None


def excerpt(data: Media, track: Track, low: Fraction, high: Fraction) -> Excerpt | None:
    """From `low` to `high`, seconds of the file's own time line."""
    ends = np.cumsum(track.counts * track.ticks)
    times = [int((t - track.start) * track.scale) + track.lead for t in (low, high)]
    first, last = (_packet(track, ends, t) for t in times)
    last += 1 + _MORE
    if not _EDGE <= first < last <= len(track.sizes) - _EDGE or _run(track, first) != _run(track, last):
        return None
    stretches = list(_stretches(track, first, last))
    if any(begin + size > len(data) for begin, size in stretches):
        return None
    parts = [data[begin : begin + size] for begin, size in stretches]
    head = _brand(data) + struct.pack(">I4s", 8 + sum(size for _, size in stretches), b"mdat")
    shift = Fraction(_time(track, ends, first) - track.lead, track.scale) + track.start
    return Excerpt([head, *parts, _moov_of(track, first, last, len(head))], "mov", shift)


# --- tables


def _moov(data: Media) -> memoryview | None:
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


def _brand(data: Media) -> bytes:
    """The file's first box, if it says which kind of MP4 it is: QuickTime describes sound otherwise than others do."""
    size, kind = struct.unpack(">I4s", data[:8])
    return bytes(data[:size]) if kind == b"ftyp" and size <= _MOST_OF_BRAND else b""


def _boxes(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(view):
        size, kind = struct.unpack_from(">I4s", view, at)
        if size < 8 or at + size > len(view):
            raise ValueError(f"a box of {size} bytes")
        yield kind, view[at + 8 : at + size]
        at += size


def _track(moov: memoryview, number: int) -> Track | None:
    boxes = list(_boxes(moov))
    if any(kind == b"mvex" for kind, _ in boxes):
        return None
    found = dict(_boxes([view for kind, view in boxes if kind == b"trak"][number]))
    media = dict(_boxes(found[b"mdia"]))
    tables = dict(_boxes(dict(_boxes(media[b"minf"]))[b"stbl"]))
    if bytes(media[b"hdlr"][8:12]) != b"soun" or not tables.keys().isdisjoint([b"ctts", b"stss", b"stz2", b"cslg"]):
        return None
    scale, movie = _scale(media[b"mdhd"]), _scale(dict(boxes)[b"mvhd"])
    known = _edited(dict(_boxes(found[b"edts"])).get(b"elst") if b"edts" in found else None, movie)
    if known is None or struct.unpack_from(">I", tables[b"stsd"], 4) != (1,):
        return None
    size, count = struct.unpack_from(">II", tables[b"stsz"], 4)
    if size:  # samples of PCM
        return None
    times = _numbers(tables[b"stts"], 2)
    chunks = _numbers(tables[b"stco"], 1)[:, 0] if b"stco" in tables else _numbers(tables[b"co64"], 1, ">i8")[:, 0]
    first_of_chunk = _first_of_chunk(_numbers(tables[b"stsc"], 3), len(chunks))
    sizes = np.frombuffer(tables[b"stsz"], ">u4", count, 12)  # as it is: there are very many
    if times[:, 0].sum() != count or not times[:, 1].all() or first_of_chunk is None or first_of_chunk[-1] != count:
        return None
    start, lead = known
    described, handler = bytes(tables[b"stsd"]), bytes(media[b"hdlr"])
    return Track(scale, start, lead, handler, described, times[:, 0], times[:, 1], sizes, chunks, first_of_chunk)


def _scale(view: memoryview) -> int:
    """Ticks of a second, in the header of a movie or of a track's media."""
    (scale,) = struct.unpack_from(">I", view, 20 if view[0] == 1 else 12)
    if not scale:
        raise ValueError("no time scale")
    return int(scale)


def _edited(view: memoryview | None, movie: int) -> tuple[Fraction, int] | None:
    """When the sound begins, and how many ticks of it are left out before; None where it is cut otherwise."""
    if view is None:
        return Fraction(0), 0
    (count,) = struct.unpack_from(">I", view, 4)
    layout = struct.Struct(">QqI" if view[0] == 1 else ">IiI")
    edits = [layout.unpack_from(view, 8 + number * layout.size) for number in range(min(count, 3))]
    start = Fraction(0)
    if len(edits) == 2 and edits[0][1] == -1:
        start = Fraction(edits.pop(0)[0], movie)
    if len(edits) != 1 or edits[0][1] < 0 or edits[0][2] != 1 << 16:
        return None
    return start, edits[0][1]


def _numbers(view: memoryview, columns: int, kind: str = ">u4") -> Ints:
    (count,) = struct.unpack_from(">I", view, 4)
    return _table(view[8:], count, columns, kind)


def _table(view: memoryview, count: int, columns: int, kind: str = ">u4") -> Ints:
    found: Ints = np.frombuffer(view, kind, count * columns).astype(np.int64)
    return found.reshape(count, columns)


def _first_of_chunk(runs: Ints, chunks: int) -> Ints | None:
    """The first packet of each chunk, and how many there are in all."""
    if len(runs) == 0 or runs[0, 0] != 1 or (runs[:, 2] != 1).any() or (np.diff(runs[:, 0]) <= 0).any():
        return None
    per_chunk: Ints = np.repeat(runs[:, 1], np.diff(np.append(runs[:, 0] - 1, chunks)))
    return np.append(0, np.cumsum(per_chunk))


# --- a part of them


def _packet(track: Track, ends: Ints, time: int) -> int:
    """Which packet holds this tick; -1 before the first, and their number behind the last."""
    if time < 0:
        return -1
    run = int(np.searchsorted(ends, time, side="right"))
    if run == len(ends):
        return len(track.sizes)
    before = int(ends[run - 1]) if run else 0
    return int(track.counts[:run].sum()) + (time - before) // int(track.ticks[run])


def _run(track: Track, packet: int) -> int:
    """In which run of packets that take as long as each other it is."""
    return int(np.searchsorted(np.cumsum(track.counts), packet, side="right"))


def _time(track: Track, ends: Ints, packet: int) -> int:
    """At which tick it begins."""
    run = _run(track, packet)
    return int(ends[run]) - (int(track.counts[: run + 1].sum()) - packet) * int(track.ticks[run])


def _stretches(track: Track, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Where in the file these packets lie: offset, bytes."""
    low = int(np.searchsorted(track.first_of_chunk, first, side="right")) - 1
    high = int(np.searchsorted(track.first_of_chunk, last, side="left"))
    for chunk in range(low, high):
        begin, end = int(track.first_of_chunk[chunk]), int(track.first_of_chunk[chunk + 1])
        skipped = int(track.sizes[begin : max(begin, first)].sum(dtype=np.int64))
        taken = int(track.sizes[max(begin, first) : min(end, last)].sum(dtype=np.int64))
        yield int(track.chunks[chunk]) + skipped, taken


def _moov_of(track: Track, first: int, last: int, place: int) -> bytes:
    """The tables of a file whose packets these are, one after the other from `place` on."""
    ticks, count = int(track.ticks[_run(track, first)]), last - first
    tables = [
        _box(b"stsd", track.described),
        _full(b"stts", 1, [count, ticks]),
        _full(b"stsc", 1, [1, count, 1]),
        _full(b"stsz", 0, np.append(count, track.sizes[first:last])),
        _full(b"stco", 1, [place]),
    ]
    matrix = struct.pack(">9I", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    length, scale = count * ticks, track.scale
    mvhd = struct.pack(">12x2I2I8x", scale, length, 1 << 16, 0) + matrix + bytes(24) + struct.pack(">I", 2)
    tkhd = struct.pack(">I8x2I20x", 7, 1, 0) + matrix + bytes(8)
    minf = _box(b"minf", _full(b"smhd", 0, []), _box(b"stbl", *tables))
    mdia = _box(b"mdia", _box(b"mdhd", struct.pack(">12x2I4x", scale, length)), _box(b"hdlr", track.handler), minf)
    return _box(b"moov", _box(b"mvhd", mvhd), _box(b"trak", _box(b"tkhd", tkhd), mdia))


def _full(kind: bytes, first: int, numbers: Any) -> bytes:
    """A table: no version, no flags, one number, and others."""
    return _box(kind, struct.pack(">II", 0, first) + np.asarray(numbers, ">u4").tobytes())


def _box(kind: bytes, *payload: bytes) -> bytes:
    inside = b"".join(payload)
    return struct.pack(">I4s", 8 + len(inside), kind) + inside
