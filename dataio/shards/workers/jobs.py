"""Decoding jobs for `verify` and `preview`: their messages, and the copies of members for a worker.

Purpose: callers read a member from the store, check its digest, and write it to a temporary file. A worker
(`headrace.dataio.shards.workers.decode`) then decodes the file. Callers never load libav.

Invariants:

* Messages are msgpack with checked types. A path names a file that the caller wrote whole, with the right checksum.
* A temporary file exists only while a worker uses it. A member larger than `COPY_BYTES` is not copied.
* The time limit of a job is at least one minute. It grows with the duration and the size of the sample.

Failure behaviour: wrong bytes, a crash and a malformed answer raise `CorruptionError`. A hang raises `DeadlineError`. A
member that is too large, or a full temporary folder, raises `CapacityError`. Faults of a file are part of the answer.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards import member_reader
from headrace.dataio.shards.sample import Sample, VideoInfo
from headrace.dataio.shards.workers.worker import DECODE_HELLO
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from headrace.dataio.store.base import Store


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Decode these streams to their end.

    A stream of None is not decoded. `frames` and `samples` are the counts in the index. `part` are the first time stamp of
    a window of the video, and the end. Without it, the whole file is decoded.
    """

    path: str
    video_stream: int | None = None
    frames: int = 0
    audio_stream: int | None = None
    samples: int = 0
    part: tuple[int, int] | None = None


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """The answer to a `DecodeJob`: descriptions of the file's faults.

    There are none if everything decodes as the index says.
    """

    faults: tuple[str, ...]


class PicturesJob(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """Make `count` pictures evenly spread over a video, each at most `width` by `height` pixels.

    Without a video stream, compute `count` peaks of the audio, for a waveform. `part` are the first time stamp of a window
    of the video, and the end.
    """

    path: str
    video_stream: int | None = None
    audio_stream: int | None = None
    samples: int = 0
    rotation: int = 0
    count: int = 4
    width: int = 320
    height: int = 120
    part: tuple[int, int] | None = None


class Pictures(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """The answer to a `PicturesJob`: JPEG files in the order of time, or peaks from 0 to 1.

    `fault` gives the reason if pictures or peaks are missing.
    """

    jpegs: tuple[bytes, ...] = ()
    width: int = 0
    height: int = 0
    peaks: tuple[float, ...] = ()
    fault: str = ""


Job = DecodeJob | PicturesJob
Answer = Decoded | Pictures

HELLO, COMMAND = DECODE_HELLO, run_module("headrace.dataio.shards.workers.worker", "decode")
"""The arguments with which a `WorkerPool` starts these workers."""
encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


COPY_BYTES = 8 * limits.GIB


def seconds_for(sample: Sample) -> float:
    """Return the time limit for decoding a sample, in seconds."""
    size = sum(member.length for member in sample.members)
    return 60.0 + 2 * sample.duration + size / (4 * limits.MIB)


@contextlib.contextmanager
def local_copy(store: Store, sample: Sample, ext: str) -> Iterator[str]:
    """Write this member to a temporary file, verify its checksum, and yield the file's path.

    The file is deleted when the `with` block ends.
    """
    member = member_reader.find_member(sample, ext)
    if member.length > COPY_BYTES:
        raise CapacityError(
            f"{sample.key}.{ext} has {limits.format_bytes(member.length)}, more than is copied to a temporary file"
        )
    handle, path = tempfile.mkstemp(prefix="headrace-", suffix=".media")
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                for piece in member_reader.read_chunks(store, sample, member):
                    file.write(piece)
                file.flush()
            except OSError as error:
                raise CapacityError(
                    f"{sample.key}.{ext} could not be copied to a temporary file: {error.strerror or error}",
                    hint="TMPDIR names another folder with more space",
                ) from error
        yield path
    finally:
        os.unlink(path)


def ask(pool: WorkerPool, job: Job, seconds: float) -> Answer:
    """Send a job to a worker and return the answer."""
    answer: Answer = pool.ask(encode(job), seconds, decode_answer)
    return answer


def part_of(video: VideoInfo | None) -> tuple[int, int] | None:
    """Return the first time stamp of a window, and its end. None if the video is a whole file."""
    if video is None or not video.is_window:
        return None
    return video.start_pts, video.start_pts + video.duration_pts


def decode_sample(store: Store, sample: Sample, pool: WorkerPool) -> tuple[str, ...]:
    """Decode the sample's media to the end, and return the faults."""
    audio = sample.audio
    faults = list[str]()
    for ext in sorted({stream.ext for stream in (sample.video, audio, *sample.videos) if stream is not None}):
        v = sample.video_of(ext)
        a = audio if audio is not None and audio.ext == ext and part_of(v) is None else None
        with local_copy(store, sample, ext) as path:
            job = DecodeJob(
                path=path,
                video_stream=None if v is None else v.stream,
                frames=0 if v is None else v.frames,
                audio_stream=None if a is None else a.stream,
                samples=0 if a is None else a.samples,
                part=part_of(v),
            )
            answer = ask(pool, job, seconds_for(sample))
        assert isinstance(answer, Decoded)
        faults += [f"{ext}: {fault}" for fault in answer.faults]
    return tuple(faults)
