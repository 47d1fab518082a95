"""`Handle`, which `save` returns, and `Saves`, the saves in flight of one checkpointer.

Invariant: a handle changes once from staging to staged, and once from there to committed or failed. `result` returns
only for committed saves. All methods of a handle may be called from any thread, any number of times. A step is saved
once in a timeline. If the caller did not fetch the error of a save, the next save or `close` raises it. If several
saves failed, the error of the first is raised, and its notes name the others.
Failure behaviour: `result` raises the save's error every time. A wait that times out raises `DeadlineError` and changes
nothing. In a forked child, waiting for a save of the parent raises `UsageError` immediately. `Saves` raises
`ConflictError` for a step that is already saved.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.lineage import Lineage
from headrace.dataio.core.errors import ConflictError, DeadlineError, TransientError, UsageError
from headrace.dataio.core.limits import counted
from headrace.dataio.core.log import get_logger, warn_once

_log = get_logger(__name__)
_IN_FLIGHT = 2
"""The maximum number of saves in flight: one that needs the arena, and one that only waits for its commit."""

_FAILED_KEPT = 16
"""The maximum number of failed saves whose errors `close` reports one by one. The log has all of them."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A committed save, as seen by this rank.

    Attributes:
        run (str), timeline (int), step (int), attempt (str): Name of the committed attempt.
        bytes_state (int): Bytes of state of this rank.
        bytes_written (int): Bytes that this rank wrote to packs.
        bytes_deduplicated (int): Bytes that were not written because they were stored already.
        seconds (float): Seconds from the end of staging to COMMIT.
        stall (float): Seconds for which `save` blocked the caller.
        committed_by (str): "sidecar" if the node's daemon committed the save, else "process".
        wait_seconds (float): Seconds for which the trainer waited for the copy after `save` returned, in an optimizer's
            step, in `copied` or in `staged`.
        sliced (bool): Whether the state was larger than the staging memory.
        encodings (dict[str, tuple[int, int]]): Raw and stored bytes that this rank wrote, by codec.
        kept (float | None): Seconds until all of it was in the node's local tier; None without a tier.
        diverged (tuple[str, ...]): Names of tensors that should be equal on several ranks and were not.
    """

    run: str
    timeline: int
    step: int
    attempt: str
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    seconds: float
    stall: float
    committed_by: str
    wait_seconds: float = 0.0
    sliced: bool = False
    encodings: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: float | None = None
    diverged: tuple[str, ...] = ()


class Copy(Protocol):
    """A state that is being copied into staging memory."""

    @property
    def wait_seconds(self) -> float: ...
    def wait(self, timeout: float | None = None) -> None: ...


class Name(Protocol):
    """A framework's own name for a step, for example a directory.

    The saver calls `prepare` before the attempt can be committed, and after all collective calls, because it may fail
    on one rank alone. Later it calls `publish`, before retention removes older steps, or `withdraw` with the error. An
    error of `prepare` or `publish` fails the save.
    """

    def prepare(self, attempt: Base) -> None: ...
    def publish(self) -> None: ...
    def withdraw(self, error: BaseException) -> None: ...


class Handle:
    """One save, in progress or finished.

    `stall`: seconds for which `save` blocked. `committed_by`: "process", or "sidecar" once the sidecar has taken over.
    `diverged`: as in `SaveResult`.
    """

    def __init__(self, step: int, attempt: str) -> None:
        self.step, self.attempt, self._pid = step, attempt, os.getpid()
        self.stall = 0.0
        self.committed_by = "process"
        self.fetched = False
        self.diverged: tuple[str, ...] = ()
        self._copy: Copy | None = None
        self._wait_seconds = 0.0
        self._staged, self._done = threading.Event(), threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._result: SaveResult | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save is committed or failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the save failed; None while it is in flight and after the commit.

        Reading it does not count as fetching it.
        """
        return self._error

    @property
    def may_commit(self) -> bool:
        """Whether a save that failed here may still be committed, by the sidecar that has taken it over."""
        return self._error is not None and self.may_commit_after(self._error)

    @property
    def wait_seconds(self) -> float:
        """Seconds for which the trainer waited for the copy since `save` returned."""
        return copy.wait_seconds if (copy := self._copy) is not None else self._wait_seconds

    def copied(self, timeout: float | None = None) -> None:
        """Return once the state may change again.

        With eager staging the state may change when `save` returns. With lazy staging, the next step of an optimizer in
        the state waits automatically. A loop that changes the state in another way must call this method first.

        Args:
            timeout (float | None): Seconds to wait; None waits without limit.

        Raises:
            DeadlineError: The timeout passed; the copy continues.
            HeadraceError: The copy failed.
        """
        self._require_own()
        if (copy := self._copy) is not None:
            copy.wait(timeout)

    def staged(self, timeout: float | None = None) -> None:
        """Return once the state may change again and the save is handed over.

        A save is handed over to the sidecar or to a thread of this process. If `committed_by` is "sidecar", killing
        this process after that does not stop the save.
        """
        self._require_own()
        if not self.done:
            self.copied(timeout)
        if not self._staged.wait(timeout):
            raise self._late("staged", timeout)

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait for the commit.

        Args:
            timeout (float | None): Seconds to wait; None waits without limit.

        Returns:
            SaveResult: The committed save.

        Raises:
            ConflictError: Another attempt won, or another trainer took over the run.
            DeadlineError: The timeout passed; the save continues.
            HeadraceError: The save failed.
        """
        self._require_own()
        if not self._done.wait(timeout):
            raise self._late("committed", timeout)
        if self._error is not None:
            self.fetched = True
            raise self._error
        assert self._result is not None
        return self._result

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is committed or failed; return False if `timeout` seconds pass first.

        Raises `UsageError` in a forked child, and nothing else.
        """
        self._require_own()
        return self._done.wait(timeout)

    def add_done_callback(self, function: Callable[[], None]) -> None:
        """Call `function` once the save is committed or failed: in the save's thread, or now if it is done already.

        An error of the function is logged.
        """
        with self._lock:
            if not self.done:
                self._callbacks.append(function)
                return
        _call(function)

    def follow(self, copy: Copy) -> None:
        """For the saver: set the copy to wait for."""
        self._copy = copy

    def set_staged(self, committed_by: str) -> None:
        """For the saver: record the hand-over of the save."""
        self.committed_by = committed_by
        self._staged.set()

    def set_result(self, result: SaveResult) -> None:
        """For the saver: record the commit."""
        self._release()
        self._result = result
        self._end()

    def set_error(self, error: BaseException) -> None:
        """For the saver: record the failure."""
        self._release()
        self._error = error
        self._end()

    def _end(self) -> None:
        self._staged.set()
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks:
            _call(function)

    def may_commit_after(self, error: BaseException) -> bool:
        """For the saver: whether the sidecar may still commit the save, although `error` has ended it here."""
        return self.committed_by == "sidecar" and isinstance(error, TransientError)

    def _require_own(self) -> None:
        """Raise `UsageError` in a forked child, which would wait forever: the save's thread runs only in the parent."""
        if os.getpid() != self._pid and not self.done:
            raise UsageError(
                f"step {self.step} is saved by process {self._pid}; a forked child cannot wait for it",
                hint="wait for the save in the process that began it",
            )

    def _release(self) -> None:
        """Drop the copy, which holds the arena."""
        self._wait_seconds, self._copy = self.wait_seconds, None

    def _late(self, expected: str, timeout: float | None) -> DeadlineError:
        return DeadlineError(
            f"step {self.step} is not {expected} after {timeout:g} s", hint="the save continues; wait again"
        )

    def __repr__(self) -> str:
        state = (
            "failed" if self._error else "committed" if self.done else "staged" if self._staged.is_set() else "staging"
        )
        return f"Handle(step={self.step}, attempt={self.attempt!r}, {state})"


