"""Whoever plans holds the garbage collector off, and it is as it was when the last of them is done."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from headrace.checkpoint.gc_pause import gc_paused


def test_the_collector_is_on_again_only_if_it_was_on_and_when_all_are_done() -> None:
    first, second = gc_paused(), gc_paused()
    with first:
        assert not gc.isenabled()
        second.__enter__()
    assert not gc.isenabled(), "another thread still plans"
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled(), "the trainer collects by itself"
    finally:
        gc.enable()


@pytest.fixture
def planning() -> Iterator[None]:
    """Another thread that stays inside the block."""
    inside, leave = threading.Event(), threading.Event()

    def plan() -> None:
        with gc_paused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=plan)
    thread.start()
    inside.wait()
    yield
    leave.set()
    thread.join()


def exit_code_of_child() -> int:
    """1 if the collector of a forked child is off, 2 if it is off after a block in the child."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 3
    try:
        collects = gc.isenabled()
        with gc_paused():
            code = 3 if gc.isenabled() else 0
        code = code or (not collects) + 2 * (not gc.isenabled())
    finally:
        os._exit(code)


@pytest.mark.usefixtures("planning")
def test_a_child_that_is_forked_while_another_thread_plans_collects_garbage() -> None:
    assert not gc.isenabled(), "the other thread plans"
    assert exit_code_of_child() == 0
    assert not gc.isenabled(), "the parent is as it was"


def test_a_child_that_is_forked_inside_the_block_collects_garbage() -> None:
    with gc_paused():
        assert exit_code_of_child() == 0
    assert gc.isenabled()
