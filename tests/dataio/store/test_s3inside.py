"""Reads in the caller's own thread: the same bytes and errors as the ordinary way, which takes over whatever is odd."""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from dataio.core.errors import NotFoundError, UsageError
from dataio.store import s3fast
from dataio.store.contract import Store
from dataio.store.open import open_store
from dataio.store.s3inside import Inside
from dataio.testing.conformance import some_bytes
from dataio.testing.proxy import Fault, FaultProxy
from dataio.testing.s3server import S3Server
from tests.waiting import wait_for

obstore = pytest.importorskip("obstore", reason="the extra fast-s3 is not installed")
T = TypeVar("T")
MIB = 1 << 20
BODY = some_bytes(3 * MIB)


def elsewhere(work: Callable[[], T]) -> T:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that went out in their caller's thread."""
    names: list[str] = []

    def count(name: str) -> None:
        real = getattr(obstore, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            names.append(name)
            return real(*arguments, **keywords)

        monkeypatch.setattr(obstore, name, counted)

    for name in ("get", "get_range", "head"):
        count(name)
    return names


@pytest.fixture
def store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Connected, with an object of 3 MiB."""
    monkeypatch.setenv("MILLRACE_S3", "obstore")
    with open_store(s3_url) as found:
        found.put("k", BODY)
        yield found


@pytest.mark.s3
def test_reads_of_every_size_are_the_objects_bytes(store: Store, taken: list[str]) -> None:
    for offset, size in [(0, 1), (7, 1000), (5, MIB), (1, MIB + 1), (0, len(BODY)), (len(BODY) - 3, 3)]:
        buffer = bytearray(size)
        elsewhere(lambda at=offset, into=buffer: store.get_into("k", at, memoryview(into)))  # type: ignore[misc]
        assert buffer == BODY[offset : offset + size]
    assert taken == ["get_range"] * 3 + ["get"] * 2 + ["get_range"]
    near, far = bytearray(100), bytearray(2 * MIB)
    elsewhere(lambda: store.get_ranges_into("k", [(200_000, memoryview(far)), (180_000, memoryview(near))]))
    assert (near, far) == (BODY[180_000:180_100], BODY[200_000 : 200_000 + 2 * MIB])
    assert taken.pop() == "get", "neighbours travel in one request"
    assert elsewhere(lambda: store.stat("k")).size == len(BODY)
    assert taken.pop() == "head"


@pytest.mark.s3
def test_the_main_thread_which_signals_interrupt_never_goes_in(store: Store, taken: list[str]) -> None:
    buffer = bytearray(10)
    store.get_into("k", 0, memoryview(buffer))
    assert store.stat("k").size == len(BODY)
    assert (bytes(buffer), taken) == (BODY[:10], [])


@pytest.mark.s3
def test_errors_are_those_of_the_ordinary_way(store: Store) -> None:
    with pytest.raises(UsageError, match=str(len(BODY))):
        elsewhere(lambda: store.get_into("k", len(BODY) - 5, memoryview(bytearray(10))))
    with pytest.raises(UsageError, match=str(len(BODY))):
        elsewhere(lambda: store.get_into("k", len(BODY) - 5, memoryview(bytearray(2 * MIB))))
    for read in (lambda: store.get_into("other", 0, memoryview(bytearray(1))), lambda: store.stat("other")):
        with pytest.raises(NotFoundError, match="other"):
            elsewhere(read)
    store.close()
    with pytest.raises(UsageError, match="closed"):
        elsewhere(lambda: store.get_into("k", 0, memoryview(bytearray(1))))


@pytest.mark.s3
@pytest.mark.parametrize("size", [1000, 2 * MIB])
@pytest.mark.parametrize("fault", [Fault.RESET_BODY, Fault.CUT_BODY, Fault.SLOW_DOWN, Fault.REFUSE])
def test_a_read_survives(
    size: int, fault: Fault, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_S3", "obstore")
    with FaultProxy(s3_server.endpoint) as proxy, open_store(s3_url, endpoint_url=proxy.endpoint) as behind:
        behind.put("k", BODY)
        proxy.inject(fault, method="GET", times=2)
        buffer = bytearray(size)
        elsewhere(lambda: behind.get_into("k", 5, memoryview(buffer)))
        assert buffer == BODY[5 : 5 + size]
        assert proxy.fired == {fault: 2}


@pytest.mark.s3
def test_closing_does_not_wait_for_what_a_silent_server_holds(
    s3_url: str, s3_server: S3Server, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_S3", "obstore")
    monkeypatch.setattr(s3fast, "_LEAVE_SECONDS", 3600.0)
    buffer = bytearray(1000)
    with concurrent.futures.ThreadPoolExecutor(2) as pool, open_store(s3_url) as store:
        store.put("k", BODY)
        s3_server.process.send_signal(signal.SIGSTOP)
        try:
            reading = pool.submit(store.get_into, "k", 5, memoryview(buffer))
            wait_for(lambda: taken)
            pool.submit(store.close).result(60)
            assert not reading.done(), "it is still inside"
        finally:
            s3_server.process.send_signal(signal.SIGCONT)
        reading.result(120)
    assert buffer == BODY[5:1005], "and what it was given is what it asked for"


ENDS_WHILE_A_THREAD_IS_INSIDE = """
import os, sys, threading
import obstore
from dataio.store import s3fast
from dataio.store.open import open_store

def get_range(*arguments, real=obstore.get_range, **keywords):
    inside.set()
    return real(*arguments, **keywords)

def read():
    store.get_into("k", 0, memoryview(bytearray(1 << 20)))
    os.write(1, b"read")

inside, obstore.get_range, s3fast._LEAVE_SECONDS = threading.Event(), get_range, 60.0
store = open_store(sys.argv[1], endpoint_url=sys.argv[2])
store.exists("k")
threading.Thread(target=read, daemon=True).start()
assert inside.wait(60)
if sys.argv[3] == "closed":
    store.close()
"""


@pytest.mark.s3
@pytest.mark.parametrize("how", ["closed", "left open"])
def test_the_interpreter_does_not_end_while_a_thread_is_inside(
    how: str, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_S3", "obstore")
    with open_store(s3_url) as store:
        store.put("k", BODY)
    with FaultProxy(s3_server.endpoint, answers=MIB) as slow:  # a second for what is read
        command = [sys.executable, "-c", ENDS_WHILE_A_THREAD_IS_INSIDE, s3_url, slow.endpoint, how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "read"), ended


def test_the_end_waits_until_everybody_is_out_and_lets_nobody_in() -> None:
    inside, entered, go = Inside(), threading.Event(), threading.Event()

    def stay() -> bool:
        found = inside.enter()
        entered.set()
        go.wait(60)
        inside.leave()
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        staying = pool.submit(stay)
        assert entered.wait(60)
        inside.wait(0.01)  # bounded
        closing = pool.submit(inside.wait, 60)
        go.set()
        closing.result(60)
        assert staying.result(60)
        assert not pool.submit(inside.enter).result(60)


def test_a_forked_child_waits_for_nobody() -> None:
    inside = Inside()
    assert elsewhere(inside.enter)
    inside._pid += 1  # as in a child: the thread that is inside is the parent's
    inside.wait(60)
