"""Opens media containers, and picks the streams that loaders decode.

Invariants:
* Only the listed demuxers may open a file (others for a file that will be converted: `container.needs_conversion`). No
  demuxer may open a second file or an address.
* The video stream is the one with the largest area, then the one flagged "default", then the first. Cover pictures do
  not count. The audio stream is the one flagged "default", then the one with the most channels, then the highest sample
  rate, then the first.
* No frame of more than `limits.FRAME_PIXELS` is decoded, not even while the file is opened. The values in the container
  and in the bitstream are not trusted.

* `open_described` gives the same streams and packets as `open_container`. It only spares libav's decoding.

Failure behaviour: `UnsupportedError` for another format, or a video above a limit. `CorruptionError` for a file that is
empty, truncated, or cannot be opened.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import av
import av.error
from av.stream import Disposition

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.media.container import (
    CONVERTED_DEMUXERS,
    DEMUXERS,
    IN_ORDER,
    STORED_STAMPS,
    block_time,
    check_complete,
    first_stamped,
    is_wav,
    may_describe_streams,
    needs_conversion,
)

_CONTAINERS = "MP4, MOV, M4A, MKV, WebM, AVI, WAV, FLAC, MP3, Ogg"
_BLOCK_HEAD = 12
_DECODE_OPTIONS = {"max_pixels": str(limits.FRAME_PIXELS)}
_NO_DECODING = {"codec_whitelist": "none"}
"""With this option, libav decodes nothing when it opens a container. The streams' own decoders are not affected."""
LIGHT_DECODING = {"skip_loop_filter": "all", "skip_idct": "all"}
"""To decode frames only for their number and properties: without the last steps, which compute the final pixels."""
_FEW_GUESSES = {"max_probe_packets": "4"}
"""libav looks for compressed audio in the first 32 packets of PCM in WAV. With this option, it looks in 4 packets."""
_DTS = tuple(map(bytes.fromhex, ("7ffe8001", "fe7f0180", "1fffe800", "ff1f00e8", "64582025")))
"""The first bytes of a frame of DTS. libav finds its frames anywhere in these packets, and other codecs at the start."""
_WAV_HEAD = 32
_GUESSED_BYTES = 5_000_000
"""The most bytes that libav looks at."""
AUDIO_DECODE_OPTIONS = {"err_detect": "crccheck+explode"}
"""With these options, audio decoders raise an error for the damage that they detect.

The FLAC decoder compares checksums.
"""


def check_file(file: Any, size: int) -> Any:
    """Return the file. If it is empty or truncated, raise `CorruptionError`."""
    if not size:
        raise CorruptionError("the file is empty (zero length)")
    check_complete(file, size)
    return file


def open_container(source: Any, options: dict[str, str] | None = None) -> Any:
    """Open a PyAV container from a file URL (`file:/path`) or a file. It cannot open other files."""
    if hasattr(source, "seek"):
        source.seek(0)
    demuxers = CONVERTED_DEMUXERS if isinstance(source, str) and needs_conversion(source) else DEMUXERS
    try:
        safe = {"format_whitelist": demuxers, "protocol_whitelist": "file", **_DECODE_OPTIONS}
        # titles are not always UTF-8
        return av.open(source, metadata_errors="replace", options=safe | (options or {}))
    except av.error.ArgumentError as error:
        raise UnsupportedError(f"not one of the containers {_CONTAINERS}") from error
    except av.error.FFmpegError as error:
        raise CorruptionError(f"not a readable media file: {error.strerror}") from error


def open_described(source: Any) -> Any:
    """Open a container like `open_container`, but let libav decode nothing if the container describes its streams.

    To decode the first frames of each stream takes most of the time of opening a file.
    """
    head = _bytes_at(source, 0, _WAV_HEAD)
    if is_wav(head) and not _may_hold_dts(_bytes_at(source, 0, _guessed_bytes(head))):
        return open_container(source, _FEW_GUESSES)
    if may_describe_streams(head):
        with suppress(HeadraceError):
            container = open_container(source, _NO_DECODING)
            if _describes_streams(container):
                return container
            container.close()
    return open_container(source, LIGHT_DECODING)


