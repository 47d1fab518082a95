"""Counts the samples that an audio decoder outputs, and decodes only as many packets as that needs.

Purpose: the index has the exact number of samples of a stream. To decode all of it takes most of the time of `probe`.
Packets of some codecs say how many samples they decode to.

Invariants:

* `AudioCounter` decodes the first packets. If two packets in a row decode to as many samples as their codec's rule says,
  it counts the packets that follow by that rule. The rules are `_PACKET_RULES`. Streams of other codecs are decoded to
  their end.
* The samples that the container lets the decoder drop are not counted: an encoder's delay, the padding of the last
  packet, and packets that an edit list cuts off.
* If a later packet contradicts its codec's rule, `AudioCounter` raises `UncountableError`. The caller then counts again
  with `by_packets=False`.
* The sample rate and the channels are those of the first decoded frame, since headers may give wrong values (HE-AAC).
* Codecs with checksums (FLAC, MP3 with CRC) are decoded to their end, so that their damage is found. Damage inside the
  packets of a stream that is counted by rules is not looked for. The loader that decodes such a packet finds it.

Failure behaviour: errors of the decoder are counted. `UnsupportedError` if a stream has more than
`limits.AUDIO_VALUES` values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import av.error
from av.audio.frame import AudioFrame

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media.container import lies_before
from headrace.dataio.shards.sample import AudioInfo, AudioMark

MARK_BYTES, MAX_MARKS = 64 * limits.KIB, 128
"""The least distance between marked audio packets in bytes, and the approximate limit of marks."""
_EQUAL_PACKETS = 2
"""The number of packets in a row that must decode as their rule says."""


class UncountableError(Exception):
    """A packet does not say how many samples it decodes to."""


class AudioCounter:
    """Counts the samples of one stream, and marks some of its packets.

    It marks some packets of a file of `size` bytes: the first, about one in each `MARK_BYTES` (in large files fewer),
    and the last. Packets before the offset `zero` are decoded, since the decoder's state depends on them, but they do
    not count.

    Args:
        size (int): the size of the file in bytes.
        zero (int): the offset of the first packet that counts. The default is 0.
        by_packets (bool): whether packets may be counted without decoding them. The default is True.
    """

    def __init__(self, size: int, zero: int = 0, *, by_packets: bool = True) -> None:
        self.samples = self.errors = self.early = self.rate = self.channels = 0
        self.zero = zero
        self._start = 0
        self._marks = list[AudioMark]()
        self._last_at, self._last_pts = -1, 0
        self._mark_distance, self._next_mark, self._size = max(MARK_BYTES, size // MAX_MARKS), 0, size
        self._by_packets, self._equal, self._last_length = by_packets, 0, 0
        self._rule: Callable[[Any], int] | None = None
        self._skip, self._flushed = 0, False

    def feed(self, packet: Any) -> None:
        """Count the next packet. An empty packet ends the stream."""
        early = self.zero > 0 and lies_before(packet, self.zero)
        if early:
            self.early += 1
        rule = self._rule
        if rule is None:
            self._decode(packet, early)
        elif not packet.size:
            self._flushed = True  # the decoder of a stream that is counted by packets holds nothing back
        elif self._flushed or packet.is_corrupt:
            raise UncountableError
        else:
            length = rule(packet)
            if self._skip or packet.is_discard or _has_side_data(packet):
                length = self._shown(packet, length)
            if not early:
                self._add(length)
        if not early:
            self._mark(packet)

    def info(self, ext: str, stream: Any) -> AudioInfo | None:
        """Return the description of the stream in the member `ext`, or None if nothing was decoded."""
        if not self.samples:
            return None
        codec = stream.codec_context.codec.canonical_name
        last = AudioMark(self._last_at, self._last_pts)
        ends = (last,) if self._marks and self._marks[-1] != last else ()
        return AudioInfo(
            *(ext, stream.index, codec, self.rate, self.channels, self.samples),
            time_base=Fraction(stream.time_base),
            start_pts=self._start,
            marks=() if self.errors else (*self._marks, *ends),
        )

    def _decode(self, packet: Any, early: bool) -> None:
        try:
            frames = packet.decode()
        except av.error.FFmpegError:
            self.errors += 1
            return
        if not early:
            for frame in frames:
                self._add_frame(frame)
        if self._by_packets and packet.size and self.samples:
            self._compare(packet, frames)

    def _add_frame(self, frame: AudioFrame) -> None:
        if not self.samples:
            self._start = frame.pts or 0  # some frames have no timestamps
        self.rate, self.channels = self.rate or frame.sample_rate, self.channels or len(frame.layout.channels)
        self._add(frame.samples)

    def _add(self, samples: int) -> None:
        self.samples += samples
        if self.samples * self.channels > limits.AUDIO_VALUES:
            raise UnsupportedError(f"its audio has more than {limits.AUDIO_VALUES} samples; split it")

    def _compare(self, packet: Any, frames: list[AudioFrame]) -> None:
        """Count by packets from here on, if the last packets decoded as their rule says."""
        length = frames[0].samples if len(frames) == 1 else 0
        rule = _rule_for(packet.stream.codec_context, self.channels, self._last_length)
        self._last_length = length
        if rule is None or self.errors:
            self._by_packets = rule is not None and not self.errors
            return
        try:
            says = rule(packet)
        except UncountableError:
            self._by_packets = False
            return
        whole = 0 < length == says and not packet.is_discard and not _has_side_data(packet)
        self._equal = self._equal + 1 if whole else 0
        if self._equal >= _EQUAL_PACKETS:
            self._rule = rule

    def _shown(self, packet: Any, length: int) -> int:
        """Return how many of the packet's `length` samples the decoder outputs.

        The container may say how many samples to skip from a packet on, and how many to drop at a packet's end.
        """
        padding = 0
        for side in packet.iter_sidedata():
            if side.data_type in _CHANGES:
                raise UncountableError
            if side.data_type == "skip_samples" and side.data_size >= _SKIP_BYTES:
                skip, padding = struct.unpack_from("<iI", side)
                self._skip = max(0, skip)
        if self._skip or padding:
            length, self._skip = after_skipping(length, self._skip, padding)
        return 0 if packet.is_discard else length

    def _mark(self, packet: Any) -> None:
        """Mark the packet, if it is far enough from the last mark.

        If several packets have one offset, as on a page of Ogg, only the first counts.
        """
        at, pts = packet.pos, packet.pts
        if at is None or pts is None or not self._last_at < at < self._size or not packet.size:
            return
        self._last_at, self._last_pts = at, pts
        if at >= self._next_mark:
            self._marks.append(AudioMark(at, pts))
            self._next_mark = at + self._mark_distance


def _has_side_data(packet: Any) -> bool:
    for _ in packet.iter_sidedata():
        return True
    return False


def after_skipping(length: int, skip: int, padding: int) -> tuple[int, int]:
    """Return how many of a frame's `length` samples libav outputs, and how many the next frames must still skip.

    `skip` samples are skipped, also in the next frames. `padding` samples are dropped at the end of this frame, unless it
    has fewer.
    """
    skipped = min(skip, length)
    left = length - skipped
    return left - padding if padding <= left else left, skip - skipped


# --- the samples of a packet

_SKIP_BYTES = 10
"""The size of libav's side data `skip_samples`: the samples to skip, the samples to drop at the end, and two reasons."""
_CHANGES = ("new_extradata", "param_change")
"""Side data with which the packet's decoder is set up anew."""


