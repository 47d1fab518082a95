"""Video: choose the clip's frames, decode them, crop and scale them, and add the audio of the same time window.

Purpose: the processor of `VideoLoader`. An image is a clip of one frame.
Invariants: those of `headrace.loaders.interfaces`. `headrace.loaders.clip.choose` selects the frames, and the audio
starts with the first of them. All frames of a clip get the same crop. Equal `SampleRef`s get equal crops, on every rank
and after every resume.
Failure behaviour: `process` returns the error of a damaged sample at the sample's position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import msgspec
import torch

from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError, UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.media.container import other_videos
from headrace.dataio.shards.sample import Sample, VideoInfo
from headrace.loaders.clip import Clip, ClipTimes, Wanted, choose
from headrace.loaders.decode import resize
from headrace.loaders.decode.base import Color, Decoded, Decoder, Fit, PixelFormat, Planes, Request, planes_bytes
from headrace.loaders.decode.pyav import beginning
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.byte_ranges import Runs
from headrace.loaders.interfaces import DAMAGE, FetchedSample, Needs, ProcessedSample, SampleLayout, SampleRef
from headrace.loaders.validation import checked

if TYPE_CHECKING:
    from headrace.loaders.audio.decode import AudioDecoder
    from headrace.loaders.audio.spec import AudioSpec

_log = get_logger(__name__)


_TOP, _LEFT, _FLIP = 22, 23, 24  # random streams, distinct from those of clip starts and of the order


class Cut(msgspec.Struct, frozen=True):
    """Where a clip is cropped, and whether it is mirrored.

    `crop="center"` keeps the middle of the scaled frames; "random" draws the position. `flip_prob` is the probability
    that a clip is mirrored left to right.
    """

    crop: Literal["center", "random"] = "center"
    flip_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.crop not in ("center", "random"):
            raise UsageError(f"crop={self.crop!r} is not known", hint="use 'center' or 'random'")
        if not 0 <= checked("flip_prob", self.flip_prob, float) <= 1:
            raise UsageError(f"flip_prob={self.flip_prob!r} is not a probability", hint="from 0 to 1")

    def at(self, ref: SampleRef) -> tuple[float, float]:
        """The position of the crop between top and bottom, and between left and right: each in [0, 1]."""
        if self.crop == "center":
            return 0.5, 0.5
        return _uniform(ref, _TOP), _uniform(ref, _LEFT)

    def mirrored(self, ref: SampleRef) -> bool:
        """Whether this clip is mirrored."""
        return bool(self.flip_prob) and _uniform(ref, _FLIP) < self.flip_prob


def _uniform(ref: SampleRef, purpose: int) -> float:
    """A random number in [0, 1) with 53 bits."""
    return float(int(ref.key(purpose)[0]) >> 11) / float(1 << 53)


_WHOLE = Cut()
LIGHT = 1 << 20
"""Pixels that one thread decodes in a group of small clips: a few milliseconds of work. Smaller groups would spend
much of their time in Python. Threads that work on single small clips slow each other down, since every library call
releases the GIL."""
_MOST_SEEN = 64
"""Number of sets of extensions that are remembered as already checked for further videos. Samples with other sets are
checked every time."""


class ClipSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The format of a finished clip. `file` is the extension of the video's file; None is the sample's own video."""

    clip: Clip
    file: str | None = None
    size: tuple[int, int] | None = None
    rotate: bool = False
    audio: AudioSpec | None = None
    cut: Cut = _WHOLE
    antialias: bool = True
    color: Color = "bt601"
    pixel_format: PixelFormat = "rgb"


