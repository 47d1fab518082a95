"""Probes the long videos of a LeRobot data set, once for all of their episodes.

Purpose: one MP4 has the pictures of one camera in many episodes. `VideoFiles` copies and probes such files, and
`episode_window` finds an episode in one.

Invariants:

* A file is read once: its digests are computed while it is copied, and a worker process demuxes the copy.
* The last `_KEPT` files are remembered, because the episodes of two neighbouring units often share some.
* An episode begins at a key frame, and ends where another key frame or the end of the file is. LeRobot encodes each
  episode by itself, so this is always the case in its own files. Files that were encoded again as a whole may differ.
* A time is that of a frame if it differs by less than half of the time between two frames, because files and lists
  round times.

Failure behaviour: a video that cannot be read has a `fault`. `episode_window` raises `UnsupportedError` if decoding
cannot begin at the episode, and `CorruptionError` if the episode lies outside the file or has another number of frames.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.lerobot_episodes import Window
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.stored_copies import copy_object
from headrace.dataio.shards.media.messages import DescribeResult, Failure
from headrace.dataio.shards.media.windows import window
from headrace.dataio.shards.pieces import Hasher
from headrace.dataio.shards.sample import KeyFrame, Pieces, VideoInfo
from headrace.dataio.store.base import ObjectInfo, Store

_KEPT = 128
"""More than one unit's videos in version 3. In version 2, no two units share a video."""


class VideoFile(NamedTuple):
    """A video: its digests, and the description of its pictures, or the reason why it cannot be used."""

    size: int
    xxh3: int
    pieces: Pieces | None
    video: VideoInfo | None
    fault: Failure | None
    notes: tuple[str, ...]


class VideoFiles:
    """Probes the videos of `store` in the workers of `pool`."""

    def __init__(self, store: Store, pool: ProbePool) -> None:
        self._store, self._pool = store, pool
        self._kept = OrderedDict[ObjectInfo, VideoFile]()

    def probe(self, files: Sequence[tuple[ObjectInfo, str]]) -> dict[str, VideoFile]:
        """Return the description of each file, by its key. A file comes with the extension of its member."""
        found = {info.key: self._kept[info] for info, _ in files if info in self._kept}
        new = [(info, ext) for info, ext in files if info.key not in found]
        hashers = dict[str, Hasher]()
        with scratch_folder("headrace-lerobot-") as folder:
            for (group, outcome), (info, _) in zip(
                self._pool.describe(self._groups(new, Path(folder), hashers)), new, strict=True
            ):
                Path(group.files[0][1]).unlink(missing_ok=True)
                found[info.key] = self._kept[info] = _file(info, hashers.pop(info.key), outcome)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found

    def _groups(
        self, files: Sequence[tuple[ObjectInfo, str]], folder: Path, hashers: dict[str, Hasher]
    ) -> Iterator[Group]:
        for number, (info, ext) in enumerate(files):
            path = folder / f"{number}.mp4"
            hashers[info.key] = copy_object(self._store, info, path)
            yield Group(info.key, ((ext, str(path)),), info.size)


def episode_window(video: VideoInfo, place: Window, length: int, fps: float) -> VideoInfo:
    """Describe the part of a video that belongs to an episode.

    Args:
        video (VideoInfo): the description of the whole file.
        place (Window): where the episode is, in seconds.
        length (int): the number of its frames.
        fps (float): the rate of its frames, which says by how much times may differ.

    Raises:
        UnsupportedError: decoding cannot begin at its start, or does not end at its end.
        CorruptionError: it is not in the file, or does not have `length` frames.
    """
    part = video if place.end is None else _part(video, place.start, place.end, fps)
    if part.frames != length:
        raise CorruptionError(f"{place.key} has {part.frames} frames of it, and its length is {length}")
    return part


def _part(video: VideoInfo, start: float, end: float, fps: float) -> VideoInfo:
    keys = video.key_frames
    half = 1 / (2 * Fraction(fps) * video.time_base)
    begin_pts, end_pts = (Fraction(time) / video.time_base for time in (start, end))
    file_end = video.start_pts + video.duration_pts
    if end_pts >= file_end + half:
        raise CorruptionError(f"it ends at {end:.3f} s, and the video at {float(file_end * video.time_base):.3f} s")
    first, after = _nearest(keys, begin_pts, half), _nearest(keys, end_pts, half)
    if first is None:
        raise UnsupportedError(f"its video cannot be decoded from {start:.3f} s, because no key frame is there")
    if after is None and end_pts <= file_end - half:
        raise UnsupportedError(f"the frame after it, at {end:.3f} s of its video, is no key frame")
    after = len(keys) if after is None else after
    if first >= after:
        raise CorruptionError(f"its video from {start:.3f} s to {end:.3f} s has no frame")
    return window(video, first, after)


def _nearest(keys: Sequence[KeyFrame], pts: Fraction, tolerance: Fraction) -> int | None:
    """Return the number of the key frame whose time stamp is nearest to `pts`, or None if it is not near enough."""
    after = bisect_left([key.pts for key in keys], pts)
    near = [number for number in (after - 1, after) if 0 <= number < len(keys)]
    best = min(near, key=lambda number: abs(keys[number].pts - pts), default=None)
    return None if best is None or abs(keys[best].pts - pts) >= tolerance else best


def _file(info: ObjectInfo, hasher: Hasher, outcome: DescribeResult) -> VideoFile:
    pieces, size = hasher.pieces(), info.size
    if isinstance(outcome, Failure):
        return VideoFile(size, hasher.whole(), pieces, None, outcome, ())
    if outcome.video is None:
        fault = Failure(info.key, UnsupportedError.code, "it has no video stream")
        return VideoFile(size, hasher.whole(), pieces, None, fault, ())
    head = outcome.files[0].pieces
    if pieces is not None and head is not None:
        pieces = replace(pieces, head=head.head)
    return VideoFile(size, hasher.whole(), pieces, outcome.video, None, outcome.notes)
