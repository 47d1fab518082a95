"""Decodes a file to its end, to find faults.

Invariants: these are faults: errors that the decoder reports, frames that it marks as damaged, and counts that differ
from the index. The worker holds one picture at a time. It cannot see damage that the decoder conceals silently and
without losing a frame.
Failure behaviour: the answer counts and names the faults. Bad media raise nothing.
"""

from __future__ import annotations

from typing import Any

import av
import av.error

from headrace.dataio.shards.workers.media_jobs import Decoded, DecodeJob

DEMUXERS = "mov,matroska,avi,wav,w64,flac,mp3,ogg"


def open_media(path: str) -> Any:
    """Open the container at `path`. The container cannot open other files."""
    options = {"format_whitelist": DEMUXERS, "protocol_whitelist": "file"}
    return av.open(f"file:{path}", metadata_errors="replace", options=options)


def run(job: DecodeJob) -> Decoded:
    """Decode the job's streams, and return their faults."""
    try:
        with open_media(job.path) as container:
            return Decoded(faults=tuple(_faults(container, job)))
    except (av.error.FFmpegError, IndexError) as error:
        return Decoded(faults=(f"cannot be opened: {_words(error)}",))
    except MemoryError:
        return Decoded(faults=("decoding it needs more memory than a worker may have",))


def _faults(container: Any, job: DecodeJob) -> list[str]:
    counts: dict[str, list[Any]] = {}
    streams = []
    for name, number in (("video", job.video_stream), ("audio", job.audio_stream)):
        if number is not None:
            stream = container.streams[number]
            stream.codec_context.thread_count = 1
            streams.append(stream)
            counts[name] = [0, 0, 0, ""]  # frames or samples, damaged frames, errors, the first error
    faults = []
    try:
        for packet in container.demux(streams):
            _feed(packet, counts["video" if packet.stream.index == job.video_stream else "audio"])
    except av.error.FFmpegError as error:
        faults.append(f"cannot be demuxed to its end: {_words(error)}")
    for name, (found, damaged, errors, first) in counts.items():
        unit, wanted = ("frames", job.frames) if name == "video" else ("samples", job.samples)
        if errors:
            faults.append(f"{name}: {errors} packets cannot be decoded: {first}")
        if damaged:
            faults.append(f"{name}: {damaged} decoded frames are damaged")
        if found != wanted:
            faults.append(f"{name}: {found} {unit} decode, the index says {wanted}")
    return faults


def _feed(packet: Any, count: list[Any]) -> None:
    try:
        for frame in packet.decode():
            count[0] += getattr(frame, "samples", 1)
            count[1] += bool(frame.is_corrupt)
    except av.error.FFmpegError as error:
        count[2] += 1
        count[3] = count[3] or _words(error)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", "") or error)
