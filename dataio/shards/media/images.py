"""Images: JPEG, PNG and WebP, each as a video with one frame. Also the color properties of decoded frames.

Purpose: `decode` returns the one frame of a file. `probe` describes it for an index row. `color_of` translates libav's
code points (those of ITU-T H.273) to libav's names, as ffprobe prints them.

Invariants:

* The whole file is decoded with strict error detection. A truncated image is rejected, and so is one with damage that
  its format can detect. Missing rows are never filled with grey. `probe` also checks what libav does not check of a
  PNG. `decode` does not, because its callers have compared the file's digest.
* An image has no duration: its duration is 0, and its one frame is number 0 at time 0.
* At most `limits.FRAME_PIXELS` are decoded.
* Only the demuxers of these three formats may open the file.
* A color property that the file does not state, or a code point without a name here, is "unknown". The size of the
  image is never used to guess it.

Failure behaviour: an image that cannot be decoded whole raises `CorruptionError`. Another format, an animation or an
image that is too large raises `UnsupportedError`.
"""

from __future__ import annotations

import io
import itertools
from fractions import Fraction
from typing import Any

import av
import av.error
from av.video.frame import VideoFrame

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.media import png
from headrace.dataio.shards.sample import Color, KeyFrame, VideoInfo

DEMUXERS = "jpeg_pipe,png_pipe,webp_pipe"
_STRICT = {"max_pixels": str(limits.FRAME_PIXELS), "err_detect": "explode"}
_JPEG, _JPEG_END, _TAIL = b"\xff\xd8", b"\xff\xd9", 1 << 16
_WEBP_FLAGS, _WEBP_ANIMATION = 20, 2
"""The offset of the flags in an extended WebP file, and the flag of an animation."""
_AS_VIDEO = "make one file of each image, or encode it as a video"
IMAGE_BYTES = 256 * limits.MIB
"""The largest file that is read as an image, in bytes."""


def decode(data: bytes | memoryview) -> VideoFrame:
    """Decode the image in `data`, which is the contents of a whole file."""
    if len(data) > IMAGE_BYTES:
        raise UnsupportedError(f"an image file of more than {limits.format_bytes(IMAGE_BYTES)}")
    if bytes(data[:2]) == _JPEG and _JPEG_END not in bytes(data[-_TAIL:]):  # the decoder would fill in the rest
        raise CorruptionError("truncated: the JPEG has no end")
    if _is_animated_webp(bytes(data[: _WEBP_FLAGS + 1])):
        raise UnsupportedError(f"an animation, not an image; {_AS_VIDEO}")
    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": "", **_STRICT}
    try:
        with av.open(io.BytesIO(data), "r", metadata_errors="replace", options=options) as container:
            context = container.streams.video[0].codec_context
            context.options, context.thread_count = _STRICT, 1
            frames = list(itertools.islice(container.decode(container.streams.video[0]), 2))
    except av.error.ArgumentError as error:
        reason = f"not a JPEG, PNG or WebP image, or one of more than {limits.FRAME_PIXELS} pixels"
        raise UnsupportedError(reason) from error
    except (av.error.FFmpegError, IndexError) as error:
        raise CorruptionError(f"the image cannot be decoded: {getattr(error, 'strerror', error)}") from error
    if len(frames) > 1:
        raise UnsupportedError(f"the file holds more than one image; {_AS_VIDEO}")
    if not frames or frames[0].is_corrupt:
        raise CorruptionError("the image is damaged")
    return frames[0]


def _is_animated_webp(head: bytes) -> bool:
    is_extended = head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and len(head) > _WEBP_FLAGS
    return is_extended and bool(head[_WEBP_FLAGS] & _WEBP_ANIMATION)


def probe(data: bytes | memoryview, ext: str) -> VideoInfo:
    """Describe the image in `data` for the index. `ext` names the member."""
    frame = decode(data)
    view = memoryview(data)
    if view[:8] == png.SIGNATURE:
        png.check(view, png.read_header(view, "the PNG"), "the PNG")
    return VideoInfo(
        ext=ext,
        stream=0,
        codec=_codec(bytes(data[:4])),
        width=frame.width,
        height=frame.height,
        fps=Fraction(1),
        frames=1,
        time_base=Fraction(1),
        start_pts=0,
        duration_pts=0,
        pixel_format=frame.format.name,
        rotation=round(-frame.rotation / 90) % 4 * 90,  # libav counts counter-clockwise
        key_frames=(KeyFrame(0, 0),),
        color=color_of(frame),
    )


def _codec(head: bytes) -> str:
    if head.startswith(_JPEG):
        return "mjpeg"
    return "png" if head.startswith(b"\x89PNG") else "webp"


# --- color

UNKNOWN = "unknown"

RANGES = {1: "tv", 2: "pc"}
SPACES = {
    0: "gbr",
    1: "bt709",
    4: "fcc",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "ycgco",
    9: "bt2020nc",
    10: "bt2020c",
    11: "smpte2085",
    12: "chroma-derived-nc",
    13: "chroma-derived-c",
    14: "ictcp",
}
PRIMARIES = {
    1: "bt709",
    4: "bt470m",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "film",
    9: "bt2020",
    10: "smpte428",
    11: "smpte431",
    12: "smpte432",
    22: "ebu3213",
}
TRANSFERS = {
    1: "bt709",
    4: "bt470m",
    5: "bt470bg",
    6: "smpte170m",
    7: "smpte240m",
    8: "linear",
    9: "log100",
    10: "log316",
    11: "iec61966-2-4",
    12: "bt1361e",
    13: "iec61966-2-1",
    14: "bt2020-10",
    15: "bt2020-12",
    16: "smpte2084",
    17: "smpte428",
    18: "arib-std-b67",
}


def color_of(frame: Any) -> Color:
    """Return the color properties of a decoded PyAV frame."""
    return Color(
        SPACES.get(int(frame.colorspace), UNKNOWN),
        RANGES.get(int(frame.color_range), UNKNOWN),
        PRIMARIES.get(int(frame.color_primaries), UNKNOWN),
        TRANSFERS.get(int(frame.color_trc), UNKNOWN),
    )
