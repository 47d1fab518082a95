"""What one sample of a dataset is: where its bytes lie and what its media holds.

Purpose: the in-memory form of one row of the Parquet index, shared by those who write it (`pack`) and those who read it
(`Dataset`, the loaders).
Invariants: samples are numbered 0 … N-1 in the order (shard, offset of the first member), so a sample's number is a pure
function of the dataset version. All times are presentation time stamps in units of the stream's `time_base`; frame indices
count frames in presentation order. `VideoInfo` describes the one video stream that loaders decode: `stream` is its index
in the container. None of these can be part of a cycle, so the garbage collector is spared them (`gc=False`): loaders
hold thousands.
Failure behaviour: none here; whoever builds these from stored bytes checks them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec


class Pieces(msgspec.Struct, frozen=True, gc=False):
    """What a part of a long file is checked by, so that it can be read without the rest: XXH3-64 of each `size` bytes of the file
    (the last piece may be shorter), little-endian, 8 bytes each, in `digests`. `head` are runs (first piece, how many), in order,
    of what opening the file and finding a key frame in it reads, wherever in it decoding begins; a hint. Of MP3, which does not
    say where in it an instant is, `marks` do: (at which byte a frame begins, the samples before it), about one a piece."""

    size: int
    digests: bytes
    head: tuple[tuple[int, int], ...] = ()
    marks: tuple[tuple[int, int], ...] = ()


class Member(msgspec.Struct, frozen=True, gc=False):
    """One file of a sample inside the shard: payload bytes [offset, offset + length), XXH3-64 of the payload. Long files have
    `pieces`; those of datasets from before have none."""

    ext: str
    offset: int
    length: int
    xxh3: int
    pieces: Pieces | None = None


class KeyFrame(msgspec.Struct, frozen=True, gc=False):
    """A frame that decoding can start from: its time stamp, its index in presentation order, and at which byte of the file its
    packet lies (-1: not known); the last is a hint."""

    pts: int
    index: int
    at: int = -1


class Color(msgspec.Struct, frozen=True, gc=False):
    """How a stream's numbers mean colours, in libav's names, such as "bt709" and "tv"; "unknown" where the file says nothing."""

    space: str
    range: str
    primaries: str
    transfer: str


class VideoInfo(msgspec.Struct, frozen=True, gc=False):
    """One video stream as probed. `width` and `height` in pixels before rotation; `rotation` is 0, 90, 180 or 270 clockwise."""

    ext: str
    stream: int
    codec: str
    width: int
    height: int
    fps: Fraction
    frames: int
    time_base: Fraction
    start_pts: int
    duration_pts: int
    pixel_format: str
    rotation: int
    key_frames: tuple[KeyFrame, ...]
    color: Color | None = None


class SoundMark(msgspec.Struct, frozen=True, gc=False):
    """Where one packet of sound lies, as libav finds it: at which byte of the file, and its time stamp."""

    at: int
    pts: int


class AudioInfo(msgspec.Struct, frozen=True, gc=False):
    """One audio stream as probed. `samples` counts per channel, at `sample_rate` Hz.

    `start_pts` is the time stamp of the first sample, in units of `time_base` (None: the index is older and does not say).
    `marks` are some packets, in order, against which other ways of finding packets are checked; a stream that does not decode
    without an error has none.
    """

    ext: str
    stream: int
    codec: str
    sample_rate: int
    channels: int
    samples: int
    time_base: Fraction | None = None
    start_pts: int = 0
    marks: tuple[SoundMark, ...] = ()

    @property
    def start(self) -> Fraction | None:
        """When the first sample sounds, in seconds of the file's own time line; None if the index does not say."""
        return None if self.time_base is None else self.start_pts * self.time_base


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One sample. `shard` is the object key of its tar in the dataset's store; `duration` in seconds, 0.0 without media."""

    id: int
    key: str
    shard: str
    members: tuple[Member, ...]
    duration: float
    video: VideoInfo | None = None
    audio: AudioInfo | None = None
    text: str | None = None
    fields: Mapping[str, object] = {}

    def member(self, ext: str) -> Member:
        """The member with this extension, or KeyError."""
        for member in self.members:
            if member.ext == ext:
                return member
        raise KeyError(ext)


class Files(msgspec.Struct, frozen=True, gc=False):
    """Where files of one sample lie, and nothing else of it: all that a reader of bytes needs, which reads thousands a second."""

    shard: str
    each: Sequence[Member]

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum([member.length for member in self.each])
