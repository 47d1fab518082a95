"""What `save` returns: a save on its way.

Invariant: a handle goes once from staging to staged, and once from there to committed or failed; `result` returns only what
was committed. All methods may be called from any thread, any number of times.
Failure behaviour: `result` raises the save's error, each time; a wait that reaches its limit raises `DeadlineError` and
changes nothing.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dataio.core.errors import DeadlineError


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A committed save. Bytes are this rank's: of state, written to packs, and not written because they were stored
    already. `seconds` from the end of staging to COMMIT; `stall`: seconds that `save` held the caller; `carrier` is
    "sidecar" or "process".
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


class Handle:
    """One save. `stall` in seconds; `carrier` says who carries it: "process", or "sidecar" once it has taken over."""

    def __init__(self, step: int, attempt: str) -> None:
        self.step, self.attempt = step, attempt
        self.stall = 0.0
        self.carrier = "process"
        self.fetched = False
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

    def staged(self, timeout: float | None = None) -> None:
        """Return once the state may change again, and the save no longer needs this process if a sidecar carries it.

        The state may in fact change as soon as `save` has returned; what this waits for is the hand-over, after which
        killing this process does not stop the save (with `carrier` "sidecar").
        """
        if not self._staged.wait(timeout):
            raise self._late("staged", timeout)

    def result(self, timeout: float | None = None) -> SaveResult:
        """Return once committed, or raise why not. `ConflictError` says who won or who took over."""
        if not self._done.wait(timeout):
            raise self._late("committed", timeout)
        if self._error is not None:
            self.fetched = True
            raise self._error
        assert self._result is not None
        return self._result

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it was committed or failed within `timeout` seconds; raises nothing."""
        return self._done.wait(timeout)

    def set_staged(self, carrier: str) -> None:
        """For the carrier: the hand-over is done."""
        self.carrier = carrier
        self._staged.set()

    def set_result(self, result: SaveResult) -> None:
        """For the carrier: committed."""
        self._result = result
        self._staged.set()
        self._done.set()

    def set_error(self, error: BaseException) -> None:
        """For the carrier: failed."""
        self._error = error
        self._staged.set()
        self._done.set()

    def _late(self, what: str, timeout: float | None) -> DeadlineError:
        return DeadlineError(f"step {self.step} is not {what} after {timeout:g} s", hint="it goes on; wait again")

    def __repr__(self) -> str:
        state = (
            "failed" if self._error else "committed" if self.done else "staged" if self._staged.is_set() else "staging"
        )
        return f"Handle(step={self.step}, attempt={self.attempt!r}, {state})"
