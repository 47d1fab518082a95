"""Excerpts of FLAC, frame by frame, wrapped in Matroska.

Purpose: every FLAC frame contains its number, so a few reads find a time. libav also searches, but with more reads, and
for times close to the end it starts at the file's beginning. In raw FLAC, libav must search for every frame header. In
a Matroska packet, its decoder reads one frame after the other.

Invariants:
- An excerpt contains whole, unchanged frames: from the frame of sample `low`, or the first frame, to the frame of
  sample `high`, or the last frame.
- Only files with a fixed block size are cut, since their frames are numbered.
- The first packet of the Matroska file has time stamp zero. Time stamps are in nanoseconds, so their rounding errors
  are small.

Failure behaviour: `CorruptionError` if nearly every position looks like a frame. None if the file is not FLAC, does not
match the index, has no frame within reach, or lacks its last frame; libav then reads the file itself. Bytes that look
like a frame (correct sync code, number and 8-bit checksum) lead to too few samples, and the caller rejects the excerpt.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders.audio.excerpts.base import NEAR, Bytes, Excerpt, Mark, last_mark_before, marks_around
from headrace.loaders.fetch.partial_file import Media

EXTENSIONS = frozenset(["flac"])
_OPENING, _STREAMINFO = b"fLaC\x80\x00\x00\x22", 34
_MOST_BLOCKS = 64
_SYNC = b"\xff\xf8"
_ALIKE, _MOST_OF_FRAME_HEADER = 4, 16
_FIRST_BYTES, _NEXT_BYTES = 16 * limits.KIB, 64 * limits.KIB
_LARGEST = 1 * limits.MIB
"""Approximate maximum size of a frame in bytes. The theoretical maximum, 65,535 samples of eight channels, does not
occur in practice."""
_NEAR_IN_MEMORY = 8 * limits.KIB
MAX_CANDIDATES = 1 << 14
"""Maximum number of candidate positions that are examined for one window. With the shortest frames that FLAC allows, 64
KiB contain a third as many."""


class _Header(msgspec.Struct, frozen=True):
    """The header of a file.

    It holds the STREAMINFO block, the byte at which frames begin, the first bytes of the first frame, the samples per
    frame, and the total number of samples.
    """

    info: bytes
    end: int
    first_bytes: bytes
    block: int
    samples: int

    @property
    def rate(self) -> int:
        return int.from_bytes(self.info[10:13], "big") >> 4

    @property
    def channels(self) -> int:
        return (self.info[12] >> 1 & 7) + 1


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """The excerpt from `low` to `high`, in seconds on the file's own time line."""
    header, marks = _header(data), marks_around(info, low, high)
    if header is None or not marks or not _matches_index(data, header, info, marks):
        return None
    search = _FrameSearch(data, header)
    near = _NEAR_IN_MEMORY if isinstance(data, memoryview) else NEAR
    ends = marks[-1].at + 1, marks[-1].pts + 1
    high_mark = ends if marks[-1].pts > high * header.rate else (len(data), header.samples)
    first_frame = last_mark_before(search.find, (marks[0].at, marks[0].pts), high_mark, int(low * header.rate), near)
    last_frame = last_mark_before(
        search.find, first_frame, high_mark, min(int(high * header.rate), header.samples - 1), near
    )
    following = search.find(last_frame[0])
    if following is None and last_frame[1] + header.block < header.samples:
        return None
    end, second = len(data) if following is None else following[0], search.find(first_frame[0])
    packets = [(0, data[first_frame[0] : end])]
    # libav reads the first packet when it opens the file, which holds the GIL
    if second is not None and second[0] < end:
        packets = [(0, data[first_frame[0] : second[0]]), (second[1] - first_frame[1], data[second[0] : end])]
    parts = matroska_file(b"A_FLAC", _OPENING + header.info, header.rate, header.channels, packets)
    shift, audio_end = Fraction(first_frame[1], header.rate), Fraction(header.samples, header.rate)
    return Excerpt(
        parts,
        "matroska",
        shift=shift,
        audio_end=audio_end if following is None else None,
        from_start=not first_frame[1],
    )


