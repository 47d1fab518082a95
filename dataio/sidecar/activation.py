"""A listening socket that the service manager has made before the daemon started (systemd's socket activation).

Purpose: clients that come while the daemon starts, or starts again, wait in the kernel's queue.
Invariants: descriptors are taken only where `$LISTEN_PID` is this process; of several the one that `$LISTEN_FDNAMES` calls
`sidecar`. Whoever connects from then on sees this process at the other end, not the manager, since it says `listen` again.
Failure behaviour: `UsageError` for a descriptor that is no listening Unix stream socket with a path.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from headrace.dataio.core.errors import UsageError

FIRST = 3
MOST = 1024
NAME = "sidecar"
BACKLOG = 1024


def given(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The descriptors that were passed, by name; those without one by number."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = environ.get("LISTEN_FDS", "")
    if not count.isdecimal() or not 0 < int(count) <= MOST:
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    return {(names[n] if n < len(names) and names[n] else str(FIRST + n)): FIRST + n for n in range(int(count))}


def listening(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The socket to serve, or None where the daemon is to make its own."""
    found = given(environ)
    fd = found.get(NAME)
    if fd is None and len(found) == 1:
        (name, only), *_ = found.items()
        fd = only if name.endswith(".socket") or name.isdecimal() or name == "unknown" else None
    return _checked(fd) if fd is not None else None


def path_of(sock: socket.socket) -> Path:
    """Where clients find it."""
    return Path(os.fsdecode(sock.getsockname()))


def _checked(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise _unusable(fd, "is no socket")
    sock = socket.socket(fileno=fd)
    try:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            raise _unusable(fd, "is no Unix stream socket: ListenStream= names a path")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _unusable(fd, "does not listen: Accept=no is meant")
        if not os.fsencode(sock.getsockname()).startswith(b"/"):
            raise _unusable(fd, "is not bound to an absolute path")
    except BaseException:
        sock.detach()
        raise
    sock.setblocking(False)
    sock.listen(BACKLOG)
    return sock


def _unusable(fd: int, why: str) -> UsageError:
    return UsageError(f"descriptor {fd}, which LISTEN_FDS passes, {why}", hint="see deploy/systemd for a socket unit")
