"""Copies streams into another container, whole or cut into clips, without re-encoding.

Invariants:

* The video and the audio that loaders use are kept. Every packet of them is in exactly one clip, byte for byte.
* A cut is made only at a key frame. All packets before it in the file are shown before it, and all packets after it
  are shown later. Each clip therefore decodes to exactly the frames that it had.
* The pictures of each clip begin at time 0. Its audio is the audio that begins within it.
* At most `_OPEN` clips are open at once.
* Files in containers that loaders do not read (`container.CONVERTED_EXTENSIONS`) begin at time 0 after the copy. Some
  of these containers say too little for a correct copy. All pictures of the source and the copy are therefore decoded
  and compared.

Failure behaviour: packets without times (AVI), codecs that the container cannot hold, and a copy that differs raise
`UnsupportedError`. A file that cannot be demuxed to its end, that has damaged packets, or whose audio and pictures lie
too far from each other raises `CorruptionError`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, zip_longest
from typing import Any

import av.error
import numpy as np

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.media import probe
from headrace.dataio.shards.media.container import is_converted
from headrace.dataio.shards.media.encode import open_output, seconds, start_of

_OPEN = 64
_NEAR = 0.002
"""The seconds by which a copy's times may differ. Some containers store milliseconds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file written, and the part of the source that it shows, in seconds of the source's time."""

    path: str
    start: float
    end: float


def remux(source: str, stem: str, ext: str, *, faststart: bool, split: float | None) -> list[Piece]:
    """Copy the file at `source` to `<stem>-0000.<ext>`.

    With `split`, cut it into this and further files of at least so many seconds each.
    """
    other = is_converted(source)
    try:
        with probe._open(f"file:{source}") as container:
            cuts = _cuts(container, split, to_zero=other)
        with probe._open(f"file:{source}") as container:
            pieces = _Copy(container, cuts, stem, ext, faststart).run()
        if other:
            _compare(source, pieces)
    except av.error.FFmpegError as error:
        reason = f"its streams cannot be copied into {ext}: {error.strerror}; --transcode or another container may do"
        raise CorruptionError(reason) from error
    return pieces


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The number of each clip's first video packet, that packet's time stamp, and the end of the last clip."""

    packets: tuple[int, ...]
    times: tuple[int, ...]
    end: int


def _cuts(container: Any, split: float | None, *, to_zero: bool) -> _Cuts:
    video = probe._pick_video(container)
    begin = round(start_of(container) / video.time_base) if to_zero else 0
    times, keys, end = list[int](), list[bool](), 0
    for packet in container.demux(video):
        if not packet.size:
            continue
        if packet.pts is None or packet.dts is None:
            raise UnsupportedError("its packets have no times, so they cannot be copied; use --transcode")
        _check(packet)
        times.append(packet.pts)
        keys.append(packet.is_keyframe and not packet.is_discard)
        probe._check_frames(len(times))
        end = max(end, packet.pts + (packet.duration or 0))
    if not times:
        raise CorruptionError("the file holds no frames")
    chosen = _choose(times, keys, None if split is None else seconds(split) / video.time_base)
    starts = (min(times), *(times[i] for i in chosen[1:]))
    return _Cuts(tuple(chosen), starts if len(chosen) > 1 else (begin,), end)


def _compare(source: str, pieces: list[Piece]) -> None:
    """Raise `UnsupportedError` unless pieces and source decode to the same pictures at the same, increasing times."""
    last = float("-inf")
    copied = (one for piece in pieces for one in _pictures(piece.path, piece.start))
    for before, after in zip_longest(_pictures(source, 0.0), copied):
        same = before is not None and after is not None and np.array_equal(before[1], after[1])
        if not same or abs(before[0] - after[0]) > _NEAR or after[0] <= last:
            raise UnsupportedError("a copy of its streams would not show the same; use --transcode")
        last = after[0]


