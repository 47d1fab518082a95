"""Convert frames to RGB with FFmpeg's filter graphs, and collect the frames of a clip on canvases.

Purpose: this module defines how colours are converted, and uses the fastest conversion that returns exactly these
pixels. Each frame is converted, scaled and cropped while it is in the CPU's cache. A clip is kept at full size only on
request. `Axis` computes which source pixels a crop needs. The other pixels are neither converted nor scaled.

Invariants:
- "bt601" and "tagged" are bit-identical to swscale's `bilinear+full_chroma_int+accurate_rnd` to rgb24, which is DALI's
  conversion.
- Usual planar formats with even sides are converted through planes (gbrp), which swscale computes with vector
  instructions. The result is the same: only the rounding of chroma between rows could differ, and chroma weights of 1
  and 3 need no rounding. Other frames are converted directly.
- A converted part of a usual frame is bit-identical to the same part of the converted frame, except within `MARGIN`
  pixels of the part's edges.
- "fast" uses the fastest conversion, or scales in the same pass.
- A canvas receives `draw` calls (or `paint` calls with pixels) for frames 0, 1, … in order. `again` repeats the
  previous frame. `clip` is complete after the last call.
- The module does not import torch, so the decoding subprocess starts quickly.

Failure behaviour: libav's errors are raised unchanged. A graph that failed is rebuilt. The loader has checked all
sizes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from av.filter import Graph
from av.filter.context import FilterContext
from av.video.frame import VideoFrame

from headrace.loaders.decode.base import Color, Fit, Request

U8 = npt.NDArray[np.uint8]
Chain = tuple[tuple[str, str], ...]
"""Filters in order, as (name, arguments)."""
EXACT = "bilinear+full_chroma_int+accurate_rnd"
MARGIN, LEAST = 4, 8
"""`MARGIN`: pixels at the edges of a part that may differ. `LEAST`: the minimum number of rows and columns of a part.
With fewer, libswscale returns slightly different pixels."""
KEPT = 6
PLANAR = frozenset(
    f"yuv{j}{sampling}p" for j in ("", "j") for sampling in ("420", "422", "444")
) | {f"yuv{sampling}p10le" for sampling in ("420", "422", "444")}  # fmt: skip


class Part(msgspec.Struct, frozen=True):
    """A rectangle of a frame: first and last (exclusive) row and column."""

    top: int
    bottom: int
    left: int
    right: int


def is_usual(frame: VideoFrame) -> bool:
    """Whether cropping the planes and converting with vector instructions does not change any pixel of this frame."""
    return frame.format.name in PLANAR and frame.width % 2 == 0 and frame.height % 2 == 0


def with_margin(rows: tuple[int, int], columns: tuple[int, int], frame: VideoFrame) -> Part:
    """A part around these rows and columns in which the conversion is exact.

    The whole frame if its format is not usual.
    """
    if not is_usual(frame):
        return Part(0, frame.height, 0, frame.width)
    return Part(*_widened(*rows, frame.height), *_widened(*columns, frame.width))


def _widened(begin: int, end: int, side: int) -> tuple[int, int]:
    first, last = max(0, (begin - MARGIN) // 2 * 2), min(side, (end + MARGIN + 1) // 2 * 2)
    if last - first < LEAST:
        return (first, min(side, LEAST)) if first == 0 else (max(0, last - LEAST), last)
    return first, last


def rgb(frame: VideoFrame, color: Color, part: Part | None = None) -> Chain:
    """The filter chain that converts a frame, or a part of it, to rgb24."""
    if color == "fast":
        return *cut(part, frame), ("scale", "flags=bilinear"), ("format", "rgb24")
    scale = ("scale", f"flags={EXACT}" + (":in_color_matrix=bt601" if color == "bt601" else ""))
    if not is_usual(frame):
        return *cut(part, frame), scale, ("format", "rgb24")
    return *cut(part, frame), scale, ("format", "gbrp"), ("scale", ""), ("format", "rgb24")


def scaled(frame: VideoFrame, part: Part, height: int, width: int) -> Chain:
    """The filter chain that converts and scales a part of a frame to planes in one pass, by the file's colour tags."""
    return *cut(part, frame), ("scale", f"{width}:{height}:flags={EXACT}"), ("format", "gbrp")


