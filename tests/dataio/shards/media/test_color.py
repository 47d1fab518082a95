"""What the index says of colour must be what the file says, under libav's own names."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.filter import Graph

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index.rows import to_row
from headrace.dataio.shards.ingest.pack import pack
from headrace.dataio.shards.media import color
from headrace.dataio.shards.media.facts import Clip, Described, Prepared, decode_outcome, encode_outcome
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import Color
from headrace.dataio.shards.summary import summary

OPTIONS = {
    "range": (color.RANGES, "color_range"),
    "colorspace": (color.SPACES, "colorspace"),
    "color_primaries": (color.PRIMARIES, "color_primaries"),
    "color_trc": (color.TRANSFERS, "color_trc"),
}
NAMES = [(option, point, name) for option, (names, _) in OPTIONS.items() for point, name in names.items()]


@pytest.mark.parametrize(("option", "point", "name"), NAMES)
def test_libav_itself_knows_the_name_as_this_code_point(option: str, point: int, name: str) -> None:
    graph = Graph()
    source = graph.add("buffer", "video_size=16x16:pix_fmt=yuv420p:time_base=1/1")
    graph.link_nodes(source, graph.add("setparams", f"{option}={name}"), graph.add("buffersink")).configure()
    frame = av.VideoFrame(16, 16, "yuv420p")
    frame.pts, frame.time_base = 0, Fraction(1)
    graph.push(frame)
    assert getattr(graph.pull(), OPTIONS[option][1]) == point


def make(path: Path, **points: int) -> Path:
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for name, point in points.items():
            setattr(stream.codec_context, name, point)
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((72, 64), np.uint8), format="yuv420p")
            for name, point in points.items():
                setattr(frame, name, point)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def test_a_clip_says_the_colour_that_it_was_written_with(tmp_path: Path) -> None:
    video = probe(make(tmp_path / "a.mp4", colorspace=9, color_range=2, color_primaries=9, color_trc=16)).video
    assert video is not None
    assert video.color == Color("bt2020nc", "pc", "bt2020", "smpte2084")


def test_a_clip_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    video = probe(make(tmp_path / "a.mp4")).video
    assert video is not None
    assert video.color is not None
    assert (video.color.space, video.color.primaries, video.color.transfer) == ("unknown",) * 3


CLIPS = ("arm_wrestling.mp4", "h265.mp4", "testsrc2_vp9.webm", "youtube_clip.mp4", "av1.mkv", "pancake_h264.mkv")


@pytest.mark.parametrize("name", CLIPS)
def test_real_clips_have_the_colour_of_their_headers(media: Path, name: str) -> None:
    video = probe(media / name).video
    assert video is not None
    with av.open(str(media / name)) as container:
        context = container.streams[video.stream].codec_context
        expected = Color(
            color.SPACES.get(context.colorspace, "unknown"),
            color.RANGES.get(context.color_range, "unknown"),
            color.PRIMARIES.get(context.color_primaries, "unknown"),
            color.TRANSFERS.get(context.color_trc, "unknown"),
        )
    assert video.color == expected


def test_a_worker_answers_with_the_colour(tmp_path: Path) -> None:
    video = probe(make(tmp_path / "a.mp4", colorspace=1, color_range=1, color_primaries=1, color_trc=1)).video
    described = Described(files=(), duration=0.3, video=video, audio=None, text=None, fields="{}", notes=())
    answer = decode_outcome(encode_outcome(Prepared((Clip(suffix="", described=described),))))
    assert isinstance(answer, Prepared)
    assert answer.clips[0].described.video == video
    assert video is not None
    assert video.color == Color("bt709", "tv", "bt709", "bt709")


def test_colour_can_be_asked_for_and_is_summed_up(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    make(tmp_path / "from" / "hdr.mp4", colorspace=9, color_range=1, color_primaries=9, color_trc=16)
    make(tmp_path / "from" / "plain.mp4", colorspace=1, color_range=2, color_primaries=1, color_trc=1)
    pack(tmp_path / "from", tmp_path / "set")
    with Dataset(tmp_path / "set") as dataset:
        assert summary(dataset)["colors"] == {"bt2020nc/tv/bt2020/smpte2084": 1, "bt709/pc/bt709/bt709": 1}
        for condition in (
            *("color_space = 'bt2020nc'", "color_range = 'tv'", "color_primaries = 'bt2020'"),
            "color_transfer in ('smpte2084', 'arib-std-b67')",
        ):
            assert [sample.key for sample in dataset.where(condition)] == ["hdr"]
        assert to_row(dataset.find("hdr"))["color_transfer"] == "smpte2084"
