"""The programs `python`, `headrace` and `torchrun` as forks of the nursery, for shells that start many of them.

Most of the time of such a program is imports. `ForkedPrograms` writes three small clients into a folder. A client sends its
arguments, its environment and its outputs to the process of the tests, which has the nursery fork the program. The client
passes signals on, and ends as the program does. torchrun starts its ranks in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from tests.support import nursery

_CLIENT = """#!{python} -SEs
import json, os, signal, socket, sys
passed = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}}
signal.pthread_sigmask(signal.SIG_BLOCK, passed)
words = sys.argv[1:]
source = sys.stdin.read() if words[:1] == ["-"] else ""
asked = dict(program={program!r}, words=words, source=source, folder=os.getcwd(), env=dict(os.environ))
sock = socket.socket(socket.AF_UNIX)
sock.connect({address!r})
data = json.dumps(asked).encode()
socket.send_fds(sock, [len(data).to_bytes(8, "big")], [1, 2])
sock.sendall(data)
answers = sock.makefile()
pid = int(answers.readline())
for number in passed:
    signal.signal(number, lambda number, frame: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
code = int(answers.readline())
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_POLL_SECONDS = 0.02


class ForkedPrograms:
    """The clients in `folder`, and what answers them. At the end of the context, all programs are dead."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._living = folder, threading.Lock(), set[int]()
        self._ended = False

    def __enter__(self) -> ForkedPrograms:
        self._folder.mkdir()
        address = str(self._folder / "socket")
        for program in ("python", "headrace", "torchrun"):
            path = self._folder / program
            path.write_text(_CLIENT.format(python=sys.executable, program=program, address=address))
            path.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            for pid in self._living:
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)

    def _accept(self) -> None:
        threads = list[threading.Thread]()
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                threads.append(threading.Thread(target=self._answer, args=(connection,), daemon=True))
                threads[-1].start()
        for thread in threads:
            thread.join(60)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            header, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
            data = b""
            while len(data) < int.from_bytes(header, "big"):
                data += connection.recv(1 << 16)
            process = self._start(json.loads(data), descriptors)
            with contextlib.suppress(OSError):  # the client may be dead
                connection.sendall(b"%d\n" % process.pid)
            while True:
                with self._lock:
                    code = process.poll()
                    if code is not None:
                        self._living.discard(process.pid)
                        break
                time.sleep(_POLL_SECONDS)
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % code)

    def _start(self, asked: dict[str, object], descriptors: list[int]) -> nursery.Process:
        words = [asked["program"], asked["source"], *asked["words"]]  # type: ignore[misc]
        with self._lock:
            try:
                pid = nursery.nursery().ask(
                    *descriptors,
                    module="tests.support.forked_program",
                    arguments=words,
                    env=asked["env"],
                    folder=asked["folder"],
                )
            finally:
                for fd in descriptors:
                    os.close(fd)
            assert isinstance(pid, int), pid
            self._living.add(pid)
            if self._ended:
                os.kill(pid, signal.SIGKILL)
        return nursery.Process(nursery.nursery(), pid)
