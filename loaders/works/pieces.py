"""Pieces of recordings: decode the stretch that the packing names.

Purpose: the `Work` behind `AudioLoader(packing=...)`.
Invariants: those of `headrace.loaders.interfaces`; a piece has exactly as many samples as its place says, at the wanted
rate, with zeros after the end of a recording that holds less than the index says. Where spectrograms are wanted, rows,
pieces and places are counted in their columns, and a piece's are those of its stretch of sound alone: nothing of its
neighbours enters. A stretch too short to be transformed is followed by zeros.
Failure behaviour: damage of one recording is returned in its place.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.shards.contract import AudioInfo
from headrace.loaders.decode.isolated import IsolatedDecoder
from headrace.loaders.interfaces import DAMAGE, FetchedSample, ProcessedSample, RowLayout, SampleLayout, SampleRef
from headrace.loaders.sampling.packing import Packing
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Stream, column
from headrace.loaders.sound.features import LogMel
from headrace.loaders.sound.spec import AudioSpec
from headrace.loaders.sound.window import Window
from headrace.loaders.works.windows import WindowWork, finished_sound


class PieceWork(WindowWork):
    """Makes pieces: "audio" float32 (C, L) of their own lengths, "start" in seconds after the sound's beginning, and
    "audio_samples", how many samples are real sound."""

    def __init__(self, spec: AudioSpec, packing: Packing, apart: IsolatedDecoder | None = None) -> None:
        self._hop, self._least, silence = 1, 0, 0.0
        shape: tuple[int, ...] = (spec.channels,)
        if isinstance(spec.features, LogMel):
            shape = (spec.channels, spec.features.bands)
            self._hop, self._least, silence = spec.features.hop, spec.features.n_fft // 2 + 1, spec.features.silence
            spec.features.check(spec.sample_rate, self._least)
        super().__init__(Window(packing.capacity * self._hop / spec.sample_rate), spec, apart)
        self._rows = RowLayout(packing.capacity, shape, silence)

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout(("audio",), {"start": None, "audio_samples": None}, self._rows)

    def _stretch(self, ref: SampleRef, audio: AudioInfo) -> tuple[Fraction, Fraction] | None:
        if ref.span is None:
            return None
        rate = self._spec.sample_rate
        return Fraction(ref.span.start * self._hop, rate), Fraction(ref.span.length * self._hop, rate)

    def _one(self, loaded: FetchedSample) -> ProcessedSample | HeadraceError:
        info, fit = loaded.ref.sample.audio, loaded.ref.span
        if info is None or fit is None:
            return UnsupportedError("the sample holds no sound")
        rate, first = self._spec.sample_rate, fit.start * self._hop
        start, count = Fraction(first, rate), fit.length * self._hop
        if self._hop > 1:
            there = int(_samples(np.float64(info.samples), np.float64(info.sample_rate), rate))
            count = max(self._least, min(count, there - first))
        try:
            sound, real = finished_sound(self._hear, loaded, info, start, self._spec, count, from_first=True)
        except DAMAGE as error:
            return error
        values = {"start": float(start), "audio_samples": real, "fit": fit}
        return ProcessedSample(loaded.ref.sample, {"audio": sound}, values)


def lengths(stream: Stream, spec: AudioSpec) -> I64:
    """Samples of each recording of a stream at the wanted rate, as the index knows them, or columns of their
    spectrograms."""
    samples, rates = (column(stream.dataset, name, stream.ids) for name in ("samples", "sample_rate"))
    count: I64 = _samples(samples, rates, spec.sample_rate)
    return np.where(count > 0, spec.features.frames(count), 0) if isinstance(spec.features, LogMel) else count


def _samples(samples: Any, rates: Any, rate: int) -> Any:
    return np.floor(samples / rates * rate + 1e-6).astype(np.int64)