def _rule_for(context: Any, channels: int, last_length: int) -> Callable[[Any], int] | None:
    """Return the function that gives the samples of a packet of this stream, or None if its packets do not say it.

    `last_length` is the number of samples to which the previous packet was decoded.
    """
    make = _PACKET_RULES.get(context.codec.canonical_name)
    return None if make is None else make(context, channels, last_length)


_PCM_BYTES = {
    **dict.fromkeys(("pcm_u8", "pcm_s8", "pcm_alaw", "pcm_mulaw"), 1),
    **dict.fromkeys(("pcm_s16le", "pcm_s16be", "pcm_u16le", "pcm_u16be"), 2),
    **dict.fromkeys(("pcm_s24le", "pcm_s24be", "pcm_u24le", "pcm_u24be"), 3),
    **dict.fromkeys(("pcm_s32le", "pcm_s32be", "pcm_u32le", "pcm_u32be", "pcm_f32le", "pcm_f32be"), 4),
    **dict.fromkeys(("pcm_s64le", "pcm_s64be", "pcm_f64le", "pcm_f64be"), 8),
}
"""The bytes of one value in each PCM codec."""


def _pcm_rule(context: Any, channels: int, last_length: int) -> Callable[[Any], int] | None:
    block = _PCM_BYTES[context.codec.canonical_name] * channels

    def samples(packet: Any) -> int:
        count, rest = divmod(packet.size, block)
        if rest:
            raise UncountableError
        return int(count)

    return samples


