"""Programs of the tests as forks of one process that has imported them already, so that one costs milliseconds, not seconds.

Purpose: a program is a module with `main(*arguments)`; it runs in a process of its own, with its own environment, and ends as a
program does: its exit handlers run, `main`'s result or an uncaught error is its exit code, a signal really ends it. `start` gives
back what `subprocess.Popen` would.
Invariants: nothing runs in the nursery itself but imports, and it has one thread whenever it forks. The nursery dies with the
process of the tests, and its children die with it. A child is a zombie until somebody waits for it, so its number stays its own.
Failure behaviour: a module that cannot be imported is a child that ends with its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tests.support import botocore_models

_T = TypeVar("_T")
ROOT = Path(__file__).parents[2]
_FRAME = 1 << 20
_NO_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Of what is imported, before it is used."""
_PR_SET_PDEATHSIG = 1


class Process:
    """A program of the nursery: as much of `subprocess.Popen` as the tests use, without pipes."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None
        self._polling = threading.Lock()  # the nursery can wait for a child only once

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                self.returncode = self._nursery.ask(poll=self.pid)
            return self.returncode

    def wait(self, timeout: float = 180) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a child of the nursery", timeout)
            time.sleep(0.003)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Child(Process):
    """A program with a text pipe for each of its outputs."""

    def __init__(self, nursery: Nursery, pid: int, stdout: int, stderr: int) -> None:
        super().__init__(nursery, pid)
        self.stdout: TextIO = open(stdout, encoding="utf-8")  # noqa: SIM115 - closed by `communicate`, or as Popen's are
        self.stderr: TextIO = open(stderr, encoding="utf-8")  # noqa: SIM115

    def communicate(self, timeout: float = 180) -> tuple[str, str]:
        """The rest of both pipes. Waits for the process to end."""
        found = self._drain(lambda pipe: pipe.read(), timeout)
        return found[0] or "", found[1] or ""

    def communicate_bytes(self, timeout: float = 180) -> tuple[bytes, bytes]:
        """Both pipes as bytes. Nothing may have been read from them before."""
        found = self._drain(lambda pipe: pipe.buffer.read(), timeout)
        return found[0] or b"", found[1] or b""

    def _drain(self, read: Callable[[TextIO], _T], timeout: float) -> list[_T | None]:
        found: list[_T | None] = [None, None]

        def drain(n: int, pipe: TextIO) -> None:
            with contextlib.suppress(ValueError), pipe:
                found[n] = read(pipe)

        readers = [
            threading.Thread(target=drain, args=pair, daemon=True) for pair in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        until = time.monotonic() + timeout
        for reader in readers:
            reader.join(max(until - time.monotonic(), 0.0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a child of the nursery", timeout)
        self.wait(max(until - time.monotonic(), 0.0))
        return found


class Worker(Process):
    """A process of a `WorkerPool`, with unbuffered pipes to its standard input and from its standard output."""

    def __init__(self, nursery: Nursery, pid: int, stdin: int, stdout: int) -> None:
        super().__init__(nursery, pid)
        self.stdin, self.stdout = open(stdin, "wb", buffering=0), open(stdout, "rb", buffering=0)  # noqa: SIM115


class Nursery:
    """The process that forks. Safe for several threads, but not for a fork of the process that made it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _FRAME)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **_NO_THREADS, "PYTHONPATH": _path()},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, *descriptors: int, **what: object) -> Any:
        with self._lock:
            socket.send_fds(self._sock, [json.dumps(what).encode()], descriptors)
            answer = self._sock.recv(_FRAME)
        assert answer, "the nursery has ended"
        return json.loads(answer)

    def fork(self, stdout: int, stderr: int, module: str, *arguments: str, env: Mapping[str, str]) -> int:
        """The number of the process that runs `module.main(*arguments)` with these outputs."""
        pid = self.ask(stdout, stderr, module=module, arguments=arguments, env=dict(env), folder=os.getcwd())
        assert isinstance(pid, int), pid
        return pid

    def start(self, module: str, *arguments: str, env: Mapping[str, str]) -> Child:
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        try:
            pid = self.ask(
                theirs_out, theirs_err, module=module, arguments=arguments, env=dict(env), folder=os.getcwd()
            )
            assert isinstance(pid, int), pid
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
        return Child(self, pid, ours_out, ours_err)

    def start_worker(self, module: str, *arguments: str, env: Mapping[str, str]) -> Worker:
        """Run `module.main(*arguments)` with pipes to its standard input and output. Its errors are not kept."""
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            pid = self.ask(
                *(theirs_in, theirs_out, nowhere),
                module=module,
                arguments=arguments,
                env=dict(env),
                folder=os.getcwd(),
            )
            assert isinstance(pid, int), pid
        finally:
            for fd in (theirs_in, theirs_out, nowhere):
                os.close(fd)
        return Worker(self, pid, ours_in, ours_out)

    def close(self) -> None:
        self._sock.close()
        self._process.wait(60)


