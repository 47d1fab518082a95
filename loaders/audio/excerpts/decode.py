"""Make the excerpt of a file, then decode, cut and resample it in one call to FFmpeg.

Purpose: packets contain a few milliseconds of audio. Threads that release and acquire the GIL for every packet wait for
each other, so two threads are hardly faster than one. FFmpeg's filters do everything in one call: `amovie` opens,
demuxes and decodes, `atrim` cuts by time stamps, and the result is one frame.

Invariants:
- The samples are bit-identical to those of `headrace.loaders.audio.frames` and `headrace.loaders.audio.resample`.
- The silence before and after the recording is added before resampling.
- An excerpt begins early enough for its codec's output to become correct.
- A file is cut only if the index marks some of its packets, and they are where the index says. WAV needs no marks,
  since its header is sufficient.
- Decoding uses one thread, because FFmpeg's frame threads can request buffers from a decoder that is being freed.

Failure behaviour: None if libav has to read the file itself: its format has no excerpts, decoding fails, or the number
of samples is wrong. The caller then finds the cause. `CorruptionError` for a truncated MP4.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, BinaryIO, cast

import av.error
import numpy as np
from av.filter import Graph

from headrace.dataio.shards.media.container import check_complete
from headrace.dataio.shards.sample import AudioInfo
from headrace.loaders.audio.excerpts import flac, mp3, mp4, ogg, wav
from headrace.loaders.audio.excerpts.base import Excerpt, memfd
from headrace.loaders.audio.frames import F32
from headrace.loaders.audio.resample import AT_ONCE, resampled, resampled_frame
from headrace.loaders.audio.spec import LAYOUTS, AudioSpec
from headrace.loaders.decode.trim import ViewFile
from headrace.loaders.fetch.partial_file import Media

WARM_UP = Fraction(23, 50)
"""Seconds that are decoded before the requested audio. Codecs need some audio before their output is correct (Opus and
MP3 need a few packets)."""
SETTLING = frozenset(["aac", "ac3", "eac3", "mp1", "mp2", "mp3", "opus", "vorbis"])
"""Codecs whose output is correct after `WARM_UP`. Other codecs with a state are decoded from the file's beginning."""
_IN_MP4 = SETTLING | {"alac", "flac"}


def excerpt_of(data: Media, info: AudioInfo, start: Fraction, end: Fraction) -> Excerpt | None:
    """The excerpt for the audio from `start` to `end`, in seconds on the file's own time line."""
    if info.ext in wav.EXTENSIONS:
        return wav.excerpt(data, info, start, end)
    if not info.marks:
        return None
    if info.ext in flac.EXTENSIONS:
        return flac.excerpt(data, info, start, end)
    if info.ext in mp4.EXTENSIONS and info.codec in _IN_MP4:
        check_complete(cast(BinaryIO, ViewFile(data)), len(data))
        return mp4.excerpt(data, info, start - WARM_UP, end)
    if info.ext in ogg.EXTENSIONS:
        return ogg.excerpt(data, info, start - WARM_UP, end)
    if info.ext in mp3.EXTENSIONS:
        return mp3.excerpt(data, info, start, end)
    return None


_MORE = 1 << 12
"""Extra samples in the output frame, so that a result with too many samples is detected."""


def decode_excerpt(
    excerpt: Excerpt, info: AudioInfo, first: int, count: int, spec: AudioSpec
) -> tuple[F32, int] | None:
    """Decode `count` samples from the recording's sample `first` on, in the format of `spec`.

    `first` is counted by time stamps. Returns (channels, about count times the ratio of rates), and how many of the
    `count` samples are audio. None if the caller has to read the whole file.
    """
    rate = info.sample_rate
    begin = first - round(excerpt.shift * rate)
    silent = max(0, -begin) if excerpt.from_start else 0
    covered = count if excerpt.audio_end is None else min(count, int(excerpt.audio_end * rate) - first)
    sounding = covered - silent
    if sounding <= 0:
        return None
    filters = [f"aformat=sample_rates={rate}", f"atrim=start_pts={begin + silent}:end_pts={begin + covered}"]
    if part := sounding < count:
        filters += ["aformat=sample_fmts=fltp"]
    else:
        filters += _channel_filters(info.channels, spec)
        if rate == spec.sample_rate:
            filters += [f"asetnsamples=nb_out_samples={AT_ONCE}:pad=0"]
            filters += [f"aformat=sample_fmts=fltp:channel_layouts={LAYOUTS[spec.channels]}"]
    filters += [f"asetnsamples=nb_out_samples={sounding + _MORE}:pad=0"]
    try:
        with memfd(excerpt.parts) as descriptor:
            source = f"amovie=filename=/proc/self/fd/{descriptor}:format_name={excerpt.demuxer}"
            frame = _run_filters([source, *filters, "abuffersink"])
    except (av.error.FFmpegError, OSError):
        return None
    late = frame.pts is None or abs(frame.pts * frame.time_base * rate - begin - silent) > 1
    if late or frame.samples != sounding:  # there is a gap or an overlap, or decoding stopped early
        return None
    if not part:
        return _samples(frame) if rate == spec.sample_rate else resampled_frame(frame, spec), covered
    canvas = np.zeros((len(frame.layout.channels), count), np.float32)
    canvas[:, silent:covered] = _samples(frame)
    return resampled(canvas, rate, frame.layout.name, spec), covered


def _samples(frame: Any) -> F32:
    """(channels, samples). A single channel stays in the frame's own memory."""
    planes = [np.frombuffer(plane, np.float32, frame.samples) for plane in frame.planes]
    return planes[0][None] if len(planes) == 1 else np.stack(planes)


def _channel_filters(channels: int, spec: AudioSpec) -> list[str]:
    """The filter that selects the first channels unchanged, for `downmix="first"`. No filter for "mix"."""
    if spec.downmix == "mix":
        return []
    chosen = [f"c{number}=c{min(number, channels - 1)}" for number in range(spec.channels)]
    return ["pan=" + "|".join([LAYOUTS[spec.channels], *chosen])]


def _run_filters(filters: list[str]) -> Any:
    """The first frame that the filter chain produces."""
    graph = Graph()
    graph.threads = 1
    chain = [graph.add(*one.partition("=")[::2]) for one in filters]
    graph.link_nodes(*chain).configure()
    return chain[-1].pull()
