"""The frames of a clip, chosen by frame number or by presentation time, never computed from a frame rate.

Purpose: choose the frames to decode, from the index entry of a video, the trainer's `Clip` and a random key.

Invariants:
- The choice depends only on the arguments, so a resumed run and any other world size choose the same frames.
- With `stride`, a clip is every stride-th frame in presentation order. Frames are counted, so this is exact for a
  variable frame rate.
- With `fps`, a clip is the frames that a viewer sees at the times t, t + 1/fps, …: at each time, the last frame whose
  presentation has begun. This is exact for a variable frame rate, and for streams that do not begin at zero.
- `at_instants` chooses the frames of another video of the sample that are shown at given times. It never chooses a frame
  for a time at which the video shows nothing.
- If a video is shorter than the clip, the clip begins with the video and repeats its last frame. This is also true for a
  window of a longer file.

Failure behaviour: `UsageError` for an impossible `Clip`; `CorruptionError` for a video without frames or key frames;
`UnsupportedError` for an instant before the beginning or after the end of a video.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, UnsupportedError, UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.sampling.permutation import key_of
from headrace.loaders.validation import check_fields

_START, _JITTER = 5, 21  # purposes of `key_of` that no other module uses
Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


MAX_FRAMES = 1 << 16
"""Maximum number of frames of a clip."""
Start = Literal["random", "center", "every"]
TOLERANCE = Fraction(1, 1000)
"""In seconds. A frame that begins this much after an instant is shown at it, since containers round time stamps."""


@suggests_arguments(num_frames="frames", length="frames", step="stride", rate="fps")
@dataclass(frozen=True, slots=True)
class Clip:
    """The frames of a clip, and how many clips are cut from each video.

    Args:
        frames (int): number of frames of a clip. Default: 16.
        stride (int): distance between frames of the clip, in frames of the video. Default: 1.
        fps (float | None): take frames 1/fps seconds apart; replaces `stride`. Default: None.
        start (str): where a clip begins. Default: "random".

            - "random": drawn uniformly from the positions where the whole clip fits, again for every epoch, sample and
              clip.
            - "center": the middle of the video, or the middles of `per_video` equal parts.
            - "every": clips follow each other without a gap, as many as fit whole, at least one.
        per_video (int): number of clips of each video in an epoch; not with "every". Default: 1.
        jitter (int): move a "center" or "every" clip by up to this many frame distances of the clip in either
            direction, drawn again for every epoch, sample and clip. Default: 0.

    Raises:
        UsageError: for an impossible clip.

    Example:
        >>> Clip(frames=8, fps=4).frames
        8
    """

    frames: int = 16
    stride: int = 1
    fps: float | None = None
    start: Start = "random"
    per_video: int = 1
    jitter: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.frames > MAX_FRAMES:
            raise UsageError(f"{self} is not a clip", hint=f"at most {MAX_FRAMES} frames")
        if min(self.frames, self.stride, self.per_video) < 1 or (self.fps is not None and not 0 < self.fps < 10_000):
            raise UsageError(f"{self} is not a clip", hint="frames, stride, fps and per_video are positive")
        if self.fps is not None and self.stride != 1:
            raise UsageError("a clip is spaced by stride or by fps, not by both", hint="leave stride out")
        check_start(self.start, self.per_video, self.jitter)

    @property
    def rate(self) -> Fraction | None:
        """`fps` as the exact fraction used in computations."""
        return None if self.fps is None else Fraction(self.fps).limit_denominator(100_000)


def check_start(start: str, parts: int, jitter: float) -> None:
    """Raise `UsageError` for options that cannot be combined."""
    if start not in ("random", "center", "every"):
        raise UsageError(f"start={start!r} is not known", hint="use 'random', 'center' or 'every'")
    if start == "every" and parts != 1:
        raise UsageError("start='every' takes all parts of each sample", hint="leave their number out")
    if not 0 <= jitter < math.inf or (jitter and start == "random"):
        raise UsageError("jitter is for start='center' and start='every', and is not negative", hint="jitter=0")


@dataclass(frozen=True)
class ClipCounts:
    """Computes the number of clips of each video from its frames and its duration in seconds, for `start="every"`."""

    clip: Clip

    def __call__(self, frames: Values, seconds: Values) -> Counts:
        clip, rate = self.clip, self.clip.rate
        fitting = frames / (clip.frames * clip.stride) if rate is None else seconds * float(rate) / clip.frames
        return np.maximum(1, np.floor(fitting + 1e-9)).astype(np.int64)


class Wanted(msgspec.Struct, frozen=True):
    """The frames of one clip, in the clip's order; `values` never decrease and may repeat.

    With `by="index"`, `values` are frame numbers in presentation order. With `by="pts"`, they are times in units of the
    stream's time base; each means the last frame whose time stamp is not later. `key` is the key frame from which
    decoding starts.
    """

    by: Literal["index", "pts"]
    values: tuple[int, ...]
    key: KeyFrame


class ClipTimes(msgspec.Struct, frozen=True, gc=False):
    """When the frames of a clip are shown: their time stamps in a video."""

    video: VideoInfo
    pts: tuple[int, ...]

    @property
    def seconds(self) -> tuple[Fraction, ...]:
        """The instants in seconds on the clock of the sample. They never decrease."""
        return tuple([self.video.seconds(pts) for pts in self.pts])


def choose(info: VideoInfo, clip: Clip, seed: int, epoch: int, sample: int, number: int, attempt: int = 0) -> Wanted:
    """The frames of clip `number` of `sample` in `epoch`. `attempt` gives substitutes other random clips."""
    _check_frames(info)
    if clip.rate is None:
        step, room = Fraction(clip.stride), max(0, info.frames - 1 - (clip.frames - 1) * clip.stride)
    else:
        step = 1 / clip.rate / info.time_base
        room = max(0, int(info.duration_pts - (clip.frames - 1) * step) - 1)
    place = (seed, epoch, sample, number, attempt)
    first = first_of(clip.start, room, step * clip.frames, clip.per_video, round(clip.jitter * step), place)
    return _by_index(info, clip, first) if clip.rate is None else _by_time(info, clip, step, first)


def at_instants(info: VideoInfo, instants: Sequence[Fraction]) -> Wanted:
    """The frames of a video that are shown at these instants: the last frame that has begun, within `TOLERANCE`.

    `instants` are seconds on the clock of the sample, in order. The last frame is also shown for one frame's duration
    after the end.

    Raises:
        UnsupportedError: the video does not show anything at the first or the last instant.
    """
    _check_frames(info)
    last_pts = info.start_pts + max(1, info.duration_pts) - 1
    start, end = info.seconds(info.start_pts), info.seconds(last_pts + 1)
    if instants[0] + TOLERANCE < start:
        raise UnsupportedError(
            f".{info.ext} begins at {float(start):.3f} s, and the clip has a frame at {float(instants[0]):.3f} s"
        )
    if instants[-1] > end + 1 / info.fps + TOLERANCE:
        raise UnsupportedError(
            f".{info.ext} ends at {float(end):.3f} s, and the clip has a frame at {float(instants[-1]):.3f} s"
        )
    stamps = [math.floor((instant + TOLERANCE) / info.time_base) + info.origin_pts for instant in instants]
    values = tuple([min(max(info.start_pts, stamp), last_pts) for stamp in stamps])
    return Wanted("pts", values, _key_before(info, "pts", values[0]))


def _check_frames(info: VideoInfo) -> None:
    if info.frames < 1 or not info.key_frames:
        raise CorruptionError(
            "the index lists no frames or no key frames for this video", hint="index the dataset again"
        )


def first_of(
    start: Start, room: int, span: Fraction, parts: int, jitter: int, place: tuple[int, int, int, int, int]
) -> int:
    """Where a part begins among 0 … `room`.

    `room`, `span` (the part's length) and `jitter` are in the same unit. `place` is (seed, epoch, sample, number,
    attempt).
    """
    number = place[3]
    if start == "random":
        return _random_below(_START, place, room + 1)
    first = int(span * number) if start == "every" else int(Fraction(2 * number + 1, 2 * parts) * (room + 1))
    if jitter:
        first += _random_below(_JITTER, place, 2 * jitter + 1) - jitter
    return min(max(0, first), room)


def _random_below(purpose: int, place: tuple[int, int, int, int, int], count: int) -> int:
    """One of 0 … `count` - 1: the 64-bit key as a fraction of 1, times `count`, rounded down."""
    return int(key_of(purpose, *place)[0]) * count >> 64


def _by_index(info: VideoInfo, clip: Clip, first: int) -> Wanted:
    indices = np.minimum(first + np.arange(clip.frames) * clip.stride, info.frames - 1)
    return Wanted("index", tuple(indices.tolist()), _key_before(info, "index", first))


def _by_time(info: VideoInfo, clip: Clip, step: Fraction, first: int) -> Wanted:
    """Times advance by exact fractions of a second. Rounding them down to the time base changes no frame."""
    first += info.start_pts
    instants = tuple(first + int(number * step) for number in range(clip.frames))
    if info.is_window:  # its file goes on
        end = info.start_pts + max(1, info.duration_pts) - 1
        instants = tuple([min(instant, end) for instant in instants])
    return Wanted("pts", instants, _key_before(info, "pts", first))


def _key_before(info: VideoInfo, by: Literal["index", "pts"], value: int) -> KeyFrame:
    """The last key frame at or before `value`. The first key frame if the stream begins without one."""
    starts = [key.index if by == "index" else key.pts for key in info.key_frames]
    return info.key_frames[max(0, bisect_right(starts, value) - 1)]
