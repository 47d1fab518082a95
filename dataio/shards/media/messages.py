"""The messages between the packer and its probe workers, and the user's recipe for converting videos.

Purpose: the packer imports only these messages, so it never loads libav.

Invariants:

* Messages are msgpack with checked types, never pickle. A process that reads untrusted media must not be able to run
  code in the packer.
* A recipe that passes `check_recipe` can be tried on any file.

Failure behaviour: a malformed answer raises `msgspec.MsgspecError`. `check_recipe` and `check_text_field` raise a
`UsageError` that names the option.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.sample import AudioInfo, Pieces, VideoInfo

TEXT_BYTES = 1 * limits.MIB
"""The most bytes of a sample's text."""
TEXT_FIELD = "caption"
"""The field of a sample's JSON that holds its text, if the user names no other."""


class FileInfo(msgspec.Struct, frozen=True):
    """One file as the worker read it. The packer checks that the file has not changed since then."""

    ext: str
    path: str
    size: int
    modified_ns: int
    xxh3: int
    pieces: Pieces | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """Everything that the index stores about a sample.

    `videos` are its further videos. `fields` is a JSON object as text.
    """

    files: tuple[FileInfo, ...]
    duration: float
    video: VideoInfo | None
    audio: AudioInfo | None
    text: str | None
    fields: str
    notes: tuple[str, ...]
    videos: tuple[VideoInfo, ...] = ()


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """One sample made from a group's files. Its key is the group's key plus `suffix`."""

    suffix: str
    described: Description


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """The result of preparing a group: one sample, or several if it was split."""

    clips: tuple[Clip, ...]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The reason why a sample cannot be packed.

    `code` is the code of a Headrace error. `scratch_full` means that the scratch folder is full, and the file is not at
    fault.
    """

    path: str
    code: str
    reason: str
    scratch_full: bool = False


MemberFiles = list[tuple[str, str]]
"""The extension and the path of each file of one sample."""


class Span(msgspec.Struct, frozen=True):
    """A file, or `length` bytes from `offset` in an archive. A length of -1 means the whole file."""

    ext: str
    path: str
    offset: int = 0
    length: int = -1

    @property
    def display_name(self) -> str:
        """The name in messages to the user."""
        return self.path if self.length < 0 else f"{self.path}: member .{self.ext} at offset {self.offset}"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to change files with video before they are packed. Files with only audio stay as they are.

    Args:
        codec: re-encode the pictures with this codec ("h264"). None keeps the codec.
        gop: with `codec`, the number of frames from one key frame to the next. The default is 32.
        height: with `codec`, the height to scale down to, in pixels. None keeps the size.
        container: copy the streams into another container ("mp4", "mkv", "webm", "mov").
        faststart: put the index of an MP4 before its data.
        split: cut the video at key frames into clips of at least this many seconds. None does not cut.

    Example:
        >>> Recipe(codec="h264", height=480).changes
        True
    """

    codec: str | None = None
    gop: int = 32
    height: int | None = None
    container: str | None = None
    faststart: bool = False
    split: float | None = None

    @property
    def changes(self) -> bool:
        """Whether the recipe writes new files."""
        return self.codec is not None or self.container is not None or self.faststart or self.split is not None


class PrepareTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a worker: make samples from the files of the group `key`, with new files in the folder `scratch`.

    `caption` becomes the text of a group without a `.txt`. `fields`, a JSON object, is merged into its `.json`.
    `text_field` is the field of the JSON that holds the text of a sample without a `.txt`.
    """

    key: str
    files: tuple[Span, ...]
    recipe: Recipe = Recipe()
    scratch: str = ""
    caption: str | None = None
    fields: str | None = None
    text_field: str | None = None


DescribeResult = Description | Failure
PrepareResult = Prepared | Failure


def enc_hook(value: object) -> str:
    """msgspec's `enc_hook` for the types in index rows."""
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    raise NotImplementedError(type(value))


def dec_hook(kind: type, value: Any) -> object:
    """msgspec's `dec_hook` for the types in index rows."""
    if kind is Fraction:
        return Fraction(value)
    if kind is object:
        return value
    raise NotImplementedError(kind)


encode_task = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(PrepareTask).decode
encode_outcome = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
decode_outcome = msgspec.msgpack.Decoder(PrepareResult, dec_hook=dec_hook).decode


# --- checking the settings of a user


def check_text_field(name: str | None) -> str | None:
    """Check the name of the JSON field with the text, and return it."""
    if name is not None and not (isinstance(name, str) and name and name.isprintable()):
        raise UsageError(
            f"text_field cannot be {name!r:.200}",
            hint='give the name of a field of the samples\' JSON, such as "title"',
        )
    return name


CODECS = ("h264",)
CONTAINERS = ("mp4", "mkv", "webm", "mov")


def check_recipe(recipe: Recipe) -> Recipe:
    """Check the recipe and return it."""
    wrong = {
        f"the codec must be one of {', '.join(CODECS)}": recipe.codec is not None and recipe.codec not in CODECS,
        f"the container must be one of {', '.join(CONTAINERS)}": recipe.container not in (None, *CONTAINERS),
        "WebM cannot hold H.264": recipe.codec == "h264" and recipe.container == "webm",
        "gop must be between 1 and 10,000 frames": not 1 <= recipe.gop <= 10_000,
        "height must be between 16 and 8,192 rows": recipe.height is not None and not 16 <= recipe.height <= 8192,
        "height needs a codec to encode with (--transcode)": recipe.height is not None and recipe.codec is None,
        "split must be at least 0.1 s": recipe.split is not None
        and not (math.isfinite(recipe.split) and recipe.split >= 0.1),
    }
    for problem, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(problem, hint="see `headrace pack --help`")
    return recipe
