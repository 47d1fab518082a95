"""The parts of a node for benchmarks and tests of the sidecar: a daemon, a counting server, ranks; all real processes.

Invariant: every process that is started here ends with its context. Failure behaviour: a rank that fails raises `RuntimeError`
with its last words.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from headrace.bench.workloads.sidecar_rank import Job, Shape
from headrace.dataio.sidecar.client import Sidecar

START_SECONDS = 60.0


def write_shards(folder: Path, shape: Shape) -> None:
    """Random bytes in the shape of a dataset."""
    (folder / "shards").mkdir(parents=True)
    for shard in range(shape.shards):
        key = shape.read(shard * shape.per_shard)[0]
        (folder / key).write_bytes(random.Random(shard).randbytes(shape.shard_bytes))


class DaemonProcess:
    """A running daemon."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self._process, self.socket = process, socket

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def thread_seconds(self) -> float:
        """CPU seconds of the threads that are there, to the nanosecond, where `cpu_seconds` counts ticks of ten milliseconds."""
        times = [task.read_text().split()[0] for task in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")]
        return sum(int(time) for time in times) / 1e9

    def rss_mib(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def peak_mib(self) -> float:
        """The most that `rss_mib` has been."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    def connect(self) -> Sidecar:
        found = Sidecar.find(self.socket)
        if found is None:
            raise RuntimeError("the daemon does not answer")
        return found


@contextlib.contextmanager
def daemon(folder: Path, environ: Mapping[str, str] | None = None, **settings: str) -> Iterator[DaemonProcess]:
    """A daemon with its socket and its cache in `folder` (a short path: a socket's must be)."""
    socket = folder / "s" / "sidecar.sock"
    given = {"socket": str(socket), "cache_dir": str(folder / "cache"), "log_level": "WARNING", **settings}
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.dataio.cli", "sidecar", "run", *flags], env={**os.environ, **(environ or {})}
    )
    try:
        _until_it_answers(process, socket)
        yield DaemonProcess(process, socket)
    finally:
        process.kill()
        process.wait()


def _until_it_answers(process: subprocess.Popen[bytes], socket: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while (found := Sidecar.find(socket)) is None:
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the daemon did not start")
        time.sleep(0.02)
    found.close()


class Server:
    """A running `headrace.bench.core.range_server`. `environ` makes S3 clients use it."""

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
        """Bytes of all bodies so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/sent", timeout=30) as answer:
            return int(answer.read())


@contextlib.contextmanager
def server(root: Path, rate: float = 0.0, delay: float = 0.0) -> Iterator[Server]:
    """Serves `root`/<bucket>/<key>, all connections together at most at `rate` bytes a second; `delay` in seconds."""
    command = [sys.executable, "-m", "headrace.bench.core.range_server", str(root), str(rate), str(delay)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(int(process.stdout.readline()) if process.stdout else 0)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def run_ranks(
    jobs: Sequence[Job], environ: Mapping[str, str] | None = None, before: Callable[[], None] = lambda: None
) -> tuple[float, list[dict[str, float]]]:
    """Start all, call `before` and let them go together; (wall seconds until the last is done, figures of each)."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "headrace.bench.workloads.sidecar_rank", job.text()],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        before()
        began = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [_figures(process) for process in processes]
        return time.perf_counter() - began, found
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _figures(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, errors = process.communicate()
        raise RuntimeError(f"a rank failed: {errors.strip()[-600:]}")
    figures: dict[str, float] = json.loads(line)
    return figures
