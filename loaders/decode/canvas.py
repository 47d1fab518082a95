"""What decoded frames are drawn on: a clip, one picture after the other.

Purpose: each frame is converted, scaled and cropped while it is still in the processor's cache, and a clip of whole frames is
never there unless it was asked for.
Invariants: `draw` gets the frames of the numbers 0, 1, … in turn, or `paint` the pixels of what is decoded to pixels at once;
`again` repeats the picture before. When all were drawn, `clip` is the clip.
Failure behaviour: libav's errors.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from av.video.frame import VideoFrame

from headrace.loaders.decode import convert
from headrace.loaders.decode.contract import Request
from headrace.loaders.decode.convert import U8, Chain, Converter, Part
from headrace.loaders.decode.geometry import Fit, axes


class Canvas(Protocol):
    """For one clip and one thread."""

    def draw(self, number: int, frame: VideoFrame) -> None: ...

    def again(self, number: int) -> None: ...


class Paintable(Canvas, Protocol):
    """Also for pixels: uint8 (H, W, 3)."""

    def paint(self, number: int, pixels: U8) -> None: ...


def sheet(request: Request, fit: Fit) -> U8:
    """Memory for the fitted clip: the request's room where it has one."""
    shape = (len(request.wanted.values), 3, *fit.size)
    room = None if request.room is None else request.room(shape)
    return np.empty(shape, np.uint8) if room is None else room


class Whole:
    """`clip`: uint8 (T, H, W, 3), frames as they are."""

    def __init__(self, request: Request, converter: Converter) -> None:
        self._color, self._convert = request.color, converter
        self.clip: U8 = np.empty((len(request.wanted.values), request.info.height, request.info.width, 3), np.uint8)

    def draw(self, number: int, frame: VideoFrame) -> None:
        picture = self._convert(frame, convert.rgb(frame, self._color))
        self.clip[number] = convert.planes(picture, samples=3)[0].reshape(frame.height, frame.width, 3)

    def paint(self, number: int, pixels: U8) -> None:
        self.clip[number] = pixels

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]


class Quick:
    """`clip`: uint8 (T, 3, h, w), fitted by `fit` in the pass that converts the colours."""

    def __init__(self, request: Request, fit: Fit, converter: Converter) -> None:
        self._fit, self._convert = fit, converter
        self._down, self._across = axes(request.info.height, request.info.width, fit)
        self._ways: dict[str, tuple[Chain, int, int]] = {}
        self.clip = sheet(request, fit)

    def draw(self, number: int, frame: VideoFrame) -> None:
        if frame.format.name not in self._ways:
            self._ways[frame.format.name] = self._way(frame)
        chain, y, x = self._ways[frame.format.name]
        green, blue, red = convert.planes(self._convert(frame, chain))
        for channel, plane in enumerate((red, green, blue)):
            kept = plane[y : y + self._down.kept, x : x + self._across.kept]
            self.clip[number, channel] = kept[:, ::-1] if self._fit.mirror else kept

    def _way(self, frame: VideoFrame) -> tuple[Chain, int, int]:
        """The chain for frames like this one, and where in what it gives the clip begins: row and column."""
        down, across = self._down, self._across
        if convert.is_usual(frame):
            (top, rows, y, height), (left, columns, x, width) = down.window(), across.window()
        else:
            top, rows, y, height = 0, down.source, 0, down.scaled
            left, columns, x, width = 0, across.source, 0, across.scaled
        part = Part(top, top + rows, left, left + columns)
        return convert.scaled(frame, part, height, width), down.first - y, across.first - x

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]
