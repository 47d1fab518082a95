"""FLAC that is there as a whole, by libsndfile: the same samples as libav's, in one call.

Purpose: sets of speech and of sound events are FLAC for the most part, whose frames are small. For each of them PyAV lets go
of the interpreter's lock some times, for which threads then wait on each other; libsndfile decodes a window at once without it.
Invariants: FLAC is lossless, so the samples are those that `loaders.sound.layout` would give, to the bit. Only files of one or
two channels, which hold as many samples as the index says, as counted from their first.
Failure behaviour: None for whatever is not such a file, or fails: libav reads it, and says what is wrong.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from dataio.core import limits
from dataio.shards.contract import AudioInfo
from loaders.partial.file import Media
from loaders.sound.layout import F32, I16
from loaders.sound.nameless import nameless

MOST_BYTES = 16 * limits.MIB
"""Of a file; what is larger is not copied for a window of it."""


def read_flac(data: Media, info: AudioInfo, start: Fraction, seconds: Fraction) -> tuple[F32 | I16, Fraction] | None:
    """(channels, samples) of `seconds` from `start`, at the source's rate, and up to where there is sound: as stored where
    that is in 16 bits."""
    if (info.ext, info.codec) != ("flac", "flac") or info.channels > 2:
        return None
    if not isinstance(data, memoryview) or len(data) > MOST_BYTES:
        return None
    import soundfile

    first, count = -round(-start * info.sample_rate), round(seconds * info.sample_rate)
    low, high = min(count, max(0, -first)), max(0, min(count, info.samples - first))
    try:
        with nameless([data]) as descriptor, soundfile.SoundFile(descriptor, closefd=False) as file:
            said = file.format, file.samplerate, file.channels, file.frames
            if said != ("FLAC", info.sample_rate, info.channels, info.samples):
                return None
            canvas: Any = np.zeros((count, info.channels), np.int16 if file.subtype == "PCM_16" else np.float32)
            if low < high:
                file.seek(first + low)
                if len(file.read(out=canvas[low:high])) != high - low:
                    return None
    except (soundfile.SoundFileError, OSError):
        return None
    return canvas.T, Fraction(high if low < high else 0, info.sample_rate)
