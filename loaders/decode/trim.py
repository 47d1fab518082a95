"""Select the packets of a file that one clip needs, and find which of their frames form the clip.

Purpose: the decoders do not seek. Each gets the compressed packets from the key frame before the clip to the clip's
end, so the cost does not grow with the clip's position in a long video. Requested frames are converted to time stamps
only in this module.

Invariants:
- The packets of a `Window` start with a key frame and are in decode order. They contain everything that any frame up to
  the last requested one refers to.
- Frames that are shown before that key frame but stored after it (open GOP) are left out, since frames that they refer
  to are missing. Frames from the key frame on never refer to them.
- `times` are the presentation time stamps of the window's frames, in ascending order. `picks` are the positions of the
  clip's frames in `times`.
- A key frame of the index at which decoding cannot begin is rejected (`bitstream.is_random_access`). Datasets from
  older versions contain some.
- Some files are read whole, and their frames are counted from the first one. This applies to streams whose packets are
  not frames (AVI, packed MPEG-4), to frames before the first key frame, and to streams without key frames.

Failure behaviour: `CorruptionError` for data that cannot be demuxed, for a packet that is marked as damaged, and for a
file that ends earlier than its container or index says. `UnsupportedError` for a stream, or a requested frame, without
time stamps. Only the listed demuxers may open a file, so that a playlist in a dataset cannot name other files.
"""

from __future__ import annotations

import io
import itertools
import sys
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import BinaryIO, TypeAlias, TypeVar, cast

import av
import av.container
import msgspec
from av.audio.stream import AudioStream
from av.packet import Packet
from av.video.stream import VideoStream
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError
from headrace.dataio.shards.media import bitstream
from headrace.dataio.shards.media.bitstream import is_shown
from headrace.dataio.shards.media.container import DEMUXER_OF, check_complete, demuxed
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.cancellation import check_cancelled
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import MAX_CLIP_BYTES, Request
from headrace.loaders.decode.mp4_excerpt import Excerpt, excerpt, pays
from headrace.loaders.fetch.partial_file import Media, Partial

_EXPANDED = 4
_CUT_OFF, _BLOCK = 2, 128
_LEAST_PIXELS = 1 << 16
"""For the smallest picture, too, the decoder of MPEG-4 part 2 needs a limit of 53,760: it applies it to a buffer of its own."""
_REORDERED = 4096
"""Limit in frames. Codecs show a frame at most a few tens of frames after it is decoded."""
_Stream = TypeVar("_Stream", VideoStream, AudioStream)
_DEMUXERS = "mov,matroska,avi,wav,w64,flac,mp3,ogg"
# the index lists the first frame's size; a later frame may be a decompression bomb
_DECODING = {"max_pixels": str(limits.FRAME_PIXELS)}
_EXPLODING = {"err_detect": "crccheck+explode"}
_STRICT = frozenset(["hevc", "mjpeg"])
"""Codecs whose decoders find more damage with stricter settings.

H.264 gets the strict settings if decoding begins at an instantaneous decoder refresh (IDR). Otherwise its frames may
lack earlier references, which is harmless. For other codecs the settings make no difference."""
_READ_BYTES = 1 << 16
_ONE_PACKET_ONE_FRAME = frozenset(["h264", "hevc", "av1", "vp8", "vp9", "mjpeg", "prores", "dnxhd", "ffv1", "rawvideo"])
_NEVER = -(1 << 63)
"""The time of a frame without a time stamp. It sorts before all others."""

Packets: TypeAlias = "Iterator[Packet[VideoStream]]"
_HAS_BYTES = attrgetter("size")
"""False for the empty packet at the end, which only flushes the decoder."""


class Window(msgspec.Struct, frozen=True):
    """The packets and frames of one clip, from `open_window`.

    A window is valid only inside the `with` block. Its packets can be decoded or muxed once.

    `stamped` is False if frames are identified by counting. `bare` means decoding without supplemental messages.
    """

    stream: VideoStream
    packets: list[Packet[VideoStream]]
    times: list[int]
    picks: tuple[int, ...]
    stamped: bool
    bare: bool = False

    @property
    def pts(self) -> tuple[int, ...]:
        stamps = tuple([self.times[min(pick, len(self.times) - 1)] for pick in self.picks])
        if _NEVER in stamps:
            raise UnsupportedError("frames of the clip have no time stamps", hint="remux the file, such as by ffmpeg")
        return stamps


