"""Processes that benchmarks and tests need: the node's daemon, and an S3 server that counts the bytes it sends.

Invariant: every process that this module starts ends with its context. If the process that started it is killed, the
kernel ends it too.

Failure behaviour: a daemon that does not start raises `RuntimeError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.bench.core.measure import memory_kib
from headrace.dataio.core.programs import environment, run_module
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.testing.s3_server import ending_with_parent

START_SECONDS = 60.0


class DaemonProcess:
    """A running daemon: its process id, its socket, its CPU time and its memory."""

    def __init__(self, pid: int, socket: Path) -> None:
        self.pid, self.socket = pid, socket

    def cpu_seconds(self) -> float:
        """CPU seconds so far, in ticks of ten milliseconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def thread_seconds(self) -> float:
        """CPU seconds of the threads that are alive now, with a resolution of a nanosecond."""
        times = [task.read_text().split()[0] for task in Path(f"/proc/{self.pid}/task").glob("*/schedstat")]
        return sum(int(time) for time in times) / 1e9

    def rss_mib(self) -> float:
        """Resident memory in MiB."""
        return memory_kib("VmRSS", self.pid) / 1024

    def peak_mib(self) -> float:
        """The peak resident memory so far, in MiB."""
        return memory_kib("VmHWM", self.pid) / 1024

    def connect(self) -> Sidecar:
        """Connect a client to the daemon."""
        connection = Sidecar.find(self.socket)
        if connection is None:
            raise RuntimeError("the daemon does not answer")
        return connection


@contextlib.contextmanager
def daemon(
    folder: Path, environ: Mapping[str, str] | None = None, log: Path | None = None, **settings: str
) -> Iterator[DaemonProcess]:
    """Run a daemon with its socket and its cache in `folder`.

    Args:
        folder: The folder. Its path must be short, because the length of a socket's path is limited.
        environ: Environment variables of the daemon, added to those of this process.
        log: The file for its output. Default: the output of this process.
        settings: Options of `headrace sidecar run`, with `_` in place of `-`.

    Raises:
        RuntimeError: The daemon did not start; the message quotes the end of `log`.
    """
    path = folder / "s" / "sidecar.sock"
    all_settings = {"socket": str(path), "cache_dir": str(folder / "cache"), "log_level": "WARNING", **settings}
    flags = [text for name, value in all_settings.items() for text in (f"--{name.replace('_', '-')}", value)]
    command = run_module("headrace.dataio.cli", "sidecar", "run", *flags)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        leashed = ending_with_parent(command, signal.SIGTERM)
        process = subprocess.Popen(leashed, env={**environment(), **(environ or {})}, stdout=output, stderr=output)
        stack.callback(_end, process)
        _wait_until_ready(process, path, log)
        yield DaemonProcess(process.pid, path)


def _wait_until_ready(process: subprocess.Popen[bytes], path: Path, log: Path | None) -> None:
    until = time.monotonic() + START_SECONDS
    while (connection := Sidecar.find(path)) is None:
        if process.poll() is not None or time.monotonic() > until:
            why = log_end(log) if log else "its log is above"
            raise RuntimeError(f"the daemon did not start: {why}; `headrace sidecar run` gives the reason")
        time.sleep(0.02)
    connection.close()


def log_end(log: Path) -> str:
    """Return the last lines of a log, as one line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-4:]) or "its log is empty"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block. Afterwards, all variables have their earlier values again."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class Server:
    """A running `headrace.bench.core.range_server` or `object_server`. `environ` makes S3 clients use it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def sent(self) -> int:
        """The bytes of all response bodies so far."""
        return int(self._ask("sent"))

    def received(self) -> int:
        """The bytes of all request bodies so far, of a writable server."""
        return int(self._ask("received"))

    def files(self) -> dict[str, tuple[int, int]]:
        """For each path, the requests so far whose answers had a body, and the bytes of these bodies."""
        return {path: (gets, size) for path, (gets, size) in json.loads(self._ask("files")).items()}

    def _ask(self, what: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/{what}", timeout=30) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def server(root: Path, rate: float = 0.0, delay: float = 0.0, *, writable: bool = False) -> Iterator[Server]:
    """Serve the files of `root` as bucket/key.

    Args:
        root: The folder.
        rate: Bytes per second of all connections together; 0 for no limit.
        delay: Seconds by which each response is delayed.
        writable: Whether objects can be written, too (`object_server`).
    """
    module = "object_server" if writable else "range_server"
    command = run_module(f"headrace.bench.core.{module}", str(root), str(rate), str(delay))
    process = subprocess.Popen(ending_with_parent(command), env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        yield Server(int(process.stdout.readline()) if process.stdout else 0)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
