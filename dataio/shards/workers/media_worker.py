"""The process that decodes untrusted media for `verify` and `preview`.

Invariants: one frame in, one frame out; it dies with the process that started it, has `limits.PROBE_MEMORY_BYTES` for data, and
holds one decoded picture at a time.
Failure behaviour: what libav reports becomes part of the answer; a crash or a hang ends this process only, which its pool sees.
"""

from __future__ import annotations

import os
import signal
import sys

from dataio.shards.workers import media_jobs
from dataio.shards.workers.probe_worker import die_with_parent, limit_memory, read_frame, write_frame


def answer(job: media_jobs.Job) -> media_jobs.Answer:
    """Do one job."""
    from dataio.shards.workers import decode_all, pictures

    return decode_all.run(job) if isinstance(job, media_jobs.DecodeJob) else pictures.run(job)


def main() -> None:
    """Serve jobs until standard input ends."""
    die_with_parent()
    limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a library prints is not an answer
        write_frame(out, media_jobs.HELLO)
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            write_frame(out, media_jobs.encode(answer(media_jobs.decode_job(frame))))


if __name__ == "__main__":
    main()
