"""systemd's protocols: socket activation, readiness and the watchdog.

Purpose: the service manager creates the listening socket, so clients that connect while the daemon starts or restarts
wait in the kernel's queue.
Invariants: the daemon uses passed descriptors only if `$LISTEN_PID` is its own pid. If there are several, it uses the
one that is named `sidecar` in `$LISTEN_FDNAMES`. It calls `listen` again, so clients see its pid and not the manager's.
Messages are sent only to `$NOTIFY_SOCKET`. The daemon's loop sends a watchdog message twice in every interval of
`$WATCHDOG_USEC`, so systemd restarts a daemon whose loop hangs.
Failure behaviour: `UsageError` for a descriptor that is not a listening Unix stream socket with a path. A notification
that cannot be delivered is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from headrace.dataio.core.errors import UsageError

FIRST_DESCRIPTOR = 3
MAX_DESCRIPTORS = 1024
NAME = "sidecar"
BACKLOG = 1024


def given(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """The passed descriptors by name. The key of an unnamed one is its number."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = environ.get("LISTEN_FDS", "")
    if not count.isdecimal() or not 0 < int(count) <= MAX_DESCRIPTORS:
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    return {
        (names[n] if n < len(names) and names[n] else str(FIRST_DESCRIPTOR + n)): FIRST_DESCRIPTOR + n
        for n in range(int(count))
    }


def listening(environ: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The passed socket, or None when the daemon must create its own."""
    descriptors = given(environ)
    fd = descriptors.get(NAME)
    if fd is None and len(descriptors) == 1:
        (name, only_fd), *_ = descriptors.items()
        fd = only_fd if name.endswith(".socket") or name.isdecimal() or name == "unknown" else None
    return _open_socket(fd) if fd is not None else None


def path_of(sock: socket.socket) -> Path:
    """The filesystem path of a bound Unix socket."""
    return Path(os.fsdecode(sock.getsockname()))


def _open_socket(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise _unusable(fd, "is not a socket")
    sock = socket.socket(fileno=fd)
    try:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            raise _unusable(fd, "is not a Unix stream socket: ListenStream= must be a path")
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise _unusable(fd, "does not listen: set Accept=no")
        if not os.fsencode(sock.getsockname()).startswith(b"/"):
            raise _unusable(fd, "is not bound to an absolute path")
    except BaseException:
        sock.detach()
        raise
    sock.setblocking(False)
    sock.listen(BACKLOG)
    return sock


def _unusable(fd: int, reason: str) -> UsageError:
    return UsageError(
        f"descriptor {fd}, which LISTEN_FDS passes, {reason}", hint="see deploy/systemd for a socket unit"
    )


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `state`, such as `READY=1`. Returns whether a notification socket is set and accepted it."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        return True
    return False


def ready(environ: Mapping[str, str] = os.environ) -> None:
    """Report that the daemon is ready, and start the watchdog messages if systemd expects them.

    Call it on the loop.
    """
    if notify("READY=1", environ) and (every := _interval(environ)):
        _send_watchdog(asyncio.get_running_loop(), every, environ)


def _send_watchdog(loop: asyncio.AbstractEventLoop, every: float, environ: Mapping[str, str]) -> None:
    notify("WATCHDOG=1", environ)
    loop.call_later(every, _send_watchdog, loop, every, environ)


def _interval(environ: Mapping[str, str]) -> float:
    watchdog_usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    for_this_process = pid in ("", str(os.getpid()))
    return int(watchdog_usec) / 2e6 if for_this_process and watchdog_usec.isdecimal() else 0.0
