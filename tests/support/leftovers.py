"""What a process of the tests must not leave behind: temporary files, processes, threads.

Each process has a temporary folder of its own, which its children inherit, so what lies there at the end is what its own tests
left, whatever others do meanwhile. A child that has ended is none: whether something happened to wait for it is luck.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
import time
from pathlib import Path

from headrace.dataio.core.files import Scratch

_SECONDS = 60.0
"""For what is about to end anyway; only what will not is waited for so long."""
_FILES = ("ray", "torchinductor_", "pymp-", "torch_")
"""Kept by packages until their process ends, or for the next one."""
_THREADS = ("MainThread", "fsspecIO", "asyncio_", "execnet", "Dummy", "ray_", "pydevd", "Hypothesis")
"""Of packages, one for the whole process."""
_PROCESSES = (
    "tests.support.nursery",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "raylet",
    "gcs_server",
)


class Place:
    """The temporary folder of this process of the tests."""

    def __init__(self) -> None:
        root = os.environ.setdefault(
            "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
        )  # where pytest keeps the tests' folders
        self._scratch = Scratch("mt-", root)
        self._before = os.environ.get("TMPDIR"), tempfile.tempdir
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._scratch.path)

    def close(self) -> None:
        variable, tempfile.tempdir = self._before
        os.environ.pop("TMPDIR")
        if variable is not None:
            os.environ["TMPDIR"] = variable
        self._scratch.remove()

    def left(self) -> list[str]:
        """Names of what is left, after a while in which it may end by itself."""
        until = time.monotonic() + _SECONDS
        while found := [*self._files(), *_processes(), *_threads()]:
            if time.monotonic() > until:
                break
            gc.collect()
            time.sleep(0.05)
        return found

    def _files(self) -> list[str]:
        names = sorted(os.listdir(self._scratch.path))
        return [f"{self._scratch.path / name}" for name in names if not name.startswith(_FILES)]


def _processes() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in _read(task / "children").split():
            command = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
            if command and not any(known in command for known in _PROCESSES):
                found.append(f"process {pid}: {command[:200]}")
    return found


def _read(path: Path) -> str:
    """Nothing of a thread or process that has ended since it was listed."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _threads() -> list[str]:
    return [f"thread {t.name}" for t in threading.enumerate() if not t.name.startswith(_THREADS)]
