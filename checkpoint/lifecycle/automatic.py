"""Retention by the trainer itself: after a commit, rank 0 lets the steps go that its policy does not keep.

Invariant: at most one collection of this process at a time, in a thread; a commit that comes meanwhile starts another.
Failure behaviour: logged as a warning; the steps stay until the next commit. Training and saving never notice.
"""

from __future__ import annotations

import threading

from headrace.checkpoint.lifecycle import collect
from headrace.checkpoint.lifecycle.inventory import Reader
from headrace.checkpoint.lifecycle.keep import Keep
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)


class Retention:
    """Applies `keep` to `run` whenever `committed` is called."""

    def __init__(self, store: Store, run: str, keep: Keep) -> None:
        self._store, self._run, self._keep = store, run, keep
        self._reader = Reader(store)
        self._lock = threading.Lock()
        self._again = False
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """A step was committed: let others go, in a thread."""
        with self._lock:
            self._again = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="headrace-retention")
                try:
                    thread.start()
                except RuntimeError as error:  # no room for a thread, or the program ends
                    _log.warning("old steps of run %s could not be removed now: %s", self._run, error)
                else:
                    self._thread = thread

    def wait(self, timeout: float) -> None:
        """Until nothing is being removed, at most `timeout` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            self._once()

    def _once(self) -> None:
        try:
            done = collect.retain(self._store, self._run, self._keep, reader=self._reader)
            if done is not None:
                steps = ", ".join(str(step.step) for step in done.tombstones)
                _log.info("removed steps %s, %s", steps or "none", format_bytes(done.bytes_freed))
        except Exception as error:
            _log.warning("old steps of run %s could not be removed now: %s", self._run, error)
