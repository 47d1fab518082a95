"""What an excerpt is.

Purpose: containers differ in how an instant is found in them; what is decoded in the end is always a small file.
Invariant: decoding an excerpt gives the samples of decoding the recording, apart from the first some, which warm the decoder up;
its stamps are `shift` before the recording's.
Before an excerpt is used, what its maker reads in the file is compared with the packets that the index marked (`around`).
Failure behaviour: none; who makes excerpts gives None for whatever is not plain, which libav then reads by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from operator import attrgetter

import msgspec

from headrace.dataio.shards.contract import AudioInfo, SoundMark
from headrace.loaders.sound.nameless import Bytes


class Excerpt(msgspec.Struct, frozen=True):
    """A file: `parts` one after the other, for libav's `demuxer`, maybe with options. `shift` and `until`, behind which is no
    sound if it is known, are seconds of the recording's time line. `whole` from its beginning: nothing sounds before zero."""

    parts: Sequence[Bytes]
    demuxer: str
    shift: Fraction = Fraction(0)
    until: Fraction | None = None
    whole: bool = False


_pts = attrgetter("pts")


def mark_before(marks: Sequence[SoundMark], pts: int) -> SoundMark | None:
    """The last marked packet that begins at this stamp or before it."""
    number = bisect_right(marks, pts, key=_pts)
    return marks[number - 1] if number else None


def around(info: AudioInfo, low: Fraction, high: Fraction) -> Sequence[SoundMark]:
    """The marked packets from the last one before `low` to the first one behind `high`, in seconds of the file's own time line.
    It is one packet at least, if any are marked."""
    if info.time_base is None:
        return ()
    first = bisect_right(info.marks, low / info.time_base, key=_pts)
    end = bisect_right(info.marks, high / info.time_base, key=_pts)
    return info.marks[max(0, first - 1) : end + 1]