def _matches_index(data: Media, header: _Header, info: AudioInfo, marks: Sequence[AudioMark]) -> bool:
    """Whether the file matches the index, and contains the frames that the index marks."""
    listed = header.rate, header.channels, header.samples
    if listed != (info.sample_rate, info.channels, info.samples) or info.time_base != Fraction(1, header.rate):
        return False
    numbers = [_frame_number(bytes(data[mark.at : mark.at + _MOST_OF_FRAME_HEADER]), header) for mark in marks]
    counted = all(
        number is not None and number * header.block == m.pts for number, m in zip(numbers, marks, strict=True)
    )
    return counted and info.marks[0].at == header.end and info.start_pts == info.marks[0].pts == 0


def _header(data: Media) -> _Header | None:
    at, info = 4, b""
    if bytes(data[:4]) != b"fLaC":
        return None
    for _ in range(_MOST_BLOCKS):
        head = data[at : at + 4]
        if len(head) < 4:
            return None
        if head[0] & 0x7F == 0:
            info = bytes(data[at + 4 : at + 4 + _STREAMINFO])
        at += 4 + int.from_bytes(head[1:], "big")
        if head[0] & 0x80:
            break
    else:
        return None
    first_bytes = bytes(data[at : at + _ALIKE])
    smallest, largest, samples = info[0:2], info[2:4], int.from_bytes(info[13:18], "big") & (1 << 36) - 1
    # with a variable block size, frames are numbered by samples
    if len(info) < _STREAMINFO or not samples or smallest != largest or not any(largest):
        return None
    if len(first_bytes) < _ALIKE or not first_bytes.startswith(_SYNC):
        return None
    return _Header(info, end=at, first_bytes=first_bytes, block=int.from_bytes(smallest, "big"), samples=samples)


class _FrameSearch:
    """Searches for frames. It raises an error if nearly every position looks like a frame."""

    def __init__(self, data: Media, header: _Header) -> None:
        self._data, self._header, self._candidates_left = data, header, MAX_CANDIDATES

    def find(self, at: int) -> Mark | None:
        """The first frame that begins after this byte. None if there is none within reach."""
        return next(self.frames(at), None)

    def frames(self, at: int) -> Iterator[Mark]:
        """Yield the frames that begin after this byte, each with the number of samples before it.

        The search ends if no frame follows within `_LARGEST` bytes of the last one.
        """
        data, header = self._data, self._header
        at, size, last_frame = at + 1, _FIRST_BYTES, at
        while at - last_frame < _LARGEST and at + _MOST_OF_FRAME_HEADER < len(data):
            view, sync = bytes(data[at : at + size]), -1
            while (sync := view.find(_SYNC, sync + 1, len(view) - _MOST_OF_FRAME_HEADER)) >= 0:
                self._count()
                number = _frame_number(view[sync : sync + _MOST_OF_FRAME_HEADER], header)
                if number is not None:
                    yield at + sync, number * header.block
                    last_frame = at + sync
            at, size = at + max(1, len(view) - _MOST_OF_FRAME_HEADER), _NEXT_BYTES

    def _count(self) -> None:
        self._candidates_left -= 1
        if self._candidates_left < 0:
            raise CorruptionError(
                f"the FLAC file has more than {MAX_CANDIDATES} places that look like a frame around one window",
                hint="look at the file with flac --test",
            )


