"""The windows of episodes in long videos."""

from __future__ import annotations

from dataclasses import replace as replaced
from fractions import Fraction
from pathlib import Path

import pytest

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.ingest import lerobot_videos
from headrace.dataio.shards.ingest.lerobot_episodes import Window
from headrace.dataio.shards.ingest.lerobot_videos import VideoFiles, episode_window
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.pieces import matches
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.dataio.store.open import open_store
from tests.support import lerobot_set
from tests.support.lerobot_set import FRONT, WRIST, LeRobotSet

KEYS = tuple(KeyFrame(100 * number, number, 1000 * number) for number in (0, 4, 10, 16, 20))
VIDEO = VideoInfo(
    *("front.mp4", 0, "h264", 64, 48, Fraction(10), 24, Fraction(1, 1000), 0, 2400, "yuv420p", 0), key_frames=KEYS
)
"""24 frames, 0.1 s each. Key frames are at 0, 4, 10, 16 and 20."""


def part(start: float, end: float | None, length: int, video: VideoInfo = VIDEO) -> VideoInfo:
    return episode_window(video, Window("front/0.mp4", start, end), length, 10.0)


def test_a_window_ends_with_the_key_frame_after_it() -> None:
    found = part(0.4, 1.6, 12)
    assert (found.frames, found.start_pts, found.duration_pts, found.origin_pts) == (12, 400, 1200, 400)
    assert found.key_frames == (KeyFrame(400, 0, 4000), KeyFrame(1000, 6, 10000), KeyFrame(1600, 12, 16000))


def test_a_window_may_end_with_the_file() -> None:
    found = part(1.6, 2.4, 8)
    assert (found.frames, found.start_pts, found.duration_pts) == (8, 1600, 800)
    assert found.key_frames == (KeyFrame(1600, 0, 16000), KeyFrame(2000, 4, 20000))
    assert part(0.0, 2.4, 24) == VIDEO
    assert part(0.0, None, 24) == VIDEO


@pytest.mark.parametrize("shift", [-0.049, 0.049])
def test_times_are_rounded_to_the_nearest_frame(shift: float) -> None:
    assert part(0.4 + shift, 1.6 + shift, 12) == part(0.4, 1.6, 12)
    assert part(1.6 + shift, 2.4 + shift, 8) == part(1.6, 2.4, 8)


@pytest.mark.parametrize(
    ("start", "end", "length", "error", "message"),
    [
        (0.4, 1.6, 11, CorruptionError, "front/0.mp4 has 12 frames of it, and its length is 11"),
        (0.0, None, 25, CorruptionError, "has 24 frames of it, and its length is 25"),
        (0.5, 1.6, 11, UnsupportedError, "cannot be decoded from 0.500 s, because no key frame is there"),
        (0.4, 1.5, 11, UnsupportedError, "the frame after it, at 1.500 s of its video, is no key frame"),
        (1.6, 2.5, 9, CorruptionError, "it ends at 2.500 s, and the video at 2.400 s"),
        (1e6, 1e6 + 1, 10, CorruptionError, "it ends at 1000001.000 s"),
        (0.4, 0.41, 1, CorruptionError, "has no frame"),
    ],
)
def test_a_window_that_is_not_in_the_file_is_refused(
    start: float, end: float | None, length: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        part(start, end, length)


@pytest.mark.parametrize("codec", ["libx264", "libsvtav1", "libx265"])
def test_the_windows_of_a_real_file_have_the_lengths_of_the_episodes(tmp_path: Path, codec: str) -> None:
    what = lerobot_set.write(tmp_path, LeRobotSet(codecs={FRONT: codec}, per_file={FRONT: 5, "data": 5}))
    video = probe(tmp_path / what.path_of(FRONT, 0)).video
    assert video is not None
    start = Fraction(0)
    for length in what.lengths:
        end = start + Fraction(length, what.fps)
        found = episode_window(video, Window("key", float(start), float(end)), length, what.fps)
        assert found.frames == length
        assert abs(found.start_pts * found.time_base - start) < Fraction(1, 200)
        start = end


def test_a_file_is_probed_once_and_its_pieces_have_the_digests_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = lerobot_set.write(tmp_path, LeRobotSet(lengths=(40, 40), codecs={FRONT: "libx264"}, height=320, noise=90))
    key = what.path_of(FRONT, 0)
    data = (tmp_path / key).read_bytes()
    with open_store(str(tmp_path)) as store, ProbePool(1) as pool:
        files, info = VideoFiles(store, pool), store.stat(key)
        found = files.probe([(info, "front.mp4")])[key]
        monkeypatch.setattr(lerobot_videos, "copy_object", None)
        assert files.probe([(info, "front.mp4")])[key] is found
    assert found.video == probe(tmp_path / key, ext="front.mp4").video
    assert found.pieces is not None
    size = found.pieces.size
    assert len(data) > 3 * size
    assert all(matches(found.pieces, n, data[n * size : (n + 1) * size]) for n in range(-(-len(data) // size)))
    assert found.pieces.head == ((0, 2),), "the index of the file is at its front, and libav looks at the first frame"


def test_a_file_that_is_damaged_has_a_fault(tmp_path: Path) -> None:
    what = lerobot_set.write(tmp_path, replaced(LeRobotSet(), lengths=(4, 4, 4)))
    paths = [tmp_path / what.path_of(name, 0) for name in (FRONT, WRIST)]
    paths[0].write_bytes(paths[0].read_bytes()[:-50])
    with open_store(str(tmp_path)) as store, ProbePool(1) as pool:
        keys = [str(path.relative_to(tmp_path)) for path in paths]
        found = VideoFiles(store, pool).probe([(store.stat(key), "front.mp4") for key in keys])
    assert found[keys[0]].video is None
    assert "truncated" in str(found[keys[0]].fault)
    assert found[keys[1]].video is not None
