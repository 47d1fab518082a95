"""Decoding with FFmpeg through PyAV: every codec, on the CPU, with the same pixels as DALI. libjpeg-turbo decodes JPEG.

Purpose: the decoder that is always available. libjpeg-turbo decodes a JPEG in a third of the time that FFmpeg's
decoding and conversion take. It returns the same pixels as Pillow, OpenCV and torchvision. Clips of one video that
start at the same key frame are decoded once, and each frame is drawn on every canvas that needs it.

Invariants:
- A frame is identified by its time stamp, or by its number if time stamps are unusable.
- The decoder must return each requested frame, undamaged and in order.
- A frame is decoded only if it is requested or if others refer to it, as far as the packets show this.
- Clips that are decoded together are bit-identical to clips that are decoded alone.
- Planes (`headrace.loaders.decode.planes`) are those of FFmpeg's decoders, of JPEGs too.
- A JPEG is decoded completely and strictly, always as JFIF's full-range BT.601. Warnings of libjpeg count as errors. No
  more pixels are decoded than the index lists.
- A clip uses one codec context with one thread. Clips are decoded in parallel.

Failure behaviour: that of `headrace.loaders.decode.base`. If decoding several clips together fails, each is decoded
alone. If libjpeg-turbo rejects a JPEG, PyAV decodes it or rejects it, too.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import Any, TypeVar, cast

import msgspec
import simplejpeg
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.media import bitstream, images
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS, has_decode_order
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import Color, Decoded, Request, cropped_clip_bytes, whole_clip_bytes
from headrace.loaders.decode.convert import Canvas, Converter, FullSizeCanvas, OnePassCanvas, Paintable
from headrace.loaders.decode.planes import PlanesCanvas, Samples
from headrace.loaders.decode.registry import register_decoder
from headrace.loaders.decode.trim import NoStartError, Window, open_window

_WITH_MESSAGES = frozenset(["h264", "hevc"])
_SKIPPING = frozenset(["h264", "hevc"])
"""Codecs whose decoders accept a new `skip_frame` setting with every packet; dav1d reads it only once."""
_PACKETS_AT_ONCE = 4
"""The number of packets after which decoding checks whether it was cancelled."""

Surface = TypeVar("Surface", bound=Canvas)
ClipPixels = tuple[Samples, tuple[int, ...], tuple[int, int] | None]
"""A clip, its T time stamps, and the matrix and range of planes."""


class PyAVDecoder:
    """The PyAV back end. Safe to share between threads.

    FFmpeg releases the GIL, and each thread has its own converter.
    """

    name = "pyav"

    def __init__(self) -> None:
        self._thread_local = threading.local()

    def decode(self, requests: Sequence[Request]) -> list[Decoded | HeadraceError]:
        """Decode requests that begin at the same key frame together. If that fails, decode each by itself."""
        results = dict[int, Decoded | HeadraceError]()
        for numbers in grouped(requests):
            if len(numbers) > 1:
                with contextlib.suppress(HeadraceError):
                    several = [requests[number] for number in numbers]
                    results.update(zip(numbers, list(_decode_together(several, self._converter)), strict=True))
                    continue
            for number in numbers:
                results[number] = self._decode(requests[number])
        return [results[number] for number in range(len(requests))]

    def clip_bytes(self, info: VideoInfo, frames: int, size: tuple[int, int] | None, color: Color) -> int:
        return whole_clip_bytes(info, frames) if size is None else cropped_clip_bytes(info, frames, size)

    def close(self) -> None:
        self._thread_local = threading.local()

    def _decode(self, request: Request) -> Decoded | HeadraceError:
        try:
            canvas, pts = _draw_clip(request, lambda: _canvas(request, self._converter))
        except HeadraceError as error:
            return error
        return _as_decoded(canvas, pts)

    @property
    def _converter(self) -> Converter:
        """The calling thread's converter."""
        if not hasattr(self._thread_local, "converter"):
            self._thread_local.converter = Converter()
        converter: Converter = self._thread_local.converter
        return converter


