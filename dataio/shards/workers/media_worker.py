"""The process that decodes untrusted media for `verify` and `preview`.

Invariants: one frame in, one frame out; it dies with the process that started it, has `limits.PROBE_MEMORY_BYTES` for data, and
holds one decoded picture at a time.
Failure behaviour: what libav reports becomes part of the answer; a crash or a hang ends this process only, which its pool sees.
"""

from __future__ import annotations

from headrace.dataio.shards.workers import media_jobs
from headrace.dataio.shards.workers.probe_worker import confine, serve


def answer(job: media_jobs.Job) -> media_jobs.Answer:
    """Do one job."""
    from headrace.dataio.shards.workers import decode_all, pictures

    return decode_all.run(job) if isinstance(job, media_jobs.DecodeJob) else pictures.run(job)


def main() -> None:
    """Serve jobs until standard input ends."""
    confine()
    serve(media_jobs.HELLO, lambda frame: media_jobs.encode(answer(media_jobs.decode_job(frame))))


if __name__ == "__main__":
    main()
