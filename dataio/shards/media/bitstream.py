"""Parses packets of compressed video: properties of pictures that the container does not give.

Purpose: containers only mark key frames. The bitstream gives more properties of a packet:

* whether it shows a picture
* whether decoding can begin at it (a random access point)
* whether other pictures may refer to it

Invariants: the functions are pure. They parse only the first bytes of each NAL unit (H.264, HEVC) or start-code unit
(MPEG-4). Only `ffv1_damaged` checks all bytes. An H.264 or HEVC packet is a random access point only if the bitstream
says so. Every picture shown after it decodes to the same pixels as from the beginning of the file.

* H.264: a random access point is an IDR picture (instantaneous decoding refresh). A picture with only I slices is also
  one, if its recovery point is exact and needs 0 further frames (open GOP). If a packet has two fields, the first field
  decides. A recovery point that needs more frames (intra refresh) does not count, because the first frames decoded from
  it would be incomplete.
* HEVC: a random access point is an IDR, CRA or BLA picture.
* For other codecs, the container's key-frame flag decides. If it is wrong, their decoders report errors rather than
  output wrong pictures.

Failure behaviour: an H.264 or HEVC packet that cannot be parsed is not a random access point. It counts as shown, and
other pictures may refer to it. `mpeg4_shown` raises `UnsupportedError` for a stream that libav would decode wrongly.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from headrace.dataio.core.errors import UnsupportedError

_H264_IDR, _H264_SLICE, _H264_PARTITION, _H264_SEI = 5, 1, 2, 6
_H264_NOTHING, _HEVC_SEI, _HEVC_NOTHING = 31, 39, 63
_RECOVERY_POINT = 6
_I_SLICES = frozenset([2, 4, 7, 9])  # slice types I and SI; 7 and 9 mean that all slices of the picture have the type
_HEVC_KEYS = range(16, 24)
_HEVC_PICTURES = range(32)
_HEVC_REFERENCES = range(16)
"""The HEVC NAL unit types whose lowest bit says whether pictures of the same temporal layer refer to the picture."""
_MPEG4_PICTURE, _MPEG4_LAYERS, _MPEG4_B, _OTHER_ASPECT = 0xB6, range(0x20, 0x30), 2, 15
_FFV1_CHECKED, _FFV1_PLAIN, _FFV1_MAX_SLICES = 8, 3, 1024
_FFV1_CRC_STARTS = (0, 0x5E31029E)
"""The initial values of the CRC-32 in versions 3 and 4, bit-reversed for zlib."""
_HEAD_BYTES = 1024
"""The most bytes of a NAL unit that are parsed."""
_MAX_UNITS = 4096


WITH_HIDDEN_FRAMES = frozenset(["vp8", "vp9"])
"""Codecs for which `is_shown` may return False."""


def is_shown(codec: str, data: memoryview) -> bool:
    """Return False for alternate reference frames, which VP8 and VP9 may store in separate packets."""
    if codec == "vp8":
        return bool(data[0] & 0x10)
    if codec == "vp9" and data[-1] & 0xE0 != 0xC0:  # not a superframe, which always ends in a shown frame
        bits = int.from_bytes(bytes(data[:2]).ljust(2, b"\0"), "big")
        after_profile = 5 if (bits >> 12) & 3 == 3 else 4
        show_existing, show = (bits >> (15 - after_profile)) & 1, (bits >> (13 - after_profile)) & 1
        return bool(show_existing or show)
    return True


def length_size(codec: str, extradata: bytes | None) -> int:
    """Return the size in bytes of the length field before each H.264 or HEVC NAL unit, from the stream's extradata.

    It is 0 if start codes separate the units.
    """
    at = {"h264": 4, "hevc": 21}.get(codec)
    if at is None or extradata is None or len(extradata) <= at or extradata[0] != 1:
        return 0
    return (extradata[at] & 3) + 1


def is_random_access(codec: str, data: memoryview, length_size: int) -> bool:
    """Return whether decoding can begin at this packet, which the container marks as a key frame."""
    if codec == "h264":
        return _h264_starts(data, length_size)
    if codec == "hevc":
        return next((unit[0] >> 1 & 63 in _HEVC_KEYS for unit in _units(data, length_size) if _is_picture(unit)), False)
    return True


def is_idr(data: memoryview, length_size: int) -> bool:
    """Return whether the packet holds an H.264 IDR picture. Later pictures never refer to pictures before an IDR."""
    return any(unit[0] & 31 == _H264_IDR for unit in _units(data, length_size))


def temporal_layer(data: memoryview, length_size: int) -> tuple[int, bool]:
    """Return the temporal layer of an HEVC picture, and whether later pictures of that layer may refer to it.

    Pictures of higher layers may always refer to it.
    """
    for unit in _units(data, length_size):
        if _is_picture(unit):
            kind = unit[0] >> 1 & 63
            return (unit[1] & 7) - 1, kind not in _HEVC_REFERENCES or bool(kind & 1)
    return 0, True


def without_sei(codec: str, data: memoryview, length_size: int) -> bytes:
    """Return the packet with its SEI units changed to a type that decoders ignore.

    SEI (supplemental enhancement information) does not affect the decoded pixels. HEVC suffix SEI, which may hold
    digests of the pictures, stays unchanged.
    """
    packet = bytearray(data)
    for at, unit in _units_at(data, length_size):
        if codec == "h264" and unit[0] & 31 == _H264_SEI:
            packet[at] = unit[0] & 0xE0 | _H264_NOTHING
        elif codec == "hevc" and unit[0] >> 1 & 63 == _HEVC_SEI:
            packet[at] = unit[0] & 0x81 | _HEVC_NOTHING << 1
    return bytes(packet)


def ffv1_damaged(data: memoryview) -> bool:
    """Return whether a slice of an FFV1 picture (version 3 and later) is damaged.

    libav replaces a damaged slice by the same slice of the previous picture. A slice ends with its size in 3 bytes. If
    it has a checksum, a zero byte and the CRC-32 follow (RFC 9043, 4.8).
    """
    checked = _ffv1_slices(data, _FFV1_CHECKED)
    if checked is None:
        return _ffv1_slices(data, _FFV1_PLAIN) is None
    return not any(all(_crc_matches(data[at:end], start) for at, end in checked) for start in _FFV1_CRC_STARTS)


def _ffv1_slices(data: memoryview, trailer: int) -> list[tuple[int, int]] | None:
    """Return the (start, end) of each slice, or None if the slices do not fill the packet exactly."""
    slices, end = list[tuple[int, int]](), len(data)
    while end >= trailer and len(slices) < _FFV1_MAX_SLICES:
        size = int.from_bytes(data[end - trailer : end - trailer + 3], "big") + trailer
        if size > end:
            return None
        slices.append((end - size, end))
        end -= size
    return None if end else slices


_REVERSED_BITS = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def _crc_matches(data: memoryview, start: int) -> bool:
    """Return whether the CRC-32 of `data` with the initial value `start` is again `start`, as after undamaged data.

    FFV1's CRC-32 processes the highest bit of each byte first, and zlib's the lowest. Each byte is therefore
    bit-reversed, and `start` is given bit-reversed.
    """
    return ~zlib.crc32(bytes(data).translate(_REVERSED_BITS), ~start & 0xFFFFFFFF) & 0xFFFFFFFF == start


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
            bits = _BitReader(_unescaped(unit[1:32]))
            first_block = bits.golomb() == 0
            if only_i and first_block:  # the second field, which may refer to the first
                break
            if not recovers or bits.golomb() not in _I_SLICES:
                return False
            only_i = True
    return recovers and only_i


def _recovers_at_once(messages: bytes) -> bool:
    """Return whether one of these SEI messages is an exact recovery point that needs no further frames."""
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
            bits = _BitReader(messages[at : at + size])
            return bits.golomb() == 0 and bits.take(1) == 1
        at += size
    return False


def mpeg4_shown(extradata: bytes | None, packets: Iterable[memoryview]) -> Iterator[bool]:
    """Yield for each packet of MPEG-4 part 2, in order, whether a new picture is shown at its time.

    A picture that is not coded (`vop_coded` is 0) shows no new picture: the previous picture stays. If a packet holds
    two pictures, the second is shown at the time of an empty packet after it (packed B-frames).

    A B-frame after a picture that is not coded raises `UnsupportedError`, because libav would decode it with the wrong
    reference pictures.
    """
    clock = next((_mpeg4_clock(unit) for kind, unit in _mpeg4_units(extradata or b"") if kind in _MPEG4_LAYERS), 0)
    carried, missing = 0, False
    for packet in packets:
        pictures = list[bytes]()
        for kind, unit in _mpeg4_units(bytes(packet)):
            if kind == _MPEG4_PICTURE:
                pictures.append(unit)
            elif kind in _MPEG4_LAYERS:
                clock = _mpeg4_clock(unit)
        if missing and pictures and pictures[0][:1] and pictures[0][0] >> 6 == _MPEG4_B:
            raise UnsupportedError("it has B-frames after pictures that are not coded", hint="re-encode it")
        coded = sum(_is_coded(picture, clock) for picture in pictures)
        missing = not coded + carried
        yield not missing
        carried = max(0, carried + coded - 1)


def _mpeg4_units(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the start code and the first bytes of each unit."""
    at = data.find(b"\0\0\1")
    while 0 <= at < len(data) - 3:
        yield data[at + 3], data[at + 4 : at + 68]
        at = data.find(b"\0\0\1", at + 3)


