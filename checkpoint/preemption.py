"""The last save before the machine is preempted: a signal requests it, and it must be committed within a deadline.

A signal may arrive in the middle of `optimizer.step()`, where no state is consistent. So the handler only records it,
and the training loop calls `reached(step)` between two steps. With several ranks, signals arrive at different times.
Each call therefore starts an exchange of one bit and completes the exchange of the call before. So all ranks stop at
the same step. A call waits for other ranks only until they have made the call before. If a save of that step is in
flight already, the ranks wait for it. If no rank saw its commit, all ranks save the step again.
Invariant: `outcome` is "committed" only after the step's COMMIT was seen. A failed save raises no error, because the
loop ends in any case. The exit code, the log and the report file contain the outcome. A save that is late is reported
as pending. When it ends, the outcome, the log and the report are updated.
Failure behaviour: `UsageError` outside the main thread, where Python accepts no signal handlers. A training step that
takes longer than the deadline is reported as not saved while it still runs. If it ends later, its save is still
started, but `reached` does not wait for the commit.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from headrace.checkpoint.handle import Handle
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger

SAVED, NOT_SAVED = 99, 98
"""Exit codes of a trainer that stops on request: the state is committed, or a restart uses an older step."""
DEADLINE_SECONDS = 100.0
REPORT_VARIABLE = "HEADRACE_PREEMPTION_REPORT"
_VOTE_SECONDS = 10.0
"""Extra seconds to wait, because other ranks may begin to wait for their save later."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the last save.

    Attributes:
        step (int): The step; -1 if no step ended within the deadline.
        committed (bool): Whether the step's COMMIT was seen.
        signal (str): The signal's name.
        seconds (float): Seconds since the signal.
        why (str): The reason if the step is not committed.
        pending (bool): Whether the step is not committed yet, and may still be: the save continues.
    """

    step: int
    committed: bool
    signal: str
    seconds: float
    why: str = ""
    pending: bool = False


class Saver(Protocol):
    """The methods of a checkpointer that this module calls."""

    def save(self, step: int, state: dict[str, Any], *, priority: str = "normal") -> Handle: ...
    def last_save_of(self, step: int) -> Handle | None: ...


class BitExchange:
    """An exchange of one bit per rank. `any` returns the result of the call before, which is the same on all ranks.

    It waits only for ranks that have not made the call before.
    """

    def __init__(self, world_size: int) -> None:
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._sent: tuple[dist.Work, torch.Tensor] | None = None

    def any(self, value: bool) -> bool:
        if self._group is None:
            return value
        before = False
        if self._sent is not None:
            work, result = self._sent
            work.wait()
            before = bool(result.item())
        sent = torch.tensor([int(value)])
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._sent = work, sent
        return before

    def any_now(self, value: bool, seconds: float) -> bool:
        """Whether any rank passes True in this call. It waits for all ranks."""
        if self._group is None:
            return value
        result = torch.tensor([int(value)])
        work = dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
        return bool(result.item())


class Preemption:
    """The guard that `Checkpointer.on_preemption` returns. `outcome`: the result of the last save, once it is known."""

    def __init__(
        self,
        saver: Saver,
        state: Callable[[], dict[str, Any]],
        *,
        deadline: float,
        signals: Sequence[signal.Signals],
        world_size: int,
        rank: int,
        report: str | os.PathLike[str] | None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signal handlers can only be set in the main thread", hint="call on_preemption there")
        self.outcome: Outcome | None = None
        self._saver, self._state, self._deadline, self._rank = saver, state, deadline, rank
        self._exchange, self._pid = BitExchange(world_size), os.getpid()
        named = report if report is not None else os.environ.get(REPORT_VARIABLE)
        self._report = Path(named) if named else None
        self._signal_name = ""
        self._requested_at = 0.0
        self._timer: threading.Timer | None = None
        self._previous = {number: signal.signal(number, self._on_signal) for number in signals}

    @property
    def requested(self) -> bool:
        """Whether this process has received a signal to stop."""
        return bool(self._signal_name)

    @property
    def exit_code(self) -> int:
        """For `sys.exit`: 99 if the state is committed, 98 if not, or not yet."""
        return SAVED if self.outcome is not None and self.outcome.committed else NOT_SAVED

    def reached(self, step: int) -> bool:
        """Whether to stop training now. Call it between two steps, on all ranks. It saves the state first.

        With several ranks the answer follows a signal one call later.

        Args:
            step (int): The step that was just completed.

        Returns:
            bool: True if training should end.
        """
        if self.outcome is not None and self._timer is None:
            return True
        if not self._exchange.any(self.requested):
            return False
        if not self._signal_name:
            self._signal_name, self._requested_at = "another rank's signal", time.monotonic()
        self._stop_timer()
        outcome, handle = self._save(step)
        self._finish(outcome)
        if outcome.pending and handle is not None:  # after the report of now, which it replaces
            handle.add_done_callback(lambda: self._finish(self._outcome_of(handle)))
        return True

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._stop_timer()
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._on_signal_in_child(number, frame)
            return
        if not self._signal_name:
            self._signal_name, self._requested_at = signal.Signals(number).name, time.monotonic()
            self._timer = threading.Timer(self._deadline, self._on_deadline)
            self._timer.daemon = True
            self._timer.start()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _on_signal_in_child(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in a forked child, which cannot save.

        SIGTERM ends the child, as its parent's `terminate()` expects. The parent handles other signals.
        """
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)
        elif number == signal.SIGTERM and previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _save(self, step: int) -> tuple[Outcome, Handle | None]:
        handle: Handle | None = None
        try:
            handle = self._earlier(step)
            if not self._any_committed(handle is not None and handle.done):
                handle = handle or self._saver.save(step, self._state(), priority="preemption")
                handle.result(self._remaining)
        except Exception as error:  # the loop ends in any case, and reports the error
            if handle is not None and handle.done:
                return self._outcome_of(handle), handle
            return self._failure(step, error, handle), handle
        return Outcome(step, True, self._signal_name, self._elapsed), handle

    def _failure(self, step: int, error: BaseException, handle: Handle | None) -> Outcome:
        pending = handle is not None and (not handle.done or handle.may_commit)
        return Outcome(step, False, self._signal_name, self._elapsed, str(error) or type(error).__name__, pending)

    def _outcome_of(self, handle: Handle) -> Outcome:
        """The outcome of a save that has ended."""
        if handle.error is not None:
            return self._failure(handle.step, handle.error, handle)
        return Outcome(handle.step, True, self._signal_name, self._elapsed)

    @property
    def _remaining(self) -> float:
        return max(self._deadline - self._elapsed, 0.0)

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._requested_at

    def _earlier(self, step: int) -> Handle | None:
        """An earlier save of this step, after waiting for it; None if there is none or it failed."""
        if (handle := self._saver.last_save_of(step)) is not None:
            handle.wait(self._remaining)
        return self._saver.last_save_of(step)

    def _any_committed(self, is_committed_here: bool) -> bool:
        """Whether any rank saw the step committed; it is then committed for all."""
        try:
            return self._exchange.any_now(is_committed_here, self._remaining + _VOTE_SECONDS)
        except Exception:  # a lost rank does not change a committed step
            if not is_committed_here:
                raise
            return True

    def _on_deadline(self) -> None:
        if self.outcome is None:  # otherwise a training step has just ended, and its outcome is known
            self._finish(Outcome(-1, False, self._signal_name, self._deadline, "no step ended within the deadline"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        described = outcome.signal, outcome.step, outcome.why
        if outcome.committed:
            _log.log(  # all ranks have the same outcome, so one warns
                logging.INFO if self._rank else logging.WARNING,
                "%s: step %d is committed after %.1f s; stopping",
                outcome.signal,
                outcome.step,
                outcome.seconds,
            )
        elif outcome.pending:
            _log.error("%s: step %d is NOT committed yet, but may be later: %s", *described)
        else:
            _log.error("%s: the state of step %d was NOT saved: %s", *described)
        if self._report is not None:
            self._write(outcome)

    def _write(self, outcome: Outcome) -> None:
        assert self._report is not None
        path = self._report.with_name(f"{self._report.name}.{self._rank}")
        try:
            path.with_suffix(path.suffix + ".new").write_text(json.dumps(asdict(outcome)) + "\n")
            path.with_suffix(path.suffix + ".new").replace(path)
        except OSError as error:
            _log.error("the report of the preemption could not be written: %s", error)