def _guessed_bytes(head: bytes) -> int:
    """Return the bytes of a WAV file in which libav looks for compressed audio, or more: those of at most four seconds."""
    if head[12:16] != b"fmt ":
        return _GUESSED_BYTES
    return min(_GUESSED_BYTES, 64 * limits.KIB + 4 * int.from_bytes(head[28:32], "little"))


def _may_hold_dts(data: bytes) -> bool:
    return any(sync in data for sync in _DTS)


def _describes_streams(container: Any) -> bool:
    """Return whether the container says all that `pick_video` and `pick_audio` compare, the frame rate, and the times.

    If there are several streams of a kind, libav must decode them, because containers may give wrong sizes and channels.
    In Matroska, libav must decode video whose frames are not stored in the order in which they are shown.
    """
    videos = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    sounds = container.streams.audio
    if len(videos) > 1 or len(sounds) > 1 or not all(s.codec_context for s in (*videos, *sounds)):
        return False
    has_times = container.format.name.startswith("mov") or all(
        s.codec_context.codec.canonical_name in IN_ORDER for s in videos
    )
    return (
        has_times
        and all(s.codec_context.width and s.codec_context.height and s.average_rate for s in videos)
        and all(s.codec_context.sample_rate and s.codec_context.channels for s in sounds)
    )


def check_video(stream: Any) -> None:
    """Raise `UnsupportedError` if the video is above a limit."""
    context = stream.codec_context
    if context.width * context.height > limits.FRAME_PIXELS:
        raise UnsupportedError(
            f"its frames of {context.width}x{context.height} have more than {limits.FRAME_PIXELS} pixels"
        )
    check_frame_count(stream.frames)


def check_frame_count(count: int) -> None:
    """Raise `UnsupportedError` if a video has more frames than `limits.VIDEO_FRAMES`."""
    if count > limits.VIDEO_FRAMES:
        raise UnsupportedError(f"it has more than {limits.VIDEO_FRAMES} frames; split it")


def pick_video(container: Any) -> Any:
    """Return the video stream that loaders decode, or None."""

    def rank(stream: Any) -> tuple[int, bool, int]:
        area = stream.codec_context.width * stream.codec_context.height
        return area, bool(stream.disposition & Disposition.default), -stream.index

    usable = [s for s in container.streams.video if s.codec_context and not s.disposition & Disposition.attached_pic]
    return max(usable, key=rank, default=None)


def pick_audio(container: Any) -> Any:
    """Return the audio stream that loaders decode, or None."""

    def rank(stream: Any) -> tuple[bool, int, int, int]:
        context = stream.codec_context
        return bool(stream.disposition & Disposition.default), context.channels, context.sample_rate, -stream.index

    return max((s for s in container.streams.audio if s.codec_context), key=rank, default=None)


def zero_offset(source: Any, container: Any, audio: Any) -> int:
    """Return the offset of the first audio packet that does not begin before time zero.

    `container` is the opened `source`. In containers other than Matroska, no packet is left out, and this is 0.
    """
    if audio is None or "matroska" not in container.format.name:
        return 0
    reopened = source if isinstance(source, str) else io.BytesIO(source.getvalue())
    with open_container(reopened, STORED_STAMPS) as stored:
        return first_stamped(stored, stored.streams[audio.index])


def zero_offset_from(packet: Any, source: Any, container: Any) -> int:
    """Return what `zero_offset` returns, given the first audio packet. Most files need no second opening then.

    A Matroska block with a time of 0 or more in its cluster does not lie before time zero, whatever its cluster's time.
    """
    if "matroska" not in container.format.name:
        return 0
    if packet.pos is not None and block_time(_bytes_at(source, packet.pos, _BLOCK_HEAD)) >= 0:
        return int(packet.pos)
    return zero_offset(source, container, packet.stream)


def _bytes_at(source: Any, offset: int, size: int) -> bytes:
    if not isinstance(source, str):
        return bytes(source.getbuffer()[offset : offset + size])
    with open(source.removeprefix("file:"), "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def configure_decoder(stream: Any, options: dict[str, str] | None = None) -> None:
    """Let the stream's decoder use one thread, and decode no frame above the limit. `options` are further options."""
    stream.codec_context.thread_count = 1  # the pool already has a process per core
    stream.codec_context.options = _DECODE_OPTIONS | (options or {})
