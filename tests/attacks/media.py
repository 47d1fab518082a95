"""Media files that are small and decode to gigabytes, made by code.

Each function returns the file's bytes. Sizes are just below what libav itself refuses, so that the limits tested are ours.
"""

from __future__ import annotations

import io
import struct
from fractions import Fraction

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

SIDE = 16_000
"""Pixels: a frame of 16000x16000 takes 384 MB."""


def jpeg_bomb(width: int = SIDE, height: int = SIDE) -> bytes:
    """A grey JPEG of this size: four bytes of entropy code for every 16x16 pixels."""
    small = _encoded("mjpeg", "yuvj420p", {"huffman": "default"})
    frame, scan = small.index(b"\xff\xc0"), small.index(b"\xff\xda")
    scan += 2 + int.from_bytes(small[scan + 2 : scan + 4], "big")
    blocks = b"\x28\xa2\x8a\x00" * (width * height // 256)
    return small[: frame + 5] + struct.pack(">HH", height, width) + small[frame + 9 : scan] + blocks + b"\xff\xd9"


def vp9_bomb(width: int = SIDE, height: int = SIDE) -> bytes:
    """A VP9 key frame whose header declares this size."""
    small = _encoded("libvpx-vp9", "yuv420p", {})
    assert small[1:4] == b"\x49\x83\x42"
    bits = int.from_bytes(small[4:9], "big")
    bits = (bits >> 36 << 36) | (width - 1) << 20 | (height - 1) << 4 | (bits & 0xF)
    return small[:4] + bits.to_bytes(5, "big") + small[9:]


def in_container(form: str, codec: str, packets: list[bytes], side: int = 64) -> bytes:
    """The packets muxed; the container says that frames are `side` pixels wide and high."""
    sink = io.BytesIO()
    with av.open(sink, "w", format=form) as container:
        stream = container.add_stream(codec, rate=30)
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = side
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        container.start_encoding()
        for number, data in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 30)
            packet.pts = packet.dts = number
            packet.is_keyframe, packet.duration = True, 1
            container.mux(packet)
    return sink.getvalue()


def declared(data: bytes, side: int = SIDE) -> bytes:
    """A Matroska file made with `side=4096`, its header changed to declare `side`."""
    new = struct.pack(">H", side)
    for element in (b"\xb0\x82", b"\xba\x82"):  # PixelWidth, PixelHeight
        assert data.count(element + b"\x10\x00") == 1
        data = data.replace(element + b"\x10\x00", element + new)
    return data


def mp4_of_many_frames(count: int) -> bytes:
    """An MP4 of 1.6 kB whose sample table declares `count` frames of one byte each."""
    file_type = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isommp41")
    length = len(_movie(count, 0))
    offset = len(file_type) + length + 8
    return file_type + _movie(count, offset) + _box(b"mdat", bytes(1000))


def _movie(count: int, offset: int) -> bytes:
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    times = struct.pack(">IIII", 0, 0, 1000, 1000)
    movie = _full(b"mvhd", times, struct.pack(">IH10x", 0x10000, 0x100), matrix, bytes(24), b"\0\0\0\2")
    size = struct.pack(">II", 16 << 16, 16 << 16)
    track = _full(b"tkhd", struct.pack(">5I", 0, 0, 1, 0, 1000), bytes(16), matrix, size, flags=3)
    media = _full(b"mdhd", struct.pack(">IIII", 0, 0, 30, count), struct.pack(">HH", 0x55C4, 0))
    handler = _full(b"hdlr", bytes(4), b"vide", bytes(12), b"v\0")
    picture = struct.pack(">HHIIIH", 16, 16, 0x480000, 0x480000, 0, 1) + bytes(32) + struct.pack(">Hh", 24, -1)
    entry = _box(b"jpeg", bytes(6), struct.pack(">H", 1), bytes(16), picture)
    tables = (
        _full(b"stsd", struct.pack(">I", 1), entry),
        _full(b"stts", struct.pack(">III", 1, count, 1)),
        _full(b"stsc", struct.pack(">IIII", 1, 1, count, 1)),
        _full(b"stsz", struct.pack(">II", 1, count)),
        _full(b"stco", struct.pack(">II", 1, offset)),
    )
    data = _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1)))
    inner = _box(b"minf", _full(b"vmhd", bytes(8), flags=1), data, _box(b"stbl", *tables))
    return _box(b"moov", movie, _box(b"trak", track, _box(b"mdia", media, handler, inner)))


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def _full(kind: bytes, *parts: bytes, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", flags), *parts)


def _encoded(codec: str, pixel_format: str, options: dict[str, str]) -> bytes:
    """One grey frame of 64x64."""
    context = av.CodecContext.create(codec, "w")
    assert isinstance(context, VideoCodecContext)
    context.width = context.height = 64
    context.pix_fmt, context.time_base, context.options = pixel_format, Fraction(1, 30), options
    frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 128, np.uint8), format="rgb24").reformat(
        format=pixel_format
    )
    frame.pts = 0
    packets = [*context.encode(frame), *context.encode(None)]
    return bytes(packets[0])
