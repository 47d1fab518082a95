"""Media containers: the extensions of media files, and whether a file is complete.

Purpose: decoders read a truncated file without an error (zeros, stale or black frames). `check_complete` therefore
checks the length before decoding. This module also lists the extensions of media files that loaders do not read, so
that `pack` and `index` can report such files.
Invariant: only the top-level elements are checked (MP4/MOV boxes, EBML elements of Matroska and WebM), with a few small
reads. Other containers and elements of unknown length pass.
Failure behaviour: `CorruptionError` names the element that ends after the end of the file, and its offset.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Generator, Iterator
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from headrace.dataio.core.errors import CorruptionError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

    _Stream = TypeVar("_Stream", VideoStream, AudioStream, VideoStream | AudioStream)

MEDIA_EXTENSIONS = frozenset(
    [
        "mp4",
        "m4v",
        "mov",
        "3gp",
        "3g2",
        "f4v",
        "mkv",
        "webm",
        "avi",
        "ogv",
        "m4a",
        "m4b",
        "mka",
        "wav",
        "flac",
        "mp3",
        "ogg",
        "oga",
        "opus",
    ]
)
"""The extensions of the media files that loaders read. Images are listed in `IMAGE_EXTENSIONS`."""

DEMUXER_OF = {"mp4": "mov", "m4v": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska"}
"""libav's demuxer for a format of videos, if the format needs no probing."""
_WITH_DECODE_TIMES = frozenset(["mp4", "m4v", "mov"])
IN_ORDER = frozenset(["av1", "vp8", "vp9", "mjpeg"])
"""Codecs whose frames are stored in the order in which they are shown."""

VIDEO_EXTENSIONS = MEDIA_EXTENSIONS - {"wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "m4b", "mka"}
"""The extensions of `MEDIA_EXTENSIONS` whose files can hold video."""

IMAGE_EXTENSIONS = frozenset(["jpg", "jpeg", "png", "webp"])
"""The extensions of images that loaders read, if a sample has no media file.

Otherwise an image is only a further member, such as a thumbnail.
"""

SAMPLE_EXTENSIONS = MEDIA_EXTENSIONS | IMAGE_EXTENSIONS
"""A sample needs at least one file with one of these extensions."""

CONVERTED_EXTENSIONS = frozenset(["ts", "m2t", "mts", "m2ts", "mpg", "mpeg", "vob", "flv", "mxf", "wmv", "asf", "gif"])
"""Video files that `pack` copies into another container, or re-encodes, on request.

Loaders do not read them directly, because these containers do not provide the data that loaders need: the position of key frames,
timestamps that never wrap or restart, and whether the file is complete.
"""
DEMUXERS = "mov,matroska,avi,wav,w64,flac,mp3,ogg"
"""The demuxers that may open files of `MEDIA_EXTENSIONS`."""
CONVERTED_DEMUXERS = "mpegts,mpeg,flv,mxf,asf,gif"

_UNREAD_VIDEO = frozenset(
    [
        "divx",
        "dv",
        "h264",
        "264",
        "h265",
        "265",
        "hevc",
        "ivf",
        "m1v",
        "m2v",
        "mjpeg",
        "mjpg",
        "nut",
        "ogm",
        "rm",
        "rmvb",
        "y4m",
    ]
)
_UNREAD_AUDIO = frozenset(["aac", "ac3", "aif", "aiff", "aifc", "amr", "ape", "au", "caf", "wma", "wv"])
_UNREAD_IMAGES = frozenset(["avif", "bmp", "heic", "heif", "jp2", "jxl", "tif", "tiff"])
KNOWN_EXTENSIONS = SAMPLE_EXTENSIONS | CONVERTED_EXTENSIONS | _UNREAD_VIDEO | _UNREAD_AUDIO | _UNREAD_IMAGES
"""The extensions of all media files, including those that are not read."""

STORED_STAMPS = {"fflags": "nofillin"}
"""With this option, packets have only the time stamps that the container stores."""
EBML = b"\x1a\x45\xdf\xa3"
"""The first bytes of a Matroska file."""

_MAX_ELEMENTS = 100_000
_NO_OFFSET = (1 << 63) - 1
_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"moof"}


def has_decode_order(format: str, codec: str) -> bool:
    """Return whether loaders open such a video as its container describes it, without probing its streams.

    The container stores decode times, or the codec decodes frames in the order in which they are shown.
    """
    return format in _WITH_DECODE_TIMES or codec in IN_ORDER


def is_wav(head: bytes) -> bool:
    """Return whether a file with these first 12 bytes is WAV."""
    return head[:4] == b"RIFF" and head[8:12] == b"WAVE"


def may_describe_streams(head: bytes) -> bool:
    """Return whether a file with these first 12 bytes is MP4 or Matroska, whose headers describe the streams."""
    return head[4:8] in _FIRST_BOXES or head.startswith(EBML)


