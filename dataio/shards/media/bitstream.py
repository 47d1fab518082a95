"""What a packet of compressed video says of itself: whether it shows a picture, whether decoding may begin at it, and whether
other pictures may need it.

Purpose: containers mark key frames and know nothing else of the pictures; the bitstream knows more.
Invariants: pure; a few bytes of each unit are read. A packet is a clean start only if the bitstream says so: everything shown
from it on decodes to the same pixels as from the beginning of the file.

* H.264: a picture of an instantaneous refresh (IDR), or one of I slices alone whose recovery point says "exact, after 0 frames"
  (open groups of pictures). Of a picture in two fields, the first is judged. A recovery point that takes longer (intra refresh)
  is none: the picture is grey at first.
* HEVC: a picture of the kinds IDR, CRA or BLA.
* Of other codecs what the container says is taken; their decoders give errors, not pictures, where it is wrong.

Failure behaviour: a packet that cannot be understood is no clean start, is shown, and is needed by others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from headrace.dataio.core.errors import UnsupportedError

_H264_IDR, _H264_SLICE, _H264_PARTITION, _H264_SEI = 5, 1, 2, 6
_H264_NOTHING, _HEVC_SEI, _HEVC_NOTHING = 31, 39, 63
_RECOVERY_POINT = 6
_I_SLICES = frozenset([2, 4, 7, 9])  # I and SI, of a picture with others or of one with such slices alone
_HEVC_KEYS = range(16, 24)
_HEVC_PICTURES = range(32)
_HEVC_REFERENCES = range(16)
"""Kinds of HEVC pictures that say by their lowest bit whether others of their temporal layer refer to them."""
_MPEG4_PICTURE, _MPEG4_LAYERS, _MPEG4_B, _OTHER_ASPECT = 0xB6, range(0x20, 0x30), 2, 15
_FFV1_CHECKED, _FFV1_PLAIN, _FFV1_MOST_SLICES = 8, 3, 1024
_FFV1_STARTS = (0, 0x5E31029E)
"""Of the checksums of versions 3 and 4."""
_HEAD = 1024
"""Bytes of a unit that are looked at."""
_MOST_UNITS = 4096


def is_shown(codec: str, data: memoryview) -> bool:
    """False for the alternate reference frames that VP8 and VP9 may store in packets of their own."""
    if codec == "vp8":
        return bool(data[0] & 0x10)
    if codec == "vp9" and data[-1] & 0xE0 != 0xC0:  # not a superframe, which always ends in a shown frame
        bits = int.from_bytes(bytes(data[:2]).ljust(2, b"\0"), "big")
        after_profile = 5 if (bits >> 12) & 3 == 3 else 4
        show_existing, show = (bits >> (15 - after_profile)) & 1, (bits >> (13 - after_profile)) & 1
        return bool(show_existing or show)
    return True


def length_size(codec: str, described: bytes | None) -> int:
    """How many bytes say how long a unit of H.264 or HEVC is, by the stream's extradata; 0 where start codes part units."""
    at = {"h264": 4, "hevc": 21}.get(codec)
    if at is None or described is None or len(described) <= at or described[0] != 1:
        return 0
    return (described[at] & 3) + 1


def starts_clean(codec: str, data: memoryview, length_size: int) -> bool:
    """Whether decoding may begin at this packet, which the container marks as a key frame."""
    if codec == "h264":
        return _h264_starts(data, length_size)
    if codec == "hevc":
        return next((unit[0] >> 1 & 63 in _HEVC_KEYS for unit in _units(data, length_size) if _is_picture(unit)), False)
    return True


def is_refresh(data: memoryview, length_size: int) -> bool:
    """Whether H.264 begins anew at this packet, so that nothing before it is referred to."""
    return any(unit[0] & 31 == _H264_IDR for unit in _units(data, length_size))


