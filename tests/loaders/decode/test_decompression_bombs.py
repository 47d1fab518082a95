"""Files whose frames expand to gigabytes: damage, within bounded memory, also when the index says nothing of it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.decode import pyav, trim
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from tests.attacks import media as bombs
from tests.attacks import peak
from tests.support import video_corpus

pytestmark = pytest.mark.slow

INNOCENT = "tests.loaders.decode.test_decompression_bombs:decode_nothing"
DECODE = "tests.loaders.decode.test_decompression_bombs:decode"


def decode_nothing(_path: str) -> None:
    """What the imports alone take."""


def decode(path: str) -> None:
    """Decode the first frame, by an index that takes the file for a small clip."""
    codec = "mjpeg" if path.endswith("mkv") else "vp9"
    key = KeyFrame(0, 0)
    info = VideoInfo(
        ext=path[-4:].lstrip("."), stream=0, codec=codec, width=64, height=64, fps=Fraction(25), frames=1,
        time_base=Fraction(1, 1000), start_pts=0, duration_pts=40, pixel_format="yuv420p", rotation=0, key_frames=(key,),
    )  # fmt: skip
    result = PyAVDecoder().decode([Request(memoryview(Path(path).read_bytes()), info, Wanted("index", (0,), key))])[0]
    if isinstance(result, Exception):
        raise result


@pytest.mark.parametrize("name", ["bomb.mkv", "bomb.webm"])
def test_a_frame_of_16000_pixels_a_side_is_refused_before_it_is_made(tmp_path: Path, name: str) -> None:
    if name.endswith("mkv"):
        data = bombs.in_container("matroska", "mjpeg", [bombs.jpeg_bomb()])
    else:
        data = bombs.in_container("webm", "libvpx-vp9", [bombs.vp9_bomb()])
    (tmp_path / name).write_bytes(data)
    before = peak.run(INNOCENT, [tmp_path / name])
    outcome = peak.run(DECODE, [tmp_path / name])
    ((_, raised),) = outcome.raised.items()
    assert raised is not None
    assert raised[1] == "corruption"
    assert outcome.mib < before.mib + 100, "one decoded frame takes 384 MiB and more"


# --- clips that decode for hours, and packets that hold more than their file


def film(frames: int = 60, container: str = "mp4", **more: Any) -> tuple[bytes, VideoInfo]:
    options = {"x264-params": "keyint=200:bframes=2:scenecut=0"}
    data = video_corpus.make(video_corpus.Made("", "libx264", container, frames=frames, options=options, **more))
    info = probe(data, ext=container[:3]).video
    assert info is not None
    return data, info


def decoded(data: bytes, info: VideoInfo, *values: int) -> Decoded | HeadraceError:
    return PyAVDecoder().decode([Request(memoryview(data), info, Wanted("index", values, info.key_frames[0]))])[0]


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_a_clip_far_behind_its_key_frame_is_refused_before_it_is_decoded(
    container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, info = film(container=container)
    monkeypatch.setattr(limits, "CLIP_PIXELS", 40 * info.width * info.height)
    assert isinstance(decoded(data, info, 30, 32), Decoded)
    began = list[object]()
    monkeypatch.setattr(pyav, "_requested_frames", lambda window, request: began.append(window) or iter(()))
    found = decoded(data, info, 50, 52)
    assert isinstance(found, CapacityError), found
    assert "after the key frame" in found.message
    assert not began


def test_tables_that_name_the_same_bytes_often_do_not_fill_the_memory() -> None:
    data, info = film(frames=2000)
    sizes, chunks = data.rindex(b"stsz") + 16, data.rindex(b"stco") + 12
    (count,) = struct.unpack_from(">I", data, chunks - 4)
    spoilt = bytearray(data)
    begin = data.index(b"mdat") + 4
    struct.pack_into(">2000I", spoilt, sizes, *([len(data) // 2] * 2000))
    struct.pack_into(f">{count}I", spoilt, chunks, *([begin] * count))
    found = decoded(bytes(spoilt), info, 1500, 1502)
    assert isinstance(found, CorruptionError), found


def test_a_file_whose_pictures_are_larger_than_the_index_says_is_refused_before_they_are_made() -> None:
    data, info = film(width=1280, height=720, frames=3)
    small = replace(info, width=64, height=48)
    found = decoded(data, small, 0, 1)
    assert isinstance(found, CorruptionError)
    assert "1280" not in found.message  # no such picture came out


@pytest.mark.parametrize(("width", "height"), [(16, 16), (32, 32), (64, 16), (16, 64)])
def test_the_limit_on_pixels_lets_the_smallest_pictures_through(width: int, height: int) -> None:
    data = video_corpus.make(video_corpus.Made("", "mpeg4", "mp4", width=width, height=height, frames=6))
    info = probe(data, ext="mp4").video
    assert info is not None
    found = decoded(data, info, 2, 4)
    assert isinstance(found, Decoded), found


def test_stamps_that_go_back_for_ever_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim, "_check_start", lambda packet: None)
    data, info = film()
    request = Request(memoryview(data), info, Wanted("pts", (1 << 40,), info.key_frames[0]))
    monkeypatch.setattr(limits, "CLIP_PIXELS", 1 << 60)
    taken = 0

    def packets(stamps: Iterable[int]) -> Iterator[Any]:
        nonlocal taken
        for stamp in stamps:
            taken += 1
            yield SimpleNamespace(pts=stamp, dts=None, size=0, is_corrupt=False, is_discard=False)

    with pytest.raises(CorruptionError, match="too late"):
        trim._collect(packets(range(1 << 20, 0, -1)), request)
    assert taken < 5000
    found, times, ended = trim._collect(packets((1 << 21) + (n ^ 15) for n in range(50_000)), request)
    assert ended
    assert len(found) == len(times) == 50_000
