"""Decoding with FFmpeg through PyAV: every codec, on the CPU, with DALI's pixels.

Purpose: the back-end that is always there.
Invariants: colour conversion by BT.601 is the filter graph that was found bit-exact with DALI's CPU decoder. A decoded
frame is told by its time stamp, or by counting where stamps say nothing; each wanted frame must come out, undamaged and
in order.
Failure behaviour: as the contract says. One codec context a clip and one thread each: clips are what runs in parallel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from av.filter import Graph
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from dataio.core.errors import CorruptionError, MillraceError
from dataio.shards.media import images
from dataio.shards.media.container import IMAGE_EXTENSIONS
from loaders.decode.contract import Color, Decoded, Request
from loaders.decode.trim import Window, open_window

_FLAGS = "bilinear+full_chroma_int+accurate_rnd"
_SKIPPING = frozenset(["h264", "hevc"])
"""Codecs whose decoders may be told anew with every packet whether to skip; dav1d listens only once."""


class PyAVDecoder:
    """Stateless; safe to share between threads, since FFmpeg runs without the interpreter's lock."""

    name = "pyav"

    def decode(self, requests: Sequence[Request]) -> list[Decoded | MillraceError]:
        return [_decoded(clip_of(request)) for request in requests]

    def close(self) -> None:
        pass


Clip = tuple[np.ndarray, tuple[int, ...]]
"""(T, H, W, 3) uint8 and the T time stamps."""


def clip_of(request: Request) -> Clip | MillraceError:
    """What `PyAVDecoder` gives, as an array: this needs no torch."""
    try:
        return _picture(request) if request.info.ext in IMAGE_EXTENSIONS else _from_keys(request)
    except MillraceError as error:
        return error


def _decoded(clip: Clip | MillraceError) -> Decoded | MillraceError:
    if isinstance(clip, MillraceError):
        return clip
    import torch

    return Decoded(torch.from_numpy(clip[0]), clip[1])


def _picture(request: Request) -> Clip:
    """A picture, as often as the clip has frames."""
    frame = images.decode(request.data)
    _check(frame, request)
    times = len(request.wanted.values)
    return np.repeat(_Converter(request.color)(frame)[None], times, 0), (0,) * times


def _from_keys(request: Request) -> Clip:
    """From the key frame before the clip; where that fails, from the ones before: a key frame may be only a point from
    which the picture recovers gradually."""
    first: CorruptionError | None = None
    for earlier in _starts(request):
        try:
            with open_window(earlier) as window:
                return _clip(window, earlier), window.pts
        except CorruptionError as error:
            first = first or error
        except MillraceError as error:
            raise first or error from error
    assert first is not None
    raise first


def _starts(request: Request) -> Iterator[Request]:
    """The request as it is, then started one key frame earlier, then at the first one."""
    keys = request.info.key_frames
    at = keys.index(request.wanted.key) if request.wanted.key in keys else 0
    for number in sorted({at, max(0, at - 1), 0}, reverse=True):
        yield replace(request, wanted=replace(request.wanted, key=keys[number]))


def _clip(window: Window, request: Request) -> np.ndarray:
    """(T, H, W, 3) uint8: only wanted frames are converted, and a frame that is held is converted once."""
    clip = np.empty((len(window.picks), request.info.height, request.info.width, 3), np.uint8)
    convert = _Converter(request.color)
    filled = 0
    for rank, frame in _ranked(window):
        if window.picks[filled] < rank:
            break
        _check(frame, request)
        while filled < len(clip) and window.picks[filled] == rank:
            held = filled and window.picks[filled - 1] == rank
            clip[filled] = clip[filled - 1] if held else convert(frame)
            filled += 1
        if filled == len(clip):
            return clip
    raise CorruptionError(f"only {filled} of the clip's {len(clip)} frames could be decoded")


def _ranked(window: Window) -> Iterator[tuple[int, VideoFrame]]:
    """Decoded frames with their place among the window's: by their stamp, or counted where stamps say nothing."""
    for count, frame in enumerate(_frames(window)):
        if not window.stamped:
            yield count, frame
            continue
        rank = bisect_left(window.times, frame.pts) if frame.pts is not None else len(window.times)
        if rank == len(window.times) or window.times[rank] != frame.pts:
            raise CorruptionError(f"a frame came out at time stamp {frame.pts}, where there is none")
        yield rank, frame


def _frames(window: Window) -> Iterator[VideoFrame]:
    """What the decoder puts out. Pictures that nobody wants and no other picture refers to are not decoded."""
    context = window.stream.codec_context
    context.thread_count = 1
    skipping = window.stamped and context.codec.canonical_name in _SKIPPING
    wanted = set(window.pts)
    for packet in window.packets:
        if skipping:
            context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
        yield from context.decode(packet)
    yield from context.decode(None)


def _check(frame: VideoFrame, request: Request) -> None:
    if frame.is_corrupt:
        raise CorruptionError(f"the frame at time stamp {frame.pts} is damaged")
    if (frame.width, frame.height) != (request.info.width, request.info.height):
        raise CorruptionError(
            f"a frame of {frame.width}x{frame.height} in a video of {request.info.width}x{request.info.height}"
        )


class _Converter:
    """Frames to RGB arrays by one filter graph, made anew when the kind of frames changes."""

    def __init__(self, color: Color) -> None:
        self._color = color
        self._kind: tuple[object, ...] | None = None
        self._graph = Graph()
        self._quick = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> np.ndarray:
        if self._color == "fast":
            return self._quick.reformat(frame, format="rgb24", threads=1).to_ndarray()
        kind = (frame.width, frame.height, frame.format.name, frame.colorspace, frame.color_range)
        if kind != self._kind:
            self._kind, self._graph = kind, _rgb_graph(frame, self._color)
        frame.pts = None
        self._graph.vpush(frame)
        return self._graph.vpull().to_ndarray()


def _rgb_graph(frame: VideoFrame, color: Color) -> Graph:
    graph = Graph()
    graph.threads = 1  # clips are what runs in parallel
    source = graph.add(
        "buffer",
        f"video_size={frame.width}x{frame.height}:pix_fmt={frame.format.name}:time_base=1/1"
        f":colorspace={int(frame.colorspace)}:range={int(frame.color_range)}",
    )
    matrix = ":in_color_matrix=bt601" if color == "bt601" else ""
    scale = graph.add("scale", f"flags={_FLAGS}{matrix}")
    graph.link_nodes(source, scale, graph.add("format", "pix_fmts=rgb24"), graph.add("buffersink"))
    graph.configure()
    return graph
