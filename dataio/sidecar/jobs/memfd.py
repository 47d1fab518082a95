"""Sealed memory files, in which a trainer passes an arena and a put plan to the daemon.

Invariants: a file that `check_arena` or `check_plan` accepts cannot shrink, so reading its mapping cannot kill the
reader (SIGBUS). A plan cannot change either.
Failure behaviour: `UsageError` says what is wrong with a descriptor.
"""

from __future__ import annotations

import fcntl
import os

from headrace.dataio.core import limits
from headrace.dataio.core.errors import UsageError

PLAN_BYTES = 256 * limits.MIB
_PLAN_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_HINT = "make it with memfd_create(MFD_ALLOW_SEALING), set its size, then add the seals"


def sealed(name: str, data: bytes) -> int:
    """A new memory file that holds `data` and cannot change. The caller must close the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)  # the position is shared with the receiver of the descriptor
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _PLAN_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_arena(fd: int) -> int:
    """Check that the arena is a memory file that cannot shrink; returns its size."""
    return _check(fd, "the arena", fcntl.F_SEAL_SHRINK)


def check_plan(fd: int) -> int:
    """Check that the plan is a memory file that cannot change and is not too large; returns its size."""
    size = _check(fd, "the plan", _PLAN_SEALS)
    if size > PLAN_BYTES:
        raise UsageError(f"the plan has {size} bytes; the limit is {PLAN_BYTES}")
    return size


def _check(fd: int, subject: str, required_seals: int) -> int:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise UsageError(f"{subject} is not a memory file", hint=_HINT) from None
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise UsageError(f"{subject} cannot be read through this descriptor")
    if seals & required_seals != required_seals:
        names = {
            fcntl.F_SEAL_SHRINK: "F_SEAL_SHRINK",
            fcntl.F_SEAL_GROW: "F_SEAL_GROW",
            fcntl.F_SEAL_WRITE: "F_SEAL_WRITE",
        }
        missing = " and ".join(name for seal, name in names.items() if required_seals & ~seals & seal)
        raise UsageError(f"{subject} lacks {missing}", hint=_HINT)
    return os.fstat(fd).st_size
