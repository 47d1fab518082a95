"""Media files by their outside: which extensions they have, and whether they are all there.

Purpose: decoders read a file that lost its tail without complaint (zeros, stale or black frames), so the length is checked
before anything is decoded. And which files are media that loaders do not read, so that none is passed over in silence.
Invariant: only the outermost elements are looked at (MP4/MOV boxes, EBML elements of Matroska and WebM), at a few reads of
some bytes each; other containers and elements of unknown length pass.
Failure behaviour: `CorruptionError` saying at which offset which element ends behind the end of the file.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import BinaryIO

from headrace.dataio.core.errors import CorruptionError

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
"""Extensions of files that are probed; files with others are members of a sample at most."""

VIDEO_EXTENSIONS = MEDIA_EXTENSIONS - {"wav", "flac", "mp3", "ogg", "oga", "opus", "m4a", "m4b", "mka"}
"""Those of them that hold pictures."""

IMAGE_EXTENSIONS = frozenset(["jpg", "jpeg", "png", "webp"])
"""Pictures: probed where a sample has no media file; beside one they are members only, such as a thumbnail."""

SAMPLE_EXTENSIONS = MEDIA_EXTENSIONS | IMAGE_EXTENSIONS
"""What a sample needs at least one of."""

CONVERTED_EXTENSIONS = frozenset(["ts", "m2t", "mts", "m2ts", "mpg", "mpeg", "vob", "flv", "mxf", "wmv", "asf", "gif"])
"""Video files that `pack` copies into another container, or re-encodes, if it is told to. They are not read as they are: what
loaders go by (where key frames lie, times that never wrap or start again, whether the file is all there) they do not say."""
DEMUXERS = "mov,matroska,avi,wav,w64,flac,mp3,ogg"
"""Those that may open files of `MEDIA_EXTENSIONS`."""
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
_UNREAD_SOUND = frozenset(["aac", "ac3", "aif", "aiff", "aifc", "amr", "ape", "au", "caf", "wma", "wv"])
_UNREAD_PICTURES = frozenset(["avif", "bmp", "heic", "heif", "jp2", "jxl", "tif", "tiff"])
KNOWN_EXTENSIONS = SAMPLE_EXTENSIONS | CONVERTED_EXTENSIONS | _UNREAD_VIDEO | _UNREAD_SOUND | _UNREAD_PICTURES
"""Media, also those that are not read."""

_MAX_ELEMENTS = 100_000
_EBML = b"\x1a\x45\xdf\xa3"
_FIRST_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot", b"styp", b"moof"}


def not_read(extensions: Collection[str]) -> tuple[str, str] | None:
    """Of a sample of files with these extensions, which one shows what the sample is and is not read, and why."""
    there = sorted(extensions)
    for ext in there if not MEDIA_EXTENSIONS & set(there) else ():
        if ext == "gif":
            return ext, "GIF is not read as it is: --transcode h264 makes a video of it"
        if ext in CONVERTED_EXTENSIONS:
            how = "--remux mp4 (or mkv) copies the streams, --transcode h264 encodes anew"
            return ext, f".{ext} files are not read as they are: {how}"
        if ext in _UNREAD_VIDEO:
            return ext, f".{ext} files are not read: make MP4 or MKV of it first, such as by ffmpeg"
        if ext in _UNREAD_SOUND:
            return ext, f".{ext} files are not read: make WAV, FLAC, M4A or Ogg of it first, such as by ffmpeg"
    for ext in there if not SAMPLE_EXTENSIONS & set(there) else ():
        if ext in _UNREAD_PICTURES:
            return ext, f".{ext} files are not read: make JPEG, PNG or WebP of it first"
    return None


def is_converted(path: str) -> bool:
    """Whether the file's name says that it is one of `CONVERTED_EXTENSIONS`."""
    return path.rpartition(".")[2].lower() in CONVERTED_EXTENSIONS


def passed_over(extensions: Collection[str]) -> list[str]:
    """Of the files of a sample, those that are media too and are kept without being read: of kinds that are not, and those with
    a name of their own, such as `cam1.mp4`. Pictures (GIF, too) beside others are usual, and not told."""
    unread = CONVERTED_EXTENSIONS - {"gif"} | _UNREAD_VIDEO | _UNREAD_SOUND
    return sorted(
        ext for ext in set(extensions) if ext in unread or ("." in ext and _kind(ext) in MEDIA_EXTENSIONS | unread)
    )


def other_videos(extensions: Collection[str], used: str) -> list[str]:
    """Of the files of a sample, those that are videos and are not the one that loaders decode."""
    return sorted(ext for ext in set(extensions) - {used} if _kind(ext) in VIDEO_EXTENSIONS)


def _kind(ext: str) -> str:
    return ext.rpartition(".")[2]


def check_complete(file: BinaryIO, size: int) -> None:
    """Raise `CorruptionError` when the container in `file`, `size` bytes long, declares more than is there."""
    file.seek(0)
    head = file.read(12)
    if head[4:8] in _FIRST_BOXES:
        _walk_boxes(file, size)
    elif head.startswith(_EBML):
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
        least = 16 if length == 1 else 8
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if len(head) < least and not any(head):
            return  # some writers pad with a few zero bytes
        if length < least:
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
        if payload == (1 << 7 * size_length) - 1:  # unknown: a live recording
            return
        length = id_length + size_length + payload
        _check_fits(f"element {head[:id_length].hex()}", offset, length, size)
        offset += length


def _vint_length(head: bytes, at: int) -> int:
    if at >= len(head) or not head[at]:
        raise CorruptionError("the Matroska file ends or breaks off inside an element's header")
    return 9 - head[at].bit_length()


def _check_fits(what: str, offset: int, length: int, size: int) -> None:
    if offset + length > size:
        raise CorruptionError(f"truncated: {what} at offset {offset} ends at {offset + length}, the file at {size}")
