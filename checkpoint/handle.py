"""What `save` returns: a save on its way.

Invariant: a handle goes once from staging to staged, and once from there to committed or failed; `result` returns only what
was committed. All methods may be called from any thread, any number of times.
Failure behaviour: `result` raises the save's error, each time; a wait that reaches its limit raises `DeadlineError` and
changes nothing; in a forked child a wait for a save of its parent raises `UsageError` at once.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import Protocol

from headrace.checkpoint.format.documents import Base
from headrace.dataio.core.errors import DeadlineError, UsageError


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A committed save. Bytes are this rank's: of state, written to packs, and not written because they were stored
    already. `seconds` from the end of staging to COMMIT; `stall`: seconds that `save` held the caller; `carrier` is
    "sidecar" or "process". `wait_seconds`: how long the trainer was held later, by what was still being copied (an optimizer's
    step, `copied`, `staged`). `sliced`: the state was larger than the memory for staging it. `kept`:
    seconds after which all of it was in the node's tier, None where there is none; what is only kept is not a result.
    `encodings`: by codec, (raw, stored) bytes of what this rank wrote. `diverged`: tensors that should be the same on several
    ranks and were not.
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
    carrier: str
    wait_seconds: float = 0.0
    sliced: bool = False
    encodings: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: float | None = None
    diverged: tuple[str, ...] = ()


class Copy(Protocol):
    """The state on its way into memory that does not change."""

    @property
    def wait_seconds(self) -> float: ...
    def wait(self, timeout: float | None = None) -> None: ...


class Name(Protocol):
    """What a framework finds a step by. The saver calls `prepare` before anything of the attempt can be committed.

    It does so after all that the ranks do together, as it may fail on one of them alone. Then it calls `publish`, before
    retention removes older steps, or `withdraw` with the reason. An error of the first two fails the save.
    """

    def prepare(self, attempt: Base) -> None: ...
    def publish(self) -> None: ...
    def withdraw(self, error: BaseException) -> None: ...


class Handle:
    """One save. `stall` in seconds; `carrier` says who carries it: "process", or "sidecar" once it has taken over; `diverged` as
    in `SaveResult`."""

    def __init__(self, step: int, attempt: str) -> None:
        self.step, self.attempt, self._pid = step, attempt, os.getpid()
        self.stall = 0.0
        self.carrier = "process"
        self.fetched = False
        self.diverged: tuple[str, ...] = ()
        self._copy: Copy | None = None
        self._wait_seconds = 0.0
        self._staged, self._done = threading.Event(), threading.Event()
        self._result: SaveResult | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is committed or failed."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is on its way, and once committed. Looking is not fetching."""
        return self._error

    @property
    def wait_seconds(self) -> float:
        """Seconds that the trainer was held since `save` returned, by what was still being copied."""
        return copy.wait_seconds if (copy := self._copy) is not None else self._wait_seconds

    def copied(self, timeout: float | None = None) -> None:
        """Return once the state may change again.

        It may as soon as `save` has returned, but with lazy staging, where a step of an optimizer in the state waits by
        itself; a loop that changes the state in another way calls this first. Raises why the copy failed.
        """
        self._require_own()
        if (copy := self._copy) is not None:
            copy.wait(timeout)

    def staged(self, timeout: float | None = None) -> None:
        """Return once the state may change again, and the save no longer needs this process if a sidecar carries it.

        After the hand-over killing this process does not stop the save (with `carrier` "sidecar").
        """
        self._require_own()
        if not self.done:
            self.copied(timeout)
        if not self._staged.wait(timeout):
            raise self._late("staged", timeout)

    def result(self, timeout: float | None = None) -> SaveResult:
        """Return once committed, or raise why not. `ConflictError` says who won or who took over."""
        self._require_own()
        if not self._done.wait(timeout):
            raise self._late("committed", timeout)
        if self._error is not None:
            self.fetched = True
            raise self._error
        assert self._result is not None
        return self._result

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was committed or failed within `timeout` seconds; raises nothing but in a forked child."""
        self._require_own()
        return self._done.wait(timeout)

    def follow(self, copy: Copy) -> None:
        """For the checkpointer: this is the copy to wait for."""
        self._copy = copy

    def set_staged(self, carrier: str) -> None:
        """For the carrier: the hand-over is done."""
        self.carrier = carrier
        self._staged.set()

    def set_result(self, result: SaveResult) -> None:
        """For the carrier: committed."""
        self._let_go()
        self._result = result
        self._staged.set()
        self._done.set()

    def set_error(self, error: BaseException) -> None:
        """For the carrier: failed."""
        self._let_go()
        self._error = error
        self._staged.set()
        self._done.set()

    def _require_own(self) -> None:
        """A forked child would wait for ever: the thread that carries the save is its parent's."""
        if os.getpid() != self._pid and not self.done:
            raise UsageError(
                f"step {self.step} is saved by process {self._pid}; a forked child hears nothing of it",
                hint="wait for the save in the process that began it",
            )

    def _let_go(self) -> None:
        """Of the copy, which holds the arena."""
        self._wait_seconds, self._copy = self.wait_seconds, None

    def _late(self, what: str, timeout: float | None) -> DeadlineError:
        return DeadlineError(f"step {self.step} is not {what} after {timeout:g} s", hint="it goes on; wait again")

    def __repr__(self) -> str:
        state = (
            "failed" if self._error else "committed" if self.done else "staged" if self._staged.is_set() else "staging"
        )
        return f"Handle(step={self.step}, attempt={self.attempt!r}, {state})"
