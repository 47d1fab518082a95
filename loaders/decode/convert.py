"""Frames to RGB, by FFmpeg's filter graphs.

Purpose: the one place that says how colours are converted, and the cheapest way that gives those bits.

Invariants: "bt601" and "tagged" give the bits of swscale's `bilinear+full_chroma_int+accurate_rnd` to rgb24, which is
DALI's conversion. For the usual planar formats with even sides they are got by way of planes (gbrp), which swscale computes
with vector instructions: the arithmetic is the same but for a rounding of chroma between rows, and with two chroma rows in
proportions of 1 to 3 there is nothing to round. Other frames go the straight way. Parts of such frames are the same bits as in
the whole, `MARGIN` pixels away from the part's edges. "fast" takes the quickest
conversion, or scales in the same pass.
Failure behaviour: libav's errors; the graph is then made anew.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from av.filter import Graph
from av.filter.context import FilterContext
from av.video.frame import VideoFrame

from headrace.loaders.decode.contract import Color

U8 = npt.NDArray[np.uint8]
Chain = tuple[tuple[str, str], ...]
"""Filters in turn: name and arguments."""
EXACT = "bilinear+full_chroma_int+accurate_rnd"
MARGIN, LEAST = 4, 8
"""Of fewer rows or columns than `LEAST`, libswscale makes other bits."""
KEPT = 6
_PLANAR = frozenset(
    f"yuv{j}{sampling}p" for j in ("", "j") for sampling in ("420", "422", "444")
) | {f"yuv{sampling}p10le" for sampling in ("420", "422", "444")}  # fmt: skip


class Part(msgspec.Struct, frozen=True):
    """A rectangle of a frame: rows and columns, begin and end."""

    top: int
    bottom: int
    left: int
    right: int


def is_usual(frame: VideoFrame) -> bool:
    """Whether planes may be cut and converted by vector instructions without changing a bit."""
    return frame.format.name in _PLANAR and frame.width % 2 == 0 and frame.height % 2 == 0


def with_margin(rows: tuple[int, int], columns: tuple[int, int], frame: VideoFrame) -> Part:
    """A part around these rows and columns that is right in them, of a usual frame; all of any other."""
    if not is_usual(frame):
        return Part(0, frame.height, 0, frame.width)
    return Part(*_widened(*rows, frame.height), *_widened(*columns, frame.width))


def _widened(begin: int, end: int, side: int) -> tuple[int, int]:
    first, last = max(0, (begin - MARGIN) // 2 * 2), min(side, (end + MARGIN + 1) // 2 * 2)
    if last - first < LEAST:
        return (first, min(side, LEAST)) if first == 0 else (max(0, last - LEAST), last)
    return first, last


def rgb(frame: VideoFrame, color: Color, part: Part | None = None) -> Chain:
    """The chain that gives a frame, or a part of it, as rgb24."""
    if color == "fast":
        return *_cut(part, frame), ("scale", "flags=bilinear"), ("format", "rgb24")
    scale = ("scale", f"flags={EXACT}" + (":in_color_matrix=bt601" if color == "bt601" else ""))
    if not is_usual(frame):
        return *_cut(part, frame), scale, ("format", "rgb24")
    return *_cut(part, frame), scale, ("format", "gbrp"), ("scale", ""), ("format", "rgb24")


def scaled(frame: VideoFrame, part: Part, height: int, width: int) -> Chain:
    """The chain that gives a part of a frame as planes of another size, by the file's tags, in one pass."""
    return *_cut(part, frame), ("scale", f"{width}:{height}:flags={EXACT}"), ("format", "gbrp")


def _cut(part: Part | None, frame: VideoFrame) -> Chain:
    if part is None or part == Part(0, frame.height, 0, frame.width):
        return ()
    size = f"{part.right - part.left}:{part.bottom - part.top}"
    return (("crop", f"{size}:{part.left}:{part.top}:exact=1"),)


class Converter:
    """Runs chains; the graphs of the last `KEPT` kinds of frames are kept. For one thread at a time."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[object, ...], Graph] = OrderedDict()

    def __call__(self, frame: VideoFrame, chain: Chain) -> VideoFrame:
        kind = (frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range, chain)
        graph = self._graphs.pop(kind, None) or _graph(frame, chain)
        frame.pts = None
        graph.vpush(frame)
        result = graph.vpull()
        self._graphs[kind] = graph  # one that failed is not used again
        if len(self._graphs) > KEPT:
            self._graphs.popitem(last=False)
        return result


def _graph(frame: VideoFrame, chain: Chain) -> Graph:
    graph = Graph()
    graph.threads = 1  # clips are what runs in parallel
    last: FilterContext = graph.add(
        "buffer",
        f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
        f":colorspace={int(frame.colorspace)}:range={int(frame.color_range)}",
    )
    for name, arguments in (*chain, ("buffersink", "")):
        following = graph.add(name, arguments) if arguments else graph.add(name)
        last.link_to(following)
        last = following
    graph.configure()
    return graph


def planes(frame: VideoFrame, samples: int = 1) -> list[U8]:
    """The planes' memory as (height, width × samples), without a copy."""
    every: Any = frame.planes
    height, width = frame.height, frame.width * samples
    return [np.frombuffer(one, np.uint8).reshape(-1, one.line_size)[:height, :width] for one in every]
