"""From the source's rate and channels to those that are wanted.

Purpose: (float32 or int16 samples, what they are) -> float32 samples as `AudioSpec` says, by FFmpeg's own resampler.
Invariants: the result depends on the samples alone, not on how they are handed over: some at a time, since a stretch of many
seconds does not fit into the processor's caches. Samples of 16 bits give what their floats would. What is as wanted is given back
as it is.
Failure behaviour: libav's errors.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from loaders.sound.layout import F32, I16
from loaders.sound.spec import LAYOUTS, AudioSpec

AT_ONCE = 1 << 15
"""Samples of each channel."""


def resampled(source: F32 | I16, rate: int, layout: str, spec: AudioSpec) -> F32:
    """(channels, about source length times the ratio of rates)."""
    wanted, whole = LAYOUTS[spec.channels], source.dtype == np.int16
    if spec.policy == "first":
        source, layout = _first(source, spec.channels), wanted
    if (layout, rate) == (wanted, spec.sample_rate):
        return source.astype(np.float32) * np.float32(1 / (1 << 15)) if whole else cast(F32, source)
    resampler = AudioResampler(format="fltp", layout=wanted, rate=spec.sample_rate)
    made = list[AudioFrame]()
    for at in range(0, source.shape[1], AT_ONCE):
        some: Any = np.ascontiguousarray(source[:, at : at + AT_ONCE])
        frame = AudioFrame.from_ndarray(some, format="s16p" if whole else "fltp", layout=layout)
        frame.sample_rate = rate
        made += resampler.resample(frame)
    made += resampler.resample(None)
    return (
        np.concatenate([one.to_ndarray() for one in made], axis=1) if made else np.zeros((spec.channels, 0), np.float32)
    )


def _first(source: F32 | I16, channels: int) -> Any:
    """The first channels, and the last one again where there are too few."""
    return np.ascontiguousarray(source[np.minimum(np.arange(channels), len(source) - 1)])
