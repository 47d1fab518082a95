"""The process that decodes untrusted media for `verify` and `preview`.

Invariants: it answers each frame with one frame. It dies with the process that started it. It may use
`limits.PROBE_MEMORY_BYTES` for data, and it holds one decoded picture at a time.
Failure behaviour: errors of libav become part of the answer. A crash or a hang ends only this process, and its pool
detects that.
"""

from __future__ import annotations

from headrace.dataio.shards.workers import media_jobs
from headrace.dataio.shards.workers.probe_worker import confine, serve


def answer(job: media_jobs.Job) -> media_jobs.Answer:
    """Run one job and return its answer."""
    from headrace.dataio.shards.workers import decode_all, pictures

    return decode_all.run(job) if isinstance(job, media_jobs.DecodeJob) else pictures.run(job)


def main() -> None:
    """Serve jobs until standard input ends."""
    confine()
    serve(media_jobs.HELLO, lambda frame: media_jobs.encode(answer(media_jobs.decode_job(frame))))


if __name__ == "__main__":
    main()
