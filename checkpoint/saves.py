"""The saves of one checkpointer: those on their way, those that committed, and failures that nobody has asked about.

Invariant: a step is saved once in a timeline; the newest committed step is what the next save leans on; an error is told once, to
whoever asks first.
Failure behaviour: `ConflictError` for a step that is saved already; `DeadlineError` naming the step that takes too long.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

from headrace.checkpoint.handle import Handle
from headrace.checkpoint.lineage import Lineage
from headrace.dataio.core.errors import ConflictError, DeadlineError
from headrace.dataio.core.log import get_logger, warn_once

_log = get_logger(__name__)
_IN_FLIGHT = 2
"""Saves on their way at once: one whose arena is still needed, one that only waits for its commit."""


class Saves:
    """For one thread at a time. `raises`: whether any failure is raised by the next save, or only that of being replaced.

    At the end of the program saves in flight are waited for, for `wait` seconds, also if nobody has the checkpointer any more. A
    forked child does not wait for those of its parent.
    """

    def __init__(self, run: str, lineage: Lineage, raises: bool, wait: float) -> None:
        self._run, self._lineage, self._raises, self._wait = run, lineage, raises, wait
        _before_exit(self.wait_at_exit)
        self._handles: dict[int, Handle] = {}
        self._committed: dict[int, Handle] = {}
        self._tried = (0, 0)  # the newest timeline, and the highest step that was tried there
        self._unheard: Handle | None = None

    def add(self, handle: Handle) -> None:
        """A save has begun."""
        self._handles[handle.step] = handle
        if self._lineage.timeline > self._tried[0]:
            self._committed.clear()  # another timeline has begun: its steps are saved anew
        self._tried = max(self._tried, (self._lineage.timeline, handle.step))

    @property
    def all_done(self) -> bool:
        return all(handle.done for handle in self._handles.values())

    def require_new(self, step: int) -> None:
        """That the step may be saved."""
        self.settle()
        if step in self._committed or step in self._handles:
            how = "is saved" if step in self._committed else "is being saved"
            raise ConflictError(f"step {step} of run {self._run} {how} in this timeline", hint="save each step once")

    def again(self, step: int) -> bool:
        """Whether the timeline may have the step, once no save is in flight; it may then be saved again in another timeline.

        A save that failed may have committed its step: the store is asked about steps up to the highest one that was tried.
        """
        tried = (self._lineage.timeline, step) <= self._tried
        if tried:
            self.wait_for_all(self._wait)
            self.settle()
        self._committed.pop(step, None)
        return tried

    def of(self, step: int) -> Handle | None:
        """The save of this step, on its way or committed; failures are forgotten."""
        for handle in self._handles.values():
            handle.fetched = handle.fetched or (handle.done and handle.error is not None)
        self.settle()
        return self._handles.get(step) or self._committed.get(step)

    def settle(self) -> None:
        """Forget saves that have ended and were heard of; the newest committed one is what the next save leans on."""
        for step, handle in list(self._handles.items()):
            if handle.done and (handle.error is None or handle.fetched):
                del self._handles[step]
                if handle.error is None:
                    self._committed[step] = handle
                    self._lineage.committed(step, handle.attempt)

    def start_over(self) -> None:
        """A step was restored: what is saved from now on is saved anew."""
        self._committed.clear()

    def wait_for_room(self, timeout: float) -> None:
        """Until another save may begin."""
        running = [handle for handle in self._handles.values() if not handle.done]
        if len(running) >= _IN_FLIGHT and not running[0].wait(timeout):
            raise DeadlineError(
                f"step {running[0].step} is not committed after {timeout:g} s",
                hint="save less often, or look at the store",
            )

    def wait_at_exit(self) -> None:
        """The program ends, and nobody has closed the checkpointer."""
        if not self.all_done:
            _log.warning("the program ends without close(): waiting for the save in flight")
            self.wait_for_all(self._wait)

    def wait_for_all(self, timeout: float) -> None:
        """Until all are committed or failed."""
        deadline = time.monotonic() + timeout
        for handle in list(self._handles.values()):
            if not handle.wait(max(deadline - time.monotonic(), 0)):
                raise DeadlineError(f"step {handle.step} is still in flight after {timeout:g} s", hint="wait longer")

    def hear_failures(self) -> None:
        """Failed saves that nobody asked about: raised when that is wanted, or when this trainer was replaced."""
        for handle in self._handles.values():
            if handle.done and handle.error is not None and not handle.fetched:
                if self._raises or isinstance(handle.error, ConflictError):
                    handle.result()
                handle.fetched = True
                self._unheard = handle

    def raise_unfetched(self) -> None:
        """The error of a save that nobody has fetched, if there is one."""
        if self._unheard is not None:
            self._unheard.result()
        for handle in self._handles.values():
            if handle.done and handle.error is not None and not handle.fetched:
                handle.result()


def warn_of_python(version: tuple[int, ...]) -> None:
    """Say it where saves in flight cannot be waited for at the end: these Pythons start no thread from then on."""
    if (3, 12) <= version < (3, 12, 3):
        warn_once(
            _log,
            f"Python {'.'.join(map(str, version))} loses a save that is in flight when the program ends without close(): "
            "close the checkpointer (`with Checkpointer(…)` does), or use Python 3.12.3 or newer",
        )


def _before_exit(method: Callable[[], None]) -> None:
    """Call `method`, if its object still lives, while threads can still be started: `atexit` would be too late. Not in a forked
    child, which has none of the threads that it would wait for."""
    warn_of_python(sys.version_info[:3])
    reference, pid = weakref.WeakMethod(method), os.getpid()
    register = getattr(threading, "_register_atexit", None)  # not public, but what concurrent.futures itself rests on
    if register is not None:
        register(lambda: os.getpid() == pid and (found := reference()) and found())
