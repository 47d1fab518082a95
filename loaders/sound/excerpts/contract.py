"""What an excerpt is.

Purpose: containers differ in how an instant is found in them; what is decoded in the end is always a small file.
Invariant: decoding an excerpt gives the samples of decoding the recording, apart from the first some, which warm the decoder up;
its stamps are `shift` before the recording's.
Failure behaviour: none; who makes excerpts gives None for whatever is not plain, which libav then reads by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from loaders.sound.nameless import Bytes


class Excerpt(msgspec.Struct, frozen=True):
    """A file: `parts` one after the other, for libav's `demuxer`, maybe with options. `shift` and `until`, behind which is no
    sound if it is known, are seconds of the recording's time line. `whole` from its beginning: nothing sounds before zero."""

    parts: Sequence[Bytes]
    demuxer: str
    shift: Fraction = Fraction(0)
    until: Fraction | None = None
    whole: bool = False
