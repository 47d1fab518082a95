"""The fields of pixels, `Video` and `Image`, and the buckets of videos.

Purpose: these fields describe what is decoded of a sample's video. `VideoLoader` uses the same description.
Invariants: a field is immutable and checked. With buckets, the bucket of a video depends on its displayed size and on
its number of frames at the clip's frame spacing. The displayed size is the size after rotation if the field rotates.
Failure behaviour: `UsageError` with the argument and a valid value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from dataclasses import replace as replace_field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.loaders.clip import Clip, ClipCounts
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

    from headrace.loaders.audio.spec import AudioSpec
    from headrace.loaders.sampling.buckets import Buckets

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
        clip: object = self.clip
        if isinstance(clip, Mapping):  # of a configuration file
            object.__setattr__(self, "clip", Clip(**clip))
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

    def condition(self, buckets: Buckets | None = None) -> HasValue:
        """The samples that have the field. Images have clips of one frame only."""
        frames = self.spec().clip.frames
        takes_images = frames == 1 if buckets is None else buckets.takes_images(frames)
        return HasValue("video_ext", () if takes_images else tuple(sorted(IMAGE_EXTENSIONS)))


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


def clips_of(dataset: Dataset, ids: SampleIds, clip: Clip) -> int | Small:
    """The number of clips of each of these samples."""
    if clip.start != "every":
        return clip.per_video
    return small_numbers(dataset, ["frames", "duration"], ids, ClipCounts(clip))


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
    assign = AssignVideos(buckets, spec.clip, spec.rotate)

    def sort(stream: Stream) -> BucketNumbers:
        length = "frames" if spec.clip.rate is None else "duration"
        columns = ["height", "width", "rotation", length]
        return bucket_numbers(stream.dataset, columns, stream.ids, assign, len(buckets.buckets))

    frames = spec.clip.frames
    return Bucketing(buckets.batches(frames), sort, buckets.numbers(frames))


@dataclass(frozen=True)
class AssignVideos:
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


def _size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    check_type("size", size, (tuple, list), "size=(height, width)")
    sides: Sequence[int] = size
    if len(sides) != 2:
        raise UsageError(f"size={size!r} is not two numbers", hint="give size=(height, width)")
    height, width = sides
    return check_count("size's height", height, MAX_SIDE), check_count("size's width", width, MAX_SIDE)
