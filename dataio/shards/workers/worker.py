"""The worker process that reads untrusted media. It answers requests on standard input until the input ends.

Purpose: `python -m headrace.dataio.shards.workers.worker probe` prepares files for `pack` and `index`. With `decode`,
it decodes members for `verify` and `preview`.

Invariants:

* The worker first sends its hello message. Then it answers each message with one message (a 4-byte length, then
  msgpack).
* The kernel kills the worker when the process that started it ends (on Linux).
* Allocations fail above `limits.PROBE_MEMORY_BYTES` of data.

Failure behaviour: errors of libav become part of the answer. A crash or a hang affects only this process. Its
`WorkerPool` detects that and continues with a new process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO

from headrace.dataio.core import limits

PROBE_HELLO, DECODE_HELLO = b"headrace probe 1", b"headrace media 1"
"""The first message of each kind of worker."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel send SIGKILL when the parent ends, even if this process hangs inside a decoder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(most: int = limits.PROBE_MEMORY_BYTES) -> None:
    """Let allocations fail above `most` bytes, so that one file cannot exhaust the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = most if hard < 0 else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def write_frame(out: IO[bytes], payload: bytes) -> None:
    """Send one message."""
    out.write(struct.pack(">I", len(payload)) + payload)
    out.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end."""
    head = source.read(4)
    if len(head) < 4:
        return None
    return source.read(int(struct.unpack(">I", head)[0]))


def serve(hello: bytes, answer: Callable[[bytes], bytes]) -> None:
    """Send `hello`, then answer each message on standard input until the input ends."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # text that a library prints must not mix with the answers
        gc.freeze()  # collections need not look at the modules
        write_frame(out, hello)
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            write_frame(out, answer(frame))


def confine(memory: int = limits.PROBE_MEMORY_BYTES) -> None:
    """Tie this process to its parent and limit its memory. Call this before loading anything else."""
    die_with_parent()
    limit_memory(memory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process


def serve_probes() -> None:
    """Serve the packer's tasks until standard input ends."""
    confine()
    from headrace.dataio.shards.media.messages import decode_task, encode_outcome
    from headrace.dataio.shards.media.prepare import prepare

    serve(PROBE_HELLO, lambda frame: encode_outcome(prepare(decode_task(frame))))


def serve_decoding() -> None:
    """Serve the jobs of `verify` and `preview` until standard input ends."""
    confine()
    from headrace.dataio.shards.workers import decode, jobs

    serve(DECODE_HELLO, lambda frame: jobs.encode(decode.run(jobs.decode_job(frame))))


if __name__ == "__main__":
    {"probe": serve_probes, "decode": serve_decoding}[sys.argv[1]]()
