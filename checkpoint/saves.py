"""The saves in flight of one checkpointer.

Invariant: a step is saved once in a timeline. If the caller did not fetch the error of a save, the next save or `close`
raises it. If several saves failed, the error of the first is raised, and its notes name the others.
Failure behaviour: `Saves` raises `ConflictError` for a step that is already saved.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from headrace.checkpoint.handle import Handle
from headrace.checkpoint.lineage import Lineage
from headrace.dataio.core.errors import ConflictError, DeadlineError
from headrace.dataio.core.limits import counted
from headrace.dataio.core.log import get_logger, warn_once

_log = get_logger(__name__)
_IN_FLIGHT = 2
"""The maximum number of saves in flight: one that needs the arena, and one that only waits for its commit.

Saves that are only kept in the tier are counted apart.
"""

_FAILED_KEPT = 16
"""The maximum number of failed saves whose errors `close` reports one by one. The log has all of them."""


class Saves:
    """The saves of one checkpointer. Not thread-safe.

    With `raises`, the next save raises any earlier failure. Otherwise, it raises only a `ConflictError`. The process
    waits for saves in flight before it exits, up to `wait` seconds. A forked child does not wait for saves of its
    parent.
    """

    def __init__(self, run: str, lineage: Lineage, *, raises: bool, wait: float) -> None:
        self._run, self._lineage, self._raises, self._wait = run, lineage, raises, wait
        before_exit(self.wait_at_exit)
        self._handles: dict[int, Handle] = {}
        self._committed: dict[int, Handle] = {}
        self._tried = (0, 0)  # the newest timeline, and the highest step that was tried there
        self._failed: list[Handle] = []  # failed saves that `close` reports, the oldest first
        self._more_failed = 0

    def add(self, handle: Handle) -> None:
        """Add a save that has started."""
        self._handles[handle.step] = handle
        if self._lineage.timeline > self._tried[0]:
            self._committed.clear()  # a new timeline has begun, in which steps may be saved again
        self._tried = max(self._tried, (self._lineage.timeline, handle.step))

    @property
    def all_done(self) -> bool:
        return all(handle.done for handle in self._handles.values())

    def require_new(self, step: int) -> None:
        """Raise `ConflictError` unless the step may be saved."""
        self.forget_ended()
        if step in self._committed or step in self._handles:
            state = "is saved" if step in self._committed else "is being saved"
            raise ConflictError(f"step {step} of run {self._run} {state} in this timeline", hint="save each step once")

    def again(self, step: int) -> bool:
        """Return whether this timeline may already have the step. If so, all saves have ended.

        A failed save may have committed its step. So the result is True for all steps up to the highest that was tried.
        The caller then saves the step again, in another timeline.
        """
        tried = (self._lineage.timeline, step) <= self._tried
        if tried:
            self.wait_for_all(self._wait)
            self.forget_ended()
        self._committed.pop(step, None)
        return tried

    def of(self, step: int) -> Handle | None:
        """The save of this step, in flight or committed, or None.

        A failed save of the step is dropped, so that the caller may save it again. Its error counts as fetched. Errors
        of other steps are still raised by `close`.
        """
        for handle in (*self._handles.values(), *self._failed):
            if handle.step == step and handle.error is not None:
                handle.fetched = True
        self.forget_ended()
        return self._handles.get(step) or self._committed.get(step)

    def forget_ended(self) -> None:
        """Forget saves that have ended and were reported. The next save references the newest committed step."""
        for step, handle in list(self._handles.items()):
            if handle.done and (handle.error is None or handle.fetched):
                del self._handles[step]
                if handle.error is None:
                    self._committed[step] = handle
                    self._lineage.committed(step, handle.attempt)

    def start_over(self) -> None:
        """After a restore: steps that were committed may be saved again."""
        self._committed.clear()

    @property
    def uploading(self) -> bool:
        """Whether a save is on its way to the store."""
        return any(not handle.done and not handle.local for handle in self._handles.values())

    def wait_for_room(self, timeout: float) -> None:
        """Wait until another save may start. Saves that are only kept in the tier do not wait for uploads."""
        running = [handle for handle in self._handles.values() if not handle.done]
        for local, outcome in ((False, "committed"), (True, "kept")):
            same = [handle for handle in running if handle.local == local]
            if len(same) >= _IN_FLIGHT and not same[0].wait(timeout):
                raise DeadlineError(
                    f"step {same[0].step} is not {outcome} after {timeout:g} s",
                    hint="save less often, or check the speed of the store and of the local tier",
                )

    def wait_at_exit(self) -> None:
        """Wait for saves in flight when the program ends and the checkpointer was not closed."""
        if not self.all_done:
            _log.warning("the program ends without close(): waiting for the save in flight")
            self.wait_for_all(self._wait)

    def wait_for_all(self, timeout: float) -> None:
        """Wait until all saves are committed or failed."""
        deadline = time.monotonic() + timeout
        for handle in list(self._handles.values()):
            if not handle.wait(max(deadline - time.monotonic(), 0)):
                raise DeadlineError(f"step {handle.step} is still in flight after {timeout:g} s", hint="wait longer")

    def raise_failures(self) -> None:
        """Raise the errors that the caller has not fetched, if `raises` is set, and each `ConflictError` in any case.

        `raise_unfetched` raises the others.
        """
        failed = self._unfetched()
        now = [handle for handle in failed if self._raises or isinstance(handle.error, ConflictError)]
        for handle in failed:
            if handle not in now:
                del self._handles[handle.step]
                self._keep_failed(handle)
        _raise_first(now)

    def raise_unfetched(self) -> None:
        """Raise the errors of saves that the caller has not fetched, if there are any."""
        failed = [handle for handle in self._failed if not handle.fetched]
        _raise_first([*failed, *self._unfetched()], more=self._more_failed)

    def _unfetched(self) -> list[Handle]:
        return [handle for handle in self._handles.values() if handle.error is not None and not handle.fetched]

    def _keep_failed(self, handle: Handle) -> None:
        if len(self._failed) < _FAILED_KEPT:
            self._failed.append(handle)
        else:
            self._more_failed += 1


def _raise_first(failed: Sequence[Handle], more: int = 0) -> None:
    """Raise the first handle's error, with a note for each other handle and for `more` saves that were not kept."""
    if not failed:
        return
    first, *others = failed
    assert first.error is not None
    for handle in others:
        handle.fetched = True
        first.error.add_note(f"step {handle.step} was not saved either: {handle.error}")
    if more:
        first.error.add_note(f"{counted(more, 'later save')} failed too: the log names each of them")
    first.result()


def warn_of_python(version: tuple[int, ...]) -> None:
    """Warn on Python versions that cannot wait for saves in flight at exit, because they start no threads then."""
    if (3, 12) <= version < (3, 12, 3):
        warn_once(
            _log,
            f"Python {'.'.join(map(str, version))} loses a save that is in flight when the program ends without close(): "
            "close the checkpointer (`with Checkpointer(…)` does), or use Python 3.12.3 or newer",
            "job",
        )


def before_exit(method: Callable[[], None]) -> None:
    """Call `method` at exit while threads can still be started, if its object is alive. `atexit` would be too late.

    A forked child does not call it, because the child does not have the threads that it would wait for.
    """
    warn_of_python(sys.version_info[:3])
    reference, pid = weakref.WeakMethod(method), os.getpid()
    register = getattr(threading, "_register_atexit", None)  # not public, but concurrent.futures itself uses it
    if register is not None:
        register(lambda: os.getpid() == pid and (bound := reference()) and bound())