def _is_coded(picture: bytes, clock: int) -> bool:
    """Return the bit `vop_coded` of a picture.

    It follows the coding type (2 bits), the seconds (`modulo_time_base`, ones and a zero) and the fraction of a second
    (`vop_time_increment`). The fraction takes `clock` bits between two marker bits.
    """
    bits = int.from_bytes(picture[:16].ljust(16, b"\0"), "big")
    seconds = 126 - (~bits & (1 << 126) - 1).bit_length()
    return not clock or bool(bits >> 127 - (2 + seconds + 1 + 1 + clock + 1) & 1)


def _mpeg4_clock(layer: bytes) -> int:
    """Return the number of bits of `vop_time_increment`, from the header of a video object layer."""
    bits = _BitReader(layer)
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


class _BitReader:
    """Reads numbers from the first bytes of a unit. A number that goes past the end of the data reads as 0."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        return (self._value >> self._left if self._left >= 0 else 0) & ((1 << count) - 1)

    def golomb(self) -> int:
        """Read an unsigned Exp-Golomb number. Return -1 if the data end inside it."""
        zeros = 0
        while self.take(1) == 0:
            zeros += 1
            if self._left <= 0 or zeros > 31:
                return -1
        return (1 << zeros) - 1 + self.take(zeros)


def _unescaped(unit: bytes) -> bytes:
    return unit.replace(b"\0\0\3", b"\0\0")


def _units(data: memoryview, length_size: int) -> Iterator[bytes]:
    """Yield the first bytes of each NAL unit."""
    return (unit for _, unit in _units_at(data, length_size))


def _units_at(data: memoryview, length_size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the first bytes of each NAL unit."""
    return _length_prefixed_units(data, length_size) if length_size else _start_code_units(bytes(data))


def _length_prefixed_units(data: memoryview, length_size: int) -> Iterator[tuple[int, bytes]]:
    at = 0
    for _ in range(_MAX_UNITS):
        size = int.from_bytes(data[at : at + length_size], "big")
        at += length_size
        if at >= len(data):
            return
        if size:
            yield at, bytes(data[at : at + min(size, _HEAD_BYTES)])
        at += size


def _start_code_units(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = data.find(b"\0\0\1")
    for _ in range(_MAX_UNITS):
        if at < 0 or at + 3 >= len(data):
            return
        next_start = data.find(b"\0\0\1", at + 3)
        end = len(data) if next_start < 0 else next_start
        if at + 3 < end:
            yield at + 3, data[at + 3 : min(end, at + 3 + _HEAD_BYTES)]
        at = next_start
