"""From the source's rate and channels to those that are wanted.

Purpose: (float32 samples, what they are) -> float32 samples as `AudioSpec` says, by FFmpeg's own resampler, in one call
without the interpreter's lock and on this thread: PyAV's resampler has threads of its own, for which it waits.
Invariants: the result depends on the samples alone, not on how they are handed over: some at a time, since a stretch of many
seconds does not fit into the processor's caches. What is as wanted is given back as it is.
Failure behaviour: libav's errors.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph

from loaders.sound.layout import F32
from loaders.sound.spec import LAYOUTS, AudioSpec

AT_ONCE = 1 << 13
"""Samples of each channel."""
_LONGEST = 1 << 26
"""Samples of a frame: FFmpeg gives out no more than two gigabytes at once."""
_MORE = 1 << 12
"""Samples that a resampler may give more than were asked for."""


def resampled(source: F32, rate: int, layout: str, spec: AudioSpec) -> F32:
    """(channels, about source length times the ratio of rates)."""
    wanted = LAYOUTS[spec.channels]
    if spec.policy == "first":
        source, layout = _first(source, spec.channels), wanted
    if (layout, rate) == (wanted, spec.sample_rate):
        return source
    if not source.shape[1]:
        return np.zeros((spec.channels, 0), np.float32)
    tick = Fraction(1, rate)
    graph = Graph()
    graph.threads = 1
    begin: Any = graph.add_abuffer(sample_rate=rate, format="fltp", layout=layout, time_base=tick)
    filters = [*in_pieces_to(spec), at_most(round(Fraction(source.shape[1] * spec.sample_rate, rate)))]
    chain = [begin, *(graph.add(*one.partition("=")[::2]) for one in filters), graph.add("abuffersink")]
    graph.link_nodes(*chain).configure()
    for at in range(0, source.shape[1], _LONGEST):
        part: Any = np.ascontiguousarray(source[:, at : at + _LONGEST])
        frame = AudioFrame.from_ndarray(part, format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, at, tick
        begin.push(frame)
    begin.push(None)
    return cast(F32, chain[-1].pull().to_ndarray())


def in_pieces_to(spec: AudioSpec) -> list[str]:
    """FFmpeg's filters that make rate and channels those that are wanted, of a mix of all channels."""
    wanted = f"sample_fmts=fltp:sample_rates={spec.sample_rate}:channel_layouts={LAYOUTS[spec.channels]}"
    return [f"asetnsamples=nb_out_samples={AT_ONCE}:pad=0", f"aformat={wanted}"]


def at_most(samples: int) -> str:
    """FFmpeg's filter that makes one frame of about so many samples, and of what more a resampler may give."""
    return f"asetnsamples=nb_out_samples={samples + _MORE}:pad=0"


def _first(source: F32, channels: int) -> Any:
    """The first channels, and the last one again where there are too few."""
    return np.ascontiguousarray(source[np.minimum(np.arange(channels), len(source) - 1)])
