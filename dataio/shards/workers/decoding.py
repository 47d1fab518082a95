"""Copies members of samples to temporary files and hands them to media workers.

Purpose: `verify` and `preview` read members from the store and check them. Worker processes then decode them.
Invariants: a temporary file exists only while a worker uses it. A member larger than `SET_ASIDE_BYTES` is not copied.
The worker has one minute, and more for long and for large files.
Failure behaviour: wrong bytes and a crash raise `CorruptionError`. A hang raises `DeadlineError`. A member that is too
large, or a full temporary folder, raises `CapacityError`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.shards import members
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.workers import media_jobs
from headrace.dataio.shards.workers.process import WorkerPool
from headrace.dataio.store.base import Store

SET_ASIDE_BYTES = 8 * limits.GIB


def seconds_for(sample: Sample) -> float:
    """Return the time limit for decoding a sample, in seconds."""
    size = sum(member.length for member in sample.members)
    return 60.0 + 2 * sample.duration + size / (4 * limits.MIB)


@contextlib.contextmanager
def set_aside(store: Store, sample: Sample, ext: str) -> Iterator[str]:
    """Write this member to a temporary file, verify its checksum, and yield the file's path."""
    member = members.find_member(sample, ext)
    if member.length > SET_ASIDE_BYTES:
        raise CapacityError(f"{sample.key}.{ext} has {limits.format_bytes(member.length)}, more than is set aside")
    handle, path = tempfile.mkstemp(prefix="headrace-", suffix=".media")
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                for piece in members.chunks(store, sample, member):
                    file.write(piece)
                file.flush()
            except OSError as error:
                raise CapacityError(
                    f"{sample.key}.{ext} could not be set aside: {error.strerror or error}",
                    hint="TMPDIR names another folder with more space",
                ) from error
        yield path
    finally:
        os.unlink(path)


def ask(pool: WorkerPool, job: media_jobs.Job, seconds: float) -> media_jobs.Answer:
    """Send a job to a worker and return the answer."""
    answer: media_jobs.Answer = pool.ask(media_jobs.encode(job), seconds, media_jobs.decode_answer)
    return answer


def decode_sample(store: Store, sample: Sample, pool: WorkerPool) -> tuple[str, ...]:
    """Decode the sample's media to the end, and return the faults."""
    video, audio = sample.video, sample.audio
    faults = list[str]()
    for ext in sorted({stream.ext for stream in (video, audio) if stream is not None}):
        v = video if video is not None and video.ext == ext else None
        a = audio if audio is not None and audio.ext == ext else None
        with set_aside(store, sample, ext) as path:
            job = media_jobs.DecodeJob(
                path=path,
                video_stream=None if v is None else v.stream,
                frames=0 if v is None else v.frames,
                audio_stream=None if a is None else a.stream,
                samples=0 if a is None else a.samples,
            )
            answer = ask(pool, job, seconds_for(sample))
        assert isinstance(answer, media_jobs.Decoded)
        faults += [f"{ext}: {fault}" for fault in answer.faults]
    return tuple(faults)
