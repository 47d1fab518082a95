"""Clips of another video of a sample, which show the instants of a clip that was decoded before.

Purpose: two cameras of a sample may differ in their rate, their time base and their start. `LikeClips` delivers the
frames of one at the instants of the frames of the other.
Invariants: the instants are the exact times of the frames that were decoded (`FetchedSample.times`), never computed from
a frame rate. The files to read are predicted from the index.
Failure behaviour: that of `ClipProcessor`. A video that shows nothing at one of the instants makes a bad sample.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.shards.sample import Sample, VideoInfo
from headrace.loaders.clip import Clip, Wanted, at_instants
from headrace.loaders.interfaces import FetchedSample, Needs, ProcessedSample, SampleLayout, SampleRef
from headrace.loaders.processors.video import ClipProcessor, ClipSpec, wanted_by


class LikeClips:
    """Delivers the clips of `clips` at the instants of the field `front`, whose clips have the format `front_spec`."""

    def __init__(self, clips: ClipProcessor, front: str, front_spec: ClipSpec) -> None:
        self._clips, self._front, self._front_spec = clips, front, front_spec

    @property
    def layout(self) -> SampleLayout:
        return self._clips.layout

    def needs(self, ref: SampleRef) -> Needs:
        def select(video: VideoInfo) -> tuple[Wanted, int]:
            spec = self._front_spec
            front = ref.sample.video_of(spec.file)
            if front is None:
                raise UnsupportedError("the sample holds no video")
            instants = _predicted(front, wanted_by(ref, front, spec.clip))
            return at_instants(video, instants), int(_seconds(spec.clip, front) * video.fps)

        return self._clips.needs_of(ref, select)

    def cost(self, sample: Sample) -> int:
        return self._clips.cost(sample)

    def process(self, fetched: Sequence[FetchedSample]) -> list[ProcessedSample | HeadraceError]:
        return self._clips.process_at(fetched, lambda one, video: at_instants(video, one.times[self._front].seconds))

    def close(self) -> None:
        self._clips.close()


def _seconds(clip: Clip, video: VideoInfo) -> Fraction:
    """The length of a clip."""
    return clip.frames * clip.stride / video.fps if clip.rate is None else clip.frames / clip.rate


def _predicted(video: VideoInfo, wanted: Wanted) -> tuple[Fraction, Fraction]:
    """About when the first and the last frame of a clip are shown."""
    ends = wanted.values[0], wanted.values[-1]
    first, last = ends if wanted.by == "pts" else (_stamp_of(video, ends[0]), _stamp_of(video, ends[1]))
    end = video.start_pts + max(1, video.duration_pts) - 1
    return video.seconds(first), video.seconds(max(first, min(last, end)))


def _stamp_of(video: VideoInfo, frame: int) -> int:
    """The approximate time stamp of a frame, from the key frames around it."""
    keys = video.key_frames
    after = bisect_right(keys, frame, key=lambda key: key.index)
    start = (keys[after - 1].pts, keys[after - 1].index) if after else (video.start_pts, 0)
    end = (keys[after].pts, keys[after].index) if after < len(keys) else None
    pts, number = end or (video.start_pts + video.duration_pts, video.frames)
    return start[0] + (pts - start[0]) * (frame - start[1]) // max(1, number - start[1])
