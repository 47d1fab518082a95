"""What a probe worker is asked and what it answers.

Purpose: the messages between the packer and its worker processes. The packer needs only these, so it never loads libav.
Invariant: msgpack with checked types, never pickle: a process that reads untrusted media must not be trusted with more.
Failure behaviour: a malformed answer raises `msgspec.MsgspecError`.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from dataio.core import limits
from dataio.shards.contract import AudioInfo, VideoInfo

TEXT_BYTES = 1 * limits.MIB
"""The most that a sample's text may hold."""


class FileFact(msgspec.Struct, frozen=True):
    """One file as it was read: the packer checks that it still is."""

    ext: str
    path: str
    size: int
    modified_ns: int
    xxh3: int


class Described(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """The facts of a sample. `fields` is a JSON object as text."""

    files: tuple[FileFact, ...]
    duration: float
    video: VideoInfo | None
    audio: AudioInfo | None
    text: str | None
    fields: str
    notes: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Why a sample cannot be packed; `code` is that of a Millrace error."""

    path: str
    code: str
    reason: str


Request = list[tuple[str, str]]
"""(extension, path) of the files of one sample."""
Answer = Described | Failure


def _encode_other(value: object) -> str:
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    raise NotImplementedError(type(value))


def _decode_other(kind: type, value: Any) -> Fraction:
    if kind is Fraction:
        return Fraction(value)
    raise NotImplementedError(kind)


encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
encode_answer = msgspec.msgpack.Encoder(enc_hook=_encode_other).encode
decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=_decode_other).decode


def as_request(files: tuple[tuple[str, Path], ...]) -> Request:
    """What is sent for a group's files."""
    return [(ext, str(path)) for ext, path in files]
