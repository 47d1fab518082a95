"""The buffers that blocks pass through."""

from __future__ import annotations

import threading

from headrace.dataio.cache.blocks import IDLE_SECONDS, Buffers
from headrace.dataio.testing.system import ManualClock


def test_the_buffer_that_was_used_last_is_used_next() -> None:
    buffers = Buffers(4096, 4, ManualClock())
    with buffers.borrow() as first, buffers.borrow() as second:
        first[:1], second[:1] = b"1", b"2"
    for _ in range(3):
        with buffers.borrow() as again:
            assert bytes(again[:1]) == b"1"  # it was given back last


def test_there_are_as_many_as_were_used_at_once_and_idle_ones_go() -> None:
    clock = ManualClock()
    buffers = Buffers(4096, 4, clock)
    with buffers.borrow(), buffers.borrow(), buffers.borrow():
        pass
    assert buffers.trim() == 3
    clock.now += IDLE_SECONDS / 2
    with buffers.borrow():
        pass
    clock.now += IDLE_SECONDS / 2 + 0.1
    assert buffers.trim() == 1, "the one that was used since stays"
    clock.now += IDLE_SECONDS
    assert buffers.trim() == 0


def test_no_two_users_share_a_buffer() -> None:
    buffers, clashes = Buffers(64, 4, ManualClock()), list[int]()

    def use(number: int) -> None:
        for _ in range(500):
            with buffers.borrow() as own:
                own[:] = bytes([number]) * 64
                if bytes(own) != bytes([number]) * 64:
                    clashes.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert buffers.trim() <= 4


def test_a_fetch_that_fails_gives_its_buffer_back() -> None:
    buffers = Buffers(64, 4, ManualClock())
    for _ in range(3):
        try:
            with buffers.borrow():
                raise OSError
        except OSError:
            pass
    assert buffers.trim() == 1


def test_no_more_are_made_than_may_be_and_who_comes_late_waits() -> None:
    buffers, order = Buffers(64, 2, ManualClock()), list[str]()

    def third() -> None:
        with buffers.borrow():
            order.append("third")

    with buffers.borrow(), buffers.borrow():
        thread = threading.Thread(target=third)
        thread.start()
        thread.join(0.05)
        order.append("the others are done")
    thread.join(60)
    assert order == ["the others are done", "third"]
    assert buffers.trim() == 2
