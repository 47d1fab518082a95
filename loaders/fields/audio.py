"""The `Audio` field, and the buckets of recordings.

Purpose: the field describes which audio of a sample is decoded, and its format. `AudioLoader` uses the same windows.
Invariants: a field is immutable, and validated when it is created. Audio with `like` begins with the first frame of the
clip of that field.
Failure behaviour: `UsageError` with the argument and a valid value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Literal

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.audio.spec import AudioSpec, Features, Window, WindowCounts
from headrace.loaders.clip import Start
from headrace.loaders.sampling.columns import F64, HasValue, bucket_numbers, small_numbers
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Bucketing, Stream
from headrace.loaders.sampling.sample_ids import BucketNumbers, SampleIds, Small
from headrace.loaders.validation import checked

if TYPE_CHECKING:
    from headrace.loaders.sampling.buckets import Durations


@suggests_arguments()
@dataclass(frozen=True)
class Audio:
    """Audio of the sample: float32 (C, S) for each sample, or a log-mel spectrogram (C, n_mels, frames).

    With `like`, the audio begins with the clip of that field. Otherwise, it is a window of the recording. The entry
    `<name>.samples`, int64 (B,), says how many of the S samples are real audio and not zero padding. Without `like`,
    `<name>.start`, float64 (B,), has the start of each window in seconds.

    Args:
        seconds (float | None): length in seconds. Default: with `like`, the length of the clip; otherwise, 2.0.
        like (str | None): name of a `Video` field. Samples without audio are then silent. Default: None.
        sample_rate (int): in Hz, 1000 to 384000. Default: 16000.
        channels (int): 1 or 2. Default: 1.
        downmix (str): "mix" or "first", as in `AudioSpec`. Default: "mix".
        features (str | LogMel): "waveform", or `LogMel(...)` for spectrograms. Default: "waveform".
        start (str): where a window begins: "random", "center" or "every", as in `Window`. Not with `like`. Default:
            "random".
        per_sample (int): windows of each sample in an epoch. Not with `like`. Default: 1.
        jitter (float): as in `Window`, in seconds. Not with `like`. Default: 0.0.

    Raises:
        UsageError: an option is invalid.

    Example:
        >>> fields = {"video": Video(Clip(frames=4, fps=8), size=(32, 32)), "audio": Audio(like="video")}
        >>> loader = Loader(clips, batch_size=2, fields=fields)
        >>> next(iter(loader))["audio"].shape
        torch.Size([2, 1, 8000])
        >>> loader.close()
    """

    seconds: float | None = None
    _: KW_ONLY
    like: str | None = None
    sample_rate: int = 16_000
    channels: int = 1
    downmix: Literal["mix", "first"] = "mix"
    features: Features = "waveform"
    start: Start = "random"
    per_sample: int = 1
    jitter: float = 0.0

    def __post_init__(self) -> None:
        checked("Audio's like", self.like, str | None, "the name of a field")
        spec = self.spec()
        if self.like is not None and (self.start, self.per_sample, self.jitter) != ("random", 1, 0.0):
            raise UsageError(
                f"audio with like={self.like!r} begins with the clip of that field",
                hint="leave start, per_sample and jitter out",
            )
        if self.like is None:
            spec.samples()

    def spec(self) -> AudioSpec:
        """Return the format of the audio."""
        seconds = self.window.seconds if self.like is None else self.seconds
        return AudioSpec(
            self.sample_rate,
            channels=self.channels,
            seconds=seconds,
            downmix=self.downmix,
            features=self.features,
        )

    @property
    def window(self) -> Window:
        """The window, without `like`."""
        return Window(2.0 if self.seconds is None else self.seconds, self.start, self.per_sample, self.jitter)

    @property
    def condition(self) -> HasValue | None:
        """The samples that have the field. None for all of them."""
        return None if self.like is not None else HasValue("audio_codec")


def windows_in(dataset: Dataset, ids: SampleIds, window: Window) -> int | Small:
    """The number of windows of each of these samples."""
    if window.start != "every":
        return window.per_sample
    return small_numbers(dataset, ["samples", "sample_rate"], ids, WindowCounts(window))


def audio_bucketing(buckets: Durations | None, window: Window) -> Bucketing | None:
    """How recordings are assigned to buckets."""
    if buckets is None:
        return None
    if window.start == "every":
        raise UsageError(
            "start='every' needs windows of one length, but buckets have several", hint="use another start"
        )

    def sort(stream: Stream) -> BucketNumbers:
        assign, columns = _AssignRecordings(buckets), ["samples", "sample_rate"]
        return bucket_numbers(stream.dataset, columns, stream.ids, assign, len(buckets.seconds))

    return Bucketing(buckets.batches(), sort, buckets.numbers(), buckets.names())


@dataclass(frozen=True)
class _AssignRecordings:
    """Computes the bucket of each recording."""

    buckets: Durations

    def __call__(self, samples: F64, rate: F64) -> I64:
        return self.buckets.assign(samples / rate)


def windows_of(window: Window, buckets: Durations | None, streams: Sequence[int]) -> list[Window]:
    """The window of each stream. `streams` holds the number of each stream's bucket."""
    if buckets is None:
        return [window]
    return [replace(window, seconds=buckets.seconds[number]) for number in streams]
