"""Pieces of recordings: decode the stretch that the packing names.

Purpose: the `Work` behind `AudioLoader(packing=...)`.
Invariants: those of `loaders.contract`; a piece has exactly as many samples as its place says, at the wanted rate, with
zeros after the end of a recording that holds less than the index says.
Failure behaviour: damage of one recording is returned in its place.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from dataio.core.errors import MillraceError, UnsupportedError, UsageError
from loaders.contract import Finished, Layout, Loaded
from loaders.decode.isolated import IsolatedDecoder
from loaders.order.packing import Packing
from loaders.order.permutation import I64
from loaders.plan import Stream, column
from loaders.samples.maker import DAMAGE
from loaders.sound.spec import AudioSpec
from loaders.sound.window import Window
from loaders.works.windows import WindowWork, finished_sound


class PieceWork(WindowWork):
    """Makes pieces: "audio" float32 (C, L) of their own lengths, "start" in seconds after the sound's beginning, and
    "audio_samples", how many samples are real sound."""

    def __init__(self, spec: AudioSpec, packing: Packing, apart: IsolatedDecoder | None = None) -> None:
        if spec.features != "waveform":
            raise UsageError("packing works on samples of sound", hint='use features="waveform"')
        super().__init__(Window(packing.capacity / spec.sample_rate), spec, apart)
        self._capacity = packing.capacity

    @property
    def layout(self) -> Layout:
        return Layout(("audio",), {"start": None, "audio_samples": None}, self._capacity)

    def _one(self, loaded: Loaded) -> Finished | MillraceError:
        info, fit = loaded.place.sample.audio, loaded.place.fit
        if info is None or fit is None:
            return UnsupportedError("the sample holds no sound")
        start = Fraction(fit.start, self._spec.sample_rate)
        try:
            sound, real = finished_sound(self._hear, loaded, info, start, self._spec, fit.length, from_first=True)
        except DAMAGE as error:
            return error
        values = {"start": float(start), "audio_samples": real, "fit": fit}
        return Finished(loaded.place.sample, {"audio": sound}, values)


def lengths(stream: Stream, rate: int) -> I64:
    """Samples of each recording of a stream at `rate` Hz, as the index knows them."""
    samples, rates = (column(stream.dataset, name, stream.ids) for name in ("samples", "sample_rate"))
    return np.floor(samples / rates * rate + 1e-6).astype(np.int64)
