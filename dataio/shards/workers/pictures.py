"""Makes small pictures of a video, and the outline of audio.

Purpose: the media worker's part of `preview`.
Invariants: pictures are JPEG, upright, and evenly spread over the video. To reach a picture, the worker decodes at most
`_REACH` frames after the preceding key frame. If that is not enough, it takes the last frame that it decoded. An
outline covers all of the audio, and its memory does not grow with the length.
Failure behaviour: pictures or audio that cannot be decoded are left out, and the answer gives the reason.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np

from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.shards.workers.decode_all import open_media
from headrace.dataio.shards.workers.media_jobs import Pictures, PicturesJob

_REACH = 300
_PIXELS = 64_000_000
_QUALITY = {"qmin": "5", "qmax": "5"}


def run(job: PicturesJob) -> Pictures:
    """Run the job and return its answer."""
    try:
        with open_media(job.path) as container:
            if job.video_stream is not None:
                return _pictures(container, container.streams[job.video_stream], job)
            if job.audio_stream is not None:
                return _outline(container, container.streams[job.audio_stream], job)
            return Pictures(fault="it has neither pictures nor sound")
    except (av.error.FFmpegError, IndexError) as error:
        return Pictures(fault=f"cannot be decoded: {getattr(error, 'strerror', '') or error}")
    except UnsupportedError as error:
        return Pictures(fault=error.message)
    except MemoryError:
        return Pictures(fault="decoding it needs more memory than a worker may have")


def _pictures(container: Any, stream: Any, job: PicturesJob) -> Pictures:
    stream.codec_context.thread_count = 1
    start = stream.start_time or 0
    length = stream.duration or round((container.duration or 0) / av.time_base / stream.time_base)
    jpegs, size, fault = [], (0, 0), ""
    for number in range(job.count):
        wanted = start + int(length * (number + 0.5) / job.count)
        try:
            frame = _frame_at(container, stream, wanted)
        except av.error.FFmpegError as error:
            fault = f"damaged: {error.strerror}"
            continue
        if frame is not None:
            size, jpeg = _jpeg(frame, job)
            jpegs.append(jpeg)
    return Pictures(jpegs=tuple(jpegs), width=size[0], height=size[1], fault=fault or ("" if jpegs else "no pictures"))


def _frame_at(container: Any, stream: Any, wanted: int) -> Any:
    """Return the first frame at or after `wanted`, or the last frame decoded before it."""
    container.seek(wanted, stream=stream, backward=True)
    last = None
    for count, frame in enumerate(container.decode(stream)):
        if frame.width * frame.height > _PIXELS:
            raise UnsupportedError(f"a picture of {frame.width}x{frame.height} is not shown")
        last = frame
        if (frame.pts is not None and frame.pts >= wanted) or count >= _REACH:
            break
    return last


def _jpeg(frame: Any, job: PicturesJob) -> tuple[tuple[int, int], bytes]:
    turned = job.rotation in (90, 270)
    shown = (frame.height, frame.width) if turned else (frame.width, frame.height)
    scale = min(job.width / shown[0], job.height / shown[1])
    width, height = (max(2, round(side * scale / 2) * 2) for side in shown)
    small = frame.reformat(*((height, width) if turned else (width, height)), format="rgb24").to_ndarray()
    upright = np.ascontiguousarray(np.rot90(small, -job.rotation // 90))
    picture = av.VideoFrame.from_ndarray(upright, format="rgb24").reformat(format="yuvj420p")
    encoder: Any = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.options = width, height, "yuvj420p", _QUALITY
    encoder.time_base, encoder.thread_count = Fraction(1, 25), 1
    picture.pts = 0
    return (width, height), b"".join(bytes(packet) for packet in [*encoder.encode(picture), *encoder.encode(None)])


def _outline(container: Any, stream: Any, job: PicturesJob) -> Pictures:
    peaks = np.zeros(job.count)
    per = max(1, -(-job.samples // job.count))
    resampler, at, fault = av.AudioResampler(format="flt", layout="mono"), 0, ""
    try:
        for frame in container.decode(stream):
            for mono in resampler.resample(frame):
                values = np.abs(mono.to_ndarray().reshape(-1))
                bins = np.minimum((at + np.arange(len(values))) // per, job.count - 1)
                np.maximum.at(peaks, bins, values)
                at += len(values)
    except av.error.FFmpegError as error:
        fault = f"damaged: {error.strerror}"
    if not at:
        return Pictures(fault=fault or "no sound")
    return Pictures(peaks=tuple(round(float(p), 3) for p in np.clip(np.nan_to_num(peaks), 0, 1)), fault=fault)