class Saves:
    """The saves of one checkpointer. Not thread-safe.

    With `raises`, the next save raises any earlier failure. Otherwise, it raises only a `ConflictError`. The process
    waits for saves in flight before it exits, up to `wait` seconds. A forked child does not wait for saves of its
    parent.
    """

    def __init__(self, run: str, lineage: Lineage, *, raises: bool, wait: float) -> None:
        self._run, self._lineage, self._raises, self._wait = run, lineage, raises, wait
        _before_exit(self.wait_at_exit)
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
        self.settle()
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
            self.settle()
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
        self.settle()
        return self._handles.get(step) or self._committed.get(step)

    def settle(self) -> None:
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

    def wait_for_room(self, timeout: float) -> None:
        """Wait until another save may start."""
        running = [handle for handle in self._handles.values() if not handle.done]
        if len(running) >= _IN_FLIGHT and not running[0].wait(timeout):
            raise DeadlineError(
                f"step {running[0].step} is not committed after {timeout:g} s",
                hint="save less often, or check the speed of the store",
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


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        _log.exception("a callback of a save failed")


def warn_of_python(version: tuple[int, ...]) -> None:
    """Warn on Python versions that cannot wait for saves in flight at exit, because they start no threads then."""
    if (3, 12) <= version < (3, 12, 3):
        warn_once(
            _log,
            f"Python {'.'.join(map(str, version))} loses a save that is in flight when the program ends without close(): "
            "close the checkpointer (`with Checkpointer(…)` does), or use Python 3.12.3 or newer",
            "job",
        )


def _before_exit(method: Callable[[], None]) -> None:
    """Call `method` at exit while threads can still be started, if its object is alive. `atexit` would be too late.

    A forked child does not call it, because the child does not have the threads that it would wait for.
    """
    warn_of_python(sys.version_info[:3])
    reference, pid = weakref.WeakMethod(method), os.getpid()
    register = getattr(threading, "_register_atexit", None)  # not public, but concurrent.futures itself uses it
    if register is not None:
        register(lambda: os.getpid() == pid and (bound := reference()) and bound())
