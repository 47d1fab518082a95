"""Real file systems for tests: small ones, full ones, read-only ones."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory, mounted at `folder` with these options; skips with the reason where that is denied."""
    command = ["mount", "-t", "tmpfs", "-o", options, "headrace-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """No process can write to the `disk` at `folder` meanwhile."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
