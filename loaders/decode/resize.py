"""Scale and crop clips to the requested size: one implementation for the frames of all decoders.

Purpose: equal frames give equal results. `fit` processes a whole clip. `FittedCanvas` does the same frame by frame, and
skips pixels that the crop discards if torch's filter allows it.

Invariants:
- A clip is scaled bilinearly, by default with antialiasing, to the smallest size that covers the requested size at the
  clip's aspect ratio. Then it is cropped, by default at the centre.
- On the CPU, all arithmetic is in uint8. A GPU computes in float and rounds, which may differ by 1.
- `FittedCanvas` is bit-identical to `fit` of the whole converted clip. It leaves out columns to the right of the crop
  and rows below it, and uses a scale factor with exactly the same inverse. Pixels to the left of the crop and above it
  are scaled from undefined content, which no kept pixel depends on.
Failure behaviour: that of the converter; the loader has checked all sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from av.video.frame import VideoFrame

from headrace.loaders.decode import convert
from headrace.loaders.decode.base import Fit, Request
from headrace.loaders.decode.convert import U8, Axis, Chain, Converter, Part, axes, clip_memory, covering, offset


def fit(
    frames: torch.Tensor,
    size: tuple[int, int] | None,
    *,
    antialias: bool = True,
    at: tuple[float, float] = (0.5, 0.5),
    mirror: bool = False,
) -> torch.Tensor:
    """uint8 (T, H, W, 3) to uint8 (T, 3, h, w), possibly a view. `size` is (h, w); None keeps the source's size.

    `at` is the position of the crop, vertically and horizontally: 0 to 1 each.
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
    """Rotate (T, H, W, 3) clockwise by 0, 90, 180 or 270 degrees, as rotation metadata specifies."""
    return torch.rot90(frames, -degrees // 90 % 4, (1, 2))


def apply(frames: torch.Tensor, request_fit: Fit | None) -> torch.Tensor:
    """`fit` with the parameters of a request. Without parameters, the frames are returned unchanged."""
    if request_fit is None:
        return frames
    return fit(frames, request_fit.size, antialias=request_fit.antialias, at=request_fit.at, mirror=request_fit.mirror)


def scale(planes: torch.Tensor, height: int, width: int, antialias: bool) -> torch.Tensor:
    """Scale planes (N, 3, H, W) to another size."""
    if planes.device.type == "cpu":
        return F.interpolate(planes, (height, width), mode="bilinear", antialias=antialias)
    scaled = F.interpolate(planes.float(), (height, width), mode="bilinear", antialias=antialias)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


_WORTH = 0.95  # pixels are skipped only if less than this fraction of them remains
Scale = Callable[[torch.Tensor], torch.Tensor]


class FittedCanvas:
    """A canvas that scales and crops each frame. Its `clip` is uint8 (T, 3, h, w)."""

    def __init__(self, request: Request, fit: Fit, converter: Converter) -> None:
        self._fit, self._color, self._convert = fit, request.color, converter
        self._down, self._across = axes(request.info.height, request.info.width, fit)
        self._rows, self._columns = self._down.needed(fit.antialias), self._across.needed(fit.antialias)
        height, width, self._scale = _scaling(self._down, self._across, self._rows[1], self._columns[1], fit.antialias)
        self._chains: dict[str, tuple[Part, Chain]] = {}
        self._page: U8 | None = None
        self._sides = height, width
        self.clip = clip_memory(request, fit)

    def draw(self, number: int, frame: VideoFrame) -> None:
        if self._page is None:
            self._page = np.empty((*self._sides, 3), np.uint8)
        page = self._page
        if frame.format.name not in self._chains:
            part = convert.with_margin(self._rows, self._columns, frame)
            self._chains[frame.format.name] = part, convert.rgb(frame, self._color, part)
        part, chain = self._chains[frame.format.name]
        picture = convert.planes(self._convert(frame, chain), samples=3)[0]
        bottom, right = min(part.bottom, len(page)), min(part.right, page.shape[1])
        pixels = picture[: bottom - part.top, : 3 * (right - part.left)]
        page[part.top : bottom, part.left : right] = pixels.reshape(bottom - part.top, right - part.left, 3)
        self.paint(number, page)

    def paint(self, number: int, pixels: U8) -> None:
        down, across = self._down, self._across
        height, width = self._sides
        source = torch.from_numpy(pixels[:height, :width])[None].permute(0, 3, 1, 2)
        scaled = self._scale(source).numpy()
        fitted = scaled[0, :, down.first : down.first + down.kept, across.first : across.first + across.kept]
        self.clip[number] = fitted[:, :, ::-1] if self._fit.mirror else fitted

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]


def _scaling(down: Axis, across: Axis, bottom: int, right: int, antialias: bool) -> tuple[int, int, Scale]:
    """How many rows and columns of a frame are scaled, and the function that scales them."""
    if (down.source, across.source) == (down.scaled, across.scaled):
        return down.source, across.source, lambda page: page
    vertical, horizontal = down.factor(bottom), across.factor(right)
    saved = bottom * right < _WORTH * down.source * across.source
    if vertical is None or horizontal is None or not saved or not antialias:
        size = (down.scaled, across.scaled)
        return down.source, across.source, partial(scale, height=size[0], width=size[1], antialias=antialias)
    factors = (vertical, horizontal)
    return bottom, right, partial(F.interpolate, scale_factor=factors, mode="bilinear", antialias=True)