_AAC_TYPES = frozenset([2, 5, 29])
"""The MPEG-4 audio object types AAC-LC, SBR (HE-AAC) and PS (HE-AAC v2)."""
_AAC_FRAMES = frozenset([960, 1024, 1920, 2048])
_AAC_MIN_BYTES = 4
"""The size of the shortest AAC packet with audio."""


def _aac_rule(context: Any, channels: int, last_length: int) -> Callable[[Any], int] | None:
    """All packets of a stream with AAC's configuration in its header decode to the same number of samples.

    libav decides with the first packet whether the stream has SBR, which doubles the samples.
    """
    extradata = context.extradata
    if not extradata or len(extradata) < 2 or extradata[0] >> 3 not in _AAC_TYPES:
        return None

    def samples(packet: Any) -> int:
        if packet.size < _AAC_MIN_BYTES:
            raise UncountableError
        return last_length if last_length in _AAC_FRAMES else 0

    return samples


_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_KBITS = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
"""The bit rates of layer III in kbit/s: of MPEG-2 and 2.5, and of MPEG-1."""
_MP3_CONSTANT = 0xFFFE_0C00
"""The bits of a header that are the same in all frames of a stream: sync, version, layer and sample rate."""


def _mp3_rule(context: Any, channels: int, last_length: int) -> Callable[[Any], int] | None:
    """A packet is one frame, whose header gives its samples. Its size must be that of the header."""
    frames = dict[int, tuple[int, int]]()
    constant = list[int]()

    def samples(packet: Any) -> int:
        header = int.from_bytes(memoryview(packet)[:4], "big")
        known = frames.get(header >> 9)
        if known is None:
            known = frames[header >> 9] = _mp3_frame(header)
            constant.append(header & _MP3_CONSTANT)
        if packet.size != known[0] or constant[0] != constant[-1]:
            raise UncountableError
        return known[1]

    return samples


def _mp3_frame(header: int) -> tuple[int, int]:
    """Return the bytes and the samples of the frame with this header."""
    version, layer, has_crc = header >> 19 & 3, header >> 17 & 3, not header >> 16 & 1
    bit_rate, rate, padding = header >> 12 & 15, header >> 10 & 3, header >> 9 & 1
    if header >> 21 != 0x7FF or version == 1 or layer != 1 or has_crc or bit_rate in (0, 15) or rate == 3:
        raise UncountableError
    is_first = version == 3
    hertz = _MP3_RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    samples = 1152 if is_first else 576
    return samples // 8 * 1000 * _MP3_KBITS[is_first][bit_rate] // hertz + padding, samples


_OPUS_CELT = 16
"""The first of the configurations of a packet that use only CELT. Decoders of SILK resample, which delays samples."""
_OPUS_MAX_SAMPLES = 5760
"""The samples of the longest packet that Opus allows."""
_OPUS_MIN_BYTES = 3
"""Shorter packets may be lost or silent frames."""


def _opus_rule(context: Any, channels: int, last_length: int) -> Callable[[Any], int] | None:
    """The first byte of a packet gives the length of its frames, and it or the second gives their number (RFC 6716, 3)."""

    def samples(packet: Any) -> int:
        if packet.size < _OPUS_MIN_BYTES:
            raise UncountableError
        head = memoryview(packet)
        config, code = head[0] >> 3, head[0] & 3
        frames = (1, 2, 2, head[1] & 63)[code]
        count = frames * (120 << (config & 3))
        if config < _OPUS_CELT or not 0 < count <= _OPUS_MAX_SAMPLES:
            raise UncountableError
        return count

    return samples


_PACKET_RULES: dict[str, Callable[[Any, int, int], Callable[[Any], int] | None]] = {
    **dict.fromkeys(_PCM_BYTES, _pcm_rule),
    "aac": _aac_rule,
    "mp3": _mp3_rule,
    "opus": _opus_rule,
}
