"""The path of the sidecar's socket, and the lock that makes one process its daemon.

Invariants: the socket is in a directory that only its owner may enter. The process that holds the lock on
`<socket>.lock` is the daemon of that socket. The kernel releases the lock when that process dies, so a dead daemon's
socket can be taken over safely.
Failure behaviour: `ConflictError` names the pid of the daemon that holds the socket. `AccessDeniedError` names a
directory that is not private.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.dataio.core.errors import ConflictError, UsageError
from headrace.dataio.core.files import private_directory

SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket's path on Linux."""
OFF = "off"
"""The value of `$HEADRACE_SIDECAR` that disables the sidecar."""


def default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """The default path of the socket.

    It is `$HEADRACE_SIDECAR`, else `headrace/sidecar.sock` in `$XDG_RUNTIME_DIR`, else `sidecar.sock` in this user's own
    directory in /tmp.
    """
    named = environ.get("HEADRACE_SIDECAR")
    if named and named != OFF:
        return Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headrace" / "sidecar.sock"
    return Path(f"/tmp/headrace-{os.geteuid()}/sidecar.sock")


def chosen(sidecar: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The socket path for a client's `sidecar` argument; None for no sidecar.

    "auto" is the default socket, unless `$HEADRACE_SIDECAR` is `off`.
    """
    if sidecar != "auto":
        return None if sidecar is None else Path(sidecar)
    return None if environ.get("HEADRACE_SIDECAR") == OFF else default_socket(environ)


def claim(socket: Path, *, keep: bool = False) -> int:
    """Become the daemon of `socket`; returns the lock's descriptor, which must stay open until the daemon ends.

    A dead daemon's socket file is removed. With `keep` it stays, because the service manager created it.
    """
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES:
        raise UsageError(
            f"{socket} is too long for a Unix socket: the limit is {SOCKET_PATH_BYTES} bytes",
            hint="give a shorter path with --socket",
        )
    private_directory(socket.parent)
    lock = os.open(f"{socket}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise ConflictError(
            f"{socket} is in use by a sidecar with process id {holder}",
            hint="use that sidecar, stop it, or give another --socket",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    if not keep:
        socket.unlink(missing_ok=True)
    return lock
