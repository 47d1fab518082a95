"""What NVDEC, as DALI drives it, is trusted with.

Purpose: DALI takes each packet for one picture that is decoded from it, goes by stamps of whole milliseconds, and converts pixels
in blocks of two by two. Of a stream that is otherwise it would give neighbours in place of frames, or pixels in other places,
without an error; of a picture that the card's decoders are not made for, an error for each batch.
Invariants: pure, but for `missing`, which looks for the driver's library once. What is refused here PyAV decodes.
Failure behaviour: `check` raises `UnsupportedError` saying what it is; a packet that cannot be understood is refused, too.

Sources: DALI's `FramesDecoderBase`, `FramesDecoderGpu` and `VideoColorSpaceConversion`; the specifications of AV1 (5.3, 5.9.2),
HEVC (8.1.3: pictures that lead an IRAP picture) and VP9 (6.2, annex B); NVIDIA's Video Codec SDK, "NVDEC capabilities".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.contract import VideoInfo
from headrace.dataio.shards.media import bitstream
from headrace.loaders.decode.trim import Window

CODECS = frozenset(["h264", "hevc", "vp9", "av1"])
FORMATS = frozenset(["yuv420p"])
LEAST_SIDE = 144
"""HEVC's; the other codecs' are less, and such pictures cost a processor nothing."""
_MOST_SIDE = {"h264": 4096}
_MOST = 8192
_LIBRARY = "libnvcuvid.so.1"
_LEAP = 11
"""Frames from one that is wanted to the next, more than which make DALI look for a key frame between them."""
_PROGRESSIVE = 1
"""libav's `AV_FIELD_PROGRESSIVE`; 0 is unknown, all others are kinds of interlacing."""
_FRAME_HEADER = 3
"""The kind of AV1's units that can name a picture which was decoded before."""


@functools.cache
def missing() -> str | None:
    """Why no video can be decoded on a GPU here, or None: containers are often given CUDA and not the video driver."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as error:
        return f"{error} (a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility,video)"
    return None


def suits(info: VideoInfo) -> bool:
    """Whether streams of this kind and size are decoded, as far as the index tells."""
    sides = info.width, info.height
    return (
        info.codec in CODECS
        and info.pixel_format in FORMATS
        and info.ext != "avi"
        # of VP9 and AV1, whose format says nothing of it, DALI takes from the driver whether the range is the full one
        and (info.color is None or info.color.range != "pc")
        and not any(side % 2 for side in sides)
        and min(sides) >= LEAST_SIDE
        and max(sides) <= _MOST_SIDE.get(info.codec, _MOST)
    )


def check(window: Window, codec: str) -> None:
    """Refuse packets that DALI would make something else of."""
    if getattr(window.stream.codec_context, "field_order", 0) > _PROGRESSIVE:
        raise UnsupportedError("the stream is interlaced, and its fields may be pictures of their own")
    units = bitstream.length_size(codec, window.stream.codec_context.extradata)
    if codec == "h264" and not bitstream.is_refresh(memoryview(window.packets[0]), units):
        raise UnsupportedError("the clip starts at a picture that is not an instantaneous refresh")
    base = window.stream.time_base
    if base is None or any((after - before) * base * 1000 < 1 for before, after in pairwise(window.times)):
        raise UnsupportedError("frames follow each other within a millisecond")
    if codec == "hevc" and _leaps(window.picks) and _is_open(window):
        raise UnsupportedError(
            "DALI would leap to a key frame behind which pictures are shown that need those before it"
        )
    if codec in _REPEATS and any(_REPEATS[codec](bytes(packet)) for packet in window.packets):
        raise UnsupportedError("some packets show a picture that was decoded before, and DALI counts those it decodes")


def _leaps(picks: Sequence[int]) -> bool:
    """Whether DALI does not decode all frames on its way from one to the next, but goes on at a key frame, if there is one."""
    return any(pick - before > _LEAP for before, pick in pairwise((-1, *picks)))


def _is_open(window: Window) -> bool:
    """Whether pictures that come behind a key frame, not the first, are shown before it. A decoder that begins at it may drop
    them, and DALI, which counts packets, would give later pictures the stamps of those."""
    key: int | None = None
    for packet in window.packets[1:]:
        if packet.pts is not None and key is not None and packet.pts < key:
            return True
        key = packet.pts if packet.is_keyframe else key
    return False


def _vp9_repeats(packet: bytes) -> bool:
    """Whether one of the packet's frames is the number of an older one. Of profile 0, the only one of 8-bit 4:2:0."""
    return any(not frame or bool(frame[0] & 0x08) for frame in _vp9_frames(packet))


def _vp9_frames(packet: bytes) -> Iterator[bytes]:
    """The frames of a superframe, or the packet itself."""
    marker = packet[-1]
    bytes_each, count = ((marker >> 3) & 3) + 1, (marker & 7) + 1
    index = packet[-(2 + bytes_each * count) :]
    if marker & 0xE0 != 0xC0 or index[0] != marker:
        yield packet
        return
    at = 0
    for number in range(count):
        size = int.from_bytes(index[1 + number * bytes_each :][:bytes_each], "little")
        yield packet[at : at + size]
        at += size


def _av1_repeats(packet: bytes) -> bool:
    """Whether one of the packet's frame headers names an older picture; whole frames cannot."""
    return any(kind == _FRAME_HEADER and (not unit or bool(unit[0] & 0x80)) for kind, unit in _av1_units(packet))


def _av1_units(packet: bytes) -> Iterator[tuple[int, bytes]]:
    """Kinds and payloads; one that is cut short gives what there is."""
    at = 0
    while at < len(packet):
        head = packet[at]
        at += 2 if head & 4 else 1
        size = len(packet) - at
        if head & 2:
            size, at = _leb128(packet, at)
        yield (head >> 3) & 0xF, packet[at : at + size]
        at += size


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends; it has eight bytes at most."""
    value = 0
    for place, byte in enumerate(data[at : at + 8]):
        value |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            return value, at + place + 1
    raise UnsupportedError("a unit of the AV1 stream has no length")


_REPEATS = {"vp9": _vp9_repeats, "av1": _av1_repeats}
