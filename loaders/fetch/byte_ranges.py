"""Which pieces of a long file a clip or a window needs, computed from the index.

Purpose: predicted pieces can be announced, and fetched in one request. All functions are pure.
Invariants: whether a file is read in part depends on the sample and the loader's settings, never on an individual
clip or window. So only the reads that access damaged bytes report them. Predictions are hints: no sample's content
depends on them.
Failure behaviour: none. If the index does not describe a file well enough, the file is read whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from operator import attrgetter, itemgetter

from headrace.dataio.core import limits
from headrace.dataio.shards.sample import AudioInfo, Member, Sample, VideoInfo
from headrace.loaders.clip import Clip, Wanted, choose

MOST = 0.5
"""A file is read whole if a clip needs a larger fraction of it."""
_READ_AHEAD_BYTES = 64 * limits.KIB
"""Bytes that a demuxer reads at a time, including bytes that it does not need."""
_REORDERED = 5
"""Frames by which the order of decoding may differ from the order of display."""
_AUDIO_MARGIN = Fraction(1, 2)
"""Seconds by which audio may be stored before or after the video of the same time. It includes the audio that codecs
need before the window."""
_WITHOUT_TIMESTAMPS = frozenset(["avi"])
_FROM_KEY_FRAMES = frozenset(["h264", "hevc", "av1", "vp8", "vp9", "mjpeg", "prores", "dnxhd", "ffv1", "rawvideo"])

_RESERVOIR = 64 * 1152
"""Samples of MP3 that are read before the requested ones. A frame may need bytes of about twenty earlier frames, and
the decoder state after those."""

Runs = tuple[tuple[int, int], ...]
"""Pieces of a file as (first, count), in order, disjoint."""
Span = tuple[int, int]
"""Bytes of a file as (first, end)."""


def member_of(sample: Sample, ext: str) -> Member | None:
    """The sample's file with this extension; None if it does not exist or is not divided into pieces."""
    for member in sample.members:
        if member.ext == ext:
            return member if member.pieces is not None else None
    return None


