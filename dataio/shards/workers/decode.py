"""Decodes members of samples in a worker process: completely, to find faults, or partly, for a preview.

Invariants of checks (`DecodeJob`): the worker reports three kinds of faults: errors of the decoder, frames that the
decoder marks as damaged, and counts that differ from the index. It holds the frames of one packet at a time. It does
not detect damage that the decoder conceals without an error and without losing a frame.

Invariants of previews (`PicturesJob`): pictures are JPEG, upright, and evenly spread over the video. To reach a
picture, the worker decodes at most `_MAX_DECODED` frames after the preceding key frame. If that is not enough, it takes
the last frame that it decoded. A waveform covers all of the audio, and its memory does not grow with the length.

Failure behaviour: damaged media raise no error. The answer to a check counts and describes the faults. A preview leaves
out the pictures that cannot be decoded, and its answer gives the reason.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.media import images
from headrace.dataio.shards.media.container import DEMUXERS, demuxed
from headrace.dataio.shards.workers.jobs import Answer, Decoded, DecodeJob, Job, Pictures, PicturesJob

_MAX_DECODED = 300
_MAX_PIXELS = 64_000_000
_JPEG_QUALITY = {"qmin": "5", "qmax": "5"}


def open_media(path: str) -> Any:
    """Open the container at `path`. The container cannot open other files."""
    options = {"format_whitelist": f"{DEMUXERS},{images.DEMUXERS}", "protocol_whitelist": "file"}
    return av.open(f"file:{path}", metadata_errors="replace", options=options)


def run(job: Job) -> Answer:
    """Run one job and return its answer."""
    return _check(job) if isinstance(job, DecodeJob) else _preview(job)


# --- checks


def _check(job: DecodeJob) -> Decoded:
    """Decode the job's streams, and return their faults."""
    try:
        with open_media(job.path) as container:
            return Decoded(faults=tuple(_faults(container, job)))
    except (av.error.FFmpegError, IndexError) as error:
        return Decoded(faults=(f"cannot be opened: {_reason(error)}",))
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
        if job.part is not None:
            container.seek(job.part[0], stream=streams[0], backward=True)
        with demuxed(container, *streams) as packets:
            for packet in packets:
                count = counts["video" if packet.stream.index == job.video_stream else "audio"]
                if job.part is not None and packet.dts is not None and packet.dts >= job.part[1]:
                    _decode_packet(None, streams[0], count, job.part)
                    break
                _decode_packet(packet, packet.stream, count, job.part)
    except av.error.FFmpegError as error:
        faults.append(f"cannot be demuxed to its end: {_reason(error)}")
    for name, (decoded, damaged, errors, first_error) in counts.items():
        unit, expected = ("frames", job.frames) if name == "video" else ("samples", job.samples)
        if errors:
            faults.append(f"{name}: {errors} packets cannot be decoded: {first_error}")
        if damaged:
            faults.append(f"{name}: {damaged} decoded frames are damaged")
        if decoded != expected:
            faults.append(f"{name}: {decoded} {unit} decode; the index lists {expected}")
    return faults


def _decode_packet(packet: Any, stream: Any, count: list[Any], part: tuple[int, int] | None) -> None:
    """Count the frames of a packet, or the last ones that the decoder has. Only those of `part` count."""
    try:
        for frame in stream.decode(packet):
            if part is not None and frame.pts is not None and not part[0] <= frame.pts < part[1]:
                continue
            count[0] += getattr(frame, "samples", 1)
            count[1] += bool(frame.is_corrupt)
    except av.error.FFmpegError as error:
        count[2] += 1
        count[3] = count[3] or _reason(error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", "") or error)


# --- previews


def _preview(job: PicturesJob) -> Pictures:
    """Make the pictures, or the waveform of the audio."""
    try:
        with open_media(job.path) as container:
            if job.video_stream is not None:
                return _pictures(container, container.streams[job.video_stream], job)
            if job.audio_stream is not None:
                return _waveform(container, container.streams[job.audio_stream], job)
            return Pictures(fault="it has neither video nor audio")
    except (av.error.FFmpegError, IndexError) as error:
        return Pictures(fault=f"cannot be decoded: {_reason(error)}")
    except UnsupportedError as error:
        return Pictures(fault=error.message)
    except MemoryError:
        return Pictures(fault="decoding it needs more memory than a worker may have")


def _pictures(container: Any, stream: Any, job: PicturesJob) -> Pictures:
    stream.codec_context.thread_count = 1
    start = stream.start_time or 0
    length = stream.duration or round((container.duration or 0) / av.time_base / stream.time_base)
    if job.part is not None:
        start, length = job.part[0], job.part[1] - job.part[0]
    jpegs, size, fault = [], (0, 0), ""
    for number in range(job.count):
        target = start + int(length * (number + 0.5) / job.count)
        try:
            frame = _frame_at(container, stream, target)
        except av.error.FFmpegError as error:
            fault = f"damaged: {error.strerror}"
            continue
        if frame is not None:
            size, jpeg = _jpeg(frame, job)
            jpegs.append(jpeg)
    return Pictures(jpegs=tuple(jpegs), width=size[0], height=size[1], fault=fault or ("" if jpegs else "no pictures"))


def _frame_at(container: Any, stream: Any, target: int) -> Any:
    """Return the first frame at or after `target`, or the last frame decoded before it."""
    container.seek(target, stream=stream, backward=True)
    last = None
    for count, frame in enumerate(container.decode(stream)):
        if frame.width * frame.height > _MAX_PIXELS:
            raise UnsupportedError(f"a picture of {frame.width}x{frame.height} is too large for a preview")
        last = frame
        if (frame.pts is not None and frame.pts >= target) or count >= _MAX_DECODED:
            break
    return last


def _jpeg(frame: Any, job: PicturesJob) -> tuple[tuple[int, int], bytes]:
    swap_sides = job.rotation in (90, 270)
    upright_size = (frame.height, frame.width) if swap_sides else (frame.width, frame.height)
    scale = min(job.width / upright_size[0], job.height / upright_size[1])
    width, height = (max(2, round(side * scale / 2) * 2) for side in upright_size)
    small = frame.reformat(*((height, width) if swap_sides else (width, height)), format="rgb24").to_ndarray()
    upright = np.ascontiguousarray(np.rot90(small, -job.rotation // 90))
    picture = av.VideoFrame.from_ndarray(upright, format="rgb24").reformat(format="yuvj420p")
    encoder: Any = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.options = width, height, "yuvj420p", _JPEG_QUALITY
    encoder.time_base, encoder.thread_count = Fraction(1, 25), 1
    picture.pts = 0
    return (width, height), b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])


def _waveform(container: Any, stream: Any, job: PicturesJob) -> Pictures:
    peaks = np.zeros(job.count)
    samples_per_bin = max(1, -(-job.samples // job.count))
    resampler, at, fault = av.AudioResampler(format="flt", layout="mono"), 0, ""
    try:
        for frame in container.decode(stream):
            for mono in resampler.resample(frame):
                values = np.abs(mono.to_ndarray().reshape(-1))
                bins = np.minimum((at + np.arange(len(values))) // samples_per_bin, job.count - 1)
                np.maximum.at(peaks, bins, values)
                at += len(values)
    except av.error.FFmpegError as error:
        fault = f"damaged: {error.strerror}"
    if not at:
        return Pictures(fault=fault or "no audio")
    return Pictures(peaks=tuple(round(float(p), 3) for p in np.clip(np.nan_to_num(peaks), 0, 1)), fault=fault)