class ViewFile(io.RawIOBase):
    """A file object over `Media` that does not copy the whole file.

    `failed` is the first read error, since libav may treat it as the end of the file.
    """

    def __init__(self, data: Media) -> None:
        self._data, self._at = data, 0
        self.failed: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        end = len(self._data) if size < 0 else min(self._at + size, len(self._data))
        try:
            if isinstance(self._data, Partial) and size > 0:  # libav asks for more than it needs
                end = self._data.present_until(self._at, end)
            chunk = bytes(self._data[self._at : end])
        except Exception as error:
            self.failed = self.failed or error
            raise
        self._at += len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._at, len(self._data))[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


@contextmanager
def open_media(
    data: Media,
    *,
    trusting: bool = False,
    ext: str = "",
    info: VideoInfo | None = None,
    extra_options: Mapping[str, str] | None = None,
) -> Iterator[av.container.InputContainer]:
    """Open the container of `data`, which must be complete and of a kind that cannot name other files.

    libav's errors become Headrace errors. With `trusting`, the container's description of its streams is used
    unchanged, and `ext`, the format of the file, selects the demuxer. Otherwise libav decodes the first frames to probe
    the streams, and tries every demuxer. `info` is the video whose size limits the frames. `extra_options` are further
    options for libav.
    """
    file = ViewFile(data)
    check_complete(cast(BinaryIO, file), len(data))
    decoding = _DECODING if info is None else _pixel_limit(info)
    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "", **decoding, **(extra_options or {})}
    if trusting:
        options["codec_whitelist"] = "none"  # affects only the decoders that probe, not those that decode clips
    try:
        demuxer = DEMUXER_OF.get(ext) if trusting else None
        with av.open(
            file, "r", demuxer, metadata_errors="replace", buffer_size=_READ_BYTES, options=options
        ) as container:  # titles may have any encoding
            yield container
    except (av.FFmpegError, OSError, EOFError, CorruptionError) as error:
        if file.failed is not None:
            raise file.failed from error
        if isinstance(error, CorruptionError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CorruptionError(f"cannot be decoded: {reason}", hint="look at the file with ffmpeg -v error") from error
    if file.failed is not None:
        raise file.failed


@contextmanager
def open_window(request: Request, *, trusting: bool = False) -> Iterator[Window]:
    """The packets and frames of `request`. libav's errors inside the block also become Headrace errors.

    `trusting` (see `open_media`) is only for requests that `has_decode_order` accepts.
    """
    if request.info.width * request.info.height * 3 * len(request.wanted.values) > MAX_CLIP_BYTES:
        raise CapacityError("the decoded clip would be too large", hint="ask for fewer frames a clip")
    cut = _excerpt(request) if trusting else None
    data, read_window = (request.data, _read_window) if cut is None else (cut, _read_excerpt)
    with ExitStack() as stack:
        window = None
        if request.info.codec in _ONE_PACKET_ONE_FRAME:
            container = stack.enter_context(
                open_media(data, trusting=trusting, ext=request.info.format, info=request.info)
            )
            window = read_window(container, request)
        if window is None:
            stack.close()
            window = _whole_window(stack.enter_context(open_media(request.data, info=request.info)), request)
        yield window


def _excerpt(request: Request) -> Excerpt | None:
    """The clip's part of a long video, if the tables can be read without libav."""
    if request.info.codec not in _ONE_PACKET_ONE_FRAME or not pays(request.info):
        return None
    check_complete(cast(BinaryIO, ViewFile(request.data)), len(request.data))
    return excerpt(request.data, request.info, request.wanted)


def _read_excerpt(container: av.container.InputContainer, request: Request) -> Window:
    """The window of the request, read from an excerpt.

    The time stamps of an excerpt are shifted, and its end is not the end of the video.
    """
    wanted = request.wanted
    stream = _video(container, request.info, 0)
    with demuxed(container, stream) as packets:
        clip_packets, times, ended = _collect(_shifted(packets, wanted.key.pts), request)
    if ended:
        raise CorruptionError(f"only {len(times)} frames follow the key frame at time stamp {wanted.key.pts}")
    return Window(stream, clip_packets, times, _picks(wanted, times), stamped=True)


def _shifted(packets: Packets, begin: int) -> Packets:
    """Shift all packets so that the first one is at `begin`."""
    shift: int | None = None
    for packet in packets:
        if packet.size == 0:
            return  # the end
        if packet.pts is None or packet.dts is None:
            raise CorruptionError("a packet of MP4 has no time stamps")
        shift = begin - packet.pts if shift is None else shift
        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
        yield packet


def _read_window(container: av.container.InputContainer, request: Request) -> Window | None:
    """The window. None if frames can only be counted from the file's first packet."""
    info, wanted = request.info, request.wanted
    stream = _video(container, info, info.stream)
    if _is_counted(container, info.codec) or wanted.values[0] < (
        wanted.key.index if wanted.by == "index" else wanted.key.pts
    ):
        return None
    try:
        with _from_key(container, stream, request) as source:
            packets, times, ended = _collect(source, request)
    except NoStartError:
        if wanted.key == info.key_frames[0] and wanted.key.pts == info.start_pts:
            return None
        raise
    if None in [packet.pts for packet in packets]:
        return None
    if ended and _is_cut_short(info, wanted.key.index + len(times)):
        raise CorruptionError(
            f"{len(times)} frames follow frame {wanted.key.index}, but the index lists {info.frames} in all"
        )
    return Window(stream, packets, times, _picks(wanted, times), stamped=True)


def _is_cut_short(info: VideoInfo, frames: int) -> bool:
    """Whether the file has another number of frames than the index says. The file of a window may have more."""
    return frames < info.frames if info.is_window else frames != info.frames


class NoStartError(CorruptionError):
    """Decoding cannot begin where the index lists a key frame."""


def _video(container: av.container.InputContainer, info: VideoInfo, number: int) -> VideoStream:
    stream = container.streams[number] if number < len(container.streams) else None
    # streams of unknown codecs have no context
    if not isinstance(stream, VideoStream) or stream.codec_context is None:
        raise CorruptionError(f"stream {number} is not the video stream that the index lists")
    strict = stream.codec_context.codec.canonical_name in _STRICT
    stream.codec_context.options = _pixel_limit(info) | (_EXPLODING if strict else {})
    return stream


def _pixel_limit(info: VideoInfo) -> dict[str, str]:
    """The limit on the pixels of a decoded frame.

    It is a little above the displayed size, since codecs decode whole blocks and crop margins.
    """
    limit = max(_LEAST_PIXELS, _CUT_OFF * (info.width + _BLOCK) * (info.height + _BLOCK))
    return {"max_pixels": str(min(limit, limits.FRAME_PIXELS))}


def _is_counted(container: av.container.InputContainer, codec: str) -> bool:
    """Whether packets are not frames, or have the time stamps of adjacent ones: packed B-frames, AVI."""
    return codec not in _ONE_PACKET_ONE_FRAME or ("avi" in container.format.name and codec != "mjpeg")


def _whole_window(container: av.container.InputContainer, request: Request) -> Window:
    """A window with every packet.

    The index counted the frames by decoding from the start, so the clip must be decoded from there too.
    """
    info, wanted = request.info, request.wanted
    if info.origin_pts:
        raise UnsupportedError(
            "frames of a part of a longer file must be found by their time stamps, and this file must be counted from its start",
            hint="re-encode it, for example with ffmpeg -c:v libx264",
        )
    stream = _video(container, info, info.stream)
    with demuxed(container, stream) as source:
        packets = [packet for packet in _bounded(source, request, decoding=False) if packet.size]
    codec = stream.codec_context.codec.canonical_name
    times = _times(packets, _are_shown(codec, packets))
    if len(times) != info.frames and codec == "mpeg4":
        views = (memoryview(packet) for packet in packets)
        times = _times(packets, bitstream.mpeg4_shown(stream.codec_context.extradata, views))
    if len(times) != info.frames:
        times = _decoded_times(request)
    picks = wanted.values if wanted.by == "index" else _picks(replace(wanted, key=KeyFrame(0, 0)), times)
    _check_pixels(info, picks[-1])
    return Window(stream, packets, times, picks, stamped=False)


def _bounded(source: Packets, request: Request, *, decoding: bool = True) -> Packets:
    """The packets, with limits on their total bytes and, if `decoding`, on the pixels to decode."""
    max_bytes, total = _EXPANDED * len(request.data), 0
    most_frames = _most_frames(request.info) if decoding else sys.maxsize
    for number, packet in enumerate(source):
        total += packet.size
        if total > max_bytes or number > most_frames:
            _refuse(request, total, number)
        yield packet


def _refuse(request: Request, total: int, frames: int) -> None:
    """Raise the error of packets with too many bytes in `total` or too many `frames`."""
    if total > _EXPANDED * len(request.data):  # tables may list the same bytes repeatedly
        raise CorruptionError(f"its packets hold more than {_EXPANDED} times the bytes of the file")
    _check_pixels(request.info, frames)


def _most_frames(info: VideoInfo) -> int:
    """The maximum number of frames that are decoded for one clip."""
    return limits.CLIP_PIXELS // max(1, info.width * info.height)


def _check_pixels(info: VideoInfo, frames: int) -> None:
    if frames > _most_frames(info):
        raise CapacityError(
            f"the clip lies more than {frames:,} frames of {info.width}x{info.height} after the key frame before it",
            hint="pack it with `--transcode h264`, which makes key frames",
        )


def _are_shown(codec: str, packets: Sequence[Packet[VideoStream]]) -> list[bool]:
    """Whether each of the packets shows a frame."""
    if codec in bitstream.WITH_HIDDEN_FRAMES:
        return [is_shown(codec, memoryview(packet)) for packet in packets]
    return [True] * len(packets)


def _times(packets: Sequence[Packet[VideoStream]], shown: Iterable[bool]) -> list[int]:
    """The times of the packets that show a frame, in ascending order."""
    stamps = (p.pts if p.pts is not None else p.dts for p, one in zip(packets, shown, strict=True) if one)
    return sorted(_NEVER if stamp is None else stamp for stamp in stamps)


def _decoded_times(request: Request) -> list[int]:
    """The times of the decoder's frames, if packets do not contain them. This decodes the whole file."""
    times = list[int]()
    with open_media(request.data, info=request.info) as container:
        stream = _video(container, request.info, request.info.stream)
        stream.codec_context.thread_count = 1
        with demuxed(container, stream) as packets:
            for packet in _bounded(packets, request):
                check_cancelled()
                times += [_NEVER if frame.pts is None else frame.pts for frame in packet.decode()]
        times += [_NEVER if frame.pts is None else frame.pts for frame in stream.codec_context.decode(None)]
    if len(times) != request.info.frames:
        raise CorruptionError(f"{len(times)} frames can be decoded, but the index lists {request.info.frames}")
    return sorted(times)


@contextmanager
def _from_key(container: av.container.InputContainer, stream: VideoStream, request: Request) -> Iterator[Packets]:
    """Packets in decode order from the requested key frame on, even if the container's own index is wrong."""
    wanted = request.wanted
    if wanted.key.index or request.info.origin_pts:
        _seek(container, wanted.key.pts, stream)
    for is_retry in (False, True):
        if is_retry:  # the seek missed the key frame: search from the beginning
            _seek(container, container.start_time or 0, None)
        with demuxed(container, stream) as packets:
            first_packet = _find_key(packets, wanted.key.pts)
            if first_packet is not None:
                yield itertools.chain((first_packet,), itertools.takewhile(_HAS_BYTES, packets))
                return
    raise NoStartError(f"the key frame at time stamp {wanted.key.pts}, which the index lists, is not there")


def _seek(container: av.container.InputContainer, pts: int, stream: VideoStream | None) -> None:
    try:
        container.seek(pts, stream=stream, backward=True)
    except PermissionError as error:  # libav's error where there is no key frame
        raise NoStartError(f"there is no key frame before time stamp {pts}") from error


def _find_key(packets: Packets, pts: int) -> Packet[VideoStream] | None:
    """The key frame at `pts`. None if a later key frame appears first."""
    for packet in itertools.takewhile(_HAS_BYTES, packets):
        stamp = packet.pts if packet.pts is not None else packet.dts
        if packet.is_keyframe and stamp is not None and stamp >= pts:
            return packet if stamp == pts else None
    return None


def _collect(source: Packets, request: Request) -> tuple[list[Packet[VideoStream]], list[int], bool]:
    """Collect the packets of the clip. Returns three values:

    - the packets up to the clip's end, without the first key frame's leading frames;
    - the time stamps of their frames, in ascending order;
    - whether the stream ended before the clip did.

    This loop runs for every packet, so it calls few functions.
    """
    wanted, codec, total = request.wanted, request.info.codec, 0
    by_pts, last = wanted.by == "pts", wanted.values[-1]
    last_index = max(0, last - wanted.key.index)
    max_bytes, most_frames = _EXPANDED * len(request.data), _most_frames(request.info)
    may_be_hidden = codec in bitstream.WITH_HIDDEN_FRAMES
    packets: list[Packet[VideoStream]] = []
    times: list[int] = []
    for number, packet in enumerate(source):
        total += packet.size
        if total > max_bytes or number > most_frames:
            _refuse(request, total, number)
        pts, dts = packet.pts, packet.dts
        stamp = pts if pts is not None else dts
        if stamp is None:
            raise UnsupportedError("the stream carries no time stamps", hint="remux it into MP4, Matroska or WebM")
        if packet.is_corrupt:
            raise CorruptionError(f"the packet at time stamp {stamp} is damaged")
        if stamp < wanted.key.pts:
            continue
        if dts is not None:  # packets from here on are shown at `dts` or later
            complete = dts > last if by_pts else len(times) > last_index and times[last_index] < dts
            if complete:
                return packets, times, False
        if not packets:
            _check_start(packet)
        packets.append(packet)
        if not packet.is_discard and (not may_be_hidden or is_shown(codec, memoryview(packet))):
            insort(times, stamp)
            if len(times) > _REORDERED and times[-_REORDERED] > stamp:
                raise CorruptionError(f"time stamp {stamp} comes more than {_REORDERED} frames too late")
    return packets, times, True


def _check_start(packet: Packet[VideoStream]) -> None:
    context = packet.stream.codec_context
    codec = context.codec.canonical_name
    units = bitstream.length_size(codec, context.extradata)
    if not bitstream.is_random_access(codec, memoryview(packet), units):
        raise NoStartError(
            f"decoding cannot begin at the key frame of time stamp {packet.pts}, which the index lists",
            hint="index the dataset again",
        )
    if codec == "h264" and bitstream.is_idr(memoryview(packet), units):
        context.options = context.options | _EXPLODING


def _picks(wanted: Wanted, times: list[int]) -> tuple[int, ...]:
    if wanted.by == "index":
        picks = tuple([value - wanted.key.index for value in wanted.values])
    else:
        picks = tuple([max(0, bisect_right(times, value) - 1) for value in wanted.values])
    if not times or not 0 <= picks[0] <= picks[-1] < len(times):
        raise CorruptionError(f"frame {wanted.values[-1]} is missing: only {len(times)} follow the key frame")
    return picks


def mux(window: Window, container: str = "matroska") -> bytes:
    """The window's packets as an in-memory file, without decoding or encoding."""
    target = io.BytesIO()
    try:
        with av.open(target, "w", format=container) as output:
            copy = output.add_stream_from_template(window.stream, opaque=True)  # else PyAV looks for an encoder
            for packet in window.packets:
                packet.stream = copy
                output.mux(packet)
    except av.FFmpegError as error:
        raise UnsupportedError(f"these packets do not fit into {container}: {error}") from error
    return target.getvalue()
