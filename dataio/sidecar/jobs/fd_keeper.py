"""The daemon's side of the keeper, a process that keeps arenas open when the daemon dies.

Purpose: the daemon calls `put` when it accepts a job, and `drop` when the job's arena is released. A new daemon calls
`take` to get the arenas of the jobs that it continues.
Invariants: the daemon starts the keeper process when there is a descriptor to hold. When there is none, it disconnects,
and the keeper exits. The daemon remains the owner of its own descriptors. Not thread-safe.
Failure behaviour: a keeper that died is replaced, and the new one gets all descriptors. If no keeper can be started,
this is logged once, and jobs run without it. Then a job loses its arena if the daemon and the worker both die.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.dataio.core.errors import HeadraceError, TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.jobs import keeper_process

SECONDS = 5.0
TRIES = 3
_log = get_logger(__name__)


class FdKeeper:
    """Descriptors by name, in a keeper that listens in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._path = f"/proc/self/fd/{self._folder}/keeper"  # short, because the address of a Unix socket is limited
        self._sock: socket.socket | None = None
        self._held: dict[str, int] = {}

    def put(self, name: str, fd: int) -> None:
        """Hold a copy of `fd`, which must stay open here until `drop`."""
        self._held[name] = fd
        try:
            self._put(name, fd)
        except (OSError, HeadraceError, subprocess.TimeoutExpired):
            self._restore()

    def drop(self, name: str) -> None:
        """Release the descriptor; does nothing when it is not held."""
        self._held.pop(name, None)
        with contextlib.suppress(OSError, HeadraceError):
            if self._sock is not None:
                self._ask(f"drop {name}")
        if not self._held:
            self._disconnect()

    def take(self) -> dict[str, int]:
        """The descriptors that an earlier daemon left, by name.

        The caller owns these copies, which must stay open until `drop`. The keeper holds its own until then.
        """
        taken: dict[str, int] = {}
        with contextlib.suppress(OSError, HeadraceError):
            if self._sock is None:
                self._connect()
            for name in self._ask("list")[0].split(" ")[1:]:
                _, descriptors = self._ask(f"take {name}")
                if descriptors:
                    taken[name] = self._held[name] = descriptors[0]
        if not taken:
            self._disconnect()
        return taken

    @property
    def holds(self) -> int:
        """Number of descriptors that a connected keeper holds."""
        return len(self._held) if self._sock is not None else 0

    def close(self) -> None:
        """Disconnect; the keeper still holds its descriptors."""
        self._disconnect()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def _put(self, name: str, fd: int) -> None:
        if self._sock is None:
            self._connect_or_start()
        if self._ask(f"put {name}", [fd])[0] != "ok":
            raise TransientError("the keeper is full")

    def _restore(self) -> None:
        """Reconnect to the keeper, or start another one, and pass it all descriptors."""
        for tries in range(TRIES):
            self._disconnect()
            time.sleep(tries * 0.1)  # a dying keeper still accepts connections for a moment
            try:
                for name, fd in self._held.items():
                    self._put(name, fd)
                return
            except (OSError, HeadraceError, subprocess.TimeoutExpired) as error:
                reason = str(error)
        self._disconnect()
        warn_once(
            _log, f"the keeper process cannot be started, so staged checkpoints do not survive this daemon: {reason}"
        )

    def _ask(self, text: str, descriptors: Sequence[int] = ()) -> tuple[str, list[int]]:
        if self._sock is None:
            raise TransientError("there is no keeper")
        wire.send(self._sock, text.encode(), descriptors)
        data, received = wire.receive(self._sock)
        if not data:
            raise TransientError("the keeper ended")
        return data.decode("ascii", "replace"), received

    def _connect_or_start(self) -> None:
        try:
            self._connect()
        except OSError:
            self._start()
            self._connect()

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(SECONDS)
        try:
            sock.connect(self._path)
            if wire.peer(sock)[1] != os.geteuid():
                raise TransientError("the keeper belongs to another user")
        except BaseException:
            sock.close()
            raise
        self._sock = sock

    def _start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self._path)
            listening.listen(8)
            command = [sys.executable, "-I", "-S", keeper_process.__file__, str(self._folder)]
            quiet = subprocess.DEVNULL
            subprocess.run(  # it exits at once; its child is the keeper
                command,
                stdin=listening.fileno(),
                stdout=quiet,
                stderr=quiet,
                pass_fds=[self._folder],
                start_new_session=True,
                check=False,
                timeout=SECONDS,
            )

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
