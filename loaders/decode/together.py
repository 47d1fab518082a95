"""Several clips of one video whose decoding begins at one key frame: decoded once, drawn on all of their canvases.

Purpose: what several clips of a long video have in common is not decoded for each of them.
Invariants: the bits are those of decoding each clip by itself, since the packets from one key frame on are the same ones; a clip
that begins at another key frame is decoded apart. One decoded frame is held at a time, beside the canvases.
Failure behaviour: what goes wrong while they are decoded together says nothing about any one of them: the caller decodes each
by itself then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

import msgspec
from av.video.frame import VideoFrame
from msgspec.structs import replace

from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.canvas import Canvas
from headrace.loaders.decode.contract import Request


def beginning(ext: str, wanted: Wanted) -> Hashable:
    """Equal for clips of one file whose decoding begins at the same packet; `None` for what is not decoded from a key frame."""
    return None if ext in IMAGE_EXTENSIONS else (ext, wanted.by, wanted.key)


def grouped(requests: Sequence[Request]) -> list[list[int]]:
    """The numbers of the requests that are decoded together, each number once; requests of one file share its `data`."""
    groups: dict[Hashable, list[int]] = {}
    for number, request in enumerate(requests):
        begins = beginning(request.info.ext, request.wanted)
        groups.setdefault((number,) if begins is None else (id(request.data), begins), []).append(number)
    return list(groups.values())


def union(requests: Sequence[Request]) -> Request:
    """One request for every frame that any of these wants, each once."""
    values = sorted({value for request in requests for value in request.wanted.values})
    return replace(requests[0], wanted=replace(requests[0].wanted, values=tuple(values)))


class _Drawing(msgspec.Struct):
    """One clip's canvas: which of the union's values it wants, in order, and how many of its frames are there."""

    canvas: Canvas
    wants: list[int]
    filled: int = 0
    seen: VideoFrame | None = None

    def draw(self, number: int, frame: VideoFrame) -> None:
        while self.filled < len(self.wants) and self.wants[self.filled] == number:
            if self.seen is frame:
                self.canvas.again(self.filled)
            else:
                self.canvas.draw(self.filled, frame)
            self.filled, self.seen = self.filled + 1, frame


class Several:
    """A `Canvas` for the union, over those of its requests."""

    def __init__(self, whole: Request, requests: Sequence[Request], canvases: Sequence[Canvas]) -> None:
        values = whole.wanted.values
        self._drawings = [
            _Drawing(canvas, [bisect_left(values, value) for value in request.wanted.values])
            for request, canvas in zip(requests, canvases, strict=True)
        ]
        self._last: VideoFrame | None = None

    def draw(self, number: int, frame: VideoFrame) -> None:
        self._last = frame
        for drawing in self._drawings:
            drawing.draw(number, frame)

    def again(self, number: int) -> None:
        assert self._last is not None
        self.draw(number, self._last)

    def pts(self, stamps: Sequence[int]) -> list[tuple[int, ...]]:
        """The time stamps of each clip's frames, from those of the union's."""
        return [tuple(stamps[want] for want in drawing.wants) for drawing in self._drawings]
