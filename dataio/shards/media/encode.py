"""Re-encodes the video of one file, on one thread and deterministically.

Invariants:

* The output is upright, with square pixels, 8 bits per value, and an even width and height. A video is never scaled up
  to a larger height.
* Frames keep their timestamps. A missing timestamp, or one that does not increase, is replaced.
* There is a key frame every `gop` frames. With `split`, the first frame of each clip is also a key frame. No other
  frame is.
* Audio is copied if the container can hold it. Otherwise it is encoded as AAC. Audio packets of Matroska that begin
  before time zero are left out, as in the index.
* The same file, recipe and library versions give the same bytes: one thread, no dates, no random identifiers.

Failure behaviour: a packet that cannot be decoded raises `CorruptionError`, since re-encoding would hide the damage.
A file that cannot be encoded raises `UnsupportedError`. The worker pool handles hangs and crashes of libav.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error
from av.audio.resampler import AudioResampler
from av.filter import Graph
from av.video.frame import PictureType

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.media.container import demuxed, lies_before, needs_conversion
from headrace.dataio.shards.media.messages import Recipe
from headrace.dataio.shards.media.streams import (
    check_frame_count,
    check_video,
    configure_decoder,
    open_container,
    pick_audio,
    pick_video,
    zero_offset,
)

FORMATS = {"mp4": "mp4", "m4v": "mp4", "mov": "mov", "mkv": "matroska", "webm": "webm"}
"""The muxer for each extension that can be written."""
CODECS = {"h264": "libx264"}
_MAX_HELD_PACKETS = 20_000
_X264_OPTIONS = {"crf": "20", "preset": "medium", "forced-idr": "1"}
_ROTATIONS = {90: "transpose=clock,", 180: "hflip,vflip,", 270: "transpose=cclock,"}


def open_output(path: str, ext: str, *, faststart: bool) -> Any:
    """Open a container for writing, with options that make its bytes reproducible."""
    options = {"fflags": "+bitexact"}
    if faststart and FORMATS[ext] in ("mp4", "mov"):
        options["movflags"] = "+faststart"
    return av.open(path, "w", format=FORMATS[ext], options=options)


def seconds(time: float) -> Fraction:
    """Return the time as the decimal number that the user wrote.

    The float 0.2 is slightly larger than 1/5, and so longer than six frames at 30 frames per second.
    """
    return Fraction(time).limit_denominator(1_000_000)


def start_of(container: Any) -> Fraction:
    """Return the start time of the container in seconds. It is negative if timestamps wrap around later in the file."""
    return Fraction(container.start_time or 0, 1_000_000)


def encode(source: str, target: str, ext: str, recipe: Recipe) -> None:
    """Re-encode the file at `source` to `target`. If the recipe has `split`, each clip begins at a key frame."""
    try:
        _encode(source, target, ext, recipe)
    except av.error.FFmpegError as error:  # from the output container: it cannot hold this kind of audio
        raise UnsupportedError(f"cannot be encoded into {ext}: {error.strerror}; try --remux mkv") from error


def _encode(source: str, target: str, ext: str, recipe: Recipe) -> None:
    with (
        open_container(f"file:{source}") as container,
        open_output(target, ext, faststart=recipe.faststart) as out,
    ):
        video, audio = pick_video(container), pick_audio(container)
        check_video(video)
        configure_decoder(video)
        frames = _FrameSource(video, recipe)
        picture = out.add_stream(
            CODECS[recipe.codec or "h264"], rate=frames.rate, options=_X264_OPTIONS | frames.params
        )
        audio_writer = None if audio is None else _audio_writer(out, audio)
        zero = zero_offset(f"file:{source}", container, audio)
        start_time = start_of(container) if needs_conversion(source) else Fraction(0)
        early_audio: list[Any] = []  # audio before the first frame: the header needs the frame's size
        with demuxed(container, *(s for s in (video, audio) if s is not None)) as packets:
            for packet in packets:
                if packet.is_corrupt:
                    raise CorruptionError(f"a packet is damaged, at time stamp {packet.pts}")
                _shift_times(packet, start_time)
                if packet.stream.index == video.index:
                    for frame in frames.frames_of(packet, picture):
                        out.mux(picture.encode(frame))
                elif audio_writer is not None and not lies_before(packet, zero):
                    early_audio += audio_writer.feed(packet)
                if frames.count:
                    out.mux(early_audio)
                    early_audio = []
                elif len(early_audio) > _MAX_HELD_PACKETS:
                    raise CorruptionError("its video begins too long after its audio")
        if not frames.count:
            raise CorruptionError("no frame of the video stream can be decoded")
        out.mux(picture.encode(None))
        if audio_writer is not None:
            out.mux(audio_writer.finish())


def _shift_times(packet: Any, start_time: Fraction) -> None:
    """Subtract `start_time` from the packet's timestamps."""
    if start_time and packet.size:
        ticks = round(start_time / packet.time_base)
        packet.pts = None if packet.pts is None else packet.pts - ticks
        packet.dts = None if packet.dts is None else packet.dts - ticks


