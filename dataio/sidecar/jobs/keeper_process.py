"""A process that holds descriptors for a daemon that may die. It uses only the standard library, so it is small.

Invariants: a descriptor is held from `put` until `drop`, also while no daemon is connected. The keeper serves only
processes of its own user. It holds at most `HELD` descriptors, under names of at most 64 characters.
Failure behaviour: while no process is connected, the keeper exits in these cases:

- It holds nothing. (Before the first connection, it waits `FIRST_SECONDS`.)
- No process has been connected for `ALONE_SECONDS`.
- Its socket was unlinked, so no process can connect any more.

An invalid message ends its connection.

Messages are packets: `put NAME` with one descriptor, `drop NAME`, `take NAME`, `list`, `who`. Answers are `ok` or `no`.
The `ok` for `take` has the descriptor, the one for `list` the names, separated by spaces, and the one for `who` the
keeper's pid.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import sys
import time

HELD = 1024
ALONE_SECONDS = 3600.0
FIRST_SECONDS = 10.0
_PACKET = 64 << 10


class KeeperProcess:
    """Serves `listening` until the keeper must exit."""

    def __init__(self, listening: socket.socket, folder: int, alone: float) -> None:
        """`folder`: a descriptor of the directory that contains the socket `listening` as `keeper`."""
        self._listening, self._folder, self._limit = listening, folder, alone
        self._held: dict[str, int] = {}
        self._peers: list[socket.socket] = []
        self._alone_since: float | None = time.monotonic()
        self._had_peer = False

    def serve(self) -> None:
        while not self._is_useless():
            ready, _, _ = select.select([self._listening, *self._peers], [], [], 0.5)
            for sock in ready:
                if sock is self._listening:
                    self._accept()
                else:
                    self._answer(sock)

    def _is_useless(self) -> bool:
        if self._alone_since is None:
            return False
        alone = time.monotonic() - self._alone_since
        return (
            alone >= self._limit
            or not self._can_be_found()
            or (not self._held and (self._had_peer or alone >= FIRST_SECONDS))
        )

    def _can_be_found(self) -> bool:
        try:
            os.stat("keeper", dir_fd=self._folder)
        except OSError:
            return False
        return True

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            sock.close()
            return
        self._peers.append(sock)
        self._alone_since, self._had_peer = None, True

    def _answer(self, sock: socket.socket) -> None:
        try:
            data, ancillary, _, _ = sock.recvmsg(_PACKET, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            descriptors = array.array("i")
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
            if not data or not self._execute(sock, data.decode("ascii", "replace").split(" "), list(descriptors)):
                self._disconnect(sock)
        except OSError:
            self._disconnect(sock)

    def _execute(self, sock: socket.socket, fields: list[str], descriptors: list[int]) -> bool:
        """Execute a message; returns whether it was valid."""
        if fields[0] == "put" and len(fields) == 2 and len(descriptors) == 1 and 0 < len(fields[1]) <= 64:
            room = len(self._held) < HELD or fields[1] in self._held
            for replaced in [self._held.pop(fields[1], -1)] if room else descriptors:
                if replaced >= 0:
                    os.close(replaced)
            if room:
                self._held[fields[1]] = descriptors[0]
            sock.sendall(b"ok" if room else b"no")
            return True
        for fd in descriptors:
            os.close(fd)
        if fields == ["who"]:
            sock.sendall(f"ok {os.getpid()}".encode())
        elif fields == ["list"]:
            sock.sendall(" ".join(["ok", *self._held]).encode())
        elif fields[0] == "drop" and len(fields) == 2:
            if (fd := self._held.pop(fields[1], -1)) >= 0:
                os.close(fd)
            sock.sendall(b"ok")
        elif fields[0] == "take" and len(fields) == 2:
            held_fd = self._held.get(fields[1])
            rights = [] if held_fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [held_fd]))]
            sock.sendmsg([b"no" if held_fd is None else b"ok"], rights)
        else:
            return False
        return True

    def _disconnect(self, sock: socket.socket) -> None:
        sock.close()
        self._peers.remove(sock)
        if not self._peers:
            self._alone_since = time.monotonic()


def main() -> None:
    """`keeper_process.py FOLDER [SECONDS]`, with the listening socket as standard input.

    The process exits at once; its child serves.
    """
    if os.fork():
        os._exit(0)
    with socket.socket(fileno=os.dup(0)) as listening:
        KeeperProcess(listening, int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else ALONE_SECONDS).serve()


if __name__ == "__main__":
    main()