def _decode_together(requests: Sequence[Request], converter: Converter) -> Iterator[Decoded]:
    union_request = union(requests)
    canvases = list[Any]()

    def make_canvas() -> UnionCanvas:
        canvases[:] = [_canvas(request, converter) for request in requests]
        return UnionCanvas(union_request, requests, canvases)

    several, stamps = _draw_clip(union_request, make_canvas)
    return (_as_decoded(canvas, pts) for canvas, pts in zip(canvases, several.pts(stamps), strict=True))


def _canvas(request: Request, converter: Converter) -> Any:
    """The canvas for a clip. torch is imported only if the canvas needs it."""
    fit = request.fit
    if request.planes is not None:
        return PlanesCanvas(request, request.planes, converter)
    if fit is None:
        return FullSizeCanvas(request, converter)
    if is_one_pass(request):
        return OnePassCanvas(request, fit, converter)
    from headrace.loaders.decode.resize import FittedCanvas

    return FittedCanvas(request, fit, converter)


def _as_decoded(canvas: Any, pts: tuple[int, ...]) -> Decoded:
    import torch

    return Decoded(torch.as_tensor(canvas.clip), pts, getattr(canvas, "color", None))


def is_one_pass(request: Request) -> bool:
    """Whether scaling and colour conversion happen in one pass."""
    fit = request.fit
    return fit is not None and fit.antialias and request.color == "fast" and not is_jpeg(request.info)


def clip_of(request: Request, converter: Converter | None = None) -> ClipPixels:
    """The result of `PyAVDecoder` as an array, without torch.

    `fit` is applied only if `is_one_pass(request)`. Other requests must not have one.
    """
    used = converter or Converter()
    fit, planes = request.fit, request.planes
    if planes is not None:
        of_planes, pts = _draw_clip(request, lambda: PlanesCanvas(request, planes, used))
        return of_planes.clip, pts, of_planes.color
    if fit is not None:
        one_pass, pts = _draw_clip(request, lambda: OnePassCanvas(request, fit, used))
        return one_pass.clip, pts, None
    canvas, pts = _draw_clip(request, lambda: FullSizeCanvas(request, used))
    return canvas.clip, pts, None


def _draw_clip(request: Request, make_canvas: Callable[[], Surface]) -> tuple[Surface, tuple[int, ...]]:
    """A canvas on which the clip is drawn, and the clip's time stamps."""
    return (
        _draw_image(request, make_canvas())
        if request.info.format in IMAGE_EXTENSIONS
        else _from_keys(request, make_canvas)
    )


def _draw_image(request: Request, canvas: Surface) -> tuple[Surface, tuple[int, ...]]:
    """Draw an image on every frame of the clip."""
    pixels = decode_jpeg(request) if is_jpeg(request.info) and request.planes is None else None
    if pixels is None:
        frame = images.decode(request.data[:])
        if (frame.width, frame.height) != (request.info.width, request.info.height) or frame.is_corrupt:
            raise _damage_error(frame, request)
        canvas.draw(0, frame)
    else:
        cast("Paintable", canvas).paint(0, pixels)  # canvases of JPEGs are paintable
    times = len(request.wanted.values)
    for number in range(1, times):
        canvas.again(number)
    return canvas, (0,) * times


def _from_keys(request: Request, make_canvas: Callable[[], Surface]) -> tuple[Surface, tuple[int, ...]]:
    """Decode from the key frame before the clip. If that fails, decode from earlier key frames.

    At some key frames decoding can start, but the frames become correct only gradually.
    """
    first_error: CorruptionError | None = None
    for earlier, trusting, bare in _attempts(request):
        if isinstance(first_error, NoStartError) and earlier.wanted.key == request.wanted.key:
            continue
        try:
            with open_window(earlier, trusting=trusting) as window:
                pts = window.pts
                return _draw_window(replace(window, bare=bare), earlier, make_canvas()), pts
        except CorruptionError as error:
            first_error = first_error or error
        except HeadraceError as error:
            raise first_error or error from error
    assert first_error is not None
    raise first_error