def _frame_number(head: bytes, header: _Header) -> int | None:
    """The number of the frame that begins with these bytes. None if they are not a frame header.

    A frame must match the first frame, except for the number of samples in the last frame.
    """
    if (
        len(head) < _MOST_OF_FRAME_HEADER
        or (head[2] ^ header.first_bytes[2]) & 0xF
        or (head[3] ^ header.first_bytes[3]) & 0xF
    ):
        return None
    if head[2] < 0x10 or head[3] >= 0xB0:
        return None
    extra = 0 if head[4] < 0x80 else 7 - (head[4] ^ 0xFF).bit_length()
    if head[4] >= 0x80 and not 1 <= extra <= 5:
        return None
    number = head[4] & (0x7F >> extra + bool(extra))
    for byte in head[5 : 5 + extra]:
        if byte & 0xC0 != 0x80:
            return None
        number = number << 6 | byte & 0x3F
    end = 5 + extra + {6: 1, 7: 2}.get(head[2] >> 4, 0) + {12: 1, 13: 2, 14: 2}.get(head[2] & 0xF, 0)
    last_number = (header.samples - 1) // header.block
    if (
        number > last_number
        or (number < last_number and head[2] != header.first_bytes[2])
        or _crc8(head[:end]) != head[end]
    ):
        return None
    return number


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc = _CRC8[crc ^ byte]
    return crc


def _crc8_table() -> bytes:
    table = bytearray(256)
    for number in range(256):
        value = number
        for _ in range(8):
            value = (value << 1 ^ 7) & 0xFF if value & 0x80 else value << 1
        table[number] = value
    return bytes(table)


_CRC8 = _crc8_table()


_EBML, _DOC_TYPE = b"\x1a\x45\xdf\xa3", b"\x42\x82"
_SEGMENT, _INFO, _TIMESTAMP_SCALE = b"\x18\x53\x80\x67", b"\x15\x49\xa9\x66", b"\x2a\xd7\xb1"
_TRACKS, _TRACK, _NUMBER, _UID, _TYPE = b"\x16\x54\xae\x6b", b"\xae", b"\xd7", b"\x73\xc5", b"\x83"
_CODEC, _PRIVATE, _AUDIO, _RATE, _CHANNELS = b"\x86", b"\x63\xa2", b"\xe1", b"\xb5", b"\x9f"
_CLUSTER, _TIMESTAMP, _SIMPLE_BLOCK = b"\x1f\x43\xb6\x75", b"\xe7", b"\xa3"
_SOUND = b"\x02"
_FIRST_TRACK_AT_ONCE = b"\x81\x00\x00\x80"
_NANOSECONDS = 1_000_000_000


def matroska_file(
    codec: bytes, private: bytes, rate: int, channels: int, packets: Sequence[tuple[int, Bytes]]
) -> list[Bytes]:
    """The parts of a Matroska file with these packets. Each packet is given with the number of samples before it.

    `private` is the codec's initialization data.
    """
    audio = _element(_RATE, struct.pack(">d", rate)) + _element(_CHANNELS, bytes([channels]))
    track = _element(_NUMBER, b"\x01") + _element(_UID, b"\x01") + _element(_TYPE, _SOUND)
    track += _element(_CODEC, codec) + _element(_PRIVATE, private) + _element(_AUDIO, audio)
    segment = _element(_INFO, _element(_TIMESTAMP_SCALE, b"\x01")) + _element(_TRACKS, _element(_TRACK, track))
    parts: list[Bytes] = [segment]
    for samples, packet in packets:
        block = _opening(_SIMPLE_BLOCK, len(_FIRST_TRACK_AT_ONCE) + len(packet)) + _FIRST_TRACK_AT_ONCE
        cluster = _element(_TIMESTAMP, (samples * _NANOSECONDS // rate).to_bytes(8, "big")) + block
        parts += [_opening(_CLUSTER, len(cluster) + len(packet)) + cluster, packet]
    head = _element(_EBML, _element(_DOC_TYPE, b"matroska")) + _opening(_SEGMENT, sum(map(len, parts)))
    return [head, *parts]


def _element(name: bytes, content: bytes) -> bytes:
    return _opening(name, len(content)) + content


def _opening(name: bytes, size: int) -> bytes:
    return name + (size | 1 << 56).to_bytes(8, "big")
