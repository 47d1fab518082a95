"""Which frames make a clip: chosen by frame number or by presentation time, never by frame-rate arithmetic.

Purpose: turn (what the index says of a video, what the trainer wants, a key) into the frames to decode. Pure.

Invariants: the choice is a function of its arguments alone, so a resumed run and any other world size choose the same.
With `stride` a clip is every stride-th frame in presentation order, exact for a variable frame rate because frames are
counted. With `fps` it is the frames that a viewer sees at the instants t, t + 1/fps, …: at each instant the last frame that
has begun by then, exact for a variable frame rate and for streams that do not begin at zero. A video shorter than the clip
is played from its beginning and its last frame is held for the rest.
Failure behaviour: `UsageError` for an impossible `Clip`; `CorruptionError` for a video without frames or key frames.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from dataio.core.errors import CorruptionError, UsageError
from dataio.shards.contract import KeyFrame, VideoInfo
from loaders.permutation import key_of

_START = 5  # keeps the keys of clip starts apart from those of the order


@dataclass(frozen=True, slots=True)
class Clip:
    """`frames` frames, `stride` frames apart or, when `fps` is given, 1/fps seconds apart; `per_video` clips of each video.

    `start="random"` draws the first frame uniformly from those where the whole clip fits, anew for every epoch, sample
    and clip. `start="center"` takes the middle clip, or the middles of `per_video` equal parts.
    """

    frames: int = 16
    stride: int = 1
    fps: float | None = None
    start: Literal["random", "center"] = "random"
    per_video: int = 1

    def __post_init__(self) -> None:
        if min(self.frames, self.stride, self.per_video) < 1 or (self.fps is not None and not 0 < self.fps < 10_000):
            raise UsageError(f"{self} is not a clip", hint="frames, stride, fps and per_video are positive")
        if self.fps is not None and self.stride != 1:
            raise UsageError("a clip is spaced by stride or by fps, not by both")
        if self.start not in ("random", "center"):
            raise UsageError(f"start={self.start!r} is not known", hint="use 'random' or 'center'")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The frames of one clip, in the order of the clip; `values` never decrease and may repeat.

    `by="index"`: frame numbers in presentation order. `by="pts"`: instants in units of the stream's time base; each means
    the last frame whose time stamp is not above it. `key` is the key frame to start decoding from.
    """

    by: Literal["index", "pts"]
    values: tuple[int, ...]
    key: KeyFrame


def choose(info: VideoInfo, clip: Clip, seed: int, epoch: int, sample: int, number: int, attempt: int = 0) -> Wanted:
    """The frames of clip `number` of `sample` in `epoch`. `attempt` tells apart the clips of a sample that stands in for
    another from its own."""
    if info.frames < 1 or not info.key_frames:
        raise CorruptionError(
            "the index lists no frames or no key frames for this video", hint="index the dataset again"
        )
    draw = _draw(clip, seed, epoch, sample, number, attempt)
    if clip.fps is None:
        return _by_index(info, clip, draw)
    return _by_time(info, clip, Fraction(clip.fps).limit_denominator(100_000), draw)


def _draw(clip: Clip, seed: int, epoch: int, sample: int, number: int, attempt: int) -> Fraction:
    """Where the clip begins among its possible starts, in [0, 1)."""
    if clip.start == "center":
        return Fraction(2 * number + 1, 2 * clip.per_video)
    return Fraction(int(key_of(_START, seed, epoch, sample, number, attempt)[0]), 1 << 64)


def _by_index(info: VideoInfo, clip: Clip, draw: Fraction) -> Wanted:
    room = max(0, info.frames - 1 - (clip.frames - 1) * clip.stride)
    first = int(draw * (room + 1))
    indices = np.minimum(first + np.arange(clip.frames) * clip.stride, info.frames - 1)
    return Wanted("index", tuple(indices.tolist()), _key_before(info, "index", first))


def _by_time(info: VideoInfo, clip: Clip, fps: Fraction, draw: Fraction) -> Wanted:
    """Instants step by exact fractions of a second and are rounded down to the time base, which changes no frame."""
    step = 1 / fps / info.time_base
    room = max(0, int(info.duration_pts - (clip.frames - 1) * step) - 1)
    first = info.start_pts + int(draw * (room + 1))
    instants = tuple(first + int(number * step) for number in range(clip.frames))
    return Wanted("pts", instants, _key_before(info, "pts", first))


def _key_before(info: VideoInfo, by: Literal["index", "pts"], value: int) -> KeyFrame:
    """The last key frame at or before `value`; the first one when there is none, for streams that begin without."""
    starts = [key.index if by == "index" else key.pts for key in info.key_frames]
    return info.key_frames[max(0, bisect_right(starts, value) - 1)]
