"""Descriptions of the requested audio: sample rate, channels, window, and features.

Purpose: frozen descriptions, and the choice of a window in a recording. `headrace.loaders.audio.decode` and
`headrace.loaders.audio.mel` use them. Everything here is pure and needs no torch.
Invariants: equal descriptions give equal samples. The choice of a window depends only on its arguments. Window starts
count from the first sample of the audio. A recording shorter than the window is read from its beginning.
Failure behaviour: `UsageError` for values that are not possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders.clip import Clip, Counts, Start, Values, check_start, first_of
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.validation import check_fields

MAX_FFT = 1 << 16
MAX_BANDS = 1024


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class LogMel:
    """Log-mel spectrograms; arguments are named as in torchaudio.

    Args:
        n_mels (int): number of mel bands, 1 to 1024. Default: 80.
        n_fft (int): samples of each Fourier transform, 2 to 65536. Default: 400.
        hop_length (int): samples between two columns, 1 to 65536. Default: 160.
        f_min (float): lowest frequency in Hz. Default: 0.
        f_max (float | None): highest frequency in Hz; None is half the sample rate. Default: None.
        scale (str): mel scale, "slaney" or "htk". Default: "slaney".
        log (str): "natural" or "decadic" (base 10). Default: "natural".
        floor (float): power below which the logarithm is clamped, above 0. Default: 1e-10.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> loader = AudioLoader(clips, batch_size=2, window=0.5, features=LogMel(n_mels=64))
        >>> next(iter(loader))["mel"].shape
        torch.Size([2, 1, 64, 51])
        >>> loader.close()
    """

    n_mels: int = 80
    n_fft: int = 400
    hop_length: int = 160
    f_min: float = 0.0
    f_max: float | None = None
    scale: Literal["slaney", "htk"] = "slaney"
    log: Literal["natural", "decadic"] = "natural"
    floor: float = 1e-10

    def __post_init__(self) -> None:
        check_fields(self)
        if not (1 <= self.hop_length <= MAX_FFT and 2 <= self.n_fft <= MAX_FFT and 1 <= self.n_mels <= MAX_BANDS):
            raise UsageError(
                f"{self} is not possible", hint=f"hop_length and n_fft up to {MAX_FFT}, n_mels up to {MAX_BANDS}"
            )
        if self.scale not in ("slaney", "htk") or self.log not in ("natural", "decadic") or not self.floor > 0:
            raise UsageError(f"{self} is not possible", hint="scale 'slaney' or 'htk', log 'natural' or 'decadic'")
        if not 0 <= self.f_min < math.inf or not (self.f_max is None or self.f_max > self.f_min):
            raise UsageError(
                f"no bands lie between {self.f_min} and {self.f_max} Hz", hint="use f_min >= 0 and f_max above f_min"
            )

    def frames(self, samples: Any) -> Any:
        """The number of columns for this number of samples. Also accepts an array."""
        return 1 + samples // self.hop_length

    @property
    def silence(self) -> float:
        """The value of every band in a column of silence."""
        return math.log(self.floor) if self.log == "natural" else math.log10(self.floor)

    def check(self, sample_rate: int, samples: int) -> None:
        """Raise `UsageError` if windows of `samples` at this rate cannot be transformed."""
        if samples <= self.n_fft // 2:
            raise UsageError(f"{samples} samples are too few for n_fft={self.n_fft}", hint="take longer windows")
        if self.f_min >= sample_rate / 2 or (self.f_max or 0) > sample_rate / 2:
            raise UsageError(f"sound of {sample_rate} Hz holds nothing above {sample_rate / 2} Hz", hint="lower f_max")


LAYOUTS = {1: "mono", 2: "stereo"}
MAX_SAMPLES = 1 << 27
Features = Literal["waveform"] | LogMel


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class AudioSpec:
    """The audio of a clip or window: float32 (channels, samples), or log-mel spectrograms of it.

    Args:
        sample_rate (int): in Hz, 1000 to 384000. Default: 16000.
        channels (int): 1 or 2. Default: 1.
        seconds (float | None): length from the clip's first frame on. None is the clip's own length, frames / fps,
            which only clips spaced by `fps` have. Default: None.
        downmix (str): how other numbers of channels become `channels`. "mix" mixes them as FFmpeg does. "first" takes
            the first channels unchanged, and repeats the last one if there are too few. Default: "mix".
        features (str | LogMel): "waveform", or `LogMel(...)` for spectrograms in place of samples. Default: "waveform".

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> loader = VideoLoader(clips, batch_size=2, clip=Clip(frames=4), size=(32, 32), audio=AudioSpec(seconds=0.25))
        >>> next(iter(loader))["audio"].shape
        torch.Size([2, 1, 4000])
        >>> loader.close()
    """

    sample_rate: int = 16_000
    channels: int = 1
    seconds: float | None = None
    downmix: Literal["mix", "first"] = "mix"
    features: Features = "waveform"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1_000 <= self.sample_rate <= 384_000 or self.channels not in LAYOUTS:
            raise UsageError(f"{self} is not possible", hint="1000 to 384000 Hz, 1 or 2 channels")
        if self.seconds is not None and not 0 < self.seconds * self.sample_rate <= MAX_SAMPLES:
            raise UsageError(
                f"{self.seconds} is not a valid length of audio in seconds",
                hint=f"more than 0, and at most {MAX_SAMPLES} samples",
            )
        if self.downmix not in ("mix", "first") or not (
            self.features == "waveform" or isinstance(self.features, LogMel)
        ):
            raise UsageError(
                f"{self} is not known", hint="downmix 'mix' or 'first', features 'waveform' or LogMel(...)"
            )

    def samples(self, clip: Clip | None = None) -> int:
        """Samples per channel: seconds times rate, rounded half to even."""
        if self.seconds is not None:
            count = max(1, round(Fraction(self.seconds) * self.sample_rate))
        elif clip is not None and clip.fps is not None:
            count = max(1, round(Fraction(clip.frames) / Fraction(clip.fps) * self.sample_rate))
        else:
            raise UsageError(
                "the length of the sound is open: clips spaced by stride last as long as each video's frame rate says",
                hint="give AudioSpec(seconds=...), or space the clip by fps",
            )
        if isinstance(self.features, LogMel):
            self.features.check(self.sample_rate, count)
        return count


MAX_SECONDS = 86_400.0


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Window:
    """The part of a recording that is delivered, and how many windows are cut from each recording.

    Args:
        seconds (float): length of a window, above 0 and at most a day. Default: 2.0.
        start (str): where a window begins. Default: "random".

            - "random": drawn uniformly from the samples where the whole window fits, again for every epoch, sample and
              window.
            - "center": the middle of the recording, or the middles of `per_sample` equal parts.
            - "every": windows follow each other without a gap, as many as fit whole, at least one.
        per_sample (int): windows of each recording in an epoch; not with "every". Default: 1.
        jitter (float): move a "center" or "every" window by up to this many seconds in either direction, drawn for
            every epoch, sample and window. Default: 0.0.

    Raises:
        UsageError: for an impossible window.

    Example:
        >>> loader = AudioLoader(clips, batch_size=2, window=Window(0.5, start="every"))
        >>> len(loader) * 2 > len(loader.dataset)
        True
        >>> loader.close()
    """

    seconds: float = 2.0
    start: Start = "random"
    per_sample: int = 1
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.seconds <= MAX_SECONDS or self.per_sample < 1 or self.jitter > MAX_SECONDS:
            raise UsageError(f"{self} is not a window", hint="seconds and per_sample are positive, at most a day")
        check_start(self.start, self.per_sample, self.jitter)


@dataclass(frozen=True)
class WindowCounts:
    """Computes the number of windows of each recording from its samples and sample rate, for `start="every"`."""

    window: Window

    def __call__(self, samples: Values, rate: Values) -> Counts:
        return np.maximum(1, np.floor(samples / rate / self.window.seconds + 1e-9)).astype(np.int64)


def begin(info: AudioInfo, window: Window, ref: SampleRef) -> Fraction:
    """Seconds from the first sample of the audio to that of the window: a whole number of the source's samples."""
    span = Fraction(window.seconds) * info.sample_rate
    target = max(0, int(info.samples - span))
    where = (ref.seed, ref.epoch, ref.sample.id, ref.number, ref.attempt)
    jitter = round(Fraction(window.jitter) * info.sample_rate)
    return Fraction(first_of(window.start, target, span, window.per_sample, jitter, where), info.sample_rate)
