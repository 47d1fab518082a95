"""Sound alone: choose the window, decode it, and resample it.

Purpose: the `Work` behind `AudioLoader`, and `finished_sound`, by which clips get theirs.
Invariants: those of `headrace.loaders.interfaces`; the first sample of a window is the one that
`headrace.loaders.sound.window.begin` names.
Failure behaviour: damage of one sample is returned in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch

from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.shards.contract import AudioInfo, Sample
from headrace.loaders.decode.isolated import IsolatedDecoder
from headrace.loaders.interfaces import DAMAGE, FetchedSample, Needs, ProcessedSample, SampleLayout, SampleRef
from headrace.loaders.partial import needed
from headrace.loaders.sound.decode import Hear, decode_audio
from headrace.loaders.sound.spec import AudioSpec
from headrace.loaders.sound.window import Window, begin


class WindowWork:
    """Makes windows: "audio" float32 (C, S), "start" their beginning in seconds after the sound's
    own, and "audio_samples", how many samples are real sound."""

    def __init__(self, window: Window, spec: AudioSpec, apart: IsolatedDecoder | None = None) -> None:
        self._window, self._spec, self._apart = window, spec, apart
        self._hear: Hear = decode_audio if apart is None else apart.hear

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout(("audio",), {"start": torch.float64, "audio_samples": torch.int64})

    def needs(self, ref: SampleRef) -> Needs:
        audio = ref.sample.audio
        if audio is None:
            return {}
        member = needed.member_of(ref.sample, audio.ext)
        if member is None:  # most files are short
            return {audio.ext: None}
        stretch = self._stretch(ref, audio)
        if stretch is None or not needed.reads_part_of_sound(ref.sample, member, audio, self._window.seconds):
            return {audio.ext: None}
        span = needed.of_window(ref.sample, audio, *stretch, member.length)
        return {audio.ext: needed.runs(member, [span])}

    def _stretch(self, ref: SampleRef, audio: AudioInfo) -> tuple[Fraction, Fraction] | None:
        """From which second after the sound's beginning on a place is, and how long."""
        return begin(audio, self._window, ref), Fraction(self._window.seconds)

    def cost(self, sample: Sample) -> int:
        audio = sample.audio
        return 0 if audio is None else round(audio.sample_rate * self._window.seconds) * audio.channels * 4

    def process(self, loaded: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return [self._one(one) for one in loaded]

    def close(self) -> None:
        if self._apart is not None:
            self._apart.close()

    def _one(self, loaded: FetchedSample) -> ProcessedSample | HeadraceError:
        info = loaded.ref.sample.audio
        if info is None:
            return UnsupportedError("the sample holds no sound")
        start = begin(info, self._window, loaded.ref)
        try:
            sound, real = finished_sound(
                self._hear, loaded, info, start, self._spec, self._spec.samples(), from_first=True
            )
        except DAMAGE as error:
            return error
        return ProcessedSample(loaded.ref.sample, {"audio": sound}, {"start": float(start), "audio_samples": real})


def finished_sound(
    hear: Hear,
    loaded: FetchedSample,
    info: AudioInfo,
    start: Fraction,
    spec: AudioSpec,
    samples: int,
    *,
    from_first: bool = False,
) -> tuple[torch.Tensor, int]:
    """The tensor of `samples` samples from `start`, as `spec` wants it, and how many of them are real sound."""
    sound, real = hear(loaded.media[info.ext], info, start, spec, samples, from_first)
    return torch.from_numpy(sound), real
