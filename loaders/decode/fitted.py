"""Frames fitted one by one: `resize.fit` of the whole clip, to the bit, without the whole clip.

Purpose: pixels that the crop throws away are neither converted nor, as far as torch's filter lets it, scaled.
Invariants: the clip is `resize.fit(frames, …)` of the converted frames. Columns right of the crop and rows below it are
left away, with the scale given in a form whose inverse is the same number; what lies left and above is scaled, but of
undefined content, since no kept pixel looks at it.
Failure behaviour: that of the converter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from av.video.frame import VideoFrame

from headrace.loaders.decode import convert, resize
from headrace.loaders.decode.canvas import sheet
from headrace.loaders.decode.contract import Request
from headrace.loaders.decode.convert import U8, Chain, Converter, Part
from headrace.loaders.decode.geometry import Axis, Fit, axes

_WORTH = 0.95  # of the pixels; leaving away less gains nothing
Scale = Callable[[torch.Tensor], torch.Tensor]


class Fitted:
    """`clip`: uint8 (T, 3, h, w)."""

    def __init__(self, request: Request, fit: Fit, converter: Converter) -> None:
        self._fit, self._color, self._convert = fit, request.color, converter
        self._down, self._across = axes(request.info.height, request.info.width, fit)
        self._rows, self._columns = self._down.needed(fit.antialias), self._across.needed(fit.antialias)
        height, width, self._scale = _scaling(self._down, self._across, self._rows[1], self._columns[1], fit.antialias)
        self._ways: dict[str, tuple[Part, Chain]] = {}
        self._page: U8 | None = None
        self._sides = height, width
        self.clip = sheet(request, fit)

    def draw(self, number: int, frame: VideoFrame) -> None:
        if self._page is None:
            self._page = np.empty((*self._sides, 3), np.uint8)
        page = self._page
        if frame.format.name not in self._ways:
            part = convert.with_margin(self._rows, self._columns, frame)
            self._ways[frame.format.name] = part, convert.rgb(frame, self._color, part)
        part, chain = self._ways[frame.format.name]
        picture = convert.planes(self._convert(frame, chain), samples=3)[0]
        bottom, right = min(part.bottom, len(page)), min(part.right, page.shape[1])
        kept = picture[: bottom - part.top, : 3 * (right - part.left)]
        page[part.top : bottom, part.left : right] = kept.reshape(bottom - part.top, right - part.left, 3)
        self.paint(number, page)

    def paint(self, number: int, pixels: U8) -> None:
        down, across = self._down, self._across
        height, width = self._sides
        seen = torch.from_numpy(pixels[:height, :width])[None].permute(0, 3, 1, 2)
        scaled = self._scale(seen).numpy()
        fitted = scaled[0, :, down.first : down.first + down.kept, across.first : across.first + across.kept]
        self.clip[number] = fitted[:, :, ::-1] if self._fit.mirror else fitted

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]


def _scaling(down: Axis, across: Axis, bottom: int, right: int, antialias: bool) -> tuple[int, int, Scale]:
    """How many rows and columns of a picture are scaled, and how."""
    if (down.source, across.source) == (down.scaled, across.scaled):
        return down.source, across.source, lambda page: page
    vertical, horizontal = down.factor(bottom), across.factor(right)
    saved = bottom * right < _WORTH * down.source * across.source
    if vertical is None or horizontal is None or not saved or not antialias:
        size = (down.scaled, across.scaled)
        return down.source, across.source, lambda page: resize.scale(page, *size, antialias)
    factors = (vertical, horizontal)
    return bottom, right, lambda page: F.interpolate(page, scale_factor=factors, mode="bilinear", antialias=True)
