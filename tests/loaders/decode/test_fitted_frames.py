"""Frames that are cut while they are decoded are the frames that are cut afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.clip import Clip, Wanted, choose
from headrace.loaders.decode import convert, pyav, resize
from headrace.loaders.decode.base import Color, Decoded, Fit, Request
from headrace.loaders.decode.convert import Axis, Converter, FullSizeCanvas, OnePassCanvas, Part, axes
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.resize import FittedCanvas
from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
from headrace.loaders.decode.trim import Window, open_window
from tests.support import reference_decoder

InfoOf = Callable[[bytes, str], VideoInfo]
FORMATS = ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuvj444p", "yuv420p10le", "yuv444p10le"]
OTHERS = ["nv12", "gray", "yuv411p", "yuv440p", "yuv410p", "rgb24", "yuva420p", "gbrp", "yuv420p12le"]
sides = st.integers(8, 300)
wanted = st.integers(1, 160)
places = st.sampled_from([0.0, 0.2, 0.5, 0.999])


def noise(pixel_format: str, width: int, height: int, seed: int = 0) -> av.VideoFrame:
    """The hardest picture for rounding."""
    frame = av.VideoFrame(width, height, pixel_format)
    bits = int(pixel_format.split("p1")[1][0]) + 10 if "p1" in pixel_format else 8
    for number, plane in enumerate(frame.planes):
        kind: Any = np.uint16 if bits > 8 else np.uint8
        values = np.random.default_rng([seed, number]).integers(0, 1 << bits, plane.buffer_size // kind().itemsize)
        plane.update(values.astype(kind).tobytes())
    return frame


def request_for(frame: av.VideoFrame, color: Color = "bt601", clip: int = 1) -> Request:
    key = KeyFrame(0, 0)
    info = VideoInfo(
        "mp4",
        0,
        "h264",
        frame.width,
        frame.height,
        Fraction(25),
        25,
        Fraction(1, 25),
        0,
        25,
        frame.format.name,
        0,
        (key,),
    )
    return Request(memoryview(b""), info, Wanted("index", tuple(range(clip)), KeyFrame(0, 0)), color=color)


def whole(frame: av.VideoFrame, color: Color = "bt601") -> torch.Tensor:
    canvas = FullSizeCanvas(request_for(frame, color), Converter())
    canvas.draw(0, frame)
    return torch.from_numpy(canvas.clip)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FORMATS + OTHERS), sides, sides)
def test_colours_are_those_of_the_straight_conversion(pixel_format: str, width: int, height: int) -> None:
    frame = noise(pixel_format, width, height)
    assert np.array_equal(whole(frame)[0].numpy(), reference_decoder.bt601(noise(pixel_format, width, height)))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(FORMATS), st.integers(64, 200), st.integers(64, 200), st.integers(0, 400), st.integers(1, 150), st.booleans()
)  # fmt: skip
@example("yuv420p", 64, 64, 0, 2, False)  # at the first edge, and at the last
@example("yuv420p10le", 64, 100, 198, 2, False)
@example("yuv422p", 64, 64, 126, 2, True)
def test_a_part_of_a_frame_is_what_it_is_in_the_whole(
    pixel_format: str, width: int, height: int, begin: int, length: int, across: bool
) -> None:
    frame = noise(pixel_format, 2 * width, 2 * height)
    side = frame.width if across else frame.height
    span, all_ = (min(begin, side - 1), min(begin + length, side)), (0, frame.height if across else frame.width)
    rows, columns = (all_, span) if across else (span, all_)
    part = convert.with_margin(rows, columns, frame)
    (picture,) = convert.planes(Converter()(frame, convert.rgb(frame, "bt601", part)), samples=3)
    cut = picture.reshape(part.bottom - part.top, part.right - part.left, 3)
    cut = cut[rows[0] - part.top : rows[1] - part.top, columns[0] - part.left : columns[1] - part.left]
    assert np.array_equal(cut, whole(frame)[0, rows[0] : rows[1], columns[0] : columns[1]].numpy())


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(FORMATS[:2] + OTHERS[:2]),
    sides,
    sides,
    wanted,
    wanted,
    places,
    places,
    st.booleans(),
    st.booleans(),
)
@example("yuv420p", 8, 27, 31, 1, 0.0, 0.2, False, True)  # as many columns after scaling as before
def test_fitting_frame_by_frame_is_fitting_the_clip(
    pixel_format: str, width: int, height: int, high: int, wide: int, down: float, across: float, mirror: bool, smooth: bool
) -> None:  # fmt: skip
    if (height, width) > (32, 32):
        height, width = height // 2 * 2, width // 2 * 2
    frame, fit = noise(pixel_format, width, height), Fit((high, wide), smooth, (down, across), mirror)
    canvas = FittedCanvas(request_for(frame, clip=2), fit, Converter())
    canvas.draw(0, frame)
    canvas.again(1)
    expected = resize.apply(whole(frame), fit)
    assert torch.equal(torch.from_numpy(canvas.clip), expected.expand(2, -1, -1, -1))


@given(st.integers(1, 9000), st.integers(1, 9000), st.data())
def test_what_a_crop_needs_lies_in_the_source_and_windows_enclose_it(
    source: int, scaled: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, scaled - 1))
    axis = Axis(source, scaled, first, data.draw(st.integers(1, scaled - first)))
    begin, end = axis.needed()
    assert 0 <= begin < end <= source
    factor = axis.factor(end)
    assert factor is None or 1 / factor == axis.step
    at, length, out, kept = axis.window()
    assert at % 2 == 0
    assert 0 <= at <= at + length <= source
    assert out <= axis.first
    assert axis.first + axis.kept <= out + kept <= scaled
    assert abs(at - axis.step * out) <= 1 / 16
    assert at + length == source or abs(at + length - axis.step * (out + kept)) <= 1 / 16


@pytest.mark.parametrize("size", [(224, 224), (90, 160), (64, 64), (360, 200)])
@pytest.mark.parametrize("mirror", [False, True])
def test_the_quick_way_shows_the_same_picture(size: tuple[int, int], mirror: bool, media: Any) -> None:
    with av.open(str(media / "nasa_h264_aac.mp4")) as container:
        frame = next(container.decode(video=0))
    fit = Fit(size, True, (0.3, 0.4), mirror)
    quick = OnePassCanvas(request_for(frame, "fast"), fit, Converter())
    quick.draw(0, frame)
    expected = resize.apply(whole(frame, "tagged"), fit).numpy().astype(int)
    difference = np.abs(quick.clip - expected)
    assert difference.mean() < 1
    assert np.quantile(difference, 0.99) <= 12


def test_the_quick_way_leaves_away_most_of_what_a_crop_throws_away() -> None:
    down, across = axes(360, 640, Fit((224, 224)))
    assert down.window() == (0, 360, 0, 224)
    _, length, _, _ = across.window()
    assert 360 <= length <= 480


def test_graphs_are_kept_for_a_few_kinds_of_frames() -> None:
    converter = Converter()
    for width in (16, 32, 48, 64, 80, 96, 112, 16):
        frame = noise("yuv420p", width, 16)
        converter(frame, convert.rgb(frame, "bt601", Part(0, 16, 0, width)))
    assert len(converter._graphs) == convert.KEPT


@pytest.mark.parametrize("color", ["bt601", "fast"])
def test_a_process_of_its_own_fits_alike(color: Color, media: Path, info_of: InfoOf) -> None:
    data = (media / "nasa_h264_aac.mp4").read_bytes()
    info = info_of(data, "mp4")
    wanted, fit = choose(info, Clip(5, 2), 0, 0, 0, 0), Fit((60, 72), True, (0.2, 0.9), mirror=True)
    asked = Request(memoryview(data), info, wanted, color=color, fit=fit)
    isolated = SubprocessDecoder(1)
    try:
        (result,) = isolated.decode([asked])
    finally:
        isolated.close()
    (here,) = PyAVDecoder().decode([asked])
    assert isinstance(result, Decoded)
    assert isinstance(here, Decoded)
    assert here.frames.shape == (5, 3, 60, 72)
    assert torch.equal(result.frames, here.frames)


@pytest.mark.parametrize("name", ["nasa_h264_aac.mp4", "h265.mp4", "rotated_90.mov", "testsrc2_vp9.webm", "av1.mkv"])
def test_what_the_container_says_is_believed_and_gives_the_same_frames(
    name: str, media: Path, info_of: InfoOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    asked = Request(memoryview(data), info, choose(info, Clip(6, 2), 0, 0, 0, 0))
    opened, refused = list[bool](), list[bool]()

    @contextmanager
    def opening(request: Request, *, trusting: bool = False) -> Iterator[Window]:
        opened.append(trusting)
        if trusting in refused:
            raise CorruptionError("not this way")
        with open_window(request, trusting=trusting) as window:
            yield window

    monkeypatch.setattr(pyav, "open_window", opening)
    (quickly,) = PyAVDecoder().decode([asked])
    assert opened == [True]
    refused.append(True)
    (thoroughly,) = PyAVDecoder().decode([asked])
    assert opened == [True, True, False]
    assert isinstance(quickly, Decoded)
    assert isinstance(thoroughly, Decoded)
    assert torch.equal(quickly.frames, thoroughly.frames)
    assert quickly.pts == thoroughly.pts


@pytest.mark.parametrize(
    ("name", "listed_ext"), [("pancake_h264.mkv", "mp4"), ("nasa_h264_aac.mp4", "mkv"), ("av1.mkv", "mp4")]
)
def test_a_container_that_is_not_what_the_files_name_says_gives_the_same_frames(
    name: str, listed_ext: str, media: Path, info_of: InfoOf
) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    asked = Request(memoryview(data), info, choose(info, Clip(4, 2), 0, 0, 0, 0))
    (right,) = PyAVDecoder().decode([asked])
    (wrong,) = PyAVDecoder().decode([replace(asked, info=replace(info, ext=listed_ext))])
    assert isinstance(right, Decoded)
    assert isinstance(wrong, Decoded)
    assert torch.equal(right.frames, wrong.frames)
    assert right.pts == wrong.pts