def _pictures(path: str, start: float) -> Iterator[tuple[float, Any]]:
    """Yield the time and the pixels of each picture."""
    with probe._open(f"file:{path}") as container:
        video = probe._pick_video(container)
        probe._prepare(video)
        for frame in container.decode(video):
            if frame.is_corrupt:
                raise CorruptionError(f"a picture is damaged, at time stamp {frame.pts}")
            if frame.pts is None:
                raise UnsupportedError("its pictures have no times; use --transcode")
            yield start + float(frame.pts * video.time_base), frame.to_ndarray()


def _check(packet: Any) -> None:
    if packet.is_corrupt:  # a copy would hide the damage
        raise CorruptionError(f"a packet is damaged, at time stamp {packet.pts}")


def _choose(times: list[int], keys: list[bool], least: Fraction | None) -> list[int]:
    """Return the packets at which clips begin.

    A clip begins at least `least` ticks after the clip before, and only where a cut loses nothing.
    """
    chosen = [0]
    if least is None:
        return chosen
    before = list(accumulate(times, max))
    after = list(accumulate(reversed(times), min))[::-1]
    at = max(min(times), 0)
    for i in range(1, len(times)):
        if keys[i] and times[i] - at >= least and before[i - 1] < times[i] == after[i]:
            chosen.append(i)
            at = times[i]
    return chosen


class _Copy:
    """Copies each packet to its clip in one pass over the file. It closes a clip when both streams have passed it."""

    def __init__(self, container: Any, cuts: _Cuts, stem: str, ext: str, faststart: bool) -> None:
        self._container, self._cuts, self._stem, self._ext, self._faststart = container, cuts, stem, ext, faststart
        self._video, self._audio = probe._pick_video(container), probe._pick_audio(container)
        self._open: dict[int, tuple[Any, dict[int, Any]]] = {}
        self._seconds = [time * self._video.time_base for time in cuts.times]

    def run(self) -> list[Piece]:
        streams = [s for s in (self._video, self._audio) if s is not None]
        reached = dict.fromkeys((s.index for s in streams), 0)
        number = 0
        try:
            for packet in self._container.demux(streams):
                if not packet.size or packet.dts is None:
                    continue
                _check(packet)
                index = packet.stream_index
                clip = self._clip(packet, number)
                number += index == self._video.index
                reached[index] = max(reached[index], clip)
                self._mux(packet, clip)
                for done in [c for c in self._open if c < min(reached.values())]:
                    self._open.pop(done)[0].close()
        finally:
            for out, _ in self._open.values():
                out.close()
        return [self._piece(clip) for clip in range(len(self._cuts.packets))]

    def _clip(self, packet: Any, number: int) -> int:
        if packet.stream_index == self._video.index:
            return bisect_right(self._cuts.packets, number) - 1
        seconds = (packet.pts if packet.pts is not None else packet.dts) * packet.time_base
        return max(0, bisect_right(self._seconds, seconds) - 1)

    def _mux(self, packet: Any, clip: int) -> None:
        if clip not in self._open:
            self._open[clip] = self._begin(clip)
        out, streams = self._open[clip]
        begin = round(self._seconds[clip] / packet.time_base)
        packet.pts, packet.dts = (packet.pts if packet.pts is not None else packet.dts) - begin, packet.dts - begin
        packet.stream = streams[packet.stream_index]
        out.mux(packet)

    def _begin(self, clip: int) -> tuple[Any, dict[int, Any]]:
        if len(self._open) >= _OPEN:
            raise CorruptionError("sound and pictures lie too far apart in the file for it to be split")
        out = open_output(self._path(clip), self._ext, faststart=self._faststart)
        streams = {}
        for stream in (self._video, self._audio):
            if stream is not None:
                try:
                    streams[stream.index] = out.add_stream_from_template(stream, opaque=True)
                except ValueError as error:
                    name = stream.codec_context.name
                    raise UnsupportedError(
                        f"{self._ext} cannot hold {name}; use --transcode or another container"
                    ) from error
        return out, streams

    def _path(self, clip: int) -> str:
        return f"{self._stem}-{clip:04}.{self._ext}"

    def _piece(self, clip: int) -> Piece:
        ends = [*self._seconds[1:], self._cuts.end * self._video.time_base]
        return Piece(self._path(clip), float(self._seconds[clip]), float(ends[clip]))