def together(specs: Sequence[ClipSpec], *, transformed: bool) -> Callable[[Sequence[SampleRef]], list[list[int]]]:
    """Return a function that groups the samples of a batch. One thread processes each group.

    `specs` are indexed by stream. Clips that may share their decoding form a group. Otherwise, small clips form groups
    of up to `LIGHT` pixels. There are no groups of small clips if a transform or audio follows, since those may take
    longer.
    """
    several = any(spec.clip.per_video > 1 or spec.clip.start == "every" for spec in specs)

    def groups(refs: Sequence[SampleRef]) -> list[list[int]]:
        slots_by_key, light, number = dict[Hashable, list[int]](), 0, 0
        for slot, ref in enumerate(refs):
            spec, key = specs[ref.stream if len(specs) > 1 else 0], None
            if several:
                key = _beginning(ref, spec)
            elif not transformed and spec.audio is None and (pixels := _pixels(ref, spec)) <= LIGHT // 2:
                light += pixels
                if light > LIGHT:
                    light, number = pixels, number + 1
                key = ("light", number)
            slots_by_key.setdefault(key or (slot,), []).append(slot)
        return list(slots_by_key.values())

    return groups


def _beginning(ref: SampleRef, spec: ClipSpec) -> Hashable:
    """A value that is equal for clips that may share their decoding."""
    video = ref.sample.video_of(spec.file)
    try:
        begins = None if video is None else beginning(video.format, wanted_by(ref, video, spec.clip))
    except CorruptionError:
        return None
    return None if begins is None else (ref.source, ref.sample.id, begins)


def _pixels(ref: SampleRef, spec: ClipSpec) -> int:
    """Approximate number of pixels that are decoded, without the frames between the key frame and the clip."""
    video = ref.sample.video_of(spec.file)
    return 0 if video is None else video.width * video.height * min(video.frames, spec.clip.frames * spec.clip.stride)


def wanted_by(ref: SampleRef, video: VideoInfo, clip: Clip) -> Wanted:
    """The frames that this `SampleRef` selects."""
    return choose(video, clip, ref.seed, ref.epoch, ref.sample.id, ref.number, ref.attempt)


def _instant(video: VideoInfo, frame: int) -> Fraction:
    """The approximate time at which this frame is shown, in seconds on the file's own time line."""
    return (video.start_pts + Fraction(frame, video.frames) * video.duration_pts) * video.time_base


def _in_audio(sample: Sample, video: VideoInfo, ext: str, start: Fraction) -> Fraction:
    """The time in the file with the audio, if `start` is the time in the file of the video.

    A separate audio file begins when the video does. The files of videos have one clock.
    """
    if ext == video.ext:
        return start
    other = sample.video_of(ext)
    if other is None:
        return start - video.start_pts * video.time_base
    return start - video.origin_pts * video.time_base + other.origin_pts * other.time_base


def _no_video(file: str | None) -> UnsupportedError:
    if file is None:
        return UnsupportedError("the sample holds no video")
    return UnsupportedError(
        f"the index does not describe a video in the sample's .{file}", hint="index the dataset again"
    )


