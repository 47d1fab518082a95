"""Opens a file in one system call, unless its path contains a symbolic link.

Purpose: to check each component of a path before opening it costs six calls, and another process may create a link
between them. With `openat2`, the kernel checks the path while it opens the file.

Invariant: no component of the path of a returned descriptor was a symbolic link.

Failure behaviour: `open_plain` returns None for every failure, and if the kernel lacks the call. The caller then finds
the error step by step.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OPENAT2 = 437
"""The system call's number, the same on every architecture; since Linux 5.6."""
_AT_FDCWD = -100
_NO_LINKS = 0x04
"""RESOLVE_NO_SYMLINKS."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW = _How(FLAGS, 0, _NO_LINKS)
_missing = False


def open_plain(path: str) -> int | None:
    """Open `path` read-only; None if that fails for any reason."""
    global _missing
    if _missing or "\0" in path:
        return None
    fd = int(_syscall()(_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(_HOW), ctypes.sizeof(_HOW)))
    if fd < 0:
        _missing = ctypes.get_errno() == errno.ENOSYS
        return None
    return fd


@cache
def _syscall() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call
