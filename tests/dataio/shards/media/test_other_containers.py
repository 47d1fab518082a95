"""Media in unsupported containers: each file is reported, and a converted file shows the same pictures or is refused."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

import av
import numpy as np
import pytest

from headrace.dataio import Dataset, Recipe, index, pack
from headrace.dataio.core.errors import UsageError
from tests.support.written_media import write_clip, write_wav

pytestmark = pytest.mark.slow

PACKET = 188


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """A transport stream of 40 frames."""
    return write_clip(tmp_path / "in" / "show.ts", frames=40)


def skipped(dataset: Dataset) -> dict[str, str]:
    assert dataset.report is not None
    return {Path(one.path).name: one.reason for one in dataset.report.skipped}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("show.ts", "--remux mp4"),
        ("SHOW.TS", "--remux mp4"),
        ("show.mpeg", "--transcode h264"),
        ("show.flv", "--remux mp4"),
        ("show.mxf", "--remux mp4"),
        ("show.wmv", "--remux mp4"),
        ("show.gif", "--transcode h264"),
        ("show.m2v", "MKV"),
        ("show.aiff", "WAV"),
        ("show.tiff", "PNG"),
    ],
)
def test_media_that_is_not_read_is_skipped_with_the_next_step(tmp_path: Path, name: str, advice: str) -> None:
    write_clip(tmp_path / "in" / "good.mp4")
    (tmp_path / "in" / name).write_bytes(b"whatever")
    (tmp_path / "in" / name).with_suffix(".txt").write_text("its text")
    with pack([tmp_path / "in"], tmp_path / "ds", workers=1) as dataset:
        assert advice in skipped(dataset)[name]
        assert len(dataset) == 1
        assert dataset.report is not None
        assert not dataset.report.ignored
    with pytest.raises(UsageError, match=f"{name}: .*{advice}"):
        pack([tmp_path / "in" / name], tmp_path / "other", workers=1)


def test_a_file_beside_media_is_kept_and_said_not_to_be_read(tmp_path: Path, stream: Path) -> None:
    write_wav(stream.with_suffix(".wav"))
    with pack([stream.parent], tmp_path / "ds", workers=1) as dataset:
        (sample,) = dataset
        assert (sample.video, [member.ext for member in sample.members]) == (None, ["ts", "wav"])
        assert dataset.report is not None
        assert dataset.report.notes == ("show: its .ts file is kept but not read as media",)


def test_an_animated_picture_beside_a_video_is_a_member_like_others(tmp_path: Path) -> None:
    write_clip(tmp_path / "in" / "show.mp4")
    (tmp_path / "in" / "show.gif").write_bytes(ANIMATED)
    with pack([tmp_path / "in"], tmp_path / "ds", workers=1) as dataset:
        assert dataset.report is not None
        assert (dataset.report.skipped, dataset.report.notes) == ((), ())
        assert [member.ext for member in dataset.sample(0).members] == ["gif", "mp4"]


def test_indexing_says_which_samples_hold_media_that_is_not_read(tmp_path: Path, stream: Path) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(stream, "show.ts")
    with index(str(tmp_path / "shard.tar"), tmp_path / "ds") as dataset:
        assert dataset.report is not None
        assert any("show: .ts files are not read" in note for note in dataset.report.notes)
    with pack([tmp_path / "shard.tar"], tmp_path / "packed", recipe=Recipe(container="mp4"), workers=1) as dataset:
        video = dataset.sample(0).video
        assert video is not None
        assert (video.ext, video.frames) == ("mp4", 40)


def broken(data: bytes, how: str) -> bytes:
    half = len(data) // PACKET // 2 * PACKET
    return {"a hole": data[:half] + data[half + 3 * PACKET :], "twice": data + data}[how]


@pytest.mark.parametrize("recipe", [Recipe(container="mp4"), Recipe(codec="h264")], ids=["copied", "encoded"])
@pytest.mark.parametrize("how", ["a hole", "twice"])
def test_a_damaged_stream_is_refused_and_not_made_to_look_whole(
    tmp_path: Path, stream: Path, how: str, recipe: Recipe
) -> None:
    stream.write_bytes(broken(stream.read_bytes(), how))
    with pytest.raises(UsageError, match="is damaged"):
        pack([stream], tmp_path / "ds", recipe=recipe, workers=1)


def test_a_stream_that_begins_in_the_middle_of_a_group_has_the_frames_that_a_player_shows(
    tmp_path: Path, stream: Path
) -> None:
    data = stream.read_bytes()
    stream.write_bytes(data[len(data) // PACKET // 2 * PACKET :])
    with av.open(str(stream)) as container:
        shown = [frame.to_ndarray() for frame in container.decode(video=0)]
    with pack([stream], tmp_path / "ds", recipe=Recipe(container="mp4"), workers=1) as dataset:
        sample = dataset.sample(0)
        with av.open(io.BytesIO(dataset.read(sample, "mp4")), "r") as container:
            copied = [frame.to_ndarray() for frame in container.decode(video=0)]
        assert sample.video is not None
        assert sample.video.frames == len(shown) == len(copied) < 40
    assert all(np.array_equal(a, b) for a, b in zip(shown, copied, strict=True))


def test_a_copy_that_would_show_its_pictures_in_another_order_is_refused(tmp_path: Path) -> None:
    """MXF stores H.264 with B-frames without saying when they are shown."""
    path = write_clip(tmp_path / "in" / "show.mxf", options={"bf": "2"}, frames=30)
    with pytest.raises(UsageError, match="would show other pictures; use --transcode"):
        pack([path], tmp_path / "ds", recipe=Recipe(container="mkv"), workers=1)
    with pack([path], tmp_path / "other", recipe=Recipe(codec="h264"), workers=1) as dataset:
        video = dataset.sample(0).video
        assert video is not None
        assert video.frames == 30


ANIMATED = base64.b64decode(
    "R0lGODlhIAAgAIEAAAAAAP8AAAAAAAAAACH/C05FVFNDQVBFMi4wAwEAAAAh+QQJCgAAACwAAAAAIAAgAAAISgABCBxIsKDBgwgTKlzIsKHDhx"
    "AjSpxIsaLFgQEyasx4EcDGjR0/agwpMgBJkSc/pgR5saTJjjBjypxJs6bNmzhz6tzJs6dPmwEBACH5BAkUAAAALAgACAAIAAgAgQAAAP8AAAAA"
    "AAAAAAgPAAMIHEiwoMGDCBMqTBgQACH5BAkeAAAALBAACAAIAAgAgQAAAP8AAAAAAAAAAAgPAAMIHEiwoMGDCBMqTBgQACH5BAkKAAAALBgACA"
    "AIAAgAgQAAAP8AAAAAAAAAAAgPAAMIHEiwoMGDCBMqTBgQADs="
)
"""A GIF of 32x32 by Pillow: four pictures, shown for 0.1, 0.2, 0.3 and 0.1 s again and again, each with a red square of 8x8 at
(8 * number, 8), transparent around it, and gone when the next one comes."""


def test_an_animated_picture_becomes_a_video_with_its_times_on_white(tmp_path: Path) -> None:
    path = tmp_path / "show.gif"
    path.write_bytes(ANIMATED)
    with pack([path], tmp_path / "ds", recipe=Recipe(codec="h264"), workers=1) as dataset:
        sample = dataset.sample(0)
        with av.open(io.BytesIO(dataset.read(sample, "mp4")), "r") as container:
            frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert [time for time, _ in frames] == pytest.approx([0.0, 0.1, 0.3, 0.6])  # once, though it says to repeat itself
    for number, (_, picture) in enumerate(frames):
        assert picture[28, 28].min() > 230  # white, where it shows what is behind it
        assert picture[12, 8 * number + 4, 0] - picture[12, 8 * number + 4, 1].astype(int) > 100
        assert picture[12, (8 * number + 20) % 32].min() > 200  # what was there before is gone