def runs(member: Member, spans: Iterable[Span]) -> Runs:
    """The pieces that hold these bytes, and the pieces that opening the file reads."""
    pieces = member.pieces
    assert pieces is not None
    last_piece = (member.length - 1) // pieces.size
    piece_ranges = [(first, first + count - 1) for first, count in pieces.head]
    piece_ranges += [
        (first // pieces.size, min(last_piece, (end - 1) // pieces.size)) for first, end in spans if first < end
    ]
    return merged((first, end - first + 1) for first, end in piece_ranges)


def merged(pieces: Iterable[tuple[int, int]]) -> Runs:
    """The same pieces in order, with adjacent and overlapping runs joined."""
    out = list[tuple[int, int]]()
    for first, count in sorted(pieces):
        if out and first <= sum(out[-1]):
            out[-1] = (out[-1][0], max(sum(out[-1]), first + count) - out[-1][0])
        else:
            out.append((first, count))
    return tuple(out)


def size(member: Member, pieces: Runs) -> int:
    """The number of bytes in these pieces."""
    return sum(length for _, length in ranges(member, pieces))


def ranges(member: Member, pieces: Runs) -> list[tuple[int, int]]:
    """Where these pieces are in the shard: (offset, length)."""
    assert member.pieces is not None
    piece_size, end = member.pieces.size, member.length
    return [
        (member.offset + first * piece_size, min(count * piece_size, end - first * piece_size))
        for first, count in pieces
        if first * piece_size < end
    ]


# --- clips


def reads_part_of_video(member: Member, video: VideoInfo, clip: Clip, *, with_audio: bool) -> bool:
    """Whether clips, with their audio if `with_audio`, are read without the rest of their file."""
    return reads_part_of_frames(member, video, frames_of(clip, video), with_audio=with_audio)


def frames_of(clip: Clip, video: VideoInfo) -> int:
    """The number of frames of the video from the beginning of a clip to its end."""
    return clip.frames * clip.stride if clip.rate is None else int(clip.frames / clip.rate * video.fps)


def reads_part_of_frames(member: Member, video: VideoInfo, frames: int, *, with_audio: bool) -> bool:
    """Whether clips that span this many frames are read without the rest of their file."""
    is_indexed = (
        video.codec in _FROM_KEY_FRAMES and video.format not in _WITHOUT_TIMESTAMPS and video.key_frames[-1].at >= 0
    )
    if not is_indexed or member.length <= 0:
        return False
    if with_audio:
        frames += int(2 * _AUDIO_MARGIN * video.fps)
    group = video.frames // len(video.key_frames)
    part = (frames + 2 * group) / video.frames
    if video.is_window:  # and a clip is never longer than its window
        part = min(part, 1.0) * window_bytes(video, member.length) / member.length
    return part + size(member, member.pieces.head if member.pieces else ()) / member.length <= MOST


def window_bytes(video: VideoInfo, length: int) -> int:
    """The number of bytes from the first key frame of a window to the one after it, or to the end of the file."""
    first, last = video.key_frames[0], video.key_frames[-1]
    return max(0, (last.at if last.index >= video.frames else length) - first.at)


def of_clip(video: VideoInfo, wanted: Wanted, length: int) -> Span:
    """The bytes from the clip's key frame to the first key frame after the clip.

    They include the beginning of that key frame if the clip ends less than `_REORDERED` frames before it. Decoders read
    it then, to know that all frames of the clip have come.
    """
    last = wanted.values[-1]
    first_key = bisect_right(video.key_frames, wanted.key.index, key=_index) - 1
    next_key = bisect_right(video.key_frames, last, key=_index if wanted.by == "index" else _pts)
    return _span_between(video, first_key, next_key, length, _bytes_after(video, wanted, next_key))


def _bytes_after(video: VideoInfo, wanted: Wanted, next_key: int) -> int:
    """The bytes that are read of the key frame after a clip."""
    if next_key == len(video.key_frames):
        return 0
    following, last = video.key_frames[next_key], wanted.values[-1]
    if wanted.by == "index":
        is_near = following.index - last < _REORDERED
    else:
        is_near = (following.pts - last) * video.time_base * video.fps < _REORDERED
    return _READ_AHEAD_BYTES if is_near else 0


def of_time(video: VideoInfo, start: Fraction, end: Fraction, length: int) -> Span:
    """The bytes that contain the audio of this time span, located by the video's key frames.

    `start` and `end` are seconds on the timeline of the file.
    """
    low, high = (int(t / video.time_base) for t in (start - _AUDIO_MARGIN, end + _AUDIO_MARGIN))
    first_key = bisect_right(video.key_frames, low, key=_pts) - 1
    next_key = bisect_right(video.key_frames, high, key=_pts)
    return _span_between(video, first_key, next_key, length)


_pts, _index = attrgetter("pts"), attrgetter("index")


def explain(sample: Sample, clip: Clip, *, with_audio: bool) -> str:
    """Text that says how much of its file a clip of this sample reads."""
    video = sample.video
    member = None if video is None else member_of(sample, video.ext)
    if video is None or member is None or not reads_part_of_video(member, video, clip, with_audio=with_audio):
        return "reading: its whole file"
    span = of_clip(video, choose(video, clip, 0, 0, sample.id, 0), member.length)
    part, total = (limits.format_bytes(count) for count in (size(member, runs(member, [span])), member.length))
    return f"reading: about {part} of its {total} for a clip"


def _span_between(video: VideoInfo, first_key: int, next_key: int, length: int, more: int = _READ_AHEAD_BYTES) -> Span:
    keys = video.key_frames
    begin = keys[max(0, first_key)].at
    end = keys[next_key].at + more if next_key < len(keys) else length
    return max(0, begin), min(length, end if end > begin else begin + _READ_AHEAD_BYTES)


# --- audio


def reads_part_of_audio(sample: Sample, member: Member, audio: AudioInfo, seconds: float) -> bool:
    """Whether windows of this many seconds are read without the rest of their file."""
    duration, video = audio.samples / audio.sample_rate, _video_of(sample, audio)
    if (
        audio.ext.rpartition(".")[2] in _WITHOUT_TIMESTAMPS
        or duration <= 0
        or (video is not None and video.key_frames[-1].at < 0)
    ):
        return False
    group = 0.0 if video is None else float(video.frames / video.fps) / len(video.key_frames)
    head = size(member, member.pieces.head if member.pieces else ())
    return (seconds + 2 * float(_AUDIO_MARGIN) + 2 * group) / duration + head / member.length <= MOST


def of_window(sample: Sample, audio: AudioInfo, start: Fraction, seconds: Fraction, length: int) -> Span:
    """The bytes of a window that begins `start` seconds after the start of the audio.

    In a file with video, the video's key frames locate the window. In a file with marks, the marks do. In other files,
    the window's position is computed from its share of the duration.
    """
    video = _video_of(sample, audio)
    if video is not None:
        start += video.start_pts * video.time_base
        return of_time(video, start, start + seconds, length)
    pieces = next((member.pieces for member in sample.members if member.ext == audio.ext), None)
    if pieces is not None and pieces.marks:
        first_sample, last_sample = (
            int(t * audio.sample_rate) for t in (start - _AUDIO_MARGIN, start + seconds + _AUDIO_MARGIN)
        )
        next_mark = mark_after(pieces.marks, last_sample)
        end = pieces.marks[next_mark][0] if next_mark < len(pieces.marks) else length
        return pieces.marks[mark_before(pieces.marks, first_sample)][0], end
    duration = Fraction(audio.samples, audio.sample_rate)
    low, high = (int(t / duration * length) for t in (start - _AUDIO_MARGIN, start + seconds + _AUDIO_MARGIN))
    return max(0, low - _READ_AHEAD_BYTES), min(length, high + _READ_AHEAD_BYTES)


def mark_before(marks: Sequence[tuple[int, int]], sample: int) -> int:
    """The number of the mark at which decoding must begin so that this sample is correct."""
    return max(0, bisect_right(marks, sample - _RESERVOIR, key=_samples) - 1)


def mark_after(marks: Sequence[tuple[int, int]], sample: int) -> int:
    """The number of the first mark after this sample; the number of marks if there is none."""
    return bisect_right(marks, sample, key=_samples)


_samples = itemgetter(1)


def _video_of(sample: Sample, audio: AudioInfo) -> VideoInfo | None:
    """The video in the same file as the audio, if it has key frames."""
    video = sample.video
    return video if video is not None and video.ext == audio.ext and video.key_frames else None


def union(needs: Sequence[Runs]) -> Runs:
    """The pieces that several clips or windows of one sample need."""
    return needs[0] if len(needs) == 1 else merged(run for part in needs for run in part)
