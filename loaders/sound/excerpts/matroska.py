"""Packets of sound as a Matroska file.

Purpose: libav looks for the frames of raw FLAC one by one, and weighs what might be their headers; of a packet its decoder takes
one frame after the other, as many as there are.
Invariant: the first packet's stamp is zero, and ticks are nanoseconds, so that no stamp is rounded by much.
Failure behaviour: none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from headrace.loaders.sound.nameless import Bytes

_EBML, _DOC_TYPE = b"\x1a\x45\xdf\xa3", b"\x42\x82"
_SEGMENT, _INFO, _TIMESTAMP_SCALE = b"\x18\x53\x80\x67", b"\x15\x49\xa9\x66", b"\x2a\xd7\xb1"
_TRACKS, _TRACK, _NUMBER, _UID, _TYPE = b"\x16\x54\xae\x6b", b"\xae", b"\xd7", b"\x73\xc5", b"\x83"
_CODEC, _PRIVATE, _AUDIO, _RATE, _CHANNELS = b"\x86", b"\x63\xa2", b"\xe1", b"\xb5", b"\x9f"
_CLUSTER, _TIMESTAMP, _SIMPLE_BLOCK = b"\x1f\x43\xb6\x75", b"\xe7", b"\xa3"
_SOUND = b"\x02"
_FIRST_TRACK_AT_ONCE = b"\x81\x00\x00\x80"
_NANOSECONDS = 1_000_000_000


def file(codec: bytes, private: bytes, rate: int, channels: int, packets: Sequence[tuple[int, Bytes]]) -> list[Bytes]:
    """The parts of a file of these packets, each with the samples before it; `private` is what the codec wants to know first."""
    audio = _element(_RATE, struct.pack(">d", rate)) + _element(_CHANNELS, bytes([channels]))
    track = _element(_NUMBER, b"\x01") + _element(_UID, b"\x01") + _element(_TYPE, _SOUND)
    track += _element(_CODEC, codec) + _element(_PRIVATE, private) + _element(_AUDIO, audio)
    segment = _element(_INFO, _element(_TIMESTAMP_SCALE, b"\x01")) + _element(_TRACKS, _element(_TRACK, track))
    parts: list[Bytes] = [segment]
    for before, packet in packets:
        block = _opening(_SIMPLE_BLOCK, len(_FIRST_TRACK_AT_ONCE) + len(packet)) + _FIRST_TRACK_AT_ONCE
        cluster = _element(_TIMESTAMP, (before * _NANOSECONDS // rate).to_bytes(8, "big")) + block
        parts += [_opening(_CLUSTER, len(cluster) + len(packet)) + cluster, packet]
    head = _element(_EBML, _element(_DOC_TYPE, b"matroska")) + _opening(_SEGMENT, sum(map(len, parts)))
    return [head, *parts]


def _element(name: bytes, content: bytes) -> bytes:
    return _opening(name, len(content)) + content


def _opening(name: bytes, size: int) -> bytes:
    return name + (size | 1 << 56).to_bytes(8, "big")
