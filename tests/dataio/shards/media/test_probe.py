"""The index that probing makes must be what the decoder puts out, frame by frame."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.shards.media import probe as probing
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import VideoInfo
from headrace.dataio.shards.workers.decode import open_media
from tests.support.written_media import MakeClip, MakeWav

CLIPS = (
    *("action_xvid.avi", "arm_wrestling.mp4", "av1.mkv", "h265.mp4", "nasa_h264_aac.mp4", "pancake_h264.mkv"),
    *("rotated_90.mov", "testsrc2_vp9.webm", "youtube_clip.mp4"),
)
LONG = "youtube_clip.mp4"
"""Two minutes in 1080p: to decode all of it takes longer than all the others."""
SOUNDS = ("action.wav", "nasa_speech_44100.mp3", "sine_mono_s16.wav", "pancake_h264.mkv", "youtube_clip.mp4")


def decoded(path: Path, stream: int) -> list[tuple[int | None, bool]]:
    """(pts, is key frame) of all frames, in the order in which the decoder puts them out."""
    with av.open(str(path)) as container:
        video = container.streams[stream]
        assert isinstance(video, VideoStream)
        video.thread_type = "AUTO"
        return [(frame.pts, bool(frame.key_frame)) for frame in container.decode(video)]


def video_of(path: Path) -> VideoInfo:
    """What probing finds of the video, which must be there."""
    video = probe(path).video
    assert video is not None
    return video


def assert_index_is_what_decodes(path: Path, video: VideoInfo) -> None:
    frames = decoded(path, video.stream)
    assert video.frames == len(frames)
    shown_keys = [k for k in video.key_frames if k.pts >= video.start_pts]
    assert [(k.index, k.pts) for k in shown_keys] == [(i, pts) for i, (pts, key) in enumerate(frames) if key]
    assert video.start_pts == frames[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name == LONG else name for name in CLIPS]
)
def test_frames_and_key_frames_are_those_of_a_full_decode(media: Path, name: str) -> None:
    video = probe(media / name).video
    assert video is not None
    assert_index_is_what_decodes(media / name, video)


def test_frames_and_key_frames_at_both_ends_of_a_long_clip_are_those_of_a_decode(media: Path) -> None:
    video = video_of(media / LONG)
    keys = {key.index: key.pts for key in video.key_frames}
    with av.open(str(media / LONG)) as container:
        stream = container.streams[video.stream]
        assert isinstance(stream, VideoStream)
        stream.thread_type = "AUTO"
        start = [(frame.pts, bool(frame.key_frame)) for frame in itertools.islice(container.decode(stream), 400)]
        container.seek(video.key_frames[-1].pts, stream=stream)
        end = [(frame.pts, bool(frame.key_frame)) for frame in container.decode(stream)]
    assert start[0] == (video.start_pts, True)
    assert {at: pts for at, (pts, key) in enumerate(start) if key} == {at: pts for at, pts in keys.items() if at < 400}
    assert end[0] == (video.key_frames[-1].pts, True)
    assert not any(key for _, key in end[1:])
    assert video.key_frames[-1].index + len(end) == video.frames


@pytest.mark.parametrize("name", CLIPS)
def test_seeking_to_every_key_frame_lands_on_its_picture(media: Path, name: str) -> None:
    video = probe(media / name).video
    assert video is not None
    with av.open(str(media / name)) as container:
        stream = container.streams[video.stream]
        assert isinstance(stream, VideoStream)
        stream.thread_type = "AUTO"
        for key in video.key_frames[:: max(1, len(video.key_frames) // 4)]:
            container.seek(key.pts, stream=stream)
            assert key.pts in [f.pts for f, _ in zip(container.decode(stream), range(5), strict=False)]


@pytest.mark.parametrize("name", SOUNDS)
def test_samples_of_sound_are_those_of_a_full_decode(media: Path, name: str) -> None:
    audio = probe(media / name).audio
    assert audio is not None
    with av.open(str(media / name)) as container:
        stream = container.streams[audio.stream]
        assert isinstance(stream, AudioStream)
        frames = list(container.decode(stream))
    assert audio.samples == sum(frame.samples for frame in frames)
    assert (audio.sample_rate, audio.channels) == (frames[0].sample_rate, len(frames[0].layout.channels))


def test_the_largest_video_stream_and_the_best_sound_are_chosen(media: Path) -> None:
    found = probe(media / "nasa_h264_aac.mp4")
    assert found.video is not None
    assert found.audio is not None
    assert (found.video.stream, found.video.width, found.video.height) == (3, 480, 270)
    assert found.video.fps == Fraction(30000, 1001)
    assert (found.audio.stream, found.audio.sample_rate) == (4, 16000)
    assert found.duration == pytest.approx(390 * 1001 / 30000)


def test_rotation_is_clockwise(media: Path) -> None:
    video = probe(media / "rotated_90.mov").video
    assert video is not None
    assert (video.rotation, video.width, video.height) == (90, 568, 320)


def test_damage_in_the_middle_passes_and_is_left_to_the_loader(media: Path) -> None:
    video = probe(media / "corrupted.mp4").video
    assert video is not None
    assert video.frames == 50
    with av.open(str(media / "corrupted.mp4")) as container, pytest.raises(av.error.InvalidDataError):
        list(container.decode(video=0))


def test_a_sound_file_has_no_video_and_lasts_as_long_as_its_samples(media: Path) -> None:
    found = probe(media / "sine_mono_s16.wav")
    assert found.video is None
    assert found.duration == 4.0


@pytest.mark.parametrize("name", ["h265.mp4", "action_xvid.avi", "sine_mono_s16.wav"])
def test_bytes_probe_like_the_file(media: Path, name: str) -> None:
    path = media / name
    assert probe(path.read_bytes(), ext=path.suffix[1:]) == probe(path)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("b_frames.mp4", "libx264", {}),
        ("b_frames.mkv", "libx264", {}),
        ("b_frames.avi", "libx264", {}),
        ("mpeg4_b_frames.avi", "mpeg4", {"bf": "2"}),
        ("mpeg4.mp4", "mpeg4", {}),
        ("intra.avi", "mjpeg", {}),
        ("intra.mov", "mjpeg", {}),
        ("open_gop.mp4", "libx264", {"x264-params": "open-gop=1:bframes=3:b-adapt=0"}),
        ("alt_ref.webm", "libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "16", "arnr-maxframes": "5"}),
        ("vp8.webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    ],
)
def test_codecs_and_containers_of_every_kind_are_counted_right(
    tmp_path: Path, make_clip: MakeClip, name: str, codec: str, options: dict[str, str]
) -> None:
    path = make_clip(tmp_path / name, codec, frames=40, gop=12, options=options)
    video = video_of(path)
    assert video.frames == 40
    assert len(video.key_frames) >= 4
    assert video.fps == 30
    assert_index_is_what_decodes(path, video)


def remux(
    source: Path,
    target: Path,
    change: Callable[[int, av.Packet[Any]], list[av.Packet[Any]]],
    options: dict[str, str] | None = None,
) -> Path:
    """Copy the packets of a clip; `change(i, packet)` returns the packets to write instead of it."""
    with av.open(str(source)) as old, av.open(str(target), "w", options=options or {}) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        for i, packet in enumerate(p for p in old.demux(video=0) if p.size):
            for changed in change(i, packet):
                changed.stream = stream
                new.mux(changed)
    return target


def test_pictures_of_an_avi_are_counted_without_decoding_only_if_all_are_whole(
    tmp_path: Path, make_clip: MakeClip, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(
        probing,
        "_count_by_decoding",
        lambda *a, inner=probing._count_by_decoding: decoded.append(inner(*a)) or decoded[0],
    )
    whole = make_clip(tmp_path / "whole.avi", "mjpeg", frames=20)
    assert video_of(whole).frames == 20
    assert not decoded

    def cut(i: int, packet: av.Packet[Any]) -> list[av.Packet[Any]]:
        if i != 7:
            return [packet]
        shorter = av.Packet(bytes(packet)[: packet.size // 2])
        shorter.pts, shorter.dts, shorter.time_base = packet.pts, packet.dts, packet.time_base
        return [shorter]

    damaged = remux(whole, tmp_path / "damaged.avi", cut)
    assert video_of(damaged).frames == decoded[0][0]


def test_frames_before_the_start_of_an_edit_list_do_not_count(tmp_path: Path, make_clip: MakeClip) -> None:
    whole = make_clip(tmp_path / "whole.mp4", frames=40, gop=12)

    def shift(_: int, packet: av.Packet[Any]) -> list[av.Packet[Any]]:
        assert packet.pts is not None
        assert packet.dts is not None
        packet.pts, packet.dts = packet.pts - 5 * 512, packet.dts - 5 * 512
        return [packet]

    cut = remux(whole, tmp_path / "cut.mp4", shift, {"avoid_negative_ts": "disabled"})
    with av.open(str(cut)) as container:
        assert sum(p.is_discard for p in container.demux(video=0)) > 0  # else this tests nothing
    video = video_of(cut)
    assert video.frames == 35
    assert video.key_frames[0].index == 0
    assert video.key_frames[0].pts < video.start_pts
    assert_index_is_what_decodes(cut, video)


def test_hidden_frames_of_vp9_do_not_count(tmp_path: Path, make_clip: MakeClip) -> None:
    shown = make_clip(tmp_path / "shown.webm", "libvpx-vp9", frames=40, gop=10, options={"auto-alt-ref": "0"})

    def hide(i: int, packet: av.Packet[Any]) -> list[av.Packet[Any]]:
        if i == 20:  # a key frame: in its header the flag may be cleared without moving other fields
            assert packet.is_keyframe
            data = bytearray(bytes(packet))
            data[0] &= ~0x02
            packet.update(bytes(data))
        return [packet]

    hidden = remux(shown, tmp_path / "hidden.webm", hide)
    video = video_of(hidden)
    assert video.frames == 39 == len(decoded(hidden, 0))
    assert [k.index for k in video.key_frames] == [0, 10, 20, 29]


def test_hidden_frames_of_vp8_do_not_count(tmp_path: Path, make_clip: MakeClip) -> None:
    shown = make_clip(tmp_path / "shown.webm", "libvpx", frames=20, gop=10)

    def hide(i: int, packet: av.Packet[Any]) -> list[av.Packet[Any]]:
        if i in (3, 13):
            data = bytearray(bytes(packet))
            data[0] &= ~0x10
            packet.update(bytes(data))
        return [packet]

    hidden = remux(shown, tmp_path / "hidden.webm", hide)
    video = video_of(hidden)
    assert video.frames == 18
    assert [k.index for k in video.key_frames] == [0, 9]
    assert_index_is_what_decodes(hidden, video)


def test_a_stream_that_starts_without_a_key_frame_is_counted_by_what_decodes(
    tmp_path: Path, make_clip: MakeClip
) -> None:
    whole = make_clip(tmp_path / "whole.mkv", frames=40, gop=12)
    cut = remux(whole, tmp_path / "cut.mkv", lambda i, packet: [] if i < 4 else [packet])
    video = video_of(cut)
    assert 0 < video.frames < 40
    assert_index_is_what_decodes(cut, video)


def test_a_cover_picture_is_not_a_video(tmp_path: Path, make_clip: MakeClip, make_wav: MakeWav) -> None:
    picture = make_clip(tmp_path / "cover.mov", "mjpeg", frames=1)
    tone = make_wav(tmp_path / "tone.wav")
    song = tmp_path / "song.mp3"
    with av.open(str(picture)) as a, av.open(str(tone)) as b, av.open(str(song), "w") as out:
        sound = out.add_stream("libmp3lame", rate=8000)
        cover = out.add_stream_from_template(a.streams.video[0])
        cover.disposition = av.stream.Disposition.attached_pic
        for packet in a.demux(video=0):
            if packet.size:
                packet.stream = cover
                out.mux(packet)
        for frame in b.decode(audio=0):
            out.mux(sound.encode(frame))
        out.mux(sound.encode(None))
    found = probe(song)
    assert found.video is None
    assert found.audio is not None


# --- what is refused


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.mp4"
    path.touch()
    with pytest.raises(CorruptionError, match="empty"):
        probe(path)
    with pytest.raises(CorruptionError, match="empty"):
        probe(b"")


@pytest.mark.parametrize("content", [b"hello world\n" * 1000, bytes(5000), os.urandom(5000)])
def test_what_is_no_media_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with pytest.raises((CorruptionError, UnsupportedError)):
        probe(path)


@pytest.mark.parametrize("name", ["youtube_clip.mp4", "testsrc2_vp9.webm", "pancake_h264.mkv", "rotated_90.mov"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_a_file_that_lost_its_tail_is_refused(media: Path, name: str, share: float) -> None:
    data = (media / name).read_bytes()
    with pytest.raises(CorruptionError):
        probe(data[: int(len(data) * share)], ext="mp4")


def test_a_playlist_is_refused_and_opens_nothing(tmp_path: Path, make_clip: MakeClip) -> None:
    make_clip(tmp_path / "segment.mp4")
    playlist = tmp_path / "list.m3u8"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nsegment.mp4\n#EXT-X-ENDLIST\n")
    with pytest.raises(UnsupportedError, match="not one of the containers"):
        probe(playlist)


def test_a_file_of_which_nothing_decodes_is_refused(tmp_path: Path, make_clip: MakeClip) -> None:
    whole = make_clip(tmp_path / "whole.mkv")

    def spoil(_: int, packet: av.Packet[Any]) -> list[av.Packet[Any]]:
        packet.update(b"\xff" * packet.size)
        return [packet]

    with pytest.raises(CorruptionError, match="no frame"):
        probe(remux(whole, tmp_path / "spoilt.mkv", spoil))


def test_a_missing_file_a_folder_and_a_pipe_are_refused_without_opening_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(NotFoundError):
        probe(tmp_path / "missing.mp4")
    with pytest.raises(UnsupportedError, match="regular"):
        probe(tmp_path)
    with pytest.raises(UnsupportedError, match="regular"):
        probe(tmp_path / "pipe.mp4")


def test_key_frames_start_at_frame_zero(media: Path) -> None:
    for name in CLIPS:
        video = probe(media / name).video
        assert video is not None
        assert (video.key_frames[0].pts, video.key_frames[0].index) == (video.start_pts, 0)


def test_the_only_frame_of_a_video_behind_its_sound_is_found(tmp_path: Path) -> None:
    """The decoder gives it up only when it is flushed, and libav's flush packets name stream 0, which is the sound."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=48000, layout="mono")
        video = container.add_stream("libx264", rate=30, options={"bf": "2"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 48000
        container.mux(sound.encode(silence))
        container.mux(video.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
        for stream in (sound, video):
            container.mux(stream.encode(None))
    found = probe(path)
    assert found.video is not None
    assert (found.video.stream, found.video.frames) == (1, 1)
    assert found.audio is not None
    assert found.audio.samples >= 4096


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.avi"])
def test_a_title_that_is_not_utf8_is_no_reason_to_refuse_a_file(tmp_path: Path, make_clip: MakeClip, name: str) -> None:
    titled = tmp_path / f"titled{Path(name).suffix}"
    with av.open(str(make_clip(tmp_path / name))) as source, av.open(str(titled), "w") as output:
        output.metadata["title"] = "Cafe XXXX"
        copy = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.size:
                packet.stream = copy
                output.mux(packet)
    expected = probe(titled)
    content = titled.read_bytes()
    assert content.count(b"Cafe XXXX") >= 1
    titled.write_bytes(content.replace(b"Cafe XXXX", b"Caf\xe9 XXXX"))  # Latin-1
    with pytest.raises(UnicodeDecodeError):
        av.open(str(titled))
    assert probe(titled) == expected
    with open_media(str(titled)) as container:
        assert container.streams.video
