"""The format of a medium, as its first bytes show it.

Purpose: media that are embedded in a table have no file name that can be relied on. `extension_of` returns the
extension of the file that is made of them.

Invariants:

* The extension comes from the bytes. A name can only choose among the extensions of one container, such as `.m4a` and
  `.mp4`.
* A name with the extension of another known format contradicts the bytes. Neither of the two is then believed.
* Formats that Headrace does not read (BMP, AIFF, …) are recognized too, so that the usual advice can be given for them.

Failure behaviour: `UnsupportedError` for bytes of no known format, and for a name that contradicts the bytes.
"""

from __future__ import annotations

import re

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media.container import EBML, KNOWN_EXTENSIONS

HEAD_BYTES = 1024
"""The bytes at the beginning of a medium that `extension_of` needs."""

_FAMILIES = (
    ("jpg", "jpeg"),
    ("tif", "tiff"),
    ("heic", "heif"),
    ("aif", "aiff", "aifc"),
    ("mp4", "m4v", "mov", "3gp", "3g2", "f4v", "m4a", "m4b"),
    ("mkv", "webm", "mka"),
    ("ogg", "oga", "opus", "ogv", "ogm"),
    ("ts", "m2t", "mts", "m2ts"),
    ("mpg", "mpeg", "vob"),
    ("wmv", "asf", "wma"),
    ("rm", "rmvb"),
)
_FAMILY = {ext: family for family in _FAMILIES for ext in family}
_CANONICAL = {"jpg", "tif", "heic", "aif"}
"""Formats whose extensions all mean the same, so that only one of them is used."""
_PREFIXES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"\0\0\0\x0cJXL ", "jxl"),
    (b"\xff\x0a", "jxl"),
    (b"\0\0\0\x0cjP  ", "jp2"),
    (b"fLaC", "flac"),
    (b"ID3", "mp3"),
    (b"FLV\x01", "flv"),
    (b"\0\0\x01\xba", "mpg"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "wmv"),
    (b"\x06\x0e\x2b\x34\x02\x05\x01\x01", "mxf"),
    (b".RMF", "rm"),
    (b"wvpk", "wv"),
    (b"MAC ", "ape"),
    (b"#!AMR", "amr"),
    (b"caff", "caf"),
    (b".snd", "au"),
)
_RIFF = {b"WAVE": "wav", b"AVI ": "avi", b"WEBP": "webp"}
_BRANDS = {b"qt  ": "mov", b"M4A ": "m4a", b"M4B ": "m4b", b"M4V ": "m4v", b"f4v ": "f4v"}
_IMAGE_BRANDS = {b"avif": "avif", b"avis": "avif", b"heic": "heic", b"heix": "heic", b"mif1": "heic", b"msf1": "heic"}
_OLD_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_DOC_TYPE = re.compile(rb"\x42\x82.{1,8}?(webm|matroska)", re.DOTALL)
_TS_PACKET, _M2TS_PACKET, _TS_SYNC = 188, 192, 0x47


def format_of(head: bytes) -> str | None:
    """Return the extension of the format whose files begin like this, or None."""
    if head[:4] in (b"RIFF", b"RF64", b"BW64"):
        return _RIFF.get(head[8:12])
    if head[:4] == b"FORM":
        return "aif" if head[8:12] in (b"AIFF", b"AIFC") else None
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        return "3gp" if brand[:2] == b"3g" else {**_BRANDS, **_IMAGE_BRANDS}.get(brand, "mp4")
    if head[4:8] in _OLD_QUICKTIME:
        return "mov"
    if head.startswith(EBML):
        found = _DOC_TYPE.search(head)
        return "webm" if found and found[1] == b"webm" else "mkv"
    if head.startswith(b"OggS"):
        return "opus" if b"OpusHead" in head[:64] else "ogv" if b"theora" in head[:64] else "ogg"
    for prefix, ext in _PREFIXES:
        if head.startswith(prefix):
            return ext
    return _format_of_stream(head)


def _format_of_stream(head: bytes) -> str | None:
    """Return the extension of a format without a header: its packets begin with a known pattern."""
    if len(head) > _TS_PACKET and head[0] == head[_TS_PACKET] == _TS_SYNC:
        return "ts"
    if len(head) > 4 + _M2TS_PACKET and head[4] == head[4 + _M2TS_PACKET] == _TS_SYNC:
        return "m2ts"
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        if head[1] & 0xF6 == 0xF0:
            return "aac"
        if head[1] >> 1 & 3 and head[1] >> 3 & 3 != 1 and head[2] >> 4 != 15 and head[2] >> 2 & 3 != 3:
            return "mp3"
    return None


def extension_of(head: bytes, name: str | None) -> str:
    """Return the extension for a medium that begins with `head` and that a table calls `name`."""
    found = format_of(head)
    claimed = (name or "").rpartition(".")[2].lower()
    claimed = claimed if claimed in KNOWN_EXTENSIONS else ""
    if found is None:
        raise UnsupportedError("its bytes have no known format of an image, a sound or a video")
    if not claimed:
        return found
    if claimed not in _FAMILY.get(found, (found,)):
        raise UnsupportedError(
            f"its name ends in .{claimed}, and its bytes are those of a .{found} file; correct the table"
        )
    family = _FAMILY.get(found, (found,))
    return family[0] if family[0] in _CANONICAL else claimed