def layer(data: memoryview, length_size: int) -> tuple[int, bool]:
    """The temporal layer of an HEVC picture, and whether later pictures of that layer may refer to it; those of higher layers
    always may."""
    for unit in _units(data, length_size):
        if _is_picture(unit):
            kind = unit[0] >> 1 & 63
            return (unit[1] & 7) - 1, kind not in _HEVC_REFERENCES or bool(kind & 1)
    return 0, True


def without_messages(codec: str, data: memoryview, length_size: int) -> bytes:
    """The packet with other units in place of its supplemental messages, which say nothing of pixels: but the digests of HEVC."""
    found = bytearray(data)
    for at, unit in _placed(data, length_size):
        if codec == "h264" and unit[0] & 31 == _H264_SEI:
            found[at] = unit[0] & 0xE0 | _H264_NOTHING
        elif codec == "hevc" and unit[0] >> 1 & 63 == _HEVC_SEI:
            found[at] = unit[0] & 0x81 | _HEVC_NOTHING << 1
    return bytes(found)


def ffv1_damaged(data: memoryview) -> bool:
    """Whether a slice of an FFV1 picture, of version 3 and later, is not what was encoded: libav shows the slice of the picture
    before it instead. Slices end with their size in 3 bytes and, where they have a checksum, a zero and CRC-32 (RFC 9043, 4.8).
    """
    checked = _ffv1_slices(data, _FFV1_CHECKED)
    if checked is None:
        return _ffv1_slices(data, _FFV1_PLAIN) is None
    return not any(all(_is_kept(data[at:end], start) for at, end in checked) for start in _FFV1_STARTS)


def _ffv1_slices(data: memoryview, trailer: int) -> list[tuple[int, int]] | None:
    """Where the slices lie; None if they do not fill the packet."""
    found, end = list[tuple[int, int]](), len(data)
    while end >= trailer and len(found) < _FFV1_MOST_SLICES:
        size = int.from_bytes(data[end - trailer : end - trailer + 3], "big") + trailer
        if size > end:
            return None
        found.append((end - size, end))
        end -= size
    return None if end else found


_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _is_kept(data: memoryview, start: int) -> bool:
    """Whether the CRC-32 whose bits go from the highest to the lowest leaves `start` as it is, both with mirrored bits, as zlib
    has them."""
    return ~zlib.crc32(bytes(data).translate(_MIRRORED), ~start & 0xFFFFFFFF) & 0xFFFFFFFF == start


def _is_picture(unit: bytes) -> bool:
    return len(unit) > 2 and unit[0] >> 1 & 63 in _HEVC_PICTURES


def _h264_starts(data: memoryview, length_size: int) -> bool:
    recovers = only_i = False
    for unit in _units(data, length_size):
        kind = unit[0] & 31
        if kind == _H264_IDR:
            return True
        if kind == _H264_SEI:
            recovers = recovers or _recovers_at_once(_unescaped(unit[1:]))
        elif kind in (_H264_SLICE, _H264_PARTITION):
            bits = _Bits(_unescaped(unit[1:32]))
            first_block = bits.golomb() == 0
            if only_i and first_block:  # the second field, which may refer to the first one
                break
            if not recovers or bits.golomb() not in _I_SLICES:
                return False
            only_i = True
    return recovers and only_i


def _recovers_at_once(messages: bytes) -> bool:
    """Whether one of these messages is a recovery point that is exact and takes no further frames."""
    at = 0
    while at + 2 < len(messages):
        kind = size = 0
        for name in ("kind", "size"):
            value = 0
            while at < len(messages) and messages[at] == 255:
                value, at = value + 255, at + 1
            if at >= len(messages):
                return False
            value, at = value + messages[at], at + 1
            kind, size = (value, size) if name == "kind" else (kind, value)
        if kind == _RECOVERY_POINT:
            bits = _Bits(messages[at : at + size])
            return bits.golomb() == 0 and bits.take(1) == 1
        at += size
    return False


