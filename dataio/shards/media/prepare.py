"""A worker's whole task for one group of files: unpack, convert, describe.

Invariants: the same files, recipe and library versions give the same samples. New files go only into the task's scratch
folder, which the packer makes and removes.
Failure behaviour: `Failure` names the file and the reason. One bad file rejects the whole group. If the scratch folder
is full, `Failure` says that the file is not at fault (`ours`).
"""

from __future__ import annotations

import errno
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import av.error
import numpy as np

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.media import describe, probe, text_members
from headrace.dataio.shards.media.container import (
    CONVERTED_EXTENSIONS,
    MEDIA_EXTENSIONS,
    VIDEO_EXTENSIONS,
    is_converted,
)
from headrace.dataio.shards.media.encode import FORMATS, encode, open_output, seconds, start_of
from headrace.dataio.shards.media.messages import Clip, Failure, Outcome, Prepared, Recipe, Request, Span, Task
from headrace.dataio.shards.media.text_members import Sample, with_fields

_READ = 4 * limits.MIB
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def prepare(task: Task) -> Outcome:
    """Make the samples of one group of files."""
    spans: dict[str, Span] = {}
    at = task.files[0]
    try:
        if task.scratch:
            os.makedirs(task.scratch, exist_ok=True)
        for at in task.files:
            spans[_unpacked(at, task.scratch)] = at
        files = _with_manifest([(span.ext, path) for path, span in spans.items()], task)
        at = task.files[0]
        made = [Sample("", files)]
        if task.recipe.changes:
            from headrace.dataio.shards.media.prepare import convert

            made = convert(files, task)
    except HeadraceError as error:
        return Failure(at.named, error.code, error.message)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return Failure(at.named, CapacityError.code, error.strerror or str(error), ours=True)
        return Failure(at.named, CorruptionError.code, f"cannot be read or converted: {error.strerror or error}")
    except MemoryError:
        return Failure(at.named, CapacityError.code, "converting it takes too much memory")
    clips = []
    for sample in made:
        answer = describe.describe(sample.files)
        if isinstance(answer, Failure):
            return Failure(spans.get(answer.path, at).named, answer.code, answer.reason)
        clips.append(Clip(suffix=sample.suffix, described=answer))
    return Prepared(tuple(clips))


def _unpacked(span: Span, scratch: str) -> str:
    """Return the path of a file with the span's bytes. A span in an archive is copied to the scratch folder."""
    if span.length < 0:
        return span.path
    path = os.path.join(scratch, f"{span.offset}.{span.ext.replace('/', '_')}")
    left = span.length
    with open(span.path, "rb") as source, open(path, "wb") as target:
        source.seek(span.offset)
        while left:
            piece = source.read(min(left, _READ))
            if not piece:
                raise CorruptionError("ends inside a member: it changed while it was being packed")
            target.write(piece)
            left -= len(piece)
    return path


def _with_manifest(files: Request, task: Task) -> Request:
    """Return the files with the manifest's caption and fields added."""
    there = dict(files)
    if task.caption is not None and "txt" not in there:
        there["txt"] = os.path.join(task.scratch, "manifest.txt")
        Path(there["txt"]).write_text(task.caption, "utf-8")
    if task.fields is not None:
        there["json"] = with_fields(there.get("json"), json.loads(task.fields), task.scratch)
    return sorted(there.items())


# --- recipes

_PICTURES = VIDEO_EXTENSIONS | CONVERTED_EXTENSIONS


def convert(files: Request, task: Task) -> list[Sample]:
    """Apply the task's recipe to `files` and return the samples. New files go into the task's scratch folder."""
    recipe = task.recipe
    media = [(ext, path) for ext, path in files if ext in MEDIA_EXTENSIONS]
    media = media or [(ext, path) for ext, path in files if ext in CONVERTED_EXTENSIONS]
    pictures = [(ext, path) for ext, path in media if ext in _PICTURES and _has_pictures(path)]
    if not pictures:
        return [Sample("", files)]
    if recipe.split is not None and len(media) > 1:
        names = ", ".join(ext for ext, _ in media)
        raise UnsupportedError(f"a sample with several media files ({names}) cannot be split")
    rest = [item for item in files if item not in pictures]
    made = [_one(ext, path, recipe, os.path.join(task.scratch, str(n))) for n, (ext, path) in enumerate(pictures)]
    if recipe.split is None:
        changed = [(ext, pieces[0].path) for ext, pieces in made]
        if len({ext for ext, _ in changed + rest}) < len(files):
            raise UnsupportedError("two of its files would become the same member")
        return [Sample("", sorted(changed + rest))]
    (ext, pieces), subtitles = made[0], dict(rest).get("vtt")
    cues = None if subtitles is None else text_members.read(subtitles)
    return [_clip(task, n, ext, piece, rest, cues) for n, piece in enumerate(pieces)]


def _has_pictures(path: str) -> bool:
    with open(path, "rb") as file:
        probe._check_file(file, os.fstat(file.fileno()).st_size)
    with probe._open(f"file:{path}") as container:
        return probe._pick_video(container) is not None


def _one(ext: str, path: str, recipe: Recipe, stem: str) -> tuple[str, list[Piece]]:
    target = recipe.container or ("mp4" if recipe.codec else ext)
    if target not in FORMATS:
        raise UnsupportedError(f"{target} files are not written; choose a container with --remux")
    if recipe.codec is not None:
        encoded = f"{stem}-encoded.{target}"
        encode(path, encoded, target, recipe)
        if recipe.split is None:
            return target, [Piece(encoded, 0.0, 0.0)]
        path = encoded
    pieces = remux(path, stem, target, faststart=recipe.faststart, split=recipe.split)
    if recipe.codec is not None:
        os.unlink(path)
    return target, pieces


def _clip(
    task: Task, number: int, ext: str, piece: Piece, rest: Request, cues: list[text_members.Cue] | None
) -> Sample:
    files = {ext: piece.path, **dict(rest)}
    name = f"{number:04}"
    if cues is not None:
        files["vtt"] = os.path.join(task.scratch, f"{name}.vtt")
        Path(files["vtt"]).write_text(
            text_members.cut(cues, round(piece.start * 1000), round(piece.end * 1000)), "utf-8"
        )
    times = {"clip_of": task.key, "clip_start": round(piece.start, 6), "clip_end": round(piece.end, 6)}
    files["json"] = with_fields(files.get("json"), times, task.scratch, name)
    return Sample(f"-{name}", sorted(files.items()))


# --- copying streams

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
