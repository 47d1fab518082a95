"""Pictures as samples: decoded whole or refused, described like a video of one frame."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from headrace.dataio import pack
from headrace.dataio.core.errors import HeadraceError, UnsupportedError
from headrace.dataio.shards.in_place.indexing import index
from headrace.dataio.shards.media import images
from headrace.dataio.shards.sample import KeyFrame
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
    refused = 0
    for cut in np.linspace(0, len(data) - 1, 24).astype(int):
        try:
            found = images.decode(data[:cut]).to_ndarray(format="rgb24")
        except HeadraceError:
            refused += 1
        else:
            assert (found == whole).all()
    assert refused >= 23


def test_what_is_no_picture_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (b"", b"GIF89a" + bytes(99), b"\0" * 500, b"#EXTM3U\n"):
        with pytest.raises(HeadraceError):
            images.decode(wrong)
    with pytest.raises(UnsupportedError, match="pixels"):
        images.decode(bombs.jpeg_bomb())
    monkeypatch.setattr(images, "IMAGE_BYTES", 100)
    with pytest.raises(UnsupportedError, match="more than"):
        images.decode(picture("png"))


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
