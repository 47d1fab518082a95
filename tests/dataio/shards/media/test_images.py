"""An image is a video of one frame, and colors have libav's names. A damaged image raises an error."""

from __future__ import annotations

import io
import tarfile
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.filter import Graph
from av.video.stream import VideoStream

from headrace.dataio import pack
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index.rows import to_row
from headrace.dataio.shards.ingest.index_tars import index
from headrace.dataio.shards.media import images, png
from headrace.dataio.shards.media.messages import Clip, Description, Prepared, decode_outcome, encode_outcome
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import Color, KeyFrame
from headrace.dataio.shards.statistics import summary
from tests.attacks import media as bombs
from tests.support.pictures import pattern, picture


@pytest.mark.parametrize(("kind", "codec"), [("jpg", "mjpeg"), ("png", "png"), ("webp", "webp")])
def test_a_picture_is_a_video_of_one_frame_that_lasts_no_time(kind: str, codec: str) -> None:
    info = images.probe(picture(kind, 70, 46), kind)
    assert (info.codec, info.width, info.height, info.frames, info.duration_pts) == (codec, 70, 46, 1, 0)
    assert info.key_frames == (KeyFrame(0, 0),)


@pytest.mark.parametrize("pixel_format", ["rgb24", "rgba", "gray", "rgb48be", "gray16be"])
def test_every_kind_of_png_is_decoded(pixel_format: str) -> None:
    decoded = images.decode(picture("png", 32, 24, pixel_format)).to_ndarray(format="rgb24")
    if "gray" not in pixel_format:
        assert np.abs(decoded.astype(int) - pattern(32, 24)).max() <= 1


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_a_picture_cut_anywhere_is_refused(kind: str) -> None:
    data = picture(kind, 96, 80)
    whole = images.decode(data).to_ndarray(format="rgb24")
    rejected = 0
    for cut in np.linspace(0, len(data) - 1, 24).astype(int):
        try:
            found = images.decode(data[:cut]).to_ndarray(format="rgb24")
        except HeadraceError:
            rejected += 1
        else:
            assert (found == whole).all()
    assert rejected >= 23


def png_with(data: bytes, rows: bytes) -> bytes:
    """The PNG with other compressed rows, and right checksums."""
    body = b"IDAT" + rows
    begin, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    return data[:begin] + len(rows).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big") + data[end:]


@pytest.mark.parametrize("pixel_format", ["rgb24", "gray", "rgba", "ya8", "gray16be", "rgb48be"])
def test_a_png_that_lacks_rows_or_has_a_flipped_bit_is_refused(pixel_format: str) -> None:
    """libav decodes both, and fills in what is missing."""
    data = picture("png", 40, 30, pixel_format)
    assert images.probe(data, "png").height == 30
    size = png.read_header(memoryview(data), "it").size
    half = png_with(data, zlib.compress(bytes(size // 2)))
    assert images.decode(half).height == 30
    with pytest.raises(CorruptionError, match=f"{size // 2} of {size} bytes of rows"):
        images.probe(half, "png")
    assert images.probe(png_with(data, zlib.compress(bytes(size))), "png").width == 40
    begin, end = data.index(b"IDAT"), data.index(b"IEND") - 8
    for at in range(begin + 4, end, 7):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            images.probe(bytes(flipped), "png")


def test_pack_skips_a_png_that_lacks_rows(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(picture("png", 40, 30))
    (tmp_path / "short.png").write_bytes(png_with(picture("png", 40, 30), zlib.compress(bytes(900))))
    with pack([tmp_path / "good.png", tmp_path / "short.png"], tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["good"]
        assert dataset.report is not None
        (skipped,) = dataset.report.skipped
    assert "900 of 3630 bytes of rows" in skipped.reason


def test_what_is_no_picture_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (b"", b"GIF89a" + bytes(99), b"\0" * 500, b"#EXTM3U\n"):
        with pytest.raises(HeadraceError):
            images.decode(wrong)
    with pytest.raises(UnsupportedError, match="pixels"):
        images.decode(bombs.jpeg_bomb())
    monkeypatch.setattr(images, "IMAGE_BYTES", 100)
    with pytest.raises(UnsupportedError, match="more than"):
        images.decode(picture("png"))


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_several_images_in_one_file_are_unsupported(kind: str) -> None:
    with pytest.raises(UnsupportedError, match="more than one image"):
        images.decode(2 * picture(kind))


def test_an_animated_webp_is_unsupported() -> None:
    target = io.BytesIO()
    with av.open(target, "w", format="webp") as output:
        stream: Any = output.add_stream("libwebp_anim", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "bgra"
        for level in (0, 90, 180):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8), format="rgb24")
            output.mux(stream.encode(frame.reformat(format="bgra")))
        output.mux(stream.encode(None))
    with pytest.raises(UnsupportedError, match="animation"):
        images.decode(target.getvalue())


def test_pictures_are_packed_and_beside_a_video_only_members(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for kind in ("jpg", "png", "webp"):
        (source / f"{kind}-alone.{kind}").write_bytes(picture(kind, 40, 30))
    (source / "captioned.jpg").write_bytes(picture("jpg"))
    (source / "captioned.txt").write_text("a pattern")
    (source / "broken.png").write_bytes(picture("png")[:-30])
    with pack([source], tmp_path / "set", workers=1) as packed:
        assert list(packed.keys) == ["captioned", "jpg-alone", "png-alone", "webp-alone"]
        assert packed.report is not None
        assert [Path(skipped.path).name for skipped in packed.report.skipped] == ["broken.png"]
        sample = packed.find("captioned")
        assert (sample.text, sample.duration) == ("a pattern", 0.0)
        assert sample.video is not None
        assert (sample.video.ext, sample.video.width) == ("jpg", 64)


def test_a_tar_of_pictures_is_indexed_in_place(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            for ext, data in (("png", picture("png", 20 + number, 10)), ("cls", b"1")):
                member = tarfile.TarInfo(f"{number}.{ext}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with index(tmp_path / "a.tar", tmp_path / "set") as dataset:
        assert [sample.video.width for sample in dataset if sample.video] == [20, 21, 22]


# --- color

OPTIONS = {
    "range": (images.RANGES, "color_range"),
    "colorspace": (images.SPACES, "colorspace"),
    "color_primaries": (images.PRIMARIES, "color_primaries"),
    "color_trc": (images.TRANSFERS, "color_trc"),
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
        stream = container.streams[video.stream]
        assert isinstance(stream, VideoStream)
        context = stream.codec_context
        expected = Color(
            images.SPACES.get(context.colorspace, "unknown"),
            images.RANGES.get(context.color_range, "unknown"),
            images.PRIMARIES.get(context.color_primaries, "unknown"),
            images.TRANSFERS.get(context.color_trc, "unknown"),
        )
    assert video.color == expected


def test_a_worker_answers_with_the_colour(tmp_path: Path) -> None:
    video = probe(make(tmp_path / "a.mp4", colorspace=1, color_range=1, color_primaries=1, color_trc=1)).video
    described = Description(files=(), duration=0.3, video=video, audio=None, text=None, fields="{}", notes=())
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