class ClipProcessor:
    """Turns files into clips.

    Each sample has "video", uint8 (T, 3, H, W), and "clip", its start in seconds. With audio it also has "audio",
    float32 (C, S), and "audio_samples", the number of samples that are real audio. A clip of planes is (T, H * 3 / 2, W),
    and "color", int64 (2,), has its matrix and range.
    """

    def __init__(
        self,
        spec: ClipSpec,
        decoder: Decoder,
        audio_decoder: AudioDecoder | None = None,
        delivered: Collection[str] = (),
    ) -> None:
        """Create the processor.

        Args:
            spec: the format of the clips.
            decoder: decodes the video.
            audio_decoder: decodes the audio. Default: `decode_audio`.
            delivered: extensions of further videos that the batches hold, too.
        """
        self._spec, self._decoder = spec, decoder
        if audio_decoder is None and spec.audio is not None:
            from headrace.loaders.audio.decode import decode_audio

            audio_decoder = decode_audio
        self._audio_decoder, self._warned = audio_decoder, False
        self._known_files, self._delivered = set[tuple[str, ...]](), frozenset(delivered)

    @property
    def layout(self) -> SampleLayout:
        pixels = ("video",) if self._spec.pixel_format == "rgb" else ("video", "color")
        if self._spec.audio is None:
            return SampleLayout(pixels, {"clip": torch.float64})
        return SampleLayout((*pixels, "audio"), {"clip": torch.float64, "audio_samples": torch.int64})

    def needs(self, ref: SampleRef) -> Needs:
        clip = self._spec.clip
        return self.needs_of(ref, lambda video: (wanted_by(ref, video, clip), byte_ranges.frames_of(clip, video)))

    def needs_of(self, ref: SampleRef, select: Callable[[VideoInfo], tuple[Wanted, int]]) -> Needs:
        """The files and ranges of a clip.

        `select` returns the frames that the clip has of a video, and how many frames of it a clip spans.
        """
        sample, spec = ref.sample, self._spec
        video, audio = sample.video_of(spec.file), sample.audio if spec.audio else None
        needs: dict[str, Runs | None] = {} if video is None else {video.ext: None}
        if audio is not None:
            needs[audio.ext] = None
        separate = audio is not None and video is not None and audio.ext != video.ext
        video_member = None if video is None else byte_ranges.member_of(sample, video.ext)
        audio_member = byte_ranges.member_of(sample, audio.ext) if audio is not None and separate else None
        if video is None or (video_member is None and audio_member is None):  # most files are short
            return needs
        try:
            wanted, spanned = select(video)
        except DAMAGE:
            return needs
        start = wanted.values[0] * video.time_base if wanted.by == "pts" else _instant(video, wanted.values[0])
        seconds = Fraction(spec.audio.samples(spec.clip), spec.audio.sample_rate) if spec.audio else Fraction(0)
        inside = audio is not None and not separate
        if video_member is not None and byte_ranges.reads_part_of_frames(
            video_member, video, spanned, with_audio=inside
        ):
            spans = [byte_ranges.of_clip(video, wanted, video_member.length)]
            if inside:
                spans.append(byte_ranges.of_time(video, start, start + seconds, video_member.length))
            needs[video.ext] = byte_ranges.runs(video_member, spans)
        if audio_member and audio and byte_ranges.reads_part_of_audio(sample, audio_member, audio, float(seconds)):
            start = _in_audio(sample, video, audio.ext, start)
            if (other := sample.video) is not None and other.ext == audio.ext:
                start -= other.start_pts * other.time_base
            needs[audio.ext] = byte_ranges.runs(
                audio_member, [byte_ranges.of_window(sample, audio, start, seconds, audio_member.length)]
            )
        return needs

    def cost(self, sample: Sample) -> int:
        spec = self._spec
        video = sample.video_of(spec.file)
        if video is None:
            return 0
        if spec.pixel_format != "rgb":
            return planes_bytes(video, spec.clip.frames, spec.size, spec.pixel_format)
        size = None if self._is_rotated(video) else spec.size
        return self._decoder.clip_bytes(video, spec.clip.frames, size, spec.color)

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return self.process_at(fetched, lambda one, video: wanted_by(one.ref, video, self._spec.clip))

    def process_at(
        self, fetched: Sequence[FetchedSample], select: Callable[[FetchedSample, VideoInfo], Wanted]
    ) -> list[ProcessedSample | HeadraceError]:
        """The clips whose frames `select` chooses of the samples' videos."""
        requests = [self._request(one, select) for one in fetched]
        decoded = iter(self._decoder.decode([r for r in requests if isinstance(r, Request)]))
        return [
            self._finish(one, request, next(decoded)) if isinstance(request, Request) else request
            for one, request in zip(fetched, requests, strict=True)
        ]

    def close(self) -> None:
        self._decoder.close()

    def _request(
        self, fetched: FetchedSample, select: Callable[[FetchedSample, VideoInfo], Wanted]
    ) -> Request | HeadraceError:
        ref = fetched.ref
        video = ref.sample.video_of(self._spec.file)
        if video is None:
            return _no_video(self._spec.file)
        if len(ref.sample.members) > 1 and not self._warned and self._spec.file is None:
            self._warn_of_others(ref.sample, video)
        try:
            wanted = select(fetched, video)
        except DAMAGE as error:
            return error
        return Request(
            fetched.media[video.ext],
            video,
            wanted,
            color=self._spec.color,
            fit=self._cut(ref, video),
            allocate=fetched.target,
            planes=self._planes(ref, video),
        )

    def _warn_of_others(self, sample: Sample, video: VideoInfo) -> None:
        """Warn once if samples contain more videos than the one that is decoded."""
        names = (video.ext, *[member.ext for member in sample.members])
        if names in self._known_files:
            return
        if len(self._known_files) < _MOST_SEEN:
            self._known_files.add(names)
        if further := [ext for ext in other_videos(names, video.ext) if ext not in self._delivered]:
            self._warned = True
            listed = ", ".join(f".{ext}" for ext in further)
            warn_once(
                _log,
                f"samples hold more than one video, and one is delivered: of {sample.key!r} .{video.ext}, and not {listed}; "
                f'Loader delivers the others with a field Video(file="{further[0]}")',
                "job",
            )

    def _cut(self, ref: SampleRef, video: VideoInfo) -> Fit | None:
        """The scaling and cropping that the decoder applies to the frames. None if frames are rotated first."""
        spec = self._spec
        if spec.size is None or self._is_rotated(video) or spec.pixel_format != "rgb":
            return None
        return Fit(spec.size, spec.antialias, spec.cut.at(ref), spec.cut.mirrored(ref))

    def _planes(self, ref: SampleRef, video: VideoInfo) -> Planes | None:
        """How the decoder makes planes. None for RGB."""
        spec = self._spec
        if spec.pixel_format == "rgb":
            return None
        rotation = video.rotation if spec.rotate else 0
        return Planes(spec.pixel_format, spec.size, spec.cut.at(ref), spec.cut.mirrored(ref), rotation)

    def _is_rotated(self, video: VideoInfo) -> bool:
        return self._spec.rotate and video.rotation % 360 != 0

    def _finish(
        self, fetched: FetchedSample, request: Request, decoded: Decoded | HeadraceError
    ) -> ProcessedSample | HeadraceError:
        if isinstance(decoded, HeadraceError):
            return decoded
        if len(decoded.pts) != len(request.wanted.values) or len(decoded.frames) != len(decoded.pts):
            return CorruptionError(
                f"{len(decoded.frames)} frames were decoded, {len(request.wanted.values)} were requested"
            )
        start = decoded.pts[0] * request.info.time_base
        values: dict[str, float] = {"clip": float(request.info.seconds(decoded.pts[0]))}
        if request.planes:
            if decoded.color is None:
                return UnsupportedError("the decoder does not make planes", hint='use decoder="pyav"')
            tensors = {"video": decoded.frames, "color": torch.tensor(decoded.color, dtype=torch.int64)}
        else:
            tensors = {"video": decoded.frames if request.fit else self._fit(fetched, request, decoded.frames)}
        if self._spec.audio is not None:
            try:
                tensors["audio"], values["audio_samples"] = self._finish_audio(
                    fetched, request, start, self._spec.audio
                )
            except DAMAGE as error:
                return error
        times = ClipTimes(request.info, decoded.pts)
        return ProcessedSample(fetched.ref.sample, tensors, values, times=times)

    def _fit(self, fetched: FetchedSample, request: Request, frames: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        if spec.rotate:
            frames = resize.rotate(frames, request.info.rotation)
        at, mirror = spec.cut.at(fetched.ref), spec.cut.mirrored(fetched.ref)
        return resize.fit(frames, spec.size, antialias=spec.antialias, at=at, mirror=mirror)

    def _finish_audio(
        self, fetched: FetchedSample, request: Request, start: Fraction, audio_spec: AudioSpec
    ) -> tuple[torch.Tensor, int]:
        info, video = fetched.ref.sample.audio, request.info
        samples = audio_spec.samples(self._spec.clip)
        if info is None or self._audio_decoder is None:
            return torch.zeros(audio_spec.channels, samples), 0
        start = _in_audio(fetched.ref.sample, video, info.ext, start)
        from headrace.loaders.processors.audio import finish_audio

        return finish_audio(self._audio_decoder, fetched, info, start, audio_spec, samples)
