"""The description of one sample: the positions of its files and the properties of its media.

Purpose: these classes are the in-memory form of one row of the index. Writers (`pack`) and readers (`Dataset`, the
loaders) share them.
Invariants:

* Samples are numbered 0 … N-1 in the order (shard, offset of the first member). So a sample's number is a pure function
  of the dataset version.
* All times are presentation timestamps in units of the stream's `time_base`. Frame indices count frames in presentation
  order.
* `VideoInfo` describes one video stream of a file. `stream` is its index in the container.
* Objects of these classes cannot be part of a reference cycle, so the garbage collector does not track them
  (`gc=False`). Loaders hold thousands of them.

Failure behaviour: none. Code that builds these objects from stored bytes checks the bytes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec


class Pieces(msgspec.Struct, frozen=True, gc=False):
    """Digests of the pieces of a long file. With them, a reader can check a range of the file without the rest.

    * `size`: bytes of each piece. The last piece may be shorter.
    * `digests`: the XXH3-64 of each piece, little-endian, 8 bytes each.
    * `head`: runs (first piece, count), in order, of the pieces that a reader needs to open the file and find any key
      frame. This is a hint.
    * `marks`: byte positions for seeking in MP3, which has no index of its own. Each mark is (offset of a frame in
      bytes, number of audio samples before it). There is about one mark for each piece.
    """

    size: int
    digests: bytes
    head: tuple[tuple[int, int], ...] = ()
    marks: tuple[tuple[int, int], ...] = ()


class Member(msgspec.Struct, frozen=True, gc=False):
    """One file of a sample.

    Its contents are the bytes [offset, offset + length) of the shard. `xxh3` is their XXH3-64. Long files have
    `pieces`, except in older datasets.
    """

    ext: str
    offset: int
    length: int
    xxh3: int
    pieces: Pieces | None = None


class KeyFrame(msgspec.Struct, frozen=True, gc=False):
    """A frame from which decoding can start: its timestamp and its index in presentation order.

    `at` is the offset of its packet in the file, in bytes (-1: unknown). It is a hint.
    """

    pts: int
    index: int
    at: int = -1


class Color(msgspec.Struct, frozen=True, gc=False):
    """The color properties of a stream, in libav's names such as "bt709" and "tv".

    A property that the file does not give is "unknown".
    """

    space: str
    range: str
    primaries: str
    transfer: str


class VideoInfo(msgspec.Struct, frozen=True, gc=False):
    """The properties of one video stream.

    * `ext`: the extension of the sample's file that holds the stream. `stream` is its index in that file.
    * `width`, `height`: in pixels, before rotation.
    * `fps`: the average frame rate, in frames per second. `frames` is the number of frames.
    * `start_pts`, `duration_pts`: in units of `time_base`, which is in seconds.
    * `rotation`: 0, 90, 180 or 270 degrees clockwise.
    * `origin_pts`: the time stamp at which the clock of the sample shows 0. It is 0 for a file, so the clock is the
      file's own time line.

    A *window* is a part of a longer file that begins at a key frame. Its `start_pts`, `duration_pts`, `frames` and the
    numbers of its key frames are those of the part. Its `key_frames` end with the first key frame after the part, whose
    number is `frames`, if the file has one.
    """

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
    origin_pts: int = 0

    @property
    def format(self) -> str:
        """The format of the file by its name: "mp4" for `cam1.mp4`."""
        return self.ext.rpartition(".")[2]

    @property
    def is_window(self) -> bool:
        """Whether the stream may be a part of a longer file."""
        return self.origin_pts != 0 or any(key.index >= self.frames for key in self.key_frames[-1:])

    def seconds(self, pts: int) -> Fraction:
        """Return what the clock of the sample shows at this time stamp, in seconds."""
        return (pts - self.origin_pts) * self.time_base


class AudioMark(msgspec.Struct, frozen=True, gc=False):
    """The offset of one audio packet in the file as libav gives it, in bytes, and the packet's timestamp."""

    at: int
    pts: int


class AudioInfo(msgspec.Struct, frozen=True, gc=False):
    """The properties of one audio stream. `samples` is the number of samples per channel, at `sample_rate` Hz.

    `start_pts` is the timestamp of the first sample, in units of `time_base`. Older indexes do not record it, and
    `time_base` is then None. `marks` are some packets, in order. Readers check other ways of finding packets against
    them. A stream has no marks if its decoder reports errors while the index is made.
    """

    ext: str
    stream: int
    codec: str
    sample_rate: int
    channels: int
    samples: int
    time_base: Fraction | None = None
    start_pts: int = 0
    marks: tuple[AudioMark, ...] = ()

    @property
    def start(self) -> Fraction | None:
        """The time of the first sample, in seconds on the file's own timeline. None if the index does not record it."""
        return None if self.time_base is None else self.start_pts * self.time_base


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One sample of a dataset.

    * `id`: its number in the version or view, from 0.
    * `key`: its name, which is unique in the version.
    * `shard`: the object key of its tar in the dataset's store.
    * `members`: its files, ordered by their offsets in the shard.
    * `duration`: in seconds, 0.0 without media.
    * `video`, `audio`: the streams that loaders decode, or None.
    * `videos`: the other videos of the sample, in the order of their extensions. Only the pages of the index have them.
    * `text`: its caption.
    * `fields`: the promoted fields of its JSON, by name. These are the top-level values that the index stores.
    """

    id: int
    key: str
    shard: str
    members: tuple[Member, ...]
    duration: float
    video: VideoInfo | None = None
    audio: AudioInfo | None = None
    text: str | None = None
    fields: Mapping[str, object] = {}
    videos: tuple[VideoInfo, ...] = ()

    def video_of(self, ext: str | None) -> VideoInfo | None:
        """Return the video in the file with this extension, or None. Without an extension, return `video`."""
        if ext is None or (self.video is not None and self.video.ext == ext):
            return self.video
        return next((one for one in self.videos if one.ext == ext), None)

    def member(self, ext: str) -> Member:
        """Return the member with this extension, or raise KeyError."""
        for member in self.members:
            if member.ext == ext:
                return member
        raise KeyError(ext)


class Files(msgspec.Struct, frozen=True, gc=False):
    """The positions of one sample's files, for readers that need only bytes and read thousands of samples a second."""

    shard: str
    members: Sequence[Member]

    @property
    def size(self) -> int:
        """The total bytes of the files."""
        return sum([member.length for member in self.members])
