"""Audio without video: choose a window, or take the piece that packing assigned, then decode and resample it.

Purpose: the processors of `AudioLoader`, and `finish_audio`, which `ClipProcessor` uses for the audio of clips.
Invariants: those of `headrace.loaders.interfaces`. A window starts at the sample that
`headrace.loaders.audio.spec.begin` returns. A piece of samples has exactly the length that its `SampleRef` gives, at
the target rate. Zeros follow where the recording is shorter than the index says. With spectrograms, rows and pieces are
counted in columns. A piece's columns depend on its own audio only, never on adjacent pieces. Audio that is too short to
transform is padded with zeros.
Failure behaviour: `process` returns the error of a damaged recording at the sample's position.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.shards.sample import AudioInfo, Sample
from headrace.loaders.audio.decode import AudioDecoder, decode_audio
from headrace.loaders.audio.spec import AudioSpec, LogMel, Window, begin
from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.interfaces import (
    DAMAGE,
    FetchedSample,
    Needs,
    ProcessedSample,
    RowLayout,
    SampleLayout,
    SampleRef,
)
from headrace.loaders.sampling.columns import column
from headrace.loaders.sampling.packing import Packing
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Stream


class WindowProcessor:
    """Turns files into windows of audio.

    Each sample has "audio", float32 (C, S); "start", the seconds from the start of the audio to the window; and
    "audio_samples", the number of samples that are real audio.
    """

    def __init__(self, window: Window, spec: AudioSpec, isolated: SubprocessDecoder | None = None) -> None:
        self._window, self._spec, self._isolated = window, spec, isolated
        self._decode_audio: AudioDecoder = decode_audio if isolated is None else isolated.decode_audio

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout(("audio",), {"start": torch.float64, "audio_samples": torch.int64})

    def needs(self, ref: SampleRef) -> Needs:
        audio = ref.sample.audio
        if audio is None:
            return {}
        member = byte_ranges.member_of(ref.sample, audio.ext)
        if member is None:  # the file is read whole; most files are short
            return {audio.ext: None}
        stretch = self._time_range(ref, audio)
        if stretch is None or not byte_ranges.reads_part_of_audio(ref.sample, member, audio, self._window.seconds):
            return {audio.ext: None}
        span = byte_ranges.of_window(ref.sample, audio, *stretch, member.length)
        return {audio.ext: byte_ranges.runs(member, [span])}

    def _time_range(self, ref: SampleRef, audio: AudioInfo) -> tuple[Fraction, Fraction] | None:
        """The seconds from the start of the audio to the window, and the window's length in seconds."""
        return begin(audio, self._window, ref), Fraction(self._window.seconds)

    def cost(self, sample: Sample) -> int:
        audio = sample.audio
        return 0 if audio is None else round(audio.sample_rate * self._window.seconds) * audio.channels * 4

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return [self._process_one(one) for one in fetched]

    def close(self) -> None:
        if self._isolated is not None:
            self._isolated.close()

    def _process_one(self, fetched: FetchedSample) -> ProcessedSample | HeadraceError:
        info = fetched.ref.sample.audio
        if info is None:
            return UnsupportedError("the sample has no audio")
        start = begin(info, self._window, fetched.ref)
        try:
            audio, real = finish_audio(
                self._decode_audio, fetched, info, start, self._spec, self._spec.samples(), from_first=True
            )
        except DAMAGE as error:
            return error
        return ProcessedSample(fetched.ref.sample, {"audio": audio}, {"start": float(start), "audio_samples": real})


def finish_audio(
    decode: AudioDecoder,
    fetched: FetchedSample,
    info: AudioInfo,
    start: Fraction,
    spec: AudioSpec,
    samples: int,
    *,
    from_first: bool = False,
) -> tuple[torch.Tensor, int]:
    """The tensor of `samples` samples from `start`, in the format of `spec`, and how many of them are real audio."""
    audio, real = decode(fetched.media[info.ext], info, start, spec, samples, from_first)
    return torch.from_numpy(audio), real


class PieceProcessor(WindowProcessor):
    """Turns files into the pieces of packed rows.

    Each sample has "audio", float32 (C, L), where L is the piece's own length; "start", the seconds from the start of
    the audio to the piece; and "audio_samples", the number of samples that are real audio.
    """

    def __init__(self, spec: AudioSpec, packing: Packing, isolated: SubprocessDecoder | None = None) -> None:
        self._hop, self._least, silence = 1, 0, 0.0
        shape: tuple[int, ...] = (spec.channels,)
        if isinstance(spec.features, LogMel):
            shape = (spec.channels, spec.features.n_mels)
            self._hop, self._least, silence = (
                spec.features.hop_length,
                spec.features.n_fft // 2 + 1,
                spec.features.silence,
            )
            spec.features.check(spec.sample_rate, self._least)
        super().__init__(Window(packing.capacity * self._hop / spec.sample_rate), spec, isolated)
        self._rows = RowLayout(packing.capacity, shape, silence)

    @property
    def layout(self) -> SampleLayout:
        return SampleLayout(("audio",), {"start": None, "audio_samples": None}, self._rows)

    def _time_range(self, ref: SampleRef, audio: AudioInfo) -> tuple[Fraction, Fraction] | None:
        if ref.span is None:
            return None
        rate = self._spec.sample_rate
        return Fraction(ref.span.start * self._hop, rate), Fraction(ref.span.length * self._hop, rate)

    def _process_one(self, fetched: FetchedSample) -> ProcessedSample | HeadraceError:
        info, fit = fetched.ref.sample.audio, fetched.ref.span
        if info is None or fit is None:
            return UnsupportedError("the sample has no audio")
        rate, first_sample = self._spec.sample_rate, fit.start * self._hop
        start, count = Fraction(first_sample, rate), fit.length * self._hop
        if isinstance(self._spec.features, LogMel):
            available = int(_samples(np.float64(info.samples), np.float64(info.sample_rate), rate))
            count = max(self._least, min(count, available - first_sample))
        try:
            audio, real = finish_audio(self._decode_audio, fetched, info, start, self._spec, count, from_first=True)
        except DAMAGE as error:
            return error
        values = {"start": float(start), "audio_samples": real, "fit": fit}
        return ProcessedSample(fetched.ref.sample, {"audio": audio}, values)


def lengths(stream: Stream, spec: AudioSpec) -> I64:
    """The length of each recording of a stream, computed from the index.

    The unit is a sample at the output rate, or a spectrogram column.
    """
    samples, rates = (column(stream.dataset, name, stream.ids) for name in ("samples", "sample_rate"))
    count: I64 = _samples(samples, rates, spec.sample_rate)
    return np.where(count > 0, spec.features.frames(count), 0) if isinstance(spec.features, LogMel) else count


def _samples(samples: Any, rates: Any, rate: int) -> Any:
    return np.floor(samples / rates * rate + 1e-6).astype(np.int64)
