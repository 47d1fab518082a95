"""The processes of `WorkerPool` as forks of a process that has imported what they need, so that one costs milliseconds.

Purpose: most tests pack, index and verify a few files, and the imports of the processes took longer than the work.
Invariants: a worker is a process of its own, with the pipes, the limits and the exit code of a real one. It has no torch.
Other commands, such as those of stubs, are not started here, and neither is anything in a fork of the process of the tests.
The fixture `real_workers` is for tests of the start, the memory and the imports of a worker.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import cast

from headrace.dataio.core.programs import environment
from headrace.dataio.shards.ingest import probe_pool, row_pool, row_reader
from headrace.dataio.shards.media import messages, prepare  # noqa: F401 - imported before the fork, as the next one
from headrace.dataio.shards.workers import decode, jobs, worker  # noqa: F401
from tests.support.nursery import Nursery

_KINDS = {tuple(probe_pool._COMMAND): "probe", tuple(jobs.COMMAND): "decode", tuple(row_pool.READER): "rows"}
_SERVE = {"probe": worker.serve_probes, "decode": worker.serve_decoding, "rows": row_reader.serve_rows}


@cache
def _nursery() -> Nursery:
    made = Nursery()
    atexit.register(made.close)
    return made


def start(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    """The process that `worker_pool.start_process` would start. None if it cannot be forked."""
    kind = _KINDS.get(tuple(command))
    if kind is None or _nursery().owner != os.getpid():
        return None
    return cast("subprocess.Popen[bytes]", _nursery().start_worker(__name__, kind, env=environment()))


def main(kind: str) -> None:
    """In the fork: serve until the standard input ends."""
    _SERVE[kind]()
