"""Windows: parts of a long video that begin at key frames, such as the episodes of a robot in one file.

Purpose: several samples may show parts of one file. `window` describes a part in the way that the index and the loaders
expect.
Invariants: a window and its file list the same pictures for the same time stamps. Its clock shows 0 at its first frame.
Failure behaviour: `UsageError` for key frames that the video does not have.
"""

from __future__ import annotations

from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.sample import KeyFrame, VideoInfo


def window(video: VideoInfo, first: int, end: int) -> VideoInfo:
    """Return the part of a file's video from key frame number `first` to key frame number `end`.

    Args:
        video: the video of the whole file, as `probe` describes it.
        first: the position in `video.key_frames` at which the part begins.
        end: the position of the first key frame after the part. The number of key frames means the end of the file.

    Raises:
        UsageError: there is no such part.
    """
    keys = video.key_frames
    if not 0 <= first < end <= len(keys) or (end < len(keys) and keys[end].index >= video.frames):
        raise UsageError(f"key frames {first} to {end} are not a part of a video with {len(keys)} key frames")
    start, number = keys[first].pts, keys[first].index
    frames = (keys[end].index if end < len(keys) else video.frames) - number
    stop = keys[end].pts if end < len(keys) else video.start_pts + video.duration_pts
    return replace(
        video,
        frames=frames,
        start_pts=start,
        duration_pts=stop - start,
        key_frames=tuple([KeyFrame(key.pts, key.index - number, key.at) for key in keys[first : end + 1]]),
        origin_pts=start,
    )