class _FrameSource:
    """Decodes packets, and rotates and scales the frames."""

    def __init__(self, video: Any, recipe: Recipe) -> None:
        self.count = 0
        self.rate = Fraction(video.average_rate or video.guessed_rate or 30).limit_denominator(100_000)
        self.params = {"x264-params": f"keyint={recipe.gop}:min-keyint={recipe.gop}:scenecut=0:open-gop=0"}
        self._video, self._recipe = video, recipe
        self._graph: Any = None
        self._shape: tuple[object, ...] = ()
        self._size: tuple[int, int] = (0, 0)
        self._last: int | None = None
        self._next_cut = Fraction(0)

    def frames_of(self, packet: Any, picture: Any) -> Iterator[Any]:
        try:
            decoded = packet.decode()
        except av.error.FFmpegError as error:
            raise CorruptionError(
                f"a packet cannot be decoded, at time stamp {packet.pts}: {error.strerror}"
            ) from error
        for frame in decoded:
            if frame.is_corrupt:
                raise CorruptionError(f"a picture is damaged, at time stamp {frame.pts}")
            self.count += 1
            check_frame_count(self.count)
            yield self._prepared(frame, picture)

    def _prepared(self, frame: Any, picture: Any) -> Any:
        time = frame.pts if frame.pts is not None else frame.dts
        step = max(1, round(1 / (self.rate * self._video.time_base)))
        if time is None or (self._last is not None and time <= self._last):
            time = 0 if self._last is None else self._last + step
        is_first = self._last is None
        self._last = frame.pts = time
        out = self._filtered(frame)
        out.pts, out.time_base = time, self._video.time_base
        out.pict_type = PictureType.I if self._at_cut(time) else PictureType.NONE
        if is_first:
            _set_up(picture, out, self._video.time_base)
        return out

    def _at_cut(self, time: int) -> bool:
        frame_time = time * self._video.time_base
        if self._recipe.split is None or (self.count > 1 and frame_time < self._next_cut):
            return False
        self._next_cut = frame_time + seconds(self._recipe.split)
        return True

    def _filtered(self, frame: Any) -> Any:
        shape = (frame.width, frame.height, frame.format.name)
        if shape != self._shape:
            self._graph, self._shape = self._build(frame), shape
        self._graph.push(frame)
        return self._graph.pull()

    def _build(self, frame: Any) -> Any:
        turn = round(-frame.rotation / 90) % 4 * 90
        if not self._size[0]:
            self._size = self._target_size(frame, turn)
        graph = Graph()
        filters = f"{_ROTATIONS.get(turn, '')}scale={self._size[0]}:{self._size[1]}:flags=bicubic+accurate_rnd+bitexact"
        source = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format, time_base=self._video.time_base
        )
        last = source
        for text in [*filters.split(","), "setsar=1", "format=pix_fmts=yuv420p"]:
            name, _, arguments = text.partition("=")
            node = graph.add(name, arguments) if arguments else graph.add(name)
            last.link_to(node)
            last = node
        last.link_to(graph.add("buffersink"))
        graph.configure()
        return graph

    def _target_size(self, frame: Any, turn: int) -> tuple[int, int]:
        aspect = Fraction(self._video.codec_context.sample_aspect_ratio or 1) or Fraction(1)
        width, height = Fraction(frame.width) * aspect, Fraction(frame.height)
        if turn in (90, 270):
            width, height = height, width
        rows = min(height, Fraction(self._recipe.height or height))
        columns = width * rows / height
        if columns * rows > limits.FRAME_PIXELS:
            raise UnsupportedError("its pixels are so far from square that the picture would be too large")
        return max(2, round(columns / 2) * 2), max(2, round(rows / 2) * 2)


def _set_up(picture: Any, frame: Any, time_base: Fraction) -> None:
    context = picture.codec_context
    context.width, context.height, context.pix_fmt = frame.width, frame.height, "yuv420p"
    context.time_base, context.thread_count = time_base, 1
    context.color_range, context.colorspace = frame.color_range, frame.colorspace
    context.color_primaries, context.color_trc = frame.color_primaries, frame.color_trc


def _audio_writer(out: Any, audio: Any) -> _CopiedAudio | _AacAudio:
    try:
        return _CopiedAudio(out.add_stream_from_template(audio, opaque=True))
    except ValueError:
        return _AacAudio(out, audio)


class _CopiedAudio:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def feed(self, packet: Any) -> list[Any]:
        if packet.dts is None:
            return []
        packet.stream = self._stream
        return [packet]

    def finish(self) -> list[Any]:
        return []


class _AacAudio:
    """Encodes audio as AAC, for a container that cannot hold the original codec."""

    def __init__(self, out: Any, audio: Any) -> None:
        audio.codec_context.thread_count = 1
        rate, layout = audio.codec_context.sample_rate, audio.codec_context.layout.name
        self._stream = out.add_stream("aac", rate=rate, layout=layout, options={"b": "128k"})
        self._stream.codec_context.thread_count = 1
        self._to = AudioResampler(format="fltp", layout=layout, rate=rate)

    def feed(self, packet: Any) -> list[Any]:
        try:
            frames = packet.decode()
        except av.error.FFmpegError as error:
            raise CorruptionError(f"an audio packet cannot be decoded: {error.strerror}") from error
        return [
            packet for frame in frames for piece in self._to.resample(frame) for packet in self._stream.encode(piece)
        ]

    def finish(self) -> list[Any]:
        packets = [packet for piece in self._to.resample(None) for packet in self._stream.encode(piece)]
        return [*packets, *self._stream.encode(None)]
