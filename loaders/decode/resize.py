"""Clips to the size that the trainer asked for: one implementation, whichever decoder made the frames.

Purpose: equal frames in, equal frames out.
Invariants: the clip is scaled, bilinear and by default with antialiasing, so that it just covers the wanted size with its
aspect ratio kept, then cropped, by default around the centre. On the CPU the arithmetic stays in uint8; a GPU computes in
float and rounds, which may differ by 1.
Failure behaviour: none; sizes were checked by the loader.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.loaders.decode.geometry import Fit, covering, offset


def fit(
    frames: torch.Tensor,
    size: tuple[int, int] | None,
    *,
    antialias: bool = True,
    at: tuple[float, float] = (0.5, 0.5),
    mirror: bool = False,
) -> torch.Tensor:
    """uint8 (T, H, W, 3) to uint8 (T, 3, h, w), maybe a view; `size` is (h, w), None keeps the source's.

    `at` is where the crop lies between top and bottom, left and right: 0 to 1 each.
    """
    planes = frames.permute(0, 3, 1, 2)
    if size is not None and tuple(planes.shape[2:]) != size:
        height, width = covering(planes.shape[2], planes.shape[3], size)
        if (height, width) != tuple(planes.shape[2:]):
            planes = scale(planes, height, width, antialias)
        top, left = offset(height - size[0], at[0]), offset(width - size[1], at[1])
        planes = planes[:, :, top : top + size[0], left : left + size[1]]
    return planes.flip(3) if mirror else planes


def rotate(frames: torch.Tensor, degrees: int) -> torch.Tensor:
    """(T, H, W, 3) turned clockwise by 0, 90, 180 or 270 degrees, as rotation metadata asks for."""
    return torch.rot90(frames, -degrees // 90 % 4, (1, 2))


def apply(frames: torch.Tensor, how: Fit | None) -> torch.Tensor:
    """`fit` as a request asks for it; without, the frames as they are."""
    return frames if how is None else fit(frames, how.size, antialias=how.antialias, at=how.at, mirror=how.mirror)


def scale(planes: torch.Tensor, height: int, width: int, antialias: bool) -> torch.Tensor:
    """Planes (N, 3, H, W) to another size."""
    if planes.device.type == "cpu":
        return F.interpolate(planes, (height, width), mode="bilinear", antialias=antialias)
    scaled = F.interpolate(planes.float(), (height, width), mode="bilinear", antialias=antialias)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)
