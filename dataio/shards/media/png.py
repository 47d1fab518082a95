"""The structure of PNG files: their header, their checksums, and whether they hold all rows.

Purpose: libav decodes a PNG that is damaged or lacks rows, and says nothing. `check` finds such files before they are
packed or indexed, and before a mask is delivered.
Invariants: the size is checked before any memory is allocated. Rows are inflated a piece at a time, and not kept. The
checksums of all chunks that a decoder needs are checked, and that of the inflated rows.
Failure behaviour: a damaged or truncated file raises `CorruptionError`. A file that is no PNG, an animation, and one of
more than `limits.FRAME_PIXELS` raise `UnsupportedError`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import msgspec

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import FRAME_PIXELS

SIGNATURE = b"\x89PNG\r\n\x1a\n"
GREY, PALETTE = 0, 3
COLORS = {0: "grey", 2: "RGB", 3: "with a palette", 4: "grey with transparency", 6: "RGB with transparency"}
_BITS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""The passes of an interlaced file: first column and row, and the steps between columns and rows."""
_MOST_CHUNKS = 1 << 17
_DEFLATED, _INFLATED = 1 << 14, 1 << 16  # bytes at a time


class PngHeader(msgspec.Struct, frozen=True):
    """The properties of a PNG file. `bits` are those of one channel, and `color` is a key of `COLORS`."""

    width: int
    height: int
    bits: int
    color: int
    interlaced: bool

    @property
    def size(self) -> int:
        """Bytes of the rows, each with its filter."""
        passes = _ADAM7 if self.interlaced else ((0, 0, 1, 1),)
        total, pixel_bits = 0, self.bits * _CHANNELS[self.color]
        for left, top, across, down in passes:
            width, height = -((left - self.width) // across), -((top - self.height) // down)
            if width > 0 and height > 0:
                total += height * (1 + -(-width * pixel_bits // 8))
        return total


def read_header(data: memoryview, what: str) -> PngHeader:
    """Read the header of the PNG in `data`. `what` names the file in errors."""
    head = bytes(data[:33])
    if head[:8] != SIGNATURE:
        raise UnsupportedError(f"{what} is not a PNG")
    if len(head) < 33 or head[8:16] != b"\0\0\0\x0dIHDR" or zlib.crc32(head[12:29]) != int.from_bytes(head[29:], "big"):
        raise CorruptionError(f"{what} is damaged: its header is not that of a PNG")
    width, height, bits, color, compression, filtering, interlace = struct.unpack(">IIBBBBB", head[16:29])
    if bits not in _BITS.get(color, ()) or compression or filtering or interlace > 1 or width * height == 0:
        raise CorruptionError(f"{what} is damaged: its header is not that of a PNG")
    if width * height > FRAME_PIXELS:
        raise UnsupportedError(f"{what} has {width}x{height} pixels", hint=f"at most {FRAME_PIXELS}")
    return PngHeader(width, height, bits, color, bool(interlace))


def check(data: memoryview, header: PngHeader, what: str) -> None:
    """Check that the file holds all rows of the image that `header` describes."""
    inflater, size = zlib.decompressobj(), 0
    try:
        for piece in _pieces(data, what):
            left: bytes | memoryview = piece
            while len(left) and not inflater.eof and size <= header.size:
                size += len(inflater.decompress(left, _INFLATED))
                left = inflater.unconsumed_tail
        if not inflater.eof and size <= header.size:
            size += len(inflater.flush(_INFLATED))
    except zlib.error as error:
        raise CorruptionError(f"{what} is damaged: {error}") from error
    if size < header.size or (size == header.size and not inflater.eof):
        raise CorruptionError(f"{what} is damaged: it has {size} of {header.size} bytes of rows")


def _pieces(data: memoryview, what: str) -> Iterator[memoryview]:
    """Yield the compressed rows in small pieces. The checksums of the chunks that a decoder needs are checked."""
    at = len(SIGNATURE)
    for _ in range(_MOST_CHUNKS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), bytes(data[at + 4 : at + 8])
        end = at + 8 + length
        if len(data) < end + 4:
            raise CorruptionError(f"{what} is truncated")
        is_critical = kind[:1].isupper() or kind == b"tRNS"
        if is_critical and zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise CorruptionError(f"{what} is damaged: the checksum at offset {end} is wrong")
        if kind == b"IDAT":
            for begin in range(at + 8, end, _DEFLATED):
                yield data[begin : min(begin + _DEFLATED, end)]
        elif kind == b"acTL":
            raise UnsupportedError(f"{what} is an animation")
        elif kind == b"IEND":
            return
        at = end + 4
    raise UnsupportedError(f"{what} has more than {_MOST_CHUNKS} chunks")
