"""Cuts the description of a long video into those of its parts, such as the episodes of a robot.

Purpose: several recordings are often concatenated in one file. The file is probed once, and `cut` describes one part as
if it were a file of its own: its frames, its key frames, its start and its duration.

Invariants:

* A part begins at a key frame, and ends where another key frame or the end of the file is. So its frames are exactly
  those between the two, and no frame outside it is needed to decode it.
* The key frames are numbered from the part's first frame. Their list ends with the key frame after the part, whose
  number is the number of frames, unless the part ends with the file.
* A time is that of a frame if it differs by less than half of the time between two frames, because files and lists
  round times.

Failure behaviour: `cut` raises `UnsupportedError` if no key frame is at the beginning or the end of the part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction

from msgspec.structs import replace

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.sample import KeyFrame, VideoInfo


def cut(video: VideoInfo, start: float, end: float, fps: float) -> VideoInfo:
    """Describe the part of a video from `start` to `end`.

    Args:
        video (VideoInfo): the description of the whole file.
        start (float): the time of the part's first frame, in seconds on the file's own time line.
        end (float): the time of the first frame after the part, or the end of the file.
        fps (float): the rate of the frames, which says how much times may differ.

    Returns:
        VideoInfo: the description of the part. `origin_pts` is the time stamp of its first frame.

    Raises:
        UnsupportedError: decoding cannot begin at `start`, the frames do not end at `end`, or the file is shorter.
    """
    keys = video.key_frames
    file_end = video.start_pts + video.duration_pts
    tolerance = Fraction(1) / (2 * Fraction(fps) * video.time_base)
    first = _nearest(keys, Fraction(start) / video.time_base, tolerance)
    if first is None:
        raise UnsupportedError(f"decoding cannot begin at {start:.6f} s, because no key frame is there")
    last = _nearest(keys, Fraction(end) / video.time_base, tolerance)
    if last is None and Fraction(end) / video.time_base > file_end + tolerance:
        raise UnsupportedError(f"it ends at {end:.6f} s, and the file at {float(file_end * video.time_base):.6f} s")
    if last is None and Fraction(end) / video.time_base < file_end - tolerance:
        raise UnsupportedError(f"the frame after it, at {end:.6f} s, is no key frame")
    after = len(keys) if last is None else last
    first_key = keys[first]
    frames, end_pts = (video.frames, file_end) if last is None else (keys[last].index, keys[last].pts)
    inside = keys[first : after + 1]
    return replace(
        video,
        frames=frames - first_key.index,
        start_pts=first_key.pts,
        duration_pts=end_pts - first_key.pts,
        key_frames=tuple(KeyFrame(key.pts, key.index - first_key.index, key.at) for key in inside),
        origin_pts=first_key.pts,
    )


def _nearest(keys: Sequence[KeyFrame], pts: Fraction, tolerance: Fraction) -> int | None:
    """Return the number of the key frame whose time stamp is nearest to `pts`, or None if it is not near enough."""
    after = bisect_left(keys, pts, key=lambda key: key.pts)
    near = [number for number in (after - 1, after) if 0 <= number < len(keys)]
    best = min(near, key=lambda number: abs(keys[number].pts - pts), default=None)
    return None if best is None or abs(keys[best].pts - pts) >= tolerance else best
