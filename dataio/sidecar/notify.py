"""Tells the service manager that the daemon is ready, and that it is alive: systemd's notify protocol.

Invariant: says something only where `$NOTIFY_SOCKET` asks for it; a sign of life is sent by the daemon's own loop, at half the
time that `$WATCHDOG_USEC` allows, so a loop that hangs is restarted.
Failure behaviour: a manager that does not listen is no reason to stop: the message is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `state`, such as `READY=1`; whether it was asked for and taken."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        return True
    return False


def ready(environ: Mapping[str, str] = os.environ) -> None:
    """On the daemon's loop: it serves from now on, and says so again and again where a watchdog wants to hear it."""
    if notify("READY=1", environ) and (every := _interval(environ)):
        _alive(asyncio.get_running_loop(), every, environ)


def _alive(loop: asyncio.AbstractEventLoop, every: float, environ: Mapping[str, str]) -> None:
    notify("WATCHDOG=1", environ)
    loop.call_later(every, _alive, loop, every, environ)


def _interval(environ: Mapping[str, str]) -> float:
    micros, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    mine = pid in ("", str(os.getpid()))
    return int(micros) / 2e6 if mine and micros.isdecimal() else 0.0
