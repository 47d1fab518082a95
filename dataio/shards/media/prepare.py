"""The task of a probe worker for one group of files: unpack them, apply the recipe, and describe the samples.

Purpose: `prepare` is the entry point of a probe worker. `convert` applies a recipe: re-encode, copy into another
container, cut into clips. `remux` copies streams into another container without re-encoding.

Invariants:

* The same files, recipe and library versions give the same samples. New files go only into the task's scratch folder,
  which the packer makes and removes.
* Only files with video are changed. Files with only audio, and all other files, stay as they are.
* A sample that is split becomes the clips `-0000`, `-0001` and so on. Each clip has all other members, and its
  subtitles are cut to match. Its JSON says what it shows: `clip_of` is the key of the whole sample, and `clip_start`
  and `clip_end` are seconds in its time.
* `remux` keeps the video and the audio that loaders use. Every packet of them is in exactly one clip, byte for byte.
* A cut is made only at a packet that the container marks as a key frame, and at which decoding can begin
  (`bitstream.is_random_access`). All packets before it in the file are shown before it, and all packets after it are
  shown later. So no frame is decoded in two clips, or lost between them, and each decodes to the same pixels.
* The frames of each clip begin at time 0. A clip has the audio packets that begin within it. At most `_MAX_OPEN_CLIPS`
  clips are open at once.
* Files in containers that loaders do not read (`container.CONVERTED_EXTENSIONS`) begin at time 0 after the copy. Some
  of these containers lack information for a correct copy. All frames of the source and the copy are therefore decoded
  and compared.

Failure behaviour: `prepare` returns a `Failure`, which names the file and the reason. One bad file rejects the whole
group. If the scratch folder is full, `scratch_full` is set, and the file is not at fault. `convert` and `remux` raise:

* `UnsupportedError` for a sample that cannot be split, packets without timestamps (AVI), a codec that the container
  cannot hold, or a copy that differs from its source
* `CorruptionError` for a file that cannot be demuxed to its end, a damaged packet, or audio and video that are too far
  apart in the file
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
from typing import Any, NamedTuple

import av.error

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.shards.media import describe, text_members
from headrace.dataio.shards.media.bitstream import is_random_access, length_size
from headrace.dataio.shards.media.container import (
    CONVERTED_EXTENSIONS,
    MEDIA_EXTENSIONS,
    VIDEO_EXTENSIONS,
    demuxed,
    is_named_video,
    lies_before,
    needs_conversion,
)
from headrace.dataio.shards.media.encode import FORMATS, encode, open_output, seconds, start_of
from headrace.dataio.shards.media.messages import (
    Clip,
    Failure,
    MemberFiles,
    Prepared,
    PrepareResult,
    PrepareTask,
    Recipe,
    Span,
)
from headrace.dataio.shards.media.streams import (
    check_file,
    check_frame_count,
    configure_decoder,
    open_container,
    pick_audio,
    pick_video,
    zero_offset,
)
from headrace.dataio.shards.media.text_members import with_fields

_COPY_BYTES = 4 * limits.MIB
_SCRATCH_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class PreparedFiles(NamedTuple):
    """The files of one sample, and the suffix of its key. The sample is the whole group or one clip."""

    suffix: str
    files: MemberFiles


def prepare(task: PrepareTask) -> PrepareResult:
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
        samples = [PreparedFiles("", files)]
        if task.recipe.changes:
            samples = convert(files, task)
    except HeadraceError as error:
        return Failure(at.display_name, error.code, error.message)
    except OSError as error:
        if error.errno in _SCRATCH_FULL:
            return Failure(at.display_name, CapacityError.code, error.strerror or str(error), scratch_full=True)
        return Failure(at.display_name, CorruptionError.code, f"cannot be read or converted: {error.strerror or error}")
    except MemoryError:
        return Failure(at.display_name, CapacityError.code, "converting it takes too much memory")
    clips = []
    for sample in samples:
        answer = describe.describe(sample.files, task.text_field)
        if isinstance(answer, Failure):
            return Failure(spans.get(answer.path, at).display_name, answer.code, answer.reason)
        clips.append(Clip(suffix=sample.suffix, described=answer))
    return Prepared(tuple(clips))


def _unpacked(span: Span, scratch: str) -> str:
    """Return the path of a file with the span's bytes. A span in an archive is copied to the scratch folder."""
    if span.length < 0:
        return span.path
    path = os.path.join(scratch, f"{span.offset}.{span.ext.replace('/', '_')}")
    remaining = span.length
    with open(span.path, "rb") as source, open(path, "wb") as target:
        source.seek(span.offset)
        while remaining:
            data = source.read(min(remaining, _COPY_BYTES))
            if not data:
                raise CorruptionError("ends inside a member: it changed while it was being packed")
            target.write(data)
            remaining -= len(data)
    return path


