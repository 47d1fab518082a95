"""`Handle`, which `save` returns: one save, in progress or finished.

Invariant: a handle changes once from staging to staged, and once from there to committed or failed. `result` returns
only for committed saves. All methods of a handle may be called from any thread, any number of times.
Failure behaviour: `result` raises the save's error every time. A wait that times out raises `DeadlineError` and changes
nothing. In a forked child, waiting for a save of the parent raises `UsageError` immediately.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.checkpoint.format.documents import Base
from headrace.dataio.core.errors import DeadlineError, TransientError, UsageError
from headrace.dataio.core.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A committed save, as seen by this rank.

    Attributes:
        run (str), timeline (int), step (int), attempt (str): Name of the committed attempt.
        bytes_state (int): Bytes of state of this rank.
        bytes_written (int): Bytes of state that this rank wrote to packs, as they are stored. Gaps between small tensors
            are not counted.
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
    `diverged`: as in `SaveResult`. `local`: whether the save only keeps the step in the node's tier, because
    `uploads="newest"` and an earlier step is on its way to the store. It is done when the step is kept, and its `result`
    raises `LocalOnlyError`.
    """

    def __init__(self, step: int, attempt: str, *, local: bool = False) -> None:
        self.step, self.attempt, self.local, self._pid = step, attempt, local, os.getpid()
        self.stall = 0.0
        self.committed_by = "process"
        self.fetched = False
        self.diverged: tuple[str, ...] = ()
        self._copy: Copy | None = None
        self._wait_seconds = 0.0
        self._stall_known = threading.Event()
        self._staged, self._kept, self._done = threading.Event(), threading.Event(), threading.Event()
        self._ended_or_kept = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._result: SaveResult | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save is committed or failed."""
        return self._done.is_set()

    @property
    def kept(self) -> bool:
        """Whether the node's local tier has all of this rank's part, or the step is committed.

        With `uploads="all"`, this is known only after the commit.
        """
        return self._kept.is_set()

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
            raise self._timeout_error("staged", timeout)

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
            raise self._timeout_error("committed", timeout)
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

    def wait_kept(self, timeout: float | None = None) -> bool:
        """Wait until the step is kept (see `kept`), or the save has failed.

        Args:
            timeout (float | None): Seconds to wait; None waits without limit.

        Returns:
            bool: Whether the step is kept.

        Raises:
            UsageError: Called in a forked child.

        Example:
            >>> import tempfile
            >>> with Checkpointer(tempfile.mkdtemp(), run="exp42", sidecar=None) as checkpointer:
            ...     checkpointer.save(1, {"epoch": 3}).wait_kept(timeout=60)
            True
        """
        self._require_own()
        self._ended_or_kept.wait(timeout)
        return self.kept

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the save is handed over, or has failed; return False if `timeout` seconds pass first.

        Unlike `staged`, this neither helps to copy the state, nor counts as a wait of the trainer.
        """
        self._require_own()
        return self._staged.wait(timeout)

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

    def set_stall(self, seconds: float) -> None:
        """For the saver: set how long `save` blocked."""
        self.stall = seconds
        self._stall_known.set()

    def stall_within(self, timeout: float) -> float | None:
        """For the saver: how long `save` blocked; None if it has not returned within `timeout` seconds."""
        return self.stall if self._stall_known.wait(timeout) else None

    def set_staged(self, committed_by: str) -> None:
        """For the saver: record the hand-over of the save."""
        self.committed_by = committed_by
        self._staged.set()

    def set_kept(self) -> None:
        """For the saver: record that the tier has all of this rank's part."""
        self._kept.set()
        self._ended_or_kept.set()

    def set_result(self, result: SaveResult) -> None:
        """For the saver: record the commit."""
        self._release()
        self._result = result
        self._kept.set()
        self._end()

    def set_error(self, error: BaseException) -> None:
        """For the saver: record the failure."""
        self._release()
        self._error = error
        self._end()

    def _end(self) -> None:
        self._staged.set()
        self._ended_or_kept.set()
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

    def _timeout_error(self, expected: str, timeout: float | None) -> DeadlineError:
        return DeadlineError(
            f"step {self.step} is not {expected} after {timeout:g} s", hint="the save continues; wait again"
        )

    def __repr__(self) -> str:
        ended = "kept" if self.local and self.kept else "failed" if self._error else "committed"
        state = ended if self.done else "staged" if self._staged.is_set() else "staging"
        return f"Handle(step={self.step}, attempt={self.attempt!r}, {state})"


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception:
        _log.exception("a callback of a save failed")
