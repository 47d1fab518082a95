"""Worker processes: a hang costs its time limit, a crash its request, and neither the pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.dataio.core.errors import CorruptionError, DeadlineError, UnsupportedError
from headrace.dataio.core.programs import run_module
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from tests.support.waiting import wait_for

_WORKER = """
import os, signal, sys, time
from headrace.dataio.shards.workers.worker import die_with_parent, read_frame, write_frame
die_with_parent()
out = os.fdopen(os.dup(1), "wb")
write_frame(out, b"hello")
while (frame := read_frame(sys.stdin.buffer)) is not None:
    if frame == b"hang":
        time.sleep(600)
    if frame == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if frame == b"deaf":
        write_frame(out, b"%d deaf" % os.getpid())
        time.sleep(600)
    if frame == b"flood":
        out.write((1 << 30).to_bytes(4, "big"))
        out.flush()
    write_frame(out, b"%d %s" % (os.getpid(), frame))
"""


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    (tmp_path / "echoing.py").write_text(_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return WorkerPool(run_module("echoing"), b"hello", 1)


def test_one_worker_answers_request_after_request(pool: WorkerPool) -> None:
    with pool:
        first, second = pool.ask(b"a", 60, bytes).split(), pool.ask(b"b", 60, bytes).split()
    assert first[0] == second[0]
    assert (first[1], second[1]) == (b"a", b"b")


def test_a_worker_outlives_the_thread_that_asked_first(pool: WorkerPool) -> None:
    answers = list[bytes]()
    with pool:
        for _ in range(3):
            thread = threading.Thread(target=lambda: answers.append(pool.ask(b"x", 60, bytes)))
            thread.start()
            thread.join()
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (b"hang", DeadlineError, "longer than 1 s"),
        (b"crash", CorruptionError, "SIG"),
        (b"flood", CorruptionError, "crashed the decoder"),
    ],
)
def test_what_goes_wrong_costs_one_request(pool: WorkerPool, what: bytes, error: type[Exception], words: str) -> None:
    with pool:
        before = pool.ask(b"a", 60, bytes).split()[0]
        with pytest.raises(error, match=words):
            pool.ask(what, 1 if what == b"hang" else 60, bytes)
        after = pool.ask(b"b", 60, bytes).split()
    assert after[1] == b"b"
    assert after[0] != before


def test_an_answer_that_is_none_costs_the_worker_that_gave_it(pool: WorkerPool) -> None:
    with pool:
        before = pool.ask(b"a", 60, bytes).split()[0]
        with pytest.raises(CorruptionError, match="malformed"):
            pool.ask(b"b", 60, msgspec.json.Decoder(dict[str, int]).decode)
        assert pool.ask(b"c", 60, bytes).split()[0] != before


def test_closing_ends_a_worker_that_hangs(pool: WorkerPool) -> None:
    pid = int(pool.ask(b"a", 60, bytes).split()[0])
    ended = list[CorruptionError]()

    def hang() -> None:
        with pytest.raises(CorruptionError) as caught:
            pool.ask(b"hang", 600, bytes)
        ended.append(caught.value)

    asking = threading.Thread(target=hang)
    asking.start()
    deadline = time.monotonic() + 30
    while not pool._idle.empty():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.close()
    asking.join(60)
    assert not asking.is_alive()
    assert ended
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_takes_no_request_is_late_like_one_that_gives_no_answer(pool: WorkerPool) -> None:
    with pool:
        before = pool.ask(b"deaf", 60, bytes).split()[0]
        with pytest.raises(DeadlineError, match="longer than 1 s"):
            pool.ask(bytes(8 << 20), 1, bytes)  # more than a pipe holds
        assert pool.ask(b"a", 60, bytes).split()[0] != before
        assert len(pool.ask(bytes(8 << 20), 60, bytes)) > 8 << 20


def test_closing_leaves_pipes_to_the_thread_that_reads_them(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed under a reader may be another file's when it reads on."""
    pool.ask(b"a", 60, bytes)
    (worker,) = pool._all
    pipe, waited, closed = worker._process.stdout, threading.Event(), list[bool]()
    assert pipe is not None
    number, read, shutdown = pipe.fileno(), os.read, ThreadPoolExecutor.shutdown

    def late(fd: int, size: int) -> bytes:
        if fd == number:
            assert waited.wait(60)
            closed.append(pipe.closed)
        return read(fd, size)

    def signal_and_shut_down(pool: ThreadPoolExecutor, *arguments: Any, **options: Any) -> None:
        waited.set()
        shutdown(pool, *arguments, **options)

    monkeypatch.setattr(os, "read", late)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", signal_and_shut_down)
    future = pool.submit(b"hang", 600, bytes)
    wait_for(pool._idle.empty)
    pool.close()
    assert isinstance(future.exception(60), CorruptionError)
    assert closed == [False]
    assert pipe.closed


def test_a_worker_that_cannot_start_blames_no_file() -> None:
    with (
        WorkerPool(run_module("no_such_module_here"), b"hello", 1) as pool,
        pytest.raises(UnsupportedError, match="does not start"),
    ):
        pool.ask(b"a", 60, bytes)


def test_workers_die_with_the_process_that_started_them(tmp_path: Path, pool: WorkerPool) -> None:
    pool.close()
    program = (
        "from headrace.dataio.core.programs import run_module\n"
        "from headrace.dataio.shards.workers.worker_pool import WorkerPool\nimport os, signal\n"
        "pool = WorkerPool(run_module('echoing'), b'hello', 1)\n"
        "print(pool.ask(b'a', 60, bytes).split()[0].decode(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    pid = int(done.stdout)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)
