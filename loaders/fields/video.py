"""The `Video` and `Image` fields, and the buckets of videos.

Purpose: these fields describe which frames of a sample are decoded, and their format. `VideoLoader` uses the same
description.
Invariants: a field is immutable, and validated when it is created. With buckets, the bucket of a video depends on its
displayed size and on its number of frames at the clip's frame spacing. The displayed size is the size after rotation if
the field rotates.
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
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS, VIDEO_EXTENSIONS
from headrace.loaders.clip import Clip, ClipCounts
from headrace.loaders.decode import registry
from headrace.loaders.decode.base import Color, PixelFormat
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
    """A clip of a video of the sample: uint8 (T, 3, H, W) for each sample.

    The entry `<name>.start`, float64 (B,), has the start of each clip in seconds on the sample's clock. With raw planes,
    a clip is (T, H * 3 / 2, W), and the entry `<name>.color`, int64 (B, 2), has the matrix and the range of each clip.
    `planes_to_rgb` converts them.

    Args:
        clip (Clip | None): which frames form a clip. Default: `Clip()`, 16 frames.
        size (tuple[int, int] | None): height and width in pixels. A clip is scaled to cover it, then cropped. None
            keeps the source's size, which all clips of a batch must then share. Default: None.
        crop, flip_prob, antialias, rotate, color, normalize, dtype, layout, decoder: as in `VideoLoader`.
        pixel_format (str): "rgb", or raw planes without colour conversion: "yuv420p" or "nv12", uint8 with half the
            bytes of RGB, or "yuv420p10", uint16 with 10 bits. Sides are even, and PyAV decodes. Default: "rgb".
        file (str | None): extension of the file with the video, such as "cam1.mp4". Default: None, the sample's own
            video (`Sample.video`).
        like (str | None): name of another `Video` field. The clip then shows the instants of the frames of that field,
            and has as many frames. A sample whose video shows nothing at one of them is a bad sample. Default: None.
        required (bool): leave out samples that lack `file`. With False they stay: their clip is zeros, and the entry
            `<name>.present`, bool (B,), says which samples have it. Default: True.

    Raises:
        UsageError: an option is invalid.

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
    pixel_format: PixelFormat = "rgb"
    file: str | None = None
    like: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        clip: object = self.clip
        if isinstance(clip, Mapping):  # of a configuration file
            object.__setattr__(self, "clip", Clip(**clip))
        check_type("clip", self.clip, Clip, "clip=Clip(frames=16)")
        check_choice("color", self.color, ("bt601", "tagged", "fast"))
        check_choice("pixel_format", self.pixel_format, ("rgb", "yuv420p", "nv12", "yuv420p10"))
        registry.check_option(self.decoder)
        self._check_file()
        self.spec()
        if self.pixel_format != "rgb":
            self._check_planes()

    def _check_file(self) -> None:
        """Raise `UsageError` if `file`, `like`, `required` and `clip` do not go together."""
        checked("required", self.required, bool)
        if self.file is not None:
            name: str = checked("file", self.file, str, 'an extension, such as "cam1.mp4"').removeprefix(".").lower()
            if name.rpartition(".")[2] in IMAGE_EXTENSIONS:
                raise UsageError(
                    f"file={self.file!r:.200} is an image, and the index describes only further videos of a sample",
                    hint=f'without file, Image takes the image of a sample without a video; Bytes("{name:.80}") delivers '
                    "the file as it is",
                )
            if name.rpartition(".")[2] not in VIDEO_EXTENSIONS:
                raise UsageError(
                    f"file={self.file!r:.200} is not a video file of a sample",
                    hint='give the extension of a video, such as "cam1.mp4"',
                )
            object.__setattr__(self, "file", name)
        if checked("like", self.like, str | None, "the name of a field") and self.clip is not None:
            raise UsageError(
                f"a field with like={self.like!r:.80} shows the instants of that field", hint="leave clip out"
            )
        if not self.required and self.file is None:
            raise UsageError("required=False is for a field with file=", hint='such as file="cam1.mp4"')

    def _check_planes(self) -> None:
        """Raise `UsageError` for options that planes do not have."""
        if self.decoder not in ("auto", registry.FALLBACK):
            raise UsageError(
                f"decoder={self.decoder!r} delivers no {self.pixel_format}; PyAV does, on the CPU",
                hint=f'decoder="{registry.FALLBACK}", or leave it out',
            )
        for name in ("color", "normalize", "dtype", "layout", "antialias"):
            if getattr(self, name) != getattr(Video, name):
                raise UsageError(
                    f"{name}={getattr(self, name)!r} does not go with pixel_format={self.pixel_format!r}, "
                    "which delivers planes without conversion",
                    hint=f"leave {name} out; headrace.loaders.planes_to_rgb converts on the GPU",
                )
        _check_even(self.size, self.pixel_format)

    @property
    def decoder_option(self) -> str:
        """The decoder, as `registry.candidates` takes it. PyAV makes planes."""
        return self.decoder if self.pixel_format == "rgb" else registry.FALLBACK

    def spec(self, audio: AudioSpec | None = None) -> ClipSpec:
        """Return the format of a clip, with or without audio."""
        clip = self.clip or Clip()
        if audio is not None:
            audio.samples(clip)
        return ClipSpec(
            clip=clip,
            file=self.file,
            size=_size(self.size),
            rotate=checked("rotate", self.rotate, bool),
            audio=audio,
            cut=Cut(self.crop, self.flip_prob),
            antialias=checked("antialias", self.antialias, bool),
            color=self.color,
            pixel_format=self.pixel_format,
        )

    def condition(self, buckets: Buckets | None = None) -> HasValue:
        """The samples that have the field, if it has no `file`.

        They include images only if clips, or those of a bucket, have one frame.
        """
        frames = self.spec().clip.frames
        takes_images = frames == 1 if buckets is None else buckets.takes_images(frames)
        return HasValue("video_ext", () if takes_images else tuple(sorted(IMAGE_EXTENSIONS)))


