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
            planes = _scale(planes, height, width, antialias)
        top, left = _offset(height - size[0], at[0]), _offset(width - size[1], at[1])
        planes = planes[:, :, top : top + size[0], left : left + size[1]]
    return planes.flip(3) if mirror else planes


def covering(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of the same aspect ratio, rounded, that covers `size`."""
    if size[0] * width >= size[1] * height:  # the height is what has to grow more
        return size[0], max(size[1], round(width * size[0] / height))
    return max(size[0], round(height * size[1] / width)), size[1]


def rotate(frames: torch.Tensor, degrees: int) -> torch.Tensor:
    """(T, H, W, 3) turned clockwise by 0, 90, 180 or 270 degrees, as rotation metadata asks for."""
    return torch.rot90(frames, -degrees // 90 % 4, (1, 2))


def _offset(room: int, at: float) -> int:
    """The centre's offset is rounded down, as it always was; the others' are spread over 0 … room."""
    return room // 2 if at == 0.5 else min(room, int(at * (room + 1)))


def _scale(planes: torch.Tensor, height: int, width: int, antialias: bool) -> torch.Tensor:
    if planes.device.type == "cpu":
        return F.interpolate(planes, (height, width), mode="bilinear", antialias=antialias)
    scaled = F.interpolate(planes.float(), (height, width), mode="bilinear", antialias=antialias)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)