def unsupported_media(extensions: Collection[str]) -> tuple[str, str] | None:
    """Return the extension of the media file because of which the sample cannot be read, and the reason.

    Return None if the sample can be read.
    """
    sorted_extensions = sorted(extensions)
    for ext in sorted_extensions if not MEDIA_EXTENSIONS & set(sorted_extensions) else ():
        if ext == "gif":
            return ext, "GIF is not read as it is: --transcode h264 makes a video of it"
        if ext in CONVERTED_EXTENSIONS:
            remedy = "--remux mp4 (or mkv) copies the streams, --transcode h264 re-encodes"
            return ext, f".{ext} files are not read as they are: {remedy}"
        if ext in _UNREAD_VIDEO:
            return ext, f".{ext} files are not read: convert it to MP4 or MKV first, for example with ffmpeg"
        if ext in _UNREAD_AUDIO:
            return ext, f".{ext} files are not read: convert it to WAV, FLAC, M4A or Ogg first, for example with ffmpeg"
    for ext in sorted_extensions if not SAMPLE_EXTENSIONS & set(sorted_extensions) else ():
        if ext in _UNREAD_IMAGES:
            return ext, f".{ext} files are not read: convert it to JPEG, PNG or WebP first"
    return None


def needs_conversion(path: str) -> bool:
    """Return whether the file's name has one of `CONVERTED_EXTENSIONS`."""
    return path.rpartition(".")[2].lower() in CONVERTED_EXTENSIONS


def unused_media(extensions: Collection[str]) -> list[str]:
    """Return the extensions of a sample's further media files, which are packed but not read.

    These are files in formats that are not read, and audio with an extension of several parts, such as `mic1.wav`.
    Images, including GIF, are common as further members and are not returned.
    """
    unread = CONVERTED_EXTENSIONS - {"gif"} | _UNREAD_VIDEO | _UNREAD_AUDIO
    return sorted(
        ext
        for ext in set(extensions)
        if ext in unread or ("." in ext and not is_named_video(ext) and _last_suffix(ext) in MEDIA_EXTENSIONS | unread)
    )


def is_named_video(ext: str) -> bool:
    """Return whether the extension has a name before the format of a video, such as `cam1.mp4`."""
    return "." in ext and _last_suffix(ext) in VIDEO_EXTENSIONS


def other_videos(extensions: Collection[str], used: str) -> list[str]:
    """Return the extensions of a sample's videos, except the video that loaders decode."""
    return sorted(ext for ext in set(extensions) - {used} if _last_suffix(ext) in VIDEO_EXTENSIONS)


def _last_suffix(ext: str) -> str:
    return ext.rpartition(".")[2]


def demuxed(container: InputContainer, *streams: _Stream) -> AbstractContextManager[Iterator[Packet[_Stream]]]:
    """Return a context manager that yields the packets of these streams and closes PyAV's generator.

    PyAV leaks a packet if its generator is not closed and does not run to the end, for example after an error.
    """
    return closing(cast("Generator[Packet[_Stream], None, None]", container.demux(*streams)))


def first_stamped(container: InputContainer, stream: AudioStream) -> int:
    """Return the offset of the stream's first packet that does not lie before time zero.

    `container` must be a Matroska file that was opened with `STORED_STAMPS`. It has no time stamps for packets before
    zero. Without that option libav counts them from zero.
    """
    with demuxed(container, stream) as packets:
        for packet in packets:
            if packet.pts is not None or packet.dts is not None:
                return packet.pos or 0
    return _NO_OFFSET


def lies_before(packet: Packet[AudioStream], offset: int) -> bool:
    """Return whether the packet lies before this offset of the file."""
    return packet.pos is not None and 0 <= packet.pos < offset


def block_time(data: bytes) -> int:
    """Return the time of a Matroska block, relative to its cluster, or -1 if this is no block.

    `data` are the block's first bytes, at most 12.
    """
    if not any(data[:1]):
        return -1
    at = _vint_length(data, 0)
    return int.from_bytes(data[at : at + 2], "big", signed=True)


def check_complete(file: BinaryIO, size: int) -> None:
    """Raise `CorruptionError` if the container in `file` declares more than its `size` bytes."""
    file.seek(0)
    head = file.read(12)
    if head[4:8] in _FIRST_BOXES:
        _walk_boxes(file, size)
    elif head.startswith(EBML):
        _walk_ebml(file, size)
    file.seek(0, io.SEEK_SET)


def _walk_boxes(file: BinaryIO, size: int) -> None:
    offset = 0
    for _ in range(_MAX_ELEMENTS):
        if offset == size:
            return
        file.seek(offset)
        head = file.read(16)
        length, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if length == 0:  # "to the end of the file"
            return
        min_length = 16 if length == 1 else 8
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if len(head) < min_length and not any(head):
            return  # some writers pad with a few zero bytes
        if length < min_length:
            raise CorruptionError(f"box {kind!r} at offset {offset} has the impossible length {length}")
        _check_fits(f"box {kind!r}", offset, length, size)
        offset += length


def _walk_ebml(file: BinaryIO, size: int) -> None:
    offset = 0
    for _ in range(_MAX_ELEMENTS):
        if offset == size:
            return
        file.seek(offset)
        head = file.read(12)
        id_length = _vint_length(head, 0)
        size_length = _vint_length(head, id_length)
        payload = int.from_bytes(head[id_length : id_length + size_length], "big") & ((1 << 7 * size_length) - 1)
        if payload == (1 << 7 * size_length) - 1:  # unknown length: a live recording
            return
        length = id_length + size_length + payload
        _check_fits(f"element {head[:id_length].hex()}", offset, length, size)
        offset += length


def _vint_length(head: bytes, at: int) -> int:
    if at >= len(head) or not head[at]:
        raise CorruptionError("the Matroska file ends or breaks off inside an element's header")
    return 9 - head[at].bit_length()


def _check_fits(element: str, offset: int, length: int, size: int) -> None:
    if offset + length > size:
        raise CorruptionError(f"truncated: {element} at offset {offset} ends at {offset + length}, the file at {size}")
