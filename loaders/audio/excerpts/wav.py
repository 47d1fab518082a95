"""Excerpts of WAV. Samples are stored one after the other, so the position of a time can be computed.

Purpose: libav reads WAV in packets of 4 KiB, which may last only three milliseconds.
Invariants: an excerpt contains the unchanged samples from `low` to `high`, or to the file's last sample.
Failure behaviour: None for compressed files, for files larger than their header can express, for windows without
samples, and if the file does not match the index. libav then reads the file itself.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders.audio.excerpts.base import Excerpt
from headrace.loaders.fetch.partial_file import Media

EXTENSIONS = frozenset(["wav"])
_CODECS = frozenset(["pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"])
_DEMUXER = "wav:format_opts=probesize=32"  # otherwise libav probes all of it for DTS, which the index has ruled out
_MOST_CHUNKS = 64
_UNKNOWN = 0xFFFFFFFF


def excerpt(data: Media, info: AudioInfo, low: Fraction, high: Fraction) -> Excerpt | None:
    """The excerpt from `low` to `high`, in seconds from the first sample."""
    chunks = _chunks(data) if info.codec in _CODECS else None
    if chunks is None:
        return None
    form, at, size = chunks
    _, channels, rate, _, width, bits = struct.unpack("<HHIIHH", form[:16])
    if (channels, rate) != (info.channels, info.sample_rate) or width * 8 != channels * bits or size % width:
        return None
    samples = size // width
    if not _matches_index(info, at, samples):
        return None
    first, last = max(0, int(low * rate)), min(samples, math.ceil(high * rate))
    if first >= last:
        return None
    part = data[at + first * width : at + last * width]
    head = struct.pack("<4sI4s4sI", b"RIFF", 20 + len(form) + len(part), b"WAVE", b"fmt ", len(form)) + form
    head += struct.pack("<4sI", b"data", len(part))
    audio_end = Fraction(samples, rate) if last == samples else None
    return Excerpt([head, part], _DEMUXER, shift=Fraction(first, rate), audio_end=audio_end, from_start=not first)


def _matches_index(info: AudioInfo, at: int, samples: int) -> bool:
    """Whether libav found the same number of samples at the same byte. An older index lists only the number."""
    if info.time_base is None:
        return samples == info.samples
    first_mark = info.marks[0] if info.marks else None
    return (
        samples == info.samples
        and first_mark is not None
        and (first_mark.at, first_mark.pts, info.start_pts) == (at, 0, 0)
    )


def _chunks(data: Media) -> tuple[bytes, int, int] | None:
    """The payload of the format chunk, the offset of the samples, and their size in bytes."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    at, form = 12, b""
    for _ in range(_MOST_CHUNKS):
        head = data[at : at + 8]
        if len(head) < 8:
            return None
        kind, size = struct.unpack("<4sI", head)
        if kind == b"fmt " and 16 <= size <= 64 and not size % 2:
            form = bytes(data[at + 8 : at + 8 + size])
        if kind == b"data":
            is_complete = size != _UNKNOWN and at + 8 + size <= len(data)
            return (form, at + 8, size) if is_complete and len(form) >= 16 else None
        at += 8 + size + size % 2
    return None