def _attempts(request: Request) -> Iterator[tuple[Request, bool, bool]]:
    """Yield the ways to decode a request, in order:

    - as the container describes the streams, if `has_decode_order`;
    - as libav probes the streams;
    - from the previous key frame;
    - from the first key frame;
    - without the stream's supplemental messages, since some encoders write messages that strict decoders reject.
    """
    if has_decode_order(request.info.format, request.info.codec):
        yield request, True, False
    keys = request.info.key_frames
    at = keys.index(request.wanted.key) if request.wanted.key in keys else 0
    for number in sorted({at, max(0, at - 1), 0}, reverse=True):
        yield replace(request, wanted=replace(request.wanted, key=keys[number])), False, False
    if request.info.codec in _WITH_MESSAGES:
        yield request, False, True


def _draw_window(window: Window, request: Request, canvas: Surface) -> Surface:
    """Draw the requested frames on the canvas. A frame that the clip repeats is drawn once."""
    picks, filled = window.picks, 0
    requested = _requested_frames(window, request)
    for rank, frame in requested:
        if picks[filled] != rank:
            break
        canvas.draw(filled, frame)
        filled += 1
        while filled < len(picks) and picks[filled] == rank:
            canvas.again(filled)
            filled += 1
        if filled == len(picks):
            _check_later_frames(window, request, requested)
            return canvas
    raise CorruptionError(f"only {filled} of the clip's {len(picks)} frames could be decoded")


def _check_later_frames(window: Window, request: Request, requested: Iterator[tuple[int, VideoFrame]]) -> None:
    """Check the decoded frames that are shown after the clip, since the clip's frames may refer to them."""
    if window.stamped:
        deque(requested, maxlen=0)  # it checks all frames
        return
    with contextlib.suppress(EOFError):  # the decoder has already been flushed
        for frame in window.stream.codec_context.decode(None):
            if frame.is_corrupt:
                raise _damage_error(frame, request)


def _requested_frames(window: Window, request: Request) -> Iterator[tuple[int, VideoFrame]]:
    """Decode, and yield the requested frames with their index among the window's frames.

    Frames are matched by time stamp, or counted if time stamps are unusable. All decoded frames are checked. Frames
    that are neither requested nor referred to are not decoded. Decoding stops after the last packet with a requested
    frame. This loop runs for every packet, so it calls few functions.
    """
    info, context, stamped = request.info, window.stream.codec_context, window.stamped
    context.thread_count = 1
    codec, packets = context.codec.canonical_name, window.packets
    skipping, count = stamped and codec in _SKIPPING, 0
    picks, requested_pts, referenced = set(window.picks), set[int](), set[int]()
    ranks = dict(zip(reversed(window.times), range(len(window.times) - 1, -1, -1), strict=True))
    if stamped:
        requested_pts = set(window.pts)
        packets = _up_to_last(packets, requested_pts)
    if skipping:
        referenced = _in_lower_layers(window, packets)
    for number, packet in enumerate((*packets, None)):  # None flushes the decoder
        if not number % _PACKETS_AT_ONCE:
            check_cancelled()
        if packet is not None:
            if skipping:
                is_needed = packet.pts in requested_pts or number in referenced
                context.skip_frame = "DEFAULT" if is_needed else "NONREF"
            if window.bare or codec == "ffv1":
                _prepare(packet, window)
        for frame in context.decode(packet):
            rank = ranks.get(frame.pts) if stamped else count  # type: ignore[arg-type]
            if rank is None:
                raise CorruptionError(f"a frame came out at time stamp {frame.pts}, where there is none")
            if frame.is_corrupt or frame.width != info.width or frame.height != info.height:
                raise _damage_error(frame, request)
            count += 1
            if rank in picks:
                yield rank, frame


def _up_to_last(packets: list[Packet[VideoStream]], requested_pts: Set[int]) -> list[Packet[VideoStream]]:
    """The packets up to the last one that contains a requested frame; all if none does."""
    for end in range(len(packets), 0, -1):
        if packets[end - 1].pts in requested_pts:
            return packets[:end]
    return packets


def _prepare(packet: Packet[VideoStream], window: Window) -> None:
    """Remove supplemental messages if the window is `bare`, and check the slices of FFV1."""
    context = window.stream.codec_context
    codec = context.codec.canonical_name
    if window.bare:
        units = bitstream.length_size(codec, context.extradata)
        packet.update(bitstream.without_sei(codec, memoryview(packet), units))
    if codec == "ffv1" and context.extradata and bitstream.ffv1_damaged(memoryview(packet)):
        raise CorruptionError(f"a slice of the frame at time stamp {packet.pts} is damaged")