def cut(part: Part | None, frame: VideoFrame) -> Chain:
    """The filter chain that cuts a part out of a frame."""
    if part is None or part == Part(0, frame.height, 0, frame.width):
        return ()
    size = f"{part.right - part.left}:{part.bottom - part.top}"
    return (("crop", f"{size}:{part.left}:{part.top}:exact=1"),)


class Converter:
    """Runs filter chains. Not safe to share between threads.

    It keeps the graphs of the last `KEPT` kinds of frames.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[object, ...], Graph] = OrderedDict()

    def __call__(self, frame: VideoFrame, chain: Chain) -> VideoFrame:
        kind = (frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range, chain)
        graph = self._graphs.pop(kind, None) or _graph(frame, chain)
        frame.pts = None
        graph.vpush(frame)
        result = graph.vpull()
        self._graphs[kind] = graph  # not reached if the graph failed, so it is not used again
        if len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        return result


def _graph(frame: VideoFrame, chain: Chain) -> Graph:
    graph = Graph()
    graph.threads = 1  # clips run in parallel instead
    previous: FilterContext = graph.add(
        "buffer",
        f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
        f":colorspace={int(frame.colorspace)}:range={int(frame.color_range)}",
    )
    for name, arguments in (*chain, ("buffersink", "")):
        following = graph.add(name, arguments) if arguments else graph.add(name)
        previous.link_to(following)
        previous = following
    graph.configure()
    return graph


def planes(frame: VideoFrame, samples: int = 1) -> list[U8]:
    """The memory of the planes as (height, width × samples), without a copy."""
    frame_planes: Any = frame.planes
    height, width = frame.height, frame.width * samples
    arrays = list[U8]()
    for one in frame_planes:  # a list comprehension would be one more call for each frame
        arrays.append(np.frombuffer(one, np.uint8).reshape(-1, one.line_size)[:height, :width])
    return arrays


class Canvas(Protocol):
    """Collects the frames of one clip. Not safe to share between threads."""

    def draw(self, number: int, frame: VideoFrame) -> None: ...

    def again(self, number: int) -> None: ...


class Paintable(Canvas, Protocol):
    """A canvas that also accepts pixels: uint8 (H, W, 3)."""

    def paint(self, number: int, pixels: U8) -> None: ...


def clip_memory(request: Request, fit: Fit) -> U8:
    """Memory for the fitted clip. It is the request's memory if the request provides any."""
    shape = (len(request.wanted.values), 3, *fit.size)
    memory = None if request.allocate is None else request.allocate(shape)
    return np.empty(shape, np.uint8) if memory is None else memory


class FullSizeCanvas:
    """Frames at full size. `clip` is uint8 (T, H, W, 3)."""

    def __init__(self, request: Request, converter: Converter) -> None:
        self._color, self._convert = request.color, converter
        self.clip: U8 = np.empty((len(request.wanted.values), request.info.height, request.info.width, 3), np.uint8)

    def draw(self, number: int, frame: VideoFrame) -> None:
        picture = self._convert(frame, rgb(frame, self._color))
        self.clip[number] = planes(picture, samples=3)[0].reshape(frame.height, frame.width, 3)

    def paint(self, number: int, pixels: U8) -> None:
        self.clip[number] = pixels

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]


class OnePassCanvas:
    """Frames that are scaled and converted in one pass. `clip` is uint8 (T, 3, h, w)."""

    def __init__(self, request: Request, fit: Fit, converter: Converter) -> None:
        self._fit, self._convert = fit, converter
        self._down, self._across = axes(request.info.height, request.info.width, fit)
        self._chains: dict[str, tuple[Chain, int, int]] = {}
        self.clip = clip_memory(request, fit)

    def draw(self, number: int, frame: VideoFrame) -> None:
        if frame.format.name not in self._chains:
            self._chains[frame.format.name] = self._chain(frame)
        chain, y, x = self._chains[frame.format.name]
        green, blue, red = planes(self._convert(frame, chain))
        for channel, plane in enumerate((red, green, blue)):
            crop = plane[y : y + self._down.kept, x : x + self._across.kept]
            self.clip[number, channel] = crop[:, ::-1] if self._fit.mirror else crop

    def _chain(self, frame: VideoFrame) -> tuple[Chain, int, int]:
        """The filter chain for frames like this one, and the row and column of its output at which the clip begins."""
        down, across = self._down, self._across
        if is_usual(frame):
            (top, rows, y, height), (left, columns, x, width) = down.window(), across.window()
        else:
            top, rows, y, height = 0, down.source, 0, down.scaled
            left, columns, x, width = 0, across.source, 0, across.scaled
        part = Part(top, top + rows, left, left + columns)
        return scaled(frame, part, height, width), down.first - y, across.first - x

    def again(self, number: int) -> None:
        self.clip[number] = self.clip[number - 1]


