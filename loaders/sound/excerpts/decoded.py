"""An excerpt decoded, cut and resampled in one call without the interpreter's lock, instead of some for each packet.

Purpose: packets hold some milliseconds. Threads that take and give back the lock for every one wait on each other, so that two of
them hardly do more than one, and samples are copied between steps. FFmpeg's filters do all of it by themselves: `amovie` opens,
demultiplexes and decodes, `atrim` cuts by stamps, and what is as wanted comes out in one piece.
Invariant: the samples are those of `headrace.loaders.sound.layout` and `headrace.loaders.sound.resample`, to the bit.
Before the recording and behind it is silence, which is put around what there is before that is resampled.
Failure behaviour: None for what cannot be decoded, or does not fill the stretch: whoever asked finds out what is wrong.
One thread decodes: FFmpeg's own frame threads ask a decoder for buffers that is being freed.
"""

from __future__ import annotations

from typing import Any

import av.error
import numpy as np
from av.filter import Graph

from headrace.dataio.shards.contract import AudioInfo
from headrace.loaders.sound.excerpts.contract import Excerpt
from headrace.loaders.sound.layout import F32
from headrace.loaders.sound.nameless import nameless
from headrace.loaders.sound.resample import AT_ONCE, resampled, resampled_frame
from headrace.loaders.sound.spec import LAYOUTS, AudioSpec

_MORE = 1 << 12
"""Samples that may be more than there should be, which is found out so."""


def decoded(excerpt: Excerpt, info: AudioInfo, first: int, count: int, spec: AudioSpec) -> tuple[F32, int] | None:
    """`count` samples from the recording's `first` on, as counted by its stamps, as `spec` wants them: (channels, about count
    times the ratio of rates), and how many of `count` are sound."""
    rate = info.sample_rate
    begin = first - round(excerpt.shift * rate)
    silent = max(0, -begin) if excerpt.whole else 0
    left = count if excerpt.until is None else min(count, int(excerpt.until * rate) - first)
    sounding = left - silent
    if sounding <= 0:
        return None
    filters = [f"aformat=sample_rates={rate}", f"atrim=start_pts={begin + silent}:end_pts={begin + left}"]
    if part := sounding < count:
        filters += ["aformat=sample_fmts=fltp"]
    else:
        filters += _chosen(info.channels, spec)
        if rate == spec.sample_rate:
            filters += [f"asetnsamples=nb_out_samples={AT_ONCE}:pad=0"]
            filters += [f"aformat=sample_fmts=fltp:channel_layouts={LAYOUTS[spec.channels]}"]
    filters += [f"asetnsamples=nb_out_samples={sounding + _MORE}:pad=0"]
    try:
        with nameless(excerpt.parts) as descriptor:
            source = f"amovie=filename=/proc/self/fd/{descriptor}:format_name={excerpt.demuxer}"
            frame = _pulled([source, *filters, "abuffersink"])
    except (av.error.FFmpegError, OSError):
        return None
    late = frame.pts is None or abs(frame.pts * frame.time_base * rate - begin - silent) > 1
    if late or frame.samples != sounding:  # there is a gap, or an overlap, or it broke off
        return None
    if not part:
        return _samples(frame) if rate == spec.sample_rate else resampled_frame(frame, spec), left
    canvas = np.zeros((len(frame.layout.channels), count), np.float32)
    canvas[:, silent:left] = _samples(frame)
    return resampled(canvas, rate, frame.layout.name, spec), left


def _samples(frame: Any) -> F32:
    """(channels, samples), of one channel in the frame's own memory."""
    planes = [np.frombuffer(plane, np.float32, frame.samples) for plane in frame.planes]
    return planes[0][None] if len(planes) == 1 else np.stack(planes)


def _chosen(channels: int, spec: AudioSpec) -> list[str]:
    """The first channels as they are, where they are wanted so."""
    if spec.policy == "mix":
        return []
    chosen = [f"c{number}=c{min(number, channels - 1)}" for number in range(spec.channels)]
    return ["pan=" + "|".join([LAYOUTS[spec.channels], *chosen])]


def _pulled(filters: list[str]) -> Any:
    """The first frame that comes out."""
    graph = Graph()
    graph.threads = 1
    chain = [graph.add(*one.partition("=")[::2]) for one in filters]
    graph.link_nodes(*chain).configure()
    return chain[-1].pull()
