"""Folders that one worker of a run makes and that all workers read: packed datasets, an installed wheel.

Invariants: a folder is made once in a run, at its final path. Tests change nothing in it.
A worker that needs the folder during this time waits.
Failure behaviour: a folder that could not be made is removed, and made again by the next worker that needs it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` of this run. The first worker that asks for it calls `make(folder)`, an empty folder."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the folder of all workers
    folder, made = root / f"shared-{name}", root / f"shared-{name}.made"
    with open(root / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
