"""Where the sidecar's socket is, and who holds it.

Invariants: the socket lies in a directory that only its owner may enter; whoever holds the lock on `<socket>.lock` is the one
daemon of that socket, and the kernel drops the lock when it dies, so a dead daemon's socket is taken over without guessing.
Failure behaviour: `ConflictError` names the pid of the daemon that holds the socket; `AccessDeniedError` a directory that
is not private.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.dataio.core.errors import ConflictError, UsageError
from headrace.dataio.core.files import private_directory

SOCKET_PATH_BYTES = 107
"""The most that a Unix socket's address holds on Linux."""
OFF = "off"
"""What `$HEADRACE_SIDECAR` says where no sidecar shall be used."""


def default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """`$HEADRACE_SIDECAR`, or `headrace/sidecar.sock` in `$XDG_RUNTIME_DIR`, or in a directory of this user's in /tmp."""
    named = environ.get("HEADRACE_SIDECAR")
    if named and named != OFF:
        return Path(named)
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headrace" / "sidecar.sock"
    return Path(f"/tmp/headrace-{os.geteuid()}/sidecar.sock")


def chosen(sidecar: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The socket that a client means by `sidecar`: "auto" is the default one, unless `$HEADRACE_SIDECAR` is `off`."""
    if sidecar != "auto":
        return None if sidecar is None else Path(sidecar)
    return None if environ.get("HEADRACE_SIDECAR") == OFF else default_socket(environ)


def claim(socket: Path, *, there: bool = False) -> int:
    """Become the daemon of `socket`: returns the lock's descriptor, to be kept open until the daemon ends. What a dead daemon
    left is
    removed, unless the socket is `there` on purpose."""
    if len(os.fsencode(socket)) > SOCKET_PATH_BYTES:
        raise UsageError(
            f"{socket} is too long for a socket: the most is {SOCKET_PATH_BYTES} bytes", hint="use --socket"
        )
    private_directory(socket.parent)
    lock = os.open(f"{socket}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise ConflictError(
            f"{socket} belongs to a sidecar that runs as process {holder}",
            hint="use that one, stop it, or name another --socket",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    if not there:
        socket.unlink(missing_ok=True)
    return lock
