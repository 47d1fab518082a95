"""The fields of pixels and sound: `Video`, `Image` and `Audio`, and the buckets of their samples.

Purpose: these fields describe what `Loader` decodes of a sample's video and audio. `VideoLoader` and `AudioLoader` use
the same descriptions and decoders.
Invariants: a field is immutable and checked. Audio with `like` begins with the first frame of the clip of that field.
Failure behaviour: `UsageError` with the argument and a valid value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.loaders.audio.spec import AudioSpec, Features, Window, WindowCounts
from headrace.loaders.clip import Clip, ClipCounts, Start
from headrace.loaders.decode import registry
from headrace.loaders.decode.base import Color
from headrace.loaders.processors.video import ClipSpec, Cut
from headrace.loaders.sampling.columns import F64, HasValue, bucket_numbers, small_numbers
from headrace.loaders.sampling.permutation import I64
from headrace.loaders.sampling.plan import Bucketing, Stream
from headrace.loaders.sampling.sample_ids import BucketNumbers, SampleIds, Small
from headrace.loaders.validation import check_choice, check_count, check_type, checked

if TYPE_CHECKING:
    import torch

    from headrace.loaders.sampling.buckets import Buckets, Durations

MAX_SIDE = 16_384


@suggests_arguments()
@dataclass(frozen=True)
class Video:
    """A clip of the sample's video: uint8 (T, 3, H, W) for each sample.

    The entry `<name>.start`, float64 (B,), has the start of each clip in seconds.

    Args:
        clip (Clip | None): which frames form a clip. Default: `Clip()`, 16 frames.
        size (tuple[int, int] | None): height and width in pixels. A clip is scaled to cover it, then cropped. None
            keeps the source's size, which all clips of a batch must then share. Default: None.
        crop, flip_prob, antialias, rotate, color, normalize, dtype, layout, decoder: as in `VideoLoader`.

    Raises:
        UsageError: for impossible options.

    Example:
        >>> loader = Loader(clips, batch_size=2, fields={"front": Video(Clip(frames=4), size=(32, 32))})
        >>> next(iter(loader))["front"].shape
        torch.Size([2, 4, 3, 32, 32])
        >>> loader.close()
    """

    clip: Clip | None = None
    size: tuple[int, int] | None = None
    _: KW_ONLY
    crop: Literal["center", "random"] = "center"
    flip_prob: float = 0.0
    antialias: bool = True
    rotate: bool = False
    color: Color = "bt601"
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    dtype: str | torch.dtype | None = None
    layout: str = "TCHW"
    decoder: str = "auto"

    def __post_init__(self) -> None:
        check_type("clip", self.clip, Clip, "clip=Clip(frames=16)")
        check_choice("color", self.color, ("bt601", "tagged", "fast"))
        registry.check_option(self.decoder)
        self.spec()

    def spec(self, audio: AudioSpec | None = None) -> ClipSpec:
        """Return the format of a clip, with or without audio."""
        clip = self.clip or Clip()
        if audio is not None:
            audio.samples(clip)
        return ClipSpec(
            clip=clip,
            size=_size(self.size),
            rotate=checked("rotate", self.rotate, bool),
            audio=audio,
            cut=Cut(self.crop, self.flip_prob),
            antialias=checked("antialias", self.antialias, bool),
            color=self.color,
        )

    @property
    def condition(self) -> HasValue:
        """The samples that have the field. Images have clips of one frame only."""
        return HasValue("video_ext", tuple(sorted(IMAGE_EXTENSIONS)) if self.spec().clip.frames > 1 else ())


@suggests_arguments()
@dataclass(frozen=True)
class Image(Video):
    """The sample's image, or one frame of its video: uint8 (3, H, W) for each sample.

    Args:
        clip (Clip | None): which frame of a video; its `frames` is 1. Default: `Clip(frames=1)`.
        size, crop, flip_prob, antialias, rotate, color, normalize, dtype, layout, decoder: as in `Video`. `layout` has
            the axes of a clip, and the image lacks the axis T.

    Raises:
        UsageError: for impossible options.

    Example:
        >>> loader = Loader(clips, batch_size=2, fields={"picture": Image(size=(32, 32))})
        >>> next(iter(loader))["picture"].shape
        torch.Size([2, 3, 32, 32])
        >>> loader.close()
    """

    def __post_init__(self) -> None:
        if self.clip is None:
            object.__setattr__(self, "clip", Clip(frames=1))
        super().__post_init__()
        if self.spec().clip.frames != 1:
            raise UsageError("an Image has one frame", hint="give Clip(frames=1), or use Video")


@suggests_arguments()
@dataclass(frozen=True)
class Audio:
    """Audio of the sample: float32 (C, S) for each sample, or a log-mel spectrogram (C, n_mels, frames).

    With `like`, the audio begins with the clip of that field. Else it is a window of its own. The entry
    `<name>.samples`, int64 (B,), says how many of the S samples are real audio and not zero padding. Without `like`,
    `<name>.start`, float64 (B,), has the start of each window in seconds.

    Args:
        seconds (float | None): length in seconds. Default: with `like`, the length of the clip; else 2.0.
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
        UsageError: for impossible options.

    Example:
        >>> fields = {"video": Video(Clip(frames=4, fps=8), size=(32, 32)), "sound": Audio(like="video")}
        >>> loader = Loader(clips, batch_size=2, fields=fields)
        >>> next(iter(loader))["sound"].shape
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
        spec = self.spec()
        if self.like is not None and (self.start, self.per_sample, self.jitter) != ("random", 1, 0.0):
            raise UsageError(
                f"the clips of {self.like!r} decide where audio with like= begins",
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


def parts_of(dataset: Dataset, ids: SampleIds, described: Video | Window) -> int | Small:
    """The number of clips or windows of each of these samples."""
    if isinstance(described, Window):
        window = described
        if window.start != "every":
            return window.per_sample
        return small_numbers(dataset, ["samples", "sample_rate"], ids, WindowCounts(window))
    clip = described.spec().clip
    if clip.start != "every":
        return clip.per_video
    return small_numbers(dataset, ["frames", "duration"], ids, ClipCounts(clip))


# --- buckets


def video_bucketing(buckets: Buckets | None, spec: ClipSpec) -> Bucketing | None:
    """How videos are assigned to buckets."""
    if buckets is None:
        return None
    if spec.size is not None:
        raise UsageError("with buckets each bucket has its size", hint="leave size out")
    if spec.clip.start == "every" and any(bucket.frames for bucket in buckets.buckets):
        raise UsageError(
            "start='every' counts clips of one length; buckets that name their frames have several",
            hint="leave the buckets' frames out, or use another start",
        )
    assign = _AssignVideos(buckets, spec.clip, spec.rotate)

    def sort(stream: Stream) -> BucketNumbers:
        length = "frames" if spec.clip.rate is None else "duration"
        columns = ["height", "width", "rotation", length]
        return bucket_numbers(stream.dataset, columns, stream.ids, assign, len(buckets.buckets))

    frames = spec.clip.frames
    return Bucketing(buckets.batches(frames), sort, buckets.numbers(frames))


@dataclass(frozen=True)
class _AssignVideos:
    """Computes the bucket of each video. `length` is in frames, or in seconds if the clip has a rate."""

    buckets: Buckets
    clip: Clip
    rotate: bool

    def __call__(self, height: F64, width: F64, rotation: F64, length: F64) -> I64:
        turned = (rotation % 180 == 90) & self.rotate
        heights, widths = np.where(turned, width, height), np.where(turned, height, width)
        frames = np.floor((length - 1) / self.clip.stride) + 1  # at the clip's frame spacing
        if self.clip.rate is not None:
            frames = length * float(self.clip.rate)
        return self.buckets.assign(heights.astype(np.int64), widths.astype(np.int64), frames, self.clip.frames)


def clip_specs(spec: ClipSpec, buckets: Buckets | None, streams: Sequence[int]) -> list[ClipSpec]:
    """The format of each stream's clips. `streams` holds the number of each stream's bucket."""
    if buckets is None:
        return [spec]
    chosen = [buckets.buckets[number] for number in streams]
    return [
        replace(spec, size=one.size, clip=replace_field(spec.clip, frames=one.frames or spec.clip.frames))
        for one in chosen
    ]


def audio_bucketing(buckets: Durations | None, window: Window) -> Bucketing | None:
    """How recordings are assigned to buckets."""
    if buckets is None:
        return None
    if window.start == "every":
        raise UsageError(
            "start='every' counts windows of one length, and buckets have several", hint="use another start"
        )

    def sort(stream: Stream) -> BucketNumbers:
        assign, columns = _AssignRecordings(buckets), ["samples", "sample_rate"]
        return bucket_numbers(stream.dataset, columns, stream.ids, assign, len(buckets.seconds))

    return Bucketing(buckets.batches(), sort, buckets.numbers())


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
    return [replace_field(window, seconds=buckets.seconds[number]) for number in streams]


def _size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    check_type("size", size, (tuple, list), "size=(height, width)")
    sides: Sequence[int] = size
    if len(sides) != 2:
        raise UsageError(f"size={size!r} is not two numbers", hint="give size=(height, width)")
    height, width = sides
    return check_count("size's height", height, MAX_SIDE), check_count("size's width", width, MAX_SIDE)
