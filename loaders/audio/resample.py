"""Convert audio from the source's sample rate and channels to those that are requested.

Purpose: turn samples of a known format into the float32 samples that `AudioSpec` describes, with FFmpeg's own
resampler. It runs without the GIL in the calling thread. PyAV's resampler starts threads of its own and waits for them.

Invariants:
- The samples are treated as if silence preceded and followed them. The result depends neither on earlier audio nor on
  how the samples are split into frames.
- Samples are resampled in pieces, since a span of many seconds does not fit into the CPU's caches.
- Samples that already have the requested format are returned unchanged.
- Each thread keeps its resamplers. Building one takes a tenth of the decoding time, most of it while holding the GIL.

Failure behaviour: libav's errors are raised unchanged. A resampler that failed is not used again.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, cast

import msgspec
import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph

from headrace.loaders.audio.frames import F32
from headrace.loaders.audio.spec import LAYOUTS, AudioSpec

AT_ONCE = 1 << 13
"""Approximate number of samples of each channel in a piece."""
MAX_KEPT = 8
"""Maximum number of resamplers that a thread keeps. It drops the least recently used one first."""
_LONGEST = 1 << 26
"""Maximum number of samples in a frame, since FFmpeg allocates at most two gigabytes at once."""
_TAPS = 48
"""Samples at the lower rate; more than the length of FFmpeg's filters."""


class _Kind(msgspec.Struct, frozen=True):
    """The format of audio frames, and the format that they are converted to."""

    format: str
    layout: str
    rate: int
    target_layout: str
    target_rate: int

    @property
    def period(self) -> int:
        """The number of source samples after which the filter's phase repeats."""
        return self.rate // math.gcd(self.rate, self.target_rate)

    @property
    def reach(self) -> int:
        """Samples of silence that prevent two consecutive spans from affecting each other's output."""
        return self._periods(-(-_TAPS * max(self.rate, self.target_rate) // self.target_rate))

    @property
    def piece(self) -> int:
        return self._periods(max(AT_ONCE, self.reach))

    def _periods(self, samples: int) -> int:
        return -(-samples // self.period) * self.period

    def output_samples(self, samples: int) -> int:
        return round(Fraction(samples * self.target_rate, self.rate))


class _Resampler:
    """Resamples one span after the other. Each span is padded with silence to `pieces` pieces.

    The output arrives in frames as long as a padded span, and the last samples of a frame depend on the input that
    follows. So each span begins `lead` samples after the beginning of a frame. Silence also precedes the first span.
    """

    def __init__(self, kind: _Kind, pieces: int) -> None:
        self._kind, self._length, self._at = kind, pieces * kind.piece, 0
        self._lead = kind.output_samples(kind.reach)
        target_format = f"sample_fmts=fltp:sample_rates={kind.target_rate}:channel_layouts={kind.target_layout}"
        filters = [
            ("asetnsamples", f"nb_out_samples={kind.piece}:pad=0"),
            ("aformat", target_format),
            ("atrim", f"start_sample={kind.output_samples(kind.piece) - self._lead}"),
            ("asetnsamples", f"nb_out_samples={kind.output_samples(self._length)}:pad=0"),
            ("abuffersink", ""),
        ]
        self._graph = Graph()
        self._graph.threads = 1
        self._begin: Any = self._graph.add_abuffer(
            sample_rate=kind.rate, format=kind.format, layout=kind.layout, time_base=Fraction(1, kind.rate)
        )
        chain = [self._begin, *(self._graph.add(*one) for one in filters)]
        self._end: Any = chain[-1]
        self._graph.link_nodes(*chain).configure()
        self._push(_silence(kind, kind.piece))

    def __call__(self, frames: Iterable[AudioFrame]) -> F32:
        begin = self._at
        for frame in frames:
            self._push(frame)
        samples = self._at - begin
        self._push(_silence(self._kind, self._length - samples))
        planes = [np.frombuffer(plane, np.float32) for plane in self._end.pull().planes]
        part = slice(self._lead, self._lead + self._kind.output_samples(samples))
        return planes[0][None, part] if len(planes) == 1 else np.stack([plane[part] for plane in planes])

    def _push(self, frame: AudioFrame) -> None:
        frame.sample_rate, frame.pts, frame.time_base = self._kind.rate, self._at, Fraction(1, self._kind.rate)
        self._at += frame.samples
        self._begin.push(frame)


class _ThreadCache(threading.local):
    """The resamplers of one thread."""

    def __init__(self) -> None:
        self._resamplers = OrderedDict[tuple[_Kind, int], _Resampler]()

    def resampled(self, kind: _Kind, samples: int, frames: Iterable[AudioFrame]) -> F32:
        pieces = -(-(samples + kind.reach) // kind.piece)
        resampler = self._resamplers.pop((kind, pieces), None) or _Resampler(kind, pieces)
        output = resampler(frames)
        self._resamplers[kind, pieces] = resampler
        if len(self._resamplers) > MAX_KEPT:
            self._resamplers.popitem(last=False)
        return output


_CACHE = _ThreadCache()


def resampled(source: F32, rate: int, layout: str, spec: AudioSpec) -> F32:
    """Resample samples to (channels, source length times the ratio of rates, rounded)."""
    target_layout = LAYOUTS[spec.channels]
    if spec.downmix == "first":
        source, layout = _first_channels(source, spec.channels), target_layout
    if (layout, rate) == (target_layout, spec.sample_rate):
        return source
    samples = source.shape[1]
    if not samples:
        return np.zeros((spec.channels, 0), np.float32)
    frames = (_frame(source[:, at : at + _LONGEST], layout) for at in range(0, samples, _LONGEST))
    return _CACHE.resampled(_Kind("fltp", layout, rate, target_layout, spec.sample_rate), samples, frames)


def resampled_frame(frame: AudioFrame, spec: AudioSpec) -> F32:
    """Like `resampled`, for a decoder's frame. The frame cannot be used afterwards. All of its channels are mixed."""
    kind = _Kind(frame.format.name, frame.layout.name, frame.sample_rate, LAYOUTS[spec.channels], spec.sample_rate)
    return _CACHE.resampled(kind, frame.samples, [frame])


def _frame(part: Any, layout: str) -> AudioFrame:
    return AudioFrame.from_ndarray(np.ascontiguousarray(part), format="fltp", layout=layout)


def _silence(kind: _Kind, samples: int) -> AudioFrame:
    frame = AudioFrame(kind.format, kind.layout, samples)
    for plane in frame.planes:
        np.frombuffer(cast(Any, plane), np.uint8)[:] = 1 << 7 if kind.format.startswith("u8") else 0
    return frame


def _first_channels(source: F32, channels: int) -> Any:
    """The first channels. The last one is repeated if there are too few."""
    return np.ascontiguousarray(source[np.minimum(np.arange(channels), len(source) - 1)])
