"""Scaling and cropping to the wanted size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.loaders.decode.convert import covering
from headrace.loaders.decode.resize import fit, rotate

sides = st.integers(1, 5000)


@given(sides, sides, sides, sides)
def test_the_scaled_frame_covers_the_wanted_one_and_touches_it_on_one_side(
    h: int, w: int, height: int, width: int
) -> None:
    scaled = covering(h, w, (height, width))
    assert scaled[0] >= height
    assert scaled[1] >= width
    assert scaled[0] == height or scaled[1] == width


def test_the_middle_is_kept() -> None:
    frames = torch.zeros(2, 40, 100, 3, dtype=torch.uint8)
    frames[:, :, 30:70] = 200
    assert (fit(frames, (40, 40)) == 200).all()
    assert (fit(frames, (10, 10)) == 200).float().mean() > 0.7
    assert fit(frames, (20, 50)).shape == (2, 3, 20, 50)


def test_without_a_size_frames_only_change_their_layout() -> None:
    frames = torch.randint(0, 256, (2, 5, 7, 3), dtype=torch.uint8)
    fitted = fit(frames, None)
    assert (fitted.permute(0, 2, 3, 1) == frames).all()


def test_a_fine_pattern_is_averaged_not_sampled() -> None:
    frames = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    frames[:, ::2] = 255
    inner = fit(frames, (8, 8))[..., 1:-1, 1:-1].float()
    assert ((inner - 127.5).abs() < 4).all()


def test_frames_turn_clockwise() -> None:
    frames = torch.zeros(1, 2, 3, 3, dtype=torch.uint8)
    frames[0, 0, 0] = 9  # top left
    turned = rotate(frames, 90)
    assert turned.shape == (1, 3, 2, 3)
    assert (turned[0, 0, -1] == 9).all()  # top right
    assert (rotate(frames, 180)[0, -1, -1] == 9).all()
    assert (rotate(frames, 270)[0, -1, 0] == 9).all()
    assert (rotate(frames, 0) == frames).all()