def _in_lower_layers(window: Window, packets: Sequence[Packet[VideoStream]]) -> set[int]:
    """The packets to which no frame of their own temporal layer refers, but a frame of a higher layer may.

    libav's HEVC decoder treats them as unreferenced.
    """
    context = window.stream.codec_context
    if context.codec.canonical_name != "hevc":
        return set()
    units = bitstream.length_size("hevc", context.extradata)
    layers = [bitstream.temporal_layer(memoryview(packet), units) for packet in packets]
    highest = max((layer for layer, _ in layers), default=0)
    return {number for number, (layer, referred) in enumerate(layers) if not referred and layer < highest}


def _damage_error(frame: VideoFrame, request: Request) -> CorruptionError:
    """The error for a frame that is damaged or differs in size from its video."""
    if frame.is_corrupt:
        return CorruptionError(f"the frame at time stamp {frame.pts} is damaged")
    return CorruptionError(
        f"a frame of {frame.width}x{frame.height} in a video of {request.info.width}x{request.info.height}"
    )


def beginning(ext: str, wanted: Wanted) -> Hashable:
    """A value that is equal for clips of one file whose decoding begins at the same packet.

    None for images, which have no key frames.
    """
    return None if ext in IMAGE_EXTENSIONS else (ext, wanted.by, wanted.key)


def grouped(requests: Sequence[Request]) -> list[list[int]]:
    """The numbers of the requests that are decoded together; each number appears once.

    Requests of one file share their `data` object.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, request in enumerate(requests):
        begins = beginning(request.info.ext, request.wanted)
        groups.setdefault((number,) if begins is None else (id(request.data), begins), []).append(number)
    return list(groups.values())


def union(requests: Sequence[Request]) -> Request:
    """One request for every frame that any of these requests contains, each frame once."""
    values = sorted({value for request in requests for value in request.wanted.values})
    return replace(requests[0], wanted=replace(requests[0].wanted, values=tuple(values)))


class _Drawing(msgspec.Struct):
    """The state of one clip: its canvas, its frames as indices into the union's frames, and how many are drawn."""

    canvas: Canvas
    indices: list[int]
    filled: int = 0
    last_frame: VideoFrame | None = None

    def draw(self, number: int, frame: VideoFrame) -> None:
        while self.filled < len(self.indices) and self.indices[self.filled] == number:
            if self.last_frame is frame:
                self.canvas.again(self.filled)
            else:
                self.canvas.draw(self.filled, frame)
            self.filled, self.last_frame = self.filled + 1, frame


class UnionCanvas:
    """A `Canvas` for the union of several requests. It draws on the canvases of the requests."""

    def __init__(self, union_request: Request, requests: Sequence[Request], canvases: Sequence[Canvas]) -> None:
        values = union_request.wanted.values
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
        """The time stamps of each clip's frames, taken from those of the union."""
        return [tuple(stamps[want] for want in drawing.indices) for drawing in self._drawings]


_CHANNELS = frozenset(["YCbCr", "RGB", "Gray"])


def is_jpeg(info: VideoInfo) -> bool:
    """Whether the index lists a JPEG image. False for Motion JPEG video."""
    return info.codec == "mjpeg" and info.format in IMAGE_EXTENSIONS


def decode_jpeg(request: Request) -> Any:
    """uint8 (H, W, 3) of the size that the index lists. None if PyAV has to decode the image."""
    data = request.data[:]
    try:
        height, width, channels, _ = simplejpeg.decode_jpeg_header(data)
        if (height, width) != (request.info.height, request.info.width) or channels not in _CHANNELS:
            return None
        return simplejpeg.decode_jpeg(data)
    except ValueError:
        return None


register_decoder(
    "pyav",
    lambda device_id: PyAVDecoder(),
    automatic=True,
    priority=0,
    shares_decoding=True,
    rule="every stream, with JPEG pictures by libjpeg-turbo",
    label=lambda info: "libjpeg-turbo" if is_jpeg(info) else "pyav",
)
