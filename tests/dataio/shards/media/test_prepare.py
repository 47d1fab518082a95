"""Re-encoding, copying and splitting: nothing lost, nothing shifted, the same bytes every time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest

from headrace.dataio import Dataset, Recipe, pack
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.shards.media import text_members
from headrace.dataio.shards.media.messages import check_recipe
from headrace.dataio.shards.media.probe import Probe, probe
from headrace.dataio.shards.media.streams import pick_audio, pick_video
from tests.support import video_corpus
from tests.support.written_media import MakeClip, MakeWav


def picked(container: Any, kind: str) -> Any:
    """The stream that loaders use."""
    return pick_video(container) if kind == "video" else pick_audio(container)


def pictures(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data), "r") as container:
        stream = picked(container, "video")
        return [frame.to_ndarray(format="gray").tobytes() for frame in container.decode(stream)]


def packets(data: bytes, kind: str) -> list[bytes]:
    with av.open(io.BytesIO(data), "r") as container:
        stream = picked(container, kind)
        return [bytes(packet) for packet in container.demux(stream) if packet.size]


def media_of(dataset: Dataset) -> list[tuple[str, bytes, Probe]]:
    found = []
    for sample in dataset:
        assert sample.video is not None
        data = dataset.read(sample, sample.video.ext)
        found.append((sample.key, data, probe(data, ext=sample.video.ext)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arm_wrestling.mp4", "nasa_h264_aac.mp4", "pancake_h264.mkv"])
def test_split_clips_hold_every_frame_and_packet_once(media: Path, tmp_path: Path, name: str) -> None:
    whole = (media / name).read_bytes()
    with pack(media / name, tmp_path / "ds", recipe=Recipe(split=3.0), workers=1) as dataset:
        clips = media_of(dataset)
        assert [key for key, _, _ in clips] == [f"{Path(name).stem}-{i:04}" for i in range(len(clips))]
        assert len(clips) > 1
        assert [p for _, data, _ in clips for p in packets(data, "video")] == packets(whole, "video")
        assert [p for _, data, _ in clips for p in pictures(data)] == pictures(whole)
        if any(found.audio for _, _, found in clips):
            assert [p for _, data, _ in clips for p in packets(data, "audio")] == packets(whole, "audio")
        assert all(found.video is not None and found.video.key_frames[0].index == 0 for _, _, found in clips)
        assert all(
            found.video is not None and abs(found.video.start_pts * found.video.time_base) < 0.1
            for _, _, found in clips
        )
        ends: list[Any] = [sample.fields["clip_end"] for sample in dataset]
        starts: list[Any] = [sample.fields["clip_start"] for sample in dataset]
        assert starts[1:] == ends[:-1]
        assert all(end - start >= 3.0 for start, end in zip(starts[:-1], ends[:-1], strict=True))


def test_a_stream_without_clean_cuts_stays_whole(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip(tmp_path / "in" / "a.mp4", frames=12, gop=300)
    with pack(tmp_path / "in", tmp_path / "ds", recipe=Recipe(split=0.1), workers=1) as dataset:
        assert list(dataset.keys) == ["a-0000"]


@pytest.mark.parametrize(("ext", "container"), [("mp4", "mp4"), ("mkv", "matroska")])
def test_a_recovery_point_at_which_decoding_cannot_begin_is_no_cut(tmp_path: Path, ext: str, container: str) -> None:
    options = {"x264-params": "intra-refresh=1:keyint=12:bframes=0:scenecut=0"}
    whole = video_corpus.make(video_corpus.Made("", "libx264", container, frames=60, options=options))
    with av.open(io.BytesIO(whole), "r") as source:
        assert sum(packet.is_keyframe for packet in source.demux(video=0) if packet.size) > 1
    (tmp_path / f"a.{ext}").write_bytes(whole)
    with pack(tmp_path / f"a.{ext}", tmp_path / "ds", recipe=Recipe(split=0.3), workers=1) as dataset:
        clips = media_of(dataset)
        assert [found for _, data, _ in clips for found in pictures(data)] == pictures(whole)
        assert [key for key, _, _ in clips] == ["a-0000"]


def test_an_exact_recovery_point_of_an_open_group_is_a_cut(tmp_path: Path) -> None:
    options = {"x264-params": "open-gop=1:keyint=12:bframes=0:scenecut=0"}
    whole = video_corpus.make(video_corpus.Made("", "libx264", "matroska", frames=60, options=options))
    (tmp_path / "a.mkv").write_bytes(whole)
    with pack(tmp_path / "a.mkv", tmp_path / "ds", recipe=Recipe(split=0.3), workers=1) as dataset:
        clips = media_of(dataset)
        assert len(clips) == 5
        assert [found for _, data, _ in clips for found in pictures(data)] == pictures(whole)


def test_reencoding_keeps_frames_and_times_and_puts_key_frames_where_asked(media: Path, tmp_path: Path) -> None:
    before = probe(media / "nasa_h264_aac.mp4")
    recipe = Recipe(codec="h264", gop=32, height=64, faststart=True)
    with pack(media / "nasa_h264_aac.mp4", tmp_path / "ds", recipe=recipe, workers=1) as dataset:
        ((_, data, after),) = media_of(dataset)
    assert before.video is not None
    assert after.video is not None
    assert (after.video.frames, after.video.height) == (before.video.frames, 64)
    assert after.duration == pytest.approx(before.duration)
    assert [k.index for k in after.video.key_frames] == list(range(0, before.video.frames, 32))
    assert data.index(b"moov") < data.index(b"mdat")
    assert after.audio is not None
    assert before.audio is not None
    copied, source = (msgspec.structs.replace(audio, stream=4, marks=()) for audio in (after.audio, before.audio))
    assert copied == source


def test_reencoded_video_is_cut_where_it_was_asked(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip(tmp_path / "in" / "a.mp4", frames=30, gop=300)  # one second, one key frame
    recipe = Recipe(codec="h264", split=0.2)
    with pack(tmp_path / "in", tmp_path / "ds", recipe=recipe, workers=1) as dataset:
        assert [p.video.frames for _, _, p in media_of(dataset) if p.video] == [6] * 5


def test_a_turned_picture_comes_out_upright(media: Path, tmp_path: Path) -> None:
    recipe = Recipe(codec="h264")
    with pack(media / "rotated_90.mov", tmp_path / "ds", recipe=recipe, workers=1) as dataset:
        ((_, data, after),) = media_of(dataset)
    assert after.video is not None
    assert (after.video.width, after.video.height, after.video.rotation) == (320, 568, 0)
    with av.open(str(media / "rotated_90.mov")) as container:
        turned = np.rot90(next(container.decode(video=0)).to_ndarray(format="gray"), k=-1).astype(int)
    found = np.frombuffer(pictures(data)[0], np.uint8).reshape(568, 320).astype(int)
    assert np.abs(found - turned).mean() < 4


@pytest.mark.slow
def test_copying_into_mp4_changes_no_packet(media: Path, tmp_path: Path) -> None:
    recipe = Recipe(container="mp4", faststart=True)
    with pack(media / "pancake_h264.mkv", tmp_path / "ds", recipe=recipe, workers=1) as dataset:
        ((_, data, _),) = media_of(dataset)
    whole = (media / "pancake_h264.mkv").read_bytes()
    assert pictures(data) == pictures(whole)
    assert packets(data, "audio") == packets(whole, "audio")


@pytest.mark.parametrize(
    "recipe", [Recipe(codec="h264", height=32), Recipe(split=0.3), Recipe(container="mkv"), Recipe(faststart=True)]
)
def test_the_same_input_gives_the_same_bytes(make_clip: MakeClip, tmp_path: Path, recipe: Recipe) -> None:
    make_clip(tmp_path / "in" / "a.mp4", frames=24)
    with (
        pack(tmp_path / "in", tmp_path / "one", recipe=recipe, workers=1) as one,
        pack(tmp_path / "in", tmp_path / "two", recipe=recipe, workers=2) as two,
    ):
        assert one.document.shards == two.document.shards
        assert one.document.index == two.document.index


def test_other_members_go_along_and_subtitles_are_cut(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip(tmp_path / "in" / "a.mp4", frames=24, gop=6)
    (tmp_path / "in" / "a.json").write_text('{"label": 3}')
    (tmp_path / "in" / "a.vtt").write_text(
        "WEBVTT\n\n00:00.000 --> 00:00.300\nfirst <b>words</b>\n\n2\n00:00:00.500 --> 00:00:00.700\nand last\n"
    )
    with pack(tmp_path / "in", tmp_path / "ds", recipe=Recipe(split=0.4), workers=1) as dataset:
        one, two = list(dataset)
        assert (one.text, two.text) == ("first words", "and last")
        assert dict(two.fields) == {"label": 3, "clip_of": "a", "clip_start": 0.4, "clip_end": 0.8}
        assert b"00:00:00.100 --> 00:00:00.300" in dataset.read(two, "vtt")


def test_sound_alone_is_left_as_it_is(make_wav: MakeWav, tmp_path: Path) -> None:
    path = make_wav(tmp_path / "in" / "a.wav")
    with pack(tmp_path / "in", tmp_path / "ds", recipe=Recipe(split=0.1, codec="h264"), workers=1) as dataset:
        assert dataset.read(dataset.find("a"), "wav") == path.read_bytes()


def test_what_cannot_be_converted_is_skipped_with_the_reason(
    make_clip: MakeClip, make_wav: MakeWav, tmp_path: Path
) -> None:
    make_clip(tmp_path / "in" / "a.mp4")
    make_clip(tmp_path / "in" / "b.avi", codec="mpeg4")
    make_clip(tmp_path / "in" / "c.mp4")
    make_wav(tmp_path / "in" / "c.wav")
    with pack(tmp_path / "in", tmp_path / "ds", recipe=Recipe(split=1.0), workers=1) as dataset:
        assert list(dataset.keys) == ["a-0000"]
        assert dataset.report is not None
        reasons = [item.reason for item in dataset.report.skipped]
    assert reasons[0].startswith("avi files cannot be written")
    assert reasons[1] == "a sample with several media files (mp4, wav) cannot be split"


@pytest.mark.parametrize(
    "recipe",
    [Recipe(codec="vp9"), Recipe(container="avi"), Recipe(gop=0), Recipe(height=100), Recipe(split=0.0)],
)
def test_a_recipe_that_makes_no_sense_is_refused(recipe: Recipe) -> None:
    with pytest.raises(UsageError):
        check_recipe(recipe)


def test_text_that_is_no_subtitles_is_refused() -> None:
    with pytest.raises(CorruptionError, match="first line"):
        text_members.parse("1\n00:00.000 --> 00:01.000\nx")
    with pytest.raises(CorruptionError, match="not a cue timing"):
        text_members.parse("WEBVTT\n\n00:0x.000 --> 00:01.000\nx")
