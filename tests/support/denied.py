"""Places that this process may not enter, also where the tests run as root, whom modes do not stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def denied(path: Path, mode: int = 0) -> Iterator[None]:
    """Give `path` this mode, and, where it is root's, let this thread use files as nobody's; undone at the end."""
    libc, me, was = ctypes.CDLL(None), os.geteuid(), path.stat().st_mode
    path.chmod(mode)
    libc.setfsuid(_NOBODY if me == 0 else me)
    try:
        yield
    finally:
        libc.setfsuid(me)
        path.chmod(was)