@cache
def nursery() -> Nursery:
    """That of this process of the tests, from the first use on."""
    made = Nursery()
    atexit.register(made.close)
    return made


def start(module: str, *arguments: str, **environment: str) -> Child:
    """Run `module.main(*arguments)` in a process of its own, with these variables and those of this process."""
    return nursery().start(module, *arguments, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def start_with_log(log: Path, module: str, *arguments: str, **environment: str) -> Process:
    """Like `start`, with both outputs appended to the file `log`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with log.open("ab") as file:
        return Process(nursery(), nursery().fork(file.fileno(), file.fileno(), module, *arguments, env=env))


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `module.main(*arguments)` in a process of its own to its end, as `subprocess.run` with `capture_output` does."""
    child = start(module, *arguments, **environment)
    try:
        stdout, stderr = child.communicate_bytes(120)
    finally:
        child.kill()
    return subprocess.CompletedProcess([module, *arguments], child.wait(), stdout, stderr)


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def serve(sock: socket.socket) -> Callable[[], Any]:
    """In the nursery: answer until the other end is closed. In a child: what it is to do."""
    living, nursery = set[int](), os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, _FRAME, 8)
        if not data:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        asked = json.loads(data)
        if "poll" in asked:
            pid, status = os.waitpid(asked["poll"], os.WNOHANG)
            living.discard(pid)
            sock.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        with contextlib.suppress(Exception):  # the child says it
            importlib.import_module(asked["module"])
            if "torch" in sys.modules:
                importlib.import_module("torch._dynamo")  # every optimizer does when it is made, slowly
            if "AWS_ENDPOINT_URL" in asked["env"]:
                importlib.import_module("s3fs")  # the first client does
                botocore_models.share()
        gc.collect()
        gc.freeze()  # with torch, a child would take a second to look at all imports when it ends
        if len(os.listdir("/proc/self/task")) > 1:  # they would not be in the child, and what they hold locked would be
            answer: object = f"importing {asked['module']} starts threads"
        elif (pid := os.fork()) == 0:
            sock.close()
            return _become(asked, descriptors, nursery)
        else:
            living.add(pid)
            answer = pid
        for fd in descriptors:
            os.close(fd)
        sock.send(json.dumps(answer).encode())


def _become(asked: dict[str, Any], descriptors: list[int], nursery: int) -> Callable[[], Any]:
    _die_with(nursery)
    for number, fd in enumerate(descriptors, 3 - len(descriptors)):  # standard error is the last one
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process
    sys.stderr = open(  # noqa: SIM115
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    from headrace.dataio.core import crashpoints

    for point in crashpoints._declared.values():  # they read their variables when they were declared, in the nursery
        point.__init__(point.name, point.meaning)  # type: ignore[misc]
    sys.argv = [asked["module"], *asked["arguments"]]
    return lambda: importlib.import_module(asked["module"]).main(*asked["arguments"])


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to the tests, which end it
    work = serve(socket.socket(fileno=int(fd)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(work())


if __name__ == "__main__":
    main(*sys.argv[1:])
