"""Clips to the size that the trainer asked for: one implementation, whichever decoder made the frames.

Purpose: equal frames in, equal frames out.
Invariants: the clip is scaled, with antialiasing and bilinear weights, so that it just covers the wanted size with its aspect
ratio kept, then cropped around the centre. On the CPU the arithmetic stays in uint8; a GPU computes in float and rounds, which
may differ by 1.
Failure behaviour: none; sizes were checked by the loader.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fit(frames: torch.Tensor, size: tuple[int, int] | None) -> torch.Tensor:
    """uint8 (T, H, W, 3) to contiguous uint8 (T, 3, h, w); `size` is (h, w), None keeps the source's."""
    planes = frames.permute(0, 3, 1, 2)
    if size is None or tuple(planes.shape[2:]) == size:
        return planes.contiguous()
    height, width = covering(planes.shape[2], planes.shape[3], size)
    if (height, width) != tuple(planes.shape[2:]):
        planes = _scale(planes, height, width)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return planes[:, :, top : top + size[0], left : left + size[1]].contiguous()


def covering(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of the same aspect ratio, rounded, that covers `size`."""
    if size[0] * width >= size[1] * height:  # the height is what has to grow more
        return size[0], max(size[1], round(width * size[0] / height))
    return max(size[0], round(height * size[1] / width)), size[1]


def rotate(frames: torch.Tensor, degrees: int) -> torch.Tensor:
    """(T, H, W, 3) turned clockwise by 0, 90, 180 or 270 degrees, as rotation metadata asks for."""
    return torch.rot90(frames, -degrees // 90 % 4, (1, 2))


def _scale(planes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if planes.device.type == "cpu":
        return F.interpolate(planes, (height, width), mode="bilinear", antialias=True)
    scaled = F.interpolate(planes.float(), (height, width), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)
