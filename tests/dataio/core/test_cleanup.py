"""Work for what was forgotten."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from headrace.dataio.core.cleanup import Finalizer
from tests.support.waiting import wait_for


class Thing:
    """Something that can be forgotten."""


def test_the_collector_leaves_the_work_to_another_thread_which_may_want_the_lock_that_is_held_here() -> None:
    lock, done = threading.Lock(), list[int]()

    def work() -> None:
        with lock:
            done.append(threading.get_ident())

    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    ending = Finalizer(thing, work)
    pending = ending.alive
    assert pending
    with lock:
        del thing
        gc.collect()
        assert not ending.alive
        assert done == []
    wait_for(lambda: done)
    assert done != [threading.get_ident()]
    ending()
    assert len(done) == 1, "once"


def test_who_asks_for_it_does_it_and_it_is_done_once() -> None:
    done, thing = list[int](), Thing()
    ending = Finalizer(thing, lambda: done.append(threading.get_ident()))
    ending()
    ending()
    del thing
    gc.collect()
    assert done == [threading.get_ident()]
    assert not ending.alive


LEFT_TO_THE_END = """
import _thread, threading
from headrace.dataio.core.cleanup import Finalizer
kept = threading.Event()
ending = Finalizer(kept, lambda: print(threading.current_thread().name, flush=True))
"""
NO_MORE_THREADS = """
def none(*_): raise RuntimeError('as Python 3.12 says it')
_thread.start_new_thread = none
del kept
print('gone', flush=True)
"""


@pytest.mark.parametrize(
    ("more", "said"),
    [("", "MainThread\n"), (NO_MORE_THREADS, "gone\nMainThread\n")],
    ids=["it was not forgotten", "no thread can be started any more"],
)
def test_what_is_left_at_the_end_of_the_process_is_done_before_it_ends(more: str, said: str) -> None:
    command = [sys.executable, "-c", LEFT_TO_THE_END + more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)


AT_WORK = """
import os, sys, threading, time
from headrace.dataio.core import cleanup
cleanup.EXIT_SECONDS = float(sys.argv[1])
begun, kept = threading.Event(), threading.Event()
def work():
    begun.set()
    time.sleep(float(sys.argv[2]))
    print("done", flush=True)
cleanup.Finalizer(kept, work)
del kept
assert begun.wait(60)
if len(sys.argv) > 3 and (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_end_of_the_process_waits_for_a_thread_that_is_at_it() -> None:
    done = subprocess.run([sys.executable, "-c", AT_WORK, "60", "0.5"], capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)


@pytest.mark.parametrize("how", [("0.1", "600"), ("600", "600", "in a fork")])
def test_it_does_not_wait_for_ever_nor_for_the_threads_of_the_process_it_was_forked_from(how: tuple[str, ...]) -> None:
    quiet = "ignore::DeprecationWarning"  # of Python 3.12, that a process with threads is forked
    command = [sys.executable, "-W", quiet, "-c", AT_WORK, *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


IN_A_FORK = """
import os, sys
from headrace.dataio.core.cleanup import Finalizer
class Thing: pass
called, dropped, left = Thing(), Thing(), Thing()
ending = Finalizer(called, lambda: os.write(1, b"called "))
Finalizer(dropped, lambda: os.write(1, b"dropped "))
Finalizer(left, lambda: os.write(1, b"left "))
child = os.fork()
if not child:
    ending()
    del dropped
    sys.exit(0)
os.waitpid(child, 0)
os.write(1, b"parent: ")
ending()
"""


def test_a_fork_does_nothing_of_it_and_the_parent_all() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=150)
    said, _, parents = done.stdout.partition("parent: ")
    assert (said, sorted(parents.split()), done.stderr) == ("", ["called", "dropped", "left"], "")
