"""What the packets of a video say about its frames: how many are shown, when, and at which of them decoding can begin.

Purpose: `probe` passes each packet of a video to `VideoPackets`, in the order of the file. `count` then gives the
frames without decoding them.

Invariants:

* Packets are counted only if each shown packet is exactly one frame. Otherwise `count` returns None.
* A packet is a key frame if the container marks it as one, and decoding can begin at it
  (`bitstream.is_random_access`). `unclean` has the time stamps of the other marked packets.
* Of most packets, only the time stamps and the flags are read. The bytes are read of key frames, and of codecs that may
  hide frames or, in AVI, leave packets empty.

Failure behaviour: `UnsupportedError` for more than `limits.VIDEO_FRAMES` packets.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

from headrace.dataio.core import limits
from headrace.dataio.shards.media.bitstream import WITH_HIDDEN_FRAMES, is_random_access, is_shown, length_size
from headrace.dataio.shards.media.streams import check_frame_count
from headrace.dataio.shards.pieces import piece_size
from headrace.dataio.shards.sample import KeyFrame

_ONE_PACKET_ONE_FRAME = frozenset(["h264", "hevc", "av1", "vp8", "vp9", "mjpeg", "prores", "dnxhd", "ffv1", "rawvideo"])
_EARLIEST = -(1 << 63)


class Count(NamedTuple):
    """The frames of a video: their number, the key frames, the pts of the first frame, and the pts at which the last ends."""

    frames: int
    keys: tuple[KeyFrame, ...]
    start: int
    end: int


class VideoPackets:
    """Collects what the packets of `stream` say.

    Attributes:
        packets (int): the number of packets.
        whole_pictures (bool): whether all packets are complete JPEGs, each of which decodes to one frame.
        unclean: the time stamps of the packets that the container marks as key frames, although decoding cannot begin at
            them.
    """

    def __init__(self, stream: Any) -> None:
        self._codec = stream.codec_context.codec.canonical_name
        self._length_size = length_size(self._codec, stream.codec_context.extradata)
        self._is_mjpeg, self._reads_bytes = self._codec == "mjpeg", self._codec in (*WITH_HIDDEN_FRAMES, "mjpeg")
        self.packets, self.whole_pictures = 0, self._is_mjpeg
        self.unclean = list[int | None]()
        self._keys, self._shown, self._end = list[tuple[int, int]](), list[int](), _EARLIEST
        self._begins_with_key, self._all_stamped = False, True

    def add(self, packet: Any) -> None:
        """Add the next packet, which is not empty."""
        self.packets += 1
        if self.packets > limits.VIDEO_FRAMES:
            check_frame_count(self.packets)
        pts = packet.pts
        if packet.is_keyframe:
            self._add_key(packet, pts)
        shown = not packet.is_discard
        if self._reads_bytes:
            data = memoryview(packet)
            shown = shown and is_shown(self._codec, data)
            self.whole_pictures = self.whole_pictures and _is_jpeg(data)
        if pts is None:
            self._all_stamped = False
        elif shown:
            self._shown.append(pts)
            end = pts + (packet.duration or 0)
            if end > self._end:
                self._end = end

    def _add_key(self, packet: Any, pts: int | None) -> None:
        if not is_random_access(self._codec, memoryview(packet), self._length_size):
            self.unclean.append(pts)
            return
        self._begins_with_key = self._begins_with_key or self.packets == 1
        if pts is not None:
            self._keys.append((pts, -1 if packet.pos is None else packet.pos))

    def count(self) -> Count | None:
        """Count the frames. Return None if a packet may not be exactly one frame."""
        shown = sorted(self._shown)
        packets_are_frames = (
            self._codec in _ONE_PACKET_ONE_FRAME
            and shown
            and self._begins_with_key
            and self._all_stamped
            and len(set(shown)) == len(shown)
            and self._keys
            and shown[0] >= self._keys[0][0]  # else leading frames lack their references, and decoders drop them
        )
        if not packets_are_frames:
            return None
        key_frames = tuple(KeyFrame(pts, bisect_left(shown, pts)) for pts in sorted({pts for pts, _ in self._keys}))
        step = (shown[-1] - shown[0]) // (len(shown) - 1) if len(shown) > 1 else 0
        return Count(len(shown), key_frames, shown[0], self._end if self._end > shown[-1] else shown[-1] + step)

    def with_offsets(self, keys: tuple[KeyFrame, ...], size: int) -> tuple[KeyFrame, ...]:
        """Return the key frames with the offsets of their packets, if a file of `size` bytes may be read in part."""
        if piece_size(size) is None:
            return keys
        offsets = {pts: at for pts, at in self._keys if 0 <= at < size}
        return tuple(KeyFrame(key.pts, key.index, offsets.get(key.pts, -1)) for key in keys)


def _is_jpeg(data: memoryview) -> bool:
    """Return whether the data have the first and the last marker of a JPEG. A few bytes of padding may follow."""
    return bytes(data[:2]) == b"\xff\xd8" and b"\xff\xd9" in bytes(data[-16:])