@suggests_arguments()
@dataclass(frozen=True)
class Image(Video):
    """The sample's image, or one frame of its video: uint8 (3, H, W) for each sample.

    Args:
        clip (Clip | None): which frame of a video; its `frames` is 1. Default: `Clip(frames=1)`.
        size, crop, flip_prob, antialias, rotate, color, normalize, dtype, layout, decoder, pixel_format, file, required:
            as in `Video`. `layout` names the axes of a clip; the entry has no axis T. There is no `like`.

    Raises:
        UsageError: an option is invalid.

    Example:
        >>> loader = Loader(clips, batch_size=2, fields={"picture": Image(size=(32, 32))})
        >>> next(iter(loader))["picture"].shape
        torch.Size([2, 3, 32, 32])
        >>> loader.close()
    """

    def __post_init__(self) -> None:
        if self.like is not None:
            raise UsageError("an Image is not like another field", hint="use Video(like=...)")
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
        raise UsageError("with buckets, each bucket has its own size", hint="leave size out")
    if spec.clip.start == "every" and any(bucket.frames for bucket in buckets.buckets):
        raise UsageError(
            "start='every' needs clips of one length, but buckets with frames have several",
            hint="leave the buckets' frames out, or use another start",
        )
    if spec.pixel_format != "rgb":
        for bucket in buckets.buckets:
            _check_even(bucket.size, spec.pixel_format)
    assign = AssignVideos(buckets, spec.clip, spec.rotate)

    def sort(stream: Stream) -> BucketNumbers:
        length = "frames" if spec.clip.rate is None else "duration"
        columns = ["height", "width", "rotation", length]
        return bucket_numbers(stream.dataset, columns, stream.ids, assign, len(buckets.buckets))

    frames = spec.clip.frames
    return Bucketing(buckets.batches(frames), sort, buckets.numbers(frames), buckets.names())


@dataclass(frozen=True)
class AssignVideos:
    """Computes the bucket of each video. `length` is in frames, or in seconds if the clip has a rate."""

    buckets: Buckets
    clip: Clip
    rotate: bool

    def __call__(self, height: F64, width: F64, rotation: F64, length: F64) -> I64:
        swap_sides = (rotation % 180 == 90) & self.rotate
        heights, widths = np.where(swap_sides, width, height), np.where(swap_sides, height, width)
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


def _check_even(size: tuple[int, int] | None, pixel_format: PixelFormat) -> None:
    if size is not None and (size[0] % 2 or size[1] % 2):
        raise UsageError(
            f"the size {size[0]}x{size[1]} is odd, and {pixel_format} has one chroma sample for 2 x 2 pixels",
            hint="give an even height and an even width",
        )


def _size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    check_type("size", size, (tuple, list), "size=(height, width)")
    sides: Sequence[int] = size
    if len(sides) != 2:
        raise UsageError(f"size={size!r} is not two numbers", hint="give size=(height, width)")
    height, width = sides
    return check_count("size's height", height, MAX_SIDE), check_count("size's width", width, MAX_SIDE)
