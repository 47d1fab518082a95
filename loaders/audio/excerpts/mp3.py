"""Excerpts of MP3, from a frame that the index marked. The file itself does not contain the position of a time.

Purpose: to find a time, libav would read everything before it and count the frames.

Invariants:
- An excerpt contains whole, unchanged frames, and every frame begins where the frame before it ends.
- It begins a few frames before the requested ones, since a frame needs bytes of earlier frames and the decoder state
  after them.
- It ends after the requested frames, or where the audio ends according to the index. The padding of the last frame is
  not audio.

Failure behaviour: None for files without marks, for windows at the beginning of the audio, and if no frame begins at
the mark or directly after another frame. libav then reads the file itself.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders.audio.excerpts.base import Excerpt, Mark
from headrace.loaders.fetch.byte_ranges import mark_after, mark_before
from headrace.loaders.fetch.partial_file import Marked, Media

EXTENSIONS = frozenset(["mp3"])
_KBITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
"""Bit rates of layer III: first MPEG 1, then MPEG 2 and 2.5."""
_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
"""Sample rates by the two version bits: MPEG 1, 2 and 2.5."""
_RESERVOIR = 2048
"""Bytes before the first requested frame. A frame needs at most 511 bytes of the frames before it, and those need bytes
of earlier ones."""
_AT_FIRST = Fraction(1, 2)
"""Seconds at the beginning of the audio that libav reads itself."""
_MORE = 2
"""Number of frames after the last requested one."""


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """The excerpt from `low` to `high`, in seconds on the file's own time line. The search starts at a known mark."""
    rate, begin, base = info.sample_rate, info.start, info.time_base
    # decoders drop part of the first frame
    if begin is None or base is None or not info.marks or low <= begin + _AT_FIRST:
        return None
    indexed_marks = [(mark.at, int(mark.pts * base * rate)) for mark in info.marks]
    marks = (data.marks if isinstance(data, Marked) else ()) or indexed_marks
    at, samples_before = marks[mark_before(marks, int(low * rate))]
    following = mark_after(marks, int(high * rate) + _MORE * 1152)
    view = data[at : marks[following][0] if following < len(marks) else len(data)]
    if len(view) < 4:
        return None
    length, ends = 1152 if view[1] & 0x08 else 576, int(begin * rate) + info.samples - samples_before
    count = -(-min(ends, int(high * rate) - samples_before + _MORE * length) // length)
    offsets = _offsets(view, rate, count)
    if offsets is None or not _marks_match(offsets, indexed_marks, at, samples_before, length):
        return None
    early = min(len(offsets) - 1, (int(low * rate) - samples_before) // length)
    early = max(0, bisect_right(offsets, offsets[early] - _RESERVOIR) - 1)
    shift, audio_end = Fraction(samples_before + early * length, rate), Fraction(samples_before + ends, rate)
    part = view[offsets[early] : offsets[-1]]
    return Excerpt([part], "mp3", shift=shift, audio_end=audio_end if count * length >= ends else None)


def _marks_match(offsets: Sequence[int], marks: Sequence[Mark], at: int, samples_before: int, length: int) -> bool:
    """Whether the marked packets in this range are frames with the correct number of samples before them."""
    in_range = [mark for mark in marks if at <= mark[0] < at + offsets[-1]]
    return all(
        offsets[-1] and _is_at(offsets, place - at, samples - samples_before, length) for place, samples in in_range
    )


def _is_at(offsets: Sequence[int], place: int, samples: int, length: int) -> bool:
    number, remainder = divmod(samples, length)
    return not remainder and 0 <= number < len(offsets) and offsets[number] == place


def _offsets(view: memoryview, rate: int, count: int) -> list[int] | None:
    """The offsets at which `count` consecutive frames begin, and the offset at which the last one ends."""
    at = [0]
    for _ in range(count):
        size = _frame_length(bytes(view[at[-1] : at[-1] + 3]), rate)
        if not size or at[-1] + size > len(view):
            return None
        at.append(at[-1] + size)
    return at


@functools.lru_cache(1 << 10)
def _frame_length(head: bytes, rate: int) -> int:
    """The length of the frame that begins with these three bytes, or 0 if they are not a frame header."""
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return 0
    version, kbits, rate_index, padding = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3, head[2] >> 1 & 1
    if version == 1 or rate_index == 3 or kbits == 15 or _RATES[version][rate_index] != rate:
        return 0
    return (144_000 if version == 3 else 72_000) * _KBITS[version != 3][kbits] // rate + padding