def _with_manifest(files: MemberFiles, task: PrepareTask) -> MemberFiles:
    """Return the files with the manifest's caption and fields added."""
    by_ext = dict(files)
    if task.caption is not None and "txt" not in by_ext:
        by_ext["txt"] = os.path.join(task.scratch, "manifest.txt")
        Path(by_ext["txt"]).write_text(task.caption, "utf-8")
    if task.fields is not None:
        by_ext["json"] = with_fields(by_ext.get("json"), json.loads(task.fields), task.scratch)
    return sorted(by_ext.items())


# --- applying a recipe

_VIDEO_FILES = VIDEO_EXTENSIONS | CONVERTED_EXTENSIONS


def convert(files: MemberFiles, task: PrepareTask) -> list[PreparedFiles]:
    """Apply the task's recipe to `files` and return the samples. New files go into the task's scratch folder."""
    recipe = task.recipe
    media = [(ext, path) for ext, path in files if ext in MEDIA_EXTENSIONS]
    media = media or [(ext, path) for ext, path in files if ext in CONVERTED_EXTENSIONS]
    videos = [(ext, path) for ext, path in media if ext in _VIDEO_FILES and _has_video(path)]
    if not videos:
        return [PreparedFiles("", files)]
    together = [ext for ext, _ in media] + [ext for ext, _ in files if is_named_video(ext)]
    if recipe.split is not None and len(together) > 1:
        names = ", ".join(together)
        raise UnsupportedError(f"a sample with several media files ({names}) cannot be split")
    other_files = [item for item in files if item not in videos]
    converted = [
        _convert_file(ext, path, recipe, os.path.join(task.scratch, str(n))) for n, (ext, path) in enumerate(videos)
    ]
    if recipe.split is None:
        changed = [(ext, clip_files[0].path) for ext, clip_files in converted]
        if len({ext for ext, _ in changed + other_files}) < len(files):
            raise UnsupportedError("two of its files would become the same member")
        return [PreparedFiles("", sorted(changed + other_files))]
    (ext, clip_files), subtitles = converted[0], dict(other_files).get("vtt")
    cues = None if subtitles is None else text_members.read(subtitles)
    return [_clip_of(task, n, ext, clip_file, other_files, cues) for n, clip_file in enumerate(clip_files)]


def _has_video(path: str) -> bool:
    with open(path, "rb") as file:
        check_file(file, os.fstat(file.fileno()).st_size)
    with open_container(f"file:{path}") as container:
        return pick_video(container) is not None


def _convert_file(ext: str, path: str, recipe: Recipe, stem: str) -> tuple[str, list[ClipFile]]:
    target = recipe.container or ("mp4" if recipe.codec else ext)
    if target not in FORMATS:
        raise UnsupportedError(f"{target} files cannot be written; choose a container with --remux")
    if recipe.codec is not None:
        encoded = f"{stem}-encoded.{target}"
        encode(path, encoded, target, recipe)
        if recipe.split is None:
            return target, [ClipFile(encoded, 0.0, 0.0)]
        path = encoded
    clip_files = remux(path, stem, target, faststart=recipe.faststart, split=recipe.split)
    if recipe.codec is not None:
        os.unlink(path)
    return target, clip_files