def mpeg4_shown(described: bytes | None, packets: Iterable[memoryview]) -> Iterator[bool]:
    """Of each packet of MPEG-4 part 2, in order, whether its instant has a picture of its own. Pictures that are "not coded" have
    none: the one before stays. A packet that holds two lends one to an empty one behind it (packed B-frames).

    `UnsupportedError` for a B-frame behind a picture that is not coded: libav would take other pictures for those it refers to.
    """
    clock = next((_mpeg4_clock(unit) for kind, unit in _mpeg4_units(described or b"") if kind in _MPEG4_LAYERS), 0)
    lent, missing = 0, False
    for packet in packets:
        pictures = list[bytes]()
        for kind, unit in _mpeg4_units(bytes(packet)):
            if kind == _MPEG4_PICTURE:
                pictures.append(unit)
            elif kind in _MPEG4_LAYERS:
                clock = _mpeg4_clock(unit)
        if missing and pictures and pictures[0][:1] and pictures[0][0] >> 6 == _MPEG4_B:
            raise UnsupportedError("it has B-frames behind pictures that are not coded", hint="encode it anew")
        coded = sum(_is_coded(picture, clock) for picture in pictures)
        missing = not coded + lent
        yield not missing
        lent = max(0, lent + coded - 1)


def _mpeg4_units(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The kind of each unit, and its first bytes."""
    at = data.find(b"\0\0\1")
    while 0 <= at < len(data) - 3:
        yield data[at + 3], data[at + 4 : at + 68]
        at = data.find(b"\0\0\1", at + 3)


def _is_coded(picture: bytes, clock: int) -> bool:
    """The bit behind the picture's kind (2 bits), its seconds (ones and a zero) and its fraction of a second, which takes `clock`
    bits between two others."""
    bits = int.from_bytes(picture[:16].ljust(16, b"\0"), "big")
    seconds = 126 - (~bits & (1 << 126) - 1).bit_length()
    return not clock or bool(bits >> 127 - (2 + seconds + 1 + 1 + clock + 1) & 1)


def _mpeg4_clock(layer: bytes) -> int:
    """How many bits the fraction of a second takes, by the description of a layer."""
    bits = _Bits(layer)
    bits.take(9)
    if bits.take(1):
        bits.take(7)
    if bits.take(4) == _OTHER_ASPECT:
        bits.take(16)
    if bits.take(1):
        bits.take(3)
        if bits.take(1):
            bits.take(79)
    bits.take(3)
    return max(1, (bits.take(16) - 1).bit_length())


class _Bits:
    """Reads numbers from a unit, as far as its head goes; zeros behind that."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        return (self._value >> self._left if self._left >= 0 else 0) & ((1 << count) - 1)

    def golomb(self) -> int:
        """An unsigned Exp-Golomb number; -1 for one that does not end."""
        zeros = 0
        while self.take(1) == 0:
            zeros += 1
            if self._left <= 0 or zeros > 31:
                return -1
        return (1 << zeros) - 1 + self.take(zeros)


def _unescaped(unit: bytes) -> bytes:
    return unit.replace(b"\0\0\3", b"\0\0")


def _units(data: memoryview, length_size: int) -> Iterator[bytes]:
    """The first bytes of each unit."""
    return (unit for _, unit in _placed(data, length_size))


def _placed(data: memoryview, length_size: int) -> Iterator[tuple[int, bytes]]:
    """Where each unit begins, and its first bytes."""
    return _counted(data, length_size) if length_size else _parted(bytes(data))


def _counted(data: memoryview, length_size: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    for _ in range(_MOST_UNITS):
        size = int.from_bytes(data[at : at + length_size], "big")
        at += length_size
        if at >= len(data):
            return
        if size:
            yield at, bytes(data[at : at + min(size, _HEAD)])
        at += size


def _parted(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = data.find(b"\0\0\1")
    for _ in range(_MOST_UNITS):
        if at < 0 or at + 3 >= len(data):
            return
        after = data.find(b"\0\0\1", at + 3)
        end = len(data) if after < 0 else after
        if at + 3 < end:
            yield at + 3, data[at + 3 : min(end, at + 3 + _HEAD)]
        at = after
