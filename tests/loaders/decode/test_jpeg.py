"""JPEGs come out as Pillow shows them, or not at all."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.media import images
from headrace.loaders.clip import Clip, choose
from headrace.loaders.decode import pyav
from headrace.loaders.decode.base import Color, Decoded, Fit, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.resize import fit
from headrace.loaders.decode.subprocess_decoder import SubprocessDecoder
from tests.support.pictures import pattern

KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "progressive": {"progressive": True},
    "of full colours": {"subsampling": 0},
    "of half colours": {"subsampling": 1},
    "of RGB": {"keep_rgb": True},
    "restarting": {"restart_marker_blocks": 2},
}


def encoded(mode: str = "RGB", width: int = 70, height: int = 46, **how: Any) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pattern(width, height)).convert(mode).save(target, "JPEG", **how)
    return target.getvalue()


def shown(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def asked(data: bytes, cut: Fit | None = None, color: Color = "bt601") -> Request:
    info = images.probe(data, "jpg")
    return Request(memoryview(data), info, choose(info, Clip(1), 0, 0, 0, 0), color=color, fit=cut)


def made(request: Request) -> np.ndarray:
    (one,) = PyAVDecoder().decode([request])
    assert isinstance(one, Decoded), one
    return one.frames.numpy()


@pytest.mark.parametrize("color", ["bt601", "tagged", "fast"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(70, 46), (33, 17), (1, 1), (64, 64)])
def test_pixels_are_those_of_pillow_whatever_colours_are_asked_for(
    kind: str, size: tuple[int, int], color: Color
) -> None:
    data = encoded("RGB", *size, **KINDS[kind])
    assert pyav.decode_jpeg(asked(data)) is not None
    assert (made(asked(data, color=color))[0] == shown(data)).all()


def test_a_grey_one_is_grey() -> None:
    data = encoded("L")
    assert (made(asked(data))[0] == shown(data)).all()


def test_one_of_four_channels_is_left_to_pyav() -> None:
    request = asked(encoded("CMYK"))
    assert pyav.decode_jpeg(request) is None
    assert np.abs(made(request)[0].astype(int) - pattern(70, 46)).max() < 40


@given(width=st.integers(8, 200), height=st.integers(8, 200), mirror=st.booleans(), antialias=st.booleans())
@settings(max_examples=40, deadline=None)
def test_it_is_cut_as_clips_are(width: int, height: int, mirror: bool, antialias: bool) -> None:
    data, cut = encoded("RGB", width, height), Fit((40, 56), antialias, (0.2, 0.9), mirror)
    import torch

    whole = torch.from_numpy(shown(data)[None].copy())
    expected = fit(whole, cut.size, antialias=antialias, at=cut.at, mirror=mirror)
    for color in ("bt601", "fast"):
        assert (made(asked(data, cut, color)) == expected.numpy()).all()


@pytest.mark.parametrize("color", ["bt601", "fast"])
def test_a_process_of_its_own_makes_the_same(color: Color) -> None:
    request, isolated = asked(encoded(), Fit((24, 32)), color), SubprocessDecoder(1)
    try:
        (one,) = isolated.decode([request])
    finally:
        isolated.close()
    assert isinstance(one, Decoded)
    assert (one.frames.numpy() == made(request)).all()


@pytest.mark.parametrize("how", [{}, {"progressive": True}])
def test_a_picture_cut_anywhere_is_refused(how: dict[str, Any]) -> None:
    data = encoded("RGB", 96, 80, **how)
    request, refused = asked(data), 0
    for end in np.linspace(0, len(data) - 1, 24).astype(int):
        (one,) = PyAVDecoder().decode([replace(request, data=memoryview(data)[:end])])
        refused += isinstance(one, CorruptionError)
    assert refused >= 23


@given(at=st.floats(0, 1), wrong=st.binary(min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_damage_gives_an_error_or_a_picture_of_the_right_size(at: float, wrong: bytes) -> None:
    data = bytearray(encoded("RGB", 96, 80, restart_marker_blocks=4))
    request, start = asked(bytes(data)), int(at * (len(data) - len(wrong)))
    data[start : start + len(wrong)] = wrong
    (one,) = PyAVDecoder().decode([replace(request, data=memoryview(bytes(data)))])
    assert isinstance(one, HeadraceError) or one.frames.shape == (1, 80, 96, 3)


def test_one_that_is_larger_than_the_index_says_is_not_decoded() -> None:
    request = asked(encoded())
    swollen = replace(request, data=memoryview(encoded("RGB", 700, 460)))
    assert pyav.decode_jpeg(swollen) is None
    (one,) = PyAVDecoder().decode([swollen])
    assert isinstance(one, CorruptionError)