def _clip_of(
    task: PrepareTask,
    number: int,
    ext: str,
    clip_file: ClipFile,
    other_files: MemberFiles,
    cues: list[text_members.Cue] | None,
) -> PreparedFiles:
    files = {ext: clip_file.path, **dict(other_files)}
    name = f"{number:04}"
    if cues is not None:
        files["vtt"] = os.path.join(task.scratch, f"{name}.vtt")
        Path(files["vtt"]).write_text(
            text_members.cut(cues, round(clip_file.start * 1000), round(clip_file.end * 1000)), "utf-8"
        )
    times = {"clip_of": task.key, "clip_start": round(clip_file.start, 6), "clip_end": round(clip_file.end, 6)}
    files["json"] = with_fields(files.get("json"), times, task.scratch, name)
    return PreparedFiles(f"-{name}", sorted(files.items()))


# --- copying streams

_MAX_OPEN_CLIPS = 64
_TIME_TOLERANCE = 0.002
"""The seconds by which a copy's times may differ. Some containers store milliseconds."""


@dataclass(frozen=True, slots=True)
class ClipFile:
    """One new file, and the part of the source that it shows, in seconds of the source's time."""

    path: str
    start: float
    end: float


def remux(source: str, stem: str, ext: str, *, faststart: bool, split: float | None) -> list[ClipFile]:
    """Copy the file at `source` to `<stem>-0000.<ext>`.

    With `split`, cut it into this and further files of at least `split` seconds each.
    """
    is_converted = needs_conversion(source)
    try:
        with open_container(f"file:{source}") as container:
            cuts = _find_cuts(container, split, to_zero=is_converted)
        with open_container(f"file:{source}") as container:
            zero = zero_offset(f"file:{source}", container, pick_audio(container))
            clip_files = _StreamCopier(container, cuts=cuts, stem=stem, ext=ext, faststart=faststart, zero=zero).run()
        if is_converted:
            _check_same_pictures(source, clip_files)
    except av.error.FFmpegError as error:
        reason = f"its streams cannot be copied into {ext}: {error.strerror}; try --transcode or another container"
        raise CorruptionError(reason) from error
    return clip_files


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The number of each clip's first video packet, that packet's timestamp, and the end of the last clip."""

    packets: tuple[int, ...]
    times: tuple[int, ...]
    end: int


def _find_cuts(container: Any, split: float | None, *, to_zero: bool) -> _Cuts:
    video = pick_video(container)
    begin = round(start_of(container) / video.time_base) if to_zero else 0
    times, keys, end = list[int](), list[bool](), 0
    codec = video.codec_context.codec.canonical_name
    units = length_size(codec, video.codec_context.extradata)
    with demuxed(container, video) as packets:
        for packet in packets:
            if not packet.size:
                continue
            if packet.pts is None or packet.dts is None:
                raise UnsupportedError("its packets have no times, so they cannot be copied; use --transcode")
            _check_packet(packet)
            times.append(packet.pts)
            marked = packet.is_keyframe and not packet.is_discard
            keys.append(marked and is_random_access(codec, memoryview(packet), units))
            check_frame_count(len(times))
            end = max(end, packet.pts + (packet.duration or 0))
    if not times:
        raise CorruptionError("the file has no frames")
    chosen = _choose_cuts(times, keys, None if split is None else seconds(split) / video.time_base)
    starts = (min(times), *(times[i] for i in chosen[1:]))
    return _Cuts(tuple(chosen), starts if len(chosen) > 1 else (begin,), end)


def _check_same_pictures(source: str, clip_files: list[ClipFile]) -> None:
    """Raise `UnsupportedError` if the clips and the source do not decode to the same pictures at the same times.

    The times must increase.
    """
    import numpy as np  # takes a third of the time in which a worker starts, and few recipes need it

    last_time = float("-inf")
    copied = (one for clip_file in clip_files for one in _decoded_pictures(clip_file.path, clip_file.start))
    for original, copy in zip_longest(_decoded_pictures(source, 0.0), copied):
        equal = original is not None and copy is not None and np.array_equal(original[1], copy[1])
        if not equal or abs(original[0] - copy[0]) > _TIME_TOLERANCE or copy[0] <= last_time:
            raise UnsupportedError("a copy of its streams would show other pictures; use --transcode")
        last_time = copy[0]


def _decoded_pictures(path: str, start: float) -> Iterator[tuple[float, Any]]:
    """Yield the time and the pixels of each picture."""
    with open_container(f"file:{path}") as container:
        video = pick_video(container)
        configure_decoder(video)
        for frame in container.decode(video):
            if frame.is_corrupt:
                raise CorruptionError(f"a picture is damaged, at time stamp {frame.pts}")
            if frame.pts is None:
                raise UnsupportedError("its pictures have no times; use --transcode")
            yield start + float(frame.pts * video.time_base), frame.to_ndarray()


def _check_packet(packet: Any) -> None:
    if packet.is_corrupt:  # a copy would hide the damage
        raise CorruptionError(f"a packet is damaged, at time stamp {packet.pts}")


def _choose_cuts(times: list[int], keys: list[bool], least: Fraction | None) -> list[int]:
    """Return the numbers of the packets at which clips begin.

    A clip begins at least `least` ticks after the previous clip. It begins only at a key frame that is shown after all
    packets before it in the file, and before all packets after it.
    """
    chosen = [0]
    if least is None:
        return chosen
    latest_before = list(accumulate(times, max))
    earliest_after = list(accumulate(reversed(times), min))[::-1]
    at = max(min(times), 0)
    for i in range(1, len(times)):
        if keys[i] and times[i] - at >= least and latest_before[i - 1] < times[i] == earliest_after[i]:
            chosen.append(i)
            at = times[i]
    return chosen


class _StreamCopier:
    """Copies each packet to its clip in one pass over the file.

    It closes a clip as soon as both streams have reached a later clip. Audio packets before the offset `zero` are left
    out.
    """

    def __init__(self, container: Any, *, cuts: _Cuts, stem: str, ext: str, faststart: bool, zero: int) -> None:
        self._zero = zero
        self._container, self._cuts, self._stem, self._ext, self._faststart = container, cuts, stem, ext, faststart
        self._video, self._audio = pick_video(container), pick_audio(container)
        self._open: dict[int, tuple[Any, dict[int, Any]]] = {}
        self._seconds = [time * self._video.time_base for time in cuts.times]

    def run(self) -> list[ClipFile]:
        streams = [s for s in (self._video, self._audio) if s is not None]
        reached = dict.fromkeys((s.index for s in streams), 0)
        number = 0
        try:
            with demuxed(self._container, *streams) as packets:
                for packet in packets:
                    if not packet.size or packet.dts is None:
                        continue
                    _check_packet(packet)
                    index = packet.stream_index
                    if index != self._video.index and lies_before(packet, self._zero):
                        continue
                    clip = self._clip_number(packet, number)
                    number += index == self._video.index
                    reached[index] = max(reached[index], clip)
                    self._mux(packet, clip)
                    for finished in [c for c in self._open if c < min(reached.values())]:
                        self._open.pop(finished)[0].close()
        finally:
            for out, _ in self._open.values():
                out.close()
        return [self._clip_file(clip) for clip in range(len(self._cuts.packets))]

    def _clip_number(self, packet: Any, number: int) -> int:
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
        if len(self._open) >= _MAX_OPEN_CLIPS:
            raise CorruptionError("audio and video are too far apart in the file to split it")
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

    def _clip_file(self, clip: int) -> ClipFile:
        ends = [*self._seconds[1:], self._cuts.end * self._video.time_base]
        return ClipFile(self._path(clip), float(self._seconds[clip]), float(ends[clip]))