# --- scaling and cropping, computed for the two sides of a frame

_SHIFT = 1 / 16
"""Pixels by which the "fast" conversion may shift a side of the frame, so that a part begins at a whole pixel."""


class Axis(msgspec.Struct, frozen=True):
    """One side of a frame: `source` pixels are scaled to `scaled` pixels, of which `kept` are kept, from `first` on."""

    source: int
    scaled: int
    first: int
    kept: int

    @property
    def step(self) -> float:
        """Source pixels per output pixel."""
        return self.source / self.scaled

    def needed(self, antialias: bool = True) -> tuple[int, int]:
        """First and last (exclusive) of the source pixels that bilinear filtering reads for the kept pixels."""
        step = self.step
        reach = max(1.0, step) if antialias else 1.0
        begin = math.floor(step * (self.first + 0.5) - reach) - 1
        end = math.ceil(step * (self.first + self.kept - 0.5) + reach) + 1
        return max(0, begin), min(self.source, end)

    def factor(self, end: int) -> float | None:
        """A scale factor whose inverse is exactly `step`, and which scales the first `end` pixels to enough pixels.

        None if there is no such factor. Also None if the number of pixels would stay the same, since torch then skips
        scaling.
        """
        guess, step = self.scaled / self.source, self.step
        for factor in (guess, math.nextafter(guess, 0), math.nextafter(guess, 2 * guess)):
            scaled_end = math.floor(end * factor)
            if 1 / factor == step and scaled_end >= self.first + self.kept and (scaled_end != end or factor == 1):
                return factor
        return None

    def window(self) -> tuple[int, int, int, int]:
        """A part of the source that can be scaled alone.

        Returns its start and length, and the start and length of the scaled part. It begins and ends at even pixels (or
        at the frame's end), to within `_SHIFT`. It includes a margin around the kept pixels, so its edges do not affect
        them.
        """
        margin = math.ceil((max(1.0, self.step) + 4) / self.step)
        first = next(j for j in range(max(0, self.first - margin), -1, -1) if self._is_even(j))
        last = next(
            j for j in range(self.first + self.kept + margin, self.scaled + 1)
            if self._is_even(j) or j == self.scaled
        ) if self.first + self.kept + margin < self.scaled else self.scaled  # fmt: skip
        begin = 2 * round(self.step * first / 2)
        end = self.source if last == self.scaled else 2 * round(self.step * last / 2)
        return begin, end - begin, first, last - first

    def _is_even(self, position: int) -> bool:
        at = self.step * position
        return abs(at - 2 * round(at / 2)) <= _SHIFT


def axes(height: int, width: int, fit: Fit) -> tuple[Axis, Axis]:
    """The vertical and the horizontal axis for frames of this size."""
    high, wide = covering(height, width, fit.size)
    down = Axis(height, high, offset(high - fit.size[0], fit.at[0]), fit.size[0])
    return down, Axis(width, wide, offset(wide - fit.size[1], fit.at[1]), fit.size[1])


def covering(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """The smallest size of the same aspect ratio, rounded, that covers `size`."""
    if size[0] * width >= size[1] * height:  # the height determines the scale
        return size[0], max(size[1], round(width * size[0] / height))
    return max(size[0], round(height * size[1] / width)), size[1]


def offset(cropped: int, at: float) -> int:
    """The crop's offset, from 0 to `cropped`, the number of pixels that are cropped.

    The offset of a centred crop is rounded down. Other positions are distributed evenly.
    """
    return cropped // 2 if at == 0.5 else min(cropped, int(at * (cropped + 1)))
