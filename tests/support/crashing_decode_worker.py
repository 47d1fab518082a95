"""The real decode process, which really crashes or really hangs on H.264 clips that begin at frame 13 or 14."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from headrace.loaders.decode import subprocess_worker

CRASH, HANG = 13, 14
_real = subprocess_worker.answer


def answer(task: subprocess_worker.Task) -> subprocess_worker.Answer:
    """As the worker's, but for the doomed."""
    first = (
        task.wanted.values[0] if isinstance(task, subprocess_worker.ClipTask) and task.info.codec == "h264" else None
    )
    if first == CRASH:
        _mark("crash")
        ctypes.string_at(0)  # reads address 0: SIGSEGV
    if first == HANG:
        _mark("hang")
        while True:
            time.sleep(1)
    return _real(task)


def _mark(what: str) -> None:
    with open(os.environ["DOOMED_MARK"], "a") as file:
        file.write(f"{what} {os.getpid()}\n")


if __name__ == "__main__":
    subprocess_worker.answer = answer
    sys.exit(subprocess_worker.main())
