"""The trainer's side of the reports: meters of a loader and a checkpointer.

Purpose: measure how long the trainer waited for data and how long `save` stalled it, with two clock readings per batch.
Invariants: a report has the totals up to now, including a wait in progress. A meter does not refer to its loader or
checkpointer. It sends nothing itself: the connection calls `report` once a second.
Failure behaviour: it raises no errors. Without a daemon, the report is not requested.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock

if TYPE_CHECKING:  # imported where a daemon asks
    from headrace.dataio.sidecar import protocol as m

_NAME = 64


def group_name(environ: Mapping[str, str] = os.environ) -> str:
    """The job's name for a process without a run: `$HEADRACE_JOB`, the Slurm job, or the process group."""
    if named := environ.get("HEADRACE_JOB"):
        return named[:_NAME]
    if slurm := environ.get("SLURM_JOB_ID"):
        return f"slurm {slurm}"[:_NAME]
    return group_of(0)


def group_of(process: int) -> str:
    """The name of a process's group. A process that has ended or is in another pid namespace gets a name of its own."""
    try:
        return f"process group {os.getpgid(process)}"
    except OSError:
        return f"process {process}"


class LoaderMeter:
    """Measures one loader. Thread-safe.

    The iterating thread calls `asked` when it requests a batch, and `got` when it has the batch or the request fails.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._source, self._group = random.getrandbits(62), group_name()
        self._lock = threading.Lock()
        self._began: float | None = None
        self._waiting_since: float | None = None
        self._last_step = 0.0
        self._wait = 0.0
        self._steps = self._samples = self._read = 0

    def asked(self) -> None:
        """The trainer begins to wait for a batch."""
        with self._lock:
            self._waiting_since = self._clock.monotonic()
            if self._began is None:
                self._began = self._last_step = self._waiting_since

    def got(self, samples: int, *, steps: int = 1) -> float:
        """The trainer continues with `samples` samples, or with `steps=0` after an error; returns the wait."""
        with self._lock:
            now = self._clock.monotonic()
            waited = now - self._waiting_since if self._waiting_since is not None else 0.0
            self._waiting_since, self._wait = None, self._wait + waited
            if steps:
                self._last_step, self._steps, self._samples = now, self._steps + steps, self._samples + samples
            return waited

    def read(self, size: int) -> None:
        """Count `size` delivered bytes."""
        with self._lock:
            self._read += size

    def report(self) -> m.Report | None:
        """The totals up to now; None before the first batch was requested."""
        from headrace.dataio.sidecar import protocol as m

        with self._lock:
            if self._began is None:
                return None
            now = self._clock.monotonic()
            waiting = now - self._waiting_since if self._waiting_since is not None else 0.0
            return m.Report(
                self._source,
                self._group,
                wall=now - self._began,
                wait=self._wait + waiting,
                idle=now - self._last_step,
                steps=self._steps,
                samples=self._samples,
                read=self._read,
            )


class SaveMeter:
    """Measures one checkpointer."""

    def __init__(self, run: str) -> None:
        self._run = run[:_NAME]
        self._source, self._group = random.getrandbits(62), group_name()
        self._lock = threading.Lock()
        self._stall, self._saves = 0.0, 0
        self._step: int | None = None
        self._committed = 0.0

    def stalled(self, seconds: float) -> None:
        """Count a call of `save`, which stalled the trainer for `seconds`."""
        with self._lock:
            self._stall, self._saves = self._stall + seconds, self._saves + 1

    def committed(self, step: int, when: float, waited: float = 0.0) -> None:
        """Record that the step was committed at the Unix time `when`.

        `waited`: seconds for which the step's copy stalled the trainer after `save` had returned.
        """
        with self._lock:
            self._step, self._committed = step, max(when, 0.0)
            self._stall += waited

    def report(self) -> m.Report | None:
        """The totals up to now."""
        from headrace.dataio.sidecar import protocol as m

        with self._lock:
            return m.Report(
                self._source,
                self._group,
                self._run,
                stall=self._stall,
                saves=self._saves,
                step=self._step,
                committed=self._committed,
            )
