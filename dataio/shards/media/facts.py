"""What a probe worker is asked and what it answers.

Purpose: the messages between the packer and its worker processes. The packer needs only these, so it never loads libav.
Invariant: msgpack with checked types, never pickle: a process that reads untrusted media must not be trusted with more.
Failure behaviour: a malformed answer raises `msgspec.MsgspecError`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.shards.contract import AudioInfo, Pieces, VideoInfo

TEXT_BYTES = 1 * limits.MIB
"""The most that a sample's text may hold."""


class FileFact(msgspec.Struct, frozen=True):
    """One file as it was read: the packer checks that it still is."""

    ext: str
    path: str
    size: int
    modified_ns: int
    xxh3: int
    pieces: Pieces | None = None


class Described(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """The facts of a sample. `fields` is a JSON object as text."""

    files: tuple[FileFact, ...]
    duration: float
    video: VideoInfo | None
    audio: AudioInfo | None
    text: str | None
    fields: str
    notes: tuple[str, ...]


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """One sample made of a group's files: `suffix` is added to the group's key."""

    suffix: str
    described: Described


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """What became of a group: one sample, or several where it was split."""

    clips: tuple[Clip, ...]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Why a sample cannot be packed; `code` is that of a Headrace error. `ours`: not for what is in its files."""

    path: str
    code: str
    reason: str
    ours: bool = False


Request = list[tuple[str, str]]
"""(extension, path) of the files of one sample."""


class Span(msgspec.Struct, frozen=True):
    """A file, or where it lies inside an archive: `length` bytes from `offset`; a length of -1 is the whole file."""

    ext: str
    path: str
    offset: int = 0
    length: int = -1

    @property
    def named(self) -> str:
        """As people are told."""
        return self.path if self.length < 0 else f"{self.path}: member .{self.ext} at offset {self.offset}"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to files with video before they are packed. Sound alone is left as it is.

    `codec` re-encodes the pictures ("h264"), with a key frame every `gop` frames and at most `height` rows (None: as they
    are). `container` copies the streams into another container ("mp4", "mkv", "webm"). `faststart` puts the index of an MP4
    in front of its data. `split` cuts into clips of at least so many seconds, at key frames.
    """

    codec: str | None = None
    gop: int = 32
    height: int | None = None
    container: str | None = None
    faststart: bool = False
    split: float | None = None

    @property
    def changes(self) -> bool:
        """Whether any file would be written anew."""
        return self.codec is not None or self.container is not None or self.faststart or self.split is not None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked: make samples of the files of the group `key`, with new files in the folder `scratch`.

    `caption` becomes the text of a group without a `.txt`; `fields`, a JSON object, are added to those of its `.json`.
    """

    key: str
    files: tuple[Span, ...]
    recipe: Recipe = Recipe()
    scratch: str = ""
    caption: str | None = None
    fields: str | None = None


Answer = Described | Failure
Outcome = Prepared | Failure


def encode_other(value: object) -> str:
    """msgspec's `enc_hook` for what index rows hold."""
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    raise NotImplementedError(type(value))


def decode_other(kind: type, value: Any) -> object:
    """msgspec's `dec_hook` for what index rows hold."""
    if kind is Fraction:
        return Fraction(value)
    if kind is object:
        return value
    raise NotImplementedError(kind)


encode_task = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
encode_outcome = msgspec.msgpack.Encoder(enc_hook=encode_other).encode
decode_outcome = msgspec.msgpack.Decoder(Outcome, dec_hook=decode_other).decode
